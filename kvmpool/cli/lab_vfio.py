"""What `kvmpool lab` does where the lab is the VFIO one: a host with an IOMMU, cards that are PCI devices."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kvmpool.errors import NotFound, Refused
from kvmpool.lab import guests, vfio_cards
from kvmpool.lab.folder import Folder
from kvmpool.lab.vfio_cards import Fault
from kvmpool.lab.vfio_pool import VfioLab

FORMS = vfio_cards.FORMS
_FIRST_BUS = 2  # of a guest's cards; 1 is its network card's


def lab_in(folder: Path) -> VfioLab | None:
    """The VFIO lab in `folder`; None where another lab or none is."""
    chosen = Folder(folder.absolute())
    try:
        return VfioLab(chosen) if chosen.read().vfio else None
    except NotFound:
        return None


def up(folder: Path) -> None:
    VfioLab(Folder(folder.absolute())).up(click.echo)
    click.echo("Next: kvmpool lab exec -- kvmpool card list, or kvmpool lab guest vm0 --card gpu1 --start")


def execute(lab: VfioLab, words: Sequence[str], timeout_s: float) -> None:
    """Print what it printed, once it has ended, and end with its exit code."""
    done = lab.host().run(*words, timeout_s=timeout_s, check=False)
    click.echo(done.stdout, nl=False)
    click.echo(done.stderr, nl=False, err=True)
    sys.exit(done.returncode)


def fault(lab: VfioLab, card: str, words: str) -> None:
    chosen, what = vfio_cards.card(card), Fault.parse(words)
    lab.host().inject(chosen, what)


def guest(lab: VfioLab, name: str, cards: Sequence[str], deaf: bool, starts: bool) -> None:
    """Define (and start) a guest without an operating system."""
    given = tuple((vfio_cards.card(card).address, _FIRST_BUS + number) for number, card in enumerate(cards))
    spec = guests.GuestSpec(name, 1, memory_mib=16, cards=given)
    lab.define(spec, deaf=deaf)
    if starts:
        for address, _ in given:
            lab.host().give(address)
        lab.host().virsh("start", name)
    click.echo(f"{name} {'is running' if starts else 'defined'}. Next: kvmpool lab exec -- cat {spec.console}")


def status(lab: VfioLab) -> dict[str, Any]:
    """What `kvmpool lab status` shows of it."""
    seen = lab.status()
    return {
        "folder": str(lab.folder.path),
        "host": "up" if seen.alive else "down",
        "daemons": {name: "running" if alive else "down" for name, alive in seen.daemons.items()},
        "cards": [
            {"name": card.name, "address": card.address, "ids": card.ids, "driver": seen.drivers.get(card.address, "")}
            for card in vfio_cards.CARDS
        ],
        "domains": dict(seen.domains),
    }


def refuse(what: str) -> Refused:
    return Refused(f"guests of the VFIO lab have no operating system: no `{what}` in one. Next: kvmpool lab exec")

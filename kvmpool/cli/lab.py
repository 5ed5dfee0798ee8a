"""`kvmpool lab`: a real pool on this machine alone, without a GPU: namespaces, libvirtd, soft cards, QEMU guests.

With --vfio its host is a machine of its own instead, with an IOMMU and PCI cards to pass through (lab_vfio.py).

Needs root. Nothing of it touches the machine's own libvirt, network or files.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvmpool.cli import lab_vfio
from kvmpool.cli.output import output_option, paint, print_fields, print_value
from kvmpool.errors import Denied, Refused
from kvmpool.lab import guests
from kvmpool.lab.folder import Folder, default_folder
from kvmpool.lab.pool import SOCKET, Lab, Status
from kvmpool.lab.story import tell
from kvmpool.lab.vfio_pool import VfioLab
from kvmpool.native import native
from kvmpool.softgpu.faults import FORMS

F = TypeVar("F", bound=Callable[..., Any])


def _folder_option(function: F, name: str = "lab") -> F:
    return click.option(
        "--dir",
        "folder",
        type=click.Path(path_type=Path, file_okay=False),
        default=lambda: default_folder(name),
        show_default=f"/run/kvmpool-lab/{name}",
        help="The lab's folder; another folder is another lab.",
    )(function)


def _demo_folder_option(function: F) -> F:
    """Not the lab's: the demo takes down whatever an earlier one left, and never somebody's lab."""
    return _folder_option(function, "demo")


def _lab(folder: Path) -> Lab:
    _require_root()
    return Lab(Folder(folder.absolute()))


def _vfio_lab(folder: Path) -> VfioLab | None:
    """The lab in `folder` where it is one with an IOMMU."""
    _require_root()
    return lab_vfio.lab_in(folder)


def _require_root() -> None:
    if os.geteuid() != 0:
        raise Denied("the lab needs root, for namespaces and libvirtd. Next: sudo kvmpool lab ...")


@click.group()
def lab() -> None:
    """A real pool on this machine alone, without a GPU."""


@lab.command()
@_folder_option
@click.option("--vfio", is_flag=True, help="A host with an IOMMU and PCI cards, for passthrough; up to a minute.")
def up(folder: Path, vfio: bool) -> None:
    """Start the lab: a host with libvirtd and kvmpoold, and two soft cards."""
    chosen = _lab(folder)
    if vfio:
        lab_vfio.up(folder)
        return
    host = chosen.up(click.echo)
    click.echo(f"Next: kvmpool lab guest vm0, then kvmpool lab exec -- virsh start vm0. API: {host.outside(SOCKET)}")


@lab.command()
@_folder_option
def down(folder: Path) -> None:
    """Remove everything of the lab, whatever state it is in."""
    click.echo("the lab is gone" if _lab(folder).down() else f"no lab in {folder}")


@lab.command()
@_folder_option
def reboot(folder: Path) -> None:
    """Take the power of the VFIO lab's host away and boot it again; only what is on its disk is still there."""
    if (chosen := _vfio_lab(folder)) is None:
        raise Refused(f"no VFIO lab in {folder}: only its host can reboot. Next: kvmpool lab up --vfio")
    chosen.reboot().start_libvirt()
    chosen.start_kvmpoold()
    click.echo("the host has rebooted and runs libvirtd and kvmpoold")


@lab.command()
@_folder_option
@output_option
def status(folder: Path, output: str) -> None:
    """The lab's host, daemons, cards and domains. The pool itself: kvmpool lab exec -- kvmpool status."""
    vfio = _vfio_lab(folder)
    body = lab_vfio.status(vfio) if vfio else _status_body(_lab(folder).status())
    if output != "table":
        print_value(body, output, lambda b: [b["folder"]])
        return
    fields = [("Folder", body["folder"]), ("Host", body["host"])]
    fields += [(name, paint(state)) for name, state in body["daemons"].items()]
    fields += [(f"Card {card.get('name', card.get('index'))}", _card_line(card)) for card in body["cards"]]
    fields += list(body["domains"].items())
    print_fields(fields)


def _status_body(seen: Status) -> dict[str, Any]:
    return {
        "folder": str(seen.folder),
        "host": "up" if seen.host_alive else "down",
        "daemons": {name: "running" if alive else "down" for name, alive in seen.daemons.items()},
        "cards": [
            {
                "index": card.spec.index,
                "address": card.spec.pci_address,
                "faults": [name for name in ("lost", "ecc", "hang", "slow") if getattr(card, name)],
                "processes": len(card.processes),
                "memory_used_mib": card.used_bytes >> 20,
            }
            for card in seen.cards
        ],
        "domains": dict(seen.domains),
    }


def _card_line(card: dict[str, Any]) -> str:
    if "ids" in card:
        return f"{card['address']}, {card['ids']}, {card['driver'] or 'no driver'}"
    faults = ", ".join(card["faults"]) or "no fault"
    return f"{card['address']}, {faults}, {card['processes']} processes, {card['memory_used_mib']} MiB used"


@lab.command()
@_folder_option
@click.argument("card")
@click.argument("words", nargs=-1, required=True, metavar="FAULT")
def fault(folder: Path, card: str, words: tuple[str, ...]) -> None:
    """Let a fault happen to a CARD (its index, uuid or PCI address; in the VFIO lab its name or address)."""
    if (vfio := _vfio_lab(folder)) is not None:
        lab_vfio.fault(vfio, card, " ".join(words))
    else:
        _lab(folder).fault(card, " ".join(words))
    click.echo(f"card {card}: {' '.join(words)}")


fault.help = f"{fault.help}\n\nFAULT: {FORMS}\n\nIn the VFIO lab: {lab_vfio.FORMS}"


@lab.command()
@_folder_option
@click.argument("name")
@click.option("--memory", default=1024, show_default=True, help="MiB of GPU memory that it claims; 0: no claim.")
@click.option("--number", default=1, show_default=True, type=click.IntRange(1, 99), help="Address: 10.77.0.100+N.")
@click.option("--card", "cards", multiple=True, help="In the VFIO lab: a card to pass through, by name or address.")
@click.option("--deaf", is_flag=True, help="In the VFIO lab: a guest that never answers a removal request.")
@click.option("--start", "starts", is_flag=True, help="Start it and wait until it has booted.")
def guest(folder: Path, name: str, memory: int, number: int, cards: tuple[str, ...], deaf: bool, starts: bool) -> None:
    """Define a Linux guest with the example programs and a vGPU claim; in the VFIO lab one that is only firmware."""
    if (vfio := _vfio_lab(folder)) is not None:
        lab_vfio.guest(vfio, name, cards, deaf, starts)
        return
    if cards or deaf:
        raise Refused("--card and --deaf are for the VFIO lab. Next: kvmpool lab up --vfio")
    chosen = _lab(folder)
    host = chosen.host()
    claims = (f'name="gpu0" mode="vgpu" memory="{memory}"',) if memory else ()
    spec = guests.GuestSpec(name, number, claims)
    chosen.define(host, spec)
    if starts:
        host.virsh("start", name)
        chosen.wait_for_guest(host, spec)
    next_ = f"run {name} -- deviceQuery" if starts else f"exec -- virsh start {name}"
    click.echo(f"{name} {'is running' if starts else 'defined'}. Next: kvmpool lab {next_}")


@lab.command(context_settings={"ignore_unknown_options": True})
@_folder_option
@click.option("--timeout", "timeout_s", default=60.0, show_default=True, help="Seconds to wait for its end.")
@click.argument("name")
@click.argument("words", nargs=-1, required=True, metavar="PROGRAM [ARGUMENT]...")
def run(folder: Path, timeout_s: float, name: str, words: tuple[str, ...]) -> None:
    """Run a program in the guest NAME: deviceQuery, vectorAdd, matrixMul, loop, or anything of busybox."""
    if _vfio_lab(folder) is not None:
        raise lab_vfio.refuse("kvmpool lab run")
    ran = _lab(folder).run(name, guests.command(words), timeout_s)
    click.echo(ran.output, nl=False)
    sys.exit(ran.code)


@lab.command("exec", context_settings={"ignore_unknown_options": True})
@_folder_option
@click.option("--timeout", "timeout_s", default=600.0, show_default=True, help="In the VFIO lab: seconds for its end.")
@click.argument("words", nargs=-1, required=True, metavar="COMMAND [ARGUMENT]...")
def exec_(folder: Path, timeout_s: float, words: tuple[str, ...]) -> None:
    """Run a command inside the lab's host, e.g. `kvmpool lab exec -- virsh list`; not in the VFIO lab: `bash`."""
    if (vfio := _vfio_lab(folder)) is not None:
        lab_vfio.execute(vfio, words, timeout_s)
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"  # so that `kvmpool` is found in it
    found = str(native("softgpu-cuda").parent)  # the soft cards' libraries, where a driver's would be
    environment = {"TERM": os.environ.get("TERM", "dumb"), "PATH": path, "LD_LIBRARY_PATH": found}
    command = _lab(folder).host().command(words, environment)
    sys.stdout.flush()
    os.execvp(command[0], command)


@lab.command()
@click.option("--keep", is_flag=True, help="Leave the lab running afterwards.")
@_demo_folder_option
def demo(folder: Path, keep: bool) -> None:
    """The story: a guest gets a vGPU, its card dies, the guest keeps its endpoint and computes on."""
    tell(_lab(folder), click.echo, keep=keep)
    if keep:
        click.echo(f"Next: kvmpool lab status --dir {shlex.quote(str(folder))}")

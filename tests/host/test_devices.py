"""Joining with modes, and leaving: drivers and overrides are as they were, and so are the files."""

from __future__ import annotations

import asyncio
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmpool.core.model import Mode
from kvmpool.daemon.clock import HostClock
from kvmpool.daemon.config import load
from kvmpool.daemon.switches import parsed
from kvmpool.errors import NotFound, Refused
from kvmpool.host import devices, install
from kvmpool.lab.fake_bus import make_process
from tests.cli.served import kvmpool
from tests.device.switching import AUDIO, TWIN, A, Bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    made.state = made.root / "var/lib/kvmpool/modes"
    with made.bus:
        yield made


def files(root: Path) -> dict[str, bytes | str]:
    """Every file and link under etc and sys, but the journal's own folder."""
    found: dict[str, bytes | str] = {}
    for top in ("etc", "sys"):
        for path in sorted((root / top).rglob("*")):
            name = str(path.relative_to(root))
            if path.is_symlink():
                found[name] = os.readlink(path)
            elif path.is_file():
                found[name] = path.read_bytes()
    return found


def test_leaving_restores_drivers_overrides_and_files_byte_for_byte(bench: Bench) -> None:
    (bench.root / "etc/libvirt").mkdir(parents=True)
    before, everything = files(bench.root), bench.everything()
    assert kvmpool("host", "join", "--root", str(bench.root), "--mode", f"{A}=passthrough").code == 0
    boot = HostClock().boot_id()
    for mode in (Mode.PASSTHROUGH, Mode.OFF):
        asyncio.run(bench.modes(boot=boot).switch(bench.card(), mode))
    asyncio.run(bench.modes(boot=boot).switch(bench.card(TWIN), Mode.PASSTHROUGH))
    dry = kvmpool("host", "leave", "--root", str(bench.root), "--dry-run")
    assert f"would give {A} back to nvidia" in dry.out
    left = kvmpool("host", "leave", "--root", str(bench.root))
    assert left.code == 0, left.err
    assert f"{AUDIO} is on snd_hda_intel, as before kvmpool" in left.out
    bench.bus.settle()
    assert bench.everything() == everything
    assert files(bench.root) == before
    assert kvmpool("host", "leave", "--root", str(bench.root)).out == "nothing to do: this host has not joined\n"


def test_leaving_is_refused_while_a_domain_has_a_card_and_nothing_is_removed(bench: Bench) -> None:
    kvmpool("host", "join", "--root", str(bench.root))
    asyncio.run(bench.modes(boot=HostClock().boot_id()).switch(bench.card(), Mode.PASSTHROUGH))
    make_process(bench.root, 99, "qemu-system-x86", "/dev/vfio/41", cmdline="qemu -name guest=vm7")
    left = kvmpool("host", "leave", "--root", str(bench.root))
    assert left.code == 4
    assert "domain vm7" in left.err
    assert (bench.root / install.HOOK).exists()


def test_the_modes_of_a_join_are_kvmpoolds_configuration(bench: Bench) -> None:
    kvmpool("host", "join", "--root", str(bench.root), "--mode", f"{A}=passthrough", "--mode", f"{TWIN}=off")
    file = bench.root / install.MODES
    assert tomllib.loads(file.read_text()) == {"cards": {"modes": [f"{A}=passthrough", f"{TWIN}=off"]}}
    config = load(None, file.parent)
    modes = parsed(config.cards.modes, config.cards.default_mode)
    assert modes.by_address == {A: Mode.PASSTHROUGH, TWIN: Mode.OFF}


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("0000:99:00.0=passthrough",), NotFound),
        ((f"{A}=any",), Refused),
        ((f"{A}",), Refused),
        ((f"{A}=off", f"{A}=vgpu"), Refused),
    ],
)
def test_a_mode_that_makes_no_sense_is_refused(bench: Bench, words: tuple[str, ...], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        devices.checked_modes(bench.root, words)

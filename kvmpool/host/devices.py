"""Gives back what kvmpool has changed of this host's devices and domains; checks modes that a host is to begin with.

What a function of the bus was before (driver, override, d3cold_allowed) is in the journal of the mode engine.
This module does not know kvmpoold: whoever calls it has made sure that no daemon switches modes meanwhile.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

from kvmpool.daemon.clock import HostClock
from kvmpool.daemon.config import DEFAULT_FILE, Config, load
from kvmpool.device import pci
from kvmpool.device.switch_journal import Journal
from kvmpool.device.sysroot import Sysroot
from kvmpool.device.topology import DEVICES
from kvmpool.device.vfio import VfioModes
from kvmpool.errors import NotFound, Refused
from kvmpool.virt.originals import Originals
from kvmpool.virt.originals import give_back as give_definitions_back

_MODE = re.compile(r"(?P<address>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])=(?P<mode>passthrough|vgpu|off)")


def config_of(root: Path, named: Path | None = None) -> Config:
    """The configuration of the host under `root`; `named`: its file, where it is not the default. ConfigInvalid."""
    if named is not None:
        return load(named)
    file = root / str(DEFAULT_FILE).lstrip("/")
    return load(file if file.exists() else None, file.parent / "conf.d")


def changed(root: Path, named: Path | None = None) -> list[str]:
    """One line for each function of the bus, and each domain, that is to be given back."""
    config = config_of(root, named)
    folder = root / str(config.modes_dir).lstrip("/")
    journal = Journal(folder)
    lines = [f"give {each.address} back to {each.driver or 'no driver'}" for each in journal.origins()]
    return lines + [f"take kvmpool out of domain {uuid}" for uuid in _originals(root, config).names()]


def give_back(root: Path, named: Path | None = None) -> tuple[str, ...]:
    """Do it, a line each, devices first.

    Raises CardBusy, SwitchFailed, CardWedged, Refused, Unreachable at the first that cannot be given back.
    """
    config = config_of(root, named)
    return (*_give_devices_back(root, config), *give_definitions_back(config.libvirt.uri, _originals(root, config)))


def _originals(root: Path, config: Config) -> Originals:
    return Originals(root / str(config.originals_dir).lstrip("/"))


def _give_devices_back(root: Path, config: Config) -> tuple[str, ...]:
    tree = root / config.device.sysroot.lstrip("/")
    folder = root / str(config.modes_dir).lstrip("/")

    def cards() -> frozenset[str]:
        return frozenset(card.address for card in pci.cards(Sysroot(tree), config.cards.match) or ())

    async def act() -> tuple[str, ...]:
        return await VfioModes(tree, folder, HostClock().boot_id(), cards).give_back()

    return asyncio.run(act())


def checked_modes(root: Path, words: Sequence[str]) -> tuple[str, ...]:
    """`ADDRESS=MODE` as a person typed them. Raises Refused, NotFound where the bus is there and the device is not."""
    found: list[str] = []
    for word in words:
        parts = _MODE.fullmatch(word.lower())
        if parts is None:
            raise Refused(f"--mode {word}: must be ADDRESS=MODE, for example 0000:41:00.0=passthrough (or vgpu, off)")
        names = Sysroot(root).names(DEVICES)
        if names is not None and parts["address"] not in names:
            raise NotFound(f"--mode {word}: no device has this address. Next: lspci -D")
        if any(each.startswith(f"{parts['address']}=") for each in found):
            raise Refused(f"--mode {word}: this address was given a mode already")
        found.append(word.lower())
    return tuple(found)

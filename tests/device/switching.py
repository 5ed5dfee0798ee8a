"""A fake bus with two cards, one of them with an audio function, and the mode engine over it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kvmpool.core.model import Card, CardId, HostName, Mode
from kvmpool.device import pci
from kvmpool.device.sysroot import Sysroot
from kvmpool.device.topology import unit_of
from kvmpool.device.vfio import VfioModes
from kvmpool.lab.fake_bus import FakeBus, FakeFunction, bind, make, make_driver, make_process

A, AUDIO, TWIN = "0000:41:00.0", "0000:41:00.1", "0000:42:00.0"
PORT = "0000:00:01.0"
NVIDIA = ("10de:*",)
CARD = FakeFunction(A, group="41", ports=(PORT,))
SOUND = FakeFunction(AUDIO, device="22ba", class_code="040300", group="41", driver="snd_hda_intel", ports=(PORT,))
OTHER = FakeFunction(TWIN, group="42", ports=("0000:00:02.0",))


class Bench:
    """`modes` is a new process over what is left; `state` of the tree is what a test compares."""

    def __init__(self, folder: Path, *functions: FakeFunction) -> None:
        self.root = folder / "root"
        self.state = folder / "state"
        make(self.root, functions or (CARD, SOUND, OTHER))
        make_process(self.root, 1, "systemd", "/dev/null")
        self.bus = FakeBus(self.root)

    def modes(self, checkpoint: Callable[[str], None] = lambda _: None, *, boot: str = "boot-1") -> VfioModes:
        return VfioModes(
            self.root,
            self.state,
            boot,
            lambda: frozenset(card.address for card in pci.cards(Sysroot(self.root), NVIDIA) or ()),
            unbind_deadline_s=3.0,
            reset_deadline_s=3.0,
            settle_s=5.0,  # the fake bus is a thread, and other tests run beside it
            checkpoint=checkpoint,
        )

    def card(self, address: str = A) -> Card:
        cards = frozenset(card.address for card in pci.cards(Sysroot(self.root), NVIDIA) or ())
        facts = unit_of(Sysroot(self.root), address, cards).facts
        return Card(CardId(f"GPU-{address}"), HostName("h0"), address, "Soft H100", 8192, Mode.VGPU, pci=facts)

    def drivers(self) -> dict[str, str]:
        """address -> the driver of its link, which the driver's own folder must agree with."""
        found = {}
        for folder in sorted((self.root / "sys/bus/pci/devices").iterdir()):
            link = folder / "driver"
            found[folder.name] = Path(os.readlink(link)).name if link.is_symlink() else ""
            having = [each.parent.name for each in (self.root / "sys/bus/pci/drivers").glob(f"*/{folder.name}")]
            assert having == ([found[folder.name]] if found[folder.name] else []), "a card on more than one driver"
        return found

    def overrides(self) -> dict[str, str]:
        folders = sorted((self.root / "sys/bus/pci/devices").iterdir())
        texts = {folder.name: (folder / "driver_override").read_text().strip() for folder in folders}
        return {name: "" if text == "(null)" else text for name, text in texts.items()}

    def nodes(self) -> list[str]:
        return sorted(os.listdir(self.root / "dev/vfio"))

    def everything(self) -> tuple[object, ...]:
        d3cold = {p.parent.name: p.read_text().strip() for p in self.root.glob("sys/bus/pci/devices/*/d3cold_allowed")}
        return self.drivers(), self.overrides(), self.nodes(), d3cold


__all__ = ["A", "AUDIO", "CARD", "OTHER", "PORT", "SOUND", "TWIN", "Bench", "bind", "make_driver"]

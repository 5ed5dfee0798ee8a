"""Notices what the bus counts against a card: AER errors of its functions, and a link that has become narrower.

The counters are the kernel's own and only grow; what was there at the first look is of the past and says nothing.
A link's speed falls when a card rests and says nothing either; its width does not.
Source: kernel, ABI/testing/sysfs-bus-pci-devices-aer_stats, ABI/testing/sysfs-bus-pci (current_link_width).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvmpool.core.model import CardId, CardSeen
from kvmpool.device.sysroot import Sysroot
from kvmpool.device.topology import DEVICES

_TOTALS = ("TOTAL_ERR_FATAL", "TOTAL_ERR_NONFATAL")
Found = tuple[CardId, bool, str]  # the card, whether it is fatal, a sentence


@dataclass(slots=True)
class BusErrors:
    """What was counted at the last look."""

    sysroot: Sysroot
    _counts: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)  # (address, file) -> error -> times
    _widths: dict[str, int] = field(default_factory=dict)

    def look(self, cards: Iterable[CardSeen]) -> list[Found]:
        """What is new, card by card."""
        found: list[Found] = []
        for card in cards:
            for address in self._functions(card):
                for fatal, name in ((True, "aer_dev_fatal"), (False, "aer_dev_nonfatal")):
                    new = self._new_errors(address, name)
                    if new:
                        kind = "fatal" if fatal else "non-fatal"
                        found.append((card.id, fatal, f"AER: {address} had {kind} errors: {new}"))
            narrower = self._narrower(card.address)
            if narrower:
                found.append((card.id, False, narrower))
        return found

    def _functions(self, card: CardSeen) -> list[str]:
        """Its own alone: a unit of several cards shares a group, not its errors."""
        slot = card.address.rpartition(".")[0]
        return [address for address in card.pci.functions if address.rpartition(".")[0] == slot] or [card.address]

    def _new_errors(self, address: str, name: str) -> str:
        text = self.sysroot.bytes_of(f"{DEVICES}/{address}/{name}")
        if text is None:
            return ""  # no AER, or the card has left: the inventory says that
        now = _counts(text.decode("ascii", "replace"))
        before = self._counts.get((address, name))
        self._counts[address, name] = now
        if before is None:
            return ""
        grown = {error: count - before.get(error, 0) for error, count in now.items() if count > before.get(error, 0)}
        named = [f"{error} x{count}" if count > 1 else error for error, count in grown.items() if error not in _TOTALS]
        return ", ".join(named) or ("not named" if grown else "")

    def _narrower(self, address: str) -> str:
        width = self.sysroot.number(f"{DEVICES}/{address}/current_link_width")
        if width is None or not 0 < width <= 32:
            return ""  # 0 and 63: the link is down, or it is no PCIe device; a lost card is noticed by its header
        before = self._widths.get(address, 0)
        self._widths[address] = width
        return f"its link is x{width} wide, it was x{before}" if width < before else ""


def _counts(text: str) -> dict[str, int]:
    found = {}
    for line in text.splitlines():
        name, _, count = line.rpartition(" ")
        if name and count.isdigit():
            found[name] = int(count)
    return found

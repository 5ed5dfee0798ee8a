"""The cards as the PCI bus shows them in sysfs: which addresses are cards, and whether a card still answers there.

Which functions count as cards is configured by patterns, `vendor:device` or `vendor:device/class`, in hex, * for any:
    10de:*          display controllers (class 03) of a vendor
    1b36:0010       this very device, whatever its class
    *:*/0302        a class, or the beginning of one
A function beside a lower one of its slot that counts is that card's sibling (its audio function), never a card.
Source: kernel, Documentation/PCI/sysfs-pci.rst. This module does not know any driver.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from kvmpool.core.model import Mode, PciFacts
from kvmpool.device.sysroot import Sysroot
from kvmpool.device.topology import DEVICES, is_virtual, mode_of, siblings, unit_of

HEADER_BYTES = 64
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
# PCI base class 03: VGA (00), XGA (01) and 3D (02) controllers. A card's audio function (0403) is no card.
_DISPLAY = ("0300", "0301", "0302")


@dataclass(frozen=True, slots=True)
class PciCard:
    """A card's PCI function. `fault`: what could not be read; then the other values are not to be believed."""

    address: str
    numa_node: int = -1
    driver: str = ""
    facts: PciFacts = field(default_factory=PciFacts)
    fault: str = ""

    @property
    def mode(self) -> Mode:
        """The one it is in, by its driver."""
        return mode_of(self.driver)


class BusState(Enum):
    """What a look at a card's config space says."""

    ANSWERS = "answers"
    ALL_ONES = "its config space reads all ones"
    GONE = "its address has left the bus"
    UNREADABLE = "its config space cannot be read"


def normal_address(text: str) -> str | None:
    """`0000:41:00.0` of any spelling that the kernel, NVML (`00000000:41:00.0`) or the driver's log use; else None."""
    found = re.fullmatch(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.([0-7]))?", text)
    if not found:
        return None
    return f"{int(found[1], 16):04x}:{found[2].lower()}:{found[3].lower()}.{found[4] or '0'}"


def cards(sysroot: Sysroot, match: Sequence[str]) -> tuple[PciCard, ...] | None:
    """All functions that `match` and are no siblings, by address; None where the bus cannot be read."""
    names = sysroot.names(DEVICES)
    if names is None:
        return None
    found = [card for name in names if _ADDRESS.fullmatch(name) and (card := _card(sysroot, name, match))]
    lone = siblings([card.address for card in found if not is_virtual(sysroot, card.address)])
    found = [card for card in found if card.address not in lone]
    addresses = frozenset(card.address for card in found)
    return tuple(
        card if card.fault else replace(card, facts=unit_of(sysroot, card.address, addresses).facts) for card in found
    )


def _card(sysroot: Sysroot, address: str, match: Sequence[str]) -> PciCard | None:
    """None for what is no card of ours. A function whose ids cannot be read is ours only when its class says so."""
    folder = f"{DEVICES}/{address}"
    class_code = sysroot.number(f"{folder}/class")
    vendor, device = sysroot.number(f"{folder}/vendor"), sysroot.number(f"{folder}/device")
    if class_code is None:
        return None
    kind = f"{class_code >> 8:04x}"
    if vendor is None or device is None or not (0 < vendor < 0xFFFF and 0 <= device <= 0xFFFF):
        known = kind in _DISPLAY
        return PciCard(address, fault="sysfs does not say its vendor and device") if known else None
    if not _matches(f"{vendor:04x}", f"{device:04x}", kind, match):
        return None
    numa = sysroot.number(f"{folder}/numa_node")
    return PciCard(
        address=address,
        numa_node=numa if numa is not None and 0 <= numa < 1024 else -1,
        driver=sysroot.link_name(f"{folder}/driver") or "",
    )


def _matches(vendor: str, device: str, kind: str, match: Sequence[str]) -> bool:
    for pattern in match:
        ids, _, want_kind = pattern.lower().partition("/")
        want_vendor, _, want_device = ids.partition(":")
        if want_vendor not in ("*", vendor) or want_device not in ("*", device):
            continue
        if kind.startswith(want_kind) if want_kind else "*" not in ids or kind in _DISPLAY:
            return True
    return False


def bus_state(sysroot: Sysroot, address: str) -> BusState:
    """One read of the card's 64-byte header.

    Only a whole header of ones is a loss: an SR-IOV virtual function reads ffff for vendor and device and is well.
    """
    header = sysroot.bytes_of(f"{DEVICES}/{address}/config", HEADER_BYTES)
    if header is None or len(header) < HEADER_BYTES:
        gone = sysroot.names(DEVICES) is not None and not sysroot.exists(f"{DEVICES}/{address}")
        return BusState.GONE if gone else BusState.UNREADABLE
    return BusState.ALL_ONES if header == b"\xff" * HEADER_BYTES else BusState.ANSWERS

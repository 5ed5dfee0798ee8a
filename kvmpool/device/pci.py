"""The cards as the PCI bus shows them in sysfs: which addresses are GPUs, and whether a card still answers there.

Source: kernel, Documentation/PCI/sysfs-pci.rst. This module does not know any driver.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvmpool.device.sysroot import Sysroot

DEVICES = "sys/bus/pci/devices"
HEADER_BYTES = 64
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
# PCI base class 03: VGA (00), XGA (01) and 3D (02) controllers. A card's audio function (0403) is no card.
_CLASSES = (0x0300, 0x0301, 0x0302)


@dataclass(frozen=True, slots=True)
class PciCard:
    """A GPU's PCI function. `fault`: what could not be read; then the other values are not to be believed."""

    address: str
    vendor: int = 0
    device: int = 0
    subsystem: tuple[int, int] = (0, 0)
    numa_node: int = -1
    driver: str = ""
    iommu_group: str = ""
    fault: str = ""

    @property
    def ids(self) -> str:
        """`10de:2330/10de:16c1`: what stays the same when the bus is numbered anew."""
        return f"{self.vendor:04x}:{self.device:04x}/{self.subsystem[0]:04x}:{self.subsystem[1]:04x}"


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
    """All GPUs whose `vendor:device` is in `match` (`10de:*`), by address; None where the bus cannot be read."""
    names = sysroot.names(DEVICES)
    if names is None:
        return None
    found = (_card(sysroot, name, match) for name in names if _ADDRESS.fullmatch(name))
    return tuple(card for card in found if card is not None)


def _card(sysroot: Sysroot, address: str, match: Sequence[str]) -> PciCard | None:
    """None for what is no card of ours. A function whose ids cannot be read is ours only when its class says so."""
    folder = f"{DEVICES}/{address}"
    class_code = sysroot.number(f"{folder}/class")
    vendor, device = sysroot.number(f"{folder}/vendor"), sysroot.number(f"{folder}/device")
    if class_code is None or class_code >> 8 not in _CLASSES:
        return None
    if vendor is None or device is None or not (0 < vendor < 0xFFFF and 0 <= device <= 0xFFFF):
        return PciCard(address, fault="sysfs does not say its vendor and device")
    if not _matches(f"{vendor:04x}", f"{device:04x}", match):
        return None
    numa = sysroot.number(f"{folder}/numa_node")
    return PciCard(
        address=address,
        vendor=vendor,
        device=device,
        subsystem=(
            sysroot.number(f"{folder}/subsystem_vendor") or 0,
            sysroot.number(f"{folder}/subsystem_device") or 0,
        ),
        numa_node=numa if numa is not None and 0 <= numa < 1024 else -1,
        driver=sysroot.link_name(f"{folder}/driver") or "",
        iommu_group=sysroot.link_name(f"{folder}/iommu_group") or "",
    )


def _matches(vendor: str, device: str, match: Sequence[str]) -> bool:
    for pattern in match:
        want_vendor, _, want_device = pattern.lower().partition(":")
        if want_vendor in ("*", vendor) and want_device in ("*", device):
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

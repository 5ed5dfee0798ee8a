"""Reads what of the bus goes together with a card: its siblings, its IOMMU group, and where it sits.

    functions   what changes its driver with the card: the endpoints in the slots of the group's cards
    foreign     other devices of the IOMMU group; ports and bridges are none (they stay with their drivers)

Source: kernel, Documentation/driver-api/vfio.rst (groups, viability), ABI/testing/sysfs-bus-pci. Reads only.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from kvmpool.core.model import Mode, PciFacts
from kvmpool.device.sysroot import Sysroot

DEVICES = "sys/bus/pci/devices"
DRIVERS = "sys/bus/pci/drivers"
GROUPS = "sys/kernel/iommu_groups"
_ADDRESS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")
_ROOT = re.compile(r"pci([0-9a-f]{4,8}:[0-9a-f]{2})")
_BRIDGE = 0x0604
NO_OVERRIDE = ("", "(null)")


@dataclass(frozen=True, slots=True)
class Function:
    """One PCI function as sysfs shows it now. "" where there is none: a driver, an override, the attribute itself."""

    address: str
    ids: str
    slot: str
    class_code: int = 0
    driver: str = ""
    override: str = ""
    d3cold: str = ""  # "0" or "1"

    @property
    def vendor(self) -> str:
        return self.ids[:4]

    @property
    def words(self) -> str:
        return f"{self.address} ({self.driver or 'no driver'})"


@dataclass(frozen=True, slots=True)
class Unit:
    """Everything that a card's mode depends on, at one look. `functions` and `foreign` by address."""

    address: str
    group: str  # "": no IOMMU
    cards: tuple[str, ...]  # the addresses of `functions` that are cards
    functions: tuple[Function, ...]
    foreign: tuple[Function, ...]
    boot_vga: bool
    reset_methods: tuple[str, ...]

    @property
    def facts(self) -> PciFacts:
        own = next((each for each in self.functions if each.address == self.address), None)
        return PciFacts(
            ids=own.ids if own else "",
            slot=own.slot if own else "",
            iommu_group=self.group,
            functions=tuple(each.address for each in self.functions),
            foreign=tuple(each.address for each in self.foreign),
            reset_methods=self.reset_methods,
            boot_vga=self.boot_vga,
        )


def is_vfio(driver: str) -> bool:
    """vfio-pci, or a variant of it that knows one device (nvgrace_gpu_vfio_pci, mlx5_vfio_pci, ...)."""
    return "vfio" in driver.replace("-", "_").split("_")


def mode_of(driver: str) -> Mode:
    if not driver:
        return Mode.OFF
    return Mode.PASSTHROUGH if is_vfio(driver) else Mode.VGPU


def unit_of(sysroot: Sysroot, address: str, cards: frozenset[str]) -> Unit:
    """The unit of the card at `address`; `cards`: the addresses of all cards of the host."""
    group = sysroot.link_name(f"{DEVICES}/{address}/iommu_group") or ""
    names = sysroot.names(f"{GROUPS}/{group}/devices") if group else None
    members = names if names is not None else _same_slot(sysroot, address)
    in_unit = frozenset(name for name in members if name in cards) | {address}
    slots = {name.rpartition(".")[0] for name in in_unit}
    functions, foreign = [], []
    for name in sorted({*members, address}):
        if not _ADDRESS.fullmatch(name) or not sysroot.exists(f"{DEVICES}/{name}"):
            continue
        function = function_at(sysroot, name)
        if name.rpartition(".")[0] in slots:
            functions.append(function)
        elif function.class_code >> 8 != _BRIDGE:
            foreign.append(function)
    return Unit(
        address=address,
        group=group,
        cards=tuple(sorted(in_unit)),
        functions=tuple(functions),
        foreign=tuple(foreign),
        boot_vga=sysroot.number(f"{DEVICES}/{address}/boot_vga") == 1,
        reset_methods=tuple((sysroot.text(f"{DEVICES}/{address}/reset_method") or "").split()),
    )


def function_at(sysroot: Sysroot, address: str) -> Function:
    folder = f"{DEVICES}/{address}"
    numbers = (
        sysroot.number(f"{folder}/{name}") or 0 for name in ("vendor", "device", "subsystem_vendor", "subsystem_device")
    )
    override = sysroot.text(f"{folder}/driver_override") or ""
    return Function(
        address=address,
        ids=":".join(f"{number:04x}" for number in numbers),
        slot=slot_of(sysroot, address),
        class_code=sysroot.number(f"{folder}/class") or 0,
        driver=sysroot.link_name(f"{folder}/driver") or "",
        override="" if override in NO_OVERRIDE else override,
        d3cold=sysroot.text(f"{folder}/d3cold_allowed") or "",
    )


def slot_of(sysroot: Sysroot, address: str) -> str:
    """The way to a function by device and function numbers alone: bus numbers are given out anew at each boot.

    `0000:00-01.0-00.0`: the root's domain and bus, the port, the function. Its address where sysfs shows no way.
    """
    root, way = "", []
    for part in os.path.realpath(os.path.join(sysroot.root, DEVICES, address)).split("/"):
        found, start = _ADDRESS.fullmatch(part), _ROOT.fullmatch(part)
        if start:
            root = start[1]
        elif root and found:
            way.append(f"{found[3]}.{found[4]}")
    return "-".join([root, *way]) if root and way else address


def siblings(found: list[str]) -> frozenset[str]:
    """Of addresses that could be cards, those that are functions beside a lower one of the same slot."""
    lowest: dict[str, str] = {}
    for address in sorted(found):
        lowest.setdefault(address.rpartition(".")[0], address)
    return frozenset(address for address in found if address not in lowest.values())


def is_virtual(sysroot: Sysroot, address: str) -> bool:
    """An SR-IOV virtual function: a device of its own in the slot of another."""
    return sysroot.exists(f"{DEVICES}/{address}/physfn")


def _same_slot(sysroot: Sysroot, address: str) -> tuple[str, ...]:
    slot = address.rpartition(".")[0]
    names = sysroot.names(DEVICES) or ()
    same = (name for name in names if name.rpartition(".")[0] == slot)
    return tuple(name for name in same if name == address or not is_virtual(sysroot, name))

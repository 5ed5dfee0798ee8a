"""Decides, of one look at a card's unit, whether its mode can be switched: values in, a refusal or nothing out.

Each refusal is one line: what stands against it, in the words of the kernel or of libvirt where they have some (so that
it is found by whoever has seen them), which device, and what to do. Nothing has been changed when one is raised.
Source: design 04 §4.4. This module reads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmpool.core.model import Card, Mode
from kvmpool.device.holders import Holder, told
from kvmpool.device.pci import BusState
from kvmpool.device.topology import Function, Unit, is_vfio
from kvmpool.errors import CardBusy, Refused

VFIO = "vfio-pci"
NVIDIA = "nvidia"
NVIDIA_VENDOR = "10de"
# Drivers of another device of the group under which the kernel lets the group be given away (vfio.rst).
_HARMLESS = ("", "pci-stub")


@dataclass(frozen=True, slots=True)
class Situation:
    """One look at everything that a switch depends on."""

    unit: Unit
    state: BusState
    holders: tuple[Holder, ...]
    drivers: frozenset[str]  # loaded ones
    framebuffer: str = ""  # of the unit's memory, the range of /proc/iomem that the boot console holds; "": none
    console: bool = False  # a frame buffer console is bound


def check(card: Card, situation: Situation, mode: Mode) -> None:
    """Raises Refused or CardBusy for the first thing that stands against it."""
    unit = situation.unit
    check_identity(card, unit)
    if situation.state is not BusState.ANSWERS:
        _refuse_dead(card, situation.state)
    if mode is Mode.PASSTHROUGH:
        _iommu(card, unit)
        _group(unit)
    _console(card, situation)
    _driver(card, situation, mode)
    if situation.holders:
        raise CardBusy(_in_use(card, situation.holders))


def missing_module(situation: Situation, mode: Mode) -> str:
    """The module that the mode's driver is in and that is not loaded; "" where none is missing."""
    if mode is Mode.PASSTHROUGH:
        return "" if VFIO in situation.drivers else VFIO
    own = (each for each in situation.unit.functions if each.address in situation.unit.cards)
    nvidia = any(each.vendor == NVIDIA_VENDOR for each in own)
    return NVIDIA if mode is Mode.VGPU and nvidia and NVIDIA not in situation.drivers else ""


def wanted_driver(unit: Unit, function: Function, mode: Mode, origin: str) -> str | None:
    """The driver a function is to have; "": none; None: whichever the kernel finds for it (a sibling's own)."""
    if mode is Mode.PASSTHROUGH:
        return function.driver if is_vfio(function.driver) else VFIO
    if mode is Mode.OFF:
        return ""
    if function.address not in unit.cards:
        return None
    if function.vendor == NVIDIA_VENDOR:
        return NVIDIA
    return origin if origin and not is_vfio(origin) else None


def check_identity(card: Card, unit: Unit) -> None:
    facts = unit.facts
    if card.pci.ids and card.pci.ids != facts.ids:
        what = f"{unit.address} is {facts.ids or 'nothing'} now, {card.label} was {card.pci.ids}"
        raise Refused(f"the wrong device is passed: {what}. Next: kvmpool card list; the bus was numbered anew")
    if card.pci.slot and card.pci.slot != facts.slot:
        what = f"{unit.address} is in slot {facts.slot} now, {card.label} was in {card.pci.slot}"
        raise Refused(f"the wrong device is passed: {what}. Next: kvmpool card list; the bus was numbered anew")


def _refuse_dead(card: Card, state: BusState) -> None:
    if state is BusState.ALL_ONES:
        why = "Unable to change power state from D3cold to D0, device inaccessible"
        raise Refused(f"{card.label}: {why} ({state.value}). Next: power the host off and on; kvmpool card show")
    raise Refused(f"{card.label}: {state.value}. Next: kvmpool card show {card.label}")


def _iommu(card: Card, unit: Unit) -> None:
    if not unit.group:
        why = f"host doesn't support passthrough of host PCI devices: {card.label} is in no IOMMU group"
        raise Refused(f"{why}. Next: boot with intel_iommu=on (Intel) or enable AMD-Vi in the firmware; kvmpool doctor")


def _group(unit: Unit) -> None:
    bad = [each for each in unit.foreign if each.driver not in _HARMLESS and not is_vfio(each.driver)]
    if bad:
        others = ", ".join(each.words for each in bad)
        why = f"vfio {unit.address}: group {unit.group} is not viable: {others} would have to be given away too"
        remedy = "unbind it if nothing needs it, or put the card into a slot with ACS"
        raise Refused(f"{why}. Next: {remedy}")


def _console(card: Card, situation: Situation) -> None:
    held = situation.framebuffer
    if held:
        why = f"{card.label}: BAR 0: can't reserve [mem {held}]: the boot console has it"
        raise Refused(f"{why}. Next: boot with video=efifb:off (or initcall_blacklist=sysfb_init), or another console")
    if situation.unit.boot_vga and situation.console:
        why = f"{card.label} is the boot display (boot_vga), and a console is bound to it"
        raise Refused(f"{why}. Next: choose another primary display in the firmware, or boot with fbcon=map:9")


def _driver(card: Card, situation: Situation, mode: Mode) -> None:
    missing = missing_module(situation, mode)
    if missing:
        raise Refused(f"{card.label}: the driver {missing} is not loaded. Next: modprobe {missing}")


def _in_use(card: Card, holders: Sequence[Holder]) -> str:
    domains = sorted({each.domain for each in holders if each.domain})
    remedy = f"virsh shutdown {domains[0]}" if domains else "stop it"
    units = sorted({each.unit for each in holders if each.unit.endswith(".service")})
    if units and not domains:
        remedy = f"systemctl stop {units[0]}"
    return f"{card.label} is in use by {told(holders)}. Next: {remedy}, then try again"

"""Makes one list of cards out of what the PCI bus and the driver say, and says of each whether it may be believed.

    bus and driver agree             a card
    it is on vfio-pci                a passthrough card: the bus alone tells of it, and the roster who it is
    it has no driver                 a card that is off, likewise
    it is on another driver          a card in mode vgpu, likewise, unless the driver lists it: only a probe says that
                                     nobody can be served by it
    the driver is silent             a card with a fault: nothing is known of it
    it reads all ones                a card with a fault: lost, or nearly
    its address has left the bus     a card that is not present
    the bus cannot be read           a card with a fault, whatever the driver says

Values in, values out. This module does not read anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from kvmpool.core.model import CardId, CardSeen, Mode
from kvmpool.device.nvml import NvmlCard
from kvmpool.device.pci import BusState, PciCard
from kvmpool.device.roster import Roster

NVIDIA_DRIVER = "nvidia"


@dataclass(frozen=True, slots=True)
class Look:
    """One look at both. None: that side cannot be read."""

    bus: tuple[PciCard, ...] | None
    states: Mapping[str, BusState] = field(default_factory=dict)  # address -> of every card on the bus
    on_bus: frozenset[str] = frozenset()  # all addresses of the bus, also of what is no card of ours
    listed: tuple[NvmlCard, ...] | None = None
    nvml_fault: str = ""  # why `listed` is None
    nvml_slow: bool = False  # it is None because the driver did not answer in time; probes tell which card hangs


def merged(look: Look, roster: Roster) -> tuple[CardSeen, ...]:
    """All cards, sorted by address; the roster says who was where when all was well."""
    listed = {card.address: card for card in look.listed or ()}
    if look.bus is None:
        who = {address: known.id for address, known in roster.seen.items()}
        who |= {card.address: card.id for card in listed.values()}
        return _sorted(_faulty(roster, address, card, "sysfs cannot be read") for address, card in who.items())
    seen = {card.address: _on_bus(card, listed.get(card.address), look, roster) for card in look.bus}
    for address, card in listed.items():
        if address not in seen and address not in look.on_bus:
            seen[address] = _off_bus(roster, address, card.id)
    for address, known in roster.seen.items():
        if address not in seen and address not in look.on_bus:
            seen[address] = _off_bus(roster, address, known.id)
        elif address not in seen:
            seen[address] = _faulty(roster, address, known.id, "sysfs no longer says that it is a card")
    return _sorted(seen.values())


def _on_bus(card: PciCard, nvml: NvmlCard | None, look: Look, roster: Roster) -> CardSeen:
    known = roster.seen.get(card.address)
    card_id = nvml.id if nvml else roster.name_of(card.address, card.facts)
    state = look.states.get(card.address, BusState.UNREADABLE)
    if state is BusState.GONE:
        return _off_bus(roster, card.address, card_id)
    fault = card.fault or ("" if state is BusState.ANSWERS else state.value)
    if not fault and (card.mode is not Mode.VGPU or (nvml is None and card.driver != NVIDIA_DRIVER)):
        return _driverless(card, card_id, known)
    fault = fault or _driver_fault(card, nvml, look)
    if not fault and nvml is None and known is not None and known.model and known.mode is Mode.VGPU:
        return known  # the driver is slow: what it said before still holds
    if fault or nvml is None:
        faulty = _faulty(roster, card.address, card_id, fault or look.nvml_fault)
        return faulty if card.fault else replace(faulty, mode=card.mode, driver=card.driver, pci=card.facts)
    return CardSeen(
        id=nvml.id,
        address=card.address,
        model=nvml.model,
        memory_mib=nvml.memory_mib,
        driver=card.driver,
        compute_capability=nvml.compute_capability,
        numa_node=card.numa_node,
        pci=card.facts,
    )


def _driverless(card: PciCard, card_id: CardId, known: CardSeen | None) -> CardSeen:
    """A card of which only the bus tells; its model and memory are as its driver last told them."""
    told = known if known is not None and known.id == card_id else CardSeen(card_id, card.address, "", 0)
    return replace(
        told, driver=card.driver, numa_node=card.numa_node, mode=card.mode, pci=card.facts, present=True, fault=""
    )


def _driver_fault(card: PciCard, nvml: NvmlCard | None, look: Look) -> str:
    if nvml is not None:
        return nvml.fault
    if look.listed is None:
        return "" if look.nvml_slow else look.nvml_fault
    return "the driver does not list it"


def _off_bus(roster: Roster, address: str, card_id: CardId) -> CardSeen:
    """Gone is what was there: an address that never was on the bus is a driver that lies, or another sysfs."""
    if address not in roster.seen:
        return _faulty(roster, address, card_id, "the driver lists it, sysfs does not")
    return replace(_faulty(roster, address, card_id, f"{address} has left the bus"), present=False)


def _faulty(roster: Roster, address: str, card_id: CardId, fault: str) -> CardSeen:
    """What was known of it, with the fault."""
    known = roster.seen.get(address)
    if known is not None and known.id == card_id:
        return replace(known, fault=fault)
    return CardSeen(card_id, address, "", 0, fault=fault)


def _sorted(cards: Iterable[CardSeen]) -> tuple[CardSeen, ...]:
    return tuple(sorted(cards, key=lambda card: (card.address, card.id)))

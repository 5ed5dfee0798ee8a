"""Decides which cards are to be given to the driver of another mode: wishes and what is seen, in; steps out.

    a card of which nobody has said a mode, the configuration does   record that as its wish
    the mode seen is not the wished one, nothing holds the unit      switch it
    something holds it                                               say so in the card's row; look again
    a switch was refused before it changed anything                  say so; tried again, as whoever performs has time
    a switch failed and was undone                                   say so; not tried again in this boot for this wish
    a switch left the card wedged                                    its verdict says so; never tried again

The recorded mode comes back after a reboot because it is compared with what is seen: there is no rule for reboots.
Cards of one IOMMU group are one unit: they are switched together, and only where no wish of theirs speaks against it.
This module does not know what a driver is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from kvmpool.core.model import (
    Binding,
    BootId,
    Card,
    CardId,
    CardWish,
    Health,
    Mode,
    RecordMode,
    Switching,
    SwitchMode,
    Verdict,
    WorkerSeen,
)

CONFIGURED = "the configuration"  # CardWish.by of a mode that no person asked for since

# A card in one of these is evidence, or waits for a person: only taking it away from every driver is allowed.
_LEFT_ALONE = frozenset({Verdict.FAILED, Verdict.QUARANTINED, Verdict.DEAD, Verdict.LEMON})


@dataclass(frozen=True, slots=True)
class SwitchFault:
    """Why the last try to answer the wish `ticket` did not. `final`: it was begun, failed and was undone."""

    ticket: int
    reason: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class ModesView:
    """What of a host's look has to do with modes. `cards`: as they are to be published, those seen well alone."""

    boot_id: BootId = BootId("")
    cards: tuple[Card, ...] = ()
    wishes: Mapping[CardId, CardWish] = field(default_factory=dict)
    unread_wishes: frozenset[CardId] = frozenset()
    unread_bindings: bool = False
    bindings: tuple[Binding, ...] = ()  # of every phase, on this host's cards
    workers: tuple[WorkerSeen, ...] | None = ()
    health: Mapping[CardId, Health] = field(default_factory=dict)
    faults: Mapping[CardId, SwitchFault] = field(default_factory=dict)
    initial: Mapping[str, Mode] = field(default_factory=dict)  # address -> mode, of the configuration
    default: Mode | None = None  # of the cards that `initial` does not name


def reconcile_modes(view: ModesView) -> Iterator[RecordMode | SwitchMode]:
    """Records first, then one switch a unit, in the order of addresses."""
    cards = sorted(view.cards, key=lambda card: card.address)
    for card in cards:
        mode = view.initial.get(card.address, view.default)
        wish = view.wishes.get(card.id, CardWish(card.id))
        if mode is not None and wish.mode is None and card.id not in view.unread_wishes:
            yield RecordMode(asking(wish, mode, CONFIGURED), f"{mode.value}, as the configuration says")
    begun: set[CardId] = set()
    for card in cards:
        found = view.wishes.get(card.id)
        if found is None or found.mode is None or found.mode is card.mode or card.id in begun:
            continue
        if _is_final(view, card, found) or hindrance(view, card, found.mode):
            continue
        begun |= {mate.id for mate in unit(card, cards)}
        by = f" by {found.by}" if found.by else ""
        yield SwitchMode(card, found.mode, found.mode_ticket, f"{card.mode.value} -> {found.mode.value}, wished{by}")


def asking(wish: CardWish, mode: Mode, by: str) -> CardWish:
    """The wish with another mode asked for, as a new question that gets an answer of its own."""
    return replace(wish, mode=mode, mode_ticket=wish.mode_ticket + 1, by=by)


def answer(view: ModesView, card: Card, before: Switching) -> Switching:
    """What the card's row says about the wish for its mode."""
    wish = view.wishes.get(card.id)
    if wish is None or wish.mode is None:
        return before if card.id in view.unread_wishes else Switching()
    if wish.mode is card.mode:
        return Switching(wish.mode_ticket)
    fault = view.faults.get(card.id)
    if fault is not None and fault.ticket == wish.mode_ticket:
        return Switching(fault.ticket, fault.reason, view.boot_id if fault.final else BootId(""))
    if _is_final(view, card, wish):
        return before
    held = hindrance(view, card, wish.mode)
    return Switching(wish.mode_ticket, held) if held else Switching(min(before.answered, wish.mode_ticket - 1))


def unit(card: Card, cards: Iterable[Card]) -> list[Card]:
    """The cards that change their mode with this one, itself included."""
    group = card.pci.iommu_group
    return [each for each in cards if each.id == card.id or (group and each.pci.iommu_group == group)]


def hindrance(view: ModesView, card: Card, mode: Mode) -> str:
    """What of the pool keeps the card from being switched to `mode`, as a clause; "" where nothing does."""
    mates = unit(card, view.cards)
    return (
        next((why for mate in mates if (why := _health_hinders(view.health.get(mate.id, mate.health), mode))), "")
        or next((why for mate in mates if (why := _mate_hinders(view, card, mate, mode))), "")
        or _use_hinders(view, frozenset(mate.id for mate in mates), mode)
    )


def _is_final(view: ModesView, card: Card, wish: CardWish) -> bool:
    """Was this very wish tried in this boot, and undone?"""
    fault = view.faults.get(card.id)
    if fault is not None and fault.ticket == wish.mode_ticket:
        return fault.final
    told = card.switching
    return told.answered == wish.mode_ticket and bool(told.failed_boot) and told.failed_boot == view.boot_id


def _health_hinders(health: Health, mode: Mode) -> str:
    if health.verdict is Verdict.WEDGED or (health.verdict in _LEFT_ALONE and mode is not Mode.OFF):
        return f"{health.verdict.value}: {health.reason}" if health.reason else health.verdict.value
    return ""


def _mate_hinders(view: ModesView, card: Card, mate: Card, mode: Mode) -> str:
    shared = f"it shares IOMMU group {card.pci.iommu_group} with {mate.label}"
    if mate.id in view.unread_wishes:
        return f"{shared}, whose wish row cannot be read" if mate.id != card.id else "its wish row cannot be read"
    wish = view.wishes.get(mate.id)
    if mate.id == card.id or (wish is not None and wish.mode is mode):
        return ""
    return f"{shared}, of which nobody wants {mode.value}. Next: kvmpool card mode {mate.label} {mode.value}"


def _use_hinders(view: ModesView, cards: frozenset[CardId], mode: Mode) -> str:
    if view.unread_bindings:
        return "a binding row cannot be read, so what holds it is not known"
    holding = [binding for binding in view.bindings if binding.card in cards and binding.mode is not mode]
    if holding:
        return f"held by {holding[0].label} of domain {holding[0].domain_name}"
    if view.workers is None:
        return "its workers cannot be listed"
    serving = [worker for worker in view.workers if worker.card in cards]
    if serving:
        first = serving[0]
        return f"held by the worker of {first.claim.domain}/{first.claim.name}#{first.generation} (pid {first.pid})"
    return ""

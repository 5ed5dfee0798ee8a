"""Decides what the host of the cards does: its binding rows and what runs, in; steps out. Run on every host with cards.

    row of a passthrough card          ready once the card is seen on vfio-pci; its domain does the rest (core/plug.py)
    row PREPARING, no serving worker   start it; after several failures report the binding broken
    row PREPARING, worker serving      report ready
    row READY, no worker               report broken; not where its claim is withdrawn: the worker left with its relay
    row RELEASING or LOST, worker      stop it
    row RELEASING or LOST, no worker   forget the row: this look is the proof that its memory is free
    worker without a row               stop it: its row went, or is of another generation
    a card's news                      publish it, before anything else: the leader waits for it
    a card that a reset may bring back last but one: reconcile_resets.py
    a card in another mode than wished last of all: reconcile_modes.py

A worker without a row is stopped also after the store was lost with everything in it: a row is the only right to hold
memory, and generations would be given out twice. A worker whose row is there but cannot be read is left alone.
A reboot needs no rule of its own: no worker of another boot is seen, so READY breaks and RELEASING is forgotten.
This module does not know how a worker is started nor how a card is probed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from kvmpool.core.health import OUT_OF_SERVICE, Limits, is_news
from kvmpool.core.model import (
    Binding,
    BootId,
    Card,
    CardId,
    CardSeen,
    CardStep,
    CardWish,
    ClaimKey,
    Forget,
    Generation,
    Health,
    HostName,
    Mode,
    Phase,
    PublishCard,
    ReportBroken,
    ReportReady,
    StartWorker,
    StopWorker,
    Switching,
    WorkerSeen,
    slot_name,
)
from kvmpool.core.place import VFIO
from kvmpool.core.plug import worker_of
from kvmpool.core.reconcile_modes import ModesView, SwitchFault, answer, reconcile_modes
from kvmpool.core.reconcile_resets import reconcile_resets

WorkerKey = tuple[ClaimKey, Generation]


@dataclass(frozen=True, slots=True)
class CardsView:
    """One look of a host at its cards' share of the pool. `workers` were listed after the rows were read."""

    host: HostName
    bindings: tuple[Binding, ...] = ()  # rows with card_host == host
    workers: tuple[WorkerSeen, ...] | None = ()  # None: they cannot be listed; then nothing is concluded of any
    cards: tuple[CardSeen, ...] | None = None  # None: the inventory cannot be read; then no card is gone or new
    health: Mapping[CardId, Health] = field(default_factory=dict)
    published: Mapping[CardId, Card] = field(default_factory=dict)  # this host's card rows
    unreadable: frozenset[WorkerKey] = frozenset()  # binding rows that the codec refused
    withdrawn: frozenset[ClaimKey] = frozenset()  # claims of `bindings` that have no row any more
    start_failures: Mapping[WorkerKey, tuple[int, str]] = field(default_factory=dict)  # (times in a row, last reason)
    start_limit: int = 3
    boot_id: BootId = BootId("")
    wishes: Mapping[CardId, CardWish] = field(default_factory=dict)
    unread_wishes: frozenset[CardId] = frozenset()
    switch_faults: Mapping[CardId, SwitchFault] = field(default_factory=dict)
    initial_modes: Mapping[str, Mode] = field(default_factory=dict)  # address -> mode, of the configuration
    default_mode: Mode | None = None
    limits: Limits = Limits()

    def modes(self, cards: tuple[Card, ...]) -> ModesView:
        """The part that has to do with modes; `cards`: as they are to be published."""
        return ModesView(
            boot_id=self.boot_id,
            cards=cards,
            wishes=self.wishes,
            unread_wishes=self.unread_wishes,
            unread_bindings=bool(self.unreadable),
            bindings=self.bindings,
            workers=self.workers,
            health=self.health,
            faults=self.switch_faults,
            initial=self.initial_modes,
            default=self.default_mode,
        )


def reconcile_cards(view: CardsView) -> tuple[CardStep, ...]:
    """The host's steps, in an order of which every prefix is safe: cards, bindings and orphans by key, then modes."""
    seen = {card.id: card for card in view.cards or ()}
    renamed = _renamed(view, seen)
    cards = _believed(view, seen, renamed)
    news = tuple(_news(view, cards, renamed))
    known = view.modes(tuple(cards[card_id] for card_id in cards if _driver_known(seen.get(card_id))))
    modes = (*reconcile_resets(known, view.limits), *reconcile_modes(known))
    if view.workers is None:
        return (*news, *modes)
    return (*news, *_bindings(view, view.workers), *_orphans(view, view.workers), *modes)


def _believed(view: CardsView, seen: Mapping[CardId, CardSeen], renamed: Mapping[CardId, CardId]) -> dict[CardId, Card]:
    """Every card as its row should be."""
    cards: dict[CardId, Card] = {}
    for card_id in sorted((seen.keys() | view.published.keys()) - set(renamed.values())):
        old = view.published.get(card_id) or view.published.get(renamed.get(card_id, card_id))
        new = _card(view, card_id, seen.get(card_id), old)
        if new is not None:
            cards[card_id] = new
    modes = view.modes(tuple(card for card in cards.values() if _driver_known(seen.get(card.id))))
    return {
        card_id: replace(card, switching=answer(modes, card, card.switching)) if card in modes.cards else card
        for card_id, card in cards.items()
    }


def _well(seen: CardSeen | None) -> bool:
    return seen is not None and seen.present and not seen.fault


def _driver_known(seen: CardSeen | None) -> bool:
    """The bus says who has it: then its mode can be changed, whatever its driver says or does not say."""
    return _well(seen) or (seen is not None and seen.present and bool(seen.pci.ids))


def _renamed(view: CardsView, seen: Mapping[CardId, CardSeen]) -> dict[CardId, CardId]:
    """New name -> old one, of cards whose driver tells a uuid for the first time: the same ids in the same slot."""
    held = {binding.card for binding in view.bindings}
    return {
        card.id: old
        for card in seen.values()
        if _well(card)
        and card.id not in view.published
        and (old := slot_name(card.pci)) in view.published
        and old not in seen
        and old not in held
    }


def _news(view: CardsView, cards: Mapping[CardId, Card], renamed: Mapping[CardId, CardId]) -> Iterator[PublishCard]:
    for card_id, new in cards.items():
        old = view.published.get(card_id)
        if new == old:
            continue
        event = _mode_event(old, new)
        if old is None:
            memory = f", {new.memory_mib} MiB" if new.memory_mib else ""
            mode = "" if new.mode is Mode.VGPU else f", mode {new.mode.value}"
            found = f"found: {new.model}{memory}{mode}; {_health_words(new.health)}"
            yield PublishCard(new, found, replaces=renamed.get(card_id))
        elif new.health.verdict is not old.health.verdict:
            yield PublishCard(new, _health_words(new.health), event)
        elif is_news(old.health, new.health) or replace(new, health=old.health) != old:
            yield PublishCard(new, "", event)


def _mode_event(old: Card | None, new: Card) -> tuple[str, str] | None:
    """Kind and reason of the line about the card's mode; None where there is nothing to tell."""
    if old is None:
        return None
    if old.mode is not new.mode:
        return "mode", f"{new.mode.value}, was {old.mode.value} (driver {new.driver or 'none'})"
    if new.switching.fault and new.switching.fault != old.switching.fault:
        return "mode-refused", new.switching.fault
    return None


def _card(view: CardsView, card_id: CardId, seen: CardSeen | None, old: Card | None) -> Card | None:
    """The row as it should be. A card with a fault is believed in nothing but its identity: the old facts stay."""
    health = view.health.get(card_id, old.health if old else Health())
    if seen is None or seen.fault or not seen.present:
        if old is None:
            return None  # never seen well: nothing is known that could be published
        if seen is not None and _driver_known(seen):
            old = replace(old, mode=seen.mode, driver=seen.driver, pci=seen.pci)
        return replace(old, health=health)
    return Card(
        id=seen.id,
        host=view.host,
        address=seen.address,
        model=seen.model or (old.model if old else "") or f"PCI {seen.pci.ids}",
        memory_mib=seen.memory_mib or (old.memory_mib if old else 0),
        mode=seen.mode,
        driver=seen.driver,
        compute_capability=seen.compute_capability or (old.compute_capability if old else ""),
        numa_node=seen.numa_node,
        health=health,
        pci=seen.pci,
        switching=old.switching if old else Switching(),
    )


def _health_words(health: Health) -> str:
    return f"{health.verdict.value}: {health.reason}" if health.reason else health.verdict.value


def _bindings(view: CardsView, seen: tuple[WorkerSeen, ...]) -> Iterator[CardStep]:
    workers = {(worker.claim, worker.generation): worker for worker in seen}
    for binding in sorted(view.bindings, key=lambda binding: (binding.claim, binding.generation)):
        if binding.mode is Mode.PASSTHROUGH:
            yield from _passthrough(view, binding)
            continue
        worker = workers.get((binding.claim, binding.generation))
        match binding.phase:
            case Phase.PREPARING:
                yield from _preparing(view, binding, worker)
            case Phase.READY if worker is None and binding.claim not in view.withdrawn:
                yield ReportBroken(binding, "its worker has ended")
            case Phase.RELEASING | Phase.LOST if worker is None:
                yield Forget(
                    binding, f"its worker is gone ({binding.reason})" if binding.reason else "its worker is gone"
                )
            case Phase.RELEASING | Phase.LOST if worker is not None:
                yield StopWorker(binding.claim, binding.generation, worker.pid, binding.reason or "released")
            case _:
                pass


def _preparing(view: CardsView, binding: Binding, worker: WorkerSeen | None) -> Iterator[CardStep]:
    if worker is not None and worker.serving:
        yield ReportReady(binding, worker.address)
        return
    times, reason = view.start_failures.get((binding.claim, binding.generation), (0, ""))
    if times >= view.start_limit:
        yield ReportBroken(binding, f"its worker could not be started ({times} tries): {reason}")
        return
    health = view.health.get(binding.card)
    if health is None or health.verdict not in OUT_OF_SERVICE:  # else the leader moves it as soon as it reads the card
        yield StartWorker(binding)


def _passthrough(view: CardsView, binding: Binding) -> Iterator[CardStep]:
    """A card that is handed out whole has no worker: that it is where the domain's QEMU can take it is all."""
    card = next((card for card in view.cards or () if card.id == binding.card), None)
    if binding.phase is Phase.PREPARING and card is not None and not card.fault and card.driver == VFIO:
        yield ReportReady(binding, worker_of(card.address))


def _orphans(view: CardsView, seen: tuple[WorkerSeen, ...]) -> Iterator[StopWorker]:
    rows = {(binding.claim, binding.generation) for binding in view.bindings} | view.unreadable
    for worker in sorted(seen, key=lambda worker: (worker.claim, worker.generation)):
        if (worker.claim, worker.generation) not in rows:
            yield StopWorker(worker.claim, worker.generation, worker.pid, "no binding row names it")

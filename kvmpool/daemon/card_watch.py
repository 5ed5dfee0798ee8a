"""Watches a host's cards: folds signals, inventory and probes into verdicts (core/health.py).

Signals (NVML's events, the kernel's log, udev) come by themselves; the inventory is looked at every second, which finds
what left the bus without a word; each card is probed as its verdict asks. The verdicts live here between turns; they
start from the card rows, which keep them over a restart of the daemon.
This module does not know about bindings, but for which cards are held.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import partial

from kvmpool.core.health import Limits, fold, on_boot, probe_plan, restore, settle
from kvmpool.core.model import (
    CardId,
    CardSeen,
    GoneSignal,
    Health,
    HealthSignal,
    HostName,
    ProbeSignal,
    ResetSignal,
    Rows,
    UnknownSignal,
    WedgedSignal,
    slot_name,
)
from kvmpool.daemon.turns import Errands
from kvmpool.errors import CardLost, KvmpoolError
from kvmpool.ports import Cards, Clock

log = logging.getLogger(__name__)


class CardWatch:
    """`health`: a verdict a card; `seen`: the last inventory, None where it could not be read."""

    def __init__(self, clock: Clock, cards: Cards, errands: Errands, limits: Limits, interval_s: float) -> None:
        self.limits = limits
        self.health: dict[CardId, Health] = {}
        self.seen: tuple[CardSeen, ...] | None = None
        self.seen_at = -1.0  # when `seen` was asked for
        self._clock = clock
        self._cards = cards
        self._errands = errands
        self._interval_s = interval_s
        self._signals: list[HealthSignal] = []
        self._looked_at: float | None = None  # when the last inventory was asked for
        self._probed_at: dict[CardId, float] = {}  # when each card's last probe was sent; none: it is due
        self._strangers: set[CardId] = set()

    def offer(self, signal: HealthSignal) -> None:
        """Fold it in the next `judge`."""
        self._signals.append(signal)

    def probe_soon(self, card: CardId) -> None:
        """Somebody had trouble with it: ask the card itself."""
        self._probed_at.pop(card, None)

    def look_soon(self) -> None:
        """Something has changed: ask for the inventory anew, not before the one under way has ended."""
        self._looked_at = None

    def look(self, rows: Rows, host: HostName) -> None:
        """Take in what the rows say (verdicts once, an operator's word each time), and send for what is due."""
        now, boot_id = self._clock.now(), self._clock.boot_id()
        for card in rows.cards.values():
            if card.host == host:
                self.health.setdefault(card.id, card.health)
        for card_id, health in self.health.items():
            wish = rows.wishes.get(card_id)
            self.health[card_id] = restore(on_boot(health, now, boot_id), wish.restore if wish else 0, now)
        if now >= self._next_look() and "inventory" not in self._errands:
            self._looked_at = now
            self._errands.run("inventory", self._inventory)
        for card_id in self.health:
            due = self._next_probe(card_id)
            if due is not None and now >= due and ("probe", card_id) not in self._errands:
                plan = probe_plan(self.health[card_id], self.limits)
                assert plan is not None  # or it would not be due
                self._probed_at[card_id] = now
                self._errands.run(("probe", card_id), partial(self._probe, card_id, plan[1]))

    def judge(self, held: Collection[CardId], switching: Collection[CardId] = ()) -> None:
        """Fold what was observed since; `held`: cards that a binding row of any phase names.

        What a card says while its driver is being exchanged (`switching`) is no sign of its health.
        """
        now, boot_id = self._clock.now(), self._clock.boot_id()
        signals, self._signals = self._signals, []
        for signal in signals:
            if signal.card in switching and not isinstance(signal, WedgedSignal | ResetSignal):
                continue
            if signal.card in self.health:
                self.health[signal.card] = fold(self.health[signal.card], signal, now, boot_id, self.limits)
            elif signal.card not in self._strangers:
                self._strangers.add(signal.card)
                log.warning("%s: a signal of a card that no inventory has shown (%s)", signal.card, signal)
        for card, health in self.health.items():
            self.health[card] = settle(health, card in held, now, self.limits)

    def due_in_s(self) -> float:
        """Until the next look or probe that is not under way."""
        now = self._clock.now()
        due = [] if "inventory" in self._errands else [self._next_look()]
        for card in self.health:
            at = self._next_probe(card)
            if at is not None and ("probe", card) not in self._errands:
                due.append(at)
        return max(0.0, min(due, default=now + self._interval_s) - now)

    def _next_look(self) -> float:
        return 0.0 if self._looked_at is None else self._looked_at + self._interval_s

    def _next_probe(self, card: CardId) -> float | None:
        plan = probe_plan(self.health[card], self.limits)
        if plan is None:
            return None
        return self._probed_at[card] + plan[0] if card in self._probed_at else 0.0

    async def _inventory(self) -> None:
        now = self._clock.now()
        try:
            seen = await self._cards.inventory()
        except KvmpoolError as error:
            self.seen, self.seen_at = None, now
            self._signals += [UnknownSignal(card, now, str(error)) for card in self.health]
            return
        drivers = {card.id: card.driver for card in self.seen or ()}
        self.seen, self.seen_at = seen, now
        self._rename(seen)
        for card in seen:
            self.health.setdefault(card.id, on_boot(Health(), now, self._clock.boot_id()))
            if drivers.get(card.id, card.driver) != card.driver:
                self.probe_soon(card.id)  # what is known of it was told by another driver
            if card.present and card.fault:
                self._signals.append(UnknownSignal(card.id, now, card.fault))
                self.probe_soon(card.id)  # it may be lost: only a probe can tell that from a driver that cannot tell
        gone = self.health.keys() - {card.id for card in seen if card.present}
        self._signals += [GoneSignal(card, now, "its address left the bus") for card in sorted(gone)]

    def _rename(self, seen: tuple[CardSeen, ...]) -> None:
        """A card that was named by its slot and now tells its uuid is no new card, and the old name is not gone."""
        names = {slot_name(card.pci): card.id for card in seen if card.pci.slot and not card.fault}
        for old, new in names.items():
            if old in self.health and new != old and old not in {card.id for card in seen}:
                self.health.setdefault(new, self.health.pop(old))

    async def _probe(self, card: CardId, deadline_s: float) -> None:
        try:
            signal: HealthSignal = await self._cards.probe(card, deadline_s)
        except CardLost as error:
            signal = ProbeSignal(card, self._clock.now(), ok=False, lost=True, text=str(error))
        except KvmpoolError as error:
            signal = UnknownSignal(card, self._clock.now(), str(error))
        faulty = any(seen.id == card and seen.fault for seen in self.seen or ())
        if faulty and isinstance(signal, ProbeSignal) and signal.ok:
            return  # one of the two lies: the card stays unknown
        self._signals.append(signal)

"""Runs mode switches beside the card loop, and remembers what became of them until the card's row says it.

A switch takes seconds, and with a driver that does not let go its whole deadline: so the loop goes on meanwhile.
While a unit is switched its cards show states that are none (no driver, no answer): they are neither judged nor
published, until an inventory that was asked for after the switch has shown what they are now.
This module does not know what a driver is (ports.Modes does) nor whether a switch is right (core/reconcile_modes.py).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from kvmpool.core.model import Card, CardId, CardSeen, CardWish, Mode, SwitchMode, WedgedSignal
from kvmpool.core.reconcile_modes import SwitchFault, unit
from kvmpool.daemon.card_watch import CardWatch
from kvmpool.daemon.perform import CardHands
from kvmpool.daemon.turns import Errands
from kvmpool.errors import CardWedged, KvmpoolError, SwitchFailed
from kvmpool.ports import Clock

log = logging.getLogger(__name__)

_RETRY_S = 2.0  # a holder that was asked to leave leaves soon or late; what is not loaded is loaded by a person
_RETRY_MAX_S = 60.0


@dataclass(frozen=True, slots=True)
class InitialModes:
    """The modes that the configuration gives to cards of which no person has said one; `default`: to all the others."""

    by_address: Mapping[str, Mode] = field(default_factory=dict)
    default: Mode | None = None


@dataclass(frozen=True, slots=True)
class _Retry:
    pause_s: float
    at: float


class Retries:
    """When what was refused for a card is tried again: each time in a row twice as late."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next: dict[CardId, _Retry] = {}

    def is_due(self, card: CardId) -> bool:
        return card not in self._next or self._clock.now() >= self._next[card].at

    def later(self, card: CardId) -> None:
        pause_s = min(_RETRY_MAX_S, 2 * self._next[card].pause_s) if card in self._next else _RETRY_S
        self._next[card] = _Retry(pause_s, self._clock.now() + pause_s)

    def over(self, card: CardId) -> None:
        self._next.pop(card, None)

    def times(self) -> list[float]:
        return [retry.at for retry in self._next.values()]


class Switches:
    """Of one card loop."""

    def __init__(self, clock: Clock, hands: CardHands, errands: Errands, watch: CardWatch) -> None:
        self.faults: dict[CardId, SwitchFault] = {}
        self._clock = clock
        self._hands = hands
        self._errands = errands
        self._watch = watch
        self.retries = Retries(clock)
        self._under_way: dict[CardId, float | None] = {}  # when its switch ended; None: it has not

    def under_way(self) -> frozenset[CardId]:
        """Cards of which nothing that was seen is to be believed now."""
        over = [card for card, ended in self._under_way.items() if ended is not None and self._watch.seen_at >= ended]
        for card in over:
            del self._under_way[card]
        return frozenset(self._under_way)

    def run(self, step: SwitchMode, cards: Iterable[Card]) -> None:
        """Start it, unless it is under way or not due for another try."""
        if self.retries.is_due(step.card.id):
            mates = [mate.id for mate in unit(step.card, cards)]
            self.alone(step.card.id, mates, partial(self._switch, step, mates))

    def alone(self, card: CardId, mates: list[CardId], act: Callable[[], Awaitable[None]]) -> None:
        """Run what exchanges or disturbs the driver of these cards, unless that is done to one of them already."""
        key = ("switch", card)
        if key in self._errands or any(self._under_way.get(mate, 0.0) is None for mate in mates):
            return
        self._under_way |= dict.fromkeys(mates)
        self._errands.run(key, partial(self._out_of_sight, mates, act))

    def forget(self, wishes: Mapping[CardId, CardWish]) -> None:
        """Let go of what nobody asks for any more: a newer wish is a new question."""
        for card, fault in list(self.faults.items()):
            wish = wishes.get(card)
            if wish is None or wish.mode_ticket != fault.ticket:
                del self.faults[card]
                self.retries.over(card)

    def seen(self, seen: tuple[CardSeen, ...] | None) -> tuple[CardSeen, ...] | None:
        """What may be believed of an inventory."""
        under_way = self.under_way()
        return None if seen is None else tuple(card for card in seen if card.id not in under_way)

    async def _switch(self, step: SwitchMode, mates: list[CardId]) -> None:
        card, label = step.card.id, step.card.label
        try:
            await self._hands.switch_mode(step)
        except CardWedged as error:
            log.error("%s: wedged: %s", label, error)
            self.faults[card] = SwitchFault(step.ticket, str(error), final=True)
            for mate in mates:
                self._watch.offer(WedgedSignal(mate, self._clock.now(), str(error)))
        except SwitchFailed as error:
            log.error("%s: its mode was not switched: %s", label, error)
            self.faults[card] = SwitchFault(step.ticket, str(error), final=True)
        except KvmpoolError as error:
            self._refused(step, str(error))
        else:
            self.faults.pop(card, None)
            self.retries.over(card)

    async def _out_of_sight(self, mates: list[CardId], act: Callable[[], Awaitable[None]]) -> None:
        try:
            await act()
        finally:
            now = self._clock.now()
            self._under_way |= dict.fromkeys(mates, now)
            self._watch.look_soon()
            for mate in mates:
                self._watch.probe_soon(mate)

    def _refused(self, step: SwitchMode, reason: str) -> None:
        card = step.card.id
        before = self.faults.get(card)
        if before is None or before.reason != reason:
            log.warning("%s: its mode is not switched: %s; trying again", step.card.label, reason)
        self.faults[card] = SwitchFault(step.ticket, reason)
        self.retries.later(card)


AS_FOUND = InitialModes()


def parsed(modes: Iterable[str], default: str) -> InitialModes:
    """Of the configuration's `ADDRESS=MODE` and its default, both checked before."""
    pairs = (each.rpartition("=") for each in modes)
    return InitialModes({address: Mode(mode) for address, _, mode in pairs}, Mode(default) if default else None)

"""Runs resets of cards beside the card loop, and hands what became of them to the fold of health.

A reset of a sick card takes a minute and more. Meanwhile the card is out of the loop's sight, as during a switch of its
mode, with which it never overlaps. What somebody holds is tried again, each time later.
This module does not know how a card is reset (ports.Modes does) nor whether it should be (core/reconcile_resets.py).
"""

from __future__ import annotations

import logging
from functools import partial

from kvmpool.core.model import CardId, ResetCard, ResetResult, ResetSignal, WedgedSignal
from kvmpool.daemon.card_watch import CardWatch
from kvmpool.daemon.perform import CardHands
from kvmpool.daemon.switches import Retries, Switches
from kvmpool.errors import CardLost, CardWedged, KvmpoolError, NoReset
from kvmpool.ports import Clock

log = logging.getLogger(__name__)


class Resets:
    """Of one card loop."""

    def __init__(self, clock: Clock, hands: CardHands, watch: CardWatch, switches: Switches) -> None:
        self.retries = Retries(clock)
        self._clock = clock
        self._hands = hands
        self._watch = watch
        self._switches = switches
        self._told: dict[CardId, str] = {}

    def run(self, step: ResetCard) -> None:
        """Start it, unless something is done to the card already or it is not due for another try."""
        if self.retries.is_due(step.card.id):
            self._switches.alone(step.card.id, [step.card.id], partial(self._reset, step))

    async def _reset(self, step: ResetCard) -> None:
        card, label = step.card.id, step.card.label
        try:
            await self._hands.reset_card(step)
        except NoReset as error:
            log.warning("%s: stays out of service: %s", label, error)
            self._offer(card, ResetResult.IMPOSSIBLE, str(error))
        except CardWedged as error:
            log.error("%s: wedged: %s", label, error)
            self._watch.offer(WedgedSignal(card, self._clock.now(), str(error)))
        except CardLost as error:
            log.error("%s: dead: %s", label, error)
            self._offer(card, ResetResult.FAILED, str(error))
        except KvmpoolError as error:
            if self._told.get(card) != str(error):
                log.warning("%s: not reset: %s; trying again", label, error)
            self._told[card] = str(error)
            self.retries.later(card)
        else:
            self._offer(card, ResetResult.DONE)

    def _offer(self, card: CardId, result: ResetResult, text: str = "") -> None:
        self._told.pop(card, None)
        self.retries.over(card)
        self._watch.offer(ResetSignal(card, self._clock.now(), result, text))

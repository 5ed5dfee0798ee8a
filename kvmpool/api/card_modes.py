"""Takes a person's wish for a card's mode: refused at once, with the holder's name, where it cannot be carried out now.

The wish is a row like any other; the card's host carries it out and keeps the card so over reboots. What the host can
see now (who holds the card, whether it can be switched at all) is asked before anything is written.
This module does not know how a mode is switched (ports.Modes does).
"""

from __future__ import annotations

from collections.abc import Callable

from kvmpool.api.resources import Resources, find_card
from kvmpool.api.shapes import ModeBody
from kvmpool.core.model import Card, CardWish, Mode, Rows, Verdict
from kvmpool.core.reconcile_modes import ModesView, asking, hindrance, unit
from kvmpool.daemon.ledger import Change, Ledger, Page
from kvmpool.daemon.turns import unless_conflict
from kvmpool.errors import CardBusy, Conflict, Refused
from kvmpool.ports import Modes, Workers

MODES = {mode.value: mode for mode in (Mode.PASSTHROUGH, Mode.VGPU, Mode.OFF)}
_TRIES = 8


class CardModes:
    """Of one daemon. `modes` is asked about the cards of this host only; others' hosts answer through their rows."""

    def __init__(
        self, resources: Resources, ledger: Ledger, modes: Modes, workers: Workers, wake: Callable[[str], None]
    ) -> None:
        self._resources = resources
        self._ledger = ledger
        self._modes = modes
        self._workers = workers
        self._wake = wake

    async def ask(self, named: str, mode_name: str, *, dry_run: bool, by: str) -> ModeBody:
        """Raises NotFound, CardBusy, Refused; then nothing is written."""
        mode = MODES.get(mode_name)
        if mode is None:
            raise Refused(f"{mode_name!r} is no mode of a card. Next: one of {', '.join(MODES)}")
        for _ in range(_TRIES):
            page = await self._ledger.read()
            card = find_card(page.rows, named)
            steps = await self._checked(page.rows, card, mode)
            if dry_run or await self._write(page, card, mode, by):
                return ModeBody(card=await self._resources.card(card.id), steps=list(steps))
        raise Conflict(f"the wish for {named} was written by others all the time. Next: try again")

    async def _checked(self, rows: Rows, card: Card, mode: Mode) -> tuple[str, ...]:
        if card.health.verdict is Verdict.WEDGED:
            raise Refused(f"{card.label} is wedged: {card.health.reason}. Next: reboot {card.host}")
        here = card.host == self._ledger.host
        mates = unit(card, (each for each in rows.cards.values() if each.host == card.host))
        view = ModesView(
            cards=tuple(mates),
            wishes={mate.id: CardWish(mate.id, mode=mode) for mate in mates},  # asked for together
            unread_wishes=rows.unread.wishes,
            unread_bindings=bool(rows.unread.bindings),
            bindings=tuple(rows.bindings.values()),
            workers=await self._workers.list() if here else (),
        )
        held = hindrance(view, card, mode) if card.mode is not mode else ""
        if held:
            raise CardBusy(f"{card.label} cannot be switched to {mode.value}: {held}")
        return await self._modes.plan(card, mode) if here else (f"{card.host} switches it to {mode.value}",)

    async def _write(self, page: Page, card: Card, mode: Mode, by: str) -> bool:
        """The wish, for every card of the unit. A card that is in the mode already is kept so from now on."""
        mates = unit(card, (each for each in page.rows.cards.values() if each.host == card.host))
        wishes = [asking(page.rows.wishes.get(mate.id, CardWish(mate.id)), mode, by) for mate in mates]
        told = [self._ledger.event(mate.label, "mode-wished", f"{mode.value}, by {by}") for mate in mates]
        done = await unless_conflict(self._ledger.commit(page, Change(puts=[*wishes], events=told)))
        if done:
            self._wake("mode-wished")
        return done

"""A person asks for a card's mode: carried out, refused with the holder's name, told in advance."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvmpool.core.model import Mode, Rows, Verdict
from kvmpool.errors import CardBusy, NotFound, Refused
from tests.api.pool import Pool

A, B = "0000:41:00.0", "0000:42:00.0"


def run(story: Callable[[Pool], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with Pool() as pool:
            await pool.until(_healthy)
            await story(pool)

    asyncio.run(whole())


def _healthy(rows: Rows) -> bool:
    verdicts = [card.health.verdict for card in rows.cards.values()]
    return len(verdicts) == 2 and set(verdicts) == {Verdict.HEALTHY}


def test_a_wish_is_carried_out_and_stays() -> None:
    async def story(pool: Pool) -> None:
        asked = await pool.modes.ask(A, "passthrough", dry_run=False, by="root")
        assert asked["steps"] == [f"{A}: sim -> vfio-pci"]
        ticket = asked["card"]["mode_ticket"]
        assert (asked["card"]["mode_wish"], ticket) == ("passthrough", 1)
        await pool.until(lambda rows: any(card.mode is Mode.PASSTHROUGH for card in rows.cards.values()))
        card = await pool.resources.card(A)
        assert (card["mode"], card["mode_answered"], card["mode_fault"]) == ("passthrough", 1, "")
        again = await pool.modes.ask(A, "passthrough", dry_run=False, by="root")
        assert again["steps"] == []

    run(story)


def test_a_dry_run_writes_nothing() -> None:
    async def story(pool: Pool) -> None:
        told = await pool.modes.ask(A, "off", dry_run=True, by="root")
        assert told["steps"] == [f"{A}: sim -> "]
        assert (await pool.rows()).wishes == {}

    run(story)


def test_a_card_that_is_held_is_refused_and_nothing_is_written() -> None:
    async def story(pool: Pool) -> None:
        await pool.call("prepare")
        (bound,) = (await pool.rows()).bindings.values()
        held = (await pool.rows()).cards[bound.card].address
        with pytest.raises(CardBusy, match=rf"cannot be switched to passthrough: held by {bound.label} of domain vm0"):
            await pool.modes.ask(held, "passthrough", dry_run=False, by="root")
        other = B if held == A else A
        next(card for card in pool.host.cards.values() if card.address == other).holder = "pid 7 (python3)"
        with pytest.raises(CardBusy, match=r"in use by pid 7 \(python3\)"):
            await pool.modes.ask(other, "passthrough", dry_run=False, by="root")
        assert (await pool.rows()).wishes == {}

    run(story)


def test_what_is_no_mode_or_no_card_is_said() -> None:
    async def story(pool: Pool) -> None:
        with pytest.raises(Refused, match="'any' is no mode of a card. Next: one of passthrough, vgpu, off"):
            await pool.modes.ask(A, "any", dry_run=False, by="root")
        with pytest.raises(NotFound):
            await pool.modes.ask("0000:99:00.0", "off", dry_run=False, by="root")

    run(story)


def test_a_wedged_card_is_refused_with_the_remedy() -> None:
    async def story(pool: Pool) -> None:
        next(card for card in pool.host.cards.values() if card.address == A).switch_ends = "hangs"
        await pool.modes.ask(A, "passthrough", dry_run=False, by="root")
        await pool.until(lambda rows: any(card.health.verdict is Verdict.WEDGED for card in rows.cards.values()))
        with pytest.raises(Refused, match=r"is wedged: .* Next: reboot h0"):
            await pool.modes.ask(A, "off", dry_run=False, by="root")
        with pytest.raises(Refused, match=r"is wedged: .* Next: reboot h0"):
            await pool.resources.restore(A, "", "root")

    run(story)

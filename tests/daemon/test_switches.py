"""Mode switches over the real loops: carried out, refused, undone, wedged; after kills and reboots the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest

from kvmpool.core.model import Card, CardWish, Event, Mode, Verdict
from kvmpool.core.reconcile_modes import asking
from kvmpool.daemon.ledger import Change
from kvmpool.daemon.switches import InitialModes
from kvmpool.store import codec
from tests.daemon.pool import GPU0, Killed, Pool


def story(tell: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @wraps(tell)
    def run() -> None:
        asyncio.run(tell())

    return run


async def wish(pool: Pool, mode: Mode, n: int = 0) -> int:
    """A person asks; the ticket."""
    page = await pool.ledger.read()
    card = pool.card_ids[n]
    new = asking(page.rows.wishes.get(card, CardWish(card)), mode, "root")
    await pool.ledger.commit(page, Change(puts=[new]))
    return new.mode_ticket


async def row(pool: Pool, n: int = 0) -> Card:
    return (await pool.rows()).cards[pool.card_ids[n]]


async def events(pool: Pool, kind: str) -> list[str]:
    items, _ = await pool.store.list("/event/")
    found = [codec.decode(item.key, item.value) for item in items]
    return [event.reason for event in found if isinstance(event, Event) and event.kind == kind]


@story
async def test_an_idle_card_is_switched_both_ways_and_its_row_says_so() -> None:
    pool = Pool()
    await pool.run_for(6)
    for mode in (Mode.PASSTHROUGH, Mode.OFF, Mode.VGPU):
        ticket = await wish(pool, mode)
        await pool.run_for(3)
        card = await row(pool)
        assert (card.mode, card.switching.answered, card.switching.fault) == (mode, ticket, "")
    assert [reason.partition(" (")[0] for reason in await events(pool, "mode")] == [
        "passthrough, was vgpu", "off, was passthrough", "vgpu, was off"
    ]  # fmt: skip
    assert (await row(pool)).health.verdict is Verdict.HEALTHY
    assert (await row(pool, 1)).mode is Mode.VGPU


@story
async def test_a_bound_card_is_not_switched_until_its_binding_is_gone() -> None:
    pool = Pool(cards=1)
    await pool.run_for(6)
    await pool.start_domain()
    bound = await pool.served_by()
    ticket = await wish(pool, Mode.PASSTHROUGH)
    await pool.run_for(3)
    card = await row(pool)
    assert (card.mode, card.switching.answered) == (Mode.VGPU, ticket)
    assert card.switching.fault == f"held by {bound.label} of domain vm0"
    pool.stop_domain()
    await pool.run_for(5)
    assert (await row(pool)).mode is Mode.PASSTHROUGH
    assert GPU0 not in (await pool.rows()).claims


@story
async def test_a_card_held_by_a_stranger_is_tried_again_and_each_reason_is_told_once() -> None:
    pool = Pool(cards=1)
    await pool.run_for(6)
    held = pool.host.cards[pool.card_ids[0]]
    held.holder = "pid 7 (python3)"
    await wish(pool, Mode.PASSTHROUGH)
    await pool.run_for(10)
    assert (await row(pool)).switching.fault.endswith("is in use by pid 7 (python3)")
    assert len(await events(pool, "mode-refused")) == 1
    held.holder = ""
    await pool.run_for(40)
    assert (await row(pool)).mode is Mode.PASSTHROUGH


@story
async def test_a_switch_that_failed_is_not_tried_again_before_a_new_wish_or_a_reboot() -> None:
    pool = Pool(cards=1)
    await pool.run_for(6)
    card = pool.host.cards[pool.card_ids[0]]
    card.switch_ends = "fails"
    await wish(pool, Mode.PASSTHROUGH)
    await pool.run_for(3)
    assert "still in mode vgpu" in (await row(pool)).switching.fault
    card.switch_ends = ""
    await pool.run_for(70)
    await pool.restart()
    await pool.run_for(10)
    assert (await row(pool)).mode is Mode.VGPU
    ticket = await wish(pool, Mode.PASSTHROUGH)
    await pool.run_for(3)
    assert ((await row(pool)).mode, (await row(pool)).switching.answered) == (Mode.PASSTHROUGH, ticket)
    card.switch_ends, card.mode = "fails", Mode.VGPU
    await pool.run_for(3)
    pool.host.boot, card.switch_ends = 2, ""
    await pool.restart()
    await pool.run_for(10)
    assert (await row(pool)).mode is Mode.PASSTHROUGH


@story
async def test_a_wedged_card_is_never_tried_again_and_only_a_reboot_helps() -> None:
    pool = Pool(cards=2)
    await pool.run_for(6)
    card = pool.host.cards[pool.card_ids[0]]
    card.switch_ends = "hangs"
    await wish(pool, Mode.PASSTHROUGH)
    await pool.run_for(3)
    wedged = await row(pool)
    assert wedged.health.verdict is Verdict.WEDGED
    assert wedged.health.reason.endswith("its driver does not let go. Next: reboot the host")
    card.switch_ends = ""
    page = await pool.ledger.read()
    repaired = replace(page.rows.wishes[card.id], restore=1)
    await pool.ledger.commit(page, Change(puts=[repaired]))
    await pool.run_for(70)
    assert ((await row(pool)).mode, (await row(pool)).health.verdict) == (Mode.VGPU, Verdict.WEDGED)
    assert (await row(pool, 1)).health.verdict is Verdict.HEALTHY
    pool.host.boot = 2
    await pool.restart()
    await pool.run_for(20)
    assert (await row(pool)).mode is Mode.PASSTHROUGH
    assert (await row(pool)).health.verdict is Verdict.PROBATION


@story
async def test_the_recorded_mode_comes_back_after_a_reboot() -> None:
    pool = Pool(cards=1)
    await pool.run_for(6)
    await wish(pool, Mode.PASSTHROUGH)
    await pool.run_for(3)
    pool.host.boot, pool.host.cards[pool.card_ids[0]].mode = 2, Mode.VGPU  # the kernel's own choice
    await pool.restart()
    await pool.run_for(10)
    assert (await row(pool)).mode is Mode.PASSTHROUGH


@story
async def test_the_configuration_says_the_mode_where_no_person_does() -> None:
    pool = Pool(cards=2)
    pool.initial_modes = InitialModes({"0000:42:00.0": Mode.OFF}, Mode.PASSTHROUGH)
    pool.start()
    await pool.run_for(6)
    assert [(await row(pool, n)).mode for n in (0, 1)] == [Mode.PASSTHROUGH, Mode.OFF]
    await wish(pool, Mode.VGPU, 1)
    await pool.run_for(3)
    assert [(await row(pool, n)).mode for n in (0, 1)] == [Mode.PASSTHROUGH, Mode.VGPU]
    assert await events(pool, "mode-wished") == [
        "passthrough, as the configuration says", "off, as the configuration says"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "point", [f"{when}-{what}" for what in ("record-mode", "switch-mode") for when in ("before", "after")]
)
def test_a_daemon_killed_there_ends_the_same(point: str) -> None:
    async def tell() -> None:
        pool = Pool(cards=1)
        pool.initial_modes = InitialModes(default=Mode.PASSTHROUGH)
        pool.start()
        pool.kill_at = point
        with pytest.raises(Killed):
            await pool.run_for(6)
        await pool.restart()
        await pool.run_for(6)
        card = await row(pool)
        assert (card.mode, card.switching.answered, card.switching.fault) == (Mode.PASSTHROUGH, 1, "")

    asyncio.run(tell())

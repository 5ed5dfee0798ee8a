"""Resets of dead passthrough cards over the real loops: done, failed, impossible, held, killed in the middle."""

from __future__ import annotations

import pytest

from kvmpool.core.health import Limits
from kvmpool.core.model import Card, Mode, Verdict, XidSignal
from tests.daemon.pool import Killed, Pool
from tests.daemon.test_switches import events, row, story, wish

_NEEDS_RESET = 48


async def failed(pool: Pool, mode: Mode = Mode.PASSTHROUGH) -> Card:
    """Card 0 in this mode fails with what a reset may mend; its row when the pool has had time for it."""
    await pool.run_for(6)
    pool.host.cards[pool.card_ids[0]].mode = mode
    await wish(pool, mode)
    await pool.run_for(3)
    pool.card.offer(XidSignal(pool.card_ids[0], _NEEDS_RESET, pool.clock.now()))
    await pool.run_for(6)
    return await row(pool)


def resets(pool: Pool) -> int:
    return pool.host.cards[pool.card_ids[0]].resets


@story
async def test_a_free_card_is_reset_once_validated_and_on_probation_and_then_it_is_healthy() -> None:
    pool = Pool(limits=Limits(probation_s=20.0))
    assert (await failed(pool)).health.verdict is Verdict.PROBATION
    await pool.run_for(60)
    assert (await row(pool)).health.verdict is Verdict.HEALTHY
    assert resets(pool) == 1
    said = await events(pool, "resetting")
    assert len(said) == 1
    assert said[0].startswith("reset after: Xid 48")


@story
async def test_where_resets_are_forbidden_or_the_host_has_a_driver_the_card_waits_for_a_person() -> None:
    for pool, mode in (
        (Pool(limits=Limits(may_reset=False)), Mode.PASSTHROUGH),
        (Pool(), Mode.VGPU),
    ):
        assert (await failed(pool, mode)).health.verdict is Verdict.QUARANTINED
        await pool.run_for(60)
        assert (await row(pool)).health.verdict is Verdict.QUARANTINED
        assert resets(pool) == 0


@story
async def test_a_reset_that_fails_is_the_end_until_a_person_says_otherwise() -> None:
    pool = Pool()
    pool.host.cards[pool.card_ids[0]].reset_ends = "fails"
    card = await failed(pool)
    assert card.health.verdict is Verdict.DEAD
    assert card.health.reason.startswith("no working reset: Inappropriate ioctl for device; before: Xid 48")
    pool.host.cards[pool.card_ids[0]].reset_ends = ""
    await pool.run_for(300)
    await pool.restart()
    await pool.run_for(10)
    assert (await row(pool)).health.verdict is Verdict.DEAD
    assert resets(pool) == 0


@story
async def test_a_card_without_a_reset_stays_quarantined_and_its_row_says_why() -> None:
    pool = Pool()
    pool.host.cards[pool.card_ids[0]].reset_ends = "impossible"
    card = await failed(pool)
    assert card.health.verdict is Verdict.QUARANTINED
    assert card.health.reason.endswith("; no working reset")
    pool.host.cards[pool.card_ids[0]].reset_ends = ""
    await pool.run_for(300)
    assert (await row(pool)).health.reason == card.health.reason
    assert resets(pool) == 0


@story
async def test_a_reset_without_an_end_wedges_the_card() -> None:
    pool = Pool()
    pool.host.cards[pool.card_ids[0]].reset_ends = "hangs"
    card = await failed(pool)
    assert card.health.verdict is Verdict.WEDGED
    assert card.health.reason.endswith("its reset does not end. Next: reboot the host")


@story
async def test_a_card_that_a_stranger_holds_is_reset_when_he_has_left() -> None:
    pool = Pool()
    pool.host.cards[pool.card_ids[0]].holder = "pid 7 (qemu-system-x86, domain vm9)"
    # It is on vfio-pci before: to give it there nobody may hold it.
    assert (await failed(pool)).health.verdict is Verdict.QUARANTINED
    await pool.run_for(100)
    assert resets(pool) == 0
    pool.host.cards[pool.card_ids[0]].holder = ""
    await pool.run_for(70)
    assert (await row(pool)).health.verdict is Verdict.PROBATION
    assert resets(pool) == 1


@pytest.mark.parametrize(("point", "times"), [("before-reset-card", 1), ("after-reset-card", 2)])
def test_a_daemon_that_is_killed_around_a_reset_leaves_it_to_the_next(point: str, times: int) -> None:
    @story
    async def tell() -> None:
        pool = Pool()
        pool.kill_at = point
        with pytest.raises(Killed):
            await failed(pool)
        assert (await row(pool)).health.verdict is Verdict.QUARANTINED
        pool.kill_at = ""
        await pool.restart()
        await pool.run_for(6)
        assert (await row(pool)).health.verdict is Verdict.PROBATION
        assert resets(pool) == times

    tell()

"""How loops go round: bells, errands, failing turns, and the time from a fault to the next generation."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from kvmpool.core.model import BootId, XidSignal
from kvmpool.daemon import turns, wake
from kvmpool.daemon.turns import Errands, Loop
from kvmpool.daemon.wake import Wake, follow
from kvmpool.errors import Conflict, Unreachable
from kvmpool.ports import Put
from kvmpool.store.memory import MemoryStore
from tests.daemon.pool import GPU0, Pool


class RealClock:
    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def boot_id(self) -> BootId:
        return BootId("h0-boot-1")

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)


# --- bells ------------------------------------------------------------------------------------------------------------


def test_a_ring_ends_a_wait_and_one_before_it_is_kept() -> None:
    async def tell() -> None:
        bell, clock = Wake(), RealClock()
        bell.ring()
        bell.ring()
        assert await asyncio.wait_for(bell.wait(clock, 60), 1)
        assert not await bell.wait(clock, 0.01), "two rings are one"
        asyncio.get_running_loop().call_later(0.01, bell.ring)
        assert await asyncio.wait_for(bell.wait(clock, 60), 1)

    asyncio.run(tell())


def test_the_store_rings_for_rows_and_not_for_its_event_log() -> None:
    async def tell() -> None:
        store, rings = MemoryStore(RealClock()), 0

        def ring() -> None:
            nonlocal rings
            rings += 1

        following = asyncio.ensure_future(follow(store, RealClock(), [ring]))
        await asyncio.sleep(0.05)
        assert rings == 1  # what happened before the watch began
        await store.commit("1", puts=[Put("/claim/u/gpu0", b"{}")])
        await asyncio.sleep(0.05)
        assert rings == 2
        await store.commit("2", puts=[Put("/event/1", b"{}")])
        await asyncio.sleep(0.05)
        assert rings == 2
        following.cancel()

    asyncio.run(tell())


def test_a_watch_that_breaks_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wake, "_RETRY_S", 0.01)

    async def tell() -> None:
        store, rung, broken = MemoryStore(RealClock()), asyncio.Event(), 3
        listing = store.list

        async def fails(prefix: str) -> object:
            nonlocal broken
            broken -= 1
            if broken > 0:
                raise Unreachable("store is away")
            return await listing(prefix)

        store.list = fails  # type: ignore[method-assign, assignment]
        following = asyncio.ensure_future(follow(store, RealClock(), [rung.set]))
        await asyncio.wait_for(rung.wait(), 1)
        following.cancel()

    asyncio.run(tell())


# --- errands ----------------------------------------------------------------------------------------------------------


def test_an_errand_that_hangs_holds_up_nothing_but_its_own_key() -> None:
    async def tell() -> None:
        ends, done = 0, []

        def on_end() -> None:
            nonlocal ends
            ends += 1

        errands = Errands(on_end)

        async def note(word: str) -> None:
            done.append(word)

        async def hang() -> None:
            await asyncio.Event().wait()

        errands.run("hung", hang)
        errands.run("hung", lambda: note("never"))
        errands.run("quick", lambda: note("quick"))
        assert await errands.settle()
        assert done == ["quick"]
        assert ends == 1
        assert "hung" in errands
        assert "quick" not in errands
        assert not await errands.settle()
        await errands.close()
        assert "hung" not in errands

    asyncio.run(tell())


def test_errands_are_bounded() -> None:
    async def tell() -> None:
        running, most, left, ended = 0, 0, 20, asyncio.Event()

        async def call() -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            running -= 1

        def on_end() -> None:
            nonlocal left
            left -= 1
            if not left:
                ended.set()

        errands = Errands(on_end, limit=4)
        for n in range(20):
            errands.run(n, call)
        await asyncio.wait_for(ended.wait(), 2)
        assert most == 4

    asyncio.run(tell())


def test_a_mistake_in_an_errand_is_not_swallowed() -> None:
    async def tell() -> None:
        errands = Errands(lambda: None)

        async def mistake() -> None:
            raise KeyError("ours")

        errands.run("x", mistake)
        with pytest.raises(KeyError):
            await errands.settle()

    asyncio.run(tell())


# --- turns ------------------------------------------------------------------------------------------------------------


class Scripted(Loop):
    """A loop whose turns do what they are told."""

    name = "scripted"

    def __init__(self, script: list[object]) -> None:
        super().__init__(RealClock())
        self.script = script
        self.ended = asyncio.Event()
        self.closed = False

    async def turn(self) -> bool:
        if not self.script:
            self.ended.set()
            return False
        now = self.script.pop(0)
        if isinstance(now, Exception):
            raise now
        return bool(now)

    def pause_s(self) -> float:
        return 60.0

    async def close(self) -> None:
        self.closed = True


def _run(loop: Scripted) -> None:
    async def tell() -> None:
        running = asyncio.ensure_future(loop.run())
        await asyncio.wait_for(loop.ended.wait(), 2)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(tell())


def test_a_failing_turn_is_told_once_and_the_loop_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(turns, "_RETRY_S", 0.001)
    caplog.set_level(logging.INFO)
    away = [Unreachable("store is away") for _ in range(5)]
    loop = Scripted([True, *away, KeyError("ours"), True])
    _run(loop)
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "store is away; trying again" in line]) == 1
    assert len([line for line in lines if "works again" in line]) == 1
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
    assert loop.turns == 9
    assert loop.closed


def test_a_loop_that_never_rests_is_slowed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_BUSY_TURNS", 5)
    monkeypatch.setattr(turns, "_BUSY_PAUSE_S", 0.02)
    began = time.monotonic()
    _run(Scripted([True] * 15))
    assert time.monotonic() - began > 0.15


def test_somebody_who_wrote_first_only_means_to_look_again() -> None:
    async def tell() -> None:
        async def conflict() -> None:
            raise Conflict("x")

        async def applied() -> int:
            return 3

        assert not await turns.unless_conflict(conflict())
        assert await turns.unless_conflict(applied())

    asyncio.run(tell())


# --- how long it takes ------------------------------------------------------------------------------------------------


class Live(Pool):
    """The pool in real time, its loops running and woken by the store as in the daemon."""

    def __init__(self, cards: int = 2) -> None:
        super().__init__(cards, store=lambda clock: MemoryStore(RealClock()))

    def start(self) -> None:
        self.clock = RealClock()  # type: ignore[assignment]
        super().start()

    async def until_served(self, generation: int) -> None:
        while True:
            claim = (await self.rows()).claims.get(GPU0)
            if claim is not None and claim.pointed == generation:
                return
            await asyncio.sleep(0.002)


def test_from_a_fault_to_the_next_generation_everything_is_woken_and_nothing_timed() -> None:
    async def tell() -> None:
        pool = Live()
        bells = [loop.wake.ring for loop in pool.loops]
        tasks = [asyncio.ensure_future(loop.run()) for loop in pool.loops]
        tasks.append(asyncio.ensure_future(follow(pool.store, pool.clock, bells)))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await pool.prepare()
        await asyncio.wait_for(pool.until_served(1), 5)
        prepared_s = time.monotonic() - began
        began = time.monotonic()
        pool.card.offer(XidSignal(pool.card_ids[0], 79, pool.clock.now()))
        await asyncio.wait_for(pool.until_served(2), 5)
        moved_s = time.monotonic() - began
        await asyncio.sleep(0.2)
        turns_before = [loop.turns for loop in pool.loops]
        await asyncio.sleep(1.0)
        rested = [loop.turns - before for loop, before in zip(pool.loops, turns_before, strict=True)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Any timer on the way would be at least 0.5 s; the loops themselves take a few milliseconds.
        assert prepared_s < 0.4
        assert moved_s < 0.4
        assert max(rested) <= 12, f"a resting loop looks a few times a second: {rested}"

    asyncio.run(tell())

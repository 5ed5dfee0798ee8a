"""kill -9 of the daemon at every point of perform.py, one by one: the next daemon comes to the same end."""

from __future__ import annotations

import asyncio

import pytest

from kvmpool.core.model import Breaker, CardId, DomainUuid, Event, GoneSignal, HostName, Rows, Settings
from kvmpool.daemon import ledger
from kvmpool.daemon.ledger import Change
from kvmpool.daemon.perform import POINTS
from kvmpool.daemon.turns import Loop
from kvmpool.store import codec
from tests.daemon.pool import GPU0, VGPU, VM0, Killed, Pool

VM1 = DomainUuid("00000000-0000-4000-8000-000000000002")
# Reached only with more than one host, or by a story of its own below.
ELSEWHERE = {"lose", "trip-breaker", "forget-events", "publish-host", "report-broken", "release", "unpoint-relay"}
ELSEWHERE |= {"record-mode", "switch-mode", "reset-card"}  # tests/daemon/test_switches.py, test_resets.py
# tests/scenarios: passthrough-*
ELSEWHERE |= {"attach-device", "detach-device", "tell-force-unplug", "force-unplug", "power-on"}


class Mortal(Pool):
    """A pool whose daemon dies once, at `kill_at`, wherever in the story that is, and is started again."""

    died = False

    @property
    def loops(self) -> tuple[Loop, ...]:
        """Relays last to first: then workers are stopped by us and not by their relays."""
        return (self.domain, self.cluster, self.card)

    async def settle(self, turns: int = 60) -> None:
        try:
            await super().settle(turns)
        except Killed:
            self.died = True
            await self.restart()
            self.domain.refresh()
            await super().settle(turns)


async def walk(pool: Pool) -> None:
    """Start, fail over, lose a worker, start a neighbour, stop both."""
    await pool.settle()
    await pool.start_domain()
    pool.card.offer(GoneSignal(pool.card_ids[0], pool.clock.now()))
    await pool.settle()
    pool.host.cards[pool.card_ids[0]].condition = pool.host.cards[pool.card_ids[0]].condition.__class__.GONE
    await pool.run_for(3)
    await pool.start_domain(VGPU, VM1, "vm1")
    key = next(key for key in pool.host.workers if key[0] == GPU0)
    pool.world.end_worker(pool.host, key)
    await pool.run_for(6)
    await pool.served_by()
    pool.stop_domain(VM1)
    await pool.run_for(3)


def outcome(pool: Pool, rows: Rows) -> object:
    """What must be the same however often the daemon died; generations may be skipped, never reused."""
    return (
        sorted((claim.domain_name, str(claim.pointed is not None)) for claim in rows.claims.values()),
        sorted((each.domain_name, each.card, each.phase) for each in rows.bindings.values()),
        sorted((attempt.domain_name, attempt.started) for attempt in rows.attempts.values()),
        sorted((card.id, card.health.verdict) for card in rows.cards.values()),
        sorted(str(claim.name) for claim, _ in pool.host.workers),
        sorted(pool.host.relays),
    )


async def _run(kill_at: str) -> tuple[Mortal, Rows]:
    pool = Mortal(cards=3)
    pool.kill_at = kill_at
    await walk(pool)
    return pool, await pool.rows()


def test_the_walk_reaches_every_point_that_is_not_tested_elsewhere() -> None:
    async def tell() -> None:
        pool = Mortal(cards=3)
        reached: set[str] = set()
        pool.checkpoint = reached.add  # type: ignore[assignment, method-assign]
        pool.start()
        await walk(pool)
        missing = {point for point in POINTS if point not in reached}
        assert {point.split("-", 1)[1] for point in missing} <= ELSEWHERE - {"publish-host", "report-broken"}

    asyncio.run(tell())


@pytest.mark.parametrize("point", POINTS)
def test_a_daemon_killed_at_any_point_comes_to_the_same_end(point: str) -> None:
    async def tell() -> None:
        whole, rows = await _run("")
        assert not whole.died
        pool, after = await _run(point)
        assert pool.died or point.split("-", 1)[1] in ELSEWHERE
        assert outcome(pool, after) == outcome(whole, rows)
        await pool.served_by()
        generations = [each.generation for each in after.bindings.values()]
        assert max(generations) <= after.counter

    asyncio.run(tell())


@pytest.mark.parametrize("point", ["before-trip-breaker", "after-trip-breaker"])
def test_a_daemon_killed_while_it_opens_the_breaker_opens_it(point: str) -> None:
    async def tell() -> None:
        pool = Mortal(cards=3)
        pool.settings = Settings(breaker_min_cards=0)
        pool.start()
        await pool.settle()
        await pool.start_domain()
        pool.kill_at = point
        pool.xid(pool.card_ids[0], 95)
        await pool.settle()
        assert pool.died
        rows = await pool.rows()
        assert "1 of 3 cards" in rows.breaker.open_reason
        assert [each.generation for each in rows.bindings.values()] == [1]

    asyncio.run(tell())


@pytest.mark.parametrize("point", ["before-release", "after-release", "before-unpoint-relay", "after-unpoint-relay"])
def test_a_daemon_killed_while_it_gives_up_a_binding_without_successor_gives_it_up(point: str) -> None:
    async def tell() -> None:
        pool = Mortal(cards=1)
        await pool.settle()
        await pool.start_domain()
        pool.kill_at = point
        pool.xid(pool.card_ids[0], 79)
        await pool.settle()
        assert pool.died
        rows = await pool.rows()
        assert rows.bindings == {}
        assert rows.claims[GPU0].pointed is None
        assert pool.host.workers == {}
        assert pool.host.relays[VM0].points == {}

    asyncio.run(tell())


@pytest.mark.parametrize("point", ["before-forget-events", "after-forget-events"])
def test_a_daemon_killed_while_it_shortens_the_event_log_shortens_it(
    point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "EVENTS_KEPT", 5)
    monkeypatch.setattr(ledger, "_EVENTS_SLACK", 5)

    async def tell() -> None:
        pool = Mortal(cards=1)
        page = await pool.ledger.read()
        told = [Event("x", "y", str(n), HostName("h0"), at=float(n)) for n in range(30)]
        await pool.ledger.commit(page, Change(events=told))
        pool.kill_at = point
        await pool.settle()
        assert pool.died
        items, _ = await pool.store.list("/event/")
        assert 5 <= len(items) <= 10
        left = sorted(event.at for item in items if isinstance(event := codec.decode(item.key, item.value), Event))
        assert left[0] > 20, "the oldest go first"

    asyncio.run(tell())


def test_the_breakers_memory_survives_the_daemon() -> None:
    async def tell() -> None:
        pool = Pool(cards=2)
        await pool.settle()
        await pool.start_domain()
        pool.xid(pool.card_ids[0], 95)
        await pool.settle()
        await pool.restart()
        memory: Breaker = (await pool.rows()).breaker
        assert [card for _, card in memory.failovers] == [CardId(pool.card_ids[0])]

    asyncio.run(tell())

"""Reading rows and committing changes of them: guards, ambiguity, the event log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvmpool.core.model import Bind, CardWish, Generation, HostName, Phase, Release, Settings
from kvmpool.daemon import ledger as ledger_module
from kvmpool.daemon.cluster_loop import ClusterLoop
from kvmpool.daemon.ledger import Change, Ledger
from kvmpool.daemon.perform import ClusterHands
from kvmpool.errors import Ambiguous, Conflict, StoreUnreachable
from kvmpool.ports import Guard, Put, Resolution
from kvmpool.sim.world import SimClock, World
from kvmpool.store import codec
from kvmpool.store.memory import MemoryStore
from tests.core.build import H0, binding, card, claim
from tests.daemon.pool import GPU0, Pool


class Doubtful(MemoryStore):
    """Answers the next commit with Ambiguous, whether it was applied or not; `silent` resolves say nothing."""

    doubt = ""
    silent = 0

    async def commit(
        self, op_id: str, *, guards: Sequence[Guard] = (), puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> int:
        doubt, self.doubt = self.doubt, ""
        if doubt == "lost":
            raise Ambiguous(op_id)
        rev = await super().commit(op_id, guards=guards, puts=puts, deletes=deletes)
        if doubt == "applied":
            raise Ambiguous(op_id)
        return rev

    async def resolve(self, op_id: str) -> int | Resolution:
        if self.silent > 0:
            self.silent -= 1
            raise StoreUnreachable("the store is away")
        return await super().resolve(op_id)


class Impatient(SimClock):
    """Sleeping moves the world."""

    async def sleep(self, delay_s: float) -> None:
        self._world.advance(delay_s)


def make() -> tuple[Doubtful, Ledger]:
    world = World()
    clock = Impatient(world, world.add_host("h0", 0))
    store = Doubtful(clock)
    return store, Ledger(store, clock, HostName("h0"))


def test_a_put_of_a_row_that_was_not_there_conflicts_with_one_that_is() -> None:
    async def tell() -> None:
        _, ledger = make()
        early = await ledger.read()
        await ledger.commit(await ledger.read(), Change(puts=[card()]))
        with pytest.raises(Conflict):
            await ledger.commit(early, Change(puts=[card()]))

    asyncio.run(tell())


def test_what_a_change_relies_on_guards_it() -> None:
    async def tell() -> None:
        _, ledger = make()
        await ledger.commit(await ledger.read(), Change(puts=[claim()]))
        page = await ledger.read()
        await ledger.commit(await ledger.read(), Change(puts=[replace(claim(), endpoint="tcp:x:1")]))
        with pytest.raises(Conflict):
            await ledger.commit(page, Change(puts=[card()], reads=[codec.claim_key(claim().key)]))

    asyncio.run(tell())


def test_a_turns_own_commits_do_not_conflict_with_each_other() -> None:
    async def tell() -> None:
        _, ledger = make()
        page = await ledger.read()
        await ledger.commit(page, Change(puts=[card()]))
        await ledger.commit(page, Change(puts=[replace(card(), driver="580")]))
        await ledger.commit(page, Change(deletes=[codec.card_key(card().id)]))
        await ledger.commit(page, Change(puts=[card()]))
        assert (await ledger.read()).rows.cards == {card().id: card()}

    asyncio.run(tell())


@pytest.mark.parametrize("silent", [0, 2])
def test_an_ambiguous_commit_that_was_applied_succeeds(silent: int) -> None:
    async def tell() -> None:
        store, ledger = make()
        page = await ledger.read()
        store.doubt, store.silent = "applied", silent
        rev = await ledger.commit(page, Change(puts=[card()]))
        assert page.revisions[codec.card_key(card().id)] == rev

    asyncio.run(tell())


def test_an_ambiguous_commit_that_was_not_applied_is_decided_again() -> None:
    async def tell() -> None:
        store, ledger = make()
        page = await ledger.read()
        store.doubt = "lost"
        with pytest.raises(Conflict):
            await ledger.commit(page, Change(puts=[card()]))
        assert (await ledger.read()).rows.cards == {}

    asyncio.run(tell())


def test_a_commit_that_cannot_be_resolved_is_unreachable() -> None:
    async def tell() -> None:
        store, ledger = make()
        page = await ledger.read()
        store.doubt, store.silent = "applied", 99
        with pytest.raises(StoreUnreachable):
            await ledger.commit(page, Change(puts=[card()]))

    asyncio.run(tell())


def test_an_event_is_written_with_its_change_or_not_at_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvmpool.events")

    async def tell() -> None:
        store, ledger = make()
        early = await ledger.read()
        event = ledger.event("h0/0000:41:00.0", "failed", "Xid 79")
        await ledger.commit(await ledger.read(), Change(puts=[card()]))
        with pytest.raises(Conflict):
            await ledger.commit(early, Change(puts=[card()], events=[event]))
        assert await store.list("/event/") == ((), 1)
        assert caplog.records == []
        await ledger.commit(await ledger.read(), Change(events=[event]))
        assert [record.getMessage() for record in caplog.records] == ["h0/0000:41:00.0: failed (Xid 79)"]

    asyncio.run(tell())


def test_the_event_log_is_kept_short_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "EVENTS_KEPT", 10)
    monkeypatch.setattr(ledger_module, "_EVENTS_SLACK", 5)
    monkeypatch.setattr(ledger_module, "_EVENTS_CHUNK", 4)

    async def tell() -> None:
        store, ledger = make()
        for n in range(20):
            event = replace(ledger.event("x", "y", str(n)), at=100.0 - n)  # a reboot turns the order of keys around
            await ledger.commit(await ledger.read(), Change(events=[event]))
        page = await ledger.read()
        assert len(page.old_events) == 10
        await ledger.forget_events(page)
        items, _ = await store.list("/event/")
        decoded = [codec.decode(item.key, item.value) for item in items]
        assert sorted(int(event.reason) for event in decoded) == list(range(10, 20))  # type: ignore[union-attr]

    asyncio.run(tell())


def test_a_refused_row_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def tell() -> None:
        store, ledger = make()
        await store.commit("1", puts=[Put("/card/GPU-0", b"{")])
        for _ in range(3):
            page = await ledger.read()
        assert len(page.faults) == 1
        assert page.rows.unread.cards == {"GPU-0"}

    asyncio.run(tell())
    assert len([record for record in caplog.records if "/card/GPU-0" in record.getMessage()]) == 1


def test_a_rebind_is_one_commit() -> None:
    """No reader ever sees the claim with both bindings open, nor with none while a successor was decided."""

    async def tell() -> None:
        store, ledger = make()
        old, new = binding(claim(), card(0), 1), binding(claim(), card(1), 2, Phase.PREPARING)
        await ledger.commit(await ledger.read(), Change(puts=[claim(), card(0), card(1), old, codec.Counter(1)]))
        page = await ledger.read()
        hands = ClusterHands(ledger, Impatient(World(), World().add_host("h0", 0)))
        before = (await store.list("/"))[1]
        await hands.perform(page, (Release(old, "x"), Bind(new, "y")), Settings())
        rows = (await ledger.read()).rows
        assert rows.revision == before + 1
        assert [each.phase for each in rows.bindings.values()] == [Phase.RELEASING, Phase.PREPARING]
        assert rows.counter == 2

    asyncio.run(tell())


@pytest.mark.parametrize("what", ["claim", "card", "wish", "counter"])
def test_a_bind_is_void_when_what_it_relied_on_has_changed(what: str) -> None:
    async def tell() -> None:
        pool = Pool(cards=1)
        await pool.settle()
        await pool.prepare()
        loop: ClusterLoop = pool.cluster
        read = loop._ledger.read

        async def read_then_change() -> object:
            page = await read()
            loop._ledger.read = read  # type: ignore[method-assign]
            now = await pool.ledger.read()
            on = next(iter(now.rows.cards.values()))
            change = {
                "claim": Change(deletes=[codec.claim_key(GPU0)]),
                "card": Change(puts=[replace(on, memory_mib=1)]),
                "wish": Change(puts=[CardWish(on.id, cordoned=True)]),
                "counter": Change(puts=[codec.Counter(7, now.rows.sequence)]),
            }[what]
            await pool.ledger.commit(now, change)
            return page

        loop._ledger.read = read_then_change  # type: ignore[method-assign, assignment]
        assert await loop.turn(), "it looks again at once"
        assert (await pool.rows()).bindings == {}
        await loop.turn()
        bound = (await pool.rows()).bindings
        assert list(bound) == ([(GPU0, Generation(8))] if what == "counter" else [])
        assert pool.host.name == H0

    asyncio.run(tell())

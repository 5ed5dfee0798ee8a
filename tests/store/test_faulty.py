"""The fault wrapper: each fault alone, and that the same seed gives the same faults."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvmpool.errors import Ambiguous, Conflict, KvmpoolError, StoreUnreachable
from kvmpool.ports import Must, Put, Resolution
from kvmpool.store.contract import settle
from kvmpool.store.faulty import Faults, FaultyStore
from kvmpool.store.memory import MemoryStore
from tests.store.backends import MovableClock


def _run(story: Callable[[FaultyStore], Awaitable[None]], faults: Faults, seed: int = 1) -> FaultyStore:
    clock = MovableClock()
    store = FaultyStore(MemoryStore(clock), clock, faults, seed)
    asyncio.run(asyncio.wait_for(_whole(story, store), 10))
    return store


async def _whole(story: Callable[[FaultyStore], Awaitable[None]], store: FaultyStore) -> None:
    await story(store)
    await store.close()


def test_a_lost_answer_resolves_to_the_revision_it_was_applied_at() -> None:
    async def story(store: FaultyStore) -> None:
        with pytest.raises(Ambiguous) as caught:
            await store.commit("op", puts=[Put("/a", b"1")])
        assert caught.value.op_id == "op"
        item = await store.get("/a")
        assert item is not None
        assert await store.resolve("op") == item.mod_rev

    _run(story, Faults(answer_lost=1))


def test_a_lost_commit_resolves_to_not_applied() -> None:
    async def story(store: FaultyStore) -> None:
        with pytest.raises(Ambiguous):
            await store.commit("op", puts=[Put("/a", b"1")])
        assert await store.resolve("op") is Resolution.NOT_APPLIED
        assert await store.get("/a") is None

    _run(story, Faults(commit_lost=1))


@pytest.mark.parametrize("seed", range(8))
def test_a_late_commit_is_applied_once_or_never_as_resolve_said(seed: int) -> None:
    async def story(store: FaultyStore) -> None:
        with pytest.raises(Ambiguous):
            await store.commit("op", guards=[("/a", Must.ABSENT)], puts=[Put("/a", b"1")])
        answer = await store.resolve("op")
        item = await store.get("/a")  # here, at the latest, the late commit arrives
        assert (item is None) == (answer is Resolution.NOT_APPLIED)
        assert answer is not Resolution.UNKNOWN

    _run(story, Faults(commit_late=1), seed)


def test_a_conflict_storm_lasts_as_long_as_told_and_changes_nothing() -> None:
    async def story(store: FaultyStore) -> None:
        for op in ("a", "b", "c"):
            with pytest.raises(Conflict, match="injected"):
                await store.commit(op, puts=[Put("/a", b"1")])
            store.faults = Faults(conflict_storm=3)
        await store.commit("d", puts=[Put("/a", b"1")])
        assert (await store.list("/"))[1] == 1

    _run(story, Faults(conflict=1, conflict_storm=3))


def test_unreachable_is_before_anything_is_done() -> None:
    async def story(store: FaultyStore) -> None:
        with pytest.raises(StoreUnreachable, match="injected"):
            await store.commit("op", puts=[Put("/a", b"1")])
        store.faults = Faults()
        assert await store.get("/a") is None

    _run(story, Faults(unreachable=1))


def test_settle_finds_the_truth_behind_ambiguous_answers() -> None:
    async def story(store: FaultyStore) -> None:
        value = 0
        for _ in range(100):
            item = await store.get("/n")
            guard = ("/n", Must.ABSENT if item is None else item.mod_rev)
            try:
                await settle(store, guards=[guard], puts=[Put("/n", b"%d" % (value + 1))])
            except StoreUnreachable:
                continue  # every try was lost: nothing was applied
            value += 1
            item = await store.get("/n")
            assert item is not None
            assert int(item.value) == value

    store = _run(story, Faults(answer_lost=0.3, commit_lost=0.2, commit_late=0.2, duplicate=0.2))
    assert store.injected > 50


def test_the_same_seed_gives_the_same_faults() -> None:
    def faults_of(seed: int) -> list[str]:
        log: list[str] = []

        async def story(store: FaultyStore) -> None:
            for n in range(60):
                try:
                    await store.commit(f"op{n}", puts=[Put("/a", b"1")])
                    log.append("ok")
                except KvmpoolError as error:
                    log.append(type(error).__name__)

        _run(story, Faults.rough(), seed)
        return log

    assert faults_of(7) == faults_of(7)
    assert faults_of(7) != faults_of(8)
    assert {"ok", "Ambiguous", "Conflict", "StoreUnreachable"} <= set(faults_of(7)) | set(faults_of(8))

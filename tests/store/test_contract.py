"""The contract of ports.Store (design 06 §6.1), the same for every backend, plain and under injected faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvmpool.errors import Conflict, NotFound, Refused, StoreUnreachable
from kvmpool.ports import Batch, Heartbeat, Must, Put, Resolution, Resync, Store
from kvmpool.store import contract
from kvmpool.store.faulty import Faults, FaultyStore
from tests.store.backends import NAMES, Backend, Client, MovableClock


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    return Backend(request.param, tmp_path)


@pytest.fixture(params=["memory", "sqlite"])
def plain(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    return Backend(request.param, tmp_path)


def test_a_guard_that_holds_lets_the_commit_through(backend: Backend) -> None:
    async def story(client: Client, _: MovableClock) -> None:
        first = await client.put("/a", b"1", ("/a", Must.ABSENT))
        second = await client.put("/a", b"2", ("/a", first))
        third = await client.put("/b", b"x", ("/a", Must.PRESENT), ("/a", second))
        item = await client.get("/a")
        assert item is not None
        assert (item.value, item.mod_rev) == (b"2", second)
        assert first < second < third

    backend.run(story)


@pytest.mark.parametrize("guard", [("/a", Must.ABSENT), ("/b", Must.PRESENT), ("/a", 999_999), ("/b", 1)])
def test_a_guard_that_does_not_hold_stops_everything(backend: Backend, guard: tuple[str, int | Must]) -> None:
    async def story(client: Client, _: MovableClock) -> None:
        await client.put("/a", b"1")
        before = await client.list("/")
        with pytest.raises(Conflict, match=guard[0]):
            await client.commit(guards=[("/a", Must.PRESENT), guard], puts=[Put("/c", b"x")], deletes=["/a"])
        assert await client.list("/") == before

    backend.run(story)


def test_list_is_sorted_prefixed_and_of_one_revision(backend: Backend) -> None:
    async def story(client: Client, _: MovableClock) -> None:
        for key in ("/b/2", "/b/10", "/bb", "/a", "/b/é", "/b/\U0001f600"):
            rev = await client.put(key, key.encode())
        items, at = await client.list("/b/")
        assert [item.key for item in items] == ["/b/10", "/b/2", "/b/é", "/b/\U0001f600"]
        assert at >= rev
        assert (await client.get("/none")) is None

    backend.run(story)


def test_readers_never_see_half_a_commit(backend: Backend) -> None:
    async def story(client: Client, _: MovableClock) -> None:
        done = asyncio.Event()

        async def write() -> None:
            for n in range(40):
                await client.commit(puts=[Put("/pair/a", b"%d" % n), Put("/pair/b", b"%d" % n)])
            done.set()

        async def read() -> None:
            while not done.is_set():
                items, _ = await client.list("/pair/")
                assert len({item.value for item in items}) <= 1
                assert len({item.mod_rev for item in items}) <= 1
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            group.create_task(write())
            group.create_task(read())

    backend.run(story)


def test_writers_of_one_counter_lose_no_step(backend: Backend) -> None:
    async def story(client: Client, _: MovableClock) -> None:
        async def count() -> list[int]:
            mine: list[int] = []
            while len(mine) < 10:
                item = await client.get("/counter")
                value = 0 if item is None else int(item.value)
                guard = ("/counter", Must.ABSENT if item is None else item.mod_rev)
                try:
                    await client.put("/counter", b"%d" % (value + 1), guard)
                except Conflict:
                    continue
                mine.append(value + 1)
            return mine

        given = await asyncio.gather(*(count() for _ in range(4)))
        assert sorted(number for mine in given for number in mine) == list(range(1, 41))

    backend.run(story)


def test_the_same_operation_twice_is_applied_once(plain: Backend) -> None:
    async def story(client: Client, _: MovableClock) -> None:
        rev = await client.store.commit("op-1", guards=[("/a", Must.ABSENT)], puts=[Put("/a", b"1")])
        assert await client.store.commit("op-1", guards=[("/a", Must.ABSENT)], puts=[Put("/a", b"1")]) == rev
        assert (await client.list("/"))[1] == rev
        assert await client.store.resolve("op-1") == rev

    plain.run(story)


def test_what_resolved_as_not_applied_is_never_applied_later(plain: Backend) -> None:
    async def story(client: Client, _: MovableClock) -> None:
        assert await client.store.resolve("op-late") is Resolution.NOT_APPLIED
        with pytest.raises(Conflict, match="op-late"):
            await client.store.commit("op-late", puts=[Put("/a", b"1")])
        assert await client.get("/a") is None
        assert await client.store.resolve("op-late") is Resolution.NOT_APPLIED

    plain.run(story)


def test_a_late_commit_is_refused_by_its_guard(plain: Backend) -> None:
    async def story(client: Client, _: MovableClock) -> None:
        rev = await client.put("/a", b"1")
        await client.put("/a", b"2", ("/a", rev))
        with pytest.raises(Conflict):
            await client.store.commit("late", guards=[("/a", rev)], puts=[Put("/a", b"old")])
        item = await client.get("/a")
        assert item is not None
        assert item.value == b"2"

    plain.run(story)


def test_the_journal_says_unknown_after_ten_minutes(plain: Backend) -> None:
    async def story(client: Client, clock: MovableClock) -> None:
        rev = await client.store.commit("op-1", puts=[Put("/a", b"1")])
        clock.jump(contract.JOURNAL_KEEP_S - 5)
        assert await client.store.resolve("op-1") == rev
        clock.jump(10)
        for n in range(40):
            await client.put("/b", b"%d" % n)
        assert await client.store.resolve("op-1") is Resolution.UNKNOWN

    plain.run(story)


# --- leases -----------------------------------------------------------------------------------------------------------


def test_a_lease_ends_all_its_keys_at_once_and_never_early(backend: Backend) -> None:
    async def story(client: Client, clock: MovableClock) -> None:
        lease = await client.grant(30)
        before = await client.commit(puts=[Put("/l/a", b"1", lease.id), Put("/l/b", b"2", lease.id), Put("/l/c", b"3")])
        clock.jump(lease.sent_at + lease.granted_ttl_s - clock.now() - 0.5)
        assert len((await client.list("/l/"))[0]) == 3
        clock.jump(1.0)
        items, _ = await client.list("/l/")
        assert [item.key for item in items] == ["/l/c"]
        with pytest.raises(NotFound):
            await client.keepalive(lease.id)
        with pytest.raises(Conflict, match="gone"):
            await client.put("/l/d", b"4", lease=lease.id)
        if not backend.faulty:
            batch = await _first_batch(client.store, "/l/", before)
            assert {event.key for event in batch.events} == {"/l/a", "/l/b"}
            assert all(event.value is None for event in batch.events)

    backend.run(story)


async def _first_batch(store: Store, prefix: str, after: int) -> Batch:
    async for each in store.watch(prefix, after):
        if isinstance(each, Batch):
            return each
    raise AssertionError("the watch ended")


def test_keepalive_renews_and_revoke_ends(backend: Backend) -> None:
    async def story(client: Client, clock: MovableClock) -> None:
        lease = await client.grant(30)
        await client.put("/l/a", b"1", lease=lease.id)
        for _ in range(3):
            clock.jump(20)
            assert await client.keepalive(lease.id) == 30
        assert await client.get("/l/a") is not None
        await client.revoke(lease.id)
        assert await client.get("/l/a") is None
        await client.revoke(lease.id)  # twice is no fault

    backend.run(story)


def test_a_put_without_the_lease_frees_the_key_of_it(backend: Backend) -> None:
    async def story(client: Client, clock: MovableClock) -> None:
        lease = await client.grant(5)
        await client.put("/l/a", b"1", lease=lease.id)
        await client.put("/l/a", b"2")
        clock.jump(10)
        assert await client.get("/l/a") is not None

    backend.run(story)


def test_a_jump_of_the_wall_clock_has_no_effect(backend: Backend) -> None:
    async def story(client: Client, clock: MovableClock) -> None:
        lease = await client.grant(30)
        await client.put("/l/a", b"1", lease=lease.id)
        for wall in (-1e8, 1e8):
            clock.wall_offset = wall
            assert await client.get("/l/a") is not None
            assert await client.keepalive(lease.id) == 30

    backend.run(story)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), 1e9])
def test_a_lease_of_no_sensible_length_is_refused(plain: Backend, ttl_s: float) -> None:
    async def story(client: Client, _: MovableClock) -> None:
        with pytest.raises(Refused, match="lease of"):
            await client.store.lease_grant(ttl_s)

    plain.run(story)


# --- watches ----------------------------------------------------------------------------------------------------------


def test_a_watch_is_complete_and_in_order_under_six_writers(plain: Backend) -> None:
    async def story(client: Client, _: MovableClock) -> None:
        start = (await client.list("/"))[1]
        seen: list[tuple[int, str, bytes | None]] = []

        async def watch() -> None:
            async for each in client.store.watch("/w/", start):
                assert not isinstance(each, Resync)
                if isinstance(each, Batch):
                    seen.extend((each.rev, event.key, event.value) for event in each.events)
                if len(seen) >= 6 * 20 * 2:
                    return

        async def write(who: int) -> list[tuple[int, str, bytes | None]]:
            mine: list[tuple[int, str, bytes | None]] = []
            for n in range(20):
                key = f"/w/{who}/{n}"
                rev = await client.commit(puts=[Put(key, b"x"), Put(f"/other/{who}", b"y")])
                mine.append((rev, key, b"x"))
                mine.append((await client.commit(deletes=[key]), key, None))
            return mine

        watching = asyncio.create_task(watch())
        written = await asyncio.gather(*(write(who) for who in range(6)))
        await asyncio.wait_for(watching, 10)
        assert seen == sorted(event for mine in written for event in mine)

    plain.run(story)


def test_who_follows_watch_and_resync_ends_with_the_stores_state(backend: Backend) -> None:
    async def story(client: Client, _: MovableClock) -> None:
        state: dict[str, bytes | None] = {}

        async def follow() -> None:
            listed = 0
            async for each in client.store.watch("/w/", 0):
                if isinstance(each, Resync):
                    items, listed = await client.list("/w/")
                    state.clear()
                    state.update({item.key: item.value for item in items})
                elif isinstance(each, Batch) and each.rev > listed:
                    state.update({event.key: event.value for event in each.events})
                if state.get("/w/end"):
                    return

        async def write(who: int) -> None:
            for n in range(15):
                await client.put(f"/w/{who}/{n % 4}", b"%d" % n)
                await client.commit(deletes=[f"/w/{who}/{(n + 1) % 4}"])

        following = asyncio.create_task(follow())
        await asyncio.gather(*(write(who) for who in range(6)))
        await client.put("/w/end", b"1")
        await asyncio.wait_for(following, 10)
        items, n = await client.list("/w/")
        assert {key: value for key, value in state.items() if value is not None} == {i.key: i.value for i in items}

    backend.run(story)


def test_a_watch_from_a_forgotten_revision_is_told_to_resync(plain: Backend) -> None:
    plain.events_kept = 10

    async def story(client: Client, clock: MovableClock) -> None:
        rev = [await client.put("/a", b"%d" % n) for n in range(25)][-1]
        for lost in (0, rev - 11, rev + 5):
            stream = client.store.watch("/", lost)
            assert await anext(stream) == Resync(rev)
            following = asyncio.ensure_future(_next_batch(stream))
            rev = await client.put("/a", b"after")
            assert (await asyncio.wait_for(following, 5)).rev == rev
            await stream.aclose()  # type: ignore[attr-defined]
        kept = client.store.watch("/", rev - 10)
        assert [(await _next_batch(kept)).rev for n in range(10)] == list(range(rev - 9, rev + 1))

    plain.run(story)


async def _next_batch(stream: AsyncIterator[Batch | Heartbeat | Resync]) -> Batch:
    while True:
        each = await anext(stream)
        if isinstance(each, Batch):
            return each


def test_a_watch_is_never_silent_for_five_seconds(plain: Backend) -> None:
    async def story(client: Client, clock: MovableClock) -> None:
        rev = await client.put("/a", b"1")
        stream = client.store.watch("/", rev)
        for _ in range(2):
            assert await asyncio.wait_for(anext(stream), 5) == Heartbeat(rev)

    plain.run(story)


def test_a_watch_sees_a_lease_end_without_any_write(plain: Backend) -> None:
    async def story(client: Client, clock: MovableClock) -> None:
        lease = await client.grant(30)
        rev = await client.put("/l/a", b"1", lease=lease.id)
        watching = asyncio.ensure_future(_first_batch(client.store, "/l/", rev))
        await asyncio.sleep(0.15)
        assert not watching.done()
        clock.jump(31)
        batch = await asyncio.wait_for(watching, 5)
        assert [(event.key, event.value) for event in batch.events] == [("/l/a", None)]

    plain.run(story)


def test_close_ends_the_watches_and_refuses_calls(backend: Backend) -> None:
    async def story(client: Client, _: MovableClock) -> None:
        rev = await client.put("/a", b"1")
        ended = asyncio.ensure_future(_drain(client.store.watch("/", rev)))
        await asyncio.sleep(0.05)
        await client.store.close()
        await asyncio.wait_for(ended, 2)
        if isinstance(client.store, FaultyStore):
            client.store.faults = Faults()
        with pytest.raises(StoreUnreachable, match="closed"):
            await client.get("/a")
        with pytest.raises(StoreUnreachable, match="closed"):
            await client.put("/a", b"2")

    backend.run(story)


async def _drain(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass

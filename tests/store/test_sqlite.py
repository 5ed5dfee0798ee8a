"""What only the SQLite store has: a file, a lock, other processes, a disk that is slow or full."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvmpool.core.model import BootId
from kvmpool.errors import Ambiguous, NotFound, Refused, StoreUnreachable
from kvmpool.ports import Batch, Put
from kvmpool.store.localfs import refuse_network
from kvmpool.store.sqlite import SqliteStore
from tests.store.backends import MovableClock

_COUNT = """
import asyncio, sys
from pathlib import Path
from kvmpool.errors import Conflict
from kvmpool.ports import Must, Put
from kvmpool.store.contract import settle
from kvmpool.store.sqlite import SqliteStore
from tests.store.backends import MovableClock

async def main(path, times, lead):
    store = SqliteStore(Path(path), MovableClock(), lead=lead)
    while times:
        item = await store.get("/counter")
        value = 0 if item is None else int(item.value)
        try:
            await settle(store, guards=[("/counter", Must.ABSENT if item is None else item.mod_rev)],
                         puts=[Put("/counter", b"%d" % (value + 1))])
        except Conflict:
            continue
        print(value + 1, flush=True)
        times -= 1
    await store.close()

asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "lead"))
"""


def _count(path: Path, times: int, lead: str = "follow") -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", _COUNT, str(path), str(times), lead]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)


def _run(path: Path, story: Callable[[SqliteStore], Awaitable[None]], **options: float) -> None:
    async def whole() -> None:
        store = SqliteStore(path, MovableClock(), **options)  # type: ignore[arg-type]
        try:
            await asyncio.wait_for(story(store), 30)
        finally:
            await store.close()

    asyncio.run(whole())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "store.db"


def test_two_processes_count_on_one_counter_without_losing_a_step(path: Path) -> None:
    _run(path, _nothing)
    processes = [_count(path, 30), _count(path, 30)]
    given = [int(line) for process in processes for line in process.communicate(timeout=60)[0].split()]
    assert sorted(given) == list(range(1, 61))
    assert len(processes) == 2
    assert all(process.returncode == 0 for process in processes)


async def _nothing(_: SqliteStore) -> None:
    return


def test_a_number_given_out_is_never_given_out_again_after_a_kill(path: Path) -> None:
    given: list[int] = []
    for _ in range(3):
        process = _count(path, 100_000, "lead")
        assert process.stdout is not None
        for _ in range(20):
            given.append(int(process.stdout.readline()))
        process.send_signal(signal.SIGKILL)
        given += [int(line) for line in process.communicate(timeout=10)[0].split()]
    assert given == sorted(set(given))

    async def story(store: SqliteStore) -> None:
        item = await store.get("/counter")
        assert item is not None
        assert int(item.value) >= given[-1]

    _run(path, story)


def test_a_second_daemon_is_refused_by_name_and_gets_in_after_the_first(path: Path) -> None:
    async def story(store: SqliteStore) -> None:
        with pytest.raises(Refused, match=rf"another kvmpoold \(pid {os.getpid()}\) leads"):
            SqliteStore(path, MovableClock())
        follower = SqliteStore(path, MovableClock(), lead=False)
        await follower.commit("op", puts=[Put("/a", b"1")])
        await follower.close()

    _run(path, story)
    _run(path, _nothing)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_watch_sees_what_another_process_writes_within_a_second(path: Path) -> None:
    async def story(store: SqliteStore) -> None:
        other = SqliteStore(path, MovableClock(), lead=False)
        stream = store.watch("/", 0)
        waiting = asyncio.ensure_future(_batch(stream))
        await asyncio.sleep(0.3)
        sent = time.monotonic()
        rev = await other.commit("op", puts=[Put("/a", b"1")])
        assert (await waiting).rev == rev
        assert time.monotonic() - sent < 1.0
        await other.close()

    _run(path, story)


async def _batch(stream: object) -> Batch:
    async for each in stream:  # type: ignore[attr-defined]
        if isinstance(each, Batch):
            return each
    raise AssertionError("the watch ended")


def test_a_reboot_voids_every_lease(path: Path) -> None:
    async def whole() -> None:
        clock = MovableClock()
        store = SqliteStore(path, clock)
        lease = await store.lease_grant(3600)
        await store.commit("op", puts=[Put("/l/a", b"1", lease.id), Put("/b", b"2")])
        await store.close()
        again = SqliteStore(path, MovableClock(boot=BootId("boot-2")))
        items, _ = await again.list("/")
        assert [item.key for item in items] == ["/b"]
        with pytest.raises(NotFound):
            await again.lease_keepalive(lease.id)
        assert (await again.lease_grant(10)).id > lease.id  # ids are never used again
        await again.close()

    asyncio.run(whole())


def test_a_disk_that_hangs_makes_a_commit_ambiguous_and_resolve_tells_later(path: Path) -> None:
    async def story(store: SqliteStore) -> None:
        await store.commit("first", puts=[Put("/a", b"1")])
        blocker = sqlite3.connect(path, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        with pytest.raises(Ambiguous) as caught:
            await store.commit("late", puts=[Put("/a", b"2")])
        assert caught.value.op_id == "late"
        item = await store.get("/a")  # reads go on
        assert item is not None
        blocker.execute("ROLLBACK")
        blocker.close()
        await asyncio.sleep(0.3)
        item = await store.get("/a")
        assert item is not None
        assert await store.resolve("late") == item.mod_rev
        assert item.value == b"2"

    _run(path, story, deadline_s=0.3)


def test_a_lock_that_is_held_too_long_is_unreachable_not_ambiguous(path: Path) -> None:
    async def story(store: SqliteStore) -> None:
        blocker = sqlite3.connect(path, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnreachable, match="locked"):
            await store.commit("op", puts=[Put("/a", b"2")])
        blocker.close()
        assert await store.get("/a") is None

    _run(path, story)


def test_a_full_store_refuses_puts_and_can_be_emptied(path: Path) -> None:
    async def story(store: SqliteStore) -> None:
        lease = await store.lease_grant(60)
        await store.commit("leased", puts=[Put("/leased", b"x" * 1000, lease.id)])
        n = 0
        while not await _refused_as_full(store, f"/big/{n}"):
            n += 1
        assert n > 20
        with pytest.raises(StoreUnreachable, match="is full"):
            await store.lease_grant(10)
        assert await store.lease_keepalive(lease.id) == 60
        await store.lease_revoke(lease.id)
        assert await store.get("/leased") is None
        for each in range(n):
            await store.commit(f"del{each}", deletes=[f"/big/{each}"])
        assert (await store.list("/"))[0] == ()

    _run(path, story, quota_bytes=1 << 20)


async def _refused_as_full(store: SqliteStore, key: str) -> bool:
    try:
        await store.commit(f"put{key}", puts=[Put(key, b"x" * 20_000)])
    except StoreUnreachable as error:
        return "is full" in str(error)
    return False


def test_a_full_store_takes_puts_again_once_it_was_emptied(path: Path) -> None:
    async def story(store: SqliteStore) -> None:
        await store.commit("a", puts=[Put("/a", b"x" * 900_000)])
        with pytest.raises(StoreUnreachable, match="is full"):
            await store.commit("b", puts=[Put("/b", b"x")])
        for n in range(8):
            await store.commit(f"del{n}", deletes=["/a"])
        await store.commit("c", puts=[Put("/b", b"x")])

    _run(path, story, quota_bytes=1 << 20, events_kept=4)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"not a database, certainly not one of ours" * 100, "not a database"), (None, "schema 1")],
)
def test_a_file_that_is_not_our_store_is_refused_and_left_alone(path: Path, content: bytes | None, says: str) -> None:
    path.parent.mkdir()
    if content is None:
        other = sqlite3.connect(path)
        other.execute("CREATE TABLE theirs(x)")
        other.commit()
        other.close()
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    with pytest.raises(Refused, match=says):
        SqliteStore(path, MovableClock())
    assert path.read_bytes() == before
    path.unlink()
    _run(path, _nothing)  # and its lock is free


def test_a_store_of_a_later_schema_is_refused(path: Path) -> None:
    _run(path, _nothing)
    later = sqlite3.connect(path)
    later.execute("UPDATE meta SET value = 2 WHERE name = 'schema'")
    later.commit()
    later.close()
    with pytest.raises(Refused, match="upgrade"):
        SqliteStore(path, MovableClock())


def test_commits_are_synced_and_logged_ahead(path: Path) -> None:
    async def story(store: SqliteStore) -> None:
        database = store._write._db
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert database.execute("PRAGMA synchronous").fetchone() == (2,)

    _run(path, story)


_MOUNTS = """\
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
30 22 0:40 / /srv rw - nfs4 server:/srv rw
31 30 0:41 / /srv/local rw - xfs /dev/sdb rw
32 22 0:42 / /with\\040space rw - fuse.sshfs host: rw
33 22 0:43 / /srvx rw - tmpfs tmpfs rw
garbage
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/srv/s.db", "nfs4"), ("/with space/a/s.db", "fuse.sshfs"), ("/srv/local/x", ""), ("/srvx/a", ""), ("/a", "")],
)
def test_a_network_filesystem_is_refused_by_its_name(path: str, kind: str) -> None:
    if kind:
        with pytest.raises(Refused, match=f"is on {kind} "):
            refuse_network(Path(path), _MOUNTS)
    else:
        refuse_network(Path(path), _MOUNTS)

"""The store of one host: a SQLite file (design 06 §6.2).

A commit is on the disk when it returns (WAL, synchronous=FULL): a generation given out is never given out again.
The daemon that has the file open leads: it holds a lock on `<file>.lock` for its life, and a second one is refused.
Blocking calls run in two threads of the adapter, writes in order in one, reads in the other; each has a deadline.
The transactions themselves are in sqlite_file.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from kvmpool.errors import Ambiguous, Conflict, Refused, StoreUnreachable
from kvmpool.ports import Batch, Clock, Guard, Heartbeat, Item, Lease, Put, Resolution, Resync
from kvmpool.store import contract
from kvmpool.store.localfs import refuse_network
from kvmpool.store.sqlite_file import SqliteFile

T = TypeVar("T")

DEADLINE_S = 5.0  # of one call: a disk that takes longer is as good as gone
NUDGE_FALLBACK_S = 0.1  # how late a watch sees what another process wrote (PRAGMA data_version)
QUOTA_BYTES = 256 << 20  # rows of a pool are a few KiB each; more than this is a leak
CLOSE_S = 2.0  # given to calls under way when the store closes


class SqliteStore:
    """Implements ports.Store. Use it from one event loop; other processes may have the file open with `lead=False`."""

    def __init__(
        self,
        path: Path,
        clock: Clock,
        *,
        lead: bool = True,
        deadline_s: float = DEADLINE_S,
        events_kept: int = contract.EVENTS_KEPT,
        quota_bytes: int = QUOTA_BYTES,
    ) -> None:
        """Opens or makes the file. Raises Refused where it cannot be used, or another daemon leads."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        refuse_network(path)
        self._deadline_s = deadline_s
        self._lock_fd = _lead(path) if lead else -1
        try:
            self._write = SqliteFile(path, clock, events_kept=events_kept, quota_bytes=quota_bytes)
            self._read = SqliteFile(path, clock, events_kept=events_kept, quota_bytes=quota_bytes)
        except BaseException:
            self._unlock()
            raise
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-write")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="store-read")
        self._in_doubt: dict[str, float] = {}  # commits sent and not answered -> when (monotonic)
        self._changed = asyncio.Event()
        self._closed = False

    async def get(self, key: str) -> Item | None:
        contract.check_key(key)
        return await self._call(self._reader, lambda: self._read.get(key))

    async def list(self, prefix: str) -> tuple[tuple[Item, ...], int]:
        return await self._call(self._reader, lambda: self._read.list(prefix))

    async def commit(
        self,
        op_id: str,
        *,
        guards: Sequence[Guard] = (),
        puts: Sequence[Put] = (),
        deletes: Sequence[str] = (),
    ) -> int:
        ops = contract.checked(op_id, guards, puts, deletes)
        now = time.monotonic()
        self._in_doubt = {op: at for op, at in self._in_doubt.items() if now - at < contract.JOURNAL_KEEP_S}
        self._in_doubt[op_id] = now
        try:
            rev = await self._call(self._writer, lambda: self._write.commit(ops), op_id)
        except (Conflict, Refused, StoreUnreachable):
            self._in_doubt.pop(op_id, None)  # the file says for certain that it was not applied
            raise
        self._in_doubt.pop(op_id, None)
        self._wake()
        return rev

    async def resolve(self, op_id: str) -> int | Resolution:
        """In order with the commits: it waits for the one in doubt, or refuses it for ever."""
        contract.check_key(op_id)
        now = time.monotonic()
        fresh = now - self._in_doubt.get(op_id, -contract.JOURNAL_KEEP_S) < contract.JOURNAL_KEEP_S
        answer = await self._call(self._writer, lambda: self._write.resolve(op_id, fresh))
        self._in_doubt.pop(op_id, None)
        return answer

    async def lease_grant(self, ttl_s: float) -> Lease:
        contract.check_ttl(ttl_s)
        return await self._call(self._writer, lambda: self._write.lease_grant(ttl_s))

    async def lease_keepalive(self, lease_id: int) -> float:
        return await self._call(self._writer, lambda: self._write.lease_keepalive(lease_id))

    async def lease_revoke(self, lease_id: int) -> None:
        await self._call(self._writer, lambda: self._write.lease_revoke(lease_id))
        self._wake()

    async def watch(self, prefix: str, after_rev: int) -> AsyncIterator[Batch | Heartbeat | Resync]:
        seen, version = after_rev, (-1, -1)
        spoke = time.monotonic()
        while not self._closed:
            changed = self._changed
            try:
                now_version = await self._call(self._reader, self._read.version)
                if now_version == version:
                    found: tuple[Batch | Resync, ...] = ()
                else:
                    found, seen_next, more = await self._call(
                        self._reader, lambda seen=seen: self._read.events(prefix, seen)  # type: ignore[misc]
                    )
                    seen, version = seen_next, ((-1, -1) if more else now_version)
            except StoreUnreachable:
                if self._closed:
                    return
                found = ()
            for each in found:
                yield each
            if found:
                spoke = time.monotonic()
            elif time.monotonic() - spoke >= contract.HEARTBEAT_S:
                yield Heartbeat(seen)
                spoke = time.monotonic()
            if version != (-1, -1):
                await _wait(changed, NUDGE_FALLBACK_S)

    async def close(self) -> None:
        """Ends the watches, waits a moment for calls under way, and stops leading."""
        if self._closed:
            return
        self._closed = True
        self._wake()
        loop = asyncio.get_running_loop()
        closing = [
            loop.run_in_executor(self._writer, self._write.close),
            loop.run_in_executor(self._reader, self._read.close),
        ]
        _, hung = await asyncio.wait(closing, timeout=CLOSE_S)
        for executor in (self._writer, self._reader):
            executor.shutdown(wait=False, cancel_futures=True)
        if not hung:
            self._unlock()  # else the process's end does it: a write may still be under way

    async def _call(self, executor: ThreadPoolExecutor, act: Callable[[], T], op_id: str = "") -> T:
        """A call that is late is taken out of the queue, or its thread goes on alone and nobody hears the answer."""
        if self._closed:
            raise StoreUnreachable("the store is closed")
        future = asyncio.get_running_loop().run_in_executor(executor, act)
        try:
            async with asyncio.timeout(self._deadline_s):
                return await future
        except TimeoutError:
            line = f"the store's disk did not answer within {self._deadline_s:g} s"
            if op_id:
                raise Ambiguous(op_id, f"{line}; commit {op_id} may still be applied: resolve it") from None
            raise StoreUnreachable(f"{line}. Next: kvmpool doctor") from None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _lead(path: Path) -> int:
    """The lock file's descriptor, held while we lead. The file stays: removed, two daemons could lock two files."""
    lock = path.with_name(path.name + ".lock")
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise Refused(f"store lock {lock}: {error.strerror}. Next: check the path's owner and rights") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError as error:
        holder = os.pread(fd, 16, 0).decode("ascii", "replace").strip() or "?"
        os.close(fd)
        raise Refused(f"store {path}: another kvmpoold (pid {holder}) leads with it. Next: stop that one") from error
    except OSError as error:
        os.close(fd)
        raise Refused(f"store lock {lock}: {error.strerror}. Next: set store.path to a local disk with room") from error
    return fd


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    # not wait_for, nowhere here: in Python 3.11 it swallows a cancellation that comes together with the event
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()

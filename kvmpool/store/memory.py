"""The store in memory: the contract of ports.Store in its shortest form, for the sim and for tests.

Nothing survives the object. Time is the given clock's only, so a simulated clock drives leases and heartbeats.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from kvmpool.errors import Conflict, NotFound, StoreUnreachable
from kvmpool.ports import Batch, Clock, Guard, Heartbeat, Item, Lease, Put, Resolution, Resync, WatchEvent
from kvmpool.store import contract


@dataclass(slots=True)
class _Row:
    value: bytes
    mod_rev: int
    lease: int | None


@dataclass(slots=True)
class _Right:
    ttl_s: float
    deadline: float


class MemoryStore:
    """Implements ports.Store. Use it from one event loop."""

    def __init__(self, clock: Clock, *, events_kept: int = contract.EVENTS_KEPT) -> None:
        self._clock = clock
        self._events_kept = events_kept
        self._rows: dict[str, _Row] = {}
        self._rights: dict[int, _Right] = {}
        self._last_lease = 0
        self._rev = 0
        self._batches: deque[Batch] = deque()  # of consecutive revisions, the last one is _rev
        self._journal: dict[str, tuple[int | None, float]] = {}  # op id -> (revision or "never", when)
        self._collected = False  # whether the journal has forgotten anything
        self._closed = False
        self._changed = asyncio.Event()  # replaced at each change: whoever waits on the old one wakes

    async def get(self, key: str) -> Item | None:
        contract.check_key(key)
        self._enter()
        row = self._rows.get(key)
        return None if row is None else Item(key, row.value, row.mod_rev)

    async def list(self, prefix: str) -> tuple[tuple[Item, ...], int]:
        self._enter()
        keys = sorted(key for key in self._rows if key.startswith(prefix))
        return tuple(Item(key, self._rows[key].value, self._rows[key].mod_rev) for key in keys), self._rev

    async def commit(
        self,
        op_id: str,
        *,
        guards: Sequence[Guard] = (),
        puts: Sequence[Put] = (),
        deletes: Sequence[str] = (),
    ) -> int:
        ops = contract.checked(op_id, guards, puts, deletes)
        self._enter()
        if op_id in self._journal:
            done = self._journal[op_id][0]
            if done is None:
                raise Conflict(f"commit {op_id} was resolved as never applied; decide again")
            return done
        for guard in ops.guards:
            row = self._rows.get(guard[0])
            mod_rev = None if row is None else row.mod_rev
            if not contract.holds(guard, mod_rev):
                raise contract.broken(guard, mod_rev)
        for put in ops.puts:
            if put.lease is not None and put.lease not in self._rights:
                raise Conflict(f"store row {put.key}: lease {put.lease} is gone")
        rev = self._apply(ops.puts, ops.deletes)
        self._journal[op_id] = (rev, self._clock.now())
        return rev

    async def resolve(self, op_id: str) -> int | Resolution:
        self._enter()
        if op_id in self._journal:
            done = self._journal[op_id][0]
            return Resolution.NOT_APPLIED if done is None else done
        if self._collected:
            return Resolution.UNKNOWN
        self._journal[op_id] = (None, self._clock.now())  # a late commit of it is refused from now on
        return Resolution.NOT_APPLIED

    async def lease_grant(self, ttl_s: float) -> Lease:
        contract.check_ttl(ttl_s)
        self._enter()
        self._last_lease += 1
        now = self._clock.now()
        self._rights[self._last_lease] = _Right(ttl_s, now + ttl_s)
        return Lease(self._last_lease, ttl_s, now)

    async def lease_keepalive(self, lease_id: int) -> float:
        self._enter()
        right = self._rights.get(lease_id)
        if right is None:
            raise NotFound(f"lease {lease_id} is gone")
        right.deadline = self._clock.now() + right.ttl_s
        return right.ttl_s

    async def lease_revoke(self, lease_id: int) -> None:
        self._enter()
        if self._rights.pop(lease_id, None) is not None:
            self._end({lease_id})

    async def watch(self, prefix: str, after_rev: int) -> AsyncIterator[Batch | Heartbeat | Resync]:
        seen = after_rev
        while not self._closed:
            self._expire()
            oldest = self._rev - len(self._batches)  # events of revisions after it are kept
            if seen > self._rev or seen < oldest:
                seen = self._rev
                yield Resync(seen)
            elif seen < self._rev:
                batch = self._batches[seen - oldest]
                seen = batch.rev
                events = tuple(event for event in batch.events if event.key.startswith(prefix))
                if events:
                    yield Batch(seen, events)
            elif not await self._wait():
                yield Heartbeat(seen)

    async def close(self) -> None:
        self._closed = True
        self._wake()

    # --- helpers: none of them awaits, so each public method is one atomic act ---

    def _enter(self) -> None:
        if self._closed:
            raise StoreUnreachable("the store is closed")
        self._expire()
        oldest = self._clock.now() - contract.JOURNAL_KEEP_S
        while self._journal:
            op_id, (_, at) = next(iter(self._journal.items()))
            if at >= oldest:
                break
            del self._journal[op_id]
            self._collected = True

    def _expire(self) -> None:
        now = self._clock.now()
        due = {lease for lease, right in self._rights.items() if right.deadline <= now}
        if due:
            for lease in due:
                del self._rights[lease]
            self._end(due)

    def _end(self, leases: set[int]) -> None:
        keys = sorted(key for key, row in self._rows.items() if row.lease in leases)
        if keys:
            self._apply((), keys)

    def _apply(self, puts: Sequence[Put], deletes: Sequence[str]) -> int:
        self._rev += 1
        events = []
        for put in puts:
            self._rows[put.key] = _Row(put.value, self._rev, put.lease)
            events.append(WatchEvent(put.key, put.value, self._rev))
        for key in deletes:
            if self._rows.pop(key, None) is not None:
                events.append(WatchEvent(key, None, self._rev))
        self._batches.append(Batch(self._rev, tuple(events)))
        if len(self._batches) > self._events_kept:
            self._batches.popleft()
        self._wake()
        return self._rev

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self) -> bool:
        """True after a change; False when it is time for a heartbeat or a lease is due."""
        now = self._clock.now()
        due = min((right.deadline for right in self._rights.values()), default=now + contract.HEARTBEAT_S)
        pause = asyncio.ensure_future(self._clock.sleep(max(0.0, min(due - now, contract.HEARTBEAT_S))))
        change = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({pause, change}, return_when=asyncio.FIRST_COMPLETED)
            return change.done()
        finally:
            pause.cancel()
            change.cancel()

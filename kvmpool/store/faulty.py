"""A store that fails as stores do: wraps another one and injects faults from a seed.

Injected: commits whose answer is lost, that are lost themselves or that arrive late (all Ambiguous); commits sent
twice; conflicts that nobody caused; calls refused as unreachable; delays; watches told to resync. Every fault is one
that the contract allows, so code that is right over the plain store is right over this one.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from kvmpool.errors import Ambiguous, Conflict, StoreUnreachable
from kvmpool.ports import Batch, Clock, Guard, Heartbeat, Item, Lease, Put, Resolution, Resync, Store


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities of one call's fault (0 to 1), and the longest delay before a call in seconds."""

    answer_lost: float = 0.0  # applied, then Ambiguous
    commit_lost: float = 0.0  # not applied, Ambiguous
    commit_late: float = 0.0  # Ambiguous, applied at a later call unless resolved before
    conflict: float = 0.0  # the start of a storm of conflicts
    conflict_storm: int = 1  # how many calls a storm lasts
    unreachable: float = 0.0
    duplicate: float = 0.0  # the commit arrives twice
    resync: float = 0.0
    delay_max_s: float = 0.0

    @classmethod
    def rough(cls) -> Faults:
        """About one call in three goes wrong somehow."""
        return cls(0.06, 0.06, 0.06, 0.03, 3, 0.06, 0.1, 0.05, 0.002)


@dataclass(frozen=True, slots=True)
class _Late:
    op_id: str
    guards: tuple[Guard, ...]
    puts: tuple[Put, ...]
    deletes: tuple[str, ...]


class FaultyStore:
    """Implements ports.Store over `inner`. `faults` may be changed at any time; the same seed gives the same faults."""

    def __init__(self, inner: Store, clock: Clock, faults: Faults, seed: int) -> None:
        self.inner = inner
        self.faults = faults
        self.injected = 0  # how many faults so far
        self._clock = clock
        self._random = random.Random(seed)
        self._storm = 0
        self._late: list[_Late] = []

    async def get(self, key: str) -> Item | None:
        await self._before()
        return await self.inner.get(key)

    async def list(self, prefix: str) -> tuple[tuple[Item, ...], int]:
        await self._before()
        return await self.inner.list(prefix)

    async def commit(
        self,
        op_id: str,
        *,
        guards: Sequence[Guard] = (),
        puts: Sequence[Put] = (),
        deletes: Sequence[str] = (),
    ) -> int:
        await self._before()
        self._refuse_in_a_storm(op_id)
        if self._happens(self.faults.commit_lost):
            raise Ambiguous(op_id, f"commit {op_id}: no answer (injected: the commit was lost)")
        if self._happens(self.faults.commit_late):
            self._late.append(_Late(op_id, tuple(guards), tuple(puts), tuple(deletes)))
            raise Ambiguous(op_id, f"commit {op_id}: no answer (injected: the commit is late)")
        rev = await self.inner.commit(op_id, guards=guards, puts=puts, deletes=deletes)
        if self._happens(self.faults.duplicate):
            rev = await self.inner.commit(op_id, guards=guards, puts=puts, deletes=deletes)
        if self._happens(self.faults.answer_lost):
            raise Ambiguous(op_id, f"commit {op_id}: no answer (injected: the answer was lost)")
        return rev

    async def resolve(self, op_id: str) -> int | Resolution:
        if self._random.random() < 0.5:  # a late commit may be faster than the question, or slower
            await self._deliver_late()
        await self._refuse_unreachable()
        return await self.inner.resolve(op_id)

    async def lease_grant(self, ttl_s: float) -> Lease:
        await self._before()
        return await self.inner.lease_grant(ttl_s)

    async def lease_keepalive(self, lease_id: int) -> float:
        await self._before()
        return await self.inner.lease_keepalive(lease_id)

    async def lease_revoke(self, lease_id: int) -> None:
        await self._before()
        await self.inner.lease_revoke(lease_id)

    async def watch(self, prefix: str, after_rev: int) -> AsyncIterator[Batch | Heartbeat | Resync]:
        async for each in self.inner.watch(prefix, after_rev):
            if isinstance(each, Batch) and self._happens(self.faults.resync):
                yield Resync(each.rev)
            else:
                yield each

    async def close(self) -> None:
        await self.inner.close()

    async def _before(self) -> None:
        if self.faults.delay_max_s:
            await self._clock.sleep(self._random.random() * self.faults.delay_max_s)
        await self._deliver_late()
        await self._refuse_unreachable()

    async def _deliver_late(self) -> None:
        while self._late:
            late = self._late.pop()
            try:
                await self.inner.commit(late.op_id, guards=late.guards, puts=late.puts, deletes=late.deletes)
            except (Conflict, StoreUnreachable):
                continue  # nobody waits for its answer

    async def _refuse_unreachable(self) -> None:
        if self._happens(self.faults.unreachable):
            raise StoreUnreachable("the store does not answer (injected)")

    def _refuse_in_a_storm(self, op_id: str) -> None:
        if not self._storm and self._happens(self.faults.conflict):
            self._storm = self.faults.conflict_storm
        if self._storm:
            self._storm -= 1
            raise Conflict(f"commit {op_id}: somebody wrote first (injected)")

    def _happens(self, probability: float) -> bool:
        if probability and self._random.random() < probability:
            self.injected += 1
            return True
        return False

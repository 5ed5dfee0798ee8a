"""What the contract suite runs on: each backend, plain and wrapped in faults, over a clock that can be moved."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from kvmpool.core.model import BootId
from kvmpool.errors import Conflict, StoreUnreachable
from kvmpool.ports import Guard, Item, Lease, Put, Store
from kvmpool.store.contract import settle
from kvmpool.store.faulty import Faults, FaultyStore
from kvmpool.store.memory import MemoryStore
from kvmpool.store.sqlite import SqliteStore

NAMES = ["memory", "sqlite", "faulty-memory", "faulty-sqlite"]

T = TypeVar("T")


@dataclass(slots=True)
class MovableClock:
    """CLOCK_BOOTTIME plus an offset. `jump` moves it; whoever sleeps wakes when its time has come."""

    offset: float = 0.0
    wall_offset: float = 0.0
    boot: BootId = BootId("boot-1")

    def now(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME) + self.offset

    def wall(self) -> float:
        return time.time() + self.wall_offset

    def boot_id(self) -> BootId:
        return self.boot

    async def sleep(self, delay_s: float) -> None:
        until = self.now() + delay_s
        while self.now() < until:  # noqa: ASYNC110 - time itself is what is waited for
            await asyncio.sleep(min(0.01, delay_s))

    def jump(self, by_s: float) -> None:
        self.offset += by_s


@dataclass(slots=True)
class Client:
    """A caller that does what the contract asks of callers: tries again, resolves, and reads again."""

    store: Store

    async def get(self, key: str) -> Item | None:
        return await again(lambda: self.store.get(key))

    async def list(self, prefix: str) -> tuple[tuple[Item, ...], int]:
        return await again(lambda: self.store.list(prefix))

    async def commit(
        self, *, guards: Sequence[Guard] = (), puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> int:
        return await again(lambda: settle(self.store, guards=guards, puts=puts, deletes=deletes))

    async def put(self, key: str, value: bytes, *guards: Guard, lease: int | None = None) -> int:
        return await self.commit(guards=guards, puts=[Put(key, value, lease)])

    async def grant(self, ttl_s: float) -> Lease:
        return await again(lambda: self.store.lease_grant(ttl_s))

    async def keepalive(self, lease: int) -> float:
        return await again(lambda: self.store.lease_keepalive(lease))

    async def revoke(self, lease: int) -> None:
        await again(lambda: self.store.lease_revoke(lease))


async def again(act: Callable[[], Awaitable[T]]) -> T:
    """Repeats what an injected fault (never a true one) has stopped."""
    for _ in range(200):
        try:
            return await act()
        except (Conflict, StoreUnreachable) as error:
            if "injected" not in str(error) and "commits in a row" not in str(error):
                raise
    raise AssertionError("200 injected faults in a row")


Story = Callable[[Client, MovableClock], Awaitable[None]]


@dataclass(slots=True)
class Backend:
    name: str
    folder: Path
    clock: MovableClock = field(default_factory=MovableClock)
    events_kept: int = 10_000

    @property
    def faulty(self) -> bool:
        return self.name.startswith("faulty-")

    def open(self) -> Store:
        kind = self.name.removeprefix("faulty-")
        store: Store
        if kind == "memory":
            store = MemoryStore(self.clock, events_kept=self.events_kept)
        else:
            store = SqliteStore(self.folder / "store.db", self.clock, events_kept=self.events_kept)
        return FaultyStore(store, self.clock, Faults.rough(), seed=1) if self.faulty else store

    def run(self, story: Story) -> None:
        async def whole() -> None:
            store = self.open()
            try:
                async with asyncio.timeout(60):
                    await story(Client(store), self.clock)
            finally:
                await store.close()

        asyncio.run(whole())

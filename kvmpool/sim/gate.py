"""The store as one life of the daemon sees it: shut when that life ends, so that nothing of it acts after its death."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from kvmpool.errors import StoreUnreachable
from kvmpool.ports import Batch, Guard, Heartbeat, Item, Lease, Put, Resolution, Resync, Store


class Gate:
    """Implements ports.Store over `inner` until `shut`."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.shut = False

    async def get(self, key: str) -> Item | None:
        return await self._open().get(key)

    async def list(self, prefix: str) -> tuple[tuple[Item, ...], int]:
        return await self._open().list(prefix)

    async def commit(
        self,
        op_id: str,
        *,
        guards: Sequence[Guard] = (),
        puts: Sequence[Put] = (),
        deletes: Sequence[str] = (),
    ) -> int:
        return await self._open().commit(op_id, guards=guards, puts=puts, deletes=deletes)

    async def resolve(self, op_id: str) -> int | Resolution:
        return await self._open().resolve(op_id)

    async def lease_grant(self, ttl_s: float) -> Lease:
        return await self._open().lease_grant(ttl_s)

    async def lease_keepalive(self, lease_id: int) -> float:
        return await self._open().lease_keepalive(lease_id)

    async def lease_revoke(self, lease_id: int) -> None:
        await self._open().lease_revoke(lease_id)

    async def watch(self, prefix: str, after_rev: int) -> AsyncIterator[Batch | Heartbeat | Resync]:
        async for each in self._open().watch(prefix, after_rev):
            yield each

    async def close(self) -> None:
        self.shut = True

    def _open(self) -> Store:
        if self.shut:
            raise StoreUnreachable("this daemon is dead")
        return self._inner

"""What makes a loop look before its timer does: its bell, and the store's watch that rings it.

A wakeup is never obeyed as an order: it only makes a loop read again, so one too many is harmless and a lost one costs
no more than the loop's own timer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvmpool.errors import KvmpoolError
from kvmpool.ports import Batch, Clock, Resync, Store

log = logging.getLogger(__name__)

_RETRY_S = 0.5  # after the watch has broken; the loops' own timers go on meanwhile


class Wake:
    """A bell. Rings while nobody waits are kept, as one."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        self._event.set()

    async def wait(self, clock: Clock, timeout_s: float) -> bool:
        """Until the next ring or `timeout_s`; True where it rang. Rings from now on count for the next wait."""
        if not self._event.is_set() and timeout_s > 0:
            waits = {asyncio.ensure_future(self._event.wait()), asyncio.ensure_future(clock.sleep(timeout_s))}
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in waits:
                    each.cancel()
                await asyncio.gather(*waits, return_exceptions=True)
        rang = self._event.is_set()
        self._event.clear()
        return rang


async def follow(store: Store, clock: Clock, ring: Sequence[Callable[[], None]]) -> None:
    """Ring at every change of the store that is not only a line of its event log. Never returns; survives the store."""
    while True:
        try:
            _, rev = await store.list("/host/")
            _ring(ring)
            async for seen in store.watch("/", rev):
                changed = isinstance(seen, Batch) and any(not e.key.startswith("/event/") for e in seen.events)
                if changed or isinstance(seen, Resync):
                    _ring(ring)
        except KvmpoolError as error:
            log.warning("store watch: %s; watching again in %.1f s", error, _RETRY_S)
        await clock.sleep(_RETRY_S)


def _ring(ring: Sequence[Callable[[], None]]) -> None:
    for each in ring:
        each()

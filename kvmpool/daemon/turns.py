"""How a loop goes round: turn after turn, woken or timed, with its long calls beside it.

A turn is one observe, decide, perform. Calls that may take long (start a worker, stop a hung one, list domains) run as
`Errands` beside the turns, one a key: the turn goes on with what is done, and an errand's end wakes the loop. What is
kept between turns is a cache of looks, never of decisions: a turn may be cut off anywhere, and the next finds out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from typing import Any

from kvmpool.daemon.wake import Wake
from kvmpool.errors import Conflict, KvmpoolError
from kvmpool.ports import Clock

log = logging.getLogger(__name__)

_RETRY_S = 1.0  # after a turn that failed: the store or a port is away, and its next answer is no more urgent than that
_BUSY_TURNS = 50  # in a row without rest: nothing real takes so many, a commit that always conflicts does
_BUSY_PAUSE_S = 0.1
_LET_RUN = 10  # rounds of the event loop: enough for an errand that has nothing to wait for


class Errands:
    """Calls that run beside a loop, at most `limit` at once and one a key; `on_end` is called after each."""

    def __init__(self, on_end: Callable[[], None], limit: int = 16) -> None:
        self._on_end = on_end
        self._slots = asyncio.Semaphore(limit)
        self._running: dict[Hashable, asyncio.Task[Any]] = {}
        self._ended: list[asyncio.Task[Any]] = []

    def __contains__(self, key: Hashable) -> bool:
        return key in self._running

    def run(self, key: Hashable, call: Callable[[], Awaitable[None]]) -> None:
        """Start `call` unless one of this key is still running."""
        if key in self._running:
            return
        task = asyncio.ensure_future(self._within_limit(call))
        self._running[key] = task
        task.add_done_callback(lambda done: self._end(key, done))

    async def settle(self) -> bool:
        """Let errands that need not wait come to their end; True where one has ended since the last call.

        Raises what an errand raised: only a mistake of ours does, each handles what its port may raise.
        """
        for _ in range(_LET_RUN):
            if not self._running:
                break
            await asyncio.sleep(0)
        ended, self._ended = self._ended, []
        for task in ended:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                raise error
        return bool(ended)

    async def close(self) -> None:
        """Cancel all and wait until they have let go."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, *self._ended, return_exceptions=True)
        self._ended = []

    async def _within_limit(self, call: Callable[[], Awaitable[None]]) -> None:
        async with self._slots:
            await call()

    def _end(self, key: Hashable, task: asyncio.Task[Any]) -> None:
        self._running.pop(key, None)
        self._ended.append(task)
        self._on_end()


class Loop:
    """A loop over one owner's rows. `turn` is the whole of its work; `run` only repeats it."""

    name = "loop"

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.wake = Wake()
        self.turns = 0
        self.turn_at = clock.now()  # when the last turn began
        self.last_turn_at = clock.now()  # boottime of the last turn that came to its end: the watchdog's food
        self._told = ""

    async def turn(self) -> bool:
        """One observe, decide, perform; True where something was done or somebody wrote first: look again at once."""
        raise NotImplementedError

    def pause_s(self) -> float:
        """How long the loop may sleep when nobody wakes it."""
        raise NotImplementedError

    async def close(self) -> None:
        """Let go of what runs beside the loop; nothing is undone."""

    async def run(self) -> None:
        """Turn for ever. A turn that fails is told once and tried again."""
        try:
            busy = 0
            while True:
                busy = busy + 1 if await self._guarded() else 0
                pause_s = 0.0 if busy else self.pause_s()
                await self.wake.wait(self.clock, pause_s)
                if busy > _BUSY_TURNS:
                    await self.clock.sleep(_BUSY_PAUSE_S)
        finally:
            await self.close()

    async def _guarded(self) -> bool:
        self.turn_at = self.clock.now()
        try:
            again = await self.turn()
        except KvmpoolError as error:
            self._tell(f"{type(error).__name__}: {error}")
            await self.clock.sleep(_RETRY_S)
            again = True
        except Exception:  # noqa: BLE001  the one place: a mistake of ours must not end the other loops
            log.exception("%s loop: this turn failed; the next is in %.0f s", self.name, _RETRY_S)
            await self.clock.sleep(_RETRY_S)
            again = True
        else:
            self._tell("")
        self.turns += 1
        self.last_turn_at = self.clock.now()
        return again

    def _tell(self, trouble: str) -> None:
        if trouble and trouble != self._told:
            log.warning("%s loop: %s; trying again every %.0f s", self.name, trouble, _RETRY_S)
        elif self._told and not trouble:
            log.info("%s loop: works again (before: %s)", self.name, self._told)
        self._told = trouble


async def unless_conflict(commit: Awaitable[object]) -> bool:
    """True where the commit was applied; False where somebody wrote first, and the turn has to read again."""
    try:
        await commit
    except Conflict:
        return False
    return True

"""Runs blocking calls that may never return, in threads that can be left behind.

A thread in a hung driver call cannot be ended. So each call has a key, a key has at most one thread, and whoever asks
again while it hangs waits for that one's end; the number of all threads is limited. They are daemon threads: a hung one
does not keep the process alive.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from kvmpool.errors import DeadlinePassed, Unreachable

T = TypeVar("T")

THREADS_MAX = 32


class Bounded:
    """Use it from one event loop."""

    def __init__(self, name: str, threads_max: int = THREADS_MAX) -> None:
        self._name = name
        self._threads_max = threads_max
        self._running: dict[str, asyncio.Event] = {}  # key -> set when its thread has ended

    @property
    def hanging(self) -> int:
        """Threads at work now, well or hung."""
        return len(self._running)

    async def call(self, key: str, act: Callable[[], T], deadline_s: float) -> T:
        """The result of `act`, run in a thread. Raises what it raises, DeadlinePassed, or Unreachable for too many."""
        try:
            async with asyncio.timeout(deadline_s):
                while key in self._running:
                    await self._running[key].wait()
                return await self._start(key, act)
        except TimeoutError:
            raise DeadlinePassed(f"{self._name} ({key}) did not answer within {deadline_s:g} s") from None

    def _start(self, key: str, act: Callable[[], T]) -> asyncio.Future[T]:
        if len(self._running) >= self._threads_max:
            raise Unreachable(f"{self._name}: {len(self._running)} calls hang. Next: nvidia-smi; dmesg | grep NVRM")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        ended = self._running[key] = asyncio.Event()

        def finish(result: T | None, error: BaseException | None) -> None:
            self._running.pop(key, None)
            ended.set()
            if answer.done():
                return  # nobody waits any more
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            result, error = None, None
            try:
                result = act()
            except BaseException as raised:  # noqa: BLE001 - handed over to whoever awaits
                error = raised
            try:
                loop.call_soon_threadsafe(finish, result, error)
            except RuntimeError:
                return  # the loop has ended without us

        threading.Thread(target=run, name=f"{self._name} {key}", daemon=True).start()
        return answer

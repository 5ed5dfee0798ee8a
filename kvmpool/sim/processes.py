"""Processes of a simulated host that hold runs: started and ended by whoever tells the story."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvmpool.core.model import Process
from kvmpool.errors import NotFound


class SimProcesses:
    """ports.Processes. A pid may be started again: then it is another process."""

    def __init__(self) -> None:
        self._living: dict[int, Process] = {}
        self._followed: frozenset[Process] = frozenset()
        self._ended: Callable[[], None] = lambda: None
        self._ticks = 0

    def start(self, pid: int) -> Process:
        self._ticks += 1
        self._living[pid] = Process(pid, self._ticks)
        return self._living[pid]

    def end(self, pid: int) -> None:
        if self._living.pop(pid) in self._followed:
            self._ended()

    def identify(self, pid: int) -> Process:
        if pid not in self._living:
            raise NotFound(f"there is no process {pid}")
        return self._living[pid]

    def lives(self, process: Process) -> bool:
        return self._living.get(process.pid) == process

    def follow(self, processes: Collection[Process], ended: Callable[[], None]) -> None:
        self._followed, self._ended = frozenset(processes), ended

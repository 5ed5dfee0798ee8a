"""Processes of this host that hold a run's claim, as the port Processes. A process is its pid and its start time.

Its end is told by a pidfd, which becomes readable when the last thread of the process is gone, reaped or not.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable, Collection

from kvmpool.core.model import Process
from kvmpool.dataplane.lock import start_time
from kvmpool.errors import NotFound


class HostProcesses:
    """kvmpool.ports.Processes. `follow` needs a running event loop; the others do not."""

    def __init__(self) -> None:
        self._followed: dict[Process, int] = {}  # with its pidfd
        self._told: set[Process] = set()  # a zombie would be told of for ever
        self._ended: Callable[[], None] = lambda: None

    def identify(self, pid: int) -> Process:
        """See the port."""
        try:
            return Process(pid, start_time(pid))
        except (OSError, ValueError, IndexError) as error:
            raise NotFound(f"there is no process {pid} that kvmpoold can see") from error

    def lives(self, process: Process) -> bool:
        """See the port."""
        descriptor = _open(process)
        if descriptor is None:
            return False
        try:
            return not _has_ended(descriptor)
        finally:
            os.close(descriptor)

    def follow(self, processes: Collection[Process], ended: Callable[[], None]) -> None:
        """See the port."""
        self._ended = ended
        for process in [each for each in self._followed if each not in processes]:
            self._drop(process)
        self._told.intersection_update(processes)
        for process in processes:
            if process in self._followed or process in self._told:
                continue
            descriptor = _open(process)
            if descriptor is not None:
                self._followed[process] = descriptor
                asyncio.get_running_loop().add_reader(descriptor, self._on_end, process)

    def close(self) -> None:
        """Follow nobody any more."""
        for process in list(self._followed):
            self._drop(process)

    def _on_end(self, process: Process) -> None:
        self._drop(process)
        self._told.add(process)
        self._ended()

    def _drop(self, process: Process) -> None:
        descriptor = self._followed.pop(process)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)


def _open(process: Process) -> int | None:
    """A pidfd of that very process; None where it is gone and, perhaps, its pid another's."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except (OSError, ValueError):
        return None
    try:
        same = start_time(process.pid) == process.started
    except (OSError, ValueError, IndexError):
        same = False
    if same:
        return descriptor
    os.close(descriptor)
    return None


def _has_ended(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))

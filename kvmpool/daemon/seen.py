"""Ports that remember what they last showed, so that an answer to a person costs no look of its own.

Each wraps the real one and changes nothing of what it says or raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from kvmpool.core.model import (
    Binding,
    ClaimKey,
    DomainSeen,
    Generation,
    WorkerSeen,
)
from kvmpool.errors import KvmpoolError
from kvmpool.ports import Hypervisor, Workers

NOT_YET = "not asked yet"


class SeenDomains:
    """ports.Hypervisor. `last`: the newest list that was answered; `fault`: why the newest question was not, or ""."""

    def __init__(self, hypervisor: Hypervisor) -> None:
        self._hypervisor = hypervisor
        self.last: tuple[DomainSeen, ...] = ()
        self.fault = NOT_YET

    async def domains(self) -> tuple[DomainSeen, ...]:
        try:
            self.last = await self._hypervisor.domains()
        except KvmpoolError as error:
            self.fault = str(error)
            raise
        self.fault = ""
        return self.last

    def wakeups(self) -> AsyncIterator[str]:
        return self._hypervisor.wakeups()

    async def close(self) -> None:
        await self._hypervisor.close()


class SeenWorkers:
    """ports.Workers. `last`: the newest list that was answered."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.last: tuple[WorkerSeen, ...] = ()

    async def list(self) -> tuple[WorkerSeen, ...]:
        self.last = await self._workers.list()
        return self.last

    async def now(self) -> tuple[WorkerSeen, ...]:
        """The list as of now, or the last one where they cannot be listed."""
        with contextlib.suppress(KvmpoolError):
            return await self.list()
        return self.last

    async def start(self, binding: Binding) -> WorkerSeen:
        return await self._workers.start(binding)

    async def stop(self, claim: ClaimKey, generation: Generation, pid: int) -> None:
        await self._workers.stop(claim, generation, pid)

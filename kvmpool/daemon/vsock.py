"""Keeps the acceptor running and its map of CIDs as libvirt last listed the domains. Only where guests dial by vsock.

A port around the hypervisor's: whoever lists the domains has the map written anew, so it is never older than the list.
A CID is never remembered: it belongs to one QEMU (design 03 §3.1).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from kvmpool.core.model import DomainSeen, DomainUuid
from kvmpool.errors import KvmpoolError
from kvmpool.ports import Hypervisor

log = logging.getLogger(__name__)


class Map(Protocol):
    """The acceptor, as seen from here."""

    async def start(self) -> None:
        """Idempotent. Raises Unreachable."""

    def publish(self, cids: Mapping[int, DomainUuid]) -> None:
        """Let exactly these guests in. Raises Unreachable."""


class VsockDomains:
    """ports.Hypervisor. What fails at the acceptor is told once and tried again with the next list."""

    def __init__(self, hypervisor: Hypervisor, acceptor: Map) -> None:
        self._hypervisor = hypervisor
        self._acceptor = acceptor
        self._told = ""

    async def domains(self) -> tuple[DomainSeen, ...]:
        found = await self._hypervisor.domains()
        try:
            self._acceptor.publish({domain.cid: domain.uuid for domain in found if domain.running and domain.cid})
            await self._acceptor.start()
        except KvmpoolError as error:
            if str(error) != self._told:
                log.error("guests cannot dial by vsock: %s", error)
            self._told = str(error)
        else:
            self._told = ""
        return found

    def wakeups(self) -> AsyncIterator[str]:
        return self._hypervisor.wakeups()

    async def close(self) -> None:
        """The acceptor goes on: it outlives kvmpoold."""
        await self._hypervisor.close()

"""The acceptor's map follows libvirt's list, and an acceptor that is away stops no domain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

import pytest

from kvmpool.core.model import DomainSeen, DomainUuid
from kvmpool.daemon.vsock import VsockDomains
from kvmpool.errors import Unreachable

A, B = (DomainSeen(DomainUuid(f"9f1c2d3e-0000-4000-8000-00000000000{n}"), f"vm{n}", True, cid=40 + n) for n in (1, 2))


class _Libvirt:
    def __init__(self, *domains: DomainSeen) -> None:
        self.listed = domains
        self.away = False

    async def domains(self) -> tuple[DomainSeen, ...]:
        if self.away:
            raise Unreachable("no libvirt")
        return self.listed

    async def wakeups(self) -> AsyncIterator[str]:
        yield "started"

    async def close(self) -> None:
        return None


class _Acceptor:
    def __init__(self) -> None:
        self.map: Mapping[int, DomainUuid] = {}
        self.starts = 0
        self.away = False

    async def start(self) -> None:
        if self.away:
            raise Unreachable("no vsock here")
        self.starts += 1

    def publish(self, cids: Mapping[int, DomainUuid]) -> None:
        self.map = cids


def test_the_map_holds_exactly_the_running_domains_that_have_a_cid() -> None:
    acceptor = _Acceptor()
    stopped, without = replace(B, running=False), replace(B, cid=0)
    port = VsockDomains(_Libvirt(A, stopped, without), acceptor)
    assert asyncio.run(port.domains()) == (A, stopped, without)
    assert acceptor.map == {41: A.uuid}
    assert acceptor.starts == 1


def test_an_acceptor_that_is_away_is_told_once_and_hides_no_domain(caplog: pytest.LogCaptureFixture) -> None:
    acceptor = _Acceptor()
    acceptor.away = True
    port = VsockDomains(_Libvirt(A), acceptor)
    for _ in range(3):
        assert asyncio.run(port.domains()) == (A,)
    assert caplog.text.count("no vsock here") == 1
    acceptor.away = False
    asyncio.run(port.domains())
    assert acceptor.starts == 1


def test_without_libvirt_the_map_stays_as_it_is() -> None:
    libvirt, acceptor = _Libvirt(A), _Acceptor()
    port = VsockDomains(libvirt, acceptor)
    asyncio.run(port.domains())
    libvirt.away = True
    with pytest.raises(Unreachable):
        asyncio.run(port.domains())
    assert acceptor.map == {41: A.uuid}

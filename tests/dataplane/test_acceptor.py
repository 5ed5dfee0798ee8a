"""Acceptor: a guest is whom the hypervisor says it is, for exactly as long as the map says so."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from kvmpool.core.model import DomainSeen, DomainUuid, Generation
from kvmpool.daemon.vsock import VsockDomains
from kvmpool.dataplane import lock
from kvmpool.dataplane.acceptor import Acceptor
from kvmpool.dataplane.relays import ProcessRelays
from kvmpool.errors import Unreachable
from tests.dataplane.plane import UUID, Plane

pytestmark = pytest.mark.native

OTHER = DomainUuid("00000000-0000-4000-8000-000000000000")


@pytest.fixture
def acceptor(plane: Plane) -> Iterator[Acceptor]:
    """A stand-in socket instead of vsock: all that connect to it have CID 7."""
    options = ["--listen", f"unix:{plane.folder}/vsock", "--peer-cid", "7"]
    program = plane.programs / "kvmpool-acceptor"
    made = Acceptor(plane.folder / "cids", plane.folder / "relays", program=program, options=options)
    yield made
    asyncio.run(made.stop())
    text = (plane.folder / "cids" / "acceptor.log").read_text()
    assert "Sanitizer" not in text, text
    assert "runtime error" not in text, text


def served(plane: Plane) -> bool:
    with plane.guest(2.0) as guest:
        try:
            return guest.greet().status == 0
        except (AssertionError, ConnectionError):
            return False


def test_guests_come_in_by_the_map_of_this_moment(plane: Plane, acceptor: Acceptor) -> None:
    plane.worker()
    plane.relay(endpoint="vsock:2:9960")
    plane.point()
    plane.endpoint = f"unix:{plane.folder}/vsock"
    asyncio.run(acceptor.start())
    assert not served(plane)
    acceptor.publish({7: DomainUuid(UUID), 8: OTHER})
    assert served(plane)
    asyncio.run(acceptor.start())  # idempotent
    acceptor.publish({8: DomainUuid(UUID)})
    assert not served(plane)
    acceptor.publish({7: OTHER, 8: DomainUuid(UUID)})  # a domain without a relay
    assert not served(plane)
    acceptor.publish({7: DomainUuid(UUID)})
    assert served(plane)
    names = {path.name for path in (plane.folder / "cids").iterdir()}
    assert names == {"7", "acceptor.lock", "acceptor.log"}


def test_the_reserved_cids_are_nobodys(plane: Plane, acceptor: Acceptor) -> None:
    asyncio.run(acceptor.start())
    acceptor.publish({0: OTHER, 1: OTHER, 2: OTHER, 3: OTHER})
    assert {path.name for path in (plane.folder / "cids").iterdir()} == {"3", "acceptor.lock", "acceptor.log"}


class _Libvirt:
    def __init__(self, *cids: int) -> None:
        self.cids = cids

    async def domains(self) -> tuple[DomainSeen, ...]:
        return tuple(DomainSeen(DomainUuid(UUID), "vm0", True, pid=4711, cid=cid) for cid in self.cids)

    async def wakeups(self) -> AsyncIterator[str]:
        yield "started"

    async def close(self) -> None:
        return None


def test_a_guest_comes_in_by_the_cid_that_libvirt_lists_now(plane: Plane, acceptor: Acceptor) -> None:
    """kvmpoold's own parts around it: the map kept from the list, a relay opened for passed sockets."""
    program = plane.programs / "kvmpool-relay"
    relays = ProcessRelays(plane.folder / "relays", plane.folder / "guests", listen="vsock", program=program)
    libvirt = _Libvirt()
    port = VsockDomains(libvirt, acceptor)
    plane.worker()
    seen = asyncio.run(relays.open(DomainUuid(UUID), "vm0", ["gpu0"], ""))
    try:
        assert seen.endpoint == "vsock:2:9960" == (plane.folder / "guests" / UUID / "endpoint").read_text()
        asyncio.run(relays.point(DomainUuid(UUID), "gpu0", Generation(1), f"unix:{plane.worker_socket()}", 64))
        plane.endpoint = f"unix:{plane.folder}/vsock"
        for cids, comes_in in (((), False), ((8,), False), ((7,), True), ((), False), ((7,), True)):
            libvirt.cids = cids
            asyncio.run(port.domains())
            assert served(plane) is comes_in
    finally:
        asyncio.run(relays.close(DomainUuid(UUID)))


def test_a_killed_acceptor_is_started_again_and_its_guests_were_not_disturbed(plane: Plane, acceptor: Acceptor) -> None:
    plane.worker()
    plane.relay(endpoint="vsock:2:9960")
    plane.point()
    plane.endpoint = f"unix:{plane.folder}/vsock"
    asyncio.run(acceptor.start())
    acceptor.publish({7: DomainUuid(UUID)})
    with plane.guest() as guest:
        assert guest.greet().status == 0
        who = lock.holder(plane.folder / "cids" / "acceptor.lock")
        assert who is not None
        os.kill(who.pid, signal.SIGKILL)
        assert guest.ask("still served") == "still served"
        assert asyncio.run(lock.wait_free(plane.folder / "cids" / "acceptor.lock", 2.0))
        asyncio.run(acceptor.start())
        assert served(plane)


def test_an_acceptor_that_cannot_listen_says_why(plane: Plane) -> None:
    program = plane.programs / "kvmpool-acceptor"
    options = ["--listen", f"unix:{plane.folder}/no-such-folder/vsock"]
    broken = Acceptor(plane.folder / "cids", plane.folder / "relays", program=program, options=options)
    with pytest.raises(Unreachable, match="does not start: .*cannot start: No such file or directory"):
        asyncio.run(broken.start())

"""libvirt through its test driver, which lives in our process, and through sockets behind which nobody is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import libvirt
import pytest

from kvmpool.core.model import ClaimSpec, Mode
from kvmpool.errors import (
    CardBusy,
    ClaimInvalid,
    DeadlinePassed,
    Denied,
    KvmpoolError,
    NotFound,
    Refused,
    Unreachable,
)
from kvmpool.virt.connection import Libvirt
from kvmpool.virt.domain_xml import NAMESPACE, claims_of
from kvmpool.virt.link import Link, translated

SHARED = "test:///default"  # one set of domains for all connections of the process
VGPU = {"name": "gpu0", "mode": "vgpu", "memory": "4GiB"}


def definition(name: str, metadata: str = "", extra: str = "") -> str:
    return (
        f"<domain type='test'><name>{name}</name><memory>65536</memory><metadata>{metadata}</metadata>"
        f"<os><type>hvm</type></os>{extra}</domain>"
    )


@pytest.fixture
def shared() -> Iterator[libvirt.virConnect]:
    libvirt.registerErrorHandler(lambda *_: None, None)
    connection = libvirt.open(SHARED)
    before = {domain.name() for domain in connection.listAllDomains()}
    yield connection
    for domain in connection.listAllDomains():
        if domain.name() not in before:
            with contextlib.suppress(libvirt.libvirtError):
                domain.destroy()
            with contextlib.suppress(libvirt.libvirtError):
                domain.undefine()
    connection.close()


def run(story: Callable[[Libvirt], Awaitable[None]], uri: str = SHARED) -> None:
    async def whole() -> None:
        hypervisor = Libvirt(uri, guests="/run/guests")
        try:
            await asyncio.wait_for(story(hypervisor), 20)
        finally:
            await hypervisor.close()

    asyncio.run(whole())


# --- looking ----------------------------------------------------------------------------------------------------------


def test_domains_are_listed_with_their_claims_and_what_is_wrong_with_them(tmp_path: Path) -> None:
    def claims(attributes: str, uri: str = NAMESPACE) -> str:
        return f"<metadata><k:claims xmlns:k='{uri}'><k:claim {attributes}/></k:claims></metadata>"

    def domain(name: str, metadata: str, state: int) -> str:
        return (
            f"<domain type='test' xmlns:t='http://libvirt.org/schemas/domain/test/1.0'><name>{name}</name>{metadata}"
            f"<memory>65536</memory><os><type>hvm</type></os><t:runstate>{state}</t:runstate></domain>"
        )

    node = tmp_path / "node.xml"
    good = claims("name='gpu0' mode='vgpu' memory='4096'")
    bad = claims("name='gpu0' mode='vgpu' memory='-1'")
    other = claims("name='gpu0' mode='vgpu' memory='1'", uri="urn:kvmpool:domain:2")
    domains = [
        domain("d", good, 3),
        domain("c", bad, 1),
        domain("b", good, 5),
        domain("a", "", 1),
        domain("e", other, 1),
    ]
    node.write_text(f"<node>{''.join(domains)}</node>")

    async def story(hypervisor: Libvirt) -> None:
        a, b, c, d, e = await hypervisor.domains()
        spec = ClaimSpec("gpu0", Mode.VGPU, memory_mib=4096, memory_limit_mib=4096)
        assert (a.name, a.running, a.state, a.claims, a.claims_error) == ("a", True, "running", (), "")
        assert (b.running, b.state, b.claims) == (False, "shut off", (spec,))
        assert (c.running, c.claims) == (True, ())
        assert 'domain c: claim gpu0: memory="-1" is not allowed' in c.claims_error
        assert (d.running, d.state, d.claims) == (True, "paused", (spec,))
        assert "urn:kvmpool:domain:2" in e.claims_error
        assert len({domain.uuid for domain in (a, b, c, d, e)}) == 5

    run(story, f"test://{node}")


async def _until(stream: asyncio.Queue[str], wanted: str) -> None:
    while wanted not in await asyncio.wait_for(stream.get(), 5):
        pass


def test_a_change_of_a_domain_wakes_who_listens(shared: libvirt.virConnect) -> None:
    async def story(hypervisor: Libvirt) -> None:
        heard: asyncio.Queue[str] = asyncio.Queue()

        async def listen() -> None:
            async for reason in hypervisor.wakeups():
                heard.put_nowait(reason)

        listening = asyncio.ensure_future(listen())
        await _until(heard, "libvirt connected")
        domain = shared.defineXML(definition("waker"))
        await _until(heard, "waker defined")
        domain.create()
        await _until(heard, "waker started")
        assert [seen.running for seen in await hypervisor.domains() if seen.name == "waker"] == [True]
        domain.destroy()
        await _until(heard, "waker stopped")
        await hypervisor.add_claim("waker", VGPU)
        await _until(heard, "waker")
        await hypervisor.close()
        await asyncio.wait_for(listening, 2)

    run(story)


# --- editing ----------------------------------------------------------------------------------------------------------


def claims_kept(connection: libvirt.virConnect, name: str) -> tuple[ClaimSpec, ...]:
    return claims_of(connection.lookupByName(name).XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)).claims


def text_kept(connection: libvirt.virConnect, name: str) -> str:
    return str(connection.lookupByName(name).XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))


def test_claims_are_added_and_removed_with_what_the_guest_needs_to_find_them(shared: libvirt.virConnect) -> None:
    foreign = "<x:y xmlns:x='urn:other'>keep</x:y>"
    domain = shared.defineXML(definition("edited", foreign))

    async def story(hypervisor: Libvirt) -> None:
        await hypervisor.add_claim("edited", VGPU)
        await hypervisor.add_claim("edited", {"name": "gpu1", "mode": "vgpu", "memory": "1", "priority": "7"})
        assert [spec.name for spec in claims_kept(shared, "edited")] == ["gpu0", "gpu1"]
        text = text_kept(shared, "edited")
        for name in ("endpoint", "token"):
            assert f"name='opt/org.kvmpool/{name}' file='/run/guests/{domain.UUIDString()}/{name}'" in text
        await hypervisor.remove_claim("edited", "gpu0")
        assert [spec.name for spec in claims_kept(shared, "edited")] == ["gpu1"]
        assert "opt/org.kvmpool/token" in text_kept(shared, "edited")
        await hypervisor.remove_claim("edited", "gpu1")
        text = text_kept(shared, "edited")
        assert "kvmpool" not in text
        assert "keep</x:y>" in text

    run(story)


def test_what_cannot_be_added_is_refused_and_the_domain_is_as_it_was(shared: libvirt.virConnect) -> None:
    shared.defineXML(definition("stays"))
    shared.createXML(definition("transient"), 0)
    before = text_kept(shared, "stays")

    async def story(hypervisor: Libvirt) -> None:
        for attributes, says in (
            (VGPU | {"memory": "-1"}, r'domain stays: claim gpu0: memory="-1" is not allowed\. Allowed: 1 to'),
            ({"name": "gpu0", "mode": "vgpu"}, "memory is missing"),
            ({}, "name is missing"),
            (VGPU | {"x\ny": "1"}, "is unknown"),
        ):
            with pytest.raises(ClaimInvalid, match=says):
                await hypervisor.add_claim("stays", attributes)
        assert text_kept(shared, "stays") == before
        with pytest.raises(NotFound, match=r"no domain 'none' on this host\. Next: virsh list --all"):
            await hypervisor.add_claim("none", VGPU)
        with pytest.raises(NotFound, match="no claim"):
            await hypervisor.remove_claim("stays", "gpu0")
        with pytest.raises(Refused, match="transient"):
            await hypervisor.add_claim("transient", VGPU)

    run(story)


def test_a_claim_that_cannot_be_read_can_be_taken_out(shared: libvirt.virConnect) -> None:
    bad = f"<k:claims xmlns:k='{NAMESPACE}'><k:claim name='gpu0' mode='vgpu' memory='-1'/></k:claims>"
    shared.defineXML(definition("broken", bad))

    async def story(hypervisor: Libvirt) -> None:
        with pytest.raises(ClaimInvalid, match='memory="-1"'):
            await hypervisor.add_claim("broken", {"name": "gpu1", "mode": "any"})
        await hypervisor.remove_claim("broken", "gpu0")
        assert claims_kept(shared, "broken") == ()

    run(story)


# --- a libvirtd that is not there -------------------------------------------------------------------------------------


def test_no_libvirtd_is_unreachable_at_once_and_again_without_asking(tmp_path: Path) -> None:
    async def story(hypervisor: Libvirt) -> None:
        for _ in range(3):
            begun = time.monotonic()
            with pytest.raises(Unreachable, match=r"libvirt .*No such file.*Next: kvmpool doctor"):
                await hypervisor.domains()
            assert time.monotonic() - begun < 2
        begun = time.monotonic()
        with pytest.raises(Unreachable):
            await hypervisor.domains()
        assert time.monotonic() - begun < 0.15  # the pause is longer

    run(story, f"qemu+unix:///system?socket={tmp_path}/none")


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """A socket that takes connections and says nothing."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.fspath(tmp_path / "silent"))
    listener.listen(8)
    yield f"qemu+unix:///system?socket={tmp_path}/silent", listener
    listener.close()


def test_a_libvirtd_that_hangs_passes_the_deadline_and_holds_nothing_up(silent: tuple[str, socket.socket]) -> None:
    uri, listener = silent

    async def story() -> None:
        link = Link(uri, "test")
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.ensure_future(tick())
        with pytest.raises(DeadlinePassed, match=r"did not answer within 0\.3 s"):
            await link.call(lambda conn: conn.getLibVersion(), 0.3)
        assert ticks > 10
        peer, _ = listener.accept()
        listener.close()
        peer.close()  # and now it dies
        with pytest.raises(Unreachable, match="libvirt: ") as caught:
            await link.call(lambda conn: conn.getLibVersion(), 5)
        assert not isinstance(caught.value, DeadlinePassed)
        ticking.cancel()
        await link.close()

    closer = threading.Timer(15, listener.close)
    closer.start()
    asyncio.run(asyncio.wait_for(story(), 20))
    closer.cancel()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (42, NotFound),
        (53, NotFound),
        (55, Refused),
        (68, DeadlinePassed),
        (70, Refused),
        (74, Refused),
        (80, NotFound),
        (81, Refused),
        (86, Unreachable),
        (87, CardBusy),
        (88, Denied),
        (99, NotFound),
        (1, Unreachable),
        (27, ClaimInvalid),
        (4711, Unreachable),
    ],
)
def test_each_error_of_libvirt_says_what_to_do_next(code: int, kind: type[KvmpoolError]) -> None:
    error = libvirt.libvirtError("made up")
    error.err = (code, 10, "two\nlines", 2, None, None, None, -1, -1)
    ours = translated(error)
    assert type(ours) is kind
    assert str(ours) == "libvirt: two lines"

"""Whatever is sent to an endpoint or control socket: that connection ends, counted and logged; nobody else notices."""

from __future__ import annotations

import os
import random
import socket
import struct
import time

import pytest

from tests.dataplane.plane import (
    FRAME,
    HELLO,
    MAGIC,
    OP_HELLO,
    Control,
    Guest,
    Plane,
    hello,
    resident_kib,
    status,
    wait_until,
)

pytestmark = pytest.mark.native


def frame(magic: int = MAGIC, op: int = OP_HELLO, flags: int = 0, zero: int = 0, length: int = HELLO.size) -> bytes:
    return FRAME.pack(magic, op, flags, zero, length, 0)


def body(**changes: object) -> bytes:
    """A hello's body with some fields replaced."""
    names = ("version", "caps", "claim", "token", "pid", "flags", "nonce", "va", "program")
    values: dict[str, object] = dict(zip(names, (1, b"caps", b"gpu0", b"", 1, 0, 7, 1 << 40, b"test"), strict=True))
    return HELLO.pack(*(values | changes).values())


NO_FRAME = {
    "nothing but zeros": bytes(64),
    "text": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "another magic": frame(magic=0x4B52) + body(),
    "another op": frame(op=16) + body(),
    "an op out of range": frame(op=0xFFFF) + body(),
    "unknown flags": frame(flags=0x8000) + body(),
    "a byte that must be zero": frame(zero=1) + body(),
    "a huge length": frame(length=0xFFFFFFFF),
    "one byte too many": frame(length=HELLO.size + 1) + body() + b"x",
    "one byte too few": frame(length=HELLO.size - 1) + body()[:-1],
    "no body": frame(length=0),
}
NO_HELLO = {
    "another version": body(version=2),
    "flags from the future": body(flags=1 << 31),
    "an empty claim": body(claim=b""),
    "a claim with a slash": body(claim=b"../gpu0"),
    "an unterminated claim": body(claim=b"a" * 32),
    "an unterminated token": body(token=b"a" * 64),
    "control characters": body(program=b"a\x1b[2Jb"),
    "bytes after the end": body(claim=b"gpu0\0gpu1"),
    "addresses at zero": body(va=0),
    "addresses not on a page": body(va=(1 << 40) + 1),
    "addresses that wrap": body(va=(1 << 64) - (1 << 21)),
}


@pytest.mark.parametrize("data", NO_FRAME.values(), ids=NO_FRAME.keys())
def test_what_is_no_hello_frame_is_cut_without_a_word(plane: Plane, data: bytes) -> None:
    relay = plane.relay()
    with plane.guest() as guest:
        guest.socket.sendall(data)
        assert guest.read(1) == b""
    assert status(plane.relay_socket)["refused"]["garbage"] == 1
    assert "its first bytes are no hello" in plane.log(relay)


@pytest.mark.parametrize("data", NO_HELLO.values(), ids=NO_HELLO.keys())
def test_a_hello_that_cannot_be_read_is_refused_in_the_protocol(plane: Plane, data: bytes) -> None:
    plane.relay()
    with plane.guest() as guest:
        guest.socket.sendall(frame() + data)
        assert guest.welcome().status == -71
        assert guest.ended(1.0)
    assert status(plane.relay_socket)["refused"]["garbage"] == 1


def test_an_unknown_claim_is_refused_by_name(plane: Plane) -> None:
    plane.relay()
    with plane.guest() as guest:
        welcome = guest.greet("gpu7")
    assert (welcome.status, welcome.text) == (-2, 'vm0: the domain has no claim "gpu7"')
    assert status(plane.relay_socket)["refused"]["claim"] == 1


def test_a_cut_hello_ends_with_its_connection_or_its_deadline(plane: Plane) -> None:
    plane.relay("--hello-ms", "300")
    for length in (0, 1, 15, 16, 17, 100, len(hello()) - 1):
        with plane.guest() as guest:
            guest.socket.sendall(hello()[:length])
            guest.socket.shutdown(socket.SHUT_WR)
            assert guest.ended(0.25)
        with plane.guest() as guest:
            guest.socket.sendall(hello()[:length])
            started = time.monotonic()
            assert guest.ended(2.0)
            assert time.monotonic() - started > 0.2
    refused = status(plane.relay_socket)["refused"]
    assert (refused["garbage"], refused["late"]) == (7, 7)


def test_a_hello_in_single_bytes_is_served(plane: Plane) -> None:
    plane.worker()
    plane.relay()
    plane.point()
    with plane.guest() as guest:
        for byte in hello():
            guest.socket.sendall(bytes([byte]))
        assert guest.welcome().status == 0


def test_silent_connections_do_not_keep_a_guest_out(plane: Plane) -> None:
    plane.worker()
    plane.relay()
    plane.point()
    silent = [plane.guest() for _ in range(300)]
    with plane.guest() as guest:
        started = time.monotonic()
        assert guest.greet().status == 0
        assert time.monotonic() - started < 1.0
    seen = status(plane.relay_socket)
    assert seen["greeting"] <= 64
    assert seen["refused"]["late"] >= 236
    for connection in silent:
        connection.socket.close()


def test_a_token_is_wanted_on_a_network(plane: Plane) -> None:
    options = ("--uuid", "u", "--domain", "vm0", "--dir", str(plane.folder / "relays"))
    _, word = plane.spawn("kvmpool-relay", *options, "--endpoint", "tcp:127.0.0.1:0", ready=False)
    assert word == "failed tcp:127.0.0.1:0: Permission denied"
    (plane.folder / "empty").write_text("\n")
    for token in ("empty", "missing"):
        more = ("--endpoint", f"unix:{plane.folder}/g.sock", "--token-file", str(plane.folder / token))
        _, word = plane.spawn("kvmpool-relay", *options, *more, ready=False)
        assert word.startswith(f"failed {plane.folder}/{token}: ")


@pytest.mark.parametrize("endpoint", ["tcp:127.0.0.1", "tcp:0:99999", "tcp:::1:1", "tcp:[]:1", "unix:x", "udp:1", ""])
def test_an_endpoint_that_cannot_be_is_one_line(plane: Plane, endpoint: str) -> None:
    (plane.folder / "token").write_text("0123456789abcdef0123456789abcdef")
    options = ("--uuid", "u", "--domain", "vm0", "--dir", str(plane.folder / "r"), "--endpoint", endpoint)
    process, word = plane.spawn("kvmpool-relay", *options, "--token-file", str(plane.folder / "token"), ready=False)
    assert process.wait(5) != 0
    assert len(plane.log(process).splitlines()) == 1
    assert word in ("", f"failed {endpoint}: Invalid argument")


def _garbage(source: random.Random) -> bytes:
    kind = source.randrange(4)
    if kind == 0:
        return source.randbytes(source.randrange(1, 300))
    if kind == 1:
        return frame(length=source.randrange(1 << 32)) + source.randbytes(50)
    if kind == 2:
        return hello()[: source.randrange(len(hello()))]
    return hello(token="wrong" * 6, claim="gpu9")


def _flood(plane: Plane, source: random.Random, count: int) -> None:
    for _ in range(count):
        with plane.guest() as guest:
            try:
                guest.socket.sendall(_garbage(source))
                if source.random() < 0.3:
                    guest.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            except OSError:
                pass  # it was cut while we spoke: that is what we are here for


def test_ten_thousand_garbage_connections_leave_memory_flat_and_a_session_untouched(plain_plane: Plane) -> None:
    plane = plain_plane
    token = plane.folder / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    worker = plane.worker()
    relay = plane.relay("--token-file", str(token), endpoint="tcp:127.0.0.1:0")
    plane.point()
    source = random.Random(9960)
    with plane.guest() as guest:
        assert guest.greet(token=token.read_text()).status == 0
        _flood(plane, source, 500)  # what is paged in once is no growth
        before = (resident_kib(relay.pid), resident_kib(worker.pid))
        for block in range(10):
            _flood(plane, source, 1000)
            assert guest.ask(f"block {block}") == f"block {block}"
        after = (resident_kib(relay.pid), resident_kib(worker.pid))
    seen = status(plane.relay_socket)
    print(f"10,000 garbage connections: relay {before[0]} -> {after[0]} KiB, worker {before[1]} -> {after[1]} KiB")
    assert sum(seen["refused"].values()) >= 10_400
    assert after[0] - before[0] <= 64
    assert after[1] - before[1] <= 64
    assert len(plane.log(relay)) < 64 * 1024  # the log is rate-limited, too
    assert len(os.listdir(f"/proc/{relay.pid}/fd")) < 100


def test_garbage_on_the_control_sockets_ends_those_connections_only(plane: Plane) -> None:
    plane.worker()
    plane.relay()
    plane.point()
    source = random.Random(1)
    spare = os.open("/dev/null", os.O_RDONLY)
    verbs = (b"SESSION", b"KEEPALIVE", b"RELAY", b"RELAY 99999999999999999999", b"POINT gpu0 0 0\n/x", b"POINT",
             b"CLAIM /", b"GUEST", b"FOLLOW 1", b"FOLLOW x y", b"UNPOINT", b" ", b"\n", b"STATUS ST", b"")  # fmt: skip
    with plane.guest() as guest:
        guest.greet()
        for path in (plane.worker_socket(), plane.relay_socket):
            for number in range(400):
                with Control(path) as stranger:
                    text = verbs[number % len(verbs)] if number % 2 else source.randbytes(source.randrange(1, 40000))
                    stranger.send(text or b"\0", *[spare] * (number % 4))
            for verb in verbs:
                with Control(path) as stranger:
                    stranger.send(verb + source.randbytes(20), spare, spare)
        assert guest.ask("untouched") == "untouched"
    os.close(spare)
    assert status(plane.worker_socket())["refused"]["protocol"] > 100
    wait_until(lambda: len(os.listdir(f"/proc/{plane.processes[0].pid}/fd")) < 40, what="passed descriptors are closed")
    wait_until(lambda: len(os.listdir(f"/proc/{plane.processes[1].pid}/fd")) < 40, what="passed descriptors are closed")


def test_a_worker_ignores_what_its_relay_cannot_mean(plane: Plane) -> None:
    worker = plane.worker()
    with Control(plane.worker_socket()) as relay:
        assert relay.ask("RELAY 1") == "OK"
        ours, theirs = socket.socketpair()
        relay.send(b"SESSION\nshort", theirs.fileno())
        ours.settimeout(2)
        assert ours.recv(1) == b""  # that guest is cut
        relay.send(b"SESSION\n" + hello("gpu1")[16:], os.open("/dev/null", os.O_RDONLY))
        relay.send(b"SESSION\n" + hello()[16:])
        relay.send(b"NONSENSE")
        good, passed = socket.socketpair()
        relay.send(b"SESSION\n" + hello()[16:], passed.fileno())
        passed.close()
        theirs.close()
        good.settimeout(2)
        assert good.recv(16)[2:4] == b"\x02\x00"
        assert status(plane.worker_socket())["refused"]["protocol"] == 4
    wait_until(lambda: worker.poll() is not None, 1.0)


def test_many_guests_at_once_are_all_served(plane: Plane) -> None:
    plane.worker()
    plane.relay()
    plane.point()
    guests = [plane.guest() for _ in range(48)]
    for guest in guests:
        guest.socket.sendall(hello())
    assert all(guest.welcome().status == 0 for guest in guests)
    for number, guest in enumerate(guests):
        assert guest.ask(str(number)) == str(number)
        guest.socket.close()
    assert isinstance(guests[0], Guest)

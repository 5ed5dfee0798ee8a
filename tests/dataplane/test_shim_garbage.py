"""A session that is sent what no shim sends ends by itself; its neighbours and its host do not notice."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmpool.dataplane.calltable import Call, Class, Op
from tests.dataplane import frames, shim
from tests.dataplane.frames import call, frame
from tests.dataplane.waiting import wait_until

pytestmark = pytest.mark.native


@pytest.fixture
def host(tmp_path: Path) -> Iterator[shim.Host]:
    with shim.host(tmp_path, "checked") as running:
        yield running


def dial(host: shim.Host, greeting: bytes | None = None) -> socket.socket:
    """A connection that was welcomed."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(20)
    connection.connect(str(host.folder / "s"))
    connection.sendall(frames.hello() if greeting is None else greeting)
    header = frames.HEADER.unpack(read(connection, frames.HEADER.size))
    assert header[1] == frames.WELCOME
    assert struct.unpack("<i", read(connection, header[4])[:4]) == (0,) if greeting is None else True
    return connection


def read(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = connection.recv(length - len(data))
        assert more, "the session ended early"
        data += more
    return data


def result(connection: socket.socket) -> int:
    """The CUresult of the next reply."""
    _, op, _, _, length, _ = frames.HEADER.unpack(read(connection, frames.HEADER.size))
    body = read(connection, length)
    assert op == frames.REPLY
    return int(struct.unpack("<i", body[:4])[0])


def ends(connection: socket.socket) -> bool:
    """Whether the other side closes; what it still had to say is read away."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def with_context(host: shim.Host) -> socket.socket:
    connection = dial(host)
    handle = frames.CONTEXT_HANDLE
    connection.sendall(call("context_create", handle, 0) + frame(frames.CONTEXT, struct.pack("<Q", handle)))
    assert result(connection) == 0
    return connection


MALFORMED = {
    "another magic": struct.pack("<HHHHII", 0x4B50, 20, 1, 0, 0, 1),
    "unknown flags": struct.pack("<HHHHII", 0x4B51, 20, 0x8000, 0, 0, 1),
    "not zero": struct.pack("<HHHHII", 0x4B51, 20, 1, 1, 0, 1),
    "a huge length": struct.pack("<HHHHII", 0x4B51, 20, 1, 0, 0xFFFFFFFF, 1),
    "more than a call": frame(20, bytes(100_000), 1),
    "op 0": frame(0),
    "an op that is not given": frame(15),
    "the op after the last": frame(frames.CALLS + len(frames.table().wire()), b"", 1),
    "a hello again": frames.hello(),
    "a reply": frame(frames.REPLY, bytes(8)),
    "data of no call": frame(frames.DATA, b"x"),
    "a context that is none": frame(frames.CONTEXT, struct.pack("<Q", 77)),
    "too few numbers": call("alloc", frames.VA_BASE),
    "too many numbers": call("alloc", frames.VA_BASE, 1, 1),
    "a waiting call not waited for": call("alloc", frames.VA_BASE, 512, wanted=False),
    "a text without end": call("function_get", 1, 2, tail=b"name"),
    "a text with two ends": call("function_get", 1, 2, tail=b"na\0me\0"),
    "no text at all": call("function_get", 1, 2),
    "a handle of another kind": call("cuStreamCreate", frames.EVENT_HANDLE, 0),
    "a handle beyond the table": call("cuStreamCreate", (1 << 57) | frames.STREAM_HANDLE, 0),
    "a handle in use": call("cuStreamCreate", frames.STREAM_HANDLE, 0) * 2,
    "an image of no bytes": call("module_load", frames.MODULE_HANDLE, 0),
    "an image beyond the maximum": call("module_load", frames.MODULE_HANDLE, 1 << 40),
    "data of another call": call("copy_in", frames.VA_BASE, 8, 0) + frame(frames.DATA, bytes(8), 0, 99),
    "more data than announced": call("copy_in", frames.VA_BASE, 8, 0) + frame(frames.DATA, bytes(9)),
    "empty data": call("copy_in", frames.VA_BASE, 8, 0) + frame(frames.DATA, b""),
    "a call where data belong": call("copy_in", frames.VA_BASE, 8, 0) + call("alloc", frames.VA_BASE, 512),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_frame_ends_its_session_only(host: shim.Host, what: str) -> None:
    with with_context(host) as neighbour, with_context(host) as connection:
        connection.sendall(call("alloc", frames.VA_BASE, 512))
        assert result(connection) == 0
        connection.sendall(MALFORMED[what])
        assert ends(connection)
        neighbour.sendall(call("alloc", frames.VA_BASE, 512))
        assert result(neighbour) == 0
        wait_until(lambda: len(host.sessions()) == 1, 10.0, "its session ends, the neighbour's does not")
    assert "Protocol error" in (host.folder / "host.log").read_text()


def test_what_a_guest_may_ask_wrongly_is_an_error_of_that_call(host: shim.Host) -> None:
    base, page = frames.VA_BASE, 2 << 20
    asked = {
        "below the window": (call("alloc", base - 512, 512), 1),
        "beyond the window": (call("alloc", base + (1 << 40) - 512, 1024), 1),
        "around the end of numbers": (call("alloc", base, (1 << 64) - 1), 1),
        "not where a block is": (call("alloc", base + 100, 512), 1),
        "beyond the claim": (call("alloc", base, shim.MEMORY + 1), 2),
        "two pages": (call("alloc", base, 2 * page), 0),
        "inside them": (call("alloc", base + page, 512), 1),
        "over their end": (call("alloc", base + page + 512, page), 1),
        "the same again": (call("alloc", base, 512), 1),
        "free of nothing": (call("free", base + 4 * page), 1),
        "free inside": (call("free", base + 512), 1),
        "free on the second page": (call("free", base + page), 1),
        "free": (call("free", base), 0),
        "free again": (call("free", base), 1),
        "a copy of memory that is not there": (call("copy_out", base + 8 * page, 8, 0), 1),
        "a copy without end": (call("copy_out", base, 1 << 62, 0), 1),
        "a stream that is none": (call("cuStreamSynchronize", 12345), 400),
        "a function that is none": (call("launch", 5, 1, 1, 1, 1, 1, 1, 0, 0, 0), 400),
        "a context to destroy": (call("context_destroy", 99), 201),
    }
    with with_context(host) as connection:
        for what, (sent, expected) in asked.items():
            connection.sendall(sent)
            assert result(connection) == expected, what


def test_a_function_dies_with_its_kernels_library_whatever_library_the_guest_names(host: shim.Host) -> None:
    kernel, other, function = frames.KERNEL_HANDLE, frames.LIBRARY_HANDLE + 100, frames.FUNCTION_HANDLE
    launch = (1, 1, 1, 1, 1, 1, 0, 0, 0)
    with with_context(host) as connection:
        for library in (frames.LIBRARY_HANDLE, other):
            connection.sendall(call("library_load", library, 4, bulk=b"ptx\0"))
            assert result(connection) == 0
        connection.sendall(call("kernel_get", frames.LIBRARY_HANDLE, kernel, tail=b"none\0"))
        assert result(connection) == 0
        connection.sendall(call("kernel_function", kernel, function, other))
        said = [result(connection)]
        connection.sendall(call("kernel_function", kernel, function + 1, frames.LIBRARY_HANDLE))
        said.append(result(connection))
        connection.sendall(call("cuLibraryUnload", frames.LIBRARY_HANDLE))
        assert result(connection) == 0
        for number in (function, function + 1):
            connection.sendall(call("launch", number, *launch))
            said.append(result(connection))
        assert said == [1, 0, 400, 400]


@pytest.mark.parametrize(("va", "stream", "expected"), [(0, 4711, 400), (8 << 21, 0, 1)])
def test_a_copy_that_fails_is_read_to_its_end(host: shim.Host, va: int, stream: int, expected: int) -> None:
    with with_context(host) as connection:
        connection.sendall(call("alloc", frames.VA_BASE, 1000))
        assert result(connection) == 0
        connection.sendall(call("copy_in", frames.VA_BASE + va, 1000, stream, bulk=bytes(1000)))
        assert result(connection) == expected
        connection.sendall(call("alloc", frames.VA_BASE + 1024, 512))
        assert result(connection) == 0


def test_another_build_is_told_so(host: shim.Host) -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(20)
    connection.connect(str(host.folder / "s"))
    connection.sendall(frames.hello(caps=b"another build's!"))
    header = frames.HEADER.unpack(read(connection, frames.HEADER.size))
    body = read(connection, header[4])
    assert struct.unpack("<i", body[:4])[0] == -71
    assert b"another build" in body
    assert ends(connection)


def test_random_bytes_behind_a_good_beginning_never_crash(host: shim.Host) -> None:
    random_bytes = random.Random(20)
    sessions = [*frames.each_call(), frames.life()]
    for _ in range(300):
        sent = bytearray(random_bytes.choice(sessions))
        for _ in range(random_bytes.randrange(1, 6)):
            sent[random_bytes.randrange(len(sent))] = random_bytes.randrange(256)
        cut = random_bytes.randrange(len(sent))
        connection = dial(host)
        try:
            connection.sendall(sent[: cut if random_bytes.random() < 0.3 else None])
            connection.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert ends(connection)
        connection.close()
    wait_until(lambda: host.sessions() == [], 10.0, "all sessions are gone")
    assert host.run("memory").code == 0


def asynchronous() -> list[Op | Call]:
    """All but those that name a range of a shared window, and the word that a function is over.

    This connection has neither window nor function, so they are no errors but garbage.
    """
    return [
        entry
        for entry in frames.table().wire()
        if entry.cls is Class.ASYNC and not entry.name.startswith(("arena", "pinned", "host_next"))
    ]


def failing(entry: Op | Call, wanted: bool) -> bytes:
    """That call with handles that are none, addresses where nothing is and numbers out of range."""
    names = entry.fields if isinstance(entry, Op) else tuple(arg.name for arg in entry.numbers_in)
    numbers = [12345 + 512 * place for place, _ in enumerate(names)]
    if not isinstance(entry, Op):
        for place, arg in enumerate(entry.numbers_in):
            if arg.object == "stream" and arg.kind.value == "new":
                numbers[place] = frames.STREAM_HANDLE
            if arg.object == "event" and arg.kind.value == "new":
                numbers[place] = frames.EVENT_HANDLE
    bulk = bytes(numbers[1]) if isinstance(entry, Op) and entry.bulk else b""
    return call(entry.name, *numbers, bulk=bulk, wanted=wanted)


@pytest.mark.parametrize("entry", asynchronous(), ids=lambda entry: entry.name)
def test_no_error_of_an_asynchronous_call_is_ever_dropped(host: shim.Host, entry: Op | Call) -> None:
    with with_context(host) as connection:
        connection.sendall(failing(entry, wanted=True))
        own = result(connection)
        assert own != 0, "the case must fail"
        connection.sendall(failing(entry, wanted=False) + call("alloc", frames.VA_BASE, 512))
        assert result(connection) == own, "the next call that waits tells it"
        connection.sendall(call("alloc", frames.VA_BASE, 512))
        assert result(connection) == 0, "once"


def _elf(sections: int) -> bytes:
    """A header that says where `sections` section headers are, and none of them."""
    return struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 2, 190, 1, 0, 64, 0, 0, 64, 56, 0, 64, sections, 0)


REACHING = {
    "a wrapper with the guest's pointer": struct.pack("<IIQQ", 0x466243B1, 1, 0x4141414141414141, 0),
    "a fatbin that is said to be longer": struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 1 << 20) + bytes(64),
    "an entry that leaves its fatbin": struct.pack("<IHHQHHIQ", 0xBA55ED50, 1, 16, 64, 1, 1, 64, 1 << 30) + bytes(48),
    "section headers behind the end": _elf(5),
}


@pytest.mark.parametrize("image", REACHING.values(), ids=REACHING)
def test_an_image_that_reaches_beyond_what_was_sent_never_comes_to_the_driver(host: shim.Host, image: bytes) -> None:
    connection = with_context(host)
    connection.sendall(call("module_load", frames.MODULE_HANDLE, len(image), bulk=image))
    assert result(connection) == 200
    connection.sendall(call("library_load", frames.LIBRARY_HANDLE, len(image), bulk=image))
    assert result(connection) == 200
    connection.sendall(call("module_load", frames.MODULE_HANDLE, 4, bulk=b"ptx\0"))
    assert result(connection) == 0

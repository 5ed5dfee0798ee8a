"""Shared memory between shim and session: who uses it when, and what a hostile side can do with it (nothing)."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.dataplane import frames, shim
from tests.dataplane.frames import call, frame
from tests.dataplane.waiting import wait_until

pytestmark = pytest.mark.native

RING, ARENA_AT, ARENA = 1 << 20, 4 << 20, 512 << 20
WINDOW = ARENA_AT + ARENA
WRITTEN, TAKEN = 0, 64  # of the ring to the session, from the window's start; the ring to the shim is 128 behind
WINDOW_WANTED = 1


@pytest.fixture
def host(tmp_path: Path) -> Iterator[shim.Host]:
    with shim.host(tmp_path, "checked") as running:
        yield running


def greeting() -> bytes:
    """A hello that asks for a window: its flags are set."""
    body = bytearray(frames.hello()[frames.HEADER.size :])
    struct.pack_into("<I", body, 4 + 16 + 32 + 64 + 4, WINDOW_WANTED)
    return frame(frames.HELLO, bytes(body), 0, 0)


class Side:
    """The guest's end of a window, written by hand."""

    def __init__(self, host: shim.Host) -> None:
        self.line = socket.socket(socket.AF_UNIX)
        self.line.settimeout(20)
        self.line.connect(str(host.folder / "s"))
        self.line.sendall(greeting())
        _, (memory,), _, _ = socket.recv_fds(self.line, frames.HEADER.size, 1)
        self._rest()
        self.seals = fcntl.fcntl(memory, fcntl.F_GET_SEALS)
        self.bytes = os.fstat(memory).st_size
        self.window = mmap.mmap(memory, WINDOW)
        os.close(memory)
        self.at = 0

    def _rest(self) -> None:
        left = 260
        while left:
            left -= len(self.line.recv(left))

    def word(self, at: int) -> int:
        return int(struct.unpack_from("<I", self.window, at)[0])

    def set(self, at: int, value: int) -> None:
        struct.pack_into("<I", self.window, at, value & 0xFFFFFFFF)
        self.line.send(b"\0", socket.MSG_DONTWAIT)

    def put(self, data: bytes) -> None:
        """Write as a shim would; the session may sleep at the socket, so each write rings."""
        for byte in range(0, len(data), 4096):
            piece = data[byte : byte + 4096]
            assert self.at + len(piece) <= RING, "this side does not wrap"
            self.window[4096 + self.at : 4096 + self.at + len(piece)] = piece
            self.at += len(piece)
        self.set(WRITTEN, self.at)

    def result(self) -> int:
        """The CUresult of the next reply."""
        taken = self.word(128 + TAKEN)
        wait_until(lambda: self.word(128 + WRITTEN) - taken >= frames.HEADER.size, 10.0, "a reply")
        at = 4096 + RING + taken
        _, op, _, _, length, _ = frames.HEADER.unpack(self.window[at : at + frames.HEADER.size])
        assert op == frames.REPLY
        self.set(128 + TAKEN, taken + frames.HEADER.size + length)
        return int(struct.unpack_from("<i", self.window, at + frames.HEADER.size)[0])

    def ended(self) -> bool:
        """Whether the session has closed the lifeline; its bells are read away."""
        try:
            while self.line.recv(64):
                pass
        except ConnectionResetError:
            pass
        return True


def begun(host: shim.Host) -> Side:
    side = Side(host)
    handle = frames.CONTEXT_HANDLE
    side.put(call("context_create", handle, 0) + frame(frames.CONTEXT, struct.pack("<Q", handle)))
    assert side.result() == 0
    return side


def test_a_guest_on_the_host_gets_shared_memory_unless_it_is_switched_off(host: shim.Host) -> None:
    assert "over shared memory" in host.run("memory").log
    assert "over its socket" in host.run("memory", KVMPOOL_SHM="0").log


def test_the_window_cannot_be_resized_by_either_side(host: shim.Host) -> None:
    side = Side(host)
    assert side.bytes == WINDOW
    assert side.seals & (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL) == 7


def test_nobody_is_sent_a_window_who_did_not_ask(host: shim.Host) -> None:
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(20)
        line.connect(str(host.folder / "s"))
        line.sendall(frames.hello())
        _, memories, _, _ = socket.recv_fds(line, 4096, 4)
    assert memories == []


def test_a_session_answers_through_the_ring_also_after_a_long_silence(host: shim.Host) -> None:
    side = begun(host)
    time.sleep(0.2)  # by now it sleeps at the socket
    side.put(call("alloc", frames.VA_BASE, 512))
    assert side.result() == 0


def cut_short(side: Side) -> None:
    side.put(b"\x51\x4b")
    side.line.shutdown(socket.SHUT_RDWR)


HOSTILE: dict[str, Callable[[Side], None]] = {
    "more written than a ring holds": lambda side: side.set(WRITTEN, side.at + RING + 1),
    "written going back": lambda side: side.set(WRITTEN, side.at - 1),
    "garbage frames": lambda side: side.put(os.urandom(64)),
    "half a frame and then the end": lambda side: cut_short(side),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_guest_ends_its_own_session_only(host: shim.Host, what: str) -> None:
    neighbour, side = begun(host), begun(host)
    HOSTILE[what](side)
    assert side.ended()
    neighbour.put(call("alloc", frames.VA_BASE, 512))
    assert neighbour.result() == 0
    wait_until(lambda: len(host.sessions()) == 1, 10.0, "its session ends, the neighbour's does not")


def test_a_reader_counter_that_cannot_be_ends_the_session(host: shim.Host) -> None:
    side = begun(host)
    side.set(128 + TAKEN, 0x7FFFFFFF)
    side.put(call("alloc", frames.VA_BASE, 512))
    assert side.ended()


def test_words_that_never_stop_changing_hold_nobody_up(host: shim.Host) -> None:
    side, stop = begun(host), threading.Event()

    def scribble() -> None:
        while not stop.is_set():
            struct.pack_into("<I", side.window, WRITTEN + 4, 2)  # how this side waits for room: at the socket, falsely
            struct.pack_into("<I", side.window, 128 + TAKEN + 4, 1)
            time.sleep(0)

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        assert host.run("bulk", "3000000")["equal"] == 1
        side.line.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: host.sessions() == [], 10.0, "the session ends at its lifeline")
    finally:
        stop.set()
        thread.join()


def test_a_guest_that_writes_for_ever_is_cut_by_the_lifeline(host: shim.Host) -> None:
    side, stop = begun(host), threading.Event()
    noise = frame(frames.CONTEXT, struct.pack("<Q", frames.CONTEXT_HANDLE)) * (RING // 24 + 1)

    def write() -> None:
        side.window[4096 : 4096 + RING] = noise[:RING]
        while not stop.is_set():  # aligned frames only once round: any later byte ends the session by itself
            struct.pack_into("<I", side.window, WRITTEN, (side.word(TAKEN) + RING) & 0xFFFFFFFF)

    side.line.shutdown(socket.SHUT_RDWR)
    thread = threading.Thread(target=write)
    thread.start()
    try:
        wait_until(lambda: host.sessions() == [], 2.0, "the session ends")
    finally:
        stop.set()
        thread.join()


@contextmanager
def worker(path: Path, memory: Callable[[], list[int]]) -> Iterator[list[int]]:
    """Something that greets as a worker, sends these descriptors, and hangs up; gives the hellos' flags."""
    flags: list[int] = []

    def serve() -> None:
        while True:
            line, _ = listener.accept()
            with line:
                hello = line.recv(4096)
                if not hello:
                    return
                flags.append(struct.unpack_from("<I", hello, 16 + 4 + 16 + 32 + 64 + 4)[0])
                body = bytearray(260)
                body[4:20] = frames.table().capability_hash()
                made = memory() if flags[-1] else []
                socket.send_fds(line, [frame(frames.WELCOME, bytes(body), 0, 0)], made)
                for fd in made:
                    os.close(fd)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        yield flags
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(str(path))
        thread.join(10)


def memfd(size: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


BAD_WINDOWS: dict[str, Callable[[], list[int]]] = {
    "not sealed": lambda: [memfd(WINDOW, 0)],
    "may shrink": lambda: [memfd(WINDOW, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)],
    "too small": lambda: [memfd(4096, 7)],
    "no memory at all": lambda: [os.open("/dev/null", os.O_RDWR)],
    "a pipe and more": lambda: list(os.pipe()),
}


@pytest.mark.parametrize("what", BAD_WINDOWS)
def test_a_shim_maps_no_window_that_could_fail_under_it(host: shim.Host, tmp_path: Path, what: str) -> None:
    with worker(tmp_path / "w", BAD_WINDOWS[what]) as flags:
        run = host.run("init", KVMPOOL_ENDPOINT=f"unix:{tmp_path}/w")
    assert (run["init"], flags) == (46, [1, 0]), "it asked again without, and that worker hung up"


def test_a_window_whose_worker_hangs_up_is_a_lost_device(host: shim.Host, tmp_path: Path) -> None:
    with worker(tmp_path / "w", lambda: [memfd(WINDOW, 7)]) as flags:
        run = host.run("init", KVMPOOL_ENDPOINT=f"unix:{tmp_path}/w")
    assert (run["init"], flags) == (46, [1])


def test_counters_a_worker_spoils_are_a_lost_device(host: shim.Host, tmp_path: Path) -> None:
    def spoiled() -> list[int]:
        fd = memfd(WINDOW, 7)
        with mmap.mmap(fd, WINDOW) as window:
            struct.pack_into("<I", window, 128 + WRITTEN, RING + 5)
            struct.pack_into("<I", window, TAKEN, 77)
        return [fd]

    with worker(tmp_path / "w", spoiled):
        run = host.run("init", KVMPOOL_ENDPOINT=f"unix:{tmp_path}/w")
    assert run["init"] == 46


@pytest.mark.parametrize("way", shim.WAYS)
@pytest.mark.parametrize("size", [100, 4096, 20_000_001])
def test_page_locked_memory_is_copied_right_in_every_way(tmp_path: Path, way: str, size: int) -> None:
    with shim.host(tmp_path, way) as host:
        run = host.run("pinned", str(size))
    assert run.code == 0, run.lines
    right = ("apart", "async", "sync", "unified", "plain", "inside", "rows", "small_untouched", "again")
    assert {name: run[name] for name in right} == dict.fromkeys(right, 1)
    assert (run["beyond_allocation"], run["freed_twice"]) == (1, 1)


def test_bytes_of_page_locked_memory_do_not_travel(tmp_path: Path) -> None:
    with shim.host(tmp_path, "plain") as host:
        small, large = host.run("pinned", "4096"), host.run("pinned", "20000000")
        registered = host.driver_calls().count("cuMemHostRegister")
    # what is copied to plain memory, twice, is all that the larger program receives more
    assert large.stats["bytes_in"] - small.stats["bytes_in"] < 2.1 * 20_000_000
    assert large.stats["bytes_out"] - small.stats["bytes_out"] < 1000
    assert registered > 0


def test_page_locked_memory_outlives_its_worker(host: shim.Host) -> None:
    guest = host.start("pinned_lost")
    assert guest.stdout is not None
    assert guest.stdout.readline() == "ready=1\n"
    (session,) = host.sessions()
    os.kill(session, signal.SIGKILL)
    wait_until(lambda: host.sessions() == [], 10.0, "the session is gone")
    run = host.finish(guest, "\n")
    assert (run.code, run["synchronise"], run["equal"]) == (0, 46, 1)


@pytest.mark.parametrize("numbers", [(512 << 20, 1), (0, (512 << 20) + 1), (1 << 63, 1 << 63), ((1 << 64) - 1, 2)])
def test_an_offset_beyond_the_arena_ends_the_session(host: shim.Host, numbers: tuple[int, int]) -> None:
    offset, size = numbers
    for name in ("arena_in", "arena_out"):
        side = begun(host)
        side.put(call(name, frames.VA_BASE, size, offset, 0))
        assert side.ended()


def test_a_guest_without_a_window_has_no_arena(host: shim.Host) -> None:
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(20)
        line.connect(str(host.folder / "s"))
        handle = frames.CONTEXT_HANDLE
        begin = call("context_create", handle, 0) + frame(frames.CONTEXT, struct.pack("<Q", handle))
        line.sendall(frames.hello() + begin + call("arena_in", frames.VA_BASE, 8, 0, 0))
        while line.recv(4096):
            pass

"""The guest's end of a window of shared memory, by a hand that does not keep to the protocol (docs/adr/0010)."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import socket
import struct
import threading

from tests.bypass.world import Claim
from tests.dataplane import frames
from tests.dataplane.plane import short_path

RING, ARENA_AT, ARENA = 1 << 20, 4 << 20, 512 << 20
WORDS = (0, 4, 64, 68, 128, 132, 192, 196)  # of both rings: written, how its reader waits; taken, how its writer waits
FLAGS_AT = 4 + 16 + 32 + 64 + 4
WINDOW_WANTED = 1


class Window:
    def __init__(self, claim: Claim) -> None:
        self.line = socket.socket(socket.AF_UNIX)
        self.line.settimeout(20)
        with short_path(claim.plane.endpoint.removeprefix("unix:")) as path:
            self.line.connect(path)
        body = bytearray(frames.hello()[frames.HEADER.size :])
        struct.pack_into("<I", body, FLAGS_AT, WINDOW_WANTED)
        self.line.sendall(frames.frame(frames.HELLO, bytes(body), 0, 0))
        _, (memory,), _, _ = socket.recv_fds(self.line, frames.HEADER.size, 1)
        self.window = mmap.mmap(memory, ARENA_AT + ARENA)
        os.close(memory)
        self.at = 0

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *error: object) -> None:
        self.line.close()
        self.window.close()

    def put(self, data: bytes) -> None:
        """A frame, as a shim would write it; the ring is not followed round its end."""
        if self.at + len(data) > RING:
            return
        self.window[4096 + self.at : 4096 + self.at + len(data)] = data
        self.at += len(data)
        struct.pack_into("<I", self.window, 0, self.at)
        with contextlib.suppress(OSError):
            self.line.send(b"\0", socket.MSG_DONTWAIT)

    def scribble(self, stop: threading.Event, seed: int) -> None:
        """Counters, notes of who waits, and the bytes of frames that were just written, again and again."""
        chosen = random.Random(seed)
        while not stop.is_set():
            near = self.at + chosen.randrange(-64, 65)
            value = chosen.choice([near, chosen.randrange(1 << 32), RING, RING + 1, 0xFFFFFFFF, 0, 1, 2])
            struct.pack_into("<I", self.window, chosen.choice(WORDS), value & 0xFFFFFFFF)
            place = 4096 + chosen.randrange(max(1, self.at))
            self.window[place : place + 2] = chosen.randbytes(2)

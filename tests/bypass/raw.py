"""A guest that speaks the wire by itself, without the shim: whatever it likes, one frame after the other."""

from __future__ import annotations

import contextlib
import struct

from tests.bypass.world import Claim
from tests.dataplane import frames
from tests.dataplane.plane import Guest, Welcome

FLAGS_AT = 4 + 16 + 32 + 64 + 4  # of the flags in a hello's body


class Raw:
    """A connection that was welcomed, with a context made and current unless `context` says no."""

    def __init__(self, claim: Claim, context: bool = True) -> None:
        self.guest = Guest(claim.plane.endpoint, 20.0)
        self.guest.socket.sendall(frames.hello())
        self.greeting: Welcome = self.guest.welcome()
        assert self.greeting.status == 0, self.greeting.text
        if context:
            assert self.ask("context_create", frames.CONTEXT_HANDLE, 0) == 0
            self.send(frames.frame(frames.CONTEXT, struct.pack("<Q", frames.CONTEXT_HANDLE)))
        self.base = claim.used()  # with the context

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *error: object) -> None:
        self.guest.socket.close()

    def send(self, data: bytes) -> None:
        """Also where the other side has hung up already: what it does then is the test's to see."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.guest.socket.sendall(data)

    def ask(self, name: str, *numbers: int, tail: bytes = b"", bulk: bytes = b"", seq: int = 1) -> int:
        """The CUresult of that call, or -1 where the session has ended instead; its DATA are in `data`."""
        self.send(frames.call(name, *numbers, tail=tail, bulk=bulk, seq=seq))
        return self.result()

    def result(self) -> int:
        self.data = b""
        while True:
            head = self.guest.read(frames.HEADER.size)
            if len(head) < frames.HEADER.size:
                return -1
            _, op, _, _, length, self.seq = frames.HEADER.unpack(head)
            body = self.guest.read(length)
            if op == frames.REPLY:
                return int(struct.unpack("<i", body[:4])[0])
            assert op == frames.DATA
            self.data += body

    def ended(self) -> bool:
        return self.guest.ended(10.0)

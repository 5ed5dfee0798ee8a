"""A kvmpoold stand-in on a unix socket: answers every request as it is told to and remembers what it was asked."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self


@dataclass
class FakeDaemon:
    path: Path
    status: int = 200
    body: bytes = b"{}"
    delay_s: float = 0.0
    raw: bytes | None = None  # sent instead of an HTTP answer
    deaf: bool = False  # answers before it has read the body, then closes
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self.path))
        self._socket.listen(16)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(5)
        self.path.unlink()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            with peer:
                try:
                    self._answer(peer)
                except OSError:
                    continue

    def _answer(self, peer: socket.socket) -> None:
        if not self.deaf:
            self.asked.append(_read(peer))
        time.sleep(self.delay_s)
        answer = f"HTTP/1.1 {self.status} X\r\ncontent-length: {len(self.body)}\r\n\r\n".encode() + self.body
        peer.sendall(answer if self.raw is None else self.raw)


def _read(peer: socket.socket) -> tuple[str, dict[str, Any]]:
    data = b""
    while b"\r\n\r\n" not in data:
        data += peer.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    length = next(int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length:"))
    while len(body) < length:
        body += peer.recv(1 << 20)
    return lines[0], json.loads(body)

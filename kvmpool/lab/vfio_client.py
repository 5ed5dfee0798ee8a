"""kvmpoold's API in the VFIO lab's host, from outside: each call is one exchange over the command channel.

A `kvmpool` started in the host takes seconds under TCG, for Python's imports alone.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from kvmpool.api.client import DEFAULT_SOCKET, Client, Connection
from kvmpool.lab import vfio_channel

_DEADLINE_S = 60.0


class HostClient(Client):
    """As Client, but `lines`, which ends with the daemon."""

    def __init__(self, folder: Path) -> None:
        super().__init__(DEFAULT_SOCKET, _DEADLINE_S)
        self._folder = folder

    def _connection(self) -> Connection:
        return _Exchanged(self._folder)


class _Exchanged(Connection):
    """One request; its answer is read to the end of the stream."""

    def __init__(self, folder: Path) -> None:
        super().__init__(DEFAULT_SOCKET, _DEADLINE_S)
        self.sock: Any = _Exchange(folder)

    def endheaders(self, message_body: Any = None, *, encode_chunked: bool = False) -> None:
        self.putheader("Connection", "close")
        super().endheaders(message_body, encode_chunked=encode_chunked)


class _Exchange:
    """What HTTPConnection needs of a socket."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sent = b""

    def sendall(self, data: bytes) -> None:
        self._sent += bytes(data)

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(vfio_channel.exchange(self._folder, str(DEFAULT_SOCKET), self._sent, _DEADLINE_S))

    def close(self) -> None:
        """Nothing is open."""

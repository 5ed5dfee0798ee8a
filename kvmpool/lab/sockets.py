"""Unix sockets in folders whose path may be longer than a socket's address may be (107 bytes, unix(7))."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def connected(path: Path) -> socket.socket:
    """A stream to the socket at `path`. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            connection.connect(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.close(folder)
    except OSError:
        connection.close()
        raise
    return connection

"""Sends log records to journald with fields (systemd.io/JOURNAL_NATIVE_PROTOCOL), or to stderr without a journal.

Fields besides the message: PRIORITY, SYSLOG_IDENTIFIER, CODE_*, KVMPOOL_LOGGER. No secrets reach a log call.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

JOURNAL = Path("/run/systemd/journal/socket")
_PRIORITY = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (0, 7))


def set_up(level: int = logging.INFO, environment: Mapping[str, str] = os.environ) -> None:
    """Give the root logger its one handler."""
    handler: logging.Handler
    if _is_journal(environment) and JOURNAL.exists():
        handler = JournalHandler(JOURNAL)
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("uvicorn", "uvicorn.error", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _is_journal(environment: Mapping[str, str]) -> bool:
    """Whether stderr is the journal's stream: JOURNAL_STREAM is its device:inode (systemd.exec(5))."""
    device, _, inode = environment.get("JOURNAL_STREAM", "").partition(":")
    try:
        stat = os.fstat(sys.stderr.fileno())
        return (int(device), int(inode)) == (stat.st_dev, stat.st_ino)
    except (OSError, ValueError):
        return False


class JournalHandler(logging.Handler):
    """One datagram a record; a record that the journal does not take goes to stderr."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._socket.sendto(fields_of(record), self._path)
        except OSError:
            sys.stderr.write(f"{record.levelname} {record.name}: {record.getMessage()}\n")

    def close(self) -> None:
        self._socket.close()
        super().close()


def fields_of(record: logging.LogRecord) -> bytes:
    """The datagram: NAME=value lines, and the length-prefixed form for values with a newline."""
    message = record.getMessage()
    if record.exc_info:
        message += "\n" + logging.Formatter().formatException(record.exc_info)
    fields = {
        "MESSAGE": message,
        "PRIORITY": str(next(priority for level, priority in _PRIORITY if record.levelno >= level)),
        "SYSLOG_IDENTIFIER": "kvmpoold",
        "CODE_FILE": record.pathname,
        "CODE_LINE": str(record.lineno),
        "CODE_FUNC": record.funcName or "",
        "KVMPOOL_LOGGER": record.name,
    }
    return b"".join(_field(name, value.encode("utf-8", "replace")) for name, value in fields.items())


def _field(name: str, value: bytes) -> bytes:
    if b"\n" in value:
        return name.encode() + b"\n" + struct.pack("<Q", len(value)) + value + b"\n"
    return name.encode() + b"=" + value + b"\n"

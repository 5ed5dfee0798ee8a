"""Who lives: a relay or worker holds its lock file flocked for as long as it, or any session of it, exists.

The file says "pid start-time"; together they name a process for good, so that a signal never hits a stranger.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.01  # how soon a process's end is noticed


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that took the lock. It may be dead while a session that hangs in the driver still holds it."""

    pid: int
    start_time: int  # clock ticks since boot


def holder(lock: Path) -> Holder | None:
    """Whoever holds the lock; None when it is free or not there. Pid 0: held, and not yet written."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.read(descriptor, 64)
            pid, _, started = text.partition(b" ")
            return Holder(int(pid), int(started)) if text.replace(b" ", b"").strip().isdigit() else Holder(0, 0)
        return None
    finally:
        os.close(descriptor)


def tidy(lock: Path, *others: Path) -> bool:
    """Remove a free lock and what its owner left; False when held. Safe beside a starting owner: it looks again."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in (*others, lock):  # the lock last: while it is there and ours, nobody starts
            path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def send_signal(who: Holder, number: signal.Signals) -> None:
    """Signal that very process; nothing when it is gone, or not known."""
    if who.pid <= 0:
        return
    with suppress(ProcessLookupError, FileNotFoundError):
        descriptor = os.pidfd_open(who.pid)
        try:
            if start_time(who.pid) == who.start_time:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def start_time(pid: int) -> int:
    """When the process started, in clock ticks since boot. Raises FileNotFoundError."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


async def wait_free(lock: Path, deadline_s: float) -> bool:
    """Whether the lock is free, at the latest after `deadline_s`."""
    end = time.monotonic() + deadline_s
    while holder(lock) is not None:
        if time.monotonic() >= end:
            return False
        await asyncio.sleep(_POLL_S)
    return True

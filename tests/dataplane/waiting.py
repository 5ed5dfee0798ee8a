"""Waiting for what another process does, and building what tests share once per source."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(true: Callable[[], object], timeout_s: float = 5.0, what: str = "") -> float:
    """Seconds it took; fails when it does not become true in time."""
    started = time.monotonic()
    while not true():
        if time.monotonic() - started > timeout_s:
            raise AssertionError(f"not within {timeout_s} s: {what or true}")
        time.sleep(0.005)
    return time.monotonic() - started


def state(pid: int) -> str:
    """As in /proc/PID/stat: R, S, T, Z...; "" where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def gone(pid: int) -> bool:
    """Whether no process (a zombie is none) has this pid."""
    return state(pid) in ("", "Z", "X")


def built_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, which `make` fills unless that was done before, by whichever test was first."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            make(folder)
            (folder / "done").touch()
    return folder

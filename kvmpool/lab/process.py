"""Processes that a lab has started: named so that a recycled pid is never mistaken for one, and ended with proof.

Knows nothing of what they do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvmpool.errors import DeadlinePassed, Unreachable

POLL_S = 0.02  # a process's end is looked for this often

Done = subprocess.CompletedProcess[str]


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process for ever: its pid and its start, in clock ticks since boot (proc(5), field 22 of stat)."""

    pid: int
    start: int


def identify(pid: int) -> ProcessId | None:
    """The living process `pid` is now; None where there is none, or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else ProcessId(pid, int(fields[19]))


def alive(process: ProcessId) -> bool:
    return identify(process.pid) == process


def children(process: ProcessId) -> tuple[int, ...]:
    """Pids of its children, as seen from here; () once it is gone: whoever has its pid now has children of his own."""
    try:
        pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    except OSError:
        return ()
    return tuple(int(pid) for pid in pids) if alive(process) else ()


def end(process: ProcessId, *, signal_first: signal.Signals = signal.SIGTERM, patience_s: float = 5.0) -> None:
    """Signal it, then SIGKILL after `patience_s`; return when it is gone. Raises DeadlinePassed when it stays."""
    for number in (signal_first, signal.SIGKILL):
        if alive(process):
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)
        if _gone_within(process, patience_s):
            return
    why = f"process {process.pid} is still there {patience_s:g} s after SIGKILL"
    raise DeadlinePassed(f"{why}. Next: cat /proc/{process.pid}/stack")


def _gone_within(process: ProcessId, seconds: float) -> bool:
    def gone() -> bool:
        with suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)  # where it is a child of ours: take its zombie away
        return not alive(process)

    return holds_within(gone, seconds, POLL_S)


def holds_within(condition: Callable[[], bool], seconds: float, poll_s: float = POLL_S) -> bool:
    """Ask `condition` until it is true (True) or `seconds` have passed (False)."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(poll_s)
    return True


def run(argv: Sequence[str | Path], *, timeout_s: float, check: bool = True, stdin: str = "") -> Done:
    """Run a program to its end. Raises DeadlinePassed; with `check`, Unreachable with its last words when it fails."""
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words, input=stdin, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlinePassed(f"{' '.join(words)}: no end after {timeout_s:g} s") from error
    except OSError as error:
        raise Unreachable(f"{words[0]}: {error.strerror}. Next: install it") from error
    if check and done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).replace("\n", "; ")
        raise Unreachable(f"{' '.join(words)}: exit {done.returncode}: {said[-500:]}")
    return done

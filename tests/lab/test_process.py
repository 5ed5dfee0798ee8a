"""A process that a lab started is never mistaken for another, and its end is proved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from kvmpool.errors import DeadlinePassed, Unreachable
from kvmpool.lab import process

_DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def _started(*argv: str) -> tuple[subprocess.Popen[str], process.ProcessId]:
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    found = process.identify(child.pid)
    assert found
    return child, found


def test_a_recycled_pid_is_another_process() -> None:
    mine = process.identify(os.getpid())
    assert mine
    assert process.alive(mine)
    assert not process.alive(replace(mine, start=mine.start - 1))


def test_children_of_a_recycled_pid_are_not_its_children() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        me = process.identify(os.getpid())
        assert me is not None
        assert child.pid in process.children(me)
        assert process.children(process.ProcessId(me.pid, me.start - 1)) == ()
        child.kill()


def test_a_zombie_is_gone() -> None:
    child, found = _started("sleep", "0.2")  # long enough to be identified on a busy machine
    assert process.holds_within(lambda: not process.alive(found), 5.0)
    child.wait()


def test_end_of_a_recycled_pid_leaves_the_new_process_alone() -> None:
    child, found = _started("sleep", "60")
    process.end(replace(found, start=found.start - 1))
    assert child.poll() is None
    process.end(found)
    assert not process.alive(found)


def test_a_process_that_ignores_sigterm_is_killed() -> None:
    child, found = _started(sys.executable, "-c", _DEAF)
    assert child.stdout
    assert child.stdout.readline() == "up\n"
    began = time.monotonic()
    process.end(found, patience_s=0.2)
    assert not process.alive(found)
    assert 0.2 <= time.monotonic() - began < 5


def test_end_uses_the_chosen_signal_first() -> None:
    child, found = _started("sleep", "60")
    process.end(found, signal_first=signal.SIGINT)
    assert child.returncode in (None, -signal.SIGINT)
    assert not process.alive(found)


def test_run_says_why_a_program_failed() -> None:
    with pytest.raises(Unreachable, match="exit 3: no luck"):
        process.run(["sh", "-c", "echo no luck >&2; exit 3"], timeout_s=10)
    with pytest.raises(DeadlinePassed, match="no end after"):
        process.run(["sleep", "10"], timeout_s=0.1)
    with pytest.raises(Unreachable, match="Next: install it"):
        process.run(["kvmpool-no-such-program"], timeout_s=1)

"""Which process of the host lives, and that its end is told: also a zombie's, and never by another's pid."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator

import pytest

from kvmpool.core.model import Process
from kvmpool.dataplane.processes import HostProcesses
from kvmpool.errors import NotFound


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_a_living_process_is_known_by_its_start_time_too(sleeper: subprocess.Popen[bytes]) -> None:
    processes = HostProcesses()
    known = processes.identify(sleeper.pid)
    assert processes.lives(known)
    assert not processes.lives(Process(known.pid, known.started + 1))
    sleeper.kill()
    sleeper.wait()
    assert not processes.lives(known)


def test_a_zombie_has_ended(sleeper: subprocess.Popen[bytes]) -> None:
    processes = HostProcesses()
    known = processes.identify(sleeper.pid)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not processes.lives(known)


@pytest.mark.parametrize("pid", [0, -1, 1 << 30])
def test_what_is_no_process_is_not_found(pid: int) -> None:
    with pytest.raises(NotFound):
        HostProcesses().identify(pid)
    assert not HostProcesses().lives(Process(pid, 1))


def test_the_end_of_each_followed_process_is_told_once_and_of_no_other(sleeper: subprocess.Popen[bytes]) -> None:
    """Once also while it is a zombie."""
    other = subprocess.Popen(["sleep", "60"])

    async def story() -> None:
        processes = HostProcesses()
        ends: list[str] = []
        mine, theirs = processes.identify(sleeper.pid), processes.identify(other.pid)
        processes.follow([mine, theirs], lambda: ends.append("both"))
        processes.follow([mine], lambda: ends.append("mine"))
        other.kill()
        other.wait()
        await asyncio.sleep(0.05)
        assert ends == []
        sleeper.kill()
        await asyncio.sleep(0.2)
        assert ends == ["mine"]
        processes.follow([mine], lambda: ends.append("again"))
        await asyncio.sleep(0.05)
        assert ends == ["mine"]
        processes.close()

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(story())
    assert len(os.listdir("/proc/self/fd")) == before

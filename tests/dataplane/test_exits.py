"""However a guest's process ends, and whatever it was at: its session is gone, its memory free, and that is all."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.dataplane.plane import NATIVE, SOURCES, WARNINGS, resident_kib, status, wait_until
from tests.dataplane.remote import Remote, remote

pytestmark = [pytest.mark.native, pytest.mark.alone]

STATES = ("idle", "batch", "synchronise", "copy", "queue", "stuck")
WAYS = ("return", "thread", "at_once", "handler", "abort", "dlclose", "exec", "spawn", "daemon", "kill")
FREED_S = 1.0  # the promise: from the process's end to free memory
GROWTH_KIB = 512  # of relay and worker, over all of these


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    with remote(tmp_path_factory.mktemp("exits")) as running:
        yield running


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("program") / "exits"
    command = ["gcc", *WARNINGS, "-Wno-missing-prototypes", "-O1", str(NATIVE / "exits.c"), f"-I{SOURCES}"]
    subprocess.run([*command, "-o", str(made), "-lpthread", "-ldl"], check=True)
    return made


@dataclass(frozen=True)
class Standing:
    """What relay and worker hold, which no guest's end may change."""

    descriptors: tuple[int, ...]
    children: tuple[str, ...]


def standing(place: Remote) -> Standing:
    pids = [process.pid for process in place.plane.processes]
    descriptors = tuple(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
    return Standing(descriptors, tuple(Path(f"/proc/{pid}/task/{pid}/children").read_text() for pid in pids))


@pytest.fixture(scope="module")
def at_rest(place: Remote) -> Standing:
    """Before any guest; a question just asked may still have its descriptor, and who opened the card may be going."""
    wait_until(lambda: not any(standing(place).children), 20.0, "nobody works for the worker")
    seen = []
    for _ in range(20):
        seen.append(standing(place))
        time.sleep(0.01)
    return min(seen, key=lambda each: each.descriptors)


def resident(place: Remote) -> list[int]:
    return [resident_kib(process.pid) for process in place.plane.processes]


def begun(place: Remote, program: Path, state: str, way: str) -> subprocess.Popen[str]:
    """The process, in its state; in a group of its own, so that what it leaves behind can be ended."""
    guest = subprocess.Popen(
        [program, state, way],
        env=place.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert guest.stdout is not None
    assert guest.stdout.readline() == "ready\n"
    return guest


def ended(guest: subprocess.Popen[str], way: str) -> None:
    """Let it end its way; returns when that has happened (after exec the process is another program)."""
    assert guest.stdin is not None
    guest.stdin.write("\n")
    guest.stdin.flush()
    if way == "exec":
        wait_until(lambda: os.readlink(f"/proc/{guest.pid}/exe").endswith("sleep"), 20.0, "it is another program")
        return
    if way == "kill":
        guest.kill()
    assert guest.wait(20) == {"abort": -signal.SIGABRT, "kill": -signal.SIGKILL}.get(way, 0)


def _swept(guest: subprocess.Popen[str], program: Path) -> None:
    """End it and whatever it left, a daemon in a session of its own too."""
    with suppress(ProcessLookupError):
        os.killpg(guest.pid, signal.SIGKILL)
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(folder / "exe") == str(program):
                os.kill(int(folder.name), signal.SIGKILL)
    guest.communicate(timeout=10)  # its output ends with the last of them


CASES = [(state, way) for state in STATES for way in WAYS if (state, way) != ("stuck", "handler")]
"""All but the one in which the program itself waits for the card, in its handler."""


@pytest.mark.parametrize(("state", "way"), CASES)
def test_its_session_is_gone_and_its_memory_free(
    place: Remote, at_rest: Standing, program: Path, state: str, way: str
) -> None:
    worker = place.plane.worker_socket()
    wait_until(lambda: status(worker)["sessions"] == 0, 5.0, "the one before is gone")
    size = resident(place)
    guest = begun(place, program, state, way)
    try:
        assert status(worker)["memory_used"] >= 64 << 20
        ended(guest, way)
        took = wait_until(lambda: _free(place), FREED_S, "the session is gone and its memory free")
        print(f"{state}, {way}: free {took * 1000:.0f} ms after the end")
        wait_until(lambda: standing(place) == at_rest, FREED_S, f"{standing(place)} was {at_rest}")
    finally:
        _swept(guest, program)
    assert max(now - then for now, then in zip(resident(place), size, strict=True)) <= GROWTH_KIB


def _free(place: Remote) -> bool:
    seen = status(place.plane.worker_socket())
    return (seen["sessions"], seen["memory_used"]) == (0, 0)

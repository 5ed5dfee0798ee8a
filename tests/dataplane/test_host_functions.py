"""Functions of a program that a stream runs in its turn, and copies between contexts: as on the card's own driver."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dataplane.plane import status
from tests.dataplane.remote import Remote, remote
from tests.dataplane.shim import NATIVE, SOURCES
from tests.dataplane.waiting import wait_until
from tests.softgpu.driver import KERNELS
from tests.softgpu.nvrtc import ptx

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    with remote(tmp_path_factory.mktemp("functions")) as running:
        yield running


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("cases")
    flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}"]
    command = ["gcc", *flags, NATIVE / "host_cases.c", "-o", folder / "host_cases", "-ldl", "-lpthread"]
    subprocess.run([str(word) for word in command], check=True, timeout=120)
    (folder / "kernels.ptx").write_text(ptx(KERNELS, "compute_75"))
    return [folder / "host_cases", folder / "kernels.ptx"]


@pytest.mark.parametrize("way", ["1", "0"], ids=["shm", "socket"])
@pytest.mark.parametrize("case", ["order", "meanwhile", "many", "fault", "peer"])
def test_same_results(place: Remote, program: list[Path], case: str, way: str) -> None:
    direct, guest = place.direct([*program, case]), place.guest([*program, case], KVMPOOL_SHM=way)
    assert (direct.code, direct.errors) == (0, ""), direct
    assert len(direct.lines) > 1
    assert guest.lines == direct.lines, guest
    assert guest.code == 0


def test_each_call_waited_for_makes_no_difference(place: Remote, program: list[Path]) -> None:
    with_sync, without = (place.guest([*program, "order"], KVMPOOL_SYNC=sync) for sync in ("1", "0"))
    assert with_sync.lines == without.lines
    assert with_sync.code == 0


def test_a_process_killed_in_its_function_leaves_nothing(place: Remote, program: list[Path]) -> None:
    process = subprocess.Popen([*program, "meanwhile"], env=place.environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held=600\n"
    process.send_signal(signal.SIGSTOP)
    process.kill()
    process.communicate()
    wait_until(lambda: status(place.plane.worker_socket())["sessions"] == 0, 10.0, "its session is gone")
    assert status(place.plane.worker_socket())["memory_used"] == 0

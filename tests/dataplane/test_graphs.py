"""Stream capture and graphs: one program on the card's driver and as a guest, with the same answers and results."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dataplane.remote import Remote, remote
from tests.dataplane.shim import NATIVE, SOURCES
from tests.softgpu.nvrtc import ptx

pytestmark = pytest.mark.native

KERNELS = """
extern "C" __global__ void mix(int *p, int n, int rounds)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned x = p[i];
    for (int r = 0; r < rounds; r++) x = x * 1664525u + 1013904223u + i;
    p[i] = x;
}
extern "C" __global__ void twice(int *p, int n, int rounds)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] = p[i] * 2 + rounds;
}
extern "C" __global__ void wild(int *p) { p[threadIdx.x * 1000000000ll] = 1; }
"""
CASES = ("capture", "beside", "forbidden", "joints", "explicit", "change", "fault")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    with remote(tmp_path_factory.mktemp("graphs")) as running:
        yield running


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The compiled cases and the kernels they load."""
    folder = tmp_path_factory.mktemp("cases")
    cases, kernels = folder / "graph_cases", folder / "kernels.ptx"
    flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}"]
    command = ["gcc", *flags, NATIVE / "graph_cases.c", "-o", cases, "-ldl", "-lpthread"]
    subprocess.run([str(word) for word in command], check=True, timeout=120)
    kernels.write_text(ptx(KERNELS, "compute_75"))
    return [cases, kernels]


def same(place: Remote, program: list[Path], case: str, way: str) -> list[str]:
    direct, guest = place.direct([*program, case]), place.guest([*program, case], KVMPOOL_SHM=way)
    assert (direct.code, direct.errors) == (0, ""), direct
    assert not [line for line in direct.lines if line.startswith(("failed", "missing"))], direct
    assert guest.lines == direct.lines, guest
    assert guest.code == 0
    return direct.lines


@pytest.mark.parametrize("way", ["1", "0"], ids=["shm", "socket"])
@pytest.mark.parametrize("case", CASES)
def test_graphs_answer_and_compute_the_same(place: Remote, program: list[Path], case: str, way: str) -> None:
    assert len(same(place, program, case, way)) > 4


def test_page_locked_memory_is_read_and_written_at_each_launch(place: Remote, program: list[Path]) -> None:
    lines = [line for line in same(place, program, "host", "1") if line.startswith("back=")]
    assert len(set(lines)) == 3, "each launch has its own bytes"


def test_over_a_socket_a_copy_of_host_memory_is_not_captured_and_said_so(place: Remote, program: list[Path]) -> None:
    done = place.guest([*program, "host"], KVMPOOL_SHM="0")
    assert done.lines[0].startswith("failed=cuMemcpyHtoDAsync_v2")
    assert done.lines[0].endswith(": 900")


WORDS = {
    "synchronise": 900, "query": 900, "context": 900, "alloc": 900, "alloc_in_order": 900, "free": 900,
    "event": 900, "captured_event": 907,
    "outside": 905, "legacy_launch": 906, "legacy_copy": 906, "legacy_record": 906, "legacy_status": 906,
    "legacy_beside": 0, "begin_legacy": 900, "begin_again": 401, "not_begun": 401, "end": 901, "launch_then": 901,
    "no_graph": 1, "status": 2, "status_after": 0, "runs_again": 0,
}  # fmt: skip


def test_what_a_capture_forbids_has_cudas_codes(place: Remote, program: list[Path]) -> None:
    said = [line.split("=") for line in same(place, program, "forbidden", "1")]
    for name, code in WORDS.items():
        assert {int(value) for word, value in said if word == name} == {code}, name


def test_forks_that_do_not_come_back_have_cudas_codes(place: Remote, program: list[Path]) -> None:
    said = dict(line.split("=") for line in same(place, program, "joints", "1"))
    assert (said["unjoined"], said["merge"], said["elsewhere"]) == ("904", "902", "0")
    assert place.direct([*program, "joints"]).lines.count("elsewhere=908") == 1


def test_a_loop_of_graph_launches_costs_one_round_trip(place: Remote, program: list[Path]) -> None:
    few, many = (place.guest([*program, "loop"], LAUNCHES=launches) for launches in ("1", "1001"))
    assert few.code == many.code == 0, many
    assert many.stats["round_trips"] == few.stats["round_trips"], "1,000 launches more, and one wait either way"
    assert many.stats["frames"] - few.stats["frames"] == 1000
    assert many.lines == place.direct([*program, "loop"], LAUNCHES="1001").lines

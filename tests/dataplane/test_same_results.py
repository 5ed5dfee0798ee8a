"""The same program on the card's driver and through shim, relay and worker: the same results, bit for bit."""

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
extern "C" __device__ int scale = 3;
extern "C" __global__ void mix(int *p, int n, int rounds)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned x = p[i];
    for (int r = 0; r < rounds; r++) x = x * 1664525u + 1013904223u + i;
    p[i] = x;
}
extern "C" __global__ void shared_sum(int *p)
{
    __shared__ int tile[256];
    tile[threadIdx.x] = p[threadIdx.x] * scale;
    __syncthreads();
    int sum = 0;
    for (int i = 0; i < blockDim.x; i++) sum += tile[i];
    p[threadIdx.x] = sum;
}
extern "C" __global__ void wild(int *p) { p[threadIdx.x * 1000000000ll] = 1; }
extern "C" __global__ void trap() { asm volatile("trap;"); }
extern "C" __global__ void meet(unsigned *p)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        atomicAdd(&p[0], 1);
        atomicAdd(&p[1 + blockIdx.x % 3], blockIdx.x + 1);
    }
}
"""
CALLEE = """
extern "C" __device__ int offset = 3;
extern "C" __device__ int callee(int x) { return x * 7 + offset; }
"""
CALLER = """
extern "C" __device__ int callee(int x);
extern "C" __global__ void call_it(int *p, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] = callee(p[i] + i);
}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    with remote(tmp_path_factory.mktemp("same")) as running:
        yield running


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The compiled cases and the files they read."""
    folder = tmp_path_factory.mktemp("cases")
    cases = folder / "api_cases"
    sources = {"kernels": KERNELS, "callee": CALLEE, "caller": CALLER}
    texts = [folder / f"{name}.ptx" for name in sources]
    flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}"]
    command = ["gcc", *flags, NATIVE / "api_cases.c", "-o", cases, "-ldl", "-lpthread"]
    subprocess.run([str(word) for word in command], check=True, timeout=120)
    for path, source in zip(texts, sources.values(), strict=True):
        path.write_text(ptx(source, "compute_75", "--relocatable-device-code=true"))
    return [cases, *texts]


CASES = ("boxes2d", "boxes3d", "memsets", "streams", "occupancy", "linking", "libraries", "cooperative",
         "context_stack", "overtaking", "fatbin")  # fmt: skip
ERRORS = ("faults", "refused")


@pytest.mark.parametrize("way", ["1", "0"], ids=["shm", "socket"])
@pytest.mark.parametrize("case", CASES + ERRORS)
def test_same_results(place: Remote, program: list[Path], case: str, way: str) -> None:
    direct, guest = place.direct([*program, case]), place.guest([*program, case], KVMPOOL_SHM=way)
    assert (direct.code, direct.errors) == (0, ""), direct
    assert len(direct.lines) > 1
    assert guest.lines == direct.lines, guest
    assert guest.code == 0


def test_with_kvmpool_sync_a_fault_is_of_the_launch_that_made_it(place: Remote, program: list[Path]) -> None:
    told = place.guest([*program, "faults"], KVMPOOL_SYNC="1").lines
    assert told[0] == "launch=700"
    assert "trap=719" in told
    later = [line for line in place.guest([*program, "faults"]).lines if line.startswith(("launch=", "trap="))]
    assert later == ["launch=0", "trap=0"]


def test_a_training_step_costs_one_round_trip(place: Remote, program: list[Path]) -> None:
    cold, warm = (place.guest([*program, "step"], STEPS=steps) for steps in ("0", "1"))
    assert cold.code == warm.code == 0, warm
    calls = int(warm.lines[0].split("=")[1])
    sent = warm.stats["frames"] - cold.stats["frames"]
    assert 4900 <= calls <= 5300, "in the proportions that were measured on real stacks"
    assert 0.93 <= 1 - sent / calls <= 0.97
    assert warm.stats["round_trips"] - cold.stats["round_trips"] == 1


def test_of_a_fatbin_only_what_the_card_can_use_is_sent(place: Remote, program: list[Path]) -> None:
    done = place.guest([*program, "fatbin"], KVMPOOL_SHM="0")
    whole = int(done.lines[0].split("=")[1])
    assert whole > 2_000_000
    assert done.stats["bytes_out"] < whole + 100_000, "loaded three times: two in part, the damaged one whole"

"""The same program on the card's driver and through shim, relay and worker: the same results, bit for bit."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmpool.lab import images
from tests.dataplane.plane import VIRTUAL_UUID
from tests.dataplane.remote import MEMORY_MIB, Done, Remote, remote
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
         "context_stack", "destroy_waits", "variables", "overtaking", "fatbin")  # fmt: skip
ERRORS = ("faults", "refused", "two_contexts")


@pytest.mark.parametrize("way", ["1", "0"], ids=["shm", "socket"])
@pytest.mark.parametrize("case", CASES + ERRORS)
def test_same_results(place: Remote, program: list[Path], case: str, way: str) -> None:
    direct, guest = place.direct([*program, case]), place.guest([*program, case], KVMPOOL_SHM=way)
    assert (direct.code, direct.errors) == (0, ""), direct
    assert len(direct.lines) > 1
    assert guest.lines == direct.lines, guest
    assert guest.code == 0


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guest's own programs, as the lab has them."""
    folder = tmp_path_factory.mktemp("samples")
    for path in images.programs():
        shutil.copy2(path, folder)
    return folder


OWN = ("uuid: ", "pci: ", "memory ")  # of the claim, not of the card
TIMES = ("kernel time: ",)


@pytest.mark.parametrize("way", ["1", "0"], ids=["shm", "socket"])
@pytest.mark.parametrize("name", ["deviceQuery", "vectorAdd", "matrixMul"])
def test_same_results_of_the_samples(place: Remote, samples: Path, name: str, way: str) -> None:
    direct, guest = place.direct([samples / name]), place.guest([samples / name], KVMPOOL_SHM=way)
    assert (direct.code, direct.errors, guest.code, guest.errors) == (0, "", 0, "")
    assert f"{name}: PASS" in direct.out
    same = [[line for line in done.lines if not line.startswith(OWN + TIMES)] for done in (direct, guest)]
    assert same[0] == same[1]
    if name == "deviceQuery":
        told = dict(line.split(": ", 1) for line in guest.lines)
        assert told["uuid"] == f"GPU-{VIRTUAL_UUID}"
        assert (told["pci"], told["memory MiB"]) == ("0000:c0:00.0", str(MEMORY_MIB))


def test_with_kvmpool_sync_a_fault_is_of_the_launch_that_made_it(place: Remote, program: list[Path]) -> None:
    told = place.guest([*program, "faults"], KVMPOOL_SYNC="1").lines
    assert told[0] == "launch=700"
    assert "trap=719" in told
    later = [line for line in place.guest([*program, "faults"]).lines if line.startswith(("launch=", "trap="))]
    assert later == ["launch=0", "trap=0"]


def test_a_training_step_costs_one_round_trip(place: Remote, program: list[Path]) -> None:
    place.guest([*program, "step"], STEPS="0")  # from here on the worker has the image
    cold, warm = (place.guest([*program, "step"], STEPS=steps) for steps in ("0", "1"))
    assert cold.code == warm.code == 0, warm
    calls = int(warm.lines[0].split("=")[1])
    sent = warm.stats["frames"] - cold.stats["frames"]
    assert 4900 <= calls <= 5300, "in the proportions that were measured on real stacks"
    assert 0.93 <= 1 - sent / calls <= 0.97
    assert warm.stats["round_trips"] - cold.stats["round_trips"] == 1


def test_an_allocation_costs_one_round_trip_at_most(place: Remote, program: list[Path]) -> None:
    """Of each kind: its address and what was free are the shim's, but whether the claim has room the worker's."""
    none, many = (place.guest([*program, "allocations"], ALLOCATIONS=n) for n in ("0", "100"))
    assert none.code == many.code == 0, many
    made = int(many.lines[0].split("=")[1])
    assert made == 300
    assert 0 < many.stats["round_trips"] - none.stats["round_trips"] <= made


def test_of_a_fatbin_only_what_the_card_can_use_is_sent(place: Remote, program: list[Path]) -> None:
    done = place.guest([*program, "fatbin"], KVMPOOL_SHM="0")
    whole = int(done.lines[0].split("=")[1])
    assert whole > 2_000_000
    assert done.stats["bytes_out"] < whole + 100_000, "loaded three times: two in part, the damaged one whole"


def test_an_image_is_sent_once_for_all_processes_of_a_claim(place: Remote, program: list[Path]) -> None:
    def load(image: str, loads: int) -> Done:
        done = place.guest([*program, "load"], IMAGE=image, LOADS=str(loads), KVMPOOL_SHM="0")
        assert done.code == 0, done
        return done

    first, again, other = load("first", 3), load("first", 3), load("other", 1)
    assert 1 << 20 < first.stats["bytes_out"] < 2 << 20, "the second and third load of the process send none"
    assert again.stats["bytes_out"] < 1 << 16, "nor does another process"
    assert again.lines == first.lines
    assert other.stats["bytes_out"] > 1 << 20, "another image is another image"

"""Every way to have memory counts: until OUT_OF_MEMORY, in that session only. No way is there that nobody counts."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvmpool.dataplane.calltable import load
from tests.dataplane.plane import status
from tests.dataplane.remote import Remote, remote
from tests.dataplane.shim import DATAPLANE, NATIVE, SOURCES
from tests.dataplane.waiting import wait_until
from tests.softgpu.nvrtc import ptx

pytestmark = pytest.mark.native

OUT_OF_MEMORY = 2
MIB = 1 << 20
MEMORY_MIB, PINNED_MIB = 64, 48
CONTEXT_MIB = 9  # of softgpu: its printf buffer and its malloc heap
LEFT_MIB = MEMORY_MIB - CONTEXT_MIB
VARIABLES = """
extern "C" __device__ char big[16 * 1024 * 1024];
extern "C" __global__ void touch() { big[threadIdx.x] = 1; }
"""

# What a path grants before it refuses: pieces of the claim, of the limit of page-locked memory, or a bounded count.
GRANTED = {
    "alloc": LEFT_MIB // 4,
    "pitch": LEFT_MIB // 4,
    "alloc_async": LEFT_MIB // 4,
    "from_pool": LEFT_MIB // 4,
    "beside_pool": LEFT_MIB // 4,
    "physical": LEFT_MIB // 4,
    "module": LEFT_MIB // 16,
    "library": LEFT_MIB // 16,
    "library_global": LEFT_MIB // 16,
    "library_module": LEFT_MIB // 16,
    "library_function": LEFT_MIB // 16,
    "library_launch": LEFT_MIB // 16,
    "printf_limit": (LEFT_MIB + 1) // 4,
    "heap_limit": LEFT_MIB // 4,
    "context": LEFT_MIB // CONTEXT_MIB,
    "host_alloc": PINNED_MIB // 4,
    "alloc_host": PINNED_MIB // 4,
    "host_register": PINNED_MIB // 4,
    "stream": 4096,
    "event": 65536,
}
ABOUT = ("stack_limit",)  # as many as the card's threads leave room for

# Names that give memory, by what they are called, and the path above that shows what they give is counted.
GIVES = re.compile(
    r"Alloc|Create|Load|Register|Import|Reserve|SetLimit|Retain|MemMap|Record|PoolSet|Pool.*Trim|Managed"
)
SHOWN = {
    "cuMemAlloc_v2": "alloc",
    "cuMemAllocPitch_v2": "pitch",
    "cuMemAllocAsync": "alloc_async",
    "cuMemAllocFromPoolAsync": "from_pool",
    "cuMemCreate": "physical",
    "cuModuleLoad": "module",
    "cuModuleLoadData": "module",
    "cuModuleLoadDataEx": "module",
    "cuModuleLoadFatBinary": "module",
    "cuLibraryLoadData": "library",
    "cuLibraryLoadFromFile": "library",
    "cuLibraryGetGlobal": "library_global",
    "cuLibraryGetModule": "library_module",
    "cuKernelGetFunction": "library_function",
    "cuLaunchKernel": "library_launch",
    "cuCtxSetLimit": "heap_limit",
    "cuCtxCreate_v2": "context",
    "cuCtxCreate_v3": "context",
    "cuCtxCreate_v4": "context",
    "cuDevicePrimaryCtxRetain": "context",
    "cuMemHostAlloc": "host_alloc",
    "cuMemAllocHost": "alloc_host",
    "cuMemAllocHost_v2": "alloc_host",
    "cuMemHostRegister_v2": "host_register",
    "cuStreamCreate": "stream",
    "cuStreamCreateWithPriority": "stream",
    "cuEventCreate": "event",
}
GIVES_NOTHING = {
    "cuFuncIsLoaded": "says a word",
    "cuFuncLoad": "the function's module is in the context",
    "cuModuleGetLoadingMode": "says a word",
    "cuEventRecord": "an event is there",
    "cuEventRecordWithFlags": "an event is there",
    "cuLibraryGetManaged": "there is no managed memory",
    "cuLinkCreate_v2": "the session's host memory, which its control group bounds; at most 16384",
    "cuMemAddressReserve": "addresses only; memory is mapped there by cuMemMap",
    "cuMemMap": "maps what cuMemCreate was charged for",
    "cuMemHostUnregister": "gives back",
    "cuMemPoolCreate": "memory comes with what is allocated from it",
    "cuMemPoolTrimTo": "gives back",
    "cuMemPoolSetAccess": "the only card has it",
    "cuMemPoolSetAttribute": "what a pool keeps is charged",
    "cuMemRetainAllocationHandle": "a handle to what was charged",
    "cuMemGetAllocationGranularity": "says a number",
    "cuMemGetAllocationPropertiesFromHandle": "says what it is",
}
REFUSED = (
    "cuArrayCreate_v2", "cuArray3DCreate_v2", "cuMipmappedArrayCreate", "cuMemAllocManaged", "cuImportExternalMemory",
    "cuMemImportFromShareableHandle", "cuIpcOpenMemHandle_v2", "cuMulticastCreate", "cuGreenCtxCreate",
    "cuTexObjectCreate", "cuSurfObjectCreate", "cuMemPoolImportPointer", "cuMemHostGetDevicePointer_v2",
)  # fmt: skip


@contextmanager
def two_claims(folder: Path) -> Iterator[Remote]:
    """A card with the claim under test, gpu0, and a neighbour's, gpu1, each with its own worker."""
    with remote(folder, MEMORY_MIB, PINNED_MIB, claims=("gpu0", "gpu1")) as running:
        yield running


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    with two_claims(tmp_path_factory.mktemp("paths")) as running:
        yield running


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The compiled cases, and a module with a variable of 16 MiB."""
    folder = tmp_path_factory.mktemp("cases")
    flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}"]
    command = ["gcc", *flags, NATIVE / "alloc_cases.c", "-o", folder / "alloc_cases", "-ldl", "-lpthread"]
    subprocess.run([str(word) for word in command], check=True, timeout=120)
    (folder / "variables.ptx").write_text(ptx(VARIABLES, "compute_75"))
    return folder / "alloc_cases", folder / "variables.ptx"


def nobody_is_there(place: Remote) -> bool:
    return all(status(place.plane.worker_socket(claim=claim))["sessions"] == 0 for claim in ("gpu0", "gpu1"))


class Told:
    """A case that runs beside the test: it says numbers, and goes on when told to. Ends with its block."""

    def __enter__(self) -> Told:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()

    def __init__(self, place: Remote, program: tuple[Path, Path], case: str, **more: str) -> None:
        self.process = subprocess.Popen(
            [program[0], program[1], case], env={**place.environment(), **more},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def number(self, name: str) -> int:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line.startswith(f"{name}="), line
        return int(line.partition("=")[2])

    def rest(self) -> list[str]:
        """Tells it to go on, and waits for its end."""
        out, _ = self.process.communicate("\n", timeout=60)
        assert self.process.returncode == 0, out
        return out.splitlines()


@pytest.mark.parametrize("way", ["1", "0"], ids=["shm", "socket"])
@pytest.mark.parametrize("path", [*GRANTED, *ABOUT])
def test_a_path_is_refused_beyond_its_limit_and_nobody_else_notices(
    place: Remote, program: tuple[Path, Path], path: str, way: str
) -> None:
    wait_until(lambda: nobody_is_there(place), 10.0, "what others held is free")
    with (
        Told(place, program, "neighbour", KVMPOOL_CLAIM="gpu1") as neighbour,
        Told(place, program, path, KVMPOOL_CLAIM="gpu0", KVMPOOL_SHM=way) as hog,
    ):
        assert neighbour.number("ready") == 1
        assert hog.number("refused") == OUT_OF_MEMORY
        granted = hog.number("granted")
        assert granted == GRANTED.get(path, granted)
        assert granted > 0
        seen = status(place.plane.worker_socket(claim="gpu0"))
        assert seen["memory_used"] <= MEMORY_MIB * MIB or path.startswith("library_"), seen
        assert seen["pinned_used"] <= PINNED_MIB * MIB
        assert neighbour.rest() == ["more=0", "pinned=0", "same=1"]
        assert hog.rest() == [f"refused={OUT_OF_MEMORY}", f"granted={granted}", "synchronise=0"], "all was given back"


def test_the_worker_tells_page_locked_memory_apart(place: Remote, program: tuple[Path, Path]) -> None:
    wait_until(lambda: nobody_is_there(place), 10.0, "what others held is free")
    with Told(place, program, "host_alloc") as hog:
        assert (hog.number("refused"), hog.number("granted")) == (OUT_OF_MEMORY, PINNED_MIB // 4)
        seen = status(place.plane.worker_socket(claim="gpu0"))
    assert (seen["pinned_limit"], seen["pinned_used"]) == (PINNED_MIB * MIB, PINNED_MIB * MIB)
    assert seen["memory_used"] == CONTEXT_MIB * MIB


def test_no_name_that_gives_memory_is_without_a_path_that_shows_it_counted() -> None:
    table = load(DATAPLANE / "calls.toml")
    giving = {call.name for call in table.calls if GIVES.search(call.name) and "Graph" not in call.name}
    assert giving - set(SHOWN) - set(GIVES_NOTHING) == set(), "count it, and show it here"
    assert (set(SHOWN) | set(GIVES_NOTHING)) <= {call.name for call in table.calls}
    assert set(SHOWN.values()) <= set(GRANTED)
    assert set(REFUSED) <= set(table.unsupported), "supported now: count it, and show it here"

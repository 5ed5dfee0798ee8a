"""What a kernel does wrong ends that launch, with the number and XID a card would give, and nothing else."""

# ruff: noqa: E501  (CUDA C and its answers, as they are)

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from tests.softgpu.engine import Buffer, Ctl, Engine, Module
from tests.softgpu.nvrtc import ptx

SOURCE = r"""
extern "C" __global__ void poke(int *p) { p[threadIdx.x] = 1; }
extern "C" __global__ void good(int *p) { p[threadIdx.x] = threadIdx.x + 7; }
extern "C" __global__ void trap_(int n) { if (threadIdx.x == n) asm("trap;"); }
extern "C" __global__ void assert_(int n) { assert(threadIdx.x != n); }
extern "C" __global__ void shared_(int *o, int n) { __shared__ int s[4]; s[threadIdx.x & 3] = 1; __syncthreads(); o[0] = s[n]; }
extern "C" __global__ void forever(volatile int *p) { while (*p == 0); }
extern "C" __global__ void endless(volatile int *p) { for (;;) *p = 1; }
extern "C" __global__ void stuck(int *p) { if (threadIdx.x < 16) asm volatile("bar.sync 1, 32;"); else asm volatile("bar.sync 2, 32;"); *p = 1; }
__device__ __noinline__ int deep(int n, int *p) { volatile int a[64]; a[n & 63] = n; return n == 0 ? 0 : deep(n - 1, p) + a[n & 63] + *p; }
extern "C" __global__ void recurse(int *p, int n) { __syncthreads(); p[1] = deep(n, p); }
extern "C" __global__ void divide(int *p) { p[0] = p[1] / p[2]; p[3] = p[1] % p[2]; }
extern "C" __global__ void lock(int *l, int *sum) {
  for (bool done = false; !done;) if (atomicCAS(l, 0, 1) == 0) { *sum = *sum + 1; __threadfence(); atomicExch(l, 0); done = true; } }
extern "C" __global__ void leave(int *p) { if (threadIdx.x & 1) return; __syncthreads(); atomicAdd(p, 1); __syncthreads(); }
extern "C" __global__ void heap(long long *o) { int *p = (int *)malloc(64); p[3] = 5; o[threadIdx.x] = p[3] + (p != 0); free(p); }
extern "C" __global__ void exhaust(long long *o) { o[0] = malloc(1ull << 40) == 0; }
extern "C" __global__ void say(double x, const char *s) { printf("%d|%5.2f|%s|%-4u|%c|%lld|%%|%x\n", -3, x, "text", 7u, 'z', 1ll << 40, 255); }
extern "C" __global__ void __launch_bounds__(64) small(int *p) { p[threadIdx.x] = 1; }
extern "C" __global__ void grid_barrier(int *arrived, int *o) {
  int n = gridDim.x; if (threadIdx.x == 0) { atomicAdd(arrived, 1); while (*(volatile int *)arrived < n); } __syncthreads();
  o[blockIdx.x * blockDim.x + threadIdx.x] = *(volatile int *)arrived; }
"""


@pytest.fixture(scope="module", params=["compute_75", "compute_100"])
def module(engine: Engine, request: pytest.FixtureRequest) -> Module:
    return engine.load(ptx(SOURCE, request.param))


def _still_works(module: Module) -> None:
    out = Buffer("i", 4)
    assert module.launch("good", [1], [4], [out]).result == 0
    assert out.read() == [7, 8, 9, 10]


@pytest.mark.parametrize("address", [0, 8, 1 << 46, 0xDEAD << 48])
def test_a_wild_address_is_700_and_xid_31(module: Module, address: int) -> None:
    done = module.launch("poke", [1], [4], [("Q", address)])
    assert (done.result, done.xid) == (700, 31)
    assert "poke: illegal memory access" in done.message
    _still_works(module)


def test_a_trap_is_719(module: Module) -> None:
    done = module.launch("trap_", [2], [64], [("i", 63)])
    assert (done.result, done.xid) == (719, 13)
    assert module.launch("trap_", [2], [64], [("i", 64)]).result == 0


def test_an_assert_is_710_and_says_where(module: Module, capfd: pytest.CaptureFixture[str]) -> None:
    done = module.launch("assert_", [2], [64], [("i", 5)])
    assert (done.result, done.xid) == (710, 43)
    line = "kernel.cu:5: void assert_(int): block: [0,0,0], thread: [5,0,0] Assertion `threadIdx.x != n` failed."
    assert line in capfd.readouterr().err
    _still_works(module)


@pytest.mark.parametrize("index", [1 << 20, -1, 1 << 28])
def test_shared_memory_has_an_end(module: Module, index: int) -> None:
    done = module.launch("shared_", [1], [32], [Buffer("i", 1), ("i", index)])
    assert (done.result, done.xid) == (700, 13)
    _still_works(module)


@pytest.mark.parametrize("kernel", ["forever", "endless"])
def test_a_hung_kernel_ends_when_it_is_told_to(module: Module, kernel: str) -> None:
    ctl = Ctl()

    def stop() -> None:
        while not ctl.started_ns:
            time.sleep(0.001)
        time.sleep(0.02)
        ctl.stop = 702

    watchdog = threading.Thread(target=stop)
    watchdog.start()
    began = time.monotonic()
    done = module.launch(kernel, [2], [64], [Buffer("i", 1)], ctl=ctl)
    watchdog.join()
    assert done.result == 702
    assert time.monotonic() - began < 1
    assert 15 < done.busy_ms < 1000
    _still_works(module)


def test_threads_that_wait_for_each_other_for_ever_are_702_at_once(module: Module) -> None:
    done = module.launch("stuck", [1], [32], [Buffer("i", 1)])
    assert (done.result, done.xid) == (702, 43)
    assert "wait for each other" in done.message


def test_recursion_works_until_the_stack_ends(module: Module) -> None:
    out = Buffer("i", 2)
    assert module.launch("recurse", [1], [64], [out, ("i", 50)]).result == 0
    assert out.read()[1] == sum(range(51))
    done = module.launch("recurse", [1], [64], [out, ("i", 1 << 20)])
    assert done.result == 700
    assert "stack overflow" in done.message
    _still_works(module)


def test_division_by_zero_is_a_value(module: Module) -> None:
    out = Buffer("i", [0, 5, 0, 0])
    assert module.launch("divide", [1], [1], [out]).result == 0
    assert out.read() == [-1, 5, 0, 5]


def test_a_spin_lock_between_threads_of_a_block_makes_progress(module: Module) -> None:
    total = Buffer("i", 1)
    assert module.launch("lock", [3], [64], [Buffer("i", 1), total]).result == 0
    assert total.read() == [192]


def test_threads_that_have_ended_do_not_hold_up_a_barrier(module: Module) -> None:
    out = Buffer("i", 1)
    assert module.launch("leave", [2], [100], [out]).result == 0
    assert out.read() == [100]


def test_blocks_of_a_cooperative_launch_can_wait_for_each_other(module: Module) -> None:
    ctl = Ctl()
    ctl.cooperative = 1
    out = Buffer("i", 8 * 32)
    assert module.launch("grid_barrier", [8], [32], [Buffer("i", 1), out], ctl=ctl).result == 0
    assert out.read() == [8] * 256


def test_the_device_heap(module: Module) -> None:
    out = Buffer("q", 32)
    assert module.launch("heap", [1], [32], [out]).result == 0
    assert out.read() == [6] * 32
    assert module.launch("exhaust", [1], [1], [out]).result == 0
    assert out.read()[0] == 1


def test_printf(module: Module) -> None:
    done = module.launch("say", [1], [2], [("d", 3.14159), ("Q", 0)])
    assert done.printed == "-3| 3.14|text|7   |z|1099511627776|%|ff\n" * 2


@pytest.mark.parametrize(
    ("grid", "block", "shared", "error"),
    [
        ([0], [1], 0, 1),
        ([1], [0], 0, 1),
        ([1], [1025], 0, 1),
        ([1], [32, 32, 2], 0, 1),
        ([1, 65536], [1], 0, 1),
        ([1], [1], 1 << 20, 1),
        ([1], [65], 0, 701),
        ([1], [64], 0, 0),
    ],
)
def test_a_launch_out_of_bounds_is_refused(
    module: Module, grid: list[int], block: list[int], shared: int, error: int
) -> None:
    assert module.launch("small", grid, block, [Buffer("i", 64)], shared=shared).result == error


def test_a_short_parameter_buffer_is_refused(module: Module) -> None:
    assert module.launch("recurse", [1], [1], [Buffer("i", 1)]).result == 1


def test_attributes(module: Module) -> None:
    shared, small = module.attributes("shared_"), module.attributes("small")
    assert (shared.shared, shared.uses_barriers, shared.param_count, shared.param_bytes) == (16, 1, 2, 12)
    assert (small.shared, small.uses_barriers, small.max_threads, small.param_bytes) == (0, 0, 64, 8)
    assert small.ptx_version in (75, 100)
    assert small.binary_version == 90


def test_two_threads_launch_at_once(module: Module) -> None:
    """One of them faults again and again; the other's sums stay right."""
    results: list[int] = []

    def faulty() -> None:
        results.extend(module.launch("poke", [1], [4], [("Q", 64)]).result for _ in range(200))

    thread = threading.Thread(target=faulty)
    thread.start()
    for _ in range(200):
        out = Buffer("i", 1)
        assert module.launch("leave", [2], [100], [out]).result == 0
        assert out.read() == [100]
    thread.join()
    assert results == [700] * 200


def test_a_fault_outside_a_kernel_is_still_the_programs_own(engine: Engine, module: Module) -> None:
    """The handler passes it on: here to Python's faulthandler, then the process dies of the signal."""
    _still_works(module)
    code = f"""
import ctypes, faulthandler, sys
faulthandler.enable()
sys.path.insert(0, {str(sys.path[0])!r})
from pathlib import Path
from tests.softgpu.engine import Engine, Buffer
from tests.softgpu.test_engine_faults import SOURCE, _still_works
from tests.softgpu.nvrtc import ptx
engine = Engine(Path({engine.library._name!r}), Path({str(engine.root)!r}))
module = engine.load(ptx(SOURCE))
_still_works(module)
assert module.launch("poke", [1], [4], [("Q", 8)]).result == 700
print("ran", flush=True)
ctypes.string_at(16)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "ran\n", done.stderr
    assert done.returncode == (1 if "sanitize" in os.environ.get("KVMPOOL_TEST_CFLAGS", "") else -11)
    assert "Segmentation fault" in done.stderr

"""Runs C programs against softgpu's libcuda.so.1, found by its soname, in processes of their own.

KVMPOOL_SOFTGPU_LIBRARIES names another folder with the libraries (a sanitizer build), KVMPOOL_TEST_CFLAGS the flags
that the programs then need, e.g. "-fsanitize=address,undefined", KVMPOOL_TEST_PRELOAD what Python needs to load it.
"""

from __future__ import annotations

import atexit
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from kvmpool.errors import NotFound
from kvmpool.native import native
from kvmpool.softgpu import state
from tests.softgpu.nvrtc import ptx

REPO = Path(__file__).resolve().parents[2]
SPECS = tuple(
    state.CardSpec(i, f"GPU-0000000{i}-aaaa-2222-3333-444444444444", f"0000:4{i + 1}:00.0", f"SoftGPU {i}", 1024)
    for i in range(2)
)

KERNELS = """
extern "C" __device__ int counter = 7;
extern "C" __global__ void add(const float *a, const float *b, float *c, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}
extern "C" __global__ void set(int *p, int value, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] = value;
}
extern "C" __global__ void count(int *p) { *p = counter++; }
extern "C" __global__ void late(int *p, int value, long rounds)
{
    unsigned x = value;
    for (long i = 0; i < rounds; i++) x = x * 1664525u + 1013904223u;
    *p = x == 12345u ? 0 : value;
}
extern "C" __global__ void forever(volatile int *p) { while (*p == 0) { } }
extern "C" __global__ void trap() { asm volatile("trap;"); }
extern "C" __global__ void mixed(char a, double b, short c, int *out) { out[0] = a; out[1] = (int)b; out[2] = c; }
extern "C" __global__ void reverse(int *p)
{
    extern __shared__ int tile[];
    tile[threadIdx.x] = p[threadIdx.x];
    __syncthreads();
    p[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}
"""


def libraries() -> Path:
    """The folder with both libraries; skips the test where they are not built."""
    other = os.environ.get("KVMPOOL_SOFTGPU_LIBRARIES")
    if other:
        return Path(other)
    try:
        return native("softgpu-cuda").parent
    except NotFound as error:
        pytest.skip(str(error))


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="softgpu-programs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def program(name: str) -> Path:
    """tests/native/NAME.c, compiled."""
    built = _folder() / name
    flags = shlex.split(os.environ.get("KVMPOOL_TEST_CFLAGS", ""))
    source = REPO / "tests/native" / f"{name}.c"
    include = f"-I{REPO / 'kvmpool/softgpu/src'}"
    command = ["gcc", "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", *flags, include, str(source)]
    subprocess.run([*command, "-o", str(built), "-ldl", "-lpthread"], check=True, timeout=120)
    return built


@functools.cache
def kernels() -> Path:
    """KERNELS as PTX in a file."""
    path = _folder() / "kernels.ptx"
    path.write_text(ptx(KERNELS))
    return path


def healthy_cards(root: Path) -> Path:
    """Makes `root` a softgpu folder with SPECS and this session's cache of compiled kernels."""
    cache = _folder() / "cache"
    cache.mkdir(exist_ok=True)
    (root / "cache").symlink_to(cache)
    state.create(root, SPECS)
    return root


def environment(root: Path, **more: str) -> dict[str, str]:
    """As the lab sets it: no LD_PRELOAD."""
    kept = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "LD_PRELOAD")}
    return {**kept, "LD_LIBRARY_PATH": str(libraries()), "KVMPOOL_SOFTGPU": str(root), **more}


def python_environment(root: Path) -> dict[str, str]:
    """As `environment`, and with the runtime of a sanitizer where one is under test: Python was not built with it."""
    runtime = os.environ.get("KVMPOOL_TEST_PRELOAD")
    return environment(root, **({"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0"} if runtime else {}))


class Case:
    """A case of tests/native/softgpu_cases.c that runs beside the test: it says lines, and goes on when told to."""

    def __init__(self, root: Path, *words: str, **env: str) -> None:
        command = [str(program("softgpu_cases")), str(kernels()), *words]
        self.process = subprocess.Popen(
            command, env=environment(root, **env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self, timeout_s: float = 30) -> int:
        """Waits; the rest of what it said is dropped."""
        try:
            self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        return self.process.returncode

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def run(root: Path, *words: str, **env: str) -> str:
    """Runs a case to its end and returns what it said; it must exit 0."""
    command = [str(program("softgpu_cases")), str(kernels()), *words]
    done = subprocess.run(command, env=environment(root, **env), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{words}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout

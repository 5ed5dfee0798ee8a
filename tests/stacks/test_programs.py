"""cuda.core, PyCUDA and numba: what they compute on the card's driver and remoted, compared byte by byte."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.dataplane.remote import remote
from tests.softgpu.nvrtc import ptx
from tests.stacks.stack import ROOT, python

pytestmark = [pytest.mark.native, pytest.mark.stacks, pytest.mark.slow, pytest.mark.timeout(600)]

KEEP = """
import os, sys
import numpy as np

kernels, folder = sys.argv[1:]


def keep(name, array):
    np.save(os.path.join(folder, name + ".npy"), array)


"""

CUDA_CORE = """
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

SOURCE = '''
extern "C" __global__ void saxpy(float a, const float *x, float *y, size_t n)
{
    size_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
template <typename T> __global__ void scale(T *x, T by) { x[threadIdx.x] *= by; }
'''
device = Device()
device.set_current()
stream = device.create_stream()
options = ProgramOptions(std="c++17", arch="compute_75")
module = Program(SOURCE, code_type="c++", options=options).compile("ptx", name_expressions=("scale<double>",))
saxpy, scale = module.get_kernel("saxpy"), module.get_kernel("scale<double>")
print(device.name, device.compute_capability, saxpy.attributes.max_threads_per_block)

n = 10000
rng = np.random.default_rng(3)
x, y = (rng.random(n, dtype=np.float32) for _ in range(2))


def driver(call, *arguments):
    result, *values = call(*arguments)
    assert result == 0, (call, result)
    return values[0] if values else None


from cuda.bindings import driver as cu

at = [driver(cu.cuMemAlloc, n * 4) for _ in range(2)]
for address, host in zip(at, (x, y)):
    driver(cu.cuMemcpyHtoD, address, host.ctypes.data, host.nbytes)
for i in range(5):
    config = LaunchConfig(grid=(n + 255) // 256, block=256)
    launch(stream, config, saxpy, np.float32(1.5), int(at[0]), int(at[1]), np.uint64(n))
stream.sync()
back = np.empty_like(y)
driver(cu.cuMemcpyDtoH, back.ctypes.data, at[1], back.nbytes)
keep("saxpy", back)

doubles = np.arange(64, dtype=np.float64)
address = driver(cu.cuMemAlloc, doubles.nbytes)
driver(cu.cuMemcpyHtoD, address, doubles.ctypes.data, doubles.nbytes)
start, end = device.create_event(), device.create_event()
stream.record(start)
launch(stream, LaunchConfig(grid=1, block=64), scale, int(address), np.float64(3))
stream.record(end)
end.sync()
driver(cu.cuMemcpyDtoH, doubles.ctypes.data, address, doubles.nbytes)
keep("doubles", doubles)
print(end.is_done)
"""

KERNELS = """
extern "C" __global__ void multiply(float *d, const float *a, const float *b)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    d[i] = a[i] * b[i];
}
"""

PYCUDA = """
import pycuda.autoinit
import pycuda.driver as drv
from pycuda import cumath
from pycuda.compiler import SourceModule
from pycuda import gpuarray

text = open(kernels, "rb").read()
module = drv.module_from_buffer(text)
multiply = module.get_function("multiply")
rng = np.random.default_rng(5)
a, b = (rng.random(1024, dtype=np.float32) for _ in range(2))
d = np.zeros_like(a)
multiply(drv.Out(d), drv.In(a), drv.In(b), block=(256, 1, 1), grid=(4, 1))
print((d == a * b).all())
keep("multiplied", d)
x = gpuarray.to_gpu(a)
y = gpuarray.empty_like(x)
multiply(y.gpudata, x.gpudata, x.gpudata, block=(256, 1, 1), grid=(4, 1))
print((y.get() == a * a).all(), drv.mem_get_info()[1] > 0)
keep("squares", y.get())
keep("copied", x.copy().get())
matrix = rng.random((37, 53), dtype=np.float32)
pitched, pitch = drv.mem_alloc_pitch(53 * 4, 37, 4)
copy = drv.Memcpy2D()
copy.set_src_host(matrix)
copy.set_dst_device(pitched)
copy.width_in_bytes = copy.src_pitch = 53 * 4
copy.dst_pitch = pitch
copy.height = 37
copy(aligned=True)
back = np.zeros_like(matrix)
home = drv.Memcpy2D()
home.set_src_device(pitched)
home.set_dst_host(back)
home.width_in_bytes = home.dst_pitch = 53 * 4
home.src_pitch = pitch
home.height = 37
home(aligned=True)
print((back == matrix).all())
keep("matrix", back)

compiled = SourceModule(
    "__global__ void cubes(float *d, const float *a, int n)"
    "{ int i = threadIdx.x; if (i < n) d[i] = a[i] * a[i] * a[i]; }"
)
cubes = compiled.get_function("cubes")
stream, start, end = drv.Stream(), drv.Event(), drv.Event()
start.record(stream)
cubes(y, x, np.int32(200), block=(256, 1, 1), stream=stream)
end.record(stream)
end.synchronize()
print(start.time_till(end) >= 0)
keep("cubes", y.get())
keep("arithmetic", (2 * x - y * y + 1).get())
keep("sines", cumath.sin(x).get())
keep("sum", gpuarray.sum(x).get())
keep("filled", y.fill(np.float32(3)).get())
"""
NVCC = f"""#!{sys.executable}
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from tests.softgpu.nvrtc import ptx

words = sys.argv[1:]
if "--version" in words:
    print("nvcc of tests/stacks, by NVRTC")
    sys.exit()
[file] = [word for word in words if word.endswith(".cu")]
source = open(file).read()
if "--preprocess" in words:
    print(source)
    sys.exit()
folders = [word for word in words if word.startswith("-I")]
open(os.path.splitext(file)[0] + ".cubin", "w").write(ptx(source, "compute_75", *folders))
"""

NUMBA = """
import math
from numba import cuda, float32, int32, vectorize
from numba.cuda.random import create_xoroshiro128p_states, xoroshiro128p_normal_float32


@cuda.jit
def functions(x, out):
    i = cuda.grid(1)
    if i < x.size:
        out[i, 0], out[i, 1], out[i, 2] = math.sin(x[i]), math.exp(-x[i]), math.sqrt(x[i]) + math.log1p(x[i])


@cuda.jit
def block_sums(x, out):
    tile = cuda.shared.array(256, float32)
    i = cuda.threadIdx.x
    tile[i] = x[cuda.grid(1)]
    cuda.syncthreads()
    half = 128
    while half:
        if i < half:
            tile[i] += tile[i + half]
        cuda.syncthreads()
        half //= 2
    if i == 0:
        out[cuda.blockIdx.x] = tile[0]


@cuda.jit
def histogram(x, bins):
    cuda.atomic.add(bins, int32(x[cuda.grid(1)] * bins.size), 1)


@cuda.jit
def mandelbrot(image, rounds):
    column, row = cuda.grid(2)
    c = complex(column / 40.0 - 2.0, row / 40.0 - 1.0)
    z, n = 0j, 0
    while n < rounds and z.real * z.real + z.imag * z.imag < 4.0:
        z = z * z + c
        n += 1
    image[row, column] = n


@cuda.jit
def draw(states, out):
    i = cuda.grid(1)
    out[i] = xoroshiro128p_normal_float32(states, i)


@vectorize(["float64(float64, float64)"], target="cuda")
def hypotenuse(a, b):
    return math.sqrt(a * a + b * b)


total = cuda.reduce(lambda a, b: a + b)
x = np.random.default_rng(7).random(4096, dtype=np.float32)
streams = [cuda.stream() for _ in range(2)]
on_card = cuda.to_device(x, stream=streams[0])
streams[0].synchronize()

out = cuda.device_array((x.size, 3), np.float32)
functions[16, 256](on_card, out)
keep("functions", out.copy_to_host())
sums = cuda.device_array(16, np.float32, stream=streams[1])
block_sums[16, 256, streams[1]](on_card, sums)
keep("sums", sums.copy_to_host(stream=streams[1]))
bins = cuda.to_device(np.zeros(32, np.int32))
histogram[16, 256](on_card, bins)
keep("bins", bins.copy_to_host())
image = cuda.device_array((80, 128), np.int32)
mandelbrot[(8, 5), (16, 16)](image, 60)
keep("image", image.copy_to_host())
keep("rows", image[4:20].copy_to_host())
drawn = cuda.device_array(512, np.float32)
draw[2, 256](create_xoroshiro128p_states(512, seed=11), drawn)
keep("drawn", drawn.copy_to_host())
keep("hypotenuse", hypotenuse(x.astype(np.float64), x[::-1].astype(np.float64)))
keep("total", np.array(total(np.arange(5000, dtype=np.int64))))


@cuda.jit
def tell(x):
    if cuda.grid(1) == 0:
        print("of", x.size, "the first is", x[0])


tell[2, 32](on_card)
cuda.synchronize()
print(cuda.get_current_device().name, bins.copy_to_host().sum())
"""


def test_cuda_core_has_the_same_results(tmp_path: Path) -> None:
    assert compare(tmp_path, "cuda/core", CUDA_CORE) == {"saxpy", "doubles"}


def test_pycuda_has_the_same_results(tmp_path: Path) -> None:
    assert compare(tmp_path, "pycuda", PYCUDA) == {
        "multiplied",
        "squares",
        "copied",
        "matrix",
        "cubes",
        "arithmetic",
        "sines",
        "sum",
        "filled",
    }


def test_numba_has_the_same_results(tmp_path: Path) -> None:
    kept = {"functions", "sums", "bins", "image", "rows", "drawn", "hypotenuse", "total"}
    assert compare(tmp_path, "numba_cuda", NUMBA) == kept


def compare(tmp_path: Path, module: str, program: str) -> set[str]:
    """Runs it on both ways, fails where an array or a word differs; the names of the arrays."""
    script, kernels = tmp_path / "program.py", tmp_path / "kernels.ptx"
    script.write_text(KEEP + program)
    kernels.write_text(ptx(KERNELS))
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    path = {"PATH": f"{nvcc.parent}:{os.environ['PATH']}", "PYCUDA_CACHE_DIR": str(tmp_path / "pycuda")}
    ways = [tmp_path / "direct", tmp_path / "guest"]
    for folder in (*ways, tmp_path / "pycuda"):
        folder.mkdir()
    command: list[str | Path] = [python(module), "-W", "ignore", script, kernels]
    with remote(tmp_path) as place:
        direct, guest = place.direct([*command, ways[0]], 300, **path), place.guest([*command, ways[1]], 300, **path)
    assert direct.code == 0, direct.errors
    assert (guest.code, guest.out) == (0, direct.out), guest
    kept = [{path.stem: path.read_bytes() for path in folder.iterdir()} for folder in ways]
    assert kept[0] == kept[1]
    return set(kept[0])

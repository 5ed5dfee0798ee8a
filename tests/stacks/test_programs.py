"""cuda.core and PyCUDA with kernels as PTX: the same results on the card's driver and remoted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dataplane.remote import remote
from tests.softgpu.nvrtc import ptx
from tests.stacks.stack import python

pytestmark = [pytest.mark.native, pytest.mark.stacks]

CUDA_CORE = """
import hashlib
import numpy as np
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
print(hashlib.sha256(back.tobytes()).hexdigest(), float(back.sum()))

doubles = np.arange(64, dtype=np.float64)
address = driver(cu.cuMemAlloc, doubles.nbytes)
driver(cu.cuMemcpyHtoD, address, doubles.ctypes.data, doubles.nbytes)
start, end = device.create_event(), device.create_event()
stream.record(start)
launch(stream, LaunchConfig(grid=1, block=64), scale, int(address), np.float64(3))
stream.record(end)
end.sync()
driver(cu.cuMemcpyDtoH, doubles.ctypes.data, address, doubles.nbytes)
print(doubles.sum(), end.is_done)
"""

KERNELS = """
extern "C" __global__ void multiply(float *d, const float *a, const float *b)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    d[i] = a[i] * b[i];
}
"""

PYCUDA = """
import hashlib
import sys
import numpy as np
import pycuda.autoinit
import pycuda.driver as drv
from pycuda import gpuarray

text = open(sys.argv[1], "rb").read()
module = drv.module_from_buffer(text)
multiply = module.get_function("multiply")
rng = np.random.default_rng(5)
a, b = (rng.random(1024, dtype=np.float32) for _ in range(2))
d = np.zeros_like(a)
multiply(drv.Out(d), drv.In(a), drv.In(b), block=(256, 1, 1), grid=(4, 1))
print((d == a * b).all(), hashlib.sha256(d.tobytes()).hexdigest())
x = gpuarray.to_gpu(a)
y = gpuarray.empty_like(x)
multiply(y.gpudata, x.gpudata, x.gpudata, block=(256, 1, 1), grid=(4, 1))
print((y.get() == a * a).all(), x.copy().get().sum(), drv.mem_get_info()[1] > 0)
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
"""


def test_cuda_core_has_the_same_results(tmp_path: Path) -> None:
    compare(tmp_path, "cuda/core", CUDA_CORE)


@pytest.mark.not_in_ci("PyCUDA is compiled from its source: minutes")
def test_pycuda_has_the_same_results(tmp_path: Path) -> None:
    compare(tmp_path, "pycuda", PYCUDA)


def compare(tmp_path: Path, module: str, program: str) -> None:
    script, kernels = tmp_path / "program.py", tmp_path / "kernels.ptx"
    script.write_text(program)
    kernels.write_text(ptx(KERNELS))
    command: list[str | Path] = [python(module), "-W", "ignore", script, kernels]
    with remote(tmp_path) as place:
        direct, guest = place.direct(command), place.guest(command)
    assert direct.code == 0, direct.errors
    assert (guest.code, guest.out) == (0, direct.out), guest

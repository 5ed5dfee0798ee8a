"""Our own declarations against NVIDIA's header from the wheel nvidia-cuda-runtime: it is read, never shipped."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path

import pytest

from kvmpool.softgpu import state
from tests.softgpu.driver import Case, environment, healthy_cards, libraries

pytestmark = pytest.mark.native

SRC = Path(state.__file__).parent / "src"
KERNEL_NODE = (
    "func gridDimX gridDimY gridDimZ blockDimX blockDimY blockDimZ sharedMemBytes kernelParams"
    " extra"
)
STRUCTS = {
    "CUDA_MEMCPY2D": "srcXInBytes srcY srcMemoryType srcHost srcDevice srcArray srcPitch dstXInBytes dstY dstMemoryType"
    " dstHost dstDevice dstArray dstPitch WidthInBytes Height",
    "CUDA_MEMCPY3D": "srcXInBytes srcY srcZ srcLOD srcMemoryType srcHost srcDevice srcArray srcPitch srcHeight"
    " dstXInBytes dstY dstZ dstLOD dstMemoryType dstHost dstDevice dstArray dstPitch dstHeight WidthInBytes Height"
    " Depth",
    "CUlaunchConfig": "gridDimX gridDimY gridDimZ blockDimX blockDimY blockDimZ sharedMemBytes hStream attrs numAttrs",
    "CUlaunchAttribute": "id value",
    "CUmemAllocationProp": "type requestedHandleTypes location win32HandleMetaData allocFlags",
    "CUmemAccessDesc": "location flags",
    "CUmemLocation": "type id",
    "CUdevprop": "maxThreadsPerBlock maxThreadsDim maxGridSize sharedMemPerBlock totalConstantMemory SIMDWidth memPitch"
    " regsPerBlock clockRate textureAlign",
    "CUuuid": "bytes",
    "CUDA_KERNEL_NODE_PARAMS_v1": KERNEL_NODE,
    "CUDA_KERNEL_NODE_PARAMS_v2": f"{KERNEL_NODE} kern ctx",
    "CUDA_MEMSET_NODE_PARAMS": "dst pitch value elementSize width height",
    "CUDA_HOST_NODE_PARAMS": "fn userData",
    "CUDA_GRAPH_INSTANTIATE_PARAMS": "flags hUploadStream hErrNode_out result_out",
    "CUgraphExecUpdateResultInfo": "result errorNode errorFromNode",
    "CUgraphEdgeData": "from_port to_port type reserved",
}


def header() -> Path:
    found = [path for root in importlib.import_module("nvidia").__path__ for path in Path(root).glob("**/cuda.h")]
    if not found:
        pytest.skip("no cuda.h: pip install nvidia-cuda-runtime")
    return found[0]


def layout(folder: Path, include: Path) -> str:
    """Sizes and offsets as this header has them."""
    lines = []
    for name, fields in STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        lines += [f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));' for field in fields.split()]
    body = "\n".join(lines)
    source = folder / "layout.c"
    includes = f'#include <stddef.h>\n#include <stdio.h>\n#include "{include}"\n'
    source.write_text(f"{includes}int main(void) {{\n{body}\nreturn 0; }}\n")
    subprocess.run(["gcc", "-o", folder / "layout", source], check=True, timeout=60)
    return subprocess.run([folder / "layout"], check=True, capture_output=True, text=True).stdout


def test_structs_have_nvidia_s_layout(tmp_path: Path) -> None:
    assert layout(tmp_path, SRC / "cuda_api.h") == layout(tmp_path, header())


def test_every_function_of_the_header_is_listed() -> None:
    declared = set(re.findall(r"CUDAAPI\s+(cu[A-Z]\w+)\s*\(", header().read_text()))
    rows = [line.split() for line in (SRC / "cuda_names.txt").read_text().splitlines() if not line.startswith("#")]
    listed = {row[0] for row in rows} | {row[0] + row[3] for row in rows if len(row) > 3}
    assert len(declared) > 500
    assert declared - listed == set()


def test_error_names_are_nvidia_s() -> None:
    enum = re.search(r"typedef enum cudaError_enum \{(.*?)\} CUresult;", header().read_text(), re.S)
    assert enum
    wanted = dict(re.findall(r"(CUDA_\w+)\s*=\s*(\d+)", enum[1]))
    ours = {name: value for value, name in re.findall(r'\{(\d+), "(CUDA_\w+)",', (SRC / "cuda_errors.c").read_text())}
    assert ours == wanted


def test_a_loader_that_asks_by_name_gets_every_name_of_the_list(tmp_path: Path) -> None:
    """As libcudart does at start: each listed name through cuGetProcAddress is some function, never NULL."""
    root = healthy_cards(tmp_path)
    case = Case(root, "ask", str(SRC / "cuda_names.txt"))
    count = int(case.line())
    assert case.end() == 0
    assert count > 600
    assert environment(root)["LD_LIBRARY_PATH"] == str(libraries())

"""API v1 as the design lists it (03 section 3.5): no name of it is a stub, each in all its forms."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvmpool.dataplane import calltable, support
from kvmpool.dataplane.support import Support
from tests.dataplane import shim
from tests.dataplane.test_calls import header, versions

API_V1 = {
    "init": "cuInit cuDriverGetVersion cuGetProcAddress cuGetExportTable cuGetErrorName cuGetErrorString",
    "device": "cuDeviceGet cuDeviceGetCount cuDeviceGetName cuDeviceGetUuid cuDeviceTotalMem cuDeviceGetAttribute "
    "cuDeviceComputeCapability cuDeviceGetPCIBusId cuDeviceGetByPCIBusId cuDeviceCanAccessPeer cuDeviceGetProperties",
    "context": "cuCtxCreate cuCtxDestroy cuCtxPushCurrent cuCtxPopCurrent cuCtxSetCurrent cuCtxGetCurrent "
    "cuCtxGetDevice cuCtxGetApiVersion cuCtxGetFlags cuCtxGetId cuCtxSynchronize cuCtxGetLimit cuCtxSetLimit "
    "cuCtxGetCacheConfig cuCtxSetCacheConfig cuCtxGetSharedMemConfig cuCtxSetSharedMemConfig "
    "cuCtxGetStreamPriorityRange cuCtxAttach cuCtxDetach cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease "
    "cuDevicePrimaryCtxReset cuDevicePrimaryCtxGetState cuDevicePrimaryCtxSetFlags",
    "module": "cuModuleLoad cuModuleLoadData cuModuleLoadDataEx cuModuleLoadFatBinary cuModuleUnload "
    "cuModuleGetFunction cuModuleGetGlobal cuModuleGetLoadingMode",
    "linker": "cuLinkCreate cuLinkAddData cuLinkAddFile cuLinkComplete cuLinkDestroy",
    "library": "cuLibraryLoadData cuLibraryLoadFromFile cuLibraryUnload cuLibraryGetKernel cuLibraryGetModule "
    "cuLibraryGetGlobal cuKernelGetFunction cuKernelGetAttribute cuKernelSetAttribute cuKernelGetParamInfo "
    "cuKernelGetName",
    "function": "cuFuncGetAttribute cuFuncSetAttribute cuFuncSetCacheConfig cuFuncSetSharedMemConfig cuFuncGetModule "
    "cuFuncGetParamInfo cuFuncGetName",
    "launch": "cuLaunchKernel cuLaunchKernelEx cuLaunchCooperativeKernel",
    "occupancy": "cuOccupancyMaxActiveBlocksPerMultiprocessor cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags "
    "cuOccupancyMaxPotentialBlockSize cuOccupancyMaxPotentialBlockSizeWithFlags",
    "memory": "cuMemAlloc cuMemAllocPitch cuMemFree cuMemGetInfo cuMemGetAddressRange cuMemAllocHost cuMemHostAlloc "
    "cuMemFreeHost cuMemHostGetFlags cuMemHostGetDevicePointer cuMemHostRegister cuMemHostUnregister "
    "cuPointerGetAttribute cuPointerGetAttributes",
    "copies": "cuMemcpy cuMemcpyAsync cuMemcpyHtoD cuMemcpyHtoDAsync cuMemcpyDtoH cuMemcpyDtoHAsync cuMemcpyDtoD "
    "cuMemcpyDtoDAsync cuMemcpy2D cuMemcpy2DUnaligned cuMemcpy2DAsync cuMemcpy3D cuMemcpy3DAsync",
    "fills": "cuMemsetD8 cuMemsetD8Async cuMemsetD16 cuMemsetD16Async cuMemsetD32 cuMemsetD32Async cuMemsetD2D8 "
    "cuMemsetD2D8Async cuMemsetD2D16 cuMemsetD2D16Async cuMemsetD2D32 cuMemsetD2D32Async",
    "streams": "cuStreamCreate cuStreamCreateWithPriority cuStreamDestroy cuStreamQuery cuStreamSynchronize "
    "cuStreamWaitEvent cuStreamGetPriority cuStreamGetFlags cuStreamGetCtx cuStreamGetDevice cuStreamIsCapturing",
    "events": "cuEventCreate cuEventRecord cuEventRecordWithFlags cuEventQuery cuEventSynchronize cuEventElapsedTime "
    "cuEventDestroy",
}

NO_MAPPED_MEMORY = {"cuMemHostGetDevicePointer"}  # attribute 19 is 0, and it gives an address of nothing else
NARROW_ADDRESS = re.compile(r"CUdeviceptr_v1|CUDA_MEMCPY[23]D_v1")


def narrow_forms() -> set[tuple[str, int]]:
    """Those from before CUDA 3.2 whose device addresses have 32 bits: none of ours fits (docs/adr/0015)."""
    found = re.findall(r"PFN_(cu\w+?)_v(\d+)\)\(([^)]*)\)", header("cudaTypedefs.h"))
    return {(name, int(version)) for name, version, parameters in found if NARROW_ADDRESS.search(parameters)}


def forms() -> list[tuple[str, int, str]]:
    """Every form that cudaTypedefs.h has of a name of the list: name, CUDA version, stream suffix."""
    names = {name for group in API_V1.values() for name in group.split()} - NO_MAPPED_MEMORY
    return sorted(
        (name, version, suffix) for (name, suffix), many in versions().items() for version in many if name in names
    )


def ours() -> dict[str, list[calltable.Symbol]]:
    table = calltable.load(shim.DATAPLANE / "calls.toml")
    rows = [row for row in support.api_names(table, {}) if row.support is not Support.UNSUPPORTED]
    supported = {name for row in rows for name in row.symbols}
    found: dict[str, list[calltable.Symbol]] = {}
    for call in table.calls:
        for symbol in call.symbols:
            if symbol.name in supported:
                found.setdefault(symbol.base, []).append(symbol)
    return found


@pytest.mark.parametrize("group", API_V1)
def test_every_name_of_api_v1_is_supported(group: str) -> None:
    have = ours()
    assert [name for name in API_V1[group].split() if name not in have and name not in NO_MAPPED_MEMORY] == []


def test_every_form_of_api_v1_that_cuda_has_is_supported_but_for_32_bit_addresses() -> None:
    have = {(symbol.base, symbol.version, symbol.per_thread) for symbols in ours().values() for symbol in symbols}
    per_thread = {name for name, _, is_per_thread in have if is_per_thread}
    missing = {
        (name, version)
        for name, version, suffix in forms()
        # cudaTypedefs.h gives a per-thread form the version of its plain one or its own: one of them is enough
        if not ((name, version, False) in have if not suffix else name in per_thread)
    }
    assert missing == {form for form in narrow_forms() if form[0] in {name for name, _, _ in forms()}}


LOOK_UP = """
import ctypes, json, sys
library = ctypes.CDLL(sys.argv[1])
for name, version, flags, symbol in json.load(sys.stdin):
    found, status = ctypes.c_void_p(), ctypes.c_int(-1)
    out = ctypes.byref(found), version, ctypes.c_uint64(flags), ctypes.byref(status)
    rc = library.cuGetProcAddress_v2(name.encode(), *out)
    wanted = ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value if symbol else None
    if (rc, found.value, status.value) != (0, wanted, 0 if symbol else 2):
        print(name, version, flags, symbol, rc, status.value)
"""


@pytest.mark.native
def test_each_version_of_a_name_is_the_form_that_it_brought() -> None:
    """At its version and one below the next; below the first of all there is none, unless that one is unsupported."""
    narrow = {name for name, _ in narrow_forms()}
    asked: list[tuple[str, int, int, str]] = []
    for name, symbols in ours().items():
        plain = sorted({s.version: s.name for s in symbols if not s.per_thread}.items())
        for place, (version, symbol) in enumerate(plain):
            until = plain[place + 1][0] - 1 if place + 1 < len(plain) else 99000
            asked += [(name, at, 0, symbol) for at in (version, until)]
        if name not in narrow and plain:
            asked.append((name, plain[0][0] - 1, 0, ""))
        newest = sorted((s.version, s.name) for s in symbols if s.per_thread)
        if newest:
            asked.append((name, 99000, 2, newest[-1][1]))
    narrow_asked = [(name, version, 0, name) for name, version in sorted(narrow_forms()) if name in ours()]
    assert len(narrow_asked) > 15
    library = shim.build("plain") / "shim" / "libcuda.so.1"
    done = subprocess.run(
        [sys.executable, "-c", LOOK_UP, library],
        input=json.dumps(asked + narrow_asked),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""


NARROW = """
import ctypes, os, sys
library = ctypes.CDLL(os.environ["LD_LIBRARY_PATH"] + "/libcuda.so.1")
context, memory, total, free, all_of_it = ctypes.c_void_p(), ctypes.c_void_p(), *(ctypes.c_uint() for _ in range(3))
guard = (ctypes.c_uint * 2)(7, 7)
print(library.cuInit(0), library.cuCtxCreate(ctypes.byref(context), 0, 0))
print(library.cuDeviceTotalMem(guard, 0), guard[0], guard[1], library.cuDeviceTotalMem(None, 0))
print(library.cuMemGetInfo(ctypes.byref(free), ctypes.byref(all_of_it)), free.value <= all_of_it.value, all_of_it.value)
print(library.cuMemAllocHost(ctypes.byref(memory), 4096), bool(memory.value), library.cuMemFreeHost(memory))
print(library.cuMemAlloc(ctypes.byref(memory), 4096))
"""


@pytest.mark.native
@pytest.mark.parametrize(("memory", "shown"), [(64 << 20, 64 << 20), (8 << 30, 0xFFFFFFFF)])
def test_sizes_of_32_bits_show_what_fits_and_touch_nothing_beside_them(memory: int, shown: int, tmp_path: Path) -> None:
    with shim.host(tmp_path, "plain", memory=memory) as host:
        program = [sys.executable, "-c", NARROW]
        done = subprocess.run(program, env=host.environment(), capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["0 0", f"0 {shown} 7 1", f"0 True {shown}", "0 True 0", "801"]

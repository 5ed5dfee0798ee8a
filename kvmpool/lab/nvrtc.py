"""Compiles CUDA C to PTX with NVIDIA's NVRTC from the PyPI package nvidia-cuda-nvrtc; no GPU is needed for it."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

from kvmpool.errors import NotFound, Refused

# compute_90: what the soft cards report (design 09 §9.2)
_OPTIONS = (b"--gpu-architecture=compute_90", b"--std=c++17")


def ptx(name: str, source: str) -> bytes:
    """The PTX of a CUDA C file. Raises Refused with the compiler's words, NotFound where there is no compiler."""
    library = ctypes.CDLL(str(_library()))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    program = ctypes.c_void_p()
    _check(
        library,
        library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None),
        f"{name}: not taken",
    )
    try:
        options = (ctypes.c_char_p * len(_OPTIONS))(*_OPTIONS)
        if library.nvrtcCompileProgram(program, len(_OPTIONS), options):
            raise Refused(f"{name} does not compile: {_text(library, program, 'ProgramLog').decode().strip()}")
        return _text(library, program, "PTX")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer), what)
    return buffer.value


def _check(library: ctypes.CDLL, code: int, what: str) -> None:
    if code:
        raise Refused(f"NVRTC: {what}: {library.nvrtcGetErrorString(code).decode()}")


def _library() -> Path:
    """Wheels since CUDA 13 keep all libraries in nvidia/cu13/lib, older ones in nvidia/cuda_nvrtc/lib."""
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations or [] if package else []:
        if found := sorted(Path(folder).glob("*/lib/libnvrtc.so.*")):
            return found[-1]
    raise NotFound("NVRTC is missing: the example programs cannot be compiled. Next: pip install nvidia-cuda-nvrtc")

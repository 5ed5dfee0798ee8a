"""CUDA C to PTX with NVRTC from the nvidia-cuda-nvrtc wheel: needs no GPU."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path

_SPEC = importlib.util.find_spec("nvidia")
_ROOTS = [Path(path) for path in (_SPEC.submodule_search_locations or ())] if _SPEC else []


def library_path() -> Path:
    return next(path for root in _ROOTS for path in root.glob("**/libnvrtc.so.*"))


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(library_path()))


def _includes() -> list[str]:
    return [f"-I{path.parent}" for root in _ROOTS for path in root.glob("**/cuda_fp16.h")]


@functools.cache
def ptx(source: str, arch: str = "compute_75", *options: str) -> str:
    """`arch` may carry options after a space. Raises ValueError with NVRTC's log where the source does not compile."""
    library, program = _library(), ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    words = [word.encode() for word in (*f"--gpu-architecture={arch}".split(), *_includes(), *options)]
    result = library.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
    kind = "ProgramLog" if result else "PTX"
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{kind}")(program, text)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    if result:
        raise ValueError(text.value.decode())
    return text.value.decode()

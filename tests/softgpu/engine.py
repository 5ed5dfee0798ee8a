"""The engine without a driver: builds its C sources into one library and calls engine.h through ctypes."""

from __future__ import annotations

import ctypes
import os
import shlex
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

SOFTGPU = Path(__file__).resolve().parents[2] / "kvmpool" / "softgpu"
_NAMES = "barrier build device_rt executor fatbin fiber launch lz4 module sha256 signals tools warp"
SOURCES = _NAMES.split(" ")


class Ctl(ctypes.Structure):
    """struct kp_launch_ctl."""

    _fields_ = [
        ("stop", ctypes.c_int),
        ("print", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)),
        ("print_arg", ctypes.c_void_p),
        ("cooperative", ctypes.c_int),
        ("busy_ns", ctypes.c_uint64),
        ("started_ns", ctypes.c_uint64),
        ("xid", ctypes.c_int),
        ("fault_address", ctypes.c_uint64),
        ("message", ctypes.c_char * 192),
    ]


class Attributes(ctypes.Structure):
    """struct kp_function_attributes."""

    _fields_ = [("name", ctypes.c_char_p)] + [
        (name, ctypes.c_uint32)
        for name in (
            "max_threads",
            "shared",
            "const",
            "local",
            "regs",
            "ptx_version",
            "binary_version",
            "param_count",
            "param_bytes",
        )
    ]
    _fields_ += [("uses_barriers", ctypes.c_int)]


class Refused(Exception):
    """kp_module_load's error number and log."""

    def __init__(self, error: int, log: str) -> None:
        super().__init__(f"{error}: {log}")
        self.error = error
        self.log = log


def build_engine(folder: Path) -> Path:
    """Compiles the engine into `folder`; about two seconds. KVMPOOL_TEST_CFLAGS: flags of a sanitizer, say."""
    flags = shlex.split(os.environ.get("KVMPOOL_TEST_CFLAGS", ""))
    library = folder / "libengine.so"
    sources = [str(SOFTGPU / "src" / f"{name}.c") for name in SOURCES]
    command = ["gcc", "-O1", "-g", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *flags]
    define = f'-DKP_TRANSLATOR_SOURCE="{SOFTGPU}"'
    subprocess.run([*command, define, *sources, "-o", str(library), "-lpthread", "-ldl"], check=True, timeout=120)
    return library


class Buffer:
    """Device memory is host memory here."""

    def __init__(self, code: str, values: Sequence[float] | int) -> None:
        if isinstance(values, int):
            values = [0] * values
        self.code = code
        self.count = len(values)
        self._data = ctypes.create_string_buffer(struct.pack(f"<{self.count}{code}", *values) + bytes(64))

    @property
    def address(self) -> int:
        return ctypes.addressof(self._data)

    def read(self) -> list[float]:
        return list(struct.unpack_from(f"<{self.count}{self.code}", self._data))


Arg = Buffer | tuple[str, float]  # memory, or a struct code and a value


class Launched:
    """How a launch ended, and what it printed."""

    def __init__(self, result: int, ctl: Ctl, printed: str) -> None:
        self.result = result
        self.xid = ctl.xid
        self.message = ctl.message.decode()
        self.busy_ms = ctl.busy_ns / 1e6
        self.printed = printed


class Module:
    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library = library
        self.handle = handle

    def unload(self) -> None:
        self._library.kp_module_unload(self.handle)

    def function(self, name: str) -> ctypes.c_void_p:
        function = ctypes.c_void_p()
        error = self._library.kp_module_function(self.handle, name.encode(), ctypes.byref(function))
        if error:
            raise Refused(error, name)
        return function

    def attributes(self, name: str) -> Attributes:
        out = Attributes()
        self._library.kp_function_attributes(self.function(name), ctypes.byref(out))
        return out

    def variable(self, name: str) -> tuple[int, int]:
        address, size = ctypes.c_void_p(), ctypes.c_size_t()
        error = self._library.kp_module_global(self.handle, name.encode(), ctypes.byref(address), ctypes.byref(size))
        if error:
            raise Refused(error, name)
        return address.value or 0, size.value

    def launch(
        self,
        name: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Arg] = (),
        *,
        shared: int = 0,
        ctl: Ctl | None = None,
    ) -> Launched:
        """Packs `args` (buffers, or a struct code and a value) by CUDA's rules and runs the kernel."""
        data = b""
        for arg in args:
            code, value = ("Q", arg.address) if isinstance(arg, Buffer) else arg
            size = struct.calcsize(f"<{code}")
            data += bytes(-len(data) % size) + struct.pack(f"<{code}", value)
        ctl = ctl or Ctl()
        printed: list[bytes] = []

        def keep(_: int, text: int, length: int) -> None:
            printed.append(ctypes.string_at(text, length))

        ctl.print = Ctl._fields_[1][1](keep)
        triple = ctypes.c_uint32 * 3
        result = self._library.kp_launch(
            self.function(name),
            triple(*grid, *[1] * (3 - len(grid))),
            triple(*block, *[1] * (3 - len(block))),
            ctypes.c_uint32(shared),
            data,
            ctypes.c_size_t(len(data)),
            ctypes.byref(ctl),
        )
        return Launched(result, ctl, b"".join(printed).decode())


class Engine:
    """`root` is where it keeps compiled kernels."""

    def __init__(self, path: Path, root: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.root = root

    def load(self, *images: str | bytes) -> Module:
        """One image, or several to be linked. Raises Refused."""
        data = [image.encode() if isinstance(image, str) else image for image in images]
        pointers = (ctypes.c_char_p * len(data))(*data)
        lengths = (ctypes.c_size_t * len(data))(*[len(image) for image in data])
        handle, log = ctypes.c_void_p(), ctypes.create_string_buffer(1024)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KVMPOOL_SOFTGPU", str(self.root))
            error = self.library.kp_module_link(
                pointers, lengths, ctypes.c_size_t(len(data)), ctypes.byref(handle), log, ctypes.c_size_t(1024)
            )
        if error:
            raise Refused(error, log.value.decode())
        return Module(self.library, handle)

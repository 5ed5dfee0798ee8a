"""Programs compiled on the spot, and fatbins made by hand: what kvmpool compat is shown."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest

MAGIC, WRAPPER_MAGIC = 0xBA55ED50, 0x466243B1
PTX, ELF = 1, 2
LZ4, ZSTD = 0x2000, 0x8000


def entry(kind: int, target: int, flags: int = 0, payload: bytes = b"code" * 4, size: int | None = None) -> bytes:
    stated = len(payload) if size is None else size
    head = struct.pack("<HHIQIIHHIIIQQQ", kind, 0x101, 64, stated, 0, 0, 0, 0, target, 0, 0, flags, 0, 0)
    return head + payload


def fatbin(*entries: bytes, size: int | None = None) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", MAGIC, 1, 16, len(body) if size is None else size) + body


def wrapper() -> bytes:
    return struct.pack("<IIQQ", WRAPPER_MAGIC, 1, 0x1000, 0)


def section(name: str, data: bytes) -> str:
    """C that places `data` in an ELF section."""
    words = ",".join(str(byte) for byte in data)
    variable = "".join(letter for letter in name if letter.isalnum())
    return f'__attribute__((section("{name}"), used)) static const unsigned char {variable}[] = {{{words}}};\n'


def compiled(folder: Path, name: str, source: str, *flags: str) -> Path:
    path = folder / name
    subprocess.run(["gcc", "-x", "c", "-", "-x", "none", "-o", path, *flags], input=source, text=True, check=True)
    return path


def library(folder: Path, soname: str, functions: Sequence[str]) -> Path:
    """A shared library that has these functions and does nothing."""
    source = "".join(f"int {name}(void) {{ return 0; }}\n" for name in functions)
    return compiled(folder, soname, source, "-shared", "-fPIC", f"-Wl,-soname,{soname}")


def runtime(name: str) -> Path:
    """A library of the wheel nvidia-cuda-runtime. Skips where that is not installed."""
    try:
        files = metadata.files("nvidia-cuda-runtime") or []
    except metadata.PackageNotFoundError:
        pytest.skip("nvidia-cuda-runtime is not installed: pip install 'kvmpool[test]'")
    (found,) = (file for file in files if file.name == name)
    return Path(str(found.locate()))

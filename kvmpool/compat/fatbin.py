"""Reads which GPU code a section of fatbins holds: PTX or machine code, for which cards, compressed how.

NVIDIA does not document the layout; it is what nvcc's fatbinary writes, as softgpu/src/fatbin.c reads it too. Only
headers are looked at, and every length is checked against what is left before it is used.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

_MAGIC = 0xBA55ED50
_HEAD = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of all entries
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
_KINDS = {1: "ptx", 2: "elf", 8: "nvvm"}
_LZ4, _ZSTD = 0x2000, 0x8000
_WRAPPER = struct.Struct("<IIQQ")  # magic, version, where the fatbin is, more of it
_WRAPPER_MAGIC = 0x466243B1


class FatbinDamaged(Exception):
    """A sentence that says what is wrong, and at which byte."""


@dataclass(frozen=True, slots=True, order=True)
class Code:
    """Entries of one kind for one target; `target` 90 is sm_90 or compute_90."""

    kind: str  # "ptx", "elf", "nvvm" or "kind N"
    target: int
    compression: str  # "", "lz4" or "zstd"
    count: int

    @property
    def label(self) -> str:
        where = {"ptx": "compute_", "elf": "sm_"}.get(self.kind, "")
        words = f"{self.kind.upper()} {where}{self.target}"
        return f"{words} ({self.compression})" if self.compression else words


def read(data: bytes) -> tuple[Code, ...]:
    """All entries of a section of fatbins, counted, sorted by kind and target. Raises FatbinDamaged."""
    found: Counter[tuple[str, int, str]] = Counter()
    at = 0
    while (at := _next(data, at)) < len(data):
        body, end = _fatbin(data, at)
        for entry in _entries(data, body, end):
            found[entry] += 1
        at = end
    return tuple(sorted(Code(*key, count) for key, count in found.items()))


def wrappers(data: bytes) -> int:
    """How many fatbins a .nvFatBinSegment registers. Raises FatbinDamaged."""
    if len(data) % _WRAPPER.size:
        raise FatbinDamaged(f"its list of fatbins has {len(data)} bytes, no multiple of {_WRAPPER.size}")
    for at in range(0, len(data), _WRAPPER.size):
        if _WRAPPER.unpack_from(data, at)[0] != _WRAPPER_MAGIC:
            raise FatbinDamaged(f"its list of fatbins has no entry at byte {at}")
    return len(data) // _WRAPPER.size


def _next(data: bytes, at: int) -> int:
    """Where the next fatbin begins, behind padding of zeros; the end where none does."""
    found = data.find(struct.pack("<I", _MAGIC), at)
    end = len(data) if found < 0 else found
    if data[at:end].strip(b"\0"):
        raise FatbinDamaged(f"a fatbin should begin at byte {at}")
    return end


def _fatbin(data: bytes, at: int) -> tuple[int, int]:
    """Where the entries of the fatbin at `at` begin and end."""
    if len(data) - at < _HEAD.size:
        raise FatbinDamaged(f"the fatbin at byte {at} is cut off")
    _, _, header, size = _HEAD.unpack_from(data, at)
    if header < _HEAD.size or header > len(data) - at or size > len(data) - at - header:
        left = len(data) - at
        raise FatbinDamaged(f"the fatbin at byte {at} says it has {header} + {size} bytes, {left} are left")
    return at + header, at + header + size


def _entries(data: bytes, at: int, end: int) -> Iterator[tuple[str, int, str]]:
    while end - at >= _ENTRY.size:
        kind, _, header, size, _, _, _, _, target, _, _, flags, _, _ = _ENTRY.unpack_from(data, at)
        if header < _ENTRY.size or header > end - at or size > end - at - header:
            raise FatbinDamaged(f"the entry at byte {at} says it has {header} + {size} bytes, {end - at} are left")
        yield _name(kind), target, "zstd" if flags & _ZSTD else "lz4" if flags & _LZ4 else ""
        at += header + size
    if data[at:end].strip(b"\0"):
        raise FatbinDamaged(f"the entry at byte {at} is cut off")


def _name(kind: int) -> str:
    return _KINDS.get(kind, f"kind {kind}")

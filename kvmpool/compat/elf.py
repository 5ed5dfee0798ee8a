"""Reads of an ELF file what says how it uses CUDA: libraries, imports, names it opens itself, GPU code.

Nothing in the file is believed: a damaged one gives one line. This module does not know what the facts mean.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.construct import ConstructError
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile

from kvmpool.compat import fatbin
from kvmpool.compat.fatbin import Code, FatbinDamaged
from kvmpool.errors import KvmpoolError, NotFound

_FATBINS = (".nv_fatbin", "__nv_relfatbin")
_SEGMENT = ".nvFatBinSegment"
_SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym
_EHDR = struct.Struct("<16sHHIQQQIHHHHHH")
_SHDR_BYTES, _PHDR_BYTES = 64, 56
_TAGS_MAX = 65536  # of a dynamic segment
_NAME_MAX = 4096

# What a program hands to dlopen, with or without a path, whole strings only: first a word to search for, then the rest.
_OPEN_WORDS = (b"libcu", b"libnccl.so", b"libnvidia-ml.so")
_OPENS = re.compile(
    rb"lib(?:cuda|cudart|nvidia-ml|nccl|cu(?:blas|dnn|fft|rand|solver|sparse|tensor)\w{0,32})\.so[.\d]{0,16}(?=\0)"
)
_PATH = re.compile(rb"(?:/[\w./+-]*/)?")
_PATH_MAX = 256
# What it then asks of the driver.
_ASKS = (b"\0cuInit\0", b"\0cuGetProcAddress\0", b"\0cuGetProcAddress_v2\0")
_IMPORT = re.compile(r"(__)?cu(da)?[A-Z]\w*")
# A copy of NVIDIA's runtime: texts that only it has all of.
_RUNTIME = (
    b"\0cudaErrorCudartUnloading\0",
    b"\0CUDA driver version is insufficient for CUDA runtime version\0",
    b"\0libcuda.so.1\0",
)
# What pyelftools may raise of a file that somebody made to be wrong.
_DAMAGE = (
    ELFError, ConstructError, struct.error,
    ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError,
)  # fmt: skip


class Unreadable(KvmpoolError):
    """The file is there and is no sound ELF program; one line."""


@dataclass(frozen=True, slots=True)
class ElfFacts:
    """One ELF file. Tuples are sorted, `needed` and `search` are in the loader's order."""

    path: Path
    machine: str = ""
    soname: str = ""
    needed: tuple[str, ...] = ()
    search: tuple[str, ...] = ()  # RPATH or RUNPATH, $ORIGIN replaced
    runpath: bool = False  # RUNPATH: LD_LIBRARY_PATH comes before it
    imports: tuple[str, ...] = ()  # undefined symbols of the driver (cuX) and the runtime (cudaX, __cudaX)
    opens: tuple[str, ...] = ()  # CUDA libraries it names as texts
    asks_driver: bool = False  # it names cuInit or cuGetProcAddress as texts
    has_runtime: bool = False  # a copy of NVIDIA's CUDA runtime is inside
    code: tuple[Code, ...] = ()
    fatbins: int = 0  # as registered with the runtime
    damage: str = ""  # of its GPU code


def read(path: Path) -> ElfFacts:
    """Raises NotFound, or Unreadable with a line that says why."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise NotFound(f"{path}: there is no such file") from error
    except OSError as error:
        raise Unreadable(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return _read(path, descriptor)
    except _DAMAGE as error:
        detail = _printable(" ".join(str(error).split()))[:100] or type(error).__name__
        raise Unreadable(f"{path}: a damaged ELF file ({detail})") from error
    except (OSError, MemoryError) as error:
        raise Unreadable(f"{path}: cannot be read: {error}") from error
    finally:
        os.close(descriptor)


def _read(path: Path, descriptor: int) -> ElfFacts:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise Unreadable(f"{path}: not a file")
    head = os.pread(descriptor, _EHDR.size, 0)
    _check(path, head, status.st_size)
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as data, os.fdopen(os.dup(descriptor), "rb") as stream:
        elf = ELFFile(stream)
        return _facts(path, elf, data)


def _check(path: Path, head: bytes, size: int) -> None:
    """The header's own lengths, before anybody walks by them. Raises Unreadable."""
    if head[:2] == b"#!":
        raise Unreadable(f"{path}: a script, not an ELF program. Next: name the folder of its extension modules")
    if head[:4] != b"\x7fELF":
        raise Unreadable(f"{path}: not an ELF file")
    if len(head) < _EHDR.size:
        raise Unreadable(f"{path}: a damaged ELF file (cut off in its header)")
    if head[4:6] != b"\x02\x01":
        raise Unreadable(f"{path}: not a 64-bit little-endian ELF file: CUDA has no others")
    _, _, _, _, _, phoff, shoff, _, _, phsize, phnum, shsize, shnum, _ = _EHDR.unpack(head)
    for what, offset, each, count, wanted in (
        ("program headers", phoff, phsize, phnum, _PHDR_BYTES),
        ("section headers", shoff, shsize, shnum or bool(shoff), _SHDR_BYTES),
    ):
        if count and (each != wanted or offset > size or count * each > size - offset):
            raise Unreadable(f"{path}: a damaged ELF file (its {what} do not fit into its {size} bytes)")


def _facts(path: Path, elf: ELFFile, data: mmap.mmap) -> ElfFacts:
    if elf.num_sections() * _SHDR_BYTES > len(data):
        raise Unreadable(f"{path}: a damaged ELF file (it says it has more sections than bytes)")
    tags = _tags(elf)
    search = tags.get("DT_RUNPATH") or tags.get("DT_RPATH") or []
    soname = (tags.get("DT_SONAME") or [""])[0]
    needed = tuple(tags.get("DT_NEEDED", ()))
    code, fatbins, damage = _gpu_code(elf, data)
    return ElfFacts(
        path=path,
        machine=str(elf["e_machine"]).removeprefix("EM_"),
        soname=soname,
        needed=needed,
        search=tuple(_expand(folder, path) for line in search for folder in line.split(":") if folder),
        runpath="DT_RUNPATH" in tags,
        imports=tuple(sorted(set(_imports(elf, data)))),
        opens=tuple(sorted(set(_opened(data)) - set(needed) - {soname})),
        asks_driver=any(data.find(text) >= 0 for text in _ASKS),
        has_runtime=all(data.find(text) >= 0 for text in _RUNTIME),
        code=code,
        fatbins=fatbins,
        damage=damage,
    )


def _tags(elf: ELFFile) -> dict[str, list[str]]:
    """The texts of the dynamic segment by tag."""
    found: dict[str, list[str]] = {}
    for segment in elf.iter_segments():
        if not isinstance(segment, DynamicSegment):
            continue
        for count, tag in enumerate(segment.iter_tags()):
            if count > _TAGS_MAX:
                raise ValueError("a dynamic segment without end")
            name = str(tag.entry.d_tag)
            if name in ("DT_NEEDED", "DT_SONAME", "DT_RPATH", "DT_RUNPATH"):
                text = getattr(tag, name.removeprefix("DT_").lower())
                found.setdefault(name, []).append(_printable(str(text)))
    return found


def _opened(data: mmap.mmap) -> Iterator[str]:
    """Found by plain words first: a library may have hundreds of megabytes."""
    for word in _OPEN_WORDS:
        at = data.find(word)
        while at >= 0:
            match = _OPENS.match(data, at, min(len(data), at + _PATH_MAX))
            begin = max(0, at - _PATH_MAX)
            before = data[begin:at].rpartition(b"\0")
            if match is not None and before[1] and _PATH.fullmatch(before[2]):
                yield match[0].decode("ascii")
            at = data.find(word, at + len(word))


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text[:_NAME_MAX])


def _expand(folder: str, path: Path) -> str:
    origin = str(path.resolve().parent)
    return folder.replace("$ORIGIN", origin).replace("${ORIGIN}", origin)


def _imports(elf: ELFFile, data: mmap.mmap) -> Iterator[str]:
    """Undefined symbols whose name begins with cu. By hand: a large library has hundreds of thousands."""
    for section in elf.iter_sections("SHT_DYNSYM"):
        names = elf.get_section(section["sh_link"])
        begin, end = _span(names, data)
        first, last = _span(section, data)
        for name, _, _, where, _, _ in _SYMBOL.iter_unpack(data[first : last - (last - first) % _SYMBOL.size]):
            at = begin + name
            if where == 0 and at < end and data[at : at + 6].startswith((b"cu", b"__cuda")):
                stop = data.find(b"\0", at, min(end, at + _NAME_MAX))
                text = data[at : max(at, stop)].decode("ascii", "replace")
                if _IMPORT.fullmatch(text):
                    yield text


def _gpu_code(elf: ELFFile, data: mmap.mmap) -> tuple[tuple[Code, ...], int, str]:
    code: tuple[Code, ...] = ()
    fatbins = 0
    try:
        for section in elf.iter_sections():
            if section.name in _FATBINS:
                code += fatbin.read(_bytes(section, data))
            elif section.name == _SEGMENT:
                fatbins += fatbin.wrappers(_bytes(section, data))
    except FatbinDamaged as error:
        return code, fatbins, str(error)
    return tuple(sorted(code)), fatbins, ""


def _bytes(section: object, data: mmap.mmap) -> bytes:
    begin, end = _span(section, data)
    return data[begin:end]


def _span(section: object, data: mmap.mmap) -> tuple[int, int]:
    """Where a section lies in the file. Raises ValueError where it does not fit."""
    header = section.header  # type: ignore[attr-defined]
    begin, size = int(header["sh_offset"]), int(header["sh_size"])
    if header["sh_type"] == "SHT_NOBITS":
        return 0, 0
    if begin > len(data) or size > len(data) - begin:
        raise ValueError(f"section {_printable(str(section.name))!r} does not fit")  # type: ignore[attr-defined]
    return begin, begin + size

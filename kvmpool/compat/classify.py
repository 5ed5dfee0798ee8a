"""Decides which class an ELF file belongs to (design: the driver API is what kvmpool carries), and what to do about it.

Pure: facts in, verdict out. The classes from best to worst are in the order of Class.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvmpool.compat.elf import ElfFacts
from kvmpool.dataplane.support import ApiName, Support

_SHOWN = 6  # names in a sentence

_RUNTIME = re.compile(r"libcudart\.so(\..*)?")
_DRIVER = re.compile(r"libcuda\.so(\..*)?")
_FORWARDED = re.compile(r"lib(cublas|cudnn|cufft|curand|cusolver|cusparse|cutensor|nccl|nvjpeg|npp)\w*\.so(\..*)?")
_COMPILERS = re.compile(r"lib(nvrtc|nvJitLink|nvvm|nvptxcompiler|nvfatbin)[\w-]*\.so(\..*)?")
_RUNTIME_CALL = re.compile(r"(__)?cuda[A-Z]\w*")


class Class(IntEnum):
    """NONE: no CUDA. A: driver API. B: libcudart, dynamically. C: cuBLAS and its kind. STATIC: a runtime inside."""

    NONE = 0
    A = 1
    B = 2
    C = 3
    STATIC = 4

    @property
    def word(self) -> str:
        return {Class.NONE: "no CUDA", Class.STATIC: "static cudart"}.get(self, self.name)

    @property
    def works(self) -> bool:
        return self <= Class.A

    @property
    def next(self) -> str:
        """What a person does."""
        return _NEXT[self]


_NEXT = {
    Class.NONE: "nothing: it runs as it is",
    Class.A: "run it in a guest with a claim, or: kvmpool run --memory 4GiB -- PROGRAM",
    Class.B: "not yet: kvmpool has no libcudart for guests so far; what it does by the driver API works",
    Class.C: "not yet: these libraries are to be forwarded at their own API; what is built on the driver API works",
    Class.STATIC: "use the driver API, which works; with the runtime as a library (nvcc -cudart shared) it is class B",
}
_WHY_STATIC = (
    "NVIDIA's runtime is linked into it; at its start it makes the driver under it prove that it is NVIDIA's own, and "
    "kvmpool neither is that nor circumvents the check"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one ELF file, by itself. `reasons`: a sentence each; `unsupported`: driver names it imports that fail."""

    cls: Class
    reasons: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()  # imported, and not in the driver API that we know


def driver_symbols(names: Sequence[ApiName]) -> dict[str, Support]:
    return {symbol: row.support for row in names for symbol in row.symbols}


def classify(facts: ElfFacts, driver: Mapping[str, Support]) -> Verdict:
    """`driver`: what becomes of each symbol of the driver API."""
    if _COMPILERS.fullmatch(facts.soname):
        return Verdict(Class.NONE, ("it compiles or links GPU code, which needs no GPU",))
    found = [*_static(facts), *_forwarded(facts), *_dynamic(facts), *_driver(facts)]
    cls = max((cls for cls, _ in found), default=Class.NONE)
    called = [name for name in facts.imports if not _RUNTIME_CALL.fullmatch(name)]
    return Verdict(
        cls=cls,
        reasons=tuple(reason for of, reason in found if of is cls),
        unsupported=tuple(name for name in called if driver.get(name) is Support.UNSUPPORTED),
        unknown=tuple(name for name in called if name not in driver and cls is Class.A),
    )


def shown(names: Sequence[str]) -> str:
    """A few of them, and how many more there are."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


_Reason = tuple[Class, str]


def _static(facts: ElfFacts) -> list[_Reason]:
    return [(Class.STATIC, _WHY_STATIC)] if facts.has_runtime and not _is_nvidias(facts) else []


def _forwarded(facts: ElfFacts) -> list[_Reason]:
    if _FORWARDED.fullmatch(facts.soname):
        return [(Class.C, f"it is {facts.soname}, a library of NVIDIA's on top of the runtime")]
    return _libraries(facts, Class.C, _FORWARDED)


def _dynamic(facts: ElfFacts) -> list[_Reason]:
    if _RUNTIME.fullmatch(facts.soname):
        return [(Class.B, f"it is {facts.soname}, NVIDIA's runtime")]
    reasons = _libraries(facts, Class.B, _RUNTIME)
    calls = [name for name in facts.imports if _RUNTIME_CALL.fullmatch(name)]
    if calls and not facts.has_runtime:
        reasons.append((Class.B, f"it imports the runtime's {shown(calls)}"))
    return reasons


def _driver(facts: ElfFacts) -> list[_Reason]:
    reasons = _libraries(facts, Class.A, _DRIVER)
    calls = [name for name in facts.imports if not _RUNTIME_CALL.fullmatch(name)]
    if calls and (reasons or not _names(facts.needed, _FORWARDED)):
        reasons.append((Class.A, f"it imports the driver's {shown(calls)}"))
    if not reasons and facts.asks_driver:
        reasons.append((Class.A, "it looks up the driver's functions by name"))
    return reasons


def _libraries(facts: ElfFacts, cls: Class, which: re.Pattern[str]) -> list[_Reason]:
    reasons = []
    if linked := _names(facts.needed, which):
        reasons.append((cls, f"it is linked with {shown(linked)}"))
    if opened := _names(facts.opens, which):
        reasons.append((cls, f"it opens {shown(opened)} itself"))
    return reasons


def _names(names: Sequence[str], which: re.Pattern[str]) -> list[str]:
    return [name for name in names if which.fullmatch(name)]


def _is_nvidias(facts: ElfFacts) -> bool:
    return bool(_RUNTIME.fullmatch(facts.soname) or _FORWARDED.fullmatch(facts.soname))

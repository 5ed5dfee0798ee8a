"""Looks at programs with the libraries they are linked with, and at all extension modules of a folder.

A program's class is the worst of its own and its libraries'. Libraries are found as the loader finds them, as far as
the files here tell; NVIDIA's own are judged by their names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvmpool.compat.classify import Class, Verdict, classify
from kvmpool.compat.elf import ElfFacts, Unreadable, read
from kvmpool.dataplane.support import Support
from kvmpool.errors import KvmpoolError, NotFound

_DEFAULT = tuple(
    Path(root, folder) for root in ("/", "/usr", "/usr/local") for folder in ("lib/x86_64-linux-gnu", "lib64", "lib")
)
_FILES_MAX = 4096  # of one program's libraries, or of a folder


@dataclass(frozen=True, slots=True)
class Report:
    """What is known of one file that was asked for. `libraries`: those it is linked with that use CUDA."""

    facts: ElfFacts
    verdict: Verdict
    libraries: tuple[tuple[ElfFacts, Verdict], ...] = ()
    unread: tuple[str, ...] = ()  # libraries that could not be read, a line each

    @property
    def cls(self) -> Class:
        return max((self.verdict.cls, *(verdict.cls for _, verdict in self.libraries)))

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is of its class; a library's reasons begin with its name."""
        own = self.verdict.reasons if self.verdict.cls is self.cls else ()
        theirs = tuple(
            f"{facts.path.name}: {reason}"
            for facts, verdict in self.libraries
            if verdict.cls is self.cls
            for reason in verdict.reasons
        )
        return own + theirs

    @property
    def unsupported(self) -> tuple[str, ...]:
        found = {name for verdict in (self.verdict, *(v for _, v in self.libraries)) for name in verdict.unsupported}
        return tuple(sorted(found))


def programs(path: Path) -> list[Path]:
    """The file itself; of a folder, the shared libraries below it, sorted. Raises NotFound where it has none."""
    if not path.is_dir():
        return [path]
    found = sorted(_below(path))
    if not found:
        raise NotFound(f"{path}: no shared library (*.so) below it")
    return found


def look(path: Path, driver: Mapping[str, Support], library_path: str = "") -> Report:
    """One file with its libraries. Raises NotFound, Unreadable. `library_path`: as LD_LIBRARY_PATH."""
    facts = read(path)
    libraries = []
    unread: list[str] = []
    for each in _libraries(facts, library_path, unread):
        verdict = classify(each, driver)
        if verdict.cls is not Class.NONE:
            libraries.append((each, verdict))
    return Report(facts, classify(facts, driver), tuple(libraries), tuple(unread))


def _below(folder: Path) -> Iterator[Path]:
    count = 0
    for root, folders, files in os.walk(folder):
        folders.sort()
        for name in files:
            path = Path(root, name)
            if (name.endswith(".so") or ".so." in name) and path.is_file() and not path.is_symlink():
                count += 1
                if count > _FILES_MAX:
                    raise Unreadable(f"{folder}: over {_FILES_MAX} shared libraries. Next: name a folder below it")
                yield path


def _libraries(program: ElfFacts, library_path: str, unread: list[str]) -> Iterator[ElfFacts]:
    """All it is linked with, directly or not, each once. NVIDIA's own are not looked into."""
    seen = {str(program.path.resolve())}
    waiting = [program]
    while waiting and len(seen) < _FILES_MAX:
        facts = waiting.pop(0)
        for name in facts.needed:
            found = _find(name, facts, program, library_path)
            if found is None or str(found) in seen or _is_nvidias(name):
                continue
            seen.add(str(found))
            try:
                library = read(found)
            except KvmpoolError as error:
                unread.append(str(error))
                continue
            yield library
            waiting.append(library)


def _find(name: str, facts: ElfFacts, program: ElfFacts, library_path: str) -> Path | None:
    """Where ld.so(8) finds it: RPATH (also the program's), LD_LIBRARY_PATH, RUNPATH, the system's folders."""
    if "/" in name:
        folders = [Path(name).parent]
        name = Path(name).name
    else:
        before = [each.search for each in (facts, program) if not each.runpath]
        named = [folder for folder in library_path.split(":") if folder]
        words = [*(folder for search in before for folder in search), *named, *(facts.search if facts.runpath else ())]
        folders = [*map(Path, words), *_DEFAULT]
    for folder in folders:
        try:
            path = (folder / name).resolve()
            if path.is_file():
                return path
        except (OSError, RuntimeError, ValueError):
            continue
    return None


def _is_nvidias(name: str) -> bool:
    return name.startswith(("libcuda.", "libcudart.", "libcublas", "libcudnn", "libcufft", "libnvrtc", "libnvJitLink"))

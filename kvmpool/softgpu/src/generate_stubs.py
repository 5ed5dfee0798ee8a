"""Writes C for a library's whole list of names: a weak stub for each, and the table that cuGetProcAddress looks in.

    generate_stubs.py cuda cuda_names.txt OUT.c
    generate_stubs.py nvml nvml_names.txt OUT.c

A name that another C file defines is not weak there, so the linker takes that one: no list says which are done.
"""

from __future__ import annotations

import sys
from pathlib import Path

CUDA_NOT_SUPPORTED = 801
NVML_NOT_SUPPORTED = 3


def rows_of(text: str) -> list[list[str]]:
    """The words of each line that is no comment."""
    return [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def stub(name: str, code: int) -> str:
    """A definition that any other replaces. It takes whatever it is given: the caller cleans up (System V, AAPCS)."""
    return f'__attribute__((weak, visibility("default"))) int {name}(void)\n{{\n\treturn {code};\n}}\n'


def cuda_source(rows: list[list[str]]) -> str:
    """Stubs, then `sg_symbols[]` sorted by the asked name and version."""
    names, entries = [], []
    for elf, asked, version, *suffix in rows:
        names.append(elf)
        entries.append((asked, int(version), 0, elf))
        if suffix:
            names.append(elf + suffix[0])
            entries.append((asked, int(version), 1, elf + suffix[0]))
    stubs = "\n".join(stub(name, CUDA_NOT_SUPPORTED) for name in sorted(set(names)))
    table = "".join(
        f'\t{{"{asked}", {version}, {per_thread}, (void *){elf}}},\n'
        for asked, version, per_thread, elf in sorted(entries)
    )
    head = '#include "cuda_symbols.h"\n\n'
    count = f"const unsigned sg_symbol_count = {len(entries)};\n"
    return f"{head}{stubs}\nconst struct sg_symbol sg_symbols[] = {{\n{table}}};\n{count}"


def nvml_source(rows: list[list[str]]) -> str:
    """Stubs only: NVML is looked up by dlsym."""
    return "\n".join(stub(row[0], NVML_NOT_SUPPORTED) for row in rows)


def main() -> None:
    """See the module's docstring."""
    kind, source, target = sys.argv[1:]
    rows = rows_of(Path(source).read_text())
    text = cuda_source(rows) if kind == "cuda" else nvml_source(rows)
    Path(target).write_text(text)


if __name__ == "__main__":
    main()

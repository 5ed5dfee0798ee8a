"""`python -m tests.bench [SECTION...]`: every section, or those named. Exit code 1 where a goal is missed."""

from __future__ import annotations

import sys
from importlib import import_module

SECTIONS = ("hooks", "dataplane", "failover")


def main() -> int:
    wanted = sys.argv[1:] or list(SECTIONS)
    unknown = [s for s in wanted if s not in SECTIONS]
    if unknown:
        print(f"bench: no section {unknown[0]!r}; there are {', '.join(SECTIONS)}", file=sys.stderr)
        return 2
    met = []
    for section in wanted:
        print(f"== {section}")
        met.append(import_module(f"tests.bench.{section}").run())
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())

"""The table of the driver API as this installation has it. `python -m kvmpool.compat.support`: docs/support.md."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from kvmpool.dataplane import calltable
from kvmpool.dataplane.support import ApiName, api_names, markdown
from kvmpool.errors import NotFound

_PACKAGE = Path(__file__).parents[1]
_CALLS = _PACKAGE / "dataplane/calls.toml"
_VERSIONS = _PACKAGE / "softgpu/src/cuda_names.txt"  # of every name, held to NVIDIA's header by a test


@cache
def driver_api() -> tuple[ApiName, ...]:
    """Every name, sorted. Raises NotFound where the installation lacks its tables."""
    try:
        return api_names(calltable.load(_CALLS), _versions(_VERSIONS.read_text()))
    except OSError as error:
        missing = f"{error.filename} is missing from this installation"
        raise NotFound(f"{missing}. Next: install kvmpool again") from error


def _versions(text: str) -> dict[str, int]:
    """Symbol -> CUDA version, of lines `SYMBOL NAME VERSION [SUFFIX]`."""
    found = {}
    for line in text.splitlines():
        if line.startswith("cu"):
            symbol, _, version, *suffix = line.split()
            found[symbol] = int(version)
            if suffix:
                found[symbol + suffix[0]] = int(version)
    return found


if __name__ == "__main__":
    sys.stdout.write(markdown(driver_api()))

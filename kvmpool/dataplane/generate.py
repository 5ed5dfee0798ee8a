"""Makes the C of both halves of the data plane from calls.toml, at build time: `generate.py calls.toml OUTDIR`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[2])  # meson runs this file itself, before anything is installed

from kvmpool.dataplane import calltable, emit_roundtrip, emit_session, emit_shim  # noqa: E402

OUTPUTS = {
    "calls.h": emit_session.op_header,
    "shim_api.h": emit_shim.api_header,
    "shim_stubs.c": emit_shim.stubs,
    "shim_exports.c": emit_shim.exports,
    "session_driver.h": emit_session.driver_header,
    "session_handlers.c": emit_session.handlers,
    "roundtrip_cases.c": emit_roundtrip.cases,
}


def main(arguments: list[str]) -> int:
    table_path, out = Path(arguments[0]), Path(arguments[1])
    try:
        table = calltable.load(table_path)
    except (calltable.TableInvalid, KeyError, ValueError) as error:
        print(f"{table_path}: {error}", file=sys.stderr)
        return 1
    for name, emit in OUTPUTS.items():
        (out / name).write_text(emit(table))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

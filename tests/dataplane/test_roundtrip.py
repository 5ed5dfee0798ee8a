"""Every op of calls.toml goes from the shim's encoder to the session's decoder and back unchanged; cut, it is refused.

What is tried is made by the generator (kvmpool/dataplane/emit_roundtrip.py), so a new op is tried from its first day.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvmpool.dataplane import calltable
from tests.dataplane import shim

pytestmark = pytest.mark.native

SHIM = ("context", "global", "link", "objects", "primary", "space", "thread")
SESSION = ("objects", "print", "read")
SHARED = ("handles", "ring", "window")
CHECKED = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def build(folder: Path, made: Path, *flags: str) -> Path:
    """The two halves with the codecs of `made`, a folder of generated C."""
    names = [f"shim_{name}" for name in SHIM] + [f"session_{name}" for name in SESSION] + list(SHARED)
    sources = [shim.SOURCES / f"{name}.c" for name in names]
    sources += [made / f"{name}.c" for name in ("shim_stubs", "session_handlers", "roundtrip_cases")]
    sources += [shim.NATIVE / "roundtrip.c", shim.NATIVE / "roundtrip_session.c"]
    program = folder / "roundtrip"
    command: list[str | Path] = [
        "gcc",
        *shim.WARNINGS,
        *flags,
        f"-I{made}",
        f"-I{shim.NATIVE}",
        *sources,
        "-o",
        program,
        "-lpthread",
    ]
    subprocess.run(command, check=True)
    return program


def run(program: Path, seed: int) -> tuple[int, str]:
    environment = {"ASAN_OPTIONS": "detect_leaks=0"}  # a session never gives its memory back
    done = subprocess.run(
        [program, str(seed)], capture_output=True, text=True, errors="replace", env=environment, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_each_op_arrives_as_it_was_sent_and_is_refused_where_it_is_cut(tmp_path: Path) -> None:
    program = build(tmp_path, shim.generated(tmp_path), *CHECKED)
    ops = len(calltable.load(shim.DATAPLANE / "calls.toml").wire())
    for seed in (1, 20):
        code, words = run(program, seed)
        assert (code, words) == (0, f"{ops} ops, 0 wrong\n"), words[-4000:]


@dataclass(frozen=True)
class Plant:
    """A bug in a copy of the generated C: from the line that begins a function on, the first `old` becomes `new`."""

    file: str
    function: str
    old: str
    new: str
    op: str


PLANTS = (
    Plant("shim_stubs.c", "kp_cuMemsetD32Async(", "(uint64_t)N", "(uint32_t)N", "cuMemsetD32Async"),
    Plant("session_handlers.c", "run_cuMemsetD2D8Async(", "(size_t)w->in", "(uint16_t)w->in", "cuMemsetD2D8Async"),
    Plant("session_handlers.c", "run_cuCtxGetLimit(", "sizeof pvalue", "2", "cuCtxGetLimit"),
    Plant("shim_stubs.c", "kp_cuModuleGetGlobal_v2(", "sizeof *bytes", "4", "cuModuleGetGlobal_v2"),
    Plant("session_handlers.c", '"launch"', ".tail = KP_TAIL_BYTES", ".tail = KP_TAIL_NONE", "launch"),
    Plant("session_handlers.c", '"box_in"', ".numbers = 8", ".numbers = 7", "box_in"),
    Plant("session_handlers.c", '"function_get"', ".tail = KP_TAIL_TEXT", ".tail = KP_TAIL_BYTES", "function_get"),
)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: f"{plant.op}: {plant.new}")
def test_a_bug_in_a_codec_is_found(plant: Plant, tmp_path: Path) -> None:
    made = shim.generated(tmp_path)
    file = made / plant.file
    before, function, behind = file.read_text().rpartition(plant.function)
    assert plant.old in behind, f"{plant.function} has no {plant.old}: choose another place for the bug"
    file.write_text(before + function + behind.replace(plant.old, plant.new, 1))
    code, words = run(build(tmp_path, made, "-O0"), 1)
    assert code == 1, words[-4000:]
    assert {line.split(":")[0] for line in words.splitlines()[:-1]} == {plant.op}

"""Coverage-guided garbage: frames, hellos and whole sessions. Longer where KVMPOOL_FUZZ_S says so (CI: 60)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.dataplane import frames, shim

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(shutil.which("clang") is None, reason="clang is not installed (libFuzzer)"),
]

SESSION = (
    "session_arena",
    "session_copy",
    "session_image",
    "session_library",
    "session_linker",
    "session_memory",
    "session_meter",
    "session_module",
    "session_objects",
    "session_own",
    "session_observe",
    "session_read",
    "session_wait",
)


def fuzz(tmp_path: Path, name: str, sources: list[Path], seeds: list[bytes], length: int) -> int:
    """Runs the target; returns how many inputs it took. An AssertionError carries the sanitizer's words."""
    program, corpus = tmp_path / name, tmp_path / "corpus"
    flags = ["-std=gnu11", "-O1", "-g", f"-I{shim.SOURCES}", f"-I{tmp_path}/generated", "-fno-sanitize-recover=all"]
    flags.append("-fsanitize=fuzzer,address,undefined")
    target = str(shim.NATIVE / f"{name}.c")
    command: list[str | Path] = [
        "clang",
        *flags,
        "-fsanitize=fuzzer,address,undefined",
        "-o",
        program,
        target,
        *sources,
        "-lpthread",
    ]
    subprocess.run(command, check=True)
    corpus.mkdir()
    for number, seed in enumerate(seeds):
        (corpus / str(number)).write_bytes(seed)
    seconds = os.environ.get("KVMPOOL_FUZZ_S", "3")
    options = [f"-max_total_time={seconds}", f"-max_len={length}", "-timeout=10", f"-artifact_prefix={tmp_path}/"]
    done = subprocess.run(
        [program, *options, "-print_final_stats=1", corpus],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return int(done.stderr.partition("stat::number_of_executed_units:")[2].split()[0])


def test_fuzz_frame(tmp_path: Path) -> None:
    assert fuzz(tmp_path, "fuzz_frame", [], [frames.life(), frames.hello()], 2000) > 1000


def test_fuzz_hello(tmp_path: Path) -> None:
    seeds = [frames.hello()[16:], frames.hello(claim=b"a-b_9")[16:], bytes(260), b"\xff\xff\xff\xff" + bytes(256)]
    seeds.append(bytes(1200))  # of figures
    assert fuzz(tmp_path, "fuzz_hello", [], seeds, 1300) > 1000


def test_fuzz_ring(tmp_path: Path) -> None:
    moves = [
        b"\xff\xff\xff\xf0" * 2 + bytes([1, 0, 1, 0]) * 4,
        bytes(8) + bytes([2, 0, 0, 0, 0x80, 0, 0, 0, 40, 0, 0, 0, 9]),
    ]
    assert fuzz(tmp_path, "fuzz_ring", [], moves, 400) > 1000


def test_fuzz_session(tmp_path: Path) -> None:
    made = shim.generated(tmp_path)
    sources = [
        shim.SOURCES / f"{name}.c"
        for name in (*SESSION, "frame", "handles", "account", "turns", "cache", "blake2b", "ring", "window")
    ]
    sources.append(made / "session_handlers.c")
    assert fuzz(tmp_path, "fuzz_session", sources, [frames.life(), *frames.each_call()], 2000) > 500

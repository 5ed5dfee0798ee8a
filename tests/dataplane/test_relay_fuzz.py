"""Coverage-guided garbage: relay and worker take any bytes. Longer where KVMPOOL_FUZZ_S says so (CI: 60)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.dataplane.plane import NATIVE, SHARED, SOURCES, hello

pytestmark = pytest.mark.native

TARGETS = {
    "fuzz_relay": ("relay_window.c",),
    "fuzz_worker": ("account.c", "confine.c", "confine_calls.c", "confine_cgroup.c", "turns.c", "cache.c", "blake2b.c"),
}
SEEDS = {
    "fuzz_relay": [b"\x00\xff" + hello(), b"\x01\x10" + hello(), b"\x00\x10" + hello(token="0123456789abcdef" * 2),
                   b"\x02\x00POINT gpu0 1 64\n/nowhere/x.sock", b"\x02\x00UNPOINT gpu1\nbecause", b"\x02\x00STATUS",
                   b"\x02\x00FOLLOW 1 2", b"\x02\x00CLAIM gpu3", b"\x02\x00CLOSE"],
    "fuzz_worker": [b"\x00STATUS", b"\x00STOP", b"\x00RELAY 1", b"\x00RELAY 2", b"\x01KEEPALIVE",
                    b"\x03SESSION\n" + hello()[16:], b"\x02SESSION\n" + hello()[16:],
                    b"\x0bSESSION 1048576 4096 " + b"0f" * 16 + b"\n" + hello()[16:]],
}  # fmt: skip


@pytest.mark.skipif(shutil.which("clang") is None, reason="clang is not installed (libFuzzer)")
@pytest.mark.parametrize("name", TARGETS)
def test_fuzz(name: str, tmp_path: Path) -> None:
    seconds = os.environ.get("KVMPOOL_FUZZ_S", "3")
    program = tmp_path / name
    shared = [str(SOURCES / file) for file in (*SHARED, *TARGETS[name]) if file != "log.c"]
    flags = ["-std=gnu11", "-O1", "-g", f"-I{SOURCES}", "-fno-sanitize-recover=all"]
    flags.append("-fsanitize=fuzzer,address,undefined")
    sources = [str(NATIVE / f"{name}.c"), str(NATIVE / "quiet_log.c"), *shared]
    subprocess.run(["clang", *flags, "-o", str(program), *sources], check=True)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(SEEDS[name]):
        (corpus / str(number)).write_bytes(seed)
    options = [f"-max_total_time={seconds}", "-max_len=600", "-timeout=5", f"-artifact_prefix={tmp_path}/"]
    command = [str(program), *options, "-print_final_stats=1", str(corpus)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    executed = int(done.stderr.partition("stat::number_of_executed_units:")[2].split()[0])
    print(f"{name}: {executed} inputs in {seconds} s")
    assert executed > 1000

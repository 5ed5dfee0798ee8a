"""The engine's own C under AddressSanitizer and UBSan: the tests of faults and images again, in such a build."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.softgpu.nvrtc import library_path

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "-fsanitize=address,undefined -fno-omit-frame-pointer -fno-sanitize-recover=undefined"


def _runtime(name: str) -> str:
    done = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize("tests", ["test_engine_faults.py", "test_engine_images.py"])
def test_no_sanitizer_speaks(tests: str) -> None:
    environment = {
        **os.environ,
        "KVMPOOL_TEST_CFLAGS": FLAGS,
        "LD_PRELOAD": f"{_runtime('libasan.so')} {_runtime('libubsan.so')}",
        "LD_LIBRARY_PATH": str(library_path().parent),  # under ASan dlopen forgets NVRTC's RPATH
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"tests/softgpu/{tests}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "passed" in done.stdout
    assert "runtime error" not in done.stderr

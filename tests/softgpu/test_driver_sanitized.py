"""The driver's and NVML's cases again, with both libraries and the programs built with ASan and UBSan."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.softgpu.driver import REPO

pytestmark = [pytest.mark.native, pytest.mark.slow, pytest.mark.timeout(600)]

FLAGS = "-fsanitize=address,undefined"
TESTS = tuple(f"tests/softgpu/test_{name}.py" for name in ("driver_api", "driver_faults", "nvml_pynvml"))


def runtime(name: str) -> str:
    done = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_driver_s_cases_pass_under_asan_and_ubsan(tmp_path: Path) -> None:
    path = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    tools = [shutil.which(name, path=path["PATH"]) for name in ("meson", "ninja")]
    if None in tools or os.environ.get("KVMPOOL_SOFTGPU_LIBRARIES"):
        pytest.skip("meson or ninja is missing, or another build is under test")
    meson, ninja = (str(tool) for tool in tools)
    build = tmp_path / "build"
    options = ["--buildtype=debug", "-Db_sanitize=address,undefined", "-Db_lundef=false"]
    setup = [meson, "setup", str(build), str(REPO), *options]
    subprocess.run(setup, check=True, env=path, stdout=subprocess.DEVNULL, timeout=120)
    targets = [f"kvmpool/softgpu/{name}" for name in ("libcuda.so.1", "libnvidia-ml.so.1")]
    subprocess.run([ninja, "-C", str(build), *targets], check=True, env=path, stdout=subprocess.DEVNULL, timeout=240)
    environment = {
        **os.environ,
        "KVMPOOL_SOFTGPU_LIBRARIES": str(build / "kvmpool/softgpu"),
        "KVMPOOL_TEST_CFLAGS": FLAGS,
        "KVMPOOL_TEST_PRELOAD": " ".join(map(runtime, ("libasan.so", "libubsan.so"))),
        "UBSAN_OPTIONS": "halt_on_error=1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-8000:]

"""`pip install .` and `pip install -e .` into environments of their own: what is in the wheel, and that it runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import kvmpool
from kvmpool import native

pytestmark = [pytest.mark.native, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
BUILT = {f"_native/{wheel}" for wheel, _ in native._NATIVE.values()}
# Runs on soft cards, with nothing of the checkout in reach: translator, headers, libraries and sample programs.
PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from kvmpool.lab import images
from kvmpool.native import native
from kvmpool.softgpu import state
root = Path(sys.argv[1])
state.create(root, [state.CardSpec(0, "GPU-5f0f0000-0000-4000-8000-000000000000", "0000:41:00.0", "Soft GPU", 1024)])
for path in images.programs():
    (root / path.name).symlink_to(path)
soft = {"LD_LIBRARY_PATH": str(native("softgpu-cuda").parent), "KVMPOOL_SOFTGPU": str(root)}
print(subprocess.run([root / "vectorAdd"], env={**os.environ, **soft}, text=True, stdout=subprocess.PIPE).stdout)
"""
PATHS = """
from kvmpool import native
for name in native._NATIVE:
    print(native.native(name))
for folder, name in (("hooks", "hook.py"), ("hooks", "qemu"), ("xml", "claim.rng"), ("systemd", "kvmpoold.service")):
    print(native.data(folder, name))
"""


@dataclass
class Installed:
    """A virtual environment with kvmpool in it; the packages kvmpool needs are those of this run's environment."""

    folder: Path

    def run(self, program: str, *words: str) -> str:
        """A program of the environment, where the checkout is not in reach. Its exit status must be 0."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("KVMPOOL_", "PYTHON"))}
        cache = {"KVMPOOL_CACHE": str(self.folder / "cache")}
        done = subprocess.run(
            [self.folder / "bin" / program, *words],
            cwd="/", env=clean | cache, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{program} {words}: {done.stdout}{done.stderr}"
        return done.stdout

    def python(self, text: str, *words: str) -> str:
        return self.run("python", "-c", text, *words)


def installed(folder: Path, *what: str) -> Installed:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    ours = sysconfig.get_path("purelib", vars={"base": str(folder)})
    Path(ours, "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")  # behind the environment's own
    # else kvmpool of this run's own environment, seen through needed.pth, is good enough for pip
    options = ("--ignore-installed", "--no-deps", "--no-build-isolation")
    pip("--python", str(folder / "bin/python"), "install", *options, *what)
    return Installed(folder)


def pip(*words: str) -> None:
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    settings = f"--config-settings=build-dir={folder / 'build'}"
    pip("wheel", "--no-deps", "--no-build-isolation", settings, "-w", str(folder), str(ROOT))
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def from_wheel(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return installed(tmp_path_factory.mktemp("venv") / "v", "--no-index", str(wheel))


def tracked(*paths: str) -> set[str]:
    """Of the checkout: what git lists, and is there."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "--", *paths]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return {name for name in names if (ROOT / name).exists()}


def test_the_wheel_has_what_runs_and_nothing_of_the_build(wheel: Path) -> None:
    package = {n.removeprefix("kvmpool/") for n in zipfile.ZipFile(wheel).namelist() if n.startswith("kvmpool/")}
    sources = {name.removeprefix("kvmpool/") for name in tracked("kvmpool")}
    parts = {name for name in sources if name.startswith(("dataplane/src/", "softgpu/src/")) or "meson.build" in name}
    read = {name for name in parts if re.fullmatch(r"softgpu/src/(rt\w*\.h|cuda_names\.txt)", name)}
    data = {f"_data/{name}" for name in tracked("hooks", "xml", "systemd")}
    assert "softgpu/src/rt.h" in read, "generated kernels include it"
    assert package - {name for name in package if name.endswith("/")} == (sources - parts) | read | data | BUILT


def test_the_wheel_s_programs_are_found_and_run_without_the_checkout(from_wheel: Installed, tmp_path: Path) -> None:
    assert from_wheel.run("kvmpool", "--version").split()[-1] == kvmpool.__version__
    assert "--config" in from_wheel.run("kvmpoold", "--help")
    found = from_wheel.python(PATHS).split()
    assert len(found) == len(BUILT) + 4
    assert [path for path in found if not path.startswith(str(from_wheel.folder))] == []
    for program in ("worker", "relay", "acceptor"):
        path = next(path for path in found if path.endswith(f"kvmpool-{program}"))
        assert os.access(path, os.X_OK)
    assert "50-kvmpool" in from_wheel.run("kvmpool", "host", "join", "--root", str(tmp_path), "--dry-run")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_a_cuda_program_runs_on_the_wheel_s_software_gpu(from_wheel: Installed, tmp_path: Path) -> None:
    assert "PASS" in from_wheel.python(PROGRAM, str(tmp_path))


def test_an_editable_installation_runs_the_checkout(tmp_path: Path) -> None:
    editable = installed(tmp_path / "v", f"--config-settings=build-dir={tmp_path / 'build'}", "-e", str(ROOT))
    where = editable.python("import kvmpool.core.model; print(kvmpool.core.model.__file__)").strip()
    assert where == str(ROOT / "kvmpool/core/model.py")
    assert len(editable.python(PATHS).split()) == len(BUILT) + 4
    assert editable.run("kvmpool", "--version").split()[-1] == kvmpool.__version__
    (tmp_path / "soft").mkdir()
    assert "PASS" in editable.python(PROGRAM, str(tmp_path / "soft"))

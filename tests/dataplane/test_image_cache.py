"""The cache of images that a worker and its sessions share, and the hash that names them."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from tests.dataplane.shim import FLAVOURS, NATIVE, SOURCES, WARNINGS

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("cache") / "cache_cases"
    sources = [NATIVE / "cache_cases.c", SOURCES / "blake2b.c"]
    command = ["gcc", *WARNINGS, *FLAVOURS["checked"], *sources, "-o", built, "-lpthread"]
    subprocess.run([str(word) for word in command], check=True, timeout=120)
    return built


def test_one_session_keeps_for_all_and_is_not_trusted(program: Path) -> None:
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 256, 1000, 65536])
def test_the_hash_is_blake2b(program: Path, tmp_path: Path, size: int) -> None:
    data = bytes(i * 7 % 251 for i in range(size))
    (tmp_path / "data").write_bytes(data)
    ours = subprocess.run([program, "hash", tmp_path / "data"], capture_output=True, text=True, check=True).stdout
    assert ours == hashlib.blake2b(data, digest_size=32).hexdigest()

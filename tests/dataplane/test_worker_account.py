"""A claim's memory is counted over its processes: never past the limit, and nothing is left of one that was killed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.dataplane.plane import FLAVOURS, NATIVE, SOURCES, WARNINGS

pytestmark = pytest.mark.native


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_limit_holds_in_a_race_and_over_kills(tmp_path: Path, flavour: str) -> None:
    program = tmp_path / "account_race"
    sources = [NATIVE / "account_race.c", SOURCES / "account.c"]
    subprocess.run(["gcc", *WARNINGS, *FLAVOURS[flavour], "-o", program, *sources], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ok: ")

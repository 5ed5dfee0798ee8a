"""`kvmpool lab demo` tells its story, leaves nothing, and does not call a story good that went wrong."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvmpool.lab.folder import Folder
from kvmpool.lab.guests import Ran
from kvmpool.lab.pool import Lab
from kvmpool.lab.story import Wrong, tell
from kvmpool.softgpu.faults import Fault

pytestmark = pytest.mark.e2e


def test_the_demo_tells_of_a_failover_in_about_twenty_lines_and_leaves_nothing(lab_folder: Path) -> None:
    began = time.monotonic()
    demo = [sys.executable, "-m", "kvmpool.cli.main", "lab", "demo", "--dir", str(lab_folder)]
    done = subprocess.run(demo, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - began < 90
    lines = done.stdout.splitlines()
    assert 15 <= len(lines) <= 25
    for words in ("binding vm0/gpu0#1 on h0/0000:41", "Xid 79", "binding vm0/gpu0#2 on h0/0000:42", "is left"):
        assert sum(words in line for line in lines) == 1, done.stdout
    assert sum("PASS (1048576" in line for line in lines) == 2
    assert sum("PASS (256x256" in line for line in lines) == 2
    assert not lab_folder.exists()


@dataclass(frozen=True, slots=True)
class _UnbreakableLab(Lab):
    def fault(self, card: str, words: str) -> Fault:
        return Fault.parse(words)


@dataclass(frozen=True, slots=True)
class _MiscalculatingLab(Lab):
    def run(self, name: str, script: str, timeout_s: float = 60.0) -> Ran:
        ran = Lab.run(self, name, script, timeout_s)
        return replace(ran, code=1) if script == "vectorAdd" else ran


def test_a_missing_failover_is_wrong(lab_folder: Path) -> None:
    with pytest.raises(Wrong, match="was not moved within"):
        tell(_UnbreakableLab(Folder(lab_folder)), lambda _: None)
    assert not lab_folder.exists()


def test_a_wrong_result_is_wrong(lab_folder: Path) -> None:
    with pytest.raises(Wrong, match="vectorAdd: exit 1"):
        tell(_MiscalculatingLab(Folder(lab_folder)), lambda _: None)
    assert not lab_folder.exists()

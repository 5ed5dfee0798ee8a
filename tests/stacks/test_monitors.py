"""nvitop and gpustat, as they come from PyPI, in a process of the guest: they show the claim, in 80 columns."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dataplane.plane import VIRTUAL_UUID, status, wait_until
from tests.dataplane.remote import MEMORY_MIB, Remote, built, remote
from tests.dataplane.test_guest_nvml import BUSY, HOLD, WORK, running, said
from tests.softgpu.nvrtc import ptx
from tests.stacks.stack import python

pytestmark = [pytest.mark.native, pytest.mark.stacks]

WIDTH = 80
HELD_MIB = 64  # by test_guest_nvml.HOLD
TERMINAL = {"COLUMNS": str(WIDTH), "LINES": "40", "TERM": "xterm", "LC_ALL": "C.UTF-8"}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Remote]:
    built("shim-nvml")
    with remote(tmp_path) as running:
        yield running


def monitor(place: Remote, name: str, *arguments: str) -> str:
    """What that program of the environment prints, without an error and without a line that is too wide."""
    program = python(name).with_name(name)
    done = place.guest([program, *arguments], 60, **TERMINAL)
    assert (done.code, done.errors) == (0, ""), done
    assert "--json" in arguments or max(map(len, done.lines)) <= WIDTH, done.out
    return done.out


def held_mib(place: Remote) -> int:
    """What the claim's account says: all that the holder has, its context too."""
    used = int(status(place.plane.worker_socket())["memory_used"])
    assert used >= HELD_MIB << 20
    return used >> 20


def told(place: Remote) -> dict[str, Any]:
    """gpustat's own words for a program: of the one card."""
    [card] = json.loads(monitor(place, "gpustat", "--json"))["gpus"]
    assert isinstance(card, dict)
    return card


def test_gpustat_shows_the_claim_and_who_uses_it(place: Remote) -> None:
    with running(place, HOLD + "sys.stdin.read()") as holder:
        assert said(holder) == "held"
        shown = monitor(place, "gpustat", "--show-pid", "--no-color")
        card, held = told(place), held_mib(place)
    [line] = [line for line in shown.splitlines() if line.startswith("[0]")]
    assert re.fullmatch(rf"\[0\] SoftGPU 0 \| \?\?°C, +0 % \| +{held} / +{MEMORY_MIB} MB \|.*", line), shown
    assert line.endswith(f"/{holder.pid}({held}M)")
    assert (card["uuid"], card["memory.total"]) == (f"GPU-{VIRTUAL_UUID}", MEMORY_MIB)
    assert [process["pid"] for process in card["processes"]] == [holder.pid]


def test_nvitop_shows_the_claim_and_who_uses_it(place: Remote) -> None:
    with running(place, HOLD + "sys.stdin.read()") as holder:
        assert said(holder) == "held"
        shown, held = monitor(place, "nvitop", "--once", "--no-unicode"), held_mib(place)
    assert re.search(r"^\| +0  SoftGPU 0 +N/A \| 00000000:C0:00.0 Off", shown, re.M), shown
    assert re.search(rf" {held}\.0+MiB / {MEMORY_MIB}\.0MiB", shown), shown
    assert re.search(rf"^\| +0 +{holder.pid} +C +\w+ +{held}\.0+MiB ", shown, re.M), shown


def test_both_show_how_busy_the_claim_is(place: Remote, tmp_path: Path) -> None:
    kernel = tmp_path / "busy.ptx"
    kernel.write_text(ptx(BUSY))

    def busy() -> bool:
        seen = re.search(r"(\d+)% +Default", monitor(place, "nvitop", "--once", "--no-unicode"))
        return int(told(place)["utilization.gpu"]) > 10 and seen is not None and int(seen[1]) > 10

    with running(place, HOLD + WORK, str(kernel)) as worker:
        assert [said(worker), said(worker)] == ["held", "works"]
        wait_until(busy, timeout_s=60, what="both see the work")

"""Faults as the processes on the card meet them, while they run."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from kvmpool.softgpu import state
from kvmpool.softgpu.faults import Fault
from tests.softgpu.driver import SPECS, Case, healthy_cards, run

pytestmark = pytest.mark.native


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return healthy_cards(tmp_path)


def inject(root: Path, text: str, card: int = 0) -> None:
    state.inject(root, card, Fault.parse(text))


@pytest.mark.parametrize(
    ("fault", "error", "fresh"),
    [
        ("xid 79", 999, 999),
        ("lost", 999, 999),
        ("xid 48", 214, 214),
        ("xid 95", 214, 214),
        ("ecc", 214, 214),
        ("xid 94", 214, 0),
        ("xid 119", 719, 0),
    ],
)
def test_a_fatal_fault_ends_the_card_s_contexts_and_no_others(root: Path, fault: str, error: int, fresh: int) -> None:
    case, other = Case(root, "loop"), Case(root, "loop", CUDA_VISIBLE_DEVICES="1")
    assert (case.line(), other.line()) == ("running", "running")
    inject(root, fault)
    assert case.line() == f"{error} {error}"
    case.line()
    assert case.line() == str(fresh)
    assert case.end() == 0
    assert other.process.poll() is None
    other.kill()


def test_a_lost_card_is_not_seen_by_a_new_process_until_healed(root: Path) -> None:
    inject(root, "xid 79")
    assert [line.split("|")[1] for line in run(root, "query").splitlines()] == ["SoftGPU 1"]
    assert run(root, "init", CUDA_VISIBLE_DEVICES=SPECS[0].uuid).strip() == "100"
    inject(root, "heal")
    run(root, "vector_add", CUDA_VISIBLE_DEVICES=SPECS[0].uuid)


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 63, 154])
def test_an_xid_of_an_application_ends_nothing(root: Path, xid: int) -> None:
    case = Case(root, "loop")
    assert case.line() == "running"
    inject(root, f"xid {xid}")
    time.sleep(0.1)
    assert case.process.poll() is None
    case.kill()


def test_a_hung_card_ends_no_launch_until_it_is_healed(root: Path) -> None:
    case = Case(root, "timed")
    assert case.line() == "ready"
    inject(root, "hang")
    case.go_on()
    assert case.line() == "launched"
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.append(case.line()))
    reader.start()
    reader.join(0.7)
    assert said == []
    inject(root, "heal")
    reader.join(10)
    assert int(said[0]) >= 700
    assert case.end() == 0


def test_a_process_on_a_hung_card_can_be_killed_and_gives_its_memory_back(root: Path) -> None:
    case = Case(root, "timed")
    assert case.line() == "ready"
    inject(root, "hang")
    case.go_on()
    assert case.line() == "launched"
    assert state.read(root)[0].used_bytes > 0
    case.kill()
    assert state.read(root)[0].used_bytes == 0


def test_losing_a_hung_card_ends_the_wait(root: Path) -> None:
    case = Case(root, "loop")
    assert case.line() == "running"
    inject(root, "hang")
    time.sleep(0.2)
    inject(root, "lost")
    assert case.line() == "999 999"
    case.kill()


def test_a_slow_card_takes_ten_times_as_long(root: Path) -> None:
    inject(root, "slow")
    case = Case(root, "timed")
    assert case.line() == "ready"
    before_ns = state.read(root)[0].busy_ns
    case.go_on()
    assert case.line() == "launched"
    milliseconds = int(case.line())
    assert case.end() == 0
    busy_ms = (state.read(root)[0].busy_ns - before_ns) / 1e6
    assert busy_ms > 1
    assert milliseconds >= 9 * busy_ms


def test_losing_a_card_ends_a_kernel_that_never_ends(root: Path) -> None:
    case = Case(root, "endless")
    assert case.line() == "launched"
    time.sleep(0.2)
    inject(root, "xid 79")
    assert case.line() == "999"
    assert case.end() == 0


def test_the_watchdog_ends_a_kernel_that_never_ends_and_raises_xid_43(root: Path) -> None:
    case = Case(root, "endless", KVMPOOL_SOFTGPU_WATCHDOG_S="0.3")
    assert case.line() == "launched"
    assert case.line() == "702"
    assert case.end() == 0
    assert "): 43, pid=" in (root / "kmsg").read_text()


def test_many_processes_raising_at_once_lose_no_line_and_no_event(root: Path) -> None:
    cases = [Case(root, "sticky", "trap", "719") for _ in range(6)]
    for _ in range(6):
        inject(root, "xid 31")
    assert [case.end() for case in cases] == [0] * 6
    lines = (root / "kmsg").read_text().splitlines()
    assert [int(line.split(",")[1]) for line in lines] == list(range(12))
    assert sum("): 13, " in line for line in lines) == 6


def test_memory_is_free_within_a_second_of_a_kill(root: Path) -> None:
    case = Case(root, "hold", "500")
    assert case.line() == "0"
    case.process.kill()
    start = time.monotonic()
    while state.read(root)[0].used_bytes:
        assert time.monotonic() - start < 1
        time.sleep(0.01)
    case.kill()

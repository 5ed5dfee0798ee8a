"""The driver API as a C program sees it: each case is a process of its own that found libcuda.so.1 by its soname."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from kvmpool.softgpu import state
from tests.softgpu.driver import SPECS, Case, environment, healthy_cards, libraries, run

pytestmark = pytest.mark.native

NAMES = Path(state.__file__).parent / "src/cuda_names.txt"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return healthy_cards(tmp_path)


@pytest.mark.parametrize(
    "case",
    [
        "vector_add",
        "launch_forms",
        "streams_and_events",
        "default_stream",
        "pageable_copies",
        "many_threads",
        "churn",
        "destroyed_at_work",
        "bad_pointers",
        "over_the_end",
        "variables",
        "libraries",
        "linking",
        "shaped",
        "fixed_addresses",
        "forked",
        "contexts",
        "names",
        "host_functions",
        "occupancy",
        "pointers",
    ],
)
def test_case(root: Path, case: str) -> None:
    run(root, case)
    assert state.read(root)[0].processes == ()


@pytest.mark.parametrize(("kernel", "error", "xid"), [("set", 700, 31), ("trap", 719, 13)])
def test_a_kernels_own_fault_is_sticky_and_raises_its_xid(root: Path, kernel: str, error: int, xid: int) -> None:
    run(root, "sticky", kernel, str(error))
    lines = (root / "kmsg").read_text().splitlines()
    assert len(lines) == 1
    assert re.match(rf"3,0,\d+,-;NVRM: Xid \(PCI:0000:41:00\): {xid}, pid=\d+, name=softgpu_cases, ", lines[0])
    card = state.read(root)[0]
    assert (card.last_xid, card.lost, card.ecc, card.recovery_action) == (xid, False, False, 0)


def test_devices_are_those_of_the_folder(root: Path) -> None:
    lines = run(root, "query").splitlines()
    assert lines == [
        "0|SoftGPU 0|0000|1024|0000:41:00.0|9",
        "1|SoftGPU 1|0001|1024|0000:42:00.0|9",
    ]


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (SPECS[1].uuid, ["SoftGPU 1"]),
        ("1,0", ["SoftGPU 1", "SoftGPU 0"]),
        ("GPU-00000001", ["SoftGPU 1"]),
        ("0,7,1", ["SoftGPU 0"]),
    ],
)
def test_visible_devices_choose_and_order(root: Path, visible: str, names: list[str]) -> None:
    lines = run(root, "query", CUDA_VISIBLE_DEVICES=visible).splitlines()
    assert [line.split("|")[1] for line in lines] == names


@pytest.mark.parametrize("visible", ["", "9", "0,0", "GPU-ffffffff", "none"])
def test_no_visible_device_is_no_device(root: Path, visible: str) -> None:
    assert run(root, "init", CUDA_VISIBLE_DEVICES=visible).strip() == "100"


def test_without_a_folder_there_is_no_device(tmp_path: Path) -> None:
    assert run(tmp_path / "nothing", "init").strip() == "100"


def test_a_full_card_refuses_memory_until_its_owner_is_killed(root: Path) -> None:
    first = Case(root, "hold", "900")
    assert first.line() == "0"
    refused = Case(root, "hold", "200")
    assert refused.line() == "2"
    refused.go_on()
    assert refused.end() == 0
    other_card = Case(root, "hold", "200", CUDA_VISIBLE_DEVICES="1")
    assert other_card.line() == "0"
    other_card.go_on()
    assert other_card.end() == 0
    assert [process.memory_bytes >> 20 for process in state.read(root)[0].processes] == [900 + 9], "with its context"
    first.kill()
    assert state.read(root)[0].processes == ()
    served = Case(root, "hold", "1000")
    assert served.line() == "0"
    served.kill()


def test_busy_time_is_counted_for_the_process_and_the_card(root: Path) -> None:
    case = Case(root, "timed")
    assert case.line() == "ready"
    before = state.read(root)[0].processes[0].busy_ns
    case.go_on()
    assert case.line() == "launched"
    milliseconds = int(case.line())
    assert case.end() == 0
    busy_ms = (state.read(root)[0].busy_ns - before) / 1e6
    assert 0.5 * milliseconds - 5 < busy_ms <= milliseconds + 1


def test_every_listed_name_is_exported() -> None:
    library = libraries() / "libcuda.so.1"
    table = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    exported = {line.split()[2] for line in table.splitlines()}
    rows = [line.split() for line in NAMES.read_text().splitlines() if not line.startswith("#")]
    wanted = {row[0] for row in rows} | {row[0] + row[3] for row in rows if len(row) > 3}
    assert wanted - exported == set()
    assert {name for name in exported if not name.startswith("cu")} == set()


def test_the_library_is_found_by_its_soname(root: Path) -> None:
    table = subprocess.run(["readelf", "-d", libraries() / "libcuda.so.1"], check=True, capture_output=True, text=True)
    assert "Library soname: [libcuda.so.1]" in table.stdout
    assert "LD_PRELOAD" not in environment(root)

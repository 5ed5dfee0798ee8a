"""Sessions in control groups of their own: in a Linux guest whose cgroup2 has all its controllers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmpool.lab import guests, images, initramfs, kernel, process
from kvmpool.lab.initramfs import Entry
from kvmpool.native import native

pytestmark = pytest.mark.e2e

_SOURCES = Path(__file__).with_name("programs")
_NAUGHTY = Path(__file__).parents[1] / "native" / "naughty_cuda.c"
_BOOT_S = 90.0
_STEPS = ("relay", "worker", "status", "groups", "memory", "worker2", "forked", "told", "left", "logs")


def _programs(target: Path) -> Iterator[Path]:
    process.run(["gcc", "-O2", "-Wall", "-o", target / "tell", _SOURCES / "tell.c"], timeout_s=60)
    yield target / "tell"
    yield from (path for path in images.programs() if path.name == "deviceQuery")
    yield from (native(name) for name in ("relay", "worker"))


def _extras(folder: Path) -> Iterator[Entry]:
    """The test's own pid 1, and the enemy in place of the driver."""
    yield Entry("groups_init", 0o100755, (_SOURCES / "groups_init").read_bytes())
    library = folder / "libcuda.so.1"
    process.run(["gcc", "-O1", "-std=gnu11", "-shared", "-fPIC", "-o", library, _NAUGHTY], timeout_s=60)
    yield Entry("naughty", 0o40755)
    yield Entry("naughty/libcuda.so.1", 0o100755, library.read_bytes())


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Name of each step of programs/groups_init -> exit code and output."""
    folder = tmp_path_factory.mktemp("groups")
    (folder / "naughty").mkdir()
    chosen = kernel.kernel()
    root = initramfs.build(chosen, [native("shim")], _programs(folder))
    (folder / "initrd").write_bytes(root + initramfs.cpio(_extras(folder / "naughty")))
    qemu = shutil.which("qemu-system-x86_64")
    assert qemu
    machine = ["-accel", "tcg", "-M", "q35", "-cpu", "qemu64", "-m", "512", "-nodefaults", "-display", "none"]
    line = f"{guests.COMMAND_LINE} rdinit=/groups_init"
    boot = ["-kernel", str(chosen.image), "-initrd", str(folder / "initrd"), "-append", line]
    words = [qemu, *machine, "-no-reboot", "-serial", "stdio", *boot]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_BOOT_S, check=False)
    said = done.stdout.decode(errors="replace").replace("\r\n", "\n")
    said = re.sub(r"^\[ *[0-9.]+\] .*\n", "", said, flags=re.M)  # the kernel's own words
    assert "\nDONE\n" in said, said
    names = "|".join(_STEPS)
    found = re.findall(rf"^({names}) (\d+)\n(.*?)(?=^(?:{names}) \d+\n|^DONE)", said, re.M | re.S)
    return {name: (int(code), output) for name, code, output in found}


def test_a_session_is_in_a_group_of_its_own_with_its_limits(steps: dict[str, tuple[int, str]]) -> None:
    assert set(steps) == set(_STEPS)
    confined = json.loads(steps["status"][1])["confined"]
    assert confined["cgroup"].startswith("/sys/fs/cgroup/kvmpool/")
    assert [confined[name] for name in ("user", "memory", "tasks", "cpus", "missing")] == [
        "kvmpool-worker", "cgroup", "cgroup", "cgroup", ""
    ]  # fmt: skip
    assert steps["groups"][1].splitlines() == [
        f"memory.max {48 << 20}", "memory.oom.group 1", "pids.max 30", "cpu.max 100000 100000"
    ]  # fmt: skip


def test_the_group_ends_a_session_that_takes_all_memory_and_its_neighbour_computes(
    steps: dict[str, tuple[int, str]],
) -> None:
    assert steps["memory"][0] != 0
    assert "ended: signal 9" in steps["logs"][1]
    told = steps["told"][1]
    assert "memory-bomb" not in told
    assert len(re.findall(r"^computed ([0-9a-f]{16})$", told, re.M)) == 1


def test_the_group_holds_a_sessions_processes_and_leaves_none(steps: dict[str, tuple[int, str]]) -> None:
    (count,) = re.findall(r"^tasks (\d+)$", steps["told"][1], re.M)
    assert 20 <= int(count) < 30
    assert steps["left"][1].splitlines()[-1] == "1"  # the worker itself
    assert "/session-0\n" not in steps["left"][1]

"""The whole data plane over the kernel's own vsock: in a Linux guest that plays host and guest at once, CID 1 to CID 1.

A machine without vhost-vsock has no other vsock that is real. Shim, acceptor, relay and worker are the ones of a host.
"""

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
from kvmpool.softgpu import state as softgpu
from tests.daemon.host import CARDS

pytestmark = pytest.mark.e2e

_SOURCES = Path(__file__).with_name("programs")
_BOOT_S = 25.0
_CODES = {
    "acceptor": 0, "relay": 0, "worker": 0, "point": 0, "stranger": 1, "query": 0, "copy": 0, "hog": 0, "two": 0,
    "again": 1, "worker2": 0, "point2": 0, "held": 0, "moved": 0, "status": 0, "logs": 0,
}  # fmt: skip


def _programs(target: Path) -> Iterator[Path]:
    """What runs in the guest; the soft card's libcuda.so.1 lies beside the worker, the shim where the loader looks."""
    for name in ("hog", "copy"):
        process.run(["gcc", "-O2", "-Wall", "-o", target / name, _SOURCES / f"{name}.c", native("shim")], timeout_s=60)
        yield target / name
    process.run(["gcc", "-O2", "-Wall", "-o", target / "tell", _SOURCES / "tell.c"], timeout_s=60)
    yield target / "tell"
    yield from (path for path in images.programs() if path.name == "deviceQuery")
    yield from (native(name) for name in ("acceptor", "relay", "worker", "softgpu-cuda"))


def _extras(chosen: kernel.Kernel, card: Path) -> Iterator[Entry]:
    """The test's own pid 1, the modules of vsock's loopback, and a soft card."""
    yield Entry("vsock_init", 0o100755, (_SOURCES / "vsock_init").read_bytes())
    yield Entry("vsock-modules", 0o40755)
    files = {path.name.removesuffix(".xz"): path for path in kernel.modules(chosen.tree, ["vsock_loopback"])}
    assert {"vsock.ko", "vsock_loopback.ko"} <= files.keys()
    for name, path in files.items():
        yield Entry(f"vsock-modules/{name}", 0o100644, kernel.module_bytes(path))
    yield Entry("vsock-modules/order", 0o100644, "\n".join(files).encode() + b"\n")
    yield Entry("softgpu", 0o40755)
    for path in sorted(card.rglob("*")):
        name = f"softgpu/{path.relative_to(card)}"
        yield Entry(name, 0o40755) if path.is_dir() else Entry(name, 0o100644, path.read_bytes())


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Name of each step of programs/vsock_init -> exit code and output."""
    folder = tmp_path_factory.mktemp("vsock")
    softgpu.create(folder / "card", CARDS[:1])
    chosen = kernel.kernel()
    root = initramfs.build(chosen, [native("shim")], _programs(folder))
    (folder / "initrd").write_bytes(root + initramfs.cpio(_extras(chosen, folder / "card")))
    said = _boot(chosen.image, folder / "initrd")
    assert "MODULE FAILED" not in said
    assert "\nDONE\n" in said, said
    found = re.findall(rf"^({'|'.join(_CODES)}) (\d+)\n(.*?)(?=^(?:{'|'.join(_CODES)}) \d+\n|^DONE)", said, re.M | re.S)
    return {name: (int(code), output) for name, code, output in found}


def _boot(image: Path, initrd: Path) -> str:
    """What a guest says until it powers itself off. It has no vsock device: nothing of it can reach this machine."""
    qemu = shutil.which("qemu-system-x86_64")
    assert qemu
    machine = ["-accel", "tcg", "-M", "q35", "-cpu", "qemu64", "-m", "512", "-nodefaults", "-display", "none"]
    boot = ["-kernel", str(image), "-initrd", str(initrd), "-append", f"{guests.COMMAND_LINE} rdinit=/vsock_init"]
    words = [qemu, *machine, "-no-reboot", "-serial", "stdio", *boot]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_BOOT_S, check=False)
    return done.stdout.decode(errors="replace").replace("\r\n", "\n") + done.stderr.decode(errors="replace")


def test_every_step_ends_as_it_must(steps: dict[str, tuple[int, str]]) -> None:
    assert {name: code for name, (code, _) in steps.items()} == _CODES, steps


def test_a_guest_whose_cid_is_in_the_map_reaches_its_gpu_and_its_bytes_come_back(
    steps: dict[str, tuple[int, str]],
) -> None:
    assert "uuid: GPU-0f0e0d0c-0b0a-0908-0706-050403020100\n" in steps["query"][1]
    assert "memory MiB: 512\n" in steps["query"][1]
    assert steps["copy"][1] == "copy: 20000000 bytes PASS\n"
    assert steps["two"][1] == "copy: 3000000 bytes PASS\n" * 2


def test_the_quota_holds_over_vsock(steps: dict[str, tuple[int, str]]) -> None:
    assert steps["hog"][1] == "512 MiB, then 2\n"


def test_a_cid_that_is_not_in_the_map_is_refused_before_and_after(steps: dict[str, tuple[int, str]]) -> None:
    for name in ("stranger", "again"):
        assert "CUDA_ERROR_DEVICE_UNAVAILABLE (46)" in steps[name][1]
    assert "guest with CID 1 refused: no domain of kvmpool has this CID" in steps["logs"][1]


def test_a_move_ends_the_old_session_and_the_next_program_is_served_by_the_new_worker(
    steps: dict[str, tuple[int, str]],
) -> None:
    assert steps["held"][1] == "copy: 100000 bytes PASS\nthen 46\n"
    assert steps["moved"][1] == steps["query"][1]
    status = json.loads(steps["status"][1])
    assert status["endpoint"] == "vsock:2:9960"
    assert status["claims"]["gpu0"]["generation"] == 2
    assert status["passed"] == status["accepted"] == 7
    assert not any(status["refused"].values())

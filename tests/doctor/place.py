"""A machine that is as it should be, as a tree of files and a few programs; a test breaks one thing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvmpool.doctor.finding import Finding, Level, Place
from kvmpool.host import install

QEMU = "QEMU emulator version 8.2.2 (Debian 1:8.2.2+ds-1)"
VIRSH = "Using library: libvirt 9.0.0\nRunning hypervisor: QEMU 8.2.2\nRunning against daemon: 9.0.0"


class Machine:
    """`check` asks one check of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.programs = root / "programs"
        self.programs.mkdir()
        self.socket = root / "run/kvmpool/kvmpoold.sock"
        self.write("/etc/group", "root:x:0:\nkvmpool:x:990:alice,bob\n")
        self.write("/etc/passwd", "root:x:0:0::/root:/bin/sh\nkvmpool-worker:x:991:991::/:/sbin/nologin\n")
        self.write("/sys/fs/cgroup/cgroup.controllers", "cpu io memory pids\n")
        self.write("/usr/bin/python3", "")
        self.write("/dev/kmsg", "")
        self.write("/dev/vhost-vsock", "")
        self.write("/sys/kernel/iommu_groups/0/type", "DMA")
        self.program("qemu-system-x86_64", QEMU)
        self.program("virsh", VIRSH)
        install.apply(install.plan_join(root))

    def write(self, name: str, text: str) -> Path:
        path = self.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def program(self, name: str, says: str, code: int = 0) -> None:
        path = self.programs / name
        path.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\nexit {code}\n")
        path.chmod(0o755)

    def place(self, libraries: Path | None = None) -> Place:
        """`libraries`: where libcuda and NVML are; without it there are none."""
        return Place(self.root, self.socket, path=str(self.programs), libraries=libraries or self.root / "lib")

    def check(self, check: Callable[[Place], Finding], libraries: Path | None = None) -> tuple[Level, str, str]:
        found = check(self.place(libraries))
        assert (found.remedy == "") == (found.level is Level.PASS), found
        return found.level, found.detail, found.remedy

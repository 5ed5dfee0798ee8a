"""Checks of the machine: KVM, QEMU, vsock, the IOMMU, the programs that kvmpool brings along."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from kvmpool.doctor.finding import Finding, Level, Place
from kvmpool.errors import NotFound
from kvmpool.native import native

AREA = "host"
_KVM_CREATE_VM = 0xAE01  # linux/kvm.h
QEMU_FLOOR = (7, 2)  # design 04: what the hook and hot-plug semantics were measured on


def kvm(place: Place) -> Finding:
    title = "hardware virtualisation (/dev/kvm)"
    fault = _kvm_fault(place.at("/dev/kvm"))
    if not fault:
        return Finding(AREA, title, Level.PASS)
    remedy = "enable VT-x/AMD-V in the firmware, load kvm_intel or kvm_amd; without it guests are ~10x slower (TCG)"
    return Finding(AREA, title, Level.WARN, fault, remedy)


def qemu(place: Place) -> Finding:
    title = "QEMU"
    code, text = place.run(["qemu-system-x86_64", "--version"])
    found = re.search(r"version (\d+)\.(\d+)", text)
    if code or not found:
        return Finding(AREA, title, Level.FAIL, "qemu-system-x86_64 is not installed", "apt install qemu-system-x86")
    version = (int(found[1]), int(found[2]))
    if version < QEMU_FLOOR:
        detail = f"{version[0]}.{version[1]} is older than {QEMU_FLOOR[0]}.{QEMU_FLOOR[1]}"
        return Finding(AREA, title, Level.FAIL, detail, "upgrade QEMU")
    return Finding(AREA, title, Level.PASS, f"{version[0]}.{version[1]}")


def vsock(place: Place) -> Finding:
    title = "vsock for guests (/dev/vhost-vsock)"
    if place.at("/dev/vhost-vsock").exists():
        return Finding(AREA, title, Level.PASS)
    return Finding(AREA, title, Level.WARN, "absent", "modprobe vhost_vsock; until then endpoints are TCP with a token")


def iommu(place: Place) -> Finding:
    title = "IOMMU groups"
    groups = place.at("/sys/kernel/iommu_groups")
    if groups.is_dir() and any(groups.iterdir()):
        return Finding(AREA, title, Level.PASS, f"{sum(1 for _ in groups.iterdir())} groups")
    remedy = "boot with intel_iommu=on (Intel) or enable AMD-Vi; only passthrough needs it, vGPU claims do not"
    return Finding(AREA, title, Level.WARN, "none: no passthrough", remedy)


def programs(place: Place) -> Finding:
    title = "kvmpool's own programs"
    try:
        for name in ("worker", "relay", "acceptor", "shim"):
            native(name)
    except NotFound as error:
        message, _, remedy = str(error).partition(". Next: ")
        return Finding(AREA, title, Level.FAIL, message, remedy)
    return Finding(AREA, title, Level.PASS)


def sessions_user(place: Place) -> Finding:
    title = "a user for the guests' sessions"
    if any(line.startswith("kvmpool-worker:") for line in place.read("/etc/passwd").splitlines()):
        return Finding(AREA, title, Level.PASS, "kvmpool-worker")
    return Finding(AREA, title, Level.WARN, "there is no kvmpool-worker: sessions run as root", "systemd-sysusers")


def control_groups(place: Place) -> Finding:
    title = "control groups for the guests' sessions"
    lacking = {"memory", "pids"} - set(place.read("/sys/fs/cgroup/cgroup.controllers").split())
    if not lacking:
        return Finding(AREA, title, Level.PASS, "cgroup2")
    detail = f"no cgroup2 with {' and '.join(sorted(lacking))}: limits of a process and a user hold instead"
    return Finding(AREA, title, Level.WARN, detail, "boot with systemd.unified_cgroup_hierarchy=1")


def _kvm_fault(device: Path) -> str:
    """Why no virtual machine can be made, "" where one can: the device node alone proves nothing."""
    try:
        kvm_fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return error.strerror or "cannot be opened"
    try:
        os.close(fcntl.ioctl(kvm_fd, _KVM_CREATE_VM, 0))
    except OSError as error:
        return f"present, but cannot make a VM: {error.strerror}"
    finally:
        os.close(kvm_fd)
    return ""


CHECKS = (kvm, qemu, vsock, iommu, programs, sessions_user, control_groups)

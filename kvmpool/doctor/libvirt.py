"""Checks of libvirt and of the hook.

The hook decides over every domain's start, so whatever could break it is named here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvmpool.doctor.finding import Finding, Level, Place

AREA = "libvirt"
LIBVIRT_FLOOR = (9, 0)
HOOKS = "/etc/libvirt/hooks"
HOOK = f"{HOOKS}/qemu.d/50-kvmpool"


def daemon(place: Place) -> Finding:
    title = "libvirt daemon"
    code, text = place.run(["virsh", "-c", place.libvirt_uri, "version", "--daemon"])
    if code == 127:
        remedy = "apt install libvirt-daemon-system libvirt-clients"
        return Finding(AREA, title, Level.FAIL, "virsh is not installed", remedy)
    found = re.search(r"Running against daemon: (\d+)\.(\d+)", text)
    if code or not found:
        detail = text.splitlines()[-1] if text else "no answer"
        remedy = f"systemctl start libvirtd, then: virsh -c {place.libvirt_uri} uri"
        return Finding(AREA, title, Level.FAIL, detail.removeprefix("error: "), remedy)
    version = (int(found[1]), int(found[2]))
    if version < LIBVIRT_FLOOR:
        return Finding(AREA, title, Level.FAIL, f"{version[0]}.{version[1]} is older than 9.0", "upgrade libvirt")
    return Finding(AREA, title, Level.PASS, f"{version[0]}.{version[1]} at {place.libvirt_uri}")


def hook(place: Place) -> Finding:
    title = "hook qemu.d/50-kvmpool"
    path = place.at(HOOK)
    if not path.exists():
        return Finding(AREA, title, Level.FAIL, "not installed: claims are ignored", "kvmpool host join")
    if not os.access(path, os.X_OK):
        return Finding(AREA, title, Level.FAIL, "not executable: libvirt does not run it", f"chmod 0755 {HOOK}")
    return Finding(AREA, title, Level.PASS)


def hook_neighbours(place: Place) -> Finding:
    """Any executable file in qemu.d runs, backups too, and one that fails refuses the start of every domain."""
    title = "other hooks"
    folder = place.at(f"{HOOKS}/qemu.d")
    others = _executables(folder) - {"50-kvmpool"}
    backups = sorted(n for n in others if n.endswith(("~", ".bak", ".orig", ".dpkg-old", ".dpkg-dist")))
    if backups:
        where = f"{HOOKS}/qemu.d/{backups[0]}"
        return Finding(AREA, title, Level.WARN, f"libvirt runs {where} too: it looks like a backup", f"rm {where}")
    return Finding(AREA, title, Level.PASS, ", ".join(sorted(others)) if others else "none")


def interpreter(place: Place) -> Finding:
    title = "the hook's interpreter (/usr/bin/python3)"
    if place.at("/usr/bin/python3").exists():
        return Finding(AREA, title, Level.PASS)
    return Finding(AREA, title, Level.FAIL, "missing: domains with a claim cannot start", "apt install python3")


def selinux(place: Place) -> Finding:
    title = "SELinux"
    if place.read("/sys/fs/selinux/enforce").strip() != "1":
        return Finding(AREA, title, Level.PASS, "not enforcing")
    remedy = "setsebool -P virt_hooks_unconfined 1 (the hook must reach kvmpoold's socket)"
    return Finding(AREA, title, Level.WARN, "enforcing", remedy)


def bridge_mac(place: Place) -> Finding:
    """A bridge without an address of its own takes its lowest port's: then migrations die with "keepalive timeout"."""
    title = "bridges keep their MAC address"
    for bridge in sorted(place.at("/sys/class/net").glob("*/bridge")):
        if _text(bridge.parent / "addr_assign_type") == "0":
            continue
        if _text(bridge.parent / "addr_assign_type") != "3":
            name = bridge.parent.name
            remedy = f"ip link set {name} address MAC (and in its config): without it migrations lose their connection"
            return Finding(AREA, title, Level.WARN, f"{name}'s is not set", remedy)
    return Finding(AREA, title, Level.PASS)


def _executables(folder: Path) -> set[str]:
    try:
        return {p.name for p in folder.iterdir() if os.access(p, os.X_OK) and not p.name.startswith(".")}
    except OSError:
        return set()


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


CHECKS = (daemon, hook, hook_neighbours, interpreter, selinux, bridge_mac)

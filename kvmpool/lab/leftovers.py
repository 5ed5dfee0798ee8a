"""What a lab host may leave behind: proves after its end that no process, mount, namespace or file of it exists."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvmpool.lab import process
from kvmpool.lab.hosts import Host

_NAMESPACES = ("pid", "net", "mnt", "uts", "ipc")


@dataclass(frozen=True, slots=True)
class Footprint:
    """Names of a host's namespaces ("net:[4026532281]") and its folder, taken while it runs."""

    namespaces: frozenset[str]
    folder: Path


def footprint(host: Host) -> Footprint:
    """Raises Unreachable where the host is not running."""
    host.command([])
    pid1 = process.children(host.keeper)[0]
    return Footprint(frozenset(os.readlink(f"/proc/{pid1}/ns/{kind}") for kind in _NAMESPACES), host.folder)


def remains(of: Footprint) -> list[str]:
    """A line for each thing that is still there; empty after a clean end.

    A namespace exists as long as a process is in it, a descriptor or a mount holds it: all three are looked for.
    """
    found = [f"file {of.folder}"] if of.folder.exists() else []
    mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    marks = (str(of.folder), *of.namespaces)
    found += [f"mount {line}" for line in mounts if any(mark in line for mark in marks)]
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            found += _held_by(folder, of)
    return found


def _held_by(folder: Path, of: Footprint) -> list[str]:
    """`folder`: of one process below /proc. A process that ends meanwhile holds nothing."""
    found = []
    for place in ("ns", "fd"):
        try:
            links = list((folder / place).iterdir())
        except OSError:
            continue
        for link in links:
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target in of.namespaces or target.startswith(f"{of.folder}/"):
                found.append(f"process {folder.name}: {place}/{link.name} is {target}")
    return found

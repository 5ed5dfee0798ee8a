"""Finds who has a card's device nodes open or mapped: pid, program, systemd unit, libvirt domain.

Reads /proc under a root that can be moved. A process that ends while it is read holds nothing.
Sources: proc(5); NVIDIA driver README (/proc/driver/nvidia/gpus); kernel, driver-api/vfio.rst (/dev/vfio/GROUP).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kvmpool.device.sysroot import Sysroot
from kvmpool.device.topology import DEVICES, Unit
from kvmpool.errors import Unreachable

_GUEST = re.compile(r"(?:^|,)guest=([^,]+)")
_MINOR = re.compile(r"^Device Minor:\s*(\d+)", re.MULTILINE)
_DELETED = " (deleted)"
_CMDLINE_BYTES = 64 << 10
_MAPS_BYTES = 4 << 20
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Holder:
    """A process with a card's node open. "": it belongs to no unit, to no domain."""

    pid: int
    program: str
    node: str
    unit: str = ""
    domain: str = ""

    def __str__(self) -> str:
        whose = f", domain {self.domain}" if self.domain else f", {self.unit}" if self.unit else ""
        return f"pid {self.pid} ({self.program}{whose}) with {self.node} open"


def nodes_of(sysroot: Sysroot, unit: Unit) -> frozenset[str]:
    """The device nodes that belong to the unit alone, as paths under /dev."""
    nodes = {f"/dev/vfio/{unit.group}"} if unit.group else set()
    for function in unit.functions:
        folder = f"{DEVICES}/{function.address}"
        nodes |= {f"/dev/dri/{name}" for name in sysroot.names(f"{folder}/drm") or () if name[:4] in ("card", "rend")}
        nodes |= {f"/dev/vfio/devices/{name}" for name in sysroot.names(f"{folder}/vfio-dev") or ()}
        nodes |= {f"/dev/snd/{name}" for name in _sound_nodes(sysroot, folder)}
        about = sysroot.bytes_of(f"proc/driver/nvidia/gpus/{function.address}/information") or b""
        minor = _MINOR.search(about.decode("ascii", "replace"))
        if minor:
            nodes.add(f"/dev/nvidia{minor[1]}")
    return frozenset(nodes)


def holders(sysroot: Sysroot, nodes: Collection[str]) -> tuple[Holder, ...]:
    """Every process that holds one of `nodes`, by pid. Raises Unreachable where /proc cannot be read."""
    names = sysroot.names("proc")
    if names is None or not any(name.isdigit() for name in names):
        raise Unreachable(f"{sysroot.root}: /proc cannot be read, so who holds the card is not known")
    found = (_holder(sysroot, int(name), nodes) for name in names if name.isdigit())
    return tuple(sorted((each for each in found if each is not None), key=lambda each: each.pid))


def told(found: Iterable[Holder]) -> str:
    every = list(found)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return "; ".join(str(each) for each in every[:_SHOWN]) + more


def _holder(sysroot: Sysroot, pid: int, nodes: Collection[str]) -> Holder | None:
    node = _open_node(sysroot, pid, nodes) or _mapped_node(sysroot, pid, nodes)
    if node is None:
        return None
    program = sysroot.text(f"proc/{pid}/comm") or "?"
    words = (sysroot.bytes_of(f"proc/{pid}/cmdline", _CMDLINE_BYTES) or b"").split(b"\0")
    return Holder(pid, program, node, _unit_of(sysroot, pid), _domain_of(words))


def _open_node(sysroot: Sysroot, pid: int, nodes: Collection[str]) -> str | None:
    for fd in sysroot.names(f"proc/{pid}/fd") or ():
        try:
            target = os.readlink(sysroot.root / f"proc/{pid}/fd/{fd}").removesuffix(_DELETED)
        except OSError:
            continue
        if target in nodes:
            return target
    return None


def _mapped_node(sysroot: Sysroot, pid: int, nodes: Collection[str]) -> str | None:
    """A mapping holds the driver as well as a descriptor does, and may outlive it."""
    maps = sysroot.bytes_of(f"proc/{pid}/maps", _MAPS_BYTES) or b""
    if b"/dev/" not in maps:
        return None
    paths = (line.split(maxsplit=5)[5:] for line in maps.decode(errors="replace").splitlines() if "/dev/" in line)
    return next((path[0].removesuffix(_DELETED) for path in paths if path and path[0] in nodes), None)


def _unit_of(sysroot: Sysroot, pid: int) -> str:
    groups = (sysroot.bytes_of(f"proc/{pid}/cgroup") or b"").decode(errors="replace")
    parts = [part for line in groups.splitlines() for part in line.rpartition(":")[2].split("/")]
    return next((part for part in reversed(parts) if part.endswith((".service", ".scope"))), "")


def _domain_of(words: list[bytes]) -> str:
    """QEMU is started by libvirt with `-name guest=NAME,...`."""
    for word, value in zip(words, words[1:], strict=False):
        found = _GUEST.search(value.decode(errors="replace")) if word == b"-name" else None
        if found:
            return found[1]
    return ""


def _sound_nodes(sysroot: Sysroot, folder: str) -> list[str]:
    found = []
    for card in sysroot.names(f"{folder}/sound") or ():
        if card.startswith("card"):
            names = sysroot.names(f"{folder}/sound/{card}") or ()
            found += [name for name in names if name[:3] in ("pcm", "con", "hwC")]
    return found

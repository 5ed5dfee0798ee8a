"""Looks at everything that a mode switch depends on: the unit, its holders, drivers, the boot console. Blocking.

Sources: kernel, ABI/testing/sysfs-bus-pci (resource), driver-api/console (vtconsole); /proc/iomem.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from kvmpool.device.holders import holders, nodes_of
from kvmpool.device.pci import bus_state
from kvmpool.device.preflight import Situation
from kvmpool.device.sysroot import Sysroot
from kvmpool.device.topology import DEVICES, DRIVERS, Unit, unit_of

_RANGE = re.compile(r"\s*([0-9a-f]+)-([0-9a-f]+) : (.*)")
_CONSOLES = re.compile(r"BOOTFB|efifb|vesafb|simplefb|simple-framebuffer")
_IOMEM_BYTES = 1 << 20
_BARS = 6
_PERSISTENCE = "nvidia-persiste"  # of nvidia-persistenced, as much of a name as the kernel keeps


def look(sysroot: Sysroot, address: str, cards: Callable[[], frozenset[str]], own: int = 0) -> Situation:
    """`cards`: addresses of all cards. `own`: a process that lets go before the switch, as NVIDIA's persistence daemon
    then does; both are left out. 0: everybody is told.

    Raises Unreachable where /proc cannot be read.
    """
    unit = unit_of(sysroot, address, cards())
    found = holders(sysroot, nodes_of(sysroot, unit))
    if own:
        found = tuple(each for each in found if each.pid != own and not each.program.startswith(_PERSISTENCE))
    return Situation(
        unit=unit,
        state=bus_state(sysroot, address),
        holders=found,
        drivers=frozenset(sysroot.names(DRIVERS) or ()),
        framebuffer=_framebuffer(sysroot, unit),
        console=_console(sysroot),
    )


def _framebuffer(sysroot: Sysroot, unit: Unit) -> str:
    """The range of the boot console that lies in one of the unit's BARs; "" where none does."""
    bars = [bar for function in unit.functions for bar in _bars(sysroot, function.address)]
    text = (sysroot.bytes_of("proc/iomem", _IOMEM_BYTES) or b"").decode("ascii", "replace")
    for line in text.splitlines():
        found = _RANGE.fullmatch(line)
        if found and _CONSOLES.search(found[3]):
            start, end = int(found[1], 16), int(found[2], 16)
            if end and any(start <= last and first <= end for first, last in bars):
                return f"{start:#x}-{end:#x}"
    return ""


def _bars(sysroot: Sysroot, address: str) -> list[tuple[int, int]]:
    text = (sysroot.bytes_of(f"{DEVICES}/{address}/resource") or b"").decode("ascii", "replace")
    bars = []
    for line in text.splitlines()[:_BARS]:
        words = line.split()
        try:
            first, last = int(words[0], 16), int(words[1], 16)
        except (IndexError, ValueError):
            continue
        if last:
            bars.append((first, last))
    return bars


def _console(sysroot: Sysroot) -> bool:
    folder = "sys/class/vtconsole"
    return any(
        "frame buffer" in (sysroot.text(f"{folder}/{name}/name") or "") and sysroot.number(f"{folder}/{name}/bind") == 1
        for name in sysroot.names(folder) or ()
    )

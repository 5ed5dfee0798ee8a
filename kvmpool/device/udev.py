"""Hears from the kernel when a PCI device goes away or reports an error. Optional: without netlink it says so.

Events: kernel, Documentation/PCI/pci-error-recovery.rst (ERROR_EVENT of the pci_uevent_ers calls); udev(7).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pyudev

from kvmpool.device.pci import normal_address
from kvmpool.errors import Unreachable

_UDEVD = Path("/run/udev/control")  # systemd: udevadm_settle, sd-device


class PciEventKind(Enum):
    REMOVED = "removed"
    RECOVERY_BEGINS = "recovery-begins"
    RECOVERY_FAILED = "recovery-failed"


@dataclass(frozen=True, slots=True)
class PciEvent:
    """Something happened to the device at `address`: a hint to look, from whoever may send such messages."""

    address: str
    kind: PciEventKind


_ERRORS = {"BEGIN_RECOVERY": PciEventKind.RECOVERY_BEGINS, "FAILED_RECOVERY": PciEventKind.RECOVERY_FAILED}


def classify(action: str, address: str, error_event: str) -> PciEvent | None:
    """None for what is not about a failing device."""
    normal = normal_address(address)
    if normal is None:
        return None
    if action == "remove":
        return PciEvent(normal, PciEventKind.REMOVED)
    kind = _ERRORS.get(error_event) if action == "change" else None
    return PciEvent(normal, kind) if kind else None


async def follow(source: str = "udev") -> AsyncIterator[PciEvent]:
    """Events from now on. `source`: "udev", "kernel", or "auto": the kernel's own where no udevd hands them on.

    Raises Unreachable without netlink.
    """
    try:
        monitor = pyudev.Monitor.from_netlink(pyudev.Context(), source=_source(source))
        monitor.filter_by("pci")
        monitor.start()
    except (OSError, ImportError, ValueError) as error:
        raise Unreachable(f"udev: no netlink here ({error})") from error
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(monitor.fileno(), readable.set)
    try:
        while True:
            readable.clear()
            device = monitor.poll(timeout=0)
            if device is None:
                await readable.wait()
                continue
            event = classify(device.action or "", device.sys_name, str(device.properties.get("ERROR_EVENT") or ""))
            if event is not None:
                yield event
    except OSError as error:
        raise Unreachable(f"udev: {error}") from error
    finally:
        loop.remove_reader(monitor.fileno())


def _source(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    return "udev" if _UDEVD.exists() else "kernel"

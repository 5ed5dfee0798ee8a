"""udev's messages: which of them are about a failing card, and that the kernel's arrive."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from kvmpool.device import udev
from kvmpool.device.udev import PciEvent, PciEventKind, classify, follow

A = "0000:41:00.0"


@pytest.mark.parametrize(
    ("action", "error_event", "kind"),
    [
        ("remove", "", PciEventKind.REMOVED),
        ("change", "BEGIN_RECOVERY", PciEventKind.RECOVERY_BEGINS),
        ("change", "FAILED_RECOVERY", PciEventKind.RECOVERY_FAILED),
        ("change", "SUCCESSFUL_RECOVERY", None),
        ("change", "", None),
        ("bind", "", None),
        ("add", "BEGIN_RECOVERY", None),
        ("", "", None),
    ],
)
def test_events_of_failing_devices_are_told_apart(action: str, error_event: str, kind: PciEventKind | None) -> None:
    assert classify(action, A, error_event) == (PciEvent(A, kind) if kind else None)


def test_a_device_without_a_pci_address_is_nobody() -> None:
    assert classify("remove", "pci0000:00", "") is None


def _a_device() -> Path | None:
    devices = Path("/sys/bus/pci/devices")
    found = sorted(devices.iterdir()) if devices.is_dir() else []
    return found[0] / "uevent" if found and os.access(found[0] / "uevent", os.W_OK) else None


@pytest.mark.not_in_ci("a container may not trigger events of PCI devices")
@pytest.mark.skipif(_a_device() is None, reason="no PCI device here whose uevent could be triggered")
def test_the_kernels_events_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A harmless `change` of a real device, of which only the kind is made up."""
    trigger = _a_device()
    assert trigger is not None
    actions: list[str] = []

    def removed(action: str, address: str, _: str) -> PciEvent | None:
        actions.append(action)
        return PciEvent(address, PciEventKind.REMOVED)

    monkeypatch.setattr(udev, "classify", removed)

    async def first() -> PciEvent:
        async for event in follow("kernel"):
            return event
        raise AssertionError("it ended")

    async def story() -> PciEvent:
        waiting = asyncio.ensure_future(first())
        await asyncio.sleep(0.1)
        trigger.write_text("change\n")
        return await asyncio.wait_for(waiting, 5)

    event = asyncio.run(story())
    assert event.address == trigger.parent.name
    assert actions == ["change"]

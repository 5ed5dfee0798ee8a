"""A sysfs of plain files for the tests of the device side, and a clock."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from kvmpool.core.model import BootId

WELL = bytes([0xDE, 0x10, 0x30, 0x23]) + bytes(60)


def add_card(root: Path, address: str = "0000:41:00.0", *, driver: str = "nvidia", **files: str | bytes) -> Path:
    """A GPU of NVIDIA's; `files` replace or add attributes. Device folders are named as in the kernel."""
    folder = root / "sys/bus/pci/devices" / address
    folder.mkdir(parents=True, exist_ok=True)
    texts: dict[str, str | bytes] = {
        "vendor": "0x10de\n",
        "device": "0x2330\n",
        "class": "0x030200\n",
        "subsystem_vendor": "0x10de\n",
        "subsystem_device": "0x16c1\n",
        "numa_node": "1\n",
        "config": WELL,
    }
    for name, content in (texts | files).items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    if driver:
        bound = root / "sys/bus/pci/drivers" / driver
        bound.mkdir(parents=True, exist_ok=True)
        os.symlink(f"../../drivers/{driver}", folder / "driver")
    group = root / "sys/kernel/iommu_groups/7"
    group.mkdir(parents=True, exist_ok=True)
    os.symlink("../../../../kernel/iommu_groups/7", folder / "iommu_group")
    return folder


@dataclass(slots=True)
class SystemClock:
    """The real one."""

    boot: BootId = field(default=BootId("boot"))

    def now(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> float:
        return time.time()

    def boot_id(self) -> BootId:
        return self.boot

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)

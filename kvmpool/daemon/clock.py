"""The host's real clock: CLOCK_BOOTTIME (counts a suspend; no wall-clock jump reaches it) and the kernel's boot id."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from kvmpool.core.model import BootId

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class HostClock:
    """Implements ports.Clock."""

    def __init__(self) -> None:
        self._boot_id = BootId(_BOOT_ID.read_text().strip())

    def now(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> float:
        return time.time()

    def boot_id(self) -> BootId:
        return self._boot_id

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)

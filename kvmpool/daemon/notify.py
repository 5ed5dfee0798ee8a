"""Tells systemd how the daemon is (sd_notify(3)), and feeds its watchdog only while every loop makes progress."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvmpool.ports import Clock

log = logging.getLogger("kvmpool.notify")


def notify(message: str, environment: Mapping[str, str] = os.environ) -> None:
    """Send `message` ("READY=1", ...) to the service manager; nothing where there is none."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
            to.settimeout(1.0)
            to.connect(address)
            to.sendall(message.encode())
    except OSError as error:
        log.warning("the service manager does not take %s: %s", message.partition("=")[0], error)


def watchdog_s(environment: Mapping[str, str] = os.environ) -> float | None:
    """How often the manager wants to hear from us; None: it does not watch this process."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    try:
        return int(environment["WATCHDOG_USEC"]) / 1e6
    except (KeyError, ValueError):
        return None


@dataclass(slots=True)
class Pulse:
    """When each loop last finished a turn, and how long each may take for one."""

    clock: Clock
    limits_s: dict[str, float] = field(default_factory=dict)
    beats: dict[str, float] = field(default_factory=dict)

    def expect(self, loop: str, limit_s: float) -> None:
        self.limits_s[loop] = limit_s
        self.beats[loop] = self.clock.now()

    def beat(self, loop: str) -> None:
        self.beats[loop] = self.clock.now()

    def late(self) -> list[str]:
        """The loops that have not finished a turn for longer than they may."""
        now = self.clock.now()
        return [loop for loop, at in self.beats.items() if now - at > self.limits_s[loop]]


async def feed(pulse: Pulse, interval_s: float) -> None:
    """Until cancelled: pat the watchdog, unless a loop stands still; then say which, and let the manager restart us."""
    while True:
        late = pulse.late()
        if late:
            log.error("no turn finished in time by: %s; the watchdog is not fed", ", ".join(late))
        else:
            notify("WATCHDOG=1")
        await asyncio.sleep(interval_s)

"""Tells systemd how the daemon is (sd_notify(3)), and feeds its watchdog only while every loop makes progress."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

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


class Turning(Protocol):
    """A loop, as the watchdog sees it."""

    name: str
    last_turn_at: float  # boottime


def late(loops: Iterable[Turning], now: float, limit_s: float) -> list[str]:
    """The loops that have not come to the end of a turn for longer than `limit_s`."""
    return [loop.name for loop in loops if now - loop.last_turn_at > limit_s]


async def feed(loops: Sequence[Turning], clock: Clock, limit_s: float, interval_s: float) -> None:
    """Until cancelled: pat the watchdog, unless a loop stands still; then say which, and let the manager restart us."""
    while True:
        standing = late(loops, clock.now(), limit_s)
        if standing:
            log.error("no turn came to its end in %.0f s: %s; the watchdog is not fed", limit_s, ", ".join(standing))
        else:
            notify("WATCHDOG=1")
        await asyncio.sleep(interval_s)

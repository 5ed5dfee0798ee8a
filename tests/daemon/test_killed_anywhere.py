"""kill -9 of kvmpoold between any two effects of a start and of a failover: the next daemon comes to the same end."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from pathlib import Path

import pytest

from kvmpool.daemon.perform import POINTS
from kvmpool.dataplane.relays import ProcessRelays
from kvmpool.dataplane.workers import ProcessWorkers
from kvmpool.errors import KvmpoolError
from tests.daemon.host import CARDS, UUID, RealHost, xml

pytestmark = [pytest.mark.native, pytest.mark.slow]

_EFFECTS = {
    "up": ("publish-host", "publish-card"),
    "start": ("bind", "start-worker", "report-ready", "open-relay", "point-relay", "record-pointed"),
    "failover": ("rebind", "stop-worker", "forget", "unpoint-relay"),
}
# What one host with a healthy second card, and without libvirt, does not do; the sim does.
_ELSEWHERE = {
    "release",
    "lose",
    "trip-breaker",
    "forget-events",
    "report-broken",
    "follow-domain",
    "close-relay",
    "withdraw",
    "mark-started",
    "record-mode",
    "switch-mode",
    "reset-card",
    "attach-device",
    "detach-device",
    "tell-force-unplug",
    "force-unplug",
    "power-on",
}


def _points(story: str) -> list[str]:
    return [point for point in POINTS if point.partition("-")[2] in _EFFECTS[story]]


def test_every_point_is_tried_here_or_elsewhere() -> None:
    here = {effect for effects in _EFFECTS.values() for effect in effects}
    assert {point.partition("-")[2] for point in POINTS} == here | _ELSEWHERE


def _started_to_die(host: RealHost, point: str) -> None:
    try:
        host.start("tests.e2e.killed_daemon", point)
    except AssertionError:
        assert host.daemon is not None
        assert host.daemon.poll() == -signal.SIGKILL, host.log.read_text()


def _dies(host: RealHost) -> None:
    assert host.daemon is not None
    assert host.daemon.wait(60) == -signal.SIGKILL
    host.daemon = None


def _dies_unless_overtaken(host: RealHost) -> None:
    """Where the worker has ended before the relay is looked at, nothing points there any more: the daemon lives."""
    assert host.daemon is not None
    try:
        assert host.daemon.wait(5) == -signal.SIGKILL
        host.daemon = None
    except subprocess.TimeoutExpired:
        host.end(signal.SIGKILL)


async def _processes(host: RealHost) -> tuple[list[str], list[str]]:
    workers = await ProcessWorkers(host.run / "workers").list()
    relays = await ProcessRelays(host.run / "relays", host.run / "guests", listen="unix").list()
    return [f"{w.claim.name}#{w.generation} on {w.card}" for w in workers], [relay.domain for relay in relays]


def _settled(host: RealHost, card: int) -> bool:
    """One binding, ready and pointed, on this card; its worker and relay, and no other process."""
    try:
        bindings = host.get("/bindings")
    except KvmpoolError:
        return False
    if len(bindings) != 1:
        return False
    [body] = bindings
    if (body["phase"], body["pointed"], body["card_id"]) != ("ready", True, CARDS[card].uuid):
        return False
    workers, relays = asyncio.run(_processes(host))
    return workers == [f"gpu0#{body['generation']} on {CARDS[card].uuid}"] and relays == [UUID]


def _first_card(host: RealHost) -> int:
    return [spec.uuid for spec in CARDS].index(host.get("/bindings/vm0/gpu0")["card_id"])


@pytest.mark.parametrize("point", _points("up") + _points("start"))
def test_a_daemon_killed_while_a_domain_starts(tmp_path: Path, point: str) -> None:
    host = RealHost(tmp_path)
    try:
        _started_to_die(host, point)
        if host.daemon is not None and host.daemon.poll() is None:
            host.hook("prepare", xml())  # refused, as the daemon dies meanwhile; or let in, just before
        _dies(host)
        host.start()
        host.until(host.healthy, "the cards are not healthy")
        host.prepare(xml())
        host.until(lambda: _settled(host, _first_card(host)), f"killed at {point}, it does not settle")
    finally:
        host.__exit__()


@pytest.mark.parametrize("point", _points("failover") + _points("start"))
def test_a_daemon_killed_during_a_failover(tmp_path: Path, point: str) -> None:
    with RealHost(tmp_path) as host:
        host.until(host.healthy, "the cards are not healthy")
        host.prepare(xml())
        first = _first_card(host)
        endpoint = host.guest()
        host.end()
        _started_to_die(host, point)
        host.inject(str(first), "xid 79")
        if point.partition("-")[2] in ("bind", "open-relay"):
            time.sleep(0.5)  # a failover of a domain that runs does neither: the daemon lives
            host.end(signal.SIGKILL)
        elif point.partition("-")[2] == "unpoint-relay":
            _dies_unless_overtaken(host)
        else:
            _dies(host)
        host.start()
        host.until(lambda: _settled(host, 1 - first), f"killed at {point}, it does not settle")
        assert host.guest() == endpoint

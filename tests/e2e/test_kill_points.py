"""kvmpoold dies between any two effects of a start, a failover and an end: after its restart all ends the same."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvmpool.daemon.perform import POINTS
from kvmpool.errors import KvmpoolError
from tests.e2e.pool import Pool, until, vm

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Effects that this story has: the others need a lost host, an open breaker, a worker that does not start, many events.
_ABSENT: tuple[str, ...] = ("lose", "trip-breaker", "report-broken", "forget-events", "release")
_ABSENT += ("record-mode", "switch-mode", "reset-card")
_ABSENT += ("attach-device", "detach-device", "tell-force-unplug", "force-unplug", "power-on")
_RACED = "unpoint-relay"  # only where the relay is told before the worker's end has shown itself to it
_TOLD = [point for point in POINTS if not point.endswith(tuple(f"-{effect}" for effect in _ABSENT))]


@contextmanager
def _mortal_daemon(pool: Pool, point: str) -> Iterator[threading.Event]:
    """kvmpoold that dies at `point`, and is then started again as systemd would; the event says that it died."""
    died, over = threading.Event(), threading.Event()
    pool.lab.start_kvmpoold(pool.host, (sys.executable, "-m", "tests.e2e.killed_daemon", point), wait=False)

    def supervise() -> None:
        while not over.wait(0.05):
            if pool.host.daemon_pid("kvmpoold") is None:
                died.set()
                pool.lab.start_kvmpoold(pool.host)
                return

    supervisor = threading.Thread(target=supervise)
    supervisor.start()
    try:
        yield died
    finally:
        over.set()
        supervisor.join(30)


def _until_answers(pool: Pool) -> None:
    def answers() -> bool:
        try:
            return pool.all_healthy()
        except KvmpoolError:
            return False

    until(answers, 20.0, "kvmpoold does not come back")


def _tolerant(pool: Pool, seconds: float, what: str, generation: int) -> dict[str, object]:
    """The claim's served binding with a generation above this; kvmpoold may be away for a moment."""

    def look() -> dict[str, object] | None:
        try:
            found = pool.binding()
        except KvmpoolError:
            return None
        return found if found and found["generation"] > generation else None

    return until(look, seconds, what)


@pytest.mark.parametrize("point", _TOLD)
def test_a_kill_there_changes_nothing_in_the_end(pool_without_kvmpoold: Pool, point: str) -> None:
    pool = pool_without_kvmpoold
    pool.lab.define(pool.host, vm(memory_mib=16), firmware=True)
    with _mortal_daemon(pool, point) as died:
        _until_answers(pool)
        if pool.host.run("virsh", "-q", "start", "vm0", check=False).returncode != 0:
            _until_answers(pool)  # the hook waits for a restarting daemon, but not for long
            pool.host.virsh("start", "vm0")
        first = _tolerant(pool, 15.0, "the claim is not served", 0)
        pool.lab.fault(str(first["card"]).partition("/")[2], "xid 79")
        second = _tolerant(pool, 15.0, "no failover", int(str(first["generation"])))
        assert second["card"] != first["card"]
        assert pool.host.virsh("domstate", "vm0").strip() == "running"
        pool.host.virsh("destroy", "vm0")
        until(lambda: _nothing_left(pool), 15.0, "something of the guest is left")
        assert died.is_set() or point.endswith(_RACED), f"{point} was never reached"


def _nothing_left(pool: Pool) -> bool:
    try:
        rows = [*pool.bindings(), *(claim for claim in pool.api.get("/claims") if claim["state"] != "inactive")]
    except KvmpoolError:
        return False
    return not rows and not pool.processes("kvmpool-worker") and not pool.processes("kvmpool-relay")


def test_every_effect_is_either_told_or_known_to_be_absent() -> None:
    effects = {point.partition("-")[2] for point in POINTS}
    assert set(_ABSENT) < effects
    assert len(_TOLD) == 2 * (len(effects) - len(_ABSENT))

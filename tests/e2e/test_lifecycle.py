"""Ends and deaths: of a guest, of kvmpoold, of libvirtd. Running programs go on; what is over is released at once."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.pool import Pool, until, vm

pytestmark = pytest.mark.e2e

_RELEASED_S = 1.0


def _destroyed(pool: Pool) -> None:
    pool.host.virsh("destroy", "vm0")


def _killed(pool: Pool) -> None:
    (qemu,) = pool.processes("qemu-system-x86_64")
    os.kill(qemu, signal.SIGKILL)


def _powered_off(pool: Pool) -> None:
    pool.host.virsh("shutdown", "vm0")  # the firmware guest obeys its power button within 60 ms


@pytest.mark.parametrize("end", [_destroyed, _killed, _powered_off])
def test_the_end_of_a_guest_releases_its_binding_and_worker(pool: Pool, end: Callable[[Pool], None]) -> None:
    pool.start(vm(memory_mib=16), firmware=True)
    pool.ready_binding()
    assert len(pool.processes("kvmpool-worker")) == 1
    end(pool)
    until(lambda: not pool.processes("qemu-system-x86_64"), 5.0, "QEMU did not end")
    until(lambda: not pool.processes("kvmpool-worker"), _RELEASED_S, "the worker is still there")
    until(lambda: not pool.bindings(), _RELEASED_S, "the binding is still there")
    until(lambda: not pool.processes("kvmpool-relay"), _RELEASED_S, "the relay is still there")
    assert all(card["memory_taken_mib"] == 0 for card in pool.cards())


def test_a_program_never_notices_that_kvmpoold_was_killed_and_a_new_one_adopts(pool: Pool) -> None:
    pool.start(vm())
    before = pool.ready_binding()
    workers, relays = pool.processes("kvmpool-worker"), pool.processes("kvmpool-relay")
    pool.run("loop >/tmp/loop.log 2>&1 & echo $! >/tmp/loop.pid")

    def rounds() -> int:
        return int(pool.run("wc -l </tmp/loop.log").output)

    until(lambda: rounds() > 2, 20.0, "the program does not loop")
    with pool.without_kvmpoold():
        seen = rounds()
        until(lambda: rounds() > seen + 2, 20.0, "the program stands still without kvmpoold")
    after = pool.ready_binding()
    assert after["generation"] == before["generation"]
    assert set(workers) <= set(pool.processes("kvmpool-worker"))
    assert pool.processes("kvmpool-relay") == relays
    seen = rounds()
    until(lambda: rounds() > seen + 2, 20.0, "the program stands still after kvmpoold's return")
    assert pool.run("kill $(cat /tmp/loop.pid); grep -ci -e error -e fail -e wrong /tmp/loop.log").output == "0\n"


def test_a_guest_that_ended_while_kvmpoold_was_dead_is_released_at_its_return(pool: Pool) -> None:
    pool.start(vm(memory_mib=16), firmware=True)
    pool.ready_binding()
    with pool.without_kvmpoold():
        pool.host.virsh("destroy", "vm0")
    until(lambda: not pool.bindings(), 5.0, "the binding of a dead guest is still there")
    assert not pool.processes("kvmpool-worker")


@pytest.mark.parametrize("end", [_destroyed, _killed])
def test_without_kvmpoold_worker_and_relay_end_with_the_guest(pool: Pool, end: Callable[[Pool], None]) -> None:
    pool.start(vm(memory_mib=16), firmware=True)
    before = pool.ready_binding()
    until(lambda: _followed(pool) == pool.processes("qemu-system-x86_64"), 5.0, "the relay does not follow QEMU")
    with pool.without_kvmpoold():
        end(pool)
        until(lambda: not pool.processes("qemu-system-x86_64"), 5.0, "QEMU did not end")
        until(lambda: not pool.processes("kvmpool-worker"), _RELEASED_S, "the worker is still there")
        until(lambda: not pool.processes("kvmpool-relay"), _RELEASED_S, "the relay is still there")
        assert all(card.used_bytes == 0 for card in pool.lab.status().cards)
    until(lambda: not pool.bindings(), 5.0, "the binding of a dead guest is still there")
    until(lambda: not _left(pool), 5.0, "files of a relay are left")
    pool.start(vm(memory_mib=16), firmware=True)
    assert pool.ready_binding()["generation"] > before["generation"]


def _followed(pool: Pool) -> list[int]:
    """The processes, by their pids outside, that relays hold a pidfd of."""
    found = []
    for relay in pool.processes("kvmpool-relay"):
        for info in Path(f"/proc/{relay}/fdinfo").iterdir():
            found += [int(pid) for pid in re.findall(r"^Pid:\s+(\d+)$", info.read_text(), re.MULTILINE)]
    return found


def _left(pool: Pool) -> list[Path]:
    folders = [pool.host.outside(f"/run/kvmpool/{name}") for name in ("relays", "guests")]
    return [path for folder in folders if folder.exists() for path in folder.iterdir()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_guest_and_binding_live_on_when_libvirtd_is_restarted(pool: Pool, number: signal.Signals) -> None:
    pool.start(vm(memory_mib=16), firmware=True)
    before = pool.ready_binding()
    qemu, worker = pool.processes("qemu-system-x86_64"), pool.processes("kvmpool-worker")
    pool.host.end_daemon("libvirtd", number)
    time.sleep(1.0)
    pool.host.start_libvirt()
    assert pool.host.virsh("domstate", "vm0").strip() == "running"
    time.sleep(2.0)  # a wrong conclusion of kvmpoold's would have been carried out by now
    assert pool.ready_binding()["generation"] == before["generation"]
    assert (pool.processes("qemu-system-x86_64"), pool.processes("kvmpool-worker")) == (qemu, worker)
    pool.host.virsh("destroy", "vm0")
    until(lambda: not pool.bindings(), 5.0, "kvmpoold does not follow the new libvirtd")


def test_a_libvirtd_killed_while_prepare_runs_leaks_nothing(pool: Pool) -> None:
    """Neither stopped nor release ever come for that start: only the attempt's deadline ends it."""
    spec = vm(memory_mib=16)
    pool.lab.define(pool.host, spec, firmware=True)
    (daemon,) = [pool.host.daemon_pid("kvmpoold")]
    pool.host.run("kill", "-STOP", str(daemon))
    starter = threading.Thread(target=lambda: pool.host.run("virsh", "-q", "start", "vm0", check=False))
    starter.start()
    until(lambda: "prepare" in _hook_words(pool), 5.0, "the hook was not called")
    pool.kill("libvirtd")
    pool.host.run("kill", "-CONT", str(daemon))
    starter.join(30)
    pool.host.start_libvirt()
    assert pool.host.virsh("domstate", "vm0").strip() == "shut off"
    until(lambda: not pool.bindings(), 20.0, "the binding of a start that never came to its end is still there")
    until(lambda: not pool.processes("kvmpool-worker"), 5.0, "its worker is still there")
    until(lambda: not pool.processes("kvmpool-relay"), 5.0, "its relay is still there")
    pool.start(spec, firmware=True)
    pool.ready_binding()


def _hook_words(pool: Pool) -> str:
    return pool.host.run("ps", "-eo", "args").stdout.partition("hook.py")[2]


_HOLD = """\
#!/bin/sh
[ "$1 $2" = "vm0 prepare" ] && sleep 4
exit 0
"""


def test_a_held_domain_lock_keeps_nobody_else_waiting(pool: Pool) -> None:
    """libvirt holds a domain's lock during its hook: whatever asks libvirt about that domain stands still meanwhile."""
    hold = pool.host.outside("/etc/libvirt/hooks/qemu.d/60-hold")
    hold.write_text(_HOLD)
    hold.chmod(0o755)
    try:
        pool.lab.define(pool.host, vm("vm0", 1, memory_mib=16), firmware=True)
        starter = threading.Thread(target=lambda: pool.host.virsh("start", "vm0"))
        starter.start()
        held = pool.ready_binding("vm0/gpu0")
        began = time.monotonic()
        pool.lab.define(pool.host, vm("vm1", 2, memory_mib=16), firmware=True)
        pool.host.virsh("start", "vm1")
        pool.ready_binding("vm1/gpu0")
        assert time.monotonic() - began < 2.5
        assert starter.is_alive()
        pool.lab.fault(str(held["card"]).partition("/")[2], "xid 79")
        until(lambda: (now := pool.binding()) and now["card"] != held["card"], 2.0, "the held domain was not moved")
        assert starter.is_alive()
        starter.join(30)
        assert pool.host.virsh("domstate", "vm0").strip() == "running"
        assert pool.binding("vm0/gpu0")
    finally:
        hold.unlink()

"""A Linux guest with a real ivshmem device: its programs' copies go through it, and by TCP where it has none."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from lxml import etree

from kvmpool.lab.guests import GuestSpec
from tests.e2e.pool import CLAIM, Pool, until, vm

pytestmark = pytest.mark.e2e

_BYTES = 8_000_001


def _sharing(mib: int, name: str = "vm0", number: int = 1) -> GuestSpec:
    return GuestSpec(name, number, (CLAIM,), shared_mib=mib)


def _hold(pool: Pool, count: int, name: str = "vm0") -> list[str]:
    """Leaves that many programs running in the guest; how their sessions are reached."""
    for _ in range(count):
        pool.run("sleep 3600 | pinned 100000 hold >/tmp/hold.$$ 2>&1 & echo", name)

    def transports() -> list[str]:
        found: list[str] = (pool.binding(f"{name}/gpu0") or {"transports": []})["transports"]
        return found if len(found) == count else []

    return until(transports, 30.0, f"there are no {count} sessions")


def _figures(output: str) -> dict[str, int]:
    return {name: int(value) for name, sign, value in (line.partition("=") for line in output.splitlines()) if sign}


def _shown(pool: Pool, label: str) -> str:
    """What `kvmpool binding show` says of the transport."""
    shown = pool.host.run(sys.executable, "-m", "kvmpool.cli.main", "binding", "show", label).stdout
    return next(line.split(None, 1)[1].strip() for line in shown.splitlines() if line.startswith("Transport"))


def _files(pool: Pool) -> list[str]:
    return [name for name in pool.host.run("ls", "/dev/shm").stdout.split() if name.startswith("kvmpool-")]


def test_the_guest_s_programs_share_memory_with_their_sessions(pool: Pool) -> None:
    pool.start(_sharing(128))
    uuid = _sharing(128).uuid
    assert _files(pool) == [f"kvmpool-{uuid}"]
    mode = pool.host.run("stat", "-c", "%a %s", f"/dev/shm/kvmpool-{uuid}").stdout.split()
    assert mode == ["660", str(128 << 20)], "nobody but QEMU's group, whatever QEMU would have made"
    for program in ("vectorAdd", "matrixMul", f"pinned {_BYTES}"):
        ran = pool.run(f"KVMPOOL_LOG=/tmp/log {program}")
        assert ran.code == 0, ran.output
    log = pool.run("cat /tmp/log").output
    assert log.count("over shared memory") == 3, log
    assert _hold(pool, 3) == ["shm", "shm", "tcp"], "two windows fit, the third process goes by its socket"
    assert _shown(pool, "vm0/gpu0") == "shm, shm, tcp"
    pool.end_domains()
    until(lambda: not _files(pool), 15.0, "the memory of an ended domain is left")


def test_a_guest_without_the_device_goes_by_tcp(pool: Pool) -> None:
    pool.start(vm())
    ran = pool.run(f"KVMPOOL_LOG=/tmp/log pinned {_BYTES}; cat /tmp/log")
    assert "PASS" in ran.output
    assert "over its socket" in ran.output
    assert _hold(pool, 1) == ["tcp"]
    assert _shown(pool, "vm0/gpu0") == "tcp"
    assert _files(pool) == []


def test_copies_of_page_locked_memory_are_faster_than_by_tcp(pool: Pool) -> None:
    pool.start(_sharing(64))
    shm, tcp = (_figures(pool.run(f"KVMPOOL_SHM={wish} pinned {_BYTES}").output) for wish in "10")
    ratios = {name: tcp[name] / shm[name] for name in shm}
    print(f"shm {shm}; tcp {tcp}; tcp/shm {', '.join(f'{name} {ratio:.1f}' for name, ratio in ratios.items())}")
    assert ratios["in_ns"] > 1
    assert ratios["out_ns"] > 1


def test_a_claim_is_added_with_shared_memory_and_takes_it_along(pool: Pool) -> None:
    pool.lab.define(pool.host, GuestSpec("vm0", 1))
    kvmpool = [sys.executable, "-m", "kvmpool.cli.main"]
    pool.host.run(*kvmpool, "claim", "add", "vm0", "--memory", "1GiB", "--shared-memory", "64MiB")
    shmem = _shmem(pool)
    assert shmem is not None
    assert (shmem["name"], shmem["model"], shmem["size"]) == (
        f"kvmpool-{GuestSpec('vm0', 1).uuid}",
        "ivshmem-plain",
        "64 M",
    )
    pool.host.virsh("start", "vm0")
    pool.lab.wait_for_guest(pool.host, GuestSpec("vm0", 1))
    assert _hold(pool, 1) == ["shm"]
    pool.host.run(*kvmpool, "claim", "remove", "vm0")
    assert _shmem(pool) is None


def test_a_domain_that_names_another_one_s_memory_is_refused(pool: Pool) -> None:
    pool.start(_sharing(64, "vm1", 2))
    pool.lab.define(pool.host, _sharing(64))
    xml = pool.host.virsh("dumpxml", "vm0", "--inactive")
    pool.host.outside("/run/foreign.xml").write_text(
        xml.replace(f"kvmpool-{_sharing(64).uuid}", f"kvmpool-{_sharing(64, 'vm1').uuid}")
    )
    pool.host.virsh("define", "/run/foreign.xml")
    done = pool.host.run("virsh", "-q", "start", "vm0", check=False)
    assert done.returncode != 0
    assert "is not its own" in done.stderr


def _shmem(pool: Pool) -> dict[str, Any] | None:
    found = etree.fromstring(pool.host.virsh("dumpxml", "vm0", "--inactive").encode()).find("devices/shmem")
    if found is None:
        return None
    size, model = found.find("size"), found.find("model")
    assert size is not None
    assert model is not None
    return {"name": found.get("name"), "model": model.get("type"), "size": f"{size.text} {size.get('unit')}"}

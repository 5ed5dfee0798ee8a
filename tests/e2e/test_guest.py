"""Programs in a Linux guest: how they find their libcuda, what they may take, what garbage at their endpoint does."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmpool.lab.guests import GuestSpec
from tests.e2e.pool import Pool, until, vm

pytestmark = pytest.mark.e2e

_SHIM = "/usr/lib/x86_64-linux-gnu/libcuda.so.1"
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


def test_the_guest_s_libcuda_is_found_by_soname_without_a_preload(pool: Pool) -> None:
    pool.start(vm())
    loader = "/lib64/ld-linux-x86-64.so.2"
    ran = pool.run(f"echo preload=$LD_PRELOAD path=$LD_LIBRARY_PATH; {loader} --list $(which hog)")
    assert "preload= path=\n" in ran.output
    assert f"libcuda.so.1 => {_SHIM}" in ran.output
    assert pool.run("env -i /usr/local/bin/vectorAdd").code == 0


def test_a_statically_linked_loader_finds_it_too(pool: Pool) -> None:
    pool.start(vm())
    ran = pool.run("loader")
    assert (ran.output, ran.code) == ("1 device\n", 0)


def test_the_guest_s_nvml_shows_the_claim_and_who_uses_it(pool: Pool) -> None:
    pool.start(vm())
    fields = dict(line.split(": ", 1) for line in pool.run("deviceQuery").output.splitlines() if ": " in line)
    idle = [f"{fields['name']} {fields['uuid']}", f"0 of {fields['memory MiB']} MiB"]
    until(lambda: pool.run("monitor").output.splitlines() == idle, 5.0, "an idle claim is not shown as idle")
    pid = pool.run("loop >/tmp/loop.log 2>&1 & echo $! | tee /tmp/loop.pid").output.strip()
    until(lambda: pool.run("wc -l </tmp/loop.log").output != "0\n", 20.0, "loop does not start")
    assert pool.run("monitor").output.splitlines()[2:] == [pid]
    pool.run("kill $(cat /tmp/loop.pid)")
    until(lambda: pool.run("monitor").output.splitlines() == idle, 5.0, "an ended process is still shown")


def test_a_guest_without_a_claim_has_no_device(pool: Pool) -> None:
    pool.start(GuestSpec("plain", 3))
    assert pool.run("deviceQuery", "plain").code != 0
    assert pool.run("monitor", "plain").output == "NVML 9\n"  # DRIVER_NOT_LOADED


def test_a_process_beyond_its_claim_gets_out_of_memory_and_its_neighbour_nothing(pool: Pool) -> None:
    pool.start(vm("vm0", 1))
    pool.start(vm("vm1", 2))
    pool.run("loop >/tmp/loop.log 2>&1 & echo $! >/tmp/loop.pid", "vm1")
    ran = pool.run("hog")
    taken, _, code = ran.output.partition(" MiB, then ")
    assert int(code) == _OUT_OF_MEMORY, ran.output
    assert 768 <= int(taken) <= 1024
    seen = int(pool.run("wc -l </tmp/loop.log", "vm1").output)
    until(lambda: int(pool.run("wc -l </tmp/loop.log", "vm1").output) > seen, 20.0, "the neighbour stands still")
    faults = pool.run("kill $(cat /tmp/loop.pid); grep -ci -e error -e fail -e wrong /tmp/loop.log", "vm1").output
    assert faults == "0\n"
    assert pool.run("vectorAdd").code == 0, "the memory of an ended process must be free again"


_GARBAGE = """
import os, socket, sys
host, port = sys.argv[1].rsplit(":", 1)
address = (host.removeprefix("tcp:"), int(port))
kinds = [b"", b"\\xff" * 64, b"GET / HTTP/1.0\\r\\n\\r\\n", *(os.urandom(size) for size in (1, 7, 64, 4096))]
for number in range(int(sys.argv[2])):
    with socket.create_connection(address, 5) as peer:
        try:
            peer.sendall(kinds[number % len(kinds)])
        except OSError:
            pass
"""


def _rss_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def test_ten_thousand_garbage_connections_leave_relay_and_worker_as_they_were(pool: Pool) -> None:
    pool.start(vm())
    assert pool.run("vectorAdd").code == 0
    endpoint = pool.run("cat /run/kvmpool/endpoint").output.strip()
    (relay,), (worker, *_) = pool.processes("kvmpool-relay"), sorted(pool.processes("kvmpool-worker"))
    pool.host.run("/usr/bin/python3", "-c", _GARBAGE, endpoint, "500", timeout_s=60)
    before = _rss_kib(relay), _rss_kib(worker)
    pool.host.run("/usr/bin/python3", "-c", _GARBAGE, endpoint, "10000", timeout_s=120)
    after = _rss_kib(relay), _rss_kib(worker)
    print(f"RSS KiB relay {before[0]} -> {after[0]}, worker {before[1]} -> {after[1]}")
    assert after[0] - before[0] <= 256
    assert after[1] - before[1] <= 256
    assert pool.run("vectorAdd").code == 0

"""kvmpoold as a process: its options, its start without libvirt or a driver, its end that disturbs nobody."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.daemon.host import UUID, RealHost, xml

pytestmark = pytest.mark.native


def kvmpoold(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvmpool.kvmpoold", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_check_reads_the_configuration_and_tells_every_fault(tmp_path: Path) -> None:
    file = tmp_path / "k.toml"
    file.write_text("")
    good = kvmpoold("--config", str(file), "--check")
    assert (good.returncode, good.stderr) == (0, "")
    assert str(file) in good.stdout
    file.write_text("[hook]\ndeadline_s = 0\n[colour]\n")
    bad = kvmpoold("--config", str(file), "--check")
    assert (bad.returncode, bad.stdout) == (4, "")
    assert len(bad.stderr.splitlines()) == 2
    assert kvmpoold("--config", str(file)).stderr == bad.stderr
    assert kvmpoold("--version").stdout.startswith("kvmpoold ")
    assert kvmpoold("--colour").returncode == 2


def test_it_answers_without_libvirt_and_concludes_nothing_from_that(tmp_path: Path) -> None:
    with RealHost(tmp_path) as host:
        host.until(host.healthy, "the cards are not healthy")
        status = host.get("/status")
        assert "libvirt" in status["libvirt"]
        assert status["nvml"] == "ok"
        host.prepare(xml())
        time.sleep(12)  # longer than an attempt may wait for its domain
        assert host.get("/claims/vm0/gpu0")["state"] == "served"


def test_a_second_daemon_on_the_same_store_is_refused_and_disturbs_nothing(tmp_path: Path) -> None:
    with RealHost(tmp_path) as host:
        second = kvmpoold("--config", str(host.file))
        assert second.returncode == 4
        assert len(second.stderr.splitlines()) == 1
        assert host.get("/status")["host"] == "h0"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_its_end_leaves_workers_and_relays_and_the_next_one_adopts_them(tmp_path: Path, number: signal.Signals) -> None:
    with RealHost(tmp_path) as host:
        host.until(host.healthy, "the cards are not healthy")
        host.prepare(xml())
        before = host.get("/bindings/vm0/gpu0")
        token = (host.run / "guests" / UUID / "token").read_text()
        assert host.end(number) == (0 if number is signal.SIGTERM else -number)
        os.kill(before["worker_pid"], 0)
        host.start()
        host.until(lambda: host.get("/bindings/vm0/gpu0")["worker_pid"], "the worker is not adopted")
        after = host.get("/bindings/vm0/gpu0")
        same = ("generation", "worker_pid", "endpoint", "pointed", "phase")
        assert [after[name] for name in same] == [before[name] for name in same]
        assert (host.run / "guests" / UUID / "token").read_text() == token
        time.sleep(1.5)
        assert [body["label"] for body in host.get("/bindings")] == [before["label"]]


def test_the_service_manager_hears_ready_watchdog_and_stopping(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20)
        host = RealHost(tmp_path)
        try:
            host.start(NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="600000")
            heard = [manager.recv(200).decode() for _ in range(4)]
            assert heard[0].startswith("READY=1\n")
            assert heard[1:] == ["WATCHDOG=1"] * 3
            host.end()
            while (word := manager.recv(200)) == b"WATCHDOG=1":
                pass
            assert word == b"STOPPING=1"
        finally:
            host.__exit__()


def test_it_sleeps_while_nothing_happens(tmp_path: Path) -> None:
    with RealHost(tmp_path) as host:
        host.until(host.healthy, "the cards are not healthy")
        time.sleep(1)
        assert host.daemon is not None

        def cpu_s() -> float:
            assert host.daemon is not None
            words = Path(f"/proc/{host.daemon.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

        before = cpu_s()
        time.sleep(4)
        assert cpu_s() - before < 0.8, "an idle daemon takes less than a fifth of a core"


def test_no_capacity_and_bad_claims_reach_the_user_as_one_line(tmp_path: Path) -> None:
    with RealHost(tmp_path) as host:
        host.until(host.healthy, "the cards are not healthy")
        for text, told in (
            (xml("8192"), "no card can serve 8192 MiB (2 cards; h0/0000:41:00.0: "),
            (xml("-1"), "memory"),
            (xml()[:-30], "cannot be read"),
        ):
            done = host.hook("prepare", text)
            assert done.returncode == 1
            [line] = done.stderr.splitlines()
            assert told in line
        assert host.get("/bindings") == host.get("/claims") == []

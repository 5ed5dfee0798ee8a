"""ProcessWorkers: real processes, started detached, found again by whoever comes later, and ended for certain."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvmpool.core.model import Binding, CardId, ClaimKey, DomainUuid, Generation, HostName
from kvmpool.dataplane import launch, lock
from kvmpool.dataplane.workers import LOGS_KEPT, ProcessWorkers, virtual_pci, virtual_uuid
from kvmpool.errors import CardLost, DeadlinePassed, Unreachable
from tests.dataplane.plane import CARD, UUID, Control, Guest, Plane, gone, hello, status, wait_until

pytestmark = pytest.mark.native

CLAIM = ClaimKey(DomainUuid(UUID), "gpu0")
BINDING = Binding(CLAIM, Generation(1), "vm0", HostName("h0"), CardId(CARD), HostName("h0"), 64, 64, 50, 100)


@pytest.fixture
def workers(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessWorkers]:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(plane.programs / "fake"))
    made = ProcessWorkers(plane.folder / "workers", program=plane.programs / "kvmpool-worker", card_s=2.0, stop_s=1.0)
    yield made
    for seen in asyncio.run(made.list()):
        asyncio.run(made.stop(seen.claim, seen.generation, seen.pid))
    for log in plane.folder.glob("workers/*/*.log"):
        assert "Sanitizer" not in log.read_text()
        assert "runtime error" not in log.read_text()


def test_a_started_worker_serves_is_listed_and_stopped(workers: ProcessWorkers) -> None:
    async def story() -> None:
        seen = await workers.start(BINDING)
        assert (seen.claim, seen.generation, seen.card, seen.serving) == (CLAIM, 1, CARD, True)
        assert not seen.relay_connected
        assert await workers.list() == (seen,)
        assert await workers.start(BINDING) == seen  # idempotent
        other = await workers.start(replace(BINDING, generation=Generation(2)))
        assert await workers.list() == (seen, other)
        await workers.stop(CLAIM, Generation(1), seen.pid)
        assert gone(seen.pid)
        assert await workers.list() == (other,)
        await workers.stop(CLAIM, Generation(1), seen.pid)  # idempotent

    asyncio.run(story())


def test_starts_of_the_same_binding_at_once_give_one_worker(workers: ProcessWorkers) -> None:
    async def story() -> None:
        first, second = await asyncio.gather(workers.start(BINDING), workers.start(BINDING))
        assert first.pid == second.pid
        assert len(await workers.list()) == 1

    asyncio.run(story())


def test_a_worker_outlives_its_starter_and_is_no_child_of_it(plane: Plane, workers: ProcessWorkers) -> None:
    script = f"""
import asyncio, os, signal
from pathlib import Path
from kvmpool.dataplane.workers import ProcessWorkers
from tests.dataplane.test_workers import BINDING
folder, programs = Path({str(plane.folder)!r}), Path({str(plane.programs)!r})
workers = ProcessWorkers(folder / "workers", program=programs / "kvmpool-worker")
print(asyncio.run(workers.start(BINDING)).pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid = int(done.stdout)
    time.sleep(0.2)
    (seen,) = asyncio.run(workers.list())
    assert (seen.pid, seen.serving) == (pid, True)
    assert os.getsid(pid) == pid


def test_a_card_that_does_not_open_is_lost_with_the_drivers_word(
    workers: ProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA", "fail")
    with pytest.raises(CardLost) as error:
        asyncio.run(workers.start(BINDING))
    assert str(error.value) == (
        f"vm0/gpu0#1: card {CARD} does not open: cuInit failed: 100 no CUDA-capable device is detected"
    )
    assert asyncio.run(workers.list()) == ()


def test_a_missing_driver_is_said_as_such(workers: ProcessWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    with pytest.raises(CardLost, match="no driver: libcuda.so.1"):
        asyncio.run(workers.start(BINDING))


def test_a_hanging_card_is_lost_within_its_deadline(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(plane.programs / "fake"))
    monkeypatch.setenv("FAKE_CUDA", "hang")
    quick = ProcessWorkers(plane.folder / "workers", program=plane.programs / "kvmpool-worker", card_s=0.3)
    started = time.monotonic()
    with pytest.raises(CardLost, match="no answer in 300 ms"):
        asyncio.run(quick.start(BINDING))
    assert time.monotonic() - started < 3.0


def test_a_program_that_does_not_start_is_unreachable(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="cannot be started"):
        asyncio.run(ProcessWorkers(tmp_path / "w", program=tmp_path / "nothing").start(BINDING))
    with pytest.raises(Unreachable, match="did not start: it said nothing"):
        asyncio.run(ProcessWorkers(tmp_path / "w", program=Path("/bin/false")).start(BINDING))


def test_a_stopped_parent_is_not_serving_and_is_ended_all_the_same(workers: ProcessWorkers) -> None:
    async def story() -> None:
        seen = await workers.start(BINDING)
        os.kill(seen.pid, signal.SIGSTOP)
        (hung,) = await workers.list()
        assert (hung.pid, hung.serving) == (seen.pid, False)
        await workers.stop(CLAIM, Generation(1), seen.pid)
        assert gone(seen.pid)

    asyncio.run(story())


def test_the_memory_in_use_is_seen(plane: Plane, workers: ProcessWorkers) -> None:
    asyncio.run(workers.start(BINDING))
    plane.relay()
    plane.point()
    with plane.guest() as guest:
        guest.greet()
        guest.ask(f"charge {5 << 20}")
        (seen,) = asyncio.run(workers.list())
        assert (seen.memory_used_mib, seen.sessions, seen.relay_connected) == (5, 1, True)


def test_a_session_that_does_not_die_holds_the_lock_and_is_named(plane: Plane, workers: ProcessWorkers) -> None:
    """A traced process that was killed is not reaped until its tracer looks: as one that hangs in a driver."""
    seen = asyncio.run(workers.start(BINDING))
    plane.relay()
    plane.point()
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    with plane.guest() as guest:
        guest.greet()
        session = int(guest.ask("pid"))
        assert ptrace(0x4206, session, None, None) == 0, os.strerror(ctypes.get_errno())  # PTRACE_SEIZE
        with pytest.raises(DeadlinePassed, match="a session hangs in the driver"):
            asyncio.run(workers.stop(CLAIM, Generation(1), seen.pid))
        (left,) = asyncio.run(workers.list())
        assert (left.pid, left.serving) == (seen.pid, False)
        wait_until(lambda: "does not go: it is stuck in the driver" in _log(plane), 3.0)
        os.waitpid(session, 0)  # the tracer looks
    wait_until(lambda: asyncio.run(workers.list()) == (), 2.0)


def _log(plane: Plane) -> str:
    return (plane.folder / "workers" / UUID / "gpu0#1.log").read_text()


def test_what_a_dead_worker_left_is_tidied_and_logs_are_bounded(plane: Plane, workers: ProcessWorkers) -> None:
    seen = asyncio.run(workers.start(BINDING))
    os.kill(seen.pid, signal.SIGKILL)
    folder = plane.folder / "workers" / UUID
    wait_until(lambda: lock.holder(folder / "gpu0#1.lock") is None)
    assert (folder / "gpu0#1.sock").exists()
    assert asyncio.run(workers.list()) == ()
    again = asyncio.run(workers.start(BINDING))
    assert again.pid != seen.pid
    for number in range(100, 130):
        (folder / f"gpu0#{number}.log").write_text("old")
    asyncio.run(workers.stop(CLAIM, Generation(1), again.pid))
    assert sorted(path.suffix for path in folder.iterdir()) == [".log"] * LOGS_KEPT


def test_a_pid_that_is_somebody_elses_now_gets_no_signal() -> None:
    with subprocess.Popen(["sleep", "30"]) as stranger:
        lock.send_signal(lock.Holder(stranger.pid, 1), signal.SIGKILL)
        time.sleep(0.05)
        assert stranger.poll() is None
        lock.send_signal(lock.Holder(stranger.pid, lock.start_time(stranger.pid)), signal.SIGKILL)
        assert stranger.wait(5) == -signal.SIGKILL


def test_virtual_identity_is_constant_per_claim_and_differs_between_claims() -> None:
    other = ClaimKey(CLAIM.domain, "gpu1")
    assert virtual_uuid(CLAIM) == virtual_uuid(ClaimKey(DomainUuid(UUID), "gpu0"))
    assert virtual_uuid(CLAIM) != virtual_uuid(other)
    assert virtual_pci(CLAIM) != virtual_pci(other)
    assert len(virtual_pci(CLAIM)) == len("0000:41:00.0")


def test_under_systemd_a_program_gets_a_scope_of_its_own() -> None:
    words = launch.command(Path("/x/kvmpool-worker"), ["--a", "b"], "worker vm0/gpu0#1", systemd=True)
    assert words[:2] == ["systemd-run", "--scope"]
    assert words[words.index("--") + 1 :] == ["/x/kvmpool-worker", "--a", "b", "--detach"]
    assert launch.command(Path("/x/w"), [], "w", systemd=False) == ["/x/w", "--detach"]


def test_a_guests_socket_cannot_be_given_to_a_worker_by_anybody_but_its_relay(
    plane: Plane, workers: ProcessWorkers
) -> None:
    asyncio.run(workers.start(BINDING))
    plane.relay()
    with Guest(plane.endpoint) as guest, Control(plane.worker_socket()) as stranger:
        stranger.send(b"SESSION\n" + hello()[16:], guest.socket.fileno())
        assert stranger.receive() == ""
    assert status(plane.worker_socket())["refused"]["protocol"] == 1

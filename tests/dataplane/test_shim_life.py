"""The shim's connection: what it sends when, who waits for whom, and what happens when an end of it goes away."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.dataplane import shim
from tests.dataplane.remote import remote
from tests.dataplane.waiting import wait_until

pytestmark = pytest.mark.native


@pytest.fixture(params=shim.WAYS)
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[shim.Host]:
    with shim.host(tmp_path, request.param) as running:
        yield running


def test_a_thousand_launches_and_a_synchronise_are_one_round_trip(host: shim.Host) -> None:
    nothing = host.run("batch", "0", "0")
    one = host.run("batch", "1", "1")
    thousand = host.run("batch", "1000", "1")
    assert (nothing.code, one.code, thousand.code) == (0, 0, 0)
    assert thousand.stats["frames"] - one.stats["frames"] == 999
    assert thousand.stats["round_trips"] == one.stats["round_trips"] == nothing.stats["round_trips"] + 1


def test_launches_travel_together(host: shim.Host) -> None:
    stats = host.run("batch", "1000", "1").stats
    assert stats["writes"] < 200, "a system call for a few launches, not for each"


def test_with_kvmpool_sync_every_launch_is_a_round_trip(host: shim.Host) -> None:
    assert host.run("batch", "100", "1", KVMPOOL_SYNC="1").stats["round_trips"] >= 101


def test_a_call_nobody_waits_for_is_sent_soon_all_the_same(host: shim.Host) -> None:
    guest = host.start("unflushed")
    assert guest.stdout is not None
    assert guest.stdout.readline() == "waiting=1\n"
    wait_until(lambda: "cuStreamCreate" in host.driver_calls(), 10.0, "the stream is made")
    host.finish(guest, "\n")


def test_a_thread_that_waits_for_a_long_kernel_does_not_stall_the_others(host: shim.Host) -> None:
    run = host.run("threads", str(host.folder / "gate"))
    assert run.code == 0, run.lines
    assert run["still_running"] == 600, "the kernel had not ended meanwhile"
    assert run["worst_us"] < 1_000_000
    assert run["free_meanwhile"] == shim.MEMORY - (2 << 20), "freed memory counts as free at once"
    assert run.all("waited") == [0, 0, 0]


@pytest.mark.parametrize("flavour", [*shim.WAYS, "races", "races socket"])
def test_many_threads_at_once_each_get_their_own_results(tmp_path: Path, flavour: str) -> None:
    with shim.host(tmp_path, flavour) as host:
        run = host.run("stress", "8", TSAN_OPTIONS="halt_on_error=1")
    assert (run.code, run["failed"], run["all_free"]) == (0, 0, 1)


CROWD = 32


@pytest.mark.parametrize("flavour", ["plain", "checked", "races", "races socket"])
def test_a_crowd_of_threads_with_streams_events_and_modules_of_their_own(tmp_path: Path, flavour: str) -> None:
    """With "races" shim, session and program are all watched by ThreadSanitizer, which ends them at what it finds."""
    with shim.host(tmp_path, flavour, memory=512 << 20, TSAN_OPTIONS="halt_on_error=1") as host:
        run = host.run("crowd", str(CROWD), TSAN_OPTIONS="halt_on_error=1")
    assert (run.code, run.lines) == (0, ["wrong=0", "all_free=1"])


def test_a_crowd_under_the_race_checker_before_a_real_worker_and_card(tmp_path: Path) -> None:
    """There kernels and copies run beside each other, and replies come in another order than calls."""
    built = shim.build("races")
    with remote(tmp_path) as place:
        command, library = [str(built / "guest"), "crowd", str(CROWD)], str(built / "shim")
        done = place.guest(command, LD_LIBRARY_PATH=library, TSAN_OPTIONS="halt_on_error=1")
    assert (done.code, done.lines, done.errors) == (0, ["wrong=0", "all_free=1"], "")


def test_a_child_has_no_driver_and_leaves_its_parents_alone(host: shim.Host) -> None:
    # Not the child's leaks: gcc 12's sanitizer takes its allocator's locks at exit, and one that a thread held at the
    # fork is held for ever in the child. The flusher takes them while it starts; it has once it has sent a call.
    guest = host.start("fork", ASAN_OPTIONS="detect_leaks=0")
    assert guest.stdout is not None
    assert guest.stdout.readline() == "waiting=1\n"
    wait_until(lambda: "cuStreamCreate" in host.driver_calls(), 20.0, "the flusher has sent the call")
    run = host.finish(guest, "\n")
    assert (run["child_alloc"], run["child_init"], run["child_count"], run["child_exit"]) == (3, 3, 3, 0)
    assert (run["parent"], run["parent_synchronise"]) == (0, 0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_lost_worker_is_unavailable_until_a_new_context_dials_again(host: shim.Host, how: signal.Signals) -> None:
    guest = host.start("lost")
    assert guest.stdout is not None
    assert guest.stdout.readline() == "ready=1\n"
    (session,) = host.sessions()
    os.kill(session, how)
    wait_until(lambda: host.sessions() == [], 10.0, "the session is gone")
    run = host.finish(guest, "\n")
    assert [run[name] for name in ("synchronise", "alloc", "memset")] == [46, 46, 46]
    assert run["count"] == 0, "the device is still there"
    after = [run[name] for name in ("destroy", "create", "alloc_in_new", "memset_in_new", "synchronise_new")]
    assert after == [0, 0, 0, 0, 0]
    assert run.stats["dials"] == 2


def test_a_context_cannot_be_made_while_nobody_serves(tmp_path: Path) -> None:
    with shim.host(tmp_path, "plain") as host:
        guest = host.start("lost")
        assert guest.stdout is not None
        assert guest.stdout.readline() == "ready=1\n"
    run = host.finish(guest, "\n")  # the sessions ended with their host
    assert (run["destroy"], run["create"]) == (0, 46)


def test_when_the_guest_is_killed_its_session_ends_within_a_second(host: shim.Host) -> None:
    guest = host.start("lost")
    assert guest.stdout is not None
    assert guest.stdout.readline() == "ready=1\n"
    guest.kill()
    guest.communicate()
    wait_until(lambda: host.sessions() == [], 1.0, "the session is gone")


@pytest.mark.parametrize(("errno", "code"), [(2, 100), (13, 100), (11, 46), (71, 803), (19, 46)])
def test_a_refusal_becomes_the_right_error_and_its_reason_is_logged(tmp_path: Path, errno: int, code: int) -> None:
    with shim.host(tmp_path, "plain", "refuse", str(errno)) as host:
        run = host.run("init")
    assert (run["init"], run["count"]) == (code, 3)
    assert "the test said no" in run.log


def test_a_driver_that_does_not_start_is_an_unavailable_device(tmp_path: Path) -> None:
    with shim.host(tmp_path, "plain", STUB_INIT_FAILS="1") as host:
        run = host.run("init")
    assert run["init"] == 46
    assert "the card does not answer (CUDA error 999)" in run.log


@pytest.mark.parametrize(
    ("endpoint", "code"),
    [("unix:/nowhere/at/all", 46), ("tcp:127.0.0.1:1", 46), ("nonsense", 100), ("tcp:noport", 100)],
)
def test_an_endpoint_that_is_not_there_is_an_error_and_not_a_crash(host: shim.Host, endpoint: str, code: int) -> None:
    assert host.run("init", KVMPOOL_ENDPOINT=endpoint)["init"] == code


@pytest.mark.parametrize("case", ["memory", "fill", "fault", "contexts", "per_thread", "lookup"])
def test_a_statically_linked_program_finds_the_library_by_its_soname(tmp_path: Path, case: str) -> None:
    with shim.host(tmp_path, "plain") as host:
        dynamic = host.run(case)
        wait_until(host.settled, 20.0, "the first one's session has given all back")
        static = host.run(case, program="guest-static")
    assert static.code == 0, static.lines
    assert static.lines == dynamic.lines


def test_a_statically_linked_program_sends_each_call_at_once(tmp_path: Path) -> None:
    with shim.host(tmp_path, "plain") as host:
        guest = host.start("unflushed", program="guest-static")
        assert guest.stdout is not None
        assert guest.stdout.readline() == "waiting=1\n"
        wait_until(lambda: "cuStreamCreate" in host.driver_calls(), 10.0, "the stream is made")
        host.finish(guest, "\n")


@contextmanager
def forwarded(to: Path) -> Iterator[int]:
    """A TCP port of this machine whose first connection is passed on to the unix socket."""

    def pump(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with listener.accept()[0] as guest, socket.socket(socket.AF_UNIX) as session:
            session.connect(str(to))
            back = threading.Thread(target=pump, args=(session, guest))
            back.start()
            pump(guest, session)
            back.join()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(10)
        assert not thread.is_alive(), "the connection was closed at both ends"


@pytest.mark.parametrize("program", ["guest", "guest-static"])
def test_a_guest_reaches_its_session_over_tcp(tmp_path: Path, program: str) -> None:
    with shim.host(tmp_path, "plain") as host, forwarded(tmp_path / "s") as port:
        run = host.run("bulk", "3000000", program=program, KVMPOOL_ENDPOINT=f"tcp:127.0.0.1:{port}")
    assert (run.code, run["equal"]) == (0, 1)


def test_nothing_is_printed_and_no_log_appears_unless_asked(host: shim.Host) -> None:
    environment = host.environment()
    del environment["KVMPOOL_LOG"]
    done = subprocess.run(
        [host.built / "guest", "init"], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("init=0\ncount=0\n", "")
    assert not (host.folder / "log").exists()

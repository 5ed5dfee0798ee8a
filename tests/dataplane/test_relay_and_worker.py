"""A guest's socket goes through the relay to a session of the worker, and each end is the end of what hangs on it."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time

import pytest

from tests.dataplane.plane import CARD, UUID, Control, Plane, gone, hello, status, wait_until

pytestmark = pytest.mark.native


def test_a_guest_is_handed_to_the_session_of_its_claim(plane: Plane) -> None:
    plane.worker()
    plane.relay()
    assert plane.point() == "OK"
    with plane.guest() as guest:
        welcome = guest.greet()
        assert (welcome.status, welcome.memory_bytes, welcome.pci) == (0, 64 << 20, "0000:c0:00.0")
        assert welcome.uuid == bytes(range(15, -1, -1))
        assert guest.ask("hello there") == "hello there"
        assert guest.ask("card") == CARD
        seen = status(plane.worker_socket())
        assert (seen["sessions"], seen["relay_connected"], seen["generation"]) == (1, True, 1)
        assert seen["processes"][0]["program"] == "test"


def test_bytes_that_follow_the_hello_at_once_reach_the_session(plane: Plane) -> None:
    plane.worker()
    plane.relay()
    plane.point()
    with plane.guest() as guest:
        guest.socket.sendall(hello() + b"early words\n")
        assert guest.welcome().status == 0
        assert guest.line() == "early words"


def test_two_sessions_share_the_claims_memory_and_a_killed_one_gives_its_part_back(plane: Plane) -> None:
    plane.worker(memory_mib=64)
    plane.relay()
    plane.point()
    with plane.guest() as one, plane.guest() as two:
        one.greet()
        two.greet()
        assert one.ask(f"charge {40 << 20}") == "0"
        assert two.ask(f"charge {30 << 20}") == "-12"
        assert two.ask(f"charge {24 << 20}") == "0"
        assert two.ask("charge 1") == "-12"
        assert status(plane.worker_socket())["memory_used"] == 64 << 20
        os.kill(int(one.ask("pid")), signal.SIGKILL)
        assert one.ended(1.0)
        wait_until(lambda: two.ask("used") == str(24 << 20), 1.0, "the dead session's memory given back")
        assert two.ask(f"charge {40 << 20}") == "0"


def test_a_session_that_crashes_leaves_its_neighbour_alone(plane: Plane) -> None:
    plane.worker()
    plane.relay()
    plane.point()
    with plane.guest() as bad, plane.guest() as good:
        bad.greet()
        good.greet()
        bad.socket.sendall(b"crash\n")
        assert bad.ended(2.0)
        assert good.ask("still here") == "still here"
        wait_until(lambda: status(plane.worker_socket())["sessions"] == 1)
        wait_until(lambda: status(plane.relay_socket)["sessions"] == 1, what="the relay lets go of its copy")


def test_a_guest_that_leaves_frees_its_session_and_the_relays_copy(plane: Plane) -> None:
    plane.worker()
    plane.relay()
    plane.point()
    with plane.guest() as guest:
        guest.greet()
        pid = int(guest.ask("pid"))
    wait_until(lambda: gone(pid), 1.0)
    wait_until(lambda: status(plane.relay_socket)["sessions"] == 0, 1.0)


def test_a_killed_relay_ends_worker_and_sessions_within_a_second(plane: Plane) -> None:
    worker = plane.worker()
    relay = plane.relay()
    plane.point()
    with plane.guest() as guest:
        guest.greet()
        session = int(guest.ask("pid"))
        relay.kill()
        took = wait_until(lambda: worker.poll() is not None, 1.0)
        assert gone(session)
        assert guest.ended(1.0)
    print(f"relay killed: worker gone after {took * 1000:.0f} ms")
    assert worker.returncode == 0


def test_a_killed_worker_takes_its_sessions_with_it_and_the_relay_says_lost(plane: Plane) -> None:
    worker = plane.worker()
    plane.relay()
    plane.point()
    with plane.guest() as guest:
        guest.greet()
        session = int(guest.ask("pid"))
        worker.kill()
        wait_until(lambda: gone(session), 1.0)
        assert guest.ended(1.0)
    claim = status(plane.relay_socket)["claims"]["gpu0"]
    assert (claim["state"], claim["sessions"]) == ("lost", 0)
    assert "connection ended" in claim["reason"]


def test_a_hung_session_does_not_keep_a_worker_from_ending(plane: Plane) -> None:
    worker = plane.worker()
    plane.relay()
    plane.point()
    with plane.guest() as guest:
        guest.greet()
        session = int(guest.ask("pid"))
        os.kill(session, signal.SIGSTOP)
        with Control(plane.worker_socket()) as control:
            assert control.ask("STOP") == "OK"
        wait_until(lambda: worker.poll() is not None, 1.0)
        assert gone(session)


def test_a_silent_relay_ends_the_worker_after_ten_seconds(plane: Plane) -> None:
    worker = plane.worker()
    relay = plane.relay()
    plane.point()
    time.sleep(2.5)
    assert worker.poll() is None
    relay.send_signal(signal.SIGSTOP)
    took = wait_until(lambda: worker.poll() is not None, 12.0)
    assert 8.5 < took < 11.5
    assert "silent" in plane.log(worker)


def test_a_move_cuts_the_old_generations_sessions_and_serves_the_new(plane: Plane) -> None:
    old = plane.worker(1)
    plane.worker(2)
    plane.relay()
    plane.point(1)
    with plane.guest() as before:
        before.greet()
        assert plane.point(2) == "OK"
        assert before.ended(1.0)
        wait_until(lambda: old.poll() is not None, 1.0, "the old worker ends with its relay's connection")
    with plane.guest() as after:
        assert after.greet().status == 0
    assert status(plane.relay_socket)["claims"]["gpu0"]["generation"] == 2
    assert plane.point(1).startswith("ERROR gpu0: generation 1 is older than 2")


def test_a_guest_that_comes_during_a_failover_waits_and_is_served(plane: Plane) -> None:
    plane.relay()
    with plane.guest() as guest:
        guest.socket.sendall(hello())
        wait_until(lambda: status(plane.relay_socket)["waiting"] == 1)
        plane.worker(3)
        assert plane.point(3) == "OK"
        assert guest.welcome().status == 0
        assert guest.ask("served") == "served"


def test_a_guest_whose_claim_stays_unserved_is_told_why(plane: Plane) -> None:
    plane.relay("--hold-ms", "300")
    assert plane.tell_relay("UNPOINT gpu0\ncard h0/0000:41:00.0 failed: Xid 79") == "OK"
    with plane.guest() as guest:
        started = time.monotonic()
        welcome = guest.greet()
        assert 0.25 < time.monotonic() - started < 2.0
        assert (welcome.status, welcome.text) == (-11, "vm0/gpu0: card h0/0000:41:00.0 failed: Xid 79")
        assert guest.ended(1.0)


def test_an_unpointed_claims_sessions_are_cut(plane: Plane) -> None:
    plane.worker()
    plane.relay()
    plane.point()
    with plane.guest() as guest:
        guest.greet()
        assert plane.tell_relay("UNPOINT gpu0\nits card is drained") == "OK"
        assert guest.ended(1.0)


def test_two_claims_of_a_domain_have_their_own_workers(plane: Plane) -> None:
    plane.worker(1, "gpu0", 64)
    plane.worker(2, "gpu1", 32)
    plane.relay(claims=("gpu0", "gpu1"))
    assert plane.point(1, "gpu0") == "OK"
    assert plane.point(2, "gpu1") == "OK"
    with plane.guest() as zero, plane.guest() as one:
        assert zero.greet("gpu0").memory_bytes == 64 << 20
        assert one.greet("gpu1").memory_bytes == 32 << 20
        assert plane.tell_relay("UNPOINT gpu1\nwithdrawn") == "OK"
        assert one.ended(1.0)
        assert zero.ask("mine goes on") == "mine goes on"


def test_a_wrong_generation_is_refused_counted_and_logged(plane: Plane) -> None:
    worker = plane.worker(5)
    with Control(plane.worker_socket(5)) as relay:
        assert relay.ask("RELAY 4") == "ERROR vm0/gpu0#5: generation 4 is not served here"
        assert relay.receive() == ""
    seen = status(plane.worker_socket(5))
    assert seen["refused"]["generation"] == 1
    assert not seen["relay_connected"]
    assert 'relay refused: it asked for generation "4"' in plane.log(worker)
    plane.relay()
    with Control(plane.relay_socket) as control:
        answer = control.ask(f"POINT gpu0 6 64\n{plane.worker_socket(5)}")
    assert answer == "ERROR gpu0: its worker refused generation 6"
    assert worker.poll() is None


def test_a_second_relay_is_refused_while_the_first_is_served(plane: Plane) -> None:
    plane.worker()
    with Control(plane.worker_socket()) as first, Control(plane.worker_socket()) as second:
        assert first.ask("RELAY 1") == "OK"
        assert second.ask("RELAY 1") == "ERROR vm0/gpu0#1: another relay is connected"


def test_a_second_worker_of_a_generation_does_not_start(plane: Plane) -> None:
    plane.worker()
    process, word = plane.spawn("kvmpool-worker", *plane.worker_options(), ready=False)
    assert word == "busy"
    assert process.wait(5) == 3


def test_more_processes_than_a_worker_serves_are_refused_by_name(plane: Plane) -> None:
    plane.worker()
    plane.relay()
    plane.point()
    guests, answers = [], []
    for _ in range(65):
        guests.append(plane.guest())
        answers.append(guests[-1].greet())
    assert [answer.status for answer in answers] == [0] * 64 + [-16]
    assert answers[-1].text == "vm0/gpu0#1: no more processes at once"
    assert guests[0].ask("fine") == "fine"
    guests[0].socket.close()
    wait_until(lambda: status(plane.worker_socket())["sessions"] == 63)
    with plane.guest() as late:
        assert late.greet().status == 0
    for guest in guests:
        guest.socket.close()


@pytest.mark.parametrize(
    ("mode", "word"),
    [
        ("fail", "card cuInit failed: 100 no CUDA-capable device is detected"),
        ("hang", "card no answer in 500 ms"),
        ("crash", "card the driver ended the process that asked"),
        ("other", "card the driver opened GPU-ff000000-1111-2222-3333-444444444444 instead"),
    ],
)
def test_a_card_that_does_not_open_ends_the_worker_with_one_line(plane: Plane, mode: str, word: str) -> None:
    plane.environment["FAKE_CUDA"] = mode
    options = [*plane.worker_options(), "--card-deadline-ms", "500"]
    process, said = plane.spawn("kvmpool-worker", *options, ready=False)
    assert said == word
    assert process.wait(5) == 4
    assert f"card {CARD} does not open: {word[5:]}" in plane.log(process)


def test_the_lock_is_free_exactly_when_worker_and_sessions_are_gone(plane: Plane) -> None:
    worker = plane.worker()
    plane.relay()
    plane.point()
    with plane.guest() as guest, plane.worker_socket().with_suffix(".lock").open() as lock:
        guest.greet()
        pid, _ = lock.read().split()
        assert int(pid) == worker.pid
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        plane.tell_relay("CLOSE")
        worker.wait(5)
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_a_relay_that_follows_a_process_ends_with_it(plane: Plane) -> None:
    worker = plane.worker()
    relay = plane.relay()
    plane.point()
    domain = subprocess.Popen(["sleep", "60"])
    with open(f"/proc/{domain.pid}/stat") as stat:
        start_time = stat.read().rsplit(")", 1)[1].split()[19]
    assert plane.tell_relay(f"FOLLOW {domain.pid} 1").startswith("ERROR")
    assert plane.tell_relay(f"FOLLOW {domain.pid} {start_time}") == "OK"  # and hangs up: nobody watches
    assert relay.poll() is None
    domain.kill()
    domain.wait()
    wait_until(lambda: relay.poll() is not None and worker.poll() is not None, 1.0)


def test_the_acceptor_passes_a_guest_to_the_relay_of_its_cid(plane: Plane) -> None:
    cids = plane.folder / "cids"
    cids.mkdir()
    (cids / "7").write_text(UUID)
    plane.worker()
    plane.relay(endpoint="vsock:2:9960")
    assert plane.endpoint == "vsock:2:9960"
    plane.point()
    listen = f"unix:{plane.folder}/vsock"
    options = ("--dir", str(cids), "--relays", str(plane.folder / "relays"), "--listen", listen)
    acceptor, _ = plane.spawn("kvmpool-acceptor", *options, "--peer-cid", "7")
    plane.endpoint = listen
    with plane.guest() as guest:
        assert guest.greet().status == 0
        assert guest.ask("through vsock") == "through vsock"
    (cids / "7").unlink()
    with plane.guest() as stranger:
        assert stranger.ended(2.0)
    wait_until(lambda: "guest with CID 7 refused" in plane.log(acceptor), what="it is logged")
    (cids / "7").write_text("../../../etc/passwd/../relays-of-others")
    with plane.guest() as stranger:
        assert stranger.ended(2.0)
    assert acceptor.poll() is None

"""What a session may not do to its host and its neighbours, tried by a driver library that is the enemy."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmpool.native import native
from tests.dataplane import frames
from tests.dataplane.plane import NATIVE, WARNINGS, Guest, Plane, hello, short_path, status, wait_until

pytestmark = pytest.mark.native

root = pytest.mark.skipif(os.geteuid() != 0, reason="not root: sessions stay with the user who runs them")


@pytest.fixture
def naughty(short_dir: Path) -> Iterator[Plane]:
    """The worker as it is installed, with the enemy in place of the driver; `naughty.folder / "out"` is open to all."""
    short_dir.chmod(0o711)
    programs, out = short_dir / "programs", short_dir / "out"
    (programs / "fake").mkdir(parents=True)
    out.mkdir()
    out.chmod(0o777)
    for name in ("worker", "relay"):
        (programs / f"kvmpool-{name}").symlink_to(native(name))
    library = ["-shared", "-fPIC", "-o", str(programs / "fake" / "libcuda.so.1"), str(NATIVE / "naughty_cuda.c")]
    subprocess.run(["gcc", *WARNINGS, "-O1", "-Wno-missing-prototypes", *library], check=True)
    made = Plane(short_dir, programs, {"NAUGHTY_FOLDER": str(out)})
    yield made
    made.end()


def serve(plane: Plane, mode: str, *options: str) -> None:
    """Worker and relay; sessions from now on are `mode`."""
    plane.environment["NAUGHTY"] = mode
    plane.spawn("kvmpool-worker", *plane.worker_options(), *options)
    plane.relay()
    assert plane.point() == "OK"
    (plane.folder / "out" / "go").touch()


def told(plane: Plane, pid: int) -> dict[str, str]:
    """What the session with this pid wrote so far."""
    path = plane.folder / "out" / str(pid)
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(line.partition(" ")[::2] for line in lines)


def enter(plane: Plane, guest: Guest) -> int:
    """Begin a session that does not come back from cuInit yet; its pid."""
    before = {each["pid"] for each in status(plane.worker_socket())["processes"]}
    guest.socket.sendall(hello().replace(b"caps".ljust(16, b"\0"), frames.table().capability_hash()))
    found: list[int] = []

    def there() -> bool:
        found[:] = [e["pid"] for e in status(plane.worker_socket())["processes"] if e["pid"] not in before]
        return bool(found)

    wait_until(there, 5.0, "the session starts")
    return found[0]


@root
@pytest.mark.parametrize("user", ["nobody", ""])
def test_a_session_can_do_nothing_to_the_host(naughty: Plane, user: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    with short_path(naughty.folder / "out" / "listening") as path:
        listener.bind(path)
    (naughty.folder / "out" / "listening").chmod(0o777)
    listener.listen(1)
    serve(naughty, "try", *(["--user", user] if user else []))
    seen = status(naughty.worker_socket())["confined"]
    assert (seen["user"], seen["network"]) == (user, True)
    with naughty.guest() as guest:
        pid = enter(naughty, guest)
        wait_until(lambda: "end" in told(naughty, pid), 10.0, "all was tried")
    tried = told(naughty, pid)
    tried.pop("end")
    assert tried.pop("uid") == (str(65534) if user else "0")
    assert tried.pop("capability") == "0"
    allowed = {name: tried.pop(name) for name in list(tried) if name.startswith("allowed-")}
    assert allowed == {"allowed-socketpair": "0", "allowed-kill-self": "0", "allowed-exec": "0"}
    assert len(tried) >= 58
    files = {"parents-memory": errno.EACCES, "write-lock": errno.EBADF, "cut-turns": errno.EINVAL}
    files |= {"reopen-lock": errno.EACCES, "reopen-turns": errno.EACCES}
    got = {name: int(code) for name, code in tried.items()}
    assert got == {name: files.get(name, errno.EPERM) for name in tried}
    listener.close()


@root
def test_a_session_that_takes_all_memory_ends_alone(naughty: Plane) -> None:
    serve(naughty, "memory", "--user", "nobody", "--session-memory-mib", "256")
    assert status(naughty.worker_socket())["confined"]["memory"] in ("cgroup", "rlimit")
    (naughty.folder / "out" / "bomb").touch()
    with naughty.guest() as bad, naughty.guest() as good, naughty.guest() as after:
        first = enter(naughty, bad)
        wait_until((naughty.folder / "out" / "bombed").exists, 5.0, "it is the bomb")
        second = enter(naughty, good)
        assert bad.ended(10.0)
        wait_until(lambda: "end" in told(naughty, second), 20.0, "the neighbour computed")
        third = enter(naughty, after)
        wait_until(lambda: "end" in told(naughty, third), 20.0, "one more computed")
    assert "memory-bomb" not in told(naughty, first)
    assert told(naughty, second)["computed"] == told(naughty, third)["computed"]


@root
def test_a_session_that_takes_all_processes_gets_no_more_and_leaves_none(naughty: Plane) -> None:
    serve(naughty, "tasks", "--user", "nobody", "--session-tasks", "64")
    assert status(naughty.worker_socket())["confined"]["tasks"] in ("cgroup", "rlimit")
    (naughty.folder / "out" / "bomb").touch()
    with naughty.guest() as bad, naughty.guest() as good:
        first = enter(naughty, bad)
        wait_until((naughty.folder / "out" / "bombed").exists, 5.0, "it is the bomb")
        second = enter(naughty, good)
        wait_until(lambda: "tasks" in told(naughty, first), 10.0, "the bomb went off")
        seen = told(naughty, first)
        assert (int(seen["tasks-bomb"]), int(seen["tasks"]) <= 64) == (errno.EAGAIN, True)
        wait_until(lambda: "end" in told(naughty, second), 20.0, "the neighbour computed")
        assert bad.ended(10.0)
    wait_until(lambda: _processes_of("nobody") == 0, 5.0, "what it started is gone with it")


def _processes_of(user: str) -> int:
    done = subprocess.run(["ps", "-u", user, "-o", "pid="], capture_output=True, text=True, check=False)
    return len(done.stdout.split())


@root
def test_a_user_that_does_not_exist_is_named_at_the_start(naughty: Plane) -> None:
    process, word = naughty.spawn("kvmpool-worker", *naughty.worker_options(), "--user", "no-such-user", ready=False)
    assert word.startswith("failed ")
    assert "there is no user no-such-user" in naughty.log(process)


@pytest.mark.skipif(shutil.which("ps") is None, reason="no ps")
def test_what_is_not_confined_is_named(naughty: Plane) -> None:
    serve(naughty, "try", "--session-memory-mib", "64", "--session-tasks", "64")
    seen = status(naughty.worker_socket())["confined"]
    if seen["user"] == "":
        assert "no user of their own" in seen["missing"]
    assert (seen["memory"] == "cgroup") == ("memory" not in seen["missing"])
    assert (seen["tasks"] == "cgroup") == ("pids" not in seen["missing"])

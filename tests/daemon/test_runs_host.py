"""`kvmpool run` on one host: real kvmpoold, relay, worker and soft cards, real programs, and no libvirt."""

from __future__ import annotations

import grp
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmpool.lab import images
from kvmpool.native import native
from tests.daemon.host import RealHost

pytestmark = pytest.mark.native

RUN = [sys.executable, "-m", "kvmpool.cli.main", "run"]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    for path in images.programs():
        shutil.copy(path, folder)
    return folder


def healthy(folder: Path) -> Iterator[RealHost]:
    with RealHost(folder) as started:
        started.until(started.healthy, "the cards are not healthy")
        yield started


@pytest.fixture(scope="module")
def host() -> Iterator[RealHost]:
    """One for all tests here: each leaves it as it was."""
    with tempfile.TemporaryDirectory(prefix="kp-") as folder:  # short: unix socket addresses end at 107 bytes
        yield from healthy(Path(folder))


@pytest.fixture
def doomed(short_dir: Path) -> Iterator[RealHost]:
    """One whose cards may die."""
    yield from healthy(short_dir)


def environment(host: RealHost) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("KVMPOOL_")}
    return ours | {"KVMPOOL_SOCKET": str(host.client.socket), "LD_LIBRARY_PATH": "/opt/mine"}


def start(host: RealHost, *words: str | Path, memory: str = "512MiB", **options: Any) -> subprocess.Popen[str]:
    command = [*RUN, "--memory", memory, *map(str, words)]
    return subprocess.Popen(
        command, env=environment(host), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def run(host: RealHost, *words: str | Path, memory: str = "512MiB") -> tuple[int, str, str]:
    return finished(start(host, *words, memory=memory))


def released(host: RealHost) -> bool:
    return not host.get("/claims") and not host.get("/bindings")


def nothing_is_left(host: RealHost) -> None:
    host.until(lambda: released(host), "the claim is not released")
    host.until(lambda: not list((host.run / "relays").glob("*")), "the relay has left something")
    assert not list((host.run / "guests").glob("*"))
    assert not list((host.run / "workers").glob("*/*.sock"))


def serving(host: RealHost, process: subprocess.Popen[str]) -> dict[str, Any]:
    """The binding of a run once a session of it is there."""
    host.until(lambda: any(b["sessions"] for b in host.get("/bindings")), "no session comes", 20)
    assert process.poll() is None
    [binding] = [b for b in host.get("/bindings") if b["sessions"]]
    assert isinstance(binding, dict)
    return binding


@pytest.fixture(autouse=True)
def _nobody_else(host: RealHost) -> None:
    """The host is shared: what an earlier test started is gone before the next looks."""
    host.until(lambda: not list((host.run / "relays").glob("*")), "an earlier run is left")


def test_a_program_computes_on_a_claim_of_its_own_and_leaves_nothing(host: RealHost, programs: Path) -> None:
    code, out, err = run(host, "--compute", "30", "--name", "job-1", "--", programs / "vectorAdd")
    assert (code, "PASS" in out) == (0, True), err
    code, out, _ = run(host, programs / "deviceQuery", memory="1GiB")
    assert "memory MiB: 1024\n" in out
    nothing_is_left(host)
    kinds = [event["kind"] for event in host.get("/events") if event["subject"].startswith("job-1")]
    assert kinds[0] == "prepare"
    assert {"bound", "ready", "served", "withdrawn", "freed"} <= set(kinds)


def test_the_program_finds_its_gpu_by_its_environment_and_its_own_libraries_after_ours(host: RealHost) -> None:
    names = '"KVMPOOL_ENDPOINT", "KVMPOOL_TOKEN", "KVMPOOL_CLAIM", "LD_LIBRARY_PATH"'
    show = f"import json, os; print(json.dumps([os.environ[name] for name in ({names})] + [os.getpid()]))"
    process = start(host, "--", sys.executable, "-c", show)
    code, out, err = finished(process)
    assert code == 0, err
    endpoint, token, claim, libraries, pid = json.loads(out)
    assert endpoint.startswith(f"unix:{host.run}/relays/")
    assert len(token) == 32
    assert claim == "gpu0"
    shim, rest = libraries.split(":")
    assert (Path(shim, "libcuda.so.1").is_file(), rest) == (True, "/opt/mine")
    assert pid == process.pid


def test_the_programs_socket_is_for_its_group_only(host: RealHost) -> None:
    process = start(host, "--", "sleep", "60")
    try:
        host.until(lambda: list((host.run / "relays").glob("*/run/cuda.sock")), "no socket")
        [socket] = (host.run / "relays").glob("*/run/cuda.sock")
        modes = [path.stat().st_mode & 0o7777 for path in (socket, socket.parent, socket.parents[1])]
        assert modes == [0o660, 0o2710, 0o711]
        assert {socket.stat().st_uid, socket.parent.stat().st_uid} == {0}
    finally:
        process.kill()
        process.communicate()
    nothing_is_left(host)


@pytest.mark.parametrize("code", [0, 1, 4, 42, 255])
def test_its_exit_code_is_the_programs(host: RealHost, code: int) -> None:
    assert run(host, "--", "sh", "-c", f"exit {code}")[0] == code


def test_a_program_that_cannot_be_run_costs_no_claim(host: RealHost, tmp_path: Path) -> None:
    code, _, err = run(host, "--", "no-such-program")
    assert (code, err) == (127, "kvmpool: no-such-program: command not found\n")
    (tmp_path / "broken").write_bytes(b"\x7fELF nonsense")
    (tmp_path / "broken").chmod(0o755)
    code, _, err = run(host, "--", tmp_path / "broken")
    assert (code, "Exec format error" in err) == (126, True)
    nothing_is_left(host)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_reaches_the_program(host: RealHost, number: signal.Signals) -> None:
    trap = f'trap "echo got; exit 7" {number.name.removeprefix("SIG")}; echo here; while :; do sleep 0.05; done'
    process = start(host, "--", "sh", "-c", trap)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(number)
    assert finished(process)[:2] == (7, "got\n")
    nothing_is_left(host)


def test_a_program_that_a_signal_ends_is_128_and_its_number_for_a_shell(host: RealHost) -> None:
    words = " ".join([*RUN, "--memory", "512MiB", "--", "sh", "-c", "'kill -TERM $$'"])
    done = subprocess.run(["sh", "-c", f"{words}; echo $?"], env=environment(host), capture_output=True, text=True)
    assert done.stdout == "143\n"
    loud = "import signal, os; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert run(host, "--", sys.executable, "-c", loud)[1] == "True\n"
    pipe = "yes | head -n 1"
    assert run(host, "--", "sh", "-c", pipe)[:2] == (0, "y\n")


def test_a_killed_run_gives_its_claim_back(host: RealHost, programs: Path) -> None:
    process = start(host, "--", programs / "loop", "0", "20")
    serving(host, process)
    process.send_signal(signal.SIGKILL)
    begun = time.monotonic()
    host.until(lambda: released(host), "the claim is not released")
    assert time.monotonic() - begun < 2.0
    process.communicate()
    nothing_is_left(host)


def test_a_child_that_computes_on_keeps_the_claim_until_it_ends(host: RealHost, programs: Path) -> None:
    script = f"{programs}/loop 0 20 > /dev/null 2>&1 & echo $!; sleep 2; exit 5"
    process = start(host, "--", "sh", "-c", script)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        binding = serving(host, process)
        assert finished(process)[0] == 5
        time.sleep(3)
        [still] = host.get("/bindings")
        assert (still["label"], still["sessions"]) == (binding["label"], 1)
    finally:
        os.kill(child, signal.SIGKILL)
    nothing_is_left(host)


def test_a_run_outlives_kvmpoold_and_is_released_by_the_next_one(host: RealHost, programs: Path) -> None:
    one, two = start(host, "--", programs / "loop", "0", "20"), start(host, "--", "sleep", "60")
    binding = serving(host, one)
    host.until(lambda: len([b for b in host.get("/bindings") if b["pointed"]]) == 2, "the second is not served")
    host.end(signal.SIGKILL)
    two.kill()
    two.communicate()
    time.sleep(1)
    assert one.poll() is None
    host.start()
    host.until(
        lambda: [b["label"] for b in host.get("/bindings")] == [binding["label"]], "the ended run is not released"
    )
    assert host.get("/bindings")[0]["sessions"] == 1
    one.send_signal(signal.SIGTERM)
    out = finished(one)[1]
    assert " ok " in out
    assert not [line for line in out.splitlines() if " ok " not in line and "error" in line]
    nothing_is_left(host)


def test_a_run_whose_card_dies_goes_on_with_another(doomed: RealHost, programs: Path, tmp_path: Path) -> None:
    told = tmp_path / "told"
    process = start(doomed, "--", "sh", "-c", f"exec {programs}/loop 0 20 > {told}")
    first = serving(doomed, process)
    doomed.until(lambda: " ok " in told.read_text(), "it does not compute")
    doomed.inject(first["card"].partition("/")[2], "xid 79")
    doomed.until(lambda: _serves_again(doomed, first["generation"]), "it gets no other card", 20)
    [second] = [b for b in doomed.get("/bindings") if b["sessions"]]
    assert second["card"] != first["card"]
    assert second["endpoint"] == first["endpoint"]
    doomed.until(lambda: " ok " in told.read_text().rpartition("error")[2], "it does not compute on")
    assert " error " in told.read_text()
    assert "wrong" not in told.read_text()
    process.send_signal(signal.SIGTERM)
    assert finished(process)[0] == -signal.SIGTERM
    doomed.until(lambda: released(doomed), "the claim is not released")


def _serves_again(host: RealHost, generation: int) -> bool:
    return any(b["sessions"] and b["generation"] > generation for b in host.get("/bindings"))


def test_a_program_in_namespaces_of_its_own_is_served(host: RealHost, programs: Path) -> None:
    """As a container's is: another network, other pids; the socket is a file that it is shown."""
    own = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "--ipc", "--uts"]
    code, out, err = run(host, "--", *own, programs / "vectorAdd")
    assert (code, "PASS" in out) == (0, True), err
    nothing_is_left(host)


# Python itself may be where no other user can read: everything is imported before root's rights are dropped.
_AS_NOBODY = """
import encodings.idna, os, sys
from pathlib import Path
import kvmpool.cli.run as run
from kvmpool.cli.main import main
run.native = lambda name: Path(sys.argv[1])
os.setgroups([]); os.setgid({gid}); os.setuid({uid})
main(["run", "--memory", "512MiB", "--", *sys.argv[2:]])
"""


def test_a_user_of_the_apis_group_reaches_its_own_run_and_no_other(programs: Path, short_dir: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    host = RealHost(short_dir)
    group = grp.getgrgid(nobody.pw_gid).gr_name
    host.file.write_text(host.file.read_text().replace('group = "root"', f'group = "{group}"'))
    short_dir.chmod(0o755)
    shutil.copytree(programs, short_dir / "programs")
    (short_dir / "programs").chmod(0o755)
    shim = short_dir / "libraries" / "libcuda.so.1"
    shim.parent.mkdir()
    shutil.copy(native("shim"), shim)
    script = _AS_NOBODY.format(uid=nobody.pw_uid, gid=nobody.pw_gid)
    command = [sys.executable, "-c", script, str(shim)]
    with host:
        host.until(host.healthy, "the cards are not healthy")
        done = subprocess.run(
            [*command, short_dir / "programs/vectorAdd"],
            env=environment(host),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, "PASS" in done.stdout) == (0, True), done.stderr
        host.until(lambda: released(host), "the claim is not released")
        other = start(host, "--", "sleep", "60")
        host.until(lambda: [c["state"] for c in host.get("/claims")] == ["served"], "it is not served")
        socket = host.get("/claims")[0]["endpoint"].removeprefix("unix:")
        assert Path(socket).is_socket()
        look = f"import socket; socket.socket(socket.AF_UNIX).connect({socket!r})"
        intruder = f"import os, socket; os.setgroups([]); os.setgid(65533); os.setuid({nobody.pw_uid}); {look}"
        refused = subprocess.run([sys.executable, "-c", intruder], capture_output=True, text=True)
        assert "PermissionError" in refused.stderr
        other.kill()
        other.communicate()
        host.until(lambda: released(host), "the claim is not released")


def test_kvmpoold_killed_while_it_is_asked_leaves_nothing(doomed: RealHost) -> None:
    assert doomed.daemon is not None
    doomed.daemon.send_signal(signal.SIGSTOP)
    process = start(doomed, "--", "true")
    time.sleep(1)
    doomed.end(signal.SIGKILL)
    code, _, err = finished(process)
    assert (code, len(err.splitlines())) == (6, 1)
    doomed.start()
    nothing_is_left(doomed)


def test_no_capacity_is_4_with_each_cards_reason_and_leaves_nothing(host: RealHost) -> None:
    code, _, err = run(host, "--", "true", memory="64GiB")
    assert code == 4
    [line] = err.splitlines()
    assert "65536 MiB" in line
    for card in host.get("/cards"):
        assert f"{card['label']}: " in line
    assert line.endswith("Next: kvmpool card list")
    nothing_is_left(host)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--memory", "lots"], "memory"),
        (["--memory", "1GiB", "--compute", "200"], "compute"),
        (["--memory", "1GiB", "--name", "a/b"], "is no name for a run"),
    ],
)
def test_what_is_asked_wrongly_is_refused_in_one_line(host: RealHost, words: list[str], told: str) -> None:
    done = subprocess.run([*RUN, *words, "--", "true"], env=environment(host), capture_output=True, text=True)
    assert done.returncode == 4
    [line] = done.stderr.splitlines()
    assert told in line
    assert "domain" not in line
    nothing_is_left(host)


def test_a_name_is_used_once_at_a_time(host: RealHost) -> None:
    process = start(host, "--name", "mine", "--", "sleep", "60")
    host.until(lambda: [c["state"] for c in host.get("/claims")] == ["served"], "it is not served")
    assert host.get("/claims")[0]["label"] == "mine/gpu0"
    code, _, err = run(host, "--name", "mine", "--", "true")
    assert (code, "the name mine is taken" in err) == (4, True)
    process.kill()
    process.communicate()
    nothing_is_left(host)


def test_without_a_daemon_it_says_so(short_dir: Path) -> None:
    done = subprocess.run(
        [*RUN, "--memory", "1GiB", "--", "true"],
        env=os.environ | {"KVMPOOL_SOCKET": str(short_dir / "none.sock")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 6

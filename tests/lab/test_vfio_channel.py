"""Both ends of the command channel into the VFIO lab's host, over a socket pair instead of a serial port."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvmpool.errors import DeadlinePassed, NotFound, Unreachable
from kvmpool.lab import vfio_agent, vfio_channel, vfio_client
from kvmpool.lab.process import Done


def _serve_one(listener: socket.socket) -> None:
    """As a port does: whoever connects is answered line by line."""
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            return
        # Whoever leaves without reading its answers resets the connection; a port has no such thing, and serves on.
        with suppress(OSError), peer, peer.makefile("rb") as lines:
            for line in lines:
                vfio_agent.answer_into(peer.fileno(), line)


@pytest.fixture
def folder(short_dir: Path) -> Iterator[Path]:
    listeners = []
    for port in range(vfio_channel.PORTS):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(short_dir / vfio_channel.socket_name(port)))
        listener.listen()
        threading.Thread(target=_serve_one, args=(listener,), daemon=True).start()
        listeners.append(listener)
    yield short_dir
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def _run(folder: Path, *argv: str, check: bool = True, stdin: str = "", timeout_s: float = 20.0) -> Done:
    environment = {"PATH": os.environ["PATH"], "GIVEN": "by us"}
    return vfio_channel.run(folder, argv, environment, timeout_s=timeout_s, check=check, stdin=stdin)


def test_words_streams_environment_and_exit_code_pass(folder: Path) -> None:
    done = _run(
        folder, "sh", "-c", 'cat; echo "$GIVEN" >&2; echo "$1"; exit 3', "sh", "a  b", check=False, stdin="x\ny\n"
    )
    assert (done.stdout, done.stderr, done.returncode) == ("x\ny\na  b\n", "by us\n", 3)


def test_a_failure_is_told_with_its_last_words(folder: Path) -> None:
    with pytest.raises(Unreachable, match="sh -c echo why >&2; exit 3: exit 3: why"):
        _run(folder, "sh", "-c", "echo why >&2; exit 3")
    with pytest.raises(Unreachable, match="exit 127: .*no-such-program"):
        _run(folder, "no-such-program")


def test_a_command_that_takes_too_long_is_ended_with_its_children(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DeadlinePassed, match="no end after 0.5 s"):
        _run(folder, "sh", "-c", 'echo $$ >"$0"; sleep 100 & sleep 100', str(tmp_path / "pid"), timeout_s=0.5)
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_a_large_output_comes_whole_and_one_without_end_is_cut(folder: Path) -> None:
    assert len(_run(folder, "head", "-c", "3000000", "/dev/zero").stdout) == 3000000
    cut = _run(folder, "head", "-c", str(vfio_agent.OUTPUT_BYTES + 1), "/dev/zero").stdout
    assert len(cut) == vfio_agent.OUTPUT_BYTES


def test_more_callers_than_ports_are_served_one_after_the_other(folder: Path) -> None:
    answers: list[str] = []
    calls = range(vfio_channel.PORTS * 3)

    def call(number: int) -> None:
        answers.append(_run(folder, "sh", "-c", f"sleep 0.1; echo {number}").stdout.strip())

    threads = [threading.Thread(target=call, args=(number,)) for number in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(int, answers)) == list(calls)


def test_an_answer_that_nobody_waited_for_is_not_taken_for_another(folder: Path) -> None:
    for port in range(vfio_channel.PORTS):
        with vfio_channel.connected(folder, vfio_channel.socket_name(port)) as connection:
            connection.sendall(
                b'{"id": "old", "argv": ["echo", "old"], "environment": {}, "stdin": "", "timeout_s": 5}\n'
            )
    assert _run(folder, "echo", "new").stdout == "new\n"


def test_garbage_on_a_port_is_answered_to_nobody(folder: Path) -> None:
    with vfio_channel.connected(folder, vfio_channel.socket_name(0)) as connection:
        connection.sendall(b'{"id": 1}\n[]\nnull\n\xff\xfe\n{"id"')
        assert connection.recv(1000).startswith(b'{"id": ""}\n')
    assert _run(folder, "echo", "well").stdout == "well\n"


def test_a_socket_in_the_host_is_asked_and_answers_until_it_closes(folder: Path, short_dir: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(short_dir / "inner"))
    listener.listen()

    def serve() -> None:
        with listener.accept()[0] as peer:
            peer.sendall(b"you said " + peer.recv(100) + b"\0\xff")

    thread = threading.Thread(target=serve)
    thread.start()
    assert vfio_channel.exchange(folder, str(short_dir / "inner"), b"hello", 10) == b"you said hello\0\xff"
    thread.join()
    listener.close()
    with pytest.raises(ConnectionRefusedError, match="refused"):
        vfio_channel.exchange(folder, str(short_dir / "inner"), b"hello", 10)


def test_without_a_host_it_says_so(short_dir: Path) -> None:
    with pytest.raises(Unreachable, match="is not running.*kvmpool lab up --vfio"):
        _run(short_dir, "true")


def test_the_api_in_the_host_is_asked_as_any_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "kvmpoold.sock"))
    listener.listen()
    monkeypatch.setattr(vfio_client, "DEFAULT_SOCKET", folder / "kvmpoold.sock")
    asked: list[tuple[str, bytes]] = []

    def serve() -> None:
        for status, body in (
            (b"200 OK", b'{"name": "l1"}'),
            (b"404 Not Found", b'{"error": "no", "kind": "not-found"}'),
        ):
            with listener.accept()[0] as peer, peer.makefile("rwb") as stream:
                head = [line.strip() for line in iter(stream.readline, b"\r\n")]
                assert b"Connection: close" in head
                length = next((int(line.split()[1]) for line in head if line.startswith(b"Content-Length")), 0)
                asked.append((head[0].decode(), stream.read(length)))
                stream.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    thread = threading.Thread(target=serve)
    thread.start()
    client = vfio_client.HostClient(folder)
    assert client.get("/status") == {"name": "l1"}
    with pytest.raises(NotFound, match="no"):
        client.post("/cards/x/mode", {"mode": "off"})
    thread.join()
    listener.close()
    assert asked == [("GET /v1/status HTTP/1.1", b""), ("POST /v1/cards/x/mode HTTP/1.1", b'{"mode": "off"}')]
    with pytest.raises(Unreachable):
        client.get("/status")

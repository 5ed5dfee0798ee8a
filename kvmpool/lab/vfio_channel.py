"""Runs a command in the VFIO lab's host, through one of the serial ports that vfio_agent.py serves there.

A port has one caller at a time: callers take turns by a lock file beside its socket, which ends with its process.
"""

from __future__ import annotations

import base64
import fcntl
import json
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from kvmpool.errors import DeadlinePassed, Unreachable
from kvmpool.lab import process, sockets
from kvmpool.lab.process import Done

PORTS = 4  # commands at once; more wait
NOT_STARTED, TIMED_OUT = 127, 124  # vfio_agent.py's
_GRACE_S = 30.0  # the answer's own way, on a machine that is busy with other things


def socket_name(port: int) -> str:
    return f"port{port}"


def run(
    folder: Path, argv: Sequence[str], environment: Mapping[str, str], *, timeout_s: float, check: bool, stdin: str
) -> Done:
    """Raises as process.run does; what is printed is text, whatever bytes it has."""
    words = list(argv)
    body = {"argv": words, "environment": dict(environment)}
    answer = _asked(folder, body, stdin.encode(), timeout_s)
    code = int(answer["code"])
    out, err = (base64.b64decode(answer[name]).decode(errors="replace") for name in ("stdout", "stderr"))
    if code == TIMED_OUT and check:
        raise DeadlinePassed(f"{' '.join(words)}: no end after {timeout_s:g} s")
    if code != 0 and check:
        said = (err.strip() or out.strip()).replace("\n", "; ")
        raise Unreachable(f"{' '.join(words)}: exit {code}: {said[-500:]}")
    return subprocess.CompletedProcess(words, code, out, err)


def exchange(folder: Path, path: str, given: bytes, timeout_s: float) -> bytes:
    """Send `given` to a unix socket in the host; what it answers until it closes. Raises OSError as a socket would."""
    answer = _asked(folder, {"unix": path}, given, timeout_s)
    if answer["code"] == TIMED_OUT:
        raise TimeoutError(f"{path} did not answer within {timeout_s:g} s")
    if answer["code"] != 0:
        raise ConnectionRefusedError(base64.b64decode(answer["stderr"]).decode(errors="replace"))
    return base64.b64decode(answer["stdout"])


def _asked(folder: Path, body: dict[str, Any], stdin: bytes, timeout_s: float) -> dict[str, Any]:
    mark = secrets.token_hex(8)
    request = {"id": mark, "stdin": base64.b64encode(stdin).decode(), "timeout_s": timeout_s, **body}
    deadline = time.monotonic() + timeout_s + _GRACE_S
    with _free_port(folder, deadline) as port, closing(connected(folder, socket_name(port))) as connection:
        connection.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            connection.sendall(json.dumps(request).encode() + b"\n")
            return _answer(connection, mark, deadline)
        except TimeoutError:
            raise DeadlinePassed(
                "the VFIO lab's host did not answer. Next: see console.log in the lab's folder"
            ) from None
        except ConnectionError as error:
            raise _dead(error) from error


def _answer(connection: socket.socket, mark: str, deadline: float) -> dict[str, Any]:
    """The answer with this id; those to callers that did not wait may come before it."""
    waiting = b""
    while True:
        connection.settimeout(max(0.1, deadline - time.monotonic()))
        piece = connection.recv(1 << 16)
        if not piece:
            raise ConnectionResetError("it ended before it answered")
        *lines, waiting = (waiting + piece).split(b"\n")
        for line in lines:
            found = _parsed(line)
            if found.get("id") == mark:
                return found


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:  # the end of an answer whose beginning nobody read
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def _free_port(folder: Path, deadline: float) -> Iterator[int]:
    files = [(folder / f"{socket_name(port)}.lock").open("w") for port in range(PORTS)]
    try:
        taken: list[int] = []

        def take() -> bool:
            for port, file in enumerate(files):
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                taken.append(port)
                return True
            return False

        if not process.holds_within(take, max(0.0, deadline - time.monotonic()), 0.05):
            raise DeadlinePassed(f"{PORTS} other commands run in the VFIO lab's host. Next: wait for them")
        yield taken[0]
    finally:
        for file in files:
            file.close()


def connected(folder: Path, name: str) -> socket.socket:
    """One of QEMU's sockets in the lab's folder. Raises Unreachable."""
    try:
        return sockets.connected(folder / name)
    except OSError as error:
        raise _dead(error) from error


def _dead(error: OSError) -> Unreachable:
    why = f"the VFIO lab's host is not running ({error.strerror or error})"
    return Unreachable(f"{why}. Next: kvmpool lab down, then kvmpool lab up --vfio")

"""Program: runs commands inside the VFIO lab's host for whoever is connected to its virtio-serial ports.

Started by guest/host/boot with the machine's own python3 -I -S: standard library only, little to import under TCG.
A request is one line of JSON, an answer too (vfio_channel.py is the other end):

    {"id", "argv", "environment", "stdin", "timeout_s"}  ->  {"id", "code", "stdout", "stderr"}
    {"id", "unix": path, "stdin", "timeout_s"}           ->  the same; stdout is what the socket sent until its end

Bytes are in base64. A port serves one request at a time; there are several ports. A command that is not done in time is
killed with all that it started, and its code is 124.
"""

import base64
import glob
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

PORT_PREFIX = "org.kvmpool.lab."
TIMED_OUT, NOT_STARTED = 124, 127
OUTPUT_BYTES = 8 << 20  # of each stream that is answered; the rest is dropped
REQUEST_BYTES = 64 << 20
POLL_S = 0.1  # a port to which nobody is connected reads as ended


def main() -> int:
    ports = [path for path in glob.glob("/sys/class/virtio-ports/*") if _name(path).startswith(PORT_PREFIX)]
    if not ports:
        print("no port of the lab", file=sys.stderr)
        return 1
    threads = [threading.Thread(target=_serve, args=("/dev/" + os.path.basename(path),)) for path in ports]
    for thread in threads:
        thread.start()
    with open("/dev/ttyS0", "w", encoding="ascii") as console:
        console.write("READY\n")
    for thread in threads:
        thread.join()
    return 0


def _name(port: str) -> str:
    with open(port + "/name", encoding="ascii") as file:
        return file.read().strip()


def _serve(device: str) -> None:
    fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    waiting = b""
    while True:
        piece = os.read(fd, 65536)
        if not piece:
            waiting = b""  # whoever was there has gone, and half a request with him
            time.sleep(POLL_S)
            continue
        waiting += piece
        *lines, waiting = waiting.split(b"\n")
        if len(waiting) > REQUEST_BYTES:
            waiting = b""
        for line in lines:
            answer_into(fd, line)


def answer_into(fd: int, line: bytes) -> None:
    """Do what a request asks for, and write its answer."""
    data = json.dumps(_answer(line)).encode() + b"\n"
    while data:
        data = data[os.write(fd, data) :]


def _answer(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
        given = base64.b64decode(request["stdin"])
        timeout_s = float(request["timeout_s"])
        mark = str(request["id"])
    except (ValueError, KeyError, TypeError):
        return {"id": ""}  # the rest of a request whose beginning was lost: nobody waits for its answer
    try:
        if "unix" in request:
            code, out, err = 0, _asked(request["unix"], given, timeout_s), b""
        else:
            code, out, err = _ran(request["argv"], request["environment"], given, timeout_s)
    except TimeoutError:
        code, out, err = TIMED_OUT, b"", b"no answer in time"
    except OSError as error:
        code, out, err = NOT_STARTED, b"", str(error).encode()
    return {"id": mark, "code": code, "stdout": _text(out), "stderr": _text(err)}


def _text(data: bytes) -> str:
    return base64.b64encode(data[:OUTPUT_BYTES]).decode()


def _ran(argv: list[str], environment: dict[str, str], given: bytes, timeout_s: float) -> tuple[int, bytes, bytes]:
    pipe = subprocess.PIPE
    child = subprocess.Popen(
        argv, env=environment, cwd="/", stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    )
    try:
        out, err = child.communicate(given, timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
        return TIMED_OUT, out, err
    return child.returncode, out, err


def _asked(path: str, given: bytes, timeout_s: float) -> bytes:
    """What a unix socket sends after `given`, until it closes."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        connection.connect(path)
        connection.sendall(given)
        pieces = []
        while piece := connection.recv(65536):
            pieces.append(piece)
        return b"".join(pieces)


if __name__ == "__main__":
    sys.exit(main())

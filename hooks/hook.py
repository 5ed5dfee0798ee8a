"""The hook's client: hands one libvirt hook call to kvmpoold over its unix socket and turns the answer into a status.

Run by hooks/qemu as `python3 -I -S hook.py DOMAIN OP SUBOP EXTRA`, XML on stdin, only for domains that name our
namespace. Exit 0: go on. Exit 3: refused, with one line on stderr. Standard library only, and of it as little as
possible (http.client would triple the cost of the bare interpreter); json and expat are imported only after a failure.
This file knows nothing of claims: kvmpoold reads them.

Beside it, `hook.conf` (written by `kvmpool host join`) may hold lines `socket=PATH` and `deadline_s=SECONDS`.
"""

import os
import socket
import sys
from contextlib import suppress
from time import monotonic, sleep

SOCKET = "/run/kvmpool/kvmpoold.sock"
DEADLINE_S = 5.0  # libvirt holds the domain's lock meanwhile
NOTICE_DEADLINE_S = 1.0  # for calls that only wake the daemon
RESTART_S = 1.5  # a daemon that is being restarted gets this long to listen again
ANSWER_MAX = 65536
FAIL_CLOSED = ("prepare", "start", "migrate", "restore")
REFUSED = 3


def main() -> int:
    domain, op, subop, extra = (sys.argv[1:5] + ["-"] * 4)[:4]
    path, deadline_s = _settings()
    closed = op in FAIL_CLOSED
    until = monotonic() + (deadline_s if closed else min(NOTICE_DEADLINE_S, deadline_s))
    xml = sys.stdin.buffer.read().decode("utf-8", "replace")
    fields = {"domain": domain, "subop": subop, "extra": extra, "xml": xml}
    body = "{" + ", ".join(f'"{name}": {_json_string(value)}' for name, value in fields.items()) + "}"
    try:
        status, answer = _post(path, f"/v1/hooks/{op}", body.encode("utf-8", "replace"), until, closed)
    except OSError as fault:
        if not closed or not _has_claim(xml):
            return 0
        why = "no answer in time" if isinstance(fault, TimeoutError) else (fault.strerror or str(fault))
        return _refuse(
            f"kvmpool: domain {domain} claims a GPU and kvmpoold does not answer on {path} ({why}). "
            "Next: systemctl restart kvmpoold, then start the domain again"
        )
    if status == 200 or not closed:
        return 0
    return _refuse(f"kvmpool: {_reason(domain, status, answer)}")


def _settings() -> tuple[str, float]:
    path, deadline_s = SOCKET, DEADLINE_S
    try:
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "hook.conf"), encoding="utf-8") as conf:
            for line in conf:
                name, _, value = line.strip().partition("=")
                if name == "socket":
                    path = value
                elif name == "deadline_s":
                    deadline_s = float(value)
    except (OSError, ValueError):
        pass  # the defaults hold
    return path, deadline_s


def _json_string(text: str) -> str:
    out = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    if out.isprintable():
        return f'"{out}"'
    return '"' + "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in out) + '"'


def _post(path: str, target: str, body: bytes, until: float, patient: bool) -> tuple[int, bytes]:
    """Status and body of the answer. Raises OSError (TimeoutError after `until`)."""
    with _connect(path, until, patient) as peer:
        head = f"POST {target} HTTP/1.1\r\nHost: kvmpool\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        with suppress(BrokenPipeError, ConnectionResetError):  # it may answer (too large) before it has read it all
            peer.sendall(head.encode("ascii", "replace") + body)
        answer = b""
        while len(answer) < ANSWER_MAX:
            peer.settimeout(_left(until))
            part = peer.recv(ANSWER_MAX)
            if not part:
                break
            answer += part
    head_text, _, rest = answer.partition(b"\r\n\r\n")
    words = head_text.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        raise OSError("the connection ended without an answer")
    return int(words[1]), rest


def _connect(path: str, until: float, patient: bool) -> socket.socket:
    give_up = min(until, monotonic() + (RESTART_S if patient else 0.0))
    while True:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            peer.settimeout(_left(until))
            peer.connect(path)
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as fault:
            peer.close()
            # EAGAIN is a full backlog (unix(7)): somebody listens, but is slow; that is worth the whole deadline
            if monotonic() >= (until if isinstance(fault, BlockingIOError) else give_up):
                raise
            sleep(0.05)
        except BaseException:
            peer.close()
            raise
        else:
            return peer


def _left(until: float) -> float:
    left = until - monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _has_claim(xml: str) -> bool:
    """Whether an element of our namespace named `claim` is there; one that only mentions it is not ours.

    An XML that cannot be read to its end and showed no claim before is taken as ours: fail closed.
    """
    from xml.parsers import expat  # noqa: PLC0415  costs milliseconds that only a failing call pays

    found = False

    def start(name: str, _attributes: object) -> None:
        nonlocal found
        space, _, local = name.rpartition(" ")
        found = found or (local == "claim" and space.startswith("urn:kvmpool:domain:"))

    parser = expat.ParserCreate("utf-8", " ")
    parser.StartElementHandler = start
    try:
        parser.Parse(xml.encode("utf-8", "replace"), True)
    except expat.ExpatError:
        return True
    return found


def _reason(domain: str, status: int, answer: bytes) -> str:
    import json  # noqa: PLC0415

    try:
        text = str(json.loads(answer)["error"])
    except (ValueError, KeyError, TypeError):
        text = f"domain {domain}: kvmpoold answered {status} without a reason. Next: journalctl -u kvmpoold"
    return " ".join(text.split())


def _refuse(line: str) -> int:
    sys.stderr.write(line + "\n")
    return REFUSED


if __name__ == "__main__":
    try:
        code = main()
    except Exception as fault:  # noqa: BLE001  the edge: libvirt shows stderr to a person, one line it must be
        code = _refuse(f"kvmpool: the hook failed: {type(fault).__name__}: {' '.join(str(fault).split())}")
    sys.stderr.flush()
    os._exit(code)  # nothing is left to tear down, and tearing down costs time

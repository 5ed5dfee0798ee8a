"""The one way in for programs: HTTP on kvmpoold's unix socket, its errors turned back into kvmpool.errors.

Synchronous: its users are the CLI and tests. Knows paths and bodies, not what they mean.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from kvmpool.errors import (
    CardBusy,
    ClaimInvalid,
    ConfigInvalid,
    Conflict,
    DeadlinePassed,
    Denied,
    KvmpoolError,
    NoCapacity,
    NotFound,
    Refused,
    StoreUnreachable,
    Unreachable,
)

DEFAULT_SOCKET = Path("/run/kvmpool/kvmpoold.sock")
DEADLINE_S = 10.0  # twice the hook's: a person waits a little longer than libvirt does

_KINDS: dict[str, type[KvmpoolError]] = {
    "refused": Refused,
    "claim-invalid": ClaimInvalid,
    "config-invalid": ConfigInvalid,
    "no-capacity": NoCapacity,
    "card-busy": CardBusy,
    "denied": Denied,
    "not-found": NotFound,
    "conflict": Conflict,
    "unreachable": Unreachable,
    "store-unreachable": StoreUnreachable,
    "deadline": DeadlinePassed,
}


def kind_of(error: KvmpoolError) -> str:
    """The wire's word for an error's class; its nearest ancestor's where it has none of its own."""
    for cls in type(error).__mro__:
        for kind, known in _KINDS.items():
            if known is cls:
                return kind
    return "failure"


def socket_path() -> Path:
    """$KVMPOOL_SOCKET or the default."""
    return Path(os.environ.get("KVMPOOL_SOCKET") or DEFAULT_SOCKET)


class Client:
    """One kvmpoold. Raises kvmpool.errors only; Unreachable where no daemon listens.

    A connection a call, with the standard library alone: a command of the CLI is done in the time that importing an
    HTTP library takes.
    """

    def __init__(self, socket: Path | None = None, deadline_s: float = DEADLINE_S) -> None:
        self.socket = socket or socket_path()
        self._deadline_s = deadline_s

    def get(self, path: str, **params: str) -> Any:
        """The decoded JSON body of GET /v1`path`; `path` is quoted here where it has to be."""
        return self._call("GET", path, params=params)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._call("POST", path, body=body or {})

    def delete(self, path: str) -> Any:
        return self._call("DELETE", path)

    def lines(self, path: str, **params: str) -> Iterator[dict[str, Any]]:
        """JSON objects, one a line, as they come; ends when the daemon ends."""
        with self._connected("GET", path) as connection:
            answer = _ask(connection, "GET", path, params, None)
            if answer.status >= 400:
                raise _error(answer.status, answer.read())
            connection.patient()
            for line in answer:
                if line.strip():
                    yield json.loads(line)

    def close(self) -> None:
        """Nothing is open between two calls; said for callers that give up their process to another program."""

    def _call(
        self, method: str, path: str, *, params: dict[str, str] | None = None, body: dict[str, Any] | None = None
    ) -> Any:
        with self._connected(method, path) as connection:
            answer = _ask(connection, method, path, params or {}, body)
            status, data = answer.status, answer.read()
        if status >= 400:
            raise _error(status, data)
        try:
            return json.loads(data)
        except ValueError as error:
            raise Unreachable(f"{self.socket} does not speak kvmpool's API. Next: kvmpool doctor") from error

    @contextmanager
    def _connected(self, method: str, path: str) -> Iterator[Connection]:
        connection = self._connection()
        try:
            yield connection
        except TimeoutError as error:
            raise DeadlinePassed(
                f"kvmpoold at {self.socket} did not answer {method} {path} in time. Next: kvmpool doctor"
            ) from error
        except (OSError, HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()

    def _connection(self) -> Connection:
        return Connection(self.socket, self._deadline_s)

    def _unreachable(self, error: OSError | HTTPException) -> Unreachable:
        if isinstance(error, PermissionError):
            return Unreachable(f"kvmpoold's socket {self.socket}: permission denied. Next: be root or in group kvmpool")
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        why = " ".join(why.split()) or type(error).__name__
        return Unreachable(f"kvmpoold does not answer at {self.socket} ({why}). Next: systemctl start kvmpoold")


class Connection(HTTPConnection):
    """HTTP over the unix socket at `path`."""

    def __init__(self, path: Path, deadline_s: float) -> None:
        super().__init__("kvmpoold", timeout=deadline_s)
        self._path = path
        self._raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._raw.settimeout(deadline_s)

    def connect(self) -> None:
        self._raw.connect(str(self._path))
        self.sock = self._raw

    def patient(self) -> None:
        """From now on what is read may take any time."""
        self._raw.settimeout(None)

    def close(self) -> None:
        super().close()
        self._raw.close()


def _ask(
    connection: Connection, method: str, path: str, params: dict[str, str], body: dict[str, Any] | None
) -> HTTPResponse:
    target = "/v1" + quote(path, safe="/%:@,;=+!$&'()*~")
    if params:
        target += "?" + urlencode(params)
    data = None if body is None else json.dumps(body).encode()
    connection.request(method, target, body=data, headers={"Content-Type": "application/json"} if data else {})
    return connection.getresponse()


def _error(status: int, data: bytes) -> KvmpoolError:
    try:
        body = json.loads(data)
        message, kind = str(body["error"]), str(body["kind"])
    except (ValueError, KeyError, TypeError):
        message, kind = f"kvmpoold answered HTTP {status}. Next: journalctl -u kvmpoold", "failure"
    return _KINDS.get(kind, KvmpoolError)(message)

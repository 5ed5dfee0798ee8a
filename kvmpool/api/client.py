"""The one way in for programs: HTTP on kvmpoold's unix socket, its errors turned back into kvmpool.errors.

Synchronous: its users are the CLI and tests. Knows paths and bodies, not what they mean.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

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
    """A connection to one kvmpoold. Raises kvmpool.errors only; Unreachable where no daemon listens."""

    def __init__(self, socket: Path | None = None, deadline_s: float = DEADLINE_S) -> None:
        self.socket = socket or socket_path()
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self.socket)), base_url="http://kvmpoold", timeout=deadline_s
        )

    def get(self, path: str, **params: str) -> Any:
        """The decoded JSON body of GET /v1`path`."""
        return self._call("GET", path, params=params)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._call("POST", path, body=body or {})

    def delete(self, path: str) -> Any:
        return self._call("DELETE", path)

    def lines(self, path: str, **params: str) -> Iterator[dict[str, Any]]:
        """JSON objects, one a line, as they come; ends when the daemon ends."""
        try:
            timeout = httpx.Timeout(DEADLINE_S, read=None)
            with self._http.stream("GET", f"/v1{path}", params=params, timeout=timeout) as answer:
                if answer.status_code >= 400:
                    answer.read()
                    raise _error(answer)
                for line in answer.iter_lines():
                    if line.strip():
                        yield json.loads(line)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def close(self) -> None:
        self._http.close()

    def _call(
        self, method: str, path: str, *, params: dict[str, str] | None = None, body: dict[str, Any] | None = None
    ) -> Any:
        try:
            answer = self._http.request(method, f"/v1{path}", params=params, json=body)
        except httpx.TimeoutException as error:
            raise DeadlinePassed(
                f"kvmpoold at {self.socket} did not answer {method} {path} in time. Next: kvmpool doctor"
            ) from error
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if answer.status_code >= 400:
            raise _error(answer)
        try:
            return answer.json()
        except ValueError as error:
            raise Unreachable(f"{self.socket} does not speak kvmpool's API. Next: kvmpool doctor") from error

    def _unreachable(self, error: httpx.HTTPError) -> Unreachable:
        why = re.sub(r"^\[Errno \d+\] ", "", str(error).strip()) or type(error).__name__
        if "Permission denied" in why:
            return Unreachable(f"kvmpoold's socket {self.socket}: permission denied. Next: be root or in group kvmpool")
        return Unreachable(f"kvmpoold does not answer at {self.socket} ({why}). Next: systemctl start kvmpoold")


def _error(answer: httpx.Response) -> KvmpoolError:
    try:
        body = answer.json()
        message, kind = str(body["error"]), str(body["kind"])
    except (ValueError, KeyError, TypeError):
        message, kind = f"kvmpoold answered HTTP {answer.status_code}. Next: journalctl -u kvmpoold", "failure"
    return _KINDS.get(kind, KvmpoolError)(message)

"""The API's edge over a real unix socket: errors, limits, rights, and a client that gets its errors back typed."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import pwd
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmpool.api import access
from kvmpool.api.app import Server, build_app
from kvmpool.api.client import Client
from kvmpool.api.hooks import Hooks
from kvmpool.api.resources import Resources
from kvmpool.core.model import Card, CardId, ClaimSpec, DomainSeen, HostName, Settings, WorkerSeen
from kvmpool.daemon.clock import HostClock
from kvmpool.daemon.ledger import Change, Ledger
from kvmpool.errors import ClaimInvalid, Denied, KvmpoolError, NotFound, Refused, StoreUnreachable, Unreachable
from kvmpool.store.memory import MemoryStore

CARD = CardId("GPU-00000000-0000-4000-8000-000000000001")


class _Nothing:
    """A host without libvirt, whose metadata cannot be edited."""

    def domains(self) -> tuple[DomainSeen, ...]:
        return ()

    async def workers(self) -> tuple[WorkerSeen, ...]:
        return ()

    def libvirt_fault(self) -> str:
        return "no libvirt here"

    def nvml_fault(self) -> str:
        return ""

    async def add_claim(self, domain: str, attributes: dict[str, str]) -> ClaimSpec:
        raise ClaimInvalid(f"domain {domain}: {sorted(attributes)}")

    async def remove_claim(self, domain: str, name: str) -> None:
        raise NotFound(f"domain {domain} has no claim {name}")


class Api:
    """A server in a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "d.sock"
        self.woken: list[str] = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._ready.wait(10)

    async def _run(self) -> None:
        clock = HostClock()
        self.store = MemoryStore(clock)
        ledger = Ledger(self.store, clock, HostName("h0"))
        page = await ledger.read()
        await ledger.commit(page, Change(puts=[Card(CARD, HostName("h0"), "0000:41:00.0", "Soft GPU", 16384)]))
        nothing, settings = _Nothing(), Settings(prepare_deadline_s=0.5)
        hooks = Hooks(self.store, ledger, clock, settings, self.woken.append)
        resources = Resources(self.store, ledger, "memory", clock, settings, nothing, nothing, self.woken.append)
        self.server = Server(build_app(hooks, resources, "kvmpool-test-no-such-group"))
        self._ready.set()
        await self.server.run_on(access.listen(self.socket, "kvmpool-test-no-such-group"))

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    api = Api(tmp_path)
    with socket.socket(socket.AF_UNIX) as probe:
        for _ in range(200):
            if probe.connect_ex(str(api.socket)) == 0:
                break
            threading.Event().wait(0.01)
    yield api
    api.stop()


def raw(api: Api, request: bytes) -> tuple[int, Any]:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(10)
        peer.connect(str(api.socket))
        peer.sendall(request)
        answer = b""
        while part := peer.recv(65536):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body) if body.startswith(b"{") else body


def post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def test_what_is_read_comes_back_as_json(api: Api) -> None:
    client = Client(api.socket)
    status = client.get("/status")
    assert status["libvirt"] == "no libvirt here"
    assert [card["label"] for card in status["cards"]] == ["h0/0000:41:00.0"]
    for named in (CARD, "h0/0000:41:00.0", "0000:41:00.0", CARD[:12], CARD[4:12]):
        assert client.get(f"/cards/{named}")["id"] == CARD
    assert client.get("/claims") == []
    assert (
        "kvmpool_card_memory_mib{"
        in raw(api, b"GET /v1/metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")[1].decode()
    )


@pytest.mark.parametrize(
    ("method", "path", "body", "error"),
    [
        ("get", "/cards/nope", None, NotFound),
        ("get", "/bindings/vm0/gpu0#1", None, NotFound),
        ("get", "/nothing/here", None, NotFound),
        ("post", "/cards/nope/cordon", {}, NotFound),
        ("post", "/hooks/explode", {"domain": "a", "xml": ""}, NotFound),
        ("post", "/hooks/prepare", {"domain": "a", "xml": "<domain"}, ClaimInvalid),
        ("post", "/hooks/prepare", {"domain": "a"}, Refused),
        ("post", "/hooks/prepare", {"domain": "a", "xml": "", "more": 1}, Refused),
        ("post", "/cards/0000:41:00.0/cordon", {"reason": "two\nlines"}, Refused),
        ("post", "/domains/vm0/claims", {"name": "gpu0"}, ClaimInvalid),
        ("delete", "/domains/vm0/claims/gpu0", None, NotFound),
    ],
)
def test_an_error_comes_back_as_the_same_error(
    api: Api, method: str, path: str, body: dict[str, str] | None, error: type[KvmpoolError]
) -> None:
    client = Client(api.socket)
    with pytest.raises(error) as raised:
        client.post(path, body) if method == "post" else getattr(client, method)(path)
    assert type(raised.value) is error
    assert "\n" not in str(raised.value)
    assert "Traceback" not in str(raised.value)


def test_a_cordon_is_written_seen_and_taken_back(api: Api) -> None:
    client = Client(api.socket)
    body = client.post("/cards/0000:41:00.0/cordon", {"reason": "fan"})
    assert (body["cordoned"], body["cordon_reason"]) == (True, "fan")
    assert client.post("/cards/0000:41:00.0/uncordon")["cordoned"] is False
    assert api.woken == ["cordoned", "uncordoned"]
    assert [event["kind"] for event in client.get("/events")] == ["cordoned", "uncordoned"]


def test_events_are_followed_as_they_happen(api: Api) -> None:
    lines = Client(api.socket).lines("/events", follow="1")
    got: list[dict[str, Any]] = []
    reader = threading.Thread(target=lambda: got.append(next(lines)), daemon=True)
    reader.start()
    threading.Event().wait(0.3)
    Client(api.socket).post("/cards/0000:41:00.0/cordon", {"reason": "now"})
    reader.join(5)
    assert got
    assert (got[0]["kind"], got[0]["reason"]) == ("cordoned", f"by {pwd.getpwuid(os.getuid()).pw_name}: now")
    told = Client(api.socket).lines("/events", follow="1", last="1")
    assert next(told) == got[0]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b'{"domain": 1, "xml": 2}', b"null", b"[" * 60_000])
def test_a_body_that_is_not_what_it_should_be_is_one_line(api: Api, body: bytes) -> None:
    status, answer = raw(api, post("/v1/hooks/prepare", body))
    assert status == 400
    assert answer["kind"] == "refused"
    assert "\n" not in answer["error"]


def test_a_body_too_large_is_refused_before_it_is_read(api: Api) -> None:
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    assert raw(api, head % (b"/v1/cards/x/cordon", 65537))[0] == 413
    assert raw(api, head % (b"/v1/hooks/prepare", 1 << 40))[0] == 413
    chunks = b"POST /v1/cards/x/cordon HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert raw(api, chunks + (b"ffff\r\n" + b"x" * 65535 + b"\r\n") * 3 + b"0\r\n\r\n")[0] == 413


@pytest.mark.parametrize("garbage", [b"\x00\x01\x02\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"A" * 100_000])
def test_garbage_ends_its_connection_only(api: Api, garbage: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(5)
        peer.connect(str(api.socket))
        peer.sendall(garbage)
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(65536):
            pass
    assert Client(api.socket).get("/hosts") == []


def test_a_fault_of_ours_shows_no_traceback(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmpool.api.bodies.card_body", lambda *_: 1 / 0)
    status, answer = raw(api, b"GET /v1/cards HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert (status, answer["kind"]) == (500, "failure")
    assert "ZeroDivision" not in answer["error"]


def test_a_store_that_is_away_is_a_503(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(prefix: str) -> None:
        raise StoreUnreachable("the store is away")

    monkeypatch.setattr(api.store, "list", away)
    with pytest.raises(StoreUnreachable):
        Client(api.socket).get("/cards")


def test_the_socket_is_not_for_everybody(api: Api) -> None:
    assert api.socket.stat().st_mode & 0o777 == access.SOCKET_MODE


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_a_user_outside_the_group_is_denied_and_hooks_are_for_root(api: Api) -> None:
    for folder in api.socket.parents:
        if folder.name.startswith(("pytest-", "popen-", "test_")):
            folder.chmod(0o755)
    api.socket.chmod(0o666)  # as if the file's mode had failed us
    assert "Denied: uid 65534 is not in group" in _as_nobody(api.socket, "/v1/status")
    assert "Denied: uid 65534 may not call /v1/hooks/prepare" in _as_nobody(api.socket, "/v1/hooks/prepare")


def _as_nobody(path: Path, target: str) -> str:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_ask, args=(path, target, theirs))
    child.start()
    assert ours.poll(10)
    child.join(10)
    return str(ours.recv())


def _ask(path: Path, target: str, to: Any) -> None:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    client = Client(path)
    try:
        to.send(client.post(target[3:]) if "hooks" in target else client.get(target[3:]))
    except KvmpoolError as error:
        to.send(f"{type(error).__name__}: {error}")


def test_membership_is_by_primary_or_supplementary_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_gid", lambda _: 4242)
    access.check(access.Peer(1, 0, 0), "/v1/hooks/prepare", "kvmpool")
    access.check(access.Peer(1, 65534, 4242), "/v1/status", "kvmpool")
    monkeypatch.setattr(os, "getgrouplist", lambda *_: [65534, 4242])
    access.check(access.Peer(1, 65534, 65534), "/v1/status", "kvmpool")
    monkeypatch.setattr(os, "getgrouplist", lambda *_: [65534])
    with pytest.raises(Denied):
        access.check(access.Peer(1, 65534, 65534), "/v1/status", "kvmpool")


def test_a_socket_that_cannot_be_made_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unreachable, match="cannot listen on"):
        access.listen(tmp_path / "file" / "d.sock", "kvmpool")

"""Who a guest says it is, and the words of others that it says: claims, tokens, generations, control."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator

import pytest

from tests.bypass.raw import Raw
from tests.bypass.ring import Window
from tests.bypass.world import CLAIM_MIB, CONTEXT_MIB, World, world
from tests.dataplane import frames
from tests.dataplane.frames import frame
from tests.dataplane.plane import HELLO, UUID, Guest, status, wait_until

pytestmark = pytest.mark.native

MIB = 1 << 20
TOKEN = "0123456789abcdef0123456789abcdef"
NO_ENTRY, NO_ACCESS, BAD_PROTOCOL = -2, -13, -71


def hello(claim: bytes = b"gpu0", token: bytes = b"", flags: int = 0, version: int = 1) -> bytes:
    caps = frames.table().capability_hash()
    body = HELLO.pack(version, caps, claim, token, os.getpid(), flags, 1, frames.VA_BASE, b"identity")
    return frame(frames.HELLO, body, 0, 0)


def greeted(place: World, sent: bytes) -> int:
    """The status of the welcome, 0 too where it was let in."""
    with Guest(place.attacker.plane.endpoint, 20.0) as guest:
        guest.socket.sendall(sent)
        return guest.welcome().status


NAMES = {
    "a claim the domain has not": b"gpu1",
    "another domain's": b"vm1-gpu0",
    "another case": b"GPU0",
    "with more behind it": b"gpu0x",
}
NO_NAMES = {
    "a generation": b"gpu0#2",
    "a path": b"../gpu0",
    "another domain's path": b"vm1/gpu0",
    "none": b"",
    "no end": b"gpu0" + b"0" * 28,
    "words behind the end": b"gpu0\0gpu1",
    "no text": b"\xff\xfe",
}


@pytest.mark.parametrize("what", NAMES)
def test_a_claim_that_is_not_the_domains(attack: World, what: str) -> None:
    assert greeted(attack, hello(NAMES[what])) == NO_ENTRY
    assert attack.attacker.sessions() == set()


@pytest.mark.parametrize("what", NO_NAMES)
def test_a_name_that_no_claim_can_have(attack: World, what: str) -> None:
    assert greeted(attack, hello(NO_NAMES[what])) == BAD_PROTOCOL
    assert attack.attacker.sessions() == set()


@pytest.mark.parametrize("sent", [hello(version=2), hello(flags=1 << 31), hello(flags=0xFFFFFFFC)])
def test_a_version_or_flags_from_elsewhere(attack: World, sent: bytes) -> None:
    assert greeted(attack, sent) == BAD_PROTOCOL


def test_a_second_connection_of_the_same_identity_has_the_rest_of_the_claim(attack: World) -> None:
    with Raw(attack.attacker) as one, Raw(attack.attacker) as two:
        assert one.ask("alloc", frames.VA_BASE, (CLAIM_MIB - 2 * CONTEXT_MIB - 2) * MIB) == 0
        assert two.ask("alloc", frames.VA_BASE, 4 * MIB) == 2
        assert two.ask("alloc", frames.VA_BASE, 2 * MIB) == 0
        assert attack.taken_mib() == CLAIM_MIB


def test_an_observer_that_makes_calls(attack: World) -> None:
    """Whoever greets as a monitor is served figures and nothing else."""
    with Guest(attack.attacker.plane.endpoint, 20.0) as guest:
        guest.socket.sendall(hello(flags=2))
        assert guest.welcome().status == 0
        guest.socket.sendall(frames.call("context_create", frames.CONTEXT_HANDLE, 0))
        assert guest.ended(10.0)
    assert attack.attacker.used() == 0


CONTROL = {
    "the relay's pointing": b"POINT gpu0 9 1048576\n/somewhere/else.sock",
    "the relay's end": b"CLOSE",
    "unpointing": b"UNPOINT gpu0\nfor me",
    "a watcher": b"FOLLOW 1 1",
    "a relay to its worker": b"RELAY 1",
    "the worker's end": b"STOP",
    "a keepalive": b"KEEPALIVE",
    "a question": b"STATUS",
    "a welcome": frame(frames.WELCOME, bytes(228), 0, 0),
    "a reply": frame(frames.REPLY, bytes(8)),
    "figures": frame(7),
}


@pytest.mark.parametrize("what", CONTROL)
def test_control_words_on_a_guests_socket_are_no_control(attack: World, what: str) -> None:
    plane = attack.attacker.plane
    before = status(plane.relay_socket)["claims"]
    worker = {key: status(plane.worker_socket())[key] for key in ("generation", "relay_connected")}
    with Guest(plane.endpoint, 20.0) as guest:  # instead of a hello
        guest.socket.sendall(CONTROL[what].ljust(300, b"\0"))
        assert guest.ended(10.0)
    with Raw(attack.attacker) as raw:  # and behind one
        raw.send(CONTROL[what].ljust(300, b"\0"))
        assert raw.ended()
    wait_until(lambda: status(plane.relay_socket)["claims"] == before, 5.0, "all points where it did")
    assert {key: status(plane.worker_socket())[key] for key in worker} == worker


@pytest.fixture(scope="module")
def with_token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A world whose relays listen on TCP and ask for a token."""
    folder = tmp_path_factory.mktemp("token")
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    with world(folder, "--token-file", str(token), endpoint="tcp:127.0.0.1:0") as made:
        yield made


def test_a_token_that_is_not_the_domains_is_refused_and_the_right_one_is_let_in(with_token: World) -> None:
    wrong = [b"", TOKEN.encode()[:-1], TOKEN.encode() + b"0", TOKEN.upper().encode(), b"0" * 32, UUID.encode()]
    for token in wrong:
        assert greeted(with_token, hello(token=token)) == NO_ACCESS, token
    assert greeted(with_token, hello(token=b"a" * 64)) == BAD_PROTOCOL, "no end"
    refused = status(with_token.attacker.plane.relay_socket)["refused"]["token"]
    assert refused == len(wrong)
    assert greeted(with_token, hello(token=TOKEN.encode())) == 0


def test_guessing_tokens_for_a_second_gets_nobody_in(with_token: World) -> None:
    chosen = random.Random(5)
    end = time.monotonic() + 1.0
    tries = 0
    while time.monotonic() < end:
        assert greeted(with_token, hello(token=chosen.randbytes(16).hex().encode())) == NO_ACCESS
        tries += 1
    assert tries > 10
    assert with_token.attacker.sessions() == set()


def test_a_guest_that_rewrites_its_rings_at_run_time(attack: World) -> None:
    """All words and all bytes of the window, beside calls that are right; see tests/dataplane/test_window.py."""
    chosen = random.Random(3)
    for _ in range(20):
        with Window(attack.attacker) as side:
            stop = threading.Event()
            writer = threading.Thread(target=side.scribble, args=(stop, chosen.randrange(1 << 30)))
            writer.start()
            for _ in range(5):
                side.put(frames.call("alloc", frames.VA_BASE, CLAIM_MIB * MIB * 2))
                side.put(frames.call("context_create", frames.CONTEXT_HANDLE, 0))
                time.sleep(0.005)
            stop.set()
            writer.join()
            assert attack.attacker.used() <= CLAIM_MIB * MIB

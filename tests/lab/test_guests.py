"""A guest's XML, and the answers that come back through its channel."""

from __future__ import annotations

import base64
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from lxml import etree

from kvmpool.errors import DeadlinePassed, Unreachable
from kvmpool.lab import guests
from kvmpool.lab.guests import GuestSpec

_CLAIM = 'name="gpu0" mode="vgpu" memory="1024"'
_SCHEMA = Path("/usr/share/libvirt/schemas/domain.rng")


def _xml(spec: GuestSpec) -> bytes:
    return guests.linux_xml(spec, Path("/k/vmlinux"), "/run/kvmpool-lab/guest.cpio").encode()


def test_a_claimed_guest_names_its_claim_and_the_files_that_fw_cfg_hands_it() -> None:
    spec = GuestSpec("vm0", 1, (_CLAIM,))
    root = etree.fromstring(_xml(spec))
    claim = root.find(f"metadata/{{{guests.CLAIMS_URI}}}claims/{{{guests.CLAIMS_URI}}}claim")
    assert claim is not None
    assert dict(claim.attrib) == {"name": "gpu0", "mode": "vgpu", "memory": "1024"}
    entries = {entry.get("name"): entry.get("file") for entry in root.iterfind("sysinfo/entry")}
    folder = f"/run/kvmpool/guests/{spec.uuid}"
    assert entries == {f"opt/org.kvmpool/{name}": f"{folder}/{name}" for name in ("endpoint", "token")}


def test_a_guest_without_a_claim_does_not_mention_kvmpool() -> None:
    root = etree.fromstring(_xml(GuestSpec("vm1", 2)))
    assert root.find("metadata") is None
    assert root.find("sysinfo") is None


@pytest.mark.parametrize("claims", [(), (_CLAIM,)])
def test_libvirt_s_schema_accepts_both_kinds(claims: tuple[str, ...]) -> None:
    schema = etree.RelaxNG(etree.parse(_SCHEMA))
    spec = GuestSpec("vm0", 1, claims)
    for text in (_xml(spec), guests.firmware_xml(spec, Path("/f/firmware.bin")).encode()):
        assert schema.validate(etree.fromstring(text)), schema.error_log


def test_the_same_name_has_the_same_uuid() -> None:
    assert GuestSpec("vm0", 1).uuid == GuestSpec("vm0", 2).uuid != GuestSpec("vm1", 1).uuid


def _guest(channel: Path, answer: Callable[[str, str], list[bytes]]) -> threading.Thread:
    """A stand-in for QEMU's end: `answer` gets a request's id and script; its pieces are sent one by one."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(channel))
    listener.listen()

    def serve() -> None:
        with listener, listener.accept()[0] as peer:
            mark, script = peer.makefile("r").readline().split()
            for piece in answer(mark, base64.b64decode(script).decode()):
                peer.sendall(piece)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def test_an_answer_may_come_in_pieces_and_after_an_older_one(short_dir: Path) -> None:
    def answer(mark: str, script: str) -> list[bytes]:
        assert script == "uname"
        return [b"0123 0 900\nthe rest of an old answ", f"er{mark} 3".encode(), b" 5\nli", b"nux"]

    _guest(short_dir / "vm0.channel", answer)
    ran = guests.run(short_dir / "vm0.channel", "uname", timeout_s=5)
    assert (ran.output, ran.code) == ("linux", 3)


def test_a_guest_that_ends_first_is_unreachable(short_dir: Path) -> None:
    _guest(short_dir / "vm0.channel", lambda mark, _: [f"{mark} 0 100\nhalf".encode()])
    with pytest.raises(Unreachable, match="ended before it answered"):
        guests.run(short_dir / "vm0.channel", "uname", timeout_s=5)


def test_a_guest_that_is_not_running_is_unreachable(short_dir: Path) -> None:
    with pytest.raises(Unreachable, match="no such guest is running"):
        guests.run(short_dir / "vm0.channel", "uname", timeout_s=5)


def test_a_silent_guest_passes_the_deadline(short_dir: Path) -> None:
    release = threading.Event()

    def answer(_mark: str, _script: str) -> list[bytes]:
        release.wait(10)
        return []

    _guest(short_dir / "vm0.channel", answer)
    with pytest.raises(DeadlinePassed, match="did not answer in time"):
        guests.run(short_dir / "vm0.channel", "uname", timeout_s=0.2)
    release.set()


def test_a_long_path_is_no_obstacle(tmp_path: Path, short_dir: Path) -> None:
    deep = tmp_path / ("x" * 100)
    (short_dir / "d").mkdir()
    _guest(short_dir / "d/vm0.channel", lambda mark, _: [f"{mark} 0 2\nok".encode()])
    (short_dir / "d").rename(deep)
    assert guests.run(deep / "vm0.channel", "true", timeout_s=5).output == "ok"


@pytest.mark.parametrize("words", [["echo", "it's", 'a "test"', "$HOME", "a\nb"], ["printf", "%s|", "", " ", "*"]])
def test_a_command_reaches_the_guest_word_by_word(words: list[str]) -> None:
    run = subprocess.run(["sh", "-c", guests.command(words)], capture_output=True, text=True, check=True)
    assert run.stdout == subprocess.run(words, capture_output=True, text=True, check=True).stdout


def test_waiting_for_a_marker_says_what_the_guest_printed_last(tmp_path: Path) -> None:
    console = tmp_path / "vm0.console"
    console.write_text("BOOTED 1.2\nKernel panic\n")
    guests.wait_for(console, b"BOOTED", 1.0)
    with pytest.raises(DeadlinePassed, match="vm0: no READY after 0.1 s, it printed last: Kernel panic"):
        guests.wait_for(console, b"READY", 0.1)

"""systemd's side of sd_notify and of the journal's socket, listened to for real."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from pathlib import Path

import pytest

from kvmpool.core.model import BootId
from kvmpool.daemon import journal, notify
from kvmpool.daemon.turns import Loop


class _Clock:
    """Time that only the test moves."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        return self.at

    def boot_id(self) -> BootId:
        return BootId("boot")

    async def sleep(self, delay_s: float) -> None:
        self.at += delay_s


@pytest.fixture
def manager(tmp_path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.bind(str(tmp_path / "notify"))
    made.settimeout(2)
    return made


def test_the_manager_hears_what_is_said(manager: socket.socket, tmp_path: Path) -> None:
    notify.notify("READY=1", {"NOTIFY_SOCKET": str(tmp_path / "notify")})
    assert manager.recv(100) == b"READY=1"
    notify.notify("READY=1", {"NOTIFY_SOCKET": str(tmp_path / "nobody")})  # said to nobody: a warning, no error
    notify.notify("READY=1", {})


def test_the_watchdog_is_asked_of_this_process_only() -> None:
    assert notify.watchdog_s({"WATCHDOG_USEC": "3000000"}) == 3.0
    assert notify.watchdog_s({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}) == 3.0
    assert notify.watchdog_s({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}) is None
    assert notify.watchdog_s({}) is None
    assert notify.watchdog_s({"WATCHDOG_USEC": "often"}) is None


def test_a_loop_that_stands_still_starves_the_watchdog(
    manager: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    clock = _Clock()
    card, domain = Loop(clock), Loop(clock)
    card.name, domain.name = "card", "domain"

    async def fed() -> None:
        task = asyncio.create_task(notify.feed([card, domain], clock, 10.0, 60.0))
        await asyncio.sleep(0.05)
        task.cancel()

    asyncio.run(fed())
    assert manager.recv(100) == b"WATCHDOG=1"
    clock.at += 11
    card.last_turn_at = clock.at
    assert notify.late([card, domain], clock.at, 10.0) == ["domain"]
    asyncio.run(fed())
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.recv(100)


def test_a_record_becomes_fields_of_the_journal() -> None:
    record = logging.LogRecord("kvmpool.x", logging.WARNING, "f.py", 7, "vm0/gpu0#2: %s", ("two\nlines",), None, "go")
    sent = journal.fields_of(record)
    text = b"vm0/gpu0#2: two\nlines"
    assert sent.startswith(b"MESSAGE\n" + struct.pack("<Q", len(text)) + text + b"\n")
    for line in (b"PRIORITY=4", b"SYSLOG_IDENTIFIER=kvmpoold", b"CODE_LINE=7", b"KVMPOOL_LOGGER=kvmpool.x"):
        assert b"\n" + line + b"\n" in sent


def test_the_journals_handler_sends_one_datagram_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "journal"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as daemon:
        daemon.bind(str(path))
        daemon.settimeout(2)
        handler = journal.JournalHandler(path)
        record = logging.LogRecord("kvmpool.x", logging.INFO, "f.py", 7, "hello", (), None)
        handler.emit(record)
        assert daemon.recv(4096).startswith(b"MESSAGE=hello\nPRIORITY=6\n")
    path.unlink()
    handler.emit(record)
    assert "hello" in capsys.readouterr().err
    handler.close()

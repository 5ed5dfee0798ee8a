"""The VFIO lab's cards and faults, against a stand-in for QEMU's monitor."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvmpool.errors import NotFound, Refused, Unreachable
from kvmpool.lab import qmp, vfio_cards
from kvmpool.lab.vfio_cards import CARDS, Fault


def test_a_card_is_found_by_name_and_by_address() -> None:
    assert {vfio_cards.card(text).name for text in ("gpu1", "0000:02:00.0", "02:00.0")} == {"gpu1"}
    with pytest.raises(NotFound, match=r"no card 'gpu9'.*gpu0 \(0000:01:00.0\)"):
        vfio_cards.card("gpu9")


def test_every_card_has_a_port_and_function_0_is_plugged_last() -> None:
    ports = {device["id"] for device in vfio_cards.root_ports()}
    for card in CARDS:
        devices = card.devices()
        assert {device["bus"] for device in devices} == {card.port} <= ports
        assert (devices[-1]["id"], devices[-1]["addr"]) == (card.name, "0.0")
        assert devices[-1].get("multifunction", False) is (len(devices) > 1)


def test_a_fault_s_words_are_read_and_an_unknown_one_lists_those_that_are() -> None:
    assert Fault.parse(" AER  fatal ") is Fault.AER_FATAL
    with pytest.raises(Refused, match=r"no fault 'explode'.*falls-off \| comes-back"):
        Fault.parse("explode")


@contextmanager
def _qemu(folder: Path, answers: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Takes one client, gives these answers one after the other, an event before each; yields what it was asked."""
    asked: list[dict[str, Any]] = []
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "monitor"))
    listener.listen()

    def serve() -> None:
        with listener.accept()[0] as peer, peer.makefile("rwb") as stream:
            stream.write(b'{"QMP": {"version": {}, "capabilities": []}}\n')
            stream.flush()
            for answer in [{"return": {}}, *answers]:
                asked.append(json.loads(stream.readline()))
                stream.write(b'{"event": "NIC_RX_FILTER_CHANGED"}\n' + json.dumps(answer).encode() + b"\n")
                stream.flush()

    thread = threading.Thread(target=serve)
    thread.start()
    yield asked
    thread.join()
    listener.close()


def test_a_card_is_removed_and_plugged_back_as_it_was(short_dir: Path) -> None:
    card = vfio_cards.card("gpu0")
    with _qemu(short_dir, [{"return": {}}] * 3) as asked, qmp.monitor(short_dir, "monitor") as monitor:
        vfio_cards.inject(monitor, card, Fault.REMOVE)
        vfio_cards.inject(monitor, card, Fault.PLUG)
    words = [(each["execute"], each["arguments"]) for each in asked[1:]]
    assert words[0] == ("device_del", {"id": "gpu0"})
    assert words[1:] == [("device_add", device) for device in card.devices()]


def test_what_qemu_refuses_is_told_in_its_words(short_dir: Path) -> None:
    error = {"error": {"class": "DeviceNotFound", "desc": "Device 'gpu1' not found"}}
    said = {"return": "Error: invalid error name\r\n"}
    with _qemu(short_dir, [error, said]), qmp.monitor(short_dir, "monitor") as monitor:
        with pytest.raises(Refused, match="refused device_del: Device 'gpu1' not found"):
            vfio_cards.inject(monitor, CARDS[1], Fault.REMOVE)
        with pytest.raises(Refused, match="at rp2: Error: invalid error name"):
            vfio_cards.inject(monitor, CARDS[1], Fault.AER_FATAL)


def test_a_monitor_that_ends_is_unreachable(short_dir: Path) -> None:
    ends = pytest.raises(Unreachable, match="QEMU has ended|Broken pipe|reset")
    with _qemu(short_dir, []), qmp.monitor(short_dir, "monitor") as monitor, ends:
        monitor.execute("query-status")

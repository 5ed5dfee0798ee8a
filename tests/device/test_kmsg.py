"""The kernel log: what is an XID, what only looks like one, and following it without missing or repeating a line."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmpool.core.xid import CATALOGUE
from kvmpool.device.kmsg import KernelDead, KernelXid, follow, parse
from kvmpool.errors import Unreachable

CARD = "0000:41:00.0"


def record(message: str, priority: int = 3) -> str:
    return f"{priority},1234,567890,-;{message}\n"


@pytest.mark.parametrize(
    ("message", "found"),
    [
        (
            "NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            (CARD, 79, "pid='<unknown>', name=<unknown>, GPU has fallen off the bus."),
        ),
        (
            "NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, name=python3, Contained: SM (0x1). RST: No, D-RST: No",
            ("0000:01:00.0", 94, "pid=7194, name=python3, Contained: SM (0x1). RST: No, D-RST: No"),
        ),
        ("NVRM: Xid (PCI:0000:C1:00.0): 31, pid=1", ("0000:c1:00.0", 31, "pid=1")),
        ("NVRM: Xid (PCI:00000000:41:00): 48", (CARD, 48, "")),
        ("NVRM: Xid (PCI:0000:41:00): 13, ", (CARD, 13, "")),
        ("NVRM: GPU 0000:41:00.0: GPU has fallen off the bus.", (CARD, 79, "GPU has fallen off the bus.")),
        ("NVRM: GPU at PCI:0000:41:00: GPU has fallen off the bus.", (CARD, 79, "GPU has fallen off the bus.")),
    ],
)
def test_the_drivers_lines_are_read(message: str, found: tuple[str, int, str]) -> None:
    assert parse(record(message)) == KernelXid(*found)


@pytest.mark.parametrize("xid", sorted(CATALOGUE))
def test_every_code_of_the_catalogue_is_read(xid: int) -> None:
    got = parse(record(f"NVRM: Xid (PCI:0000:41:00): {xid}, pid=1, name=a"))
    assert isinstance(got, KernelXid)
    assert got.xid == xid


XID_79 = "NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus."


@pytest.mark.parametrize(
    "line",
    [
        record(XID_79, priority=12),  # a user wrote it into /dev/kmsg: facility 1
        record(XID_79, priority=8),
        record(f"systemd[1]: {XID_79}"),
        record(f'audit: comm="{XID_79}"'),
        record(" " + XID_79),
        record(f"NVRM: loading module for {XID_79}"),
        f" SUBSYSTEM={XID_79}\n",
        XID_79,
        f"3,1,2;{XID_79}",
        record("NVRM: Xid (PCI:0000:41:00): 79x"),
        record("NVRM: Xid (PCI:0000:41:00): 79999"),
        record("NVRM: Xid (PCI:0000:41:00): -79"),
        record("NVRM: Xid (PCI:0000:41): 79, x"),
        record("NVRM: Xid (PCI:0000:41:00 GPU-I:05 x): 79, x"),
        record("usb 1-1: name\n" + XID_79),
        record(""),
        "",
    ],
)
def test_what_only_looks_like_an_xid_is_none(line: str) -> None:
    assert parse(line) is None


@pytest.mark.parametrize(
    "name",
    [
        "79, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:42:00): 79, x",
        "x): 79, ",
        "a, Ch 00000008\\x0aNVRM: Xid (PCI:0000:42:00): 79",
        "\u202egnp.exe",
        "x" * 5000,
    ],
)
def test_a_hostile_process_name_changes_neither_card_nor_code(name: str) -> None:
    got = parse(record(f"NVRM: Xid (PCI:0000:41:00): 31, pid=7, name={name}, Ch 00000008"))
    assert isinstance(got, KernelXid)
    assert (got.address, got.xid) == (CARD, 31)
    assert got.text.isprintable()
    assert len(got.text) <= 400


@settings(max_examples=500, deadline=None)
@given(text=st.text(max_size=200))
def test_no_text_makes_another_cards_xid(text: str) -> None:
    parse(text)
    got = parse(record(f"NVRM: Xid (PCI:0000:41:00): 31, {text}"))
    assert isinstance(got, KernelXid)
    assert (got.address, got.xid) == (CARD, 31)
    other = parse(record(f"nvidia: {text}"))
    assert other is None


# --- following --------------------------------------------------------------------------------------------------------


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def change(path: Path, what: str, text: str) -> None:
    match what:
        case "append":
            append(path, text)
        case "cut":
            path.write_text(text)
        case "replace":
            path.with_suffix(".new").write_text(text)
            os.replace(path.with_suffix(".new"), path)
        case "remove":
            path.unlink()


async def take(path: Path, act: list[tuple[str, str]], count: int) -> list[int]:
    """The XIDs that `follow` yields while the steps ("append", text) and so on are done."""
    found: list[int] = []

    async def read() -> None:
        async for each in follow(path):
            assert isinstance(each, KernelXid)
            found.append(each.xid)
            if len(found) == count:
                return

    reading = asyncio.ensure_future(read())
    await asyncio.sleep(0.1)
    for what, text in act:
        change(path, what, text)
        await asyncio.sleep(0.08)
    await asyncio.wait_for(reading, 5)
    return found


def xid(number: int) -> str:
    return record(f"NVRM: Xid (PCI:0000:41:00): {number}, x")


def test_what_was_logged_before_is_not_told_again(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text(xid(79) * 3)
    assert asyncio.run(take(path, [("append", xid(31) + xid(43))], 2)) == [31, 43]


def test_a_line_written_in_pieces_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.touch()
    line = xid(48)
    assert asyncio.run(take(path, [("append", line[:30]), ("append", line[30:50]), ("append", line[50:])], 1)) == [48]


def test_an_endless_line_is_let_go_and_the_next_is_read(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.touch()
    assert asyncio.run(take(path, [("append", "x" * 300_000), ("append", "\n" + xid(48))], 1)) == [48]


def test_a_file_that_is_cut_or_replaced_is_followed_on(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text(xid(79) * 5)
    steps = [("cut", ""), ("append", xid(31)), ("replace", xid(43)), ("remove", ""), ("append", xid(45))]
    assert asyncio.run(take(path, steps, 3)) == [31, 43, 45]


def test_a_log_that_cannot_be_opened_is_unreachable(tmp_path: Path) -> None:
    async def first(path: Path) -> None:
        async for _ in follow(path):
            return

    with pytest.raises(Unreachable, match="No such file"):
        asyncio.run(first(tmp_path / "none"))
    with pytest.raises(Unreachable, match="is no kernel log"):
        asyncio.run(first(tmp_path))


@pytest.mark.not_in_ci("a container has no kernel log to read and write")
@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK | os.W_OK), reason="/dev/kmsg cannot be read and written here")
def test_the_real_kernel_log_gives_whole_records_and_a_users_line_is_no_xid() -> None:
    async def story() -> None:
        seen: list[KernelXid | KernelDead] = []

        async def read() -> None:
            async for each in follow(Path("/dev/kmsg")):
                seen.append(each)

        reading = asyncio.ensure_future(read())
        await asyncio.sleep(0.1)
        change(Path("/dev/kmsg"), "cut", "<3>" + XID_79)
        await asyncio.sleep(0.3)
        assert not reading.done()
        assert seen == []
        reading.cancel()

    asyncio.run(story())


@pytest.mark.parametrize(
    "text",
    [
        "not ready 65535ms after FLR; giving up",
        "not ready 65535ms after bus reset; giving up",
        "Unable to change power state from D3cold to D0, device inaccessible",
    ],
)
def test_a_card_that_does_not_come_back_is_told_by_whatever_driver_has_it(text: str) -> None:
    for driver in ("vfio-pci", "nvidia", "pcieport"):
        assert parse(f"3,1,1,-;{driver} 0000:41:00.0: {text}") == KernelDead("0000:41:00.0", text)
    assert parse(f"11,1,1,-;vfio-pci 0000:41:00.0: {text}") is None  # a user's word
    assert parse(f"3,1,1,-;evil: vfio-pci 0000:41:00.0: {text}") is None
    assert parse("3,1,1,-;vfio-pci 0000:41:00.0: not ready 1023ms after FLR; waiting") is None

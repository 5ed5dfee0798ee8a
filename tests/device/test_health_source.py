"""The one stream of signals out of kernel log, NVML and udev: each incident once, to the right card, at once."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvmpool.core.model import BusErrorSignal, CardId, GoneSignal, HealthSignal, ProbeSignal, XidSignal
from kvmpool.core.xid import CATALOGUE, XidClass
from kvmpool.device.cards import SystemCards
from kvmpool.device.health_source import SystemHealthSource
from kvmpool.device.nvml import EventKind, NvmlEvent
from kvmpool.device.udev import PciEvent, PciEventKind
from tests.device.trees import SystemClock, add_card

A = "0000:41:00.0"
ID = CardId("GPU-aaaaaaaa-0000-0000-0000-000000000001")


class Listening:
    """A source over a kernel log and a sysfs of plain files, without a driver."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "kmsg"
        self.log.touch()
        self.card = add_card(folder, A)
        clock = SystemClock()
        self.cards = SystemCards(clock, root=folder, match=("10de:*",), nvml=False)
        self.source = SystemHealthSource(self.cards, clock, kernel_log=self.log, udev_source="")
        self.seen: list[HealthSignal] = []

    def say(self, *messages: str) -> None:
        with self.log.open("a") as file:
            file.writelines(f"3,1,2,-;{message}\n" for message in messages)

    def xid(self, number: int, text: str = "x") -> None:
        self.say(f"NVRM: Xid (PCI:0000:41:00): {number}, {text}")

    async def read(self) -> None:
        async for signal in self.source.signals():
            self.seen.append(signal)

    async def until(self, count: int) -> list[HealthSignal]:
        async with asyncio.timeout(5):
            while len(self.seen) < count:  # noqa: ASYNC110 - the list is filled by another task
                await asyncio.sleep(0.005)
        return self.seen

    @property
    def xids(self) -> list[int]:
        return [signal.xid for signal in self.seen if isinstance(signal, XidSignal)]


def listen(folder: Path, story: Callable[[Listening], Awaitable[None]], *, known: bool = True) -> None:
    async def whole() -> None:
        listening = Listening(folder)
        if known:
            listening.cards.remember(ID, A)
        reading = asyncio.ensure_future(listening.read())
        await asyncio.sleep(0.05)
        await story(listening)
        await listening.source.close()
        await asyncio.wait_for(reading, 2)

    asyncio.run(whole())


def test_an_xid_in_the_kernel_log_is_told_of_its_card_within_100_ms(tmp_path: Path) -> None:
    async def story(listening: Listening) -> None:
        took = []
        for number, code in enumerate((79, 48, 95, 119, 64)):
            sent = time.monotonic()
            listening.xid(code, "GPU has fallen off the bus.")
            signal = (await listening.until(number + 1))[number]
            took.append(time.monotonic() - sent)
            assert isinstance(signal, XidSignal)
            assert (signal.card, signal.xid, signal.text) == (ID, code, "GPU has fallen off the bus.")
        assert sorted(took)[2] < 0.1  # the median: this machine may be busy with other tests

    listen(tmp_path, story)


def test_every_application_xid_comes_through_as_itself(tmp_path: Path) -> None:
    apps = sorted(code for code, row in CATALOGUE.items() if row.kind is XidClass.APP)

    async def story(listening: Listening) -> None:
        for code in apps:
            listening.xid(code, "pid=1, name=NVRM: Xid (PCI:0000:42:00): 79")
        await listening.until(len(apps))
        assert listening.xids == apps
        assert len(apps) == 63

    listen(tmp_path, story)


def test_the_same_xid_of_log_and_nvml_is_told_once_a_second(tmp_path: Path) -> None:
    async def story(listening: Listening) -> None:
        listening.source._nvml_said(NvmlEvent(EventKind.XID, ID, 31))
        listening.xid(31)
        listening.xid(31)
        listening.xid(43)
        await listening.until(2)
        assert listening.xids == [31, 43]
        await asyncio.sleep(1.0)
        listening.xid(31)
        await listening.until(3)
        assert listening.xids == [31, 43, 31]

    listen(tmp_path, story)


def test_the_text_that_names_the_recovery_action_is_told_after_the_event_without_it(tmp_path: Path) -> None:
    changed = "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"

    async def story(listening: Listening) -> None:
        listening.source._nvml_said(NvmlEvent(EventKind.XID, ID, 154))
        listening.xid(154, changed)
        await listening.until(2)
        texts = [signal.text for signal in listening.seen if isinstance(signal, XidSignal)]
        assert texts == ["", changed]

    listen(tmp_path, story)


def test_an_xid_of_a_card_that_is_not_known_yet_waits_for_the_inventory(tmp_path: Path) -> None:
    async def story(listening: Listening) -> None:
        listening.xid(79)
        listening.say("NVRM: Xid (PCI:0000:99:00): 79, of a card that nobody knows")
        await asyncio.sleep(0.3)
        assert listening.seen == []
        listening.cards.remember(ID, A)
        await listening.until(1)
        assert listening.xids == [79]

    listen(tmp_path, story, known=False)


def test_after_an_xid_the_cards_own_word_follows_when_it_is_lost(tmp_path: Path) -> None:
    async def story(listening: Listening) -> None:
        (listening.card / "config").write_bytes(b"\xff" * 64)
        listening.xid(109)
        _, second = await listening.until(2)
        assert isinstance(second, ProbeSignal)
        assert second.lost

    listen(tmp_path, story)


def test_the_cards_own_word_follows_a_second_xid_too(tmp_path: Path) -> None:
    async def story(listening: Listening) -> None:
        listening.xid(31)  # the card is well
        await asyncio.sleep(0.2)
        (listening.card / "config").write_bytes(b"\xff" * 64)
        listening.xid(109)
        await listening.until(3)
        assert listening.xids == [31, 109]
        assert isinstance(listening.seen[2], ProbeSignal)
        assert listening.seen[2].lost

    listen(tmp_path, story)


def test_a_removal_counts_only_when_sysfs_shows_it_too(tmp_path: Path) -> None:
    async def story(listening: Listening) -> None:
        said = listening.source._bus_said
        said(PciEvent(A, PciEventKind.REMOVED))
        said(PciEvent("0000:99:00.0", PciEventKind.REMOVED))
        await asyncio.sleep(0.05)
        assert listening.seen == []
        shutil.rmtree(listening.card)
        said(PciEvent(A, PciEventKind.REMOVED))
        (gone,) = await listening.until(1)
        assert isinstance(gone, GoneSignal)
        assert gone.card == ID

    listen(tmp_path, story)


@pytest.mark.parametrize(
    ("kind", "driver", "fatal"),
    [
        (PciEventKind.RECOVERY_BEGINS, "nvidia", False),
        (PciEventKind.RECOVERY_BEGINS, "vfio-pci", True),  # QEMU has stopped its domain by now
        (PciEventKind.RECOVERY_FAILED, "nvidia", True),
    ],
)
def test_an_error_that_the_bus_tells_is_a_sign_of_that_card(
    tmp_path: Path, kind: PciEventKind, driver: str, fatal: bool
) -> None:
    async def story(listening: Listening) -> None:
        (listening.card / "driver").unlink()
        (listening.card / "driver").symlink_to(f"../../drivers/{driver}")
        await listening.cards.inventory()
        listening.source._bus_said(PciEvent("0000:00:01.0", kind))  # its port: which card is it?
        listening.source._bus_said(PciEvent(A, kind))
        (signal,) = await listening.until(1)
        assert isinstance(signal, BusErrorSignal)
        assert (signal.card, signal.fatal) == (ID, fatal)

    listen(tmp_path, story)


def test_new_errors_that_the_kernel_counts_are_heard_without_any_netlink(tmp_path: Path) -> None:
    async def story(listening: Listening) -> None:
        (listening.card / "driver").unlink()
        (listening.card / "driver").symlink_to("../../drivers/vfio-pci")
        (listening.card / "aer_dev_fatal").write_text("DLP 1\nTOTAL_ERR_FATAL 1\n")
        await listening.cards.inventory()
        await asyncio.sleep(1.2)  # two looks: what was there before says nothing
        assert listening.seen == []
        (listening.card / "aer_dev_fatal").write_text("DLP 2\nTOTAL_ERR_FATAL 2\n")
        (signal,) = await listening.until(1)
        assert isinstance(signal, BusErrorSignal)
        assert (signal.fatal, signal.text) == (True, f"AER: {A} had fatal errors: DLP")

    listen(tmp_path, story)


def test_a_flood_of_one_xid_is_one_signal_and_the_others_come_through(tmp_path: Path) -> None:
    async def story(listening: Listening) -> None:
        listening.say(*["NVRM: Xid (PCI:0000:41:00): 31, x"] * 20_000)
        listening.xid(79)
        async with asyncio.timeout(5):
            while 79 not in listening.xids:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert listening.xids.count(31) <= 5

    listen(tmp_path, story)


def test_a_log_that_appears_later_is_listened_to(tmp_path: Path) -> None:
    async def story(listening: Listening) -> None:
        await asyncio.sleep(0.3)
        listening.xid(79)  # with the file comes the line
        await listening.until(1)
        assert listening.xids == [79]

    folder = tmp_path / "host"
    folder.mkdir()

    async def whole() -> None:
        listening = Listening(folder)
        listening.cards.remember(ID, A)
        listening.log.unlink()
        reading = asyncio.ensure_future(listening.read())
        await story(listening)
        await listening.source.close()
        await asyncio.wait_for(reading, 2)

    asyncio.run(whole())

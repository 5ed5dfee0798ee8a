"""Resets of cards on a fake bus: done, refused before anything is written, failed, without an end, without a way."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmpool.core.model import Mode
from kvmpool.device.child_write import child_write
from kvmpool.errors import CardBusy, CardLost, CardWedged, KvmpoolError, NoReset, Refused
from kvmpool.lab.fake_bus import hang, make_process, refuse
from tests.device.switching import AUDIO, TWIN, A, Bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Card A and its audio function are on vfio-pci, the twin is not."""
    made = Bench(tmp_path)
    with made.bus:
        asyncio.run(made.modes().switch(made.card(), Mode.PASSTHROUGH))
        made.bus.settle()
        made.bus.log.clear()
        yield made


def reset(bench: Bench, address: str = A) -> list[str]:
    """What the kernel was asked for."""
    asyncio.run(bench.modes().reset(bench.card(address)))
    bench.bus.settle()
    return bench.bus.log


def refused(bench: Bench, kind: type[KvmpoolError], address: str = A) -> str:
    """The one line of an error of exactly this kind; no reset was asked for."""
    with pytest.raises(kind) as error:
        reset(bench, address)
    assert type(error.value) is kind
    assert "\n" not in str(error.value)
    bench.bus.settle()
    assert bench.bus.log == []
    return str(error.value)


def test_every_function_of_the_card_is_reset_and_nothing_else(bench: Bench) -> None:
    before = bench.everything()
    assert reset(bench) == [f"reset {A}", f"reset {AUDIO}"]
    assert bench.everything() == before
    assert bench.modes().journal.under_way() == ()


def test_a_function_beside_the_card_that_has_no_reset_is_left_out(bench: Bench) -> None:
    (bench.root / "sys/bus/pci/devices" / AUDIO / "reset").unlink()
    assert reset(bench) == [f"reset {A}"]


def test_a_card_that_somebody_holds_is_not_reset(bench: Bench) -> None:
    make_process(bench.root, 4711, "qemu-system-x86", "/dev/vfio/41", cmdline="qemu -name guest=vm0,debug=on")
    said = refused(bench, CardBusy)
    assert said == f"{A} is in use by pid 4711 (qemu-system-x86, domain vm0) with /dev/vfio/41 open"


def test_a_card_of_a_hosts_driver_is_not_reset(bench: Bench) -> None:
    assert refused(bench, Refused, TWIN) == f"{TWIN} is on nvidia, and only a card on vfio-pci is reset"


def test_another_device_at_its_address_is_not_reset(bench: Bench) -> None:
    card = bench.card()
    (bench.root / "sys/bus/pci/devices" / A / "device").write_text("0x1111\n")
    with pytest.raises(Refused, match="the wrong device is passed"):
        asyncio.run(bench.modes().reset(card))
    assert bench.bus.log == []


def test_a_card_without_a_way_to_reset_it_says_so(bench: Bench) -> None:
    (bench.root / "sys/bus/pci/devices" / A / "reset").unlink()
    said = refused(bench, NoReset)
    assert said == f"no working reset: the kernel has none for {A}. Next: reboot the host, or change the card"


def test_a_card_that_reads_all_ones_is_lost_without_a_try(bench: Bench) -> None:
    (bench.root / "sys/bus/pci/devices" / A / "config").write_bytes(b"\xff" * 256)
    assert refused(bench, CardLost) == f"{A} cannot be reset: its config space reads all ones"


def test_a_reset_that_the_kernel_gives_up_is_told_in_words_that_can_be_found(bench: Bench) -> None:
    refuse(bench.root, f"devices/{A}/reset", by="/dev/full")
    said = refused(bench, CardLost)
    why = '(the kernel log may say "not ready 65535ms after FLR; giving up")'
    assert said == f"no working reset: {A}: No space left on device {why}"


@pytest.fixture
def synchronous(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset has had its effect when the write returns, as in the kernel; the fake bus is a thread."""

    async def write(path: Path, text: str, deadline_s: float) -> None:
        await child_write(path, text, deadline_s)
        bench.bus.settle()

    monkeypatch.setattr("kvmpool.device.reset.child_write", write)
    monkeypatch.setattr("kvmpool.device.reset.ANSWER_S", 0.5)


@pytest.mark.usefixtures("synchronous")
def test_a_card_that_does_not_answer_after_its_reset_is_lost(bench: Bench) -> None:
    bench.bus.wakes_as[A] = b"\xff" * 256
    with pytest.raises(CardLost, match=rf"^after the reset of {A}: its config space reads all ones$"):
        reset(bench)


@pytest.mark.usefixtures("synchronous")
def test_a_card_that_wakes_as_another_device_is_lost(bench: Bench) -> None:
    bench.bus.wakes_as[A] = b"\xde\x10\x01\x00" + bytes(252)
    with pytest.raises(CardLost, match=rf"^after the reset {A} is another device: de100100, was [0-9a-f]{{8}}$"):
        reset(bench)


def test_a_reset_that_never_ends_wedges_the_card(bench: Bench) -> None:
    hang(bench.root, f"devices/{A}/reset")
    with pytest.raises(CardWedged) as error:
        reset(bench)
    assert re.fullmatch(
        rf"{A}: its reset does not end \(writing '1' to \S+/reset did not end within 3 s\)\. Next: reboot the host",
        str(error.value),
    )


def test_who_is_killed_in_a_reset_resets_again(bench: Bench) -> None:
    """Nothing is written down: two resets in a row are as good as one."""
    assert reset(bench) == [f"reset {A}", f"reset {AUDIO}"]
    assert reset(bench) == [f"reset {A}", f"reset {AUDIO}"] * 2

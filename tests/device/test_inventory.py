"""Bus and driver together: whom to believe when they disagree, and how a hung driver is survived."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvmpool.core.model import CardId, CardSeen, Mode, PciFacts, ProbeSignal, UnknownSignal, slot_name
from kvmpool.device.bounded import Bounded
from kvmpool.device.cards import SystemCards
from kvmpool.device.inventory import Look, merged
from kvmpool.device.nvml import NvmlCard
from kvmpool.device.pci import BusState, PciCard
from kvmpool.device.roster import Roster
from kvmpool.errors import DeadlinePassed, Unreachable
from tests.device.trees import SystemClock, add_card

A = "0000:41:00.0"
B = "0000:42:00.0"
ID_A = CardId("GPU-aaaaaaaa-0000-0000-0000-000000000001")
ID_B = CardId("GPU-bbbbbbbb-0000-0000-0000-000000000002")
IDS = "10de:2330:10de:16c1"
FACTS = {address: PciFacts(IDS, f"0000:00-0{n}.0-00.0", "7") for n, address in ((1, A), (2, B))}


def on_bus(address: str, driver: str = "nvidia", fault: str = "") -> PciCard:
    return PciCard(address, 0, driver, FACTS[address], fault)


def in_driver(card: CardId, address: str, fault: str = "") -> NvmlCard:
    return NvmlCard(card, address, "Soft H100", 8192, "9.0", fault)


def look(
    bus: tuple[PciCard, ...] | None,
    listed: tuple[NvmlCard, ...] | None,
    *,
    states: dict[str, BusState] | None = None,
    fault: str = "no driver",
    slow: bool = False,
) -> Look:
    answers = {card.address: BusState.ANSWERS for card in bus or ()} | (states or {})
    return Look(bus, answers, frozenset(answers), listed, "" if listed is not None else fault, slow)


WELL = look((on_bus(A), on_bus(B)), (in_driver(ID_B, B), in_driver(ID_A, A)))


def seen_well() -> Roster:
    roster = Roster()
    roster.learn(merged(WELL, roster))
    return roster


def test_a_bus_that_cannot_be_read_for_once_takes_no_card_away() -> None:
    """A busy host's sysfs is slow; who is in passthrough or off is told by nobody else then."""
    roster = Roster()
    there = look((on_bus(A, driver="vfio-pci"), on_bus(B, driver="")), None)
    roster.learn(merged(there, roster))
    told = merged(look(None, None), roster)
    assert [(card.address, card.present, card.fault) for card in told] == [
        (A, True, "sysfs cannot be read"),
        (B, True, "sysfs cannot be read"),
    ]
    assert [card.id for card in told] == [card.id for card in merged(there, roster)]


def test_a_card_that_the_driver_lists_is_one_whatever_its_driver_is_called() -> None:
    """As the soft cards of the VFIO lab, which have pci-stub on the bus."""
    seen = merged(look((on_bus(A, driver="pci-stub"),), (in_driver(ID_A, A),)), Roster())
    assert [(card.id, card.mode, card.fault, card.memory_mib) for card in seen] == [(ID_A, Mode.VGPU, "", 8192)]


def test_where_both_agree_it_is_a_card() -> None:
    one, two = merged(WELL, Roster())
    assert one == CardSeen(ID_A, A, "Soft H100", 8192, "nvidia", "9.0", 0, pci=FACTS[A])
    assert (two.id, two.address) == (ID_B, B)


@pytest.mark.parametrize(
    ("now", "fault"),
    [
        (
            look((on_bus(A), on_bus(B)), None, fault="the NVIDIA driver is not loaded"),
            "the NVIDIA driver is not loaded",
        ),
        (look((on_bus(A), on_bus(B)), (in_driver(ID_B, B),)), "the driver does not list it"),
        (look((on_bus(A, fault="garbage"), on_bus(B)), WELL.listed), "garbage"),
        (look(WELL.bus, WELL.listed, states={A: BusState.ALL_ONES}), "its config space reads all ones"),
        (look(WELL.bus, WELL.listed, states={A: BusState.UNREADABLE}), "its config space cannot be read"),
        (look(WELL.bus, (in_driver(ID_A, A, "NVML: GPU is lost"), in_driver(ID_B, B))), "NVML: GPU is lost"),
        (look(None, WELL.listed), "sysfs cannot be read"),
        (look((on_bus(B),), WELL.listed, states={A: BusState.ANSWERS}), "sysfs no longer says that it is a card"),
    ],
)
def test_what_cannot_be_believed_has_a_fault_and_keeps_its_name(now: Look, fault: str) -> None:
    card = merged(now, seen_well())[0]
    assert (card.id, card.address, card.fault, card.present) == (ID_A, A, fault, True)
    assert card.memory_mib == 8192


@pytest.mark.parametrize("listed", [WELL.listed, (in_driver(ID_B, B),), None])
def test_an_address_that_left_the_bus_is_not_present(listed: tuple[NvmlCard, ...] | None) -> None:
    card = merged(look((on_bus(B),), listed), seen_well())[0]
    assert (card.id, card.present, card.fault) == (ID_A, False, f"{A} has left the bus")


def test_an_address_that_never_was_on_the_bus_is_a_lie_and_not_a_loss() -> None:
    card = merged(look((), (in_driver(ID_A, A),)), Roster())[0]
    assert (card.present, card.fault) == (True, "the driver lists it, sysfs does not")


def test_a_driver_that_is_slow_makes_no_card_unknown() -> None:
    cards = merged(look(WELL.bus, None, fault="slow", slow=True), seen_well())
    assert [card.fault for card in cards] == ["", ""]
    assert [card.id for card in cards] == [ID_A, ID_B]
    new = merged(look(WELL.bus, None, fault="slow", slow=True), Roster())
    assert [card.fault for card in new] == ["slow", "slow"]


def test_a_card_on_the_bus_that_the_config_leaves_out_is_left_out() -> None:
    assert merged(look((), (in_driver(ID_A, A),), states={A: BusState.ANSWERS}), Roster()) == ()


def test_a_card_that_was_exchanged_takes_the_address() -> None:
    roster = seen_well()
    version = roster.version
    swapped = look((on_bus(A), on_bus(B)), (in_driver(ID_B, A), in_driver(ID_A, B)))
    roster.learn(merged(swapped, roster))
    assert roster.ids == {A: ID_B, B: ID_A}
    assert roster.version > version


@pytest.mark.parametrize(
    ("driver", "mode"),
    [
        ("vfio-pci", Mode.PASSTHROUGH),
        ("nvgrace_gpu_vfio_pci", Mode.PASSTHROUGH),
        ("", Mode.OFF),
        ("nouveau", Mode.VGPU),  # nobody is served by it: a probe says so
    ],
)
def test_a_card_that_no_driver_tells_about_keeps_what_was_known_of_it(driver: str, mode: Mode) -> None:
    roster = seen_well()
    now = look((on_bus(A, driver=driver), on_bus(B)), (in_driver(ID_B, B),))
    one, two = merged(now, roster)
    assert one == CardSeen(ID_A, A, "Soft H100", 8192, driver, "9.0", 0, mode=mode, pci=FACTS[A])
    assert two.mode is Mode.VGPU
    (new, _) = merged(now, Roster())  # never seen with its driver: named by its ids and its slot
    assert (new.id, new.model, new.memory_mib, new.fault) == (slot_name(FACTS[A]), "", 0, "")
    assert new.id == "PCI-10de:2330:10de:16c1@0000:00-01.0-00.0"


def test_a_bus_that_was_numbered_anew_exchanges_no_names() -> None:
    roster = Roster()
    roster.remember(ID_A, A, FACTS[A])
    roster.remember(ID_B, B, FACTS[B])
    swapped = tuple(PciCard(at, 0, "vfio-pci", FACTS[B if at == A else A]) for at in (A, B))
    assert [card.id for card in merged(look(swapped, ()), roster)] == [ID_B, ID_A]
    stranger = PciCard(A, 0, "vfio-pci", replace(FACTS[A], ids="10de:1db6:10de:1214"))
    (card,) = merged(look((stranger,), ()), roster)
    assert card.id == "PCI-10de:1db6:10de:1214@0000:00-01.0-00.0"


def test_a_remembered_card_keeps_its_id_while_the_driver_is_gone() -> None:
    roster = Roster()
    roster.remember(ID_A, A)
    (card,) = merged(look((on_bus(A),), None), roster)
    assert (card.id, card.fault) == (ID_A, "no driver")


# --- reading it -------------------------------------------------------------------------------------------------------


def test_a_host_whose_sysfs_and_driver_tell_nothing_is_unreachable(tmp_path: Path) -> None:
    cards = SystemCards(SystemClock(), root=tmp_path, match=("10de:*",), nvml=False)
    with pytest.raises(Unreachable, match=r"no card can be seen.*switched off"):
        asyncio.run(cards.inventory())


def test_a_card_without_nvml_is_unknown_to_inventory_and_probe(tmp_path: Path) -> None:
    async def story() -> None:
        add_card(tmp_path, A)
        cards = SystemCards(SystemClock(), root=tmp_path, match=("10de:*",), nvml=False)
        cards.remember(ID_A, A)
        (card,) = await cards.inventory()
        assert (card.id, card.fault) == (ID_A, "NVML is switched off (device.nvml)")
        signal = await cards.probe(ID_A, 1.0)
        assert isinstance(signal, UnknownSignal)

    asyncio.run(story())


def test_a_probe_sees_the_bus_before_it_asks_the_driver(tmp_path: Path) -> None:
    async def story() -> None:
        folder = add_card(tmp_path, A)
        cards = SystemCards(SystemClock(), root=tmp_path, match=("10de:*",), nvml=False)
        cards.remember(ID_A, A)
        (folder / "config").write_bytes(b"\xff" * 256)
        signal = await cards.probe(ID_A, 1.0)
        assert isinstance(signal, ProbeSignal)
        assert (signal.lost, signal.ok) == (True, False)
        (folder / "config").unlink()
        assert isinstance(await cards.probe(ID_A, 1.0), UnknownSignal)
        shutil.rmtree(folder)
        signal = await cards.probe(ID_A, 1.0)
        assert isinstance(signal, ProbeSignal)
        assert (signal.lost, signal.text) == (True, "its address has left the bus")

    asyncio.run(story())


def test_a_passthrough_card_is_well_while_the_bus_answers_and_an_off_card_is_unknown(tmp_path: Path) -> None:
    async def story() -> None:
        folder = add_card(tmp_path, A, driver="vfio-pci")
        cards = SystemCards(SystemClock(), root=tmp_path, match=("10de:*",), nvml=False)
        (card,) = await cards.inventory()
        assert (card.mode, card.fault, card.driver) == (Mode.PASSTHROUGH, "", "vfio-pci")
        signal = await cards.probe(card.id, 1.0)
        assert isinstance(signal, ProbeSignal)
        assert signal.ok
        (folder / "config").write_bytes(b"\xff" * 256)
        signal = await cards.probe(card.id, 1.0)
        assert isinstance(signal, ProbeSignal)
        assert signal.lost
        (folder / "config").write_bytes(bytes(256))
        os.unlink(folder / "driver")
        assert isinstance(await cards.probe(card.id, 1.0), UnknownSignal)
        os.symlink("../../drivers/nouveau", folder / "driver")
        unknown = await cards.probe(card.id, 1.0)
        assert isinstance(unknown, UnknownSignal)
        assert unknown.text == "it is bound to nouveau, not to nvidia"

    asyncio.run(story())


# --- a driver that hangs ----------------------------------------------------------------------------------------------


def test_a_hung_call_is_left_behind_and_asked_for_only_once() -> None:
    async def story() -> None:
        calls, release, started = Bounded("the driver"), threading.Event(), []

        def hang() -> str:
            started.append(1)
            release.wait(10)
            return "late"

        for _ in range(5):
            begun = time.monotonic()
            with pytest.raises(DeadlinePassed, match=r"the driver \(probe a\) did not answer within 0.05 s"):
                await calls.call("probe a", hang, 0.05)
            assert time.monotonic() - begun < 2
        assert (len(started), calls.hanging) == (1, 1)
        assert await calls.call("probe b", lambda: "well", 1.0) == "well"  # the others go on
        release.set()
        assert await calls.call("probe a", lambda: "again", 1.0) == "again"
        assert calls.hanging == 0

    asyncio.run(story())


def test_the_number_of_hung_threads_has_a_limit() -> None:
    async def story() -> None:
        calls, release = Bounded("the driver", threads_max=2), threading.Event()
        for key in ("a", "b"):
            with pytest.raises(DeadlinePassed):
                await calls.call(key, lambda: release.wait(10), 0.02)
        with pytest.raises(Unreachable, match="2 calls hang"):
            await calls.call("c", lambda: True, 1.0)
        release.set()
        await asyncio.sleep(0.1)
        assert await calls.call("c", lambda: True, 1.0)

    asyncio.run(story())


def test_what_a_call_raises_comes_out() -> None:
    async def story() -> None:
        def fail() -> None:
            raise Unreachable("the NVIDIA driver is not loaded")

        with pytest.raises(Unreachable, match="not loaded"):
            await Bounded("the driver").call("a", fail, 1.0)

    asyncio.run(story())

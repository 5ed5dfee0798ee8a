"""The PCI bus in sysfs: which functions are cards, what a dead one reads, and foreign text that proves nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kvmpool.device.pci import BusState, bus_state, cards, normal_address
from kvmpool.device.sysroot import Sysroot
from tests.device.trees import add_card

ANY_NVIDIA = ("10de:*",)


def test_a_card_is_read_with_its_driver_group_and_node(tmp_path: Path) -> None:
    add_card(tmp_path)
    (card,) = cards(Sysroot(tmp_path), ANY_NVIDIA) or ()
    assert card.address == "0000:41:00.0"
    assert card.facts.ids == "10de:2330:10de:16c1"
    assert (card.driver, card.facts.iommu_group, card.numa_node, card.fault) == ("nvidia", "7", 1, "")


def test_what_is_no_card_of_ours_is_left_out(tmp_path: Path) -> None:
    add_card(tmp_path, "0000:41:00.1", **{"class": "0x040300\n"})  # its audio function
    add_card(tmp_path, "0000:00:02.0", vendor="0x8086\n")
    add_card(tmp_path, "0000:50:00.0", **{"class": "0x068000\n"})  # an NVSwitch
    (tmp_path / "sys/bus/pci/devices/pci0000:00").mkdir()
    assert cards(Sysroot(tmp_path), ANY_NVIDIA) == ()


@pytest.mark.parametrize(
    ("match", "found"),
    [(("10de:*",), 1), (("10de:2330",), 1), (("*:*",), 1), (("10DE:2330",), 1), (("10de:2331",), 0), ((), 0)],
)
def test_the_configured_ids_decide(tmp_path: Path, match: tuple[str, ...], found: int) -> None:
    add_card(tmp_path)
    assert len(cards(Sysroot(tmp_path), match) or ()) == found


@pytest.mark.parametrize(
    ("match", "found"),
    [
        (("1b36:0010",), ["0000:01:00.0"]),
        (("1b36:*",), []),  # with a * it is about display controllers
        (("1b36:*/01",), ["0000:01:00.0"]),
        (("1b36:*/0107",), []),
        (("*:*/0108", "10de:*/0302"), ["0000:01:00.0", "0000:41:00.0"]),
        (("10de:*", "10de:22ba"), ["0000:41:00.0"]),  # its audio function is a sibling, whatever is configured
    ],
)
def test_a_class_or_any_single_device_may_count_as_a_card(
    tmp_path: Path, match: tuple[str, ...], found: list[str]
) -> None:
    add_card(tmp_path)
    add_card(tmp_path, "0000:41:00.1", device="0x22ba\n", **{"class": "0x040300\n"})
    add_card(tmp_path, "0000:01:00.0", vendor="0x1b36\n", device="0x0010\n", **{"class": "0x010802\n"})
    assert [card.address for card in cards(Sysroot(tmp_path), match) or ()] == found


def test_virtual_functions_are_cards_of_their_own(tmp_path: Path) -> None:
    for function in range(3):
        folder = add_card(tmp_path, f"0000:41:00.{function}")
        if function:
            os.symlink("../0000:41:00.0", folder / "physfn")
    assert len(cards(Sysroot(tmp_path), ANY_NVIDIA) or ()) == 3


def test_no_bus_is_not_an_empty_bus(tmp_path: Path) -> None:
    assert cards(Sysroot(tmp_path), ANY_NVIDIA) is None
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    assert cards(Sysroot(tmp_path), ANY_NVIDIA) == ()


@pytest.mark.parametrize(
    "garbage", ["", "\n", "0x10de 0x10de", "-1", "0xfffff", "0xffff", "\x00\x01", "\xff", "x" * 9999]
)
@pytest.mark.parametrize("name", ["vendor", "device"])
def test_ids_that_are_garbage_make_a_fault_and_not_another_card(tmp_path: Path, name: str, garbage: str) -> None:
    (add_card(tmp_path) / name).write_bytes(garbage.encode("latin-1"))
    found = cards(Sysroot(tmp_path), ANY_NVIDIA) or ()
    if name == "device" and garbage == "0xffff":
        assert len(found) == 1
    else:
        assert [card.fault for card in found] == ["sysfs does not say its vendor and device"]


@pytest.mark.parametrize("garbage", ["", "-7\n", "4096\n", "none\n", "\x1b[31m0\n"])
def test_a_numa_node_that_is_garbage_is_no_node(tmp_path: Path, garbage: str) -> None:
    add_card(tmp_path, numa_node=garbage)
    (card,) = cards(Sysroot(tmp_path), ANY_NVIDIA) or ()
    assert card.numa_node == -1


def test_only_a_whole_header_of_ones_is_a_loss(tmp_path: Path) -> None:
    root, address = Sysroot(tmp_path), "0000:41:00.0"
    folder = add_card(tmp_path)
    assert bus_state(root, address) is BusState.ANSWERS
    (folder / "config").write_bytes(b"\xff" * 64)
    assert bus_state(root, address) is BusState.ALL_ONES
    (folder / "config").write_bytes(b"\xff" * 4096)
    assert bus_state(root, address) is BusState.ALL_ONES
    (folder / "config").write_bytes(b"\xff\xff\xff\xff" + bytes(60))  # an SR-IOV virtual function
    assert bus_state(root, address) is BusState.ANSWERS
    (folder / "config").write_bytes(b"\xff" * 63)
    assert bus_state(root, address) is BusState.UNREADABLE


def test_a_config_that_is_missing_is_unreadable_and_a_card_that_is_missing_is_gone(tmp_path: Path) -> None:
    root, address = Sysroot(tmp_path), "0000:41:00.0"
    folder = add_card(tmp_path)
    (folder / "config").unlink()
    assert bus_state(root, address) is BusState.UNREADABLE
    shutil.rmtree(folder)
    assert bus_state(root, address) is BusState.GONE
    shutil.rmtree(tmp_path / "sys")
    assert bus_state(root, address) is BusState.UNREADABLE


def test_what_stands_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    folder = add_card(tmp_path)
    for name in ("config", "class"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
    assert bus_state(Sysroot(tmp_path), "0000:41:00.0") is BusState.UNREADABLE
    assert cards(Sysroot(tmp_path), ANY_NVIDIA) == ()
    (folder / "vendor").unlink()
    (folder / "vendor").mkdir()
    assert Sysroot(tmp_path).text("sys/bus/pci/devices/0000:41:00.0/vendor") is None


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("0000:41:00.0", "0000:41:00.0"),
        ("00000000:41:00.0", "0000:41:00.0"),
        ("0000:C1:00", "0000:c1:00.0"),
        ("10000:01:00.0", "10000:01:00.0"),
        ("41:00.0", None),
        ("0000:41:00.8", None),
        ("0000:41:00.0\n", None),
        ("../etc", None),
    ],
)
def test_addresses_have_one_form(text: str, normal: str | None) -> None:
    assert normal_address(text) == normal

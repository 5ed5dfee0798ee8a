"""What the bus counts against a card: new errors only, fatal or not, of the card that had them."""

from __future__ import annotations

from pathlib import Path

from kvmpool.core.model import CardId, CardSeen, PciFacts
from kvmpool.device.bus_errors import BusErrors
from kvmpool.device.roster import Roster
from kvmpool.device.sysroot import Sysroot
from tests.device.trees import add_card

A, AUDIO, B = "0000:41:00.0", "0000:41:00.1", "0000:42:00.0"
CARD = CardSeen(CardId("GPU-a"), A, "", 0, pci=PciFacts(functions=(A, AUDIO)))
OTHER = CardSeen(CardId("GPU-b"), B, "", 0, pci=PciFacts(functions=(B,)))
FATAL = "Undefined 0\nDLP {}\nSDES 0\nTOTAL_ERR_FATAL {}\n"
QUIET = "Undefined 0\nTLP 2\nTOTAL_ERR_NONFATAL 2\n"


def bus(root: Path) -> BusErrors:
    for address in (A, AUDIO, B):
        add_card(root, address, aer_dev_fatal=FATAL.format(7, 7), aer_dev_nonfatal=QUIET, current_link_width="16\n")
    return BusErrors(Sysroot(root))


def test_what_was_counted_before_says_nothing_and_what_is_new_is_told_once(tmp_path: Path) -> None:
    errors = bus(tmp_path)
    assert errors.look([CARD, OTHER]) == []
    (tmp_path / "sys/bus/pci/devices" / AUDIO / "aer_dev_fatal").write_text(FATAL.format(9, 9))
    assert errors.look([CARD, OTHER]) == [(CARD.id, True, f"AER: {AUDIO} had fatal errors: DLP x2")]
    assert errors.look([CARD, OTHER]) == []
    (tmp_path / "sys/bus/pci/devices" / B / "aer_dev_nonfatal").write_text(QUIET.replace("2", "3"))
    assert errors.look([CARD, OTHER]) == [(OTHER.id, False, f"AER: {B} had non-fatal errors: TLP")]


def test_a_link_that_lost_lanes_is_told_and_one_that_rests_is_not(tmp_path: Path) -> None:
    errors = bus(tmp_path)
    errors.look([CARD])
    width = tmp_path / "sys/bus/pci/devices" / A / "current_link_width"
    for quiet in ("0\n", "63\n", "Unknown\n", "", "16\n"):
        width.write_text(quiet)
        assert errors.look([CARD]) == []
    width.write_text("8\n")
    assert errors.look([CARD]) == [(CARD.id, False, "its link is x8 wide, it was x16")]
    assert errors.look([CARD]) == []


def test_garbage_and_missing_counters_are_no_errors(tmp_path: Path) -> None:
    errors = bus(tmp_path)
    errors.look([CARD])
    file = tmp_path / "sys/bus/pci/devices" / A / "aer_dev_fatal"
    file.write_bytes(b"\xff\xfe DLP\n12\n \n")
    assert errors.look([CARD]) == []
    file.unlink()
    assert errors.look([CARD]) == []


def test_an_error_of_any_function_is_the_cards_and_one_of_a_port_is_nobodys() -> None:
    roster = Roster()
    roster.learn([CARD, OTHER])
    assert [roster.card_with(address) for address in (A, AUDIO, B)] == [CARD.id, CARD.id, OTHER.id]
    assert roster.card_with("0000:00:01.0") is None
    together = PciFacts(functions=(A, AUDIO, B), iommu_group="7")  # one unit: its siblings still have one owner
    roster.learn([CardSeen(CARD.id, A, "", 0, pci=together), CardSeen(OTHER.id, B, "", 0, pci=together)])
    assert roster.card_with(AUDIO) == CARD.id

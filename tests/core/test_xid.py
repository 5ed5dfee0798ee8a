"""The catalogue of XIDs: complete, and resolved to what a card's health may be told."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmpool.core.xid import CATALOGUE, XidClass, action_class, classify, describe

APP = sorted(code for code, xid in CATALOGUE.items() if xid.kind is XidClass.APP)


def test_the_catalogue_has_176_codes_of_the_documented_classes() -> None:
    assert sorted(CATALOGUE) == list(range(1, 177))
    assert Counter(xid.kind for xid in CATALOGUE.values()) == {
        XidClass.APP: 63,
        XidClass.CORROBORATE: 63,  # 18 named ones, 45 about which NVIDIA only says to contact support
        XidClass.RESET_NEEDED: 17,
        XidClass.DRAIN: 13,
        XidClass.NVLINK: 7,
        XidClass.CARD_FATAL: 6,
        XidClass.IGNORE: 6,
        XidClass.RECOVERY_ACTION: 1,
    }


@pytest.mark.parametrize(
    ("codes", "kind"),
    [
        ((79, 64, 54, 167, 173, 157), XidClass.CARD_FATAL),
        ((48, 95, 119, 120, 46, 62, 110, 136, 140, 143, 151, 155, 156, 158, 169, 171, 172), XidClass.RESET_NEEDED),
        ((109, 74, 38, 44, 61, 123, 142, 175, 81, 57, 58, 78, 16, 18, 59, 122, 124, 168), XidClass.CORROBORATE),
        ((63, 94, 92, 93, 121, 160, 161, 163, 164, 165, 166, 170, 176), XidClass.DRAIN),
        ((13, 31, 43, 45, 8, 11, 25, 32, 37, 39, 40, 41, 60, *range(65, 74), 75, 76, 77, 80), XidClass.APP),
        ((14, 23, 87, 106, 107, 162), XidClass.IGNORE),
    ],
)
def test_a_code_is_what_the_design_says(codes: tuple[int, ...], kind: XidClass) -> None:
    assert {code: classify(code) for code in codes} == dict.fromkeys(codes, kind)


def test_every_row_names_its_mnemonic_and_nvidias_action() -> None:
    assert CATALOGUE[79].mnemonic == "ROBUST_CHANNEL_GPU_HAS_FALLEN_OFF_THE_BUS"
    assert CATALOGUE[79].nvidia_action == "RESTART_BM"
    assert CATALOGUE[162].nvidia_action == ""
    assert all(xid.mnemonic and " " not in xid.mnemonic for xid in CATALOGUE.values())


@given(st.integers(min_value=-10, max_value=2**31).filter(lambda code: code not in CATALOGUE))
def test_an_unknown_code_only_makes_suspect(code: int) -> None:
    assert classify(code) is XidClass.CORROBORATE
    assert str(code) in describe(code)


@pytest.mark.parametrize(
    ("action", "words", "kind"),
    [
        ("0x0", "None", XidClass.IGNORE),
        ("0x1", "GPU Reset Required", XidClass.RESET_NEEDED),
        ("0x2", "Node Reboot Required", XidClass.CARD_FATAL),
        ("0x3", "Drain P2P", XidClass.DRAIN),
        ("0x4", "Drain and Reset", XidClass.DRAIN),
        ("0x9", "Something New", XidClass.CORROBORATE),
    ],
)
def test_the_text_of_154_says_what_to_do(action: str, words: str, kind: XidClass) -> None:
    assert classify(154, f"GPU recovery action changed from 0x0 (None) to {action} ({words})") is kind


def test_154_without_a_readable_verdict_needs_corroboration() -> None:
    assert classify(154) is XidClass.CORROBORATE
    assert classify(154, "GPU recovery action changed") is XidClass.CORROBORATE


def test_nvmls_verdict_overrides_the_text_of_154() -> None:
    text = "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
    assert classify(154, text, recovery_action=1) is XidClass.RESET_NEEDED


@pytest.mark.parametrize("code", [109, 145, 63, 13, 43, 14])
def test_a_recovery_action_overrides_every_class_below_it(code: int) -> None:
    assert classify(code, recovery_action=2) is XidClass.CARD_FATAL
    assert classify(code, recovery_action=1) is XidClass.RESET_NEEDED
    assert classify(code, recovery_action=0) is classify(code)


@pytest.mark.parametrize("code", [79, 48])
def test_a_recovery_action_never_weakens_a_stronger_code(code: int) -> None:
    assert {classify(code, recovery_action=action) for action in (None, 0, 1, 2, 3, 4)} == {CATALOGUE[code].kind}


@pytest.mark.parametrize("code", range(144, 151))
def test_nvlink_severity_is_read_from_the_text(code: int) -> None:
    fatal = f"{code}, NETIR_LINK_EVT  Fatal   XC0 i0 Link 05 (0x004505c6 0x00000000)"
    assert classify(code, fatal) is XidClass.RESET_NEEDED
    assert classify(code, fatal.removeprefix(f"{code}, ")) is XidClass.RESET_NEEDED
    assert classify(code, fatal.replace("Fatal", "Nonfatal")) is XidClass.CORROBORATE
    assert classify(code, "") is XidClass.CORROBORATE


def test_a_hostile_process_name_cannot_speak_for_the_driver() -> None:
    text = "pid='1', name=GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
    assert {classify(code, text) for code in APP} == {XidClass.APP}
    named = "pid=9, name=SAW Fatal XC0, channel 00000008"
    assert classify(145, named) is XidClass.CORROBORATE


@given(st.integers(), st.text(max_size=200), st.none() | st.integers())
def test_classify_answers_anything_with_a_class_that_health_can_fold(code: int, text: str, action: int | None) -> None:
    assert classify(code, text, action) not in (XidClass.RECOVERY_ACTION, XidClass.NVLINK)


@given(st.integers(min_value=5))
def test_an_unknown_recovery_action_needs_corroboration(action: int) -> None:
    assert action_class(action) is XidClass.CORROBORATE

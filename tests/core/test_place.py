"""Which card serves a claim, and the sentence of each that does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmpool.core.model import (
    BootId,
    Card,
    CardId,
    CardWish,
    ClaimSpec,
    Health,
    Hold,
    HostName,
    Mode,
    Numa,
    OnFailure,
    PciFacts,
    Phase,
    Verdict,
)
from kvmpool.core.place import Taken, Use, Weights, choose_card, first_failing, taken_by, unsupported
from tests.core.build import BOOT, HOST, binding, card, claim, health, rows, spec


def sentence(on: Card, asked: ClaimSpec | None = None, wish: CardWish | None = None, used: Use | None = None) -> str:
    taken = Taken({on.id: used} if used else {})
    return first_failing(claim(0, asked), on, rows([on], wishes=[wish] if wish else []), taken, 1.0)


def test_a_healthy_free_card_fits() -> None:
    assert sentence(card()) == ""


@pytest.mark.parametrize("verdict", [each for each in Verdict if each is not Verdict.HEALTHY])
def test_only_a_healthy_card_takes_a_new_binding(verdict: Verdict) -> None:
    assert sentence(card(state=health(verdict, "Xid 79"))).startswith(f"{verdict.value}: Xid 79")


def test_a_card_on_probation_takes_preemptible_claims_only() -> None:
    trial = card(state=health(Verdict.PROBATION, "on probation for 600 s"))
    assert "only preemptible" in sentence(trial)
    assert sentence(trial, spec(preemptible=True)) == ""


def test_a_card_whose_host_is_down_or_unknown_does_not_fit() -> None:
    assert first_failing(claim(), card(), rows([card()], hosts=[]), Taken(), 1.0) == "host h0 is not up"
    down = rows([card()], hosts=[replace(HOST, up=False)])
    assert first_failing(claim(), card(), down, Taken(), 1.0) == "host h0 is not up"


def test_a_verdict_of_another_boot_is_no_verdict() -> None:
    old = card(state=Health(Verdict.HEALTHY, boot_id=BootId("boot-0")))
    assert sentence(old) == "unknown: not probed since its host started"


def test_a_cordon_and_a_drain_name_who_and_why() -> None:
    wish = CardWish(card().id, cordoned=True, by="uid 0", reason="fan")
    assert sentence(card(), wish=wish) == "cordoned by uid 0: fan"
    assert sentence(card(), wish=replace(wish, cordoned=False, drain=True)) == "being drained by uid 0: fan"
    assert sentence(card(), wish=replace(wish, cordoned=False)) == ""


def test_memory_and_compute_are_told_with_figures() -> None:
    used = Use(6144, 80, frozenset({Mode.VGPU}), 2)
    assert sentence(card(), used=used) == "2048 of 8192 MiB free, the claim asks for 4096"
    assert sentence(card(), spec(2048), used=used) == ""
    assert sentence(card(), spec(1024, compute_percent=21), used=used) == (
        "20 % of its compute free, the claim asks for 21 %"
    )
    assert sentence(card(), spec(1024, compute_percent=20), used=used) == ""


def test_a_card_never_holds_both_modes() -> None:
    held = Use(1, 0, frozenset({Mode.PASSTHROUGH}), 1)
    assert sentence(card(), used=held) == "still held in the other mode"
    assert sentence(replace(card(), mode=Mode.PASSTHROUGH)) == "in mode passthrough, the claim asks for vgpu"


def test_selectors() -> None:
    assert sentence(card(), spec(model="h200")) == "model Soft GPU, the claim asks for h200"
    assert sentence(card(), spec(model="soft")) == ""
    assert sentence(card(), spec(vendor="amd")) == "vendor NVIDIA, the claim asks for amd"
    assert sentence(card(), spec(vendor="0x10de")) == ""
    assert "a card of 9000 MiB" in sentence(card(), spec(min_memory_mib=9000))


def test_the_memory_ratio_scales_what_may_be_guaranteed() -> None:
    big = claim(0, spec(10000))
    assert choose_card(big, rows([card()]), Taken(), 1.0).card is None
    assert choose_card(big, rows([card()]), Taken(), 1.25).card == card()


def test_bindings_of_every_phase_hold_their_memory() -> None:
    held = [binding(claim(n), card(), n + 1, phase) for n, phase in enumerate(Phase)]
    assert taken_by(held).of(card().id) == Use(4096 * 5, 0, frozenset({Mode.VGPU}), 5)


def test_packing_fills_a_used_card_first_and_a_negative_weight_spreads() -> None:
    cards = [card(0), card(1)]
    taken = taken_by([binding(claim(1, spec(1024)), card(1))])
    pool = rows(cards)
    assert choose_card(claim(0, spec(1024)), pool, taken, 1.0).card == card(1)
    assert choose_card(claim(0, spec(1024)), pool, taken, 1.0, weights=Weights(pack=-1.0)).card == card(0)


def test_a_local_card_wins_over_a_remote_one() -> None:
    remote = card(0, host=HostName("h1"))
    other = replace(HOST, name=HostName("h1"))
    assert choose_card(claim(), rows([remote, card(1)], hosts=[HOST, other]), Taken(), 1.0).card == card(1)


def test_a_card_that_failed_before_comes_last() -> None:
    shaky = card(0, state=replace(health(), failures=(1.0,)))
    assert choose_card(claim(), rows([shaky, card(1)]), Taken(), 1.0).card == card(1)


def test_a_card_to_avoid_is_taken_only_where_no_other_fits() -> None:
    assert choose_card(claim(), rows([card(0), card(1)]), Taken(), 1.0, avoid=card(0).id).card == card(1)
    assert choose_card(claim(), rows([card(0)]), Taken(), 1.0, avoid=card(0).id).card == card(0)


def test_ties_go_by_card_id_whatever_the_order_of_rows() -> None:
    cards = [card(n) for n in range(4)]
    assert choose_card(claim(), rows(cards), Taken(), 1.0).card == card(0)
    assert choose_card(claim(), rows(reversed(cards)), Taken(), 1.0) == choose_card(claim(), rows(cards), Taken(), 1.0)


def test_each_refused_card_is_named_with_its_reason() -> None:
    choice = choose_card(claim(), rows([card(0, 1024), card(1, state=health(Verdict.FAILED, "Xid 79"))]), Taken(), 1.0)
    assert choice.card is None
    assert choice.refused == (
        ("h0/0000:41:00.0", "1024 of 1024 MiB free, the claim asks for 4096"),
        ("h0/0000:42:00.0", "failed: Xid 79"),
    )


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        (spec(count=2), 'count="2"'),
        (spec(hold=Hold.PROCESS), 'hold="process"'),
        (spec(on_failure=OnFailure.REPLAY), 'on_failure="replay"'),
        (spec(memory_limit_mib=8192), "memory_limit"),
        (spec(numa=Numa.REQUIRED), 'numa="required"'),
        (spec(ha=True), 'ha="yes"'),
    ],
)
def test_what_cannot_be_performed_yet_is_refused_by_name(asked: ClaimSpec, word: str) -> None:
    reason = unsupported(asked)
    assert reason is not None
    assert word in reason
    assert "not supported yet" in reason
    assert "\n" not in reason


@pytest.mark.parametrize(
    "asked",
    [
        spec(),
        spec(on_failure=OnFailure.NONE),
        spec(preemptible=True, compute_percent=25),
        spec(compute_percent=25, compute_limit_percent=50),
    ],
)
def test_what_can_be_performed_is_not_refused(asked: ClaimSpec) -> None:
    assert unsupported(asked) is None


_CARDS = st.lists(
    st.builds(
        lambda n, memory, verdict: card(n, memory, health(verdict)),
        st.integers(0, 5),
        st.sampled_from([1024, 4096, 8192]),
        st.sampled_from([Verdict.HEALTHY, Verdict.HEALTHY, Verdict.PROBATION, Verdict.FAILED, Verdict.SUSPECT]),
    ),
    max_size=6,
    unique_by=lambda each: each.id,
)


@given(_CARDS, st.integers(1, 8192), st.booleans(), st.dictionaries(st.integers(0, 5), st.integers(0, 8192)))
def test_a_chosen_card_always_has_the_room_and_the_health(
    cards: list[Card], memory: int, preemptible: bool, used: dict[int, int]
) -> None:
    taken = Taken({CardId(f"GPU-{n}"): Use(mib, 0, frozenset({Mode.VGPU}), 1) for n, mib in used.items()})
    choice = choose_card(claim(0, spec(memory, preemptible=preemptible)), rows(cards), taken, 1.0)
    assert len(choice.refused) + len(choice.scores) == len(cards)
    if choice.card is not None:
        assert taken.of(choice.card.id).memory_mib + memory <= choice.card.memory_mib
        allowed = {Verdict.HEALTHY, Verdict.PROBATION} if preemptible else {Verdict.HEALTHY}
        assert choice.card.health.verdict in allowed
        assert choice.card.health.boot_id == BOOT


# --- passthrough ------------------------------------------------------------------------------------------------------

WHOLE = spec(mode=Mode.PASSTHROUGH, memory_mib=0, memory_limit_mib=0)
EITHER = spec(mode=Mode.ANY, order=(Mode.PASSTHROUGH, Mode.VGPU))
PASSED = replace(card(), mode=Mode.PASSTHROUGH, driver="vfio-pci")


def test_a_card_on_vfio_pci_on_the_domains_host_is_passed_through() -> None:
    assert sentence(PASSED, WHOLE) == ""


def test_a_card_of_another_host_is_not_passed_through() -> None:
    far = replace(PASSED, host=HostName("h1"))
    there = rows([far], hosts=[HOST, replace(HOST, name=HostName("h1"))])
    assert "only a card of its own host" in first_failing(claim(0, WHOLE), far, there, Taken(), 1.0)


def test_a_card_that_is_not_on_vfio_pci_yet_is_not_passed_through() -> None:
    assert sentence(replace(PASSED, driver=""), WHOLE) == "still on driver none, not on vfio-pci"


def test_a_card_that_is_passed_through_is_never_shared() -> None:
    used = Use(modes=frozenset({Mode.PASSTHROUGH}), bindings=1)
    assert sentence(PASSED, WHOLE, used=used) == "passed through to another domain"
    assert sentence(PASSED, spec(), used=used) == "in mode passthrough, the claim asks for vgpu"


def test_any_takes_the_first_of_its_modes_for_which_a_card_fits() -> None:
    shared = card(1)
    both = choose_card(claim(0, EITHER), rows([PASSED, shared]), Taken(), 1.0)
    assert (both.card, both.mode) == (PASSED, Mode.PASSTHROUGH)
    fallback = choose_card(claim(0, EITHER), rows([shared]), Taken(), 1.0)
    assert (fallback.card, fallback.mode) == (shared, Mode.VGPU)
    none = choose_card(claim(0, EITHER), rows([replace(shared, mode=Mode.PASSTHROUGH)]), Taken(), 1.0)
    assert none.card is None
    assert [why.partition(":")[0] for _, why in none.refused] == ["as passthrough", "as vgpu"]


def test_a_vendor_is_that_of_the_card_by_name_or_id() -> None:
    intel = replace(PASSED, pci=PciFacts(ids="8086:5845:1af4:1100"))
    for vendor in ("intel", "Intel", "8086", "0x8086"):
        assert sentence(intel, replace(WHOLE, vendor=vendor)) == ""
    assert sentence(intel, replace(WHOLE, vendor="nvidia")) == "vendor Intel, the claim asks for nvidia"
    assert sentence(card(), spec(vendor="0x10de")) == ""


def test_any_that_may_become_a_vgpu_must_say_how_much() -> None:
    assert "needs memory" in (unsupported(replace(EITHER, memory_mib=0)) or "")
    assert unsupported(replace(EITHER, order=(Mode.PASSTHROUGH,), memory_mib=0, memory_limit_mib=0)) is None

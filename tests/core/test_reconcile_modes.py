"""When a card's mode is switched, and what its row says where it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmpool.core.health import Limits, fold, on_boot, restore, settle
from kvmpool.core.model import (
    BusErrorSignal,
    Card,
    CardId,
    CardSeen,
    CardStep,
    CardWish,
    Mode,
    PciFacts,
    PublishCard,
    RecordMode,
    Switching,
    SwitchMode,
    Verdict,
    WedgedSignal,
    WorkerSeen,
    slot_name,
)
from kvmpool.core.place import first_failing, taken_by
from kvmpool.core.reconcile_cards import CardsView, reconcile_cards
from kvmpool.core.reconcile_modes import ModesView, SwitchFault, answer, asking, hindrance, reconcile_modes
from tests.core.build import BOOT, H0, binding, card, claim, health, rows

PASS, VGPU, OFF = Mode.PASSTHROUGH, Mode.VGPU, Mode.OFF
C0, C1 = card(0), card(1)
WISH = CardWish(C0.id, mode=PASS, mode_ticket=3, by="root")
NEXT = replace(WISH, mode_ticket=4)


def view(**more: object) -> ModesView:
    return replace(ModesView(BOOT, (C0, C1), {C0.id: WISH}), **more)  # type: ignore[arg-type]


def test_an_idle_card_in_another_mode_than_wished_is_switched() -> None:
    (step,) = reconcile_modes(view())
    assert step == SwitchMode(C0, PASS, 3, "vgpu -> passthrough, wished by root")
    assert answer(view(), C0, Switching(2, "busy")) == Switching(2)  # under way: not answered yet
    assert tuple(reconcile_modes(view(cards=(replace(C0, mode=PASS), C1)))) == ()
    assert answer(view(), replace(C0, mode=PASS), Switching(2, "busy")) == Switching(3)


def test_without_a_wish_a_card_stays_as_it_is_found() -> None:
    assert tuple(reconcile_modes(view(wishes={}))) == ()
    assert answer(view(wishes={}), C0, Switching(2, "busy")) == Switching()


@pytest.mark.parametrize("verdict", [Verdict.FAILED, Verdict.QUARANTINED, Verdict.DEAD, Verdict.LEMON])
def test_a_card_that_is_evidence_is_only_switched_off(verdict: Verdict) -> None:
    sick = view(health={C0.id: health(verdict, "Xid 79")})
    assert tuple(reconcile_modes(sick)) == ()
    assert answer(sick, C0, Switching()).fault == f"{verdict.value}: Xid 79"
    (step,) = reconcile_modes(replace(sick, wishes={C0.id: replace(WISH, mode=OFF)}))
    assert isinstance(step, SwitchMode)


def test_a_wedged_card_is_not_even_switched_off() -> None:
    wedged = view(health={C0.id: health(Verdict.WEDGED, "stuck")}, wishes={C0.id: replace(WISH, mode=OFF)})
    assert tuple(reconcile_modes(wedged)) == ()
    assert answer(wedged, C0, Switching()) == Switching(3, "wedged: stuck")


def test_what_the_pool_has_on_it_holds_a_card() -> None:
    held = binding(claim(), C0, 7)
    assert hindrance(view(bindings=(held,)), C0, PASS) == "held by vm0/gpu0#7 of domain vm0"
    assert hindrance(view(bindings=(replace(held, mode=PASS),)), C0, PASS) == ""  # it waits for just that mode
    worker = WorkerSeen(held.claim, held.generation, "unix:/w", 42, card=C0.id)
    assert hindrance(view(workers=(worker,)), C0, PASS) == "held by the worker of uuid-0/gpu0#7 (pid 42)"
    assert hindrance(view(workers=None), C0, PASS) == "its workers cannot be listed"
    assert "cannot be read" in hindrance(view(unread_bindings=True), C0, PASS)
    assert hindrance(view(unread_wishes=frozenset({C0.id})), C0, PASS) == "its wish row cannot be read"


def test_cards_of_one_group_are_switched_together_or_not_at_all() -> None:
    facts = PciFacts(iommu_group="7")
    mates = tuple(replace(each, pci=facts) for each in (C0, C1))
    alone = view(cards=mates)
    assert tuple(reconcile_modes(alone)) == ()
    assert hindrance(alone, mates[0], PASS) == (
        f"it shares IOMMU group 7 with {C1.label}, of which nobody wants passthrough. "
        f"Next: kvmpool card mode {C1.label} passthrough"
    )
    both = view(cards=mates, wishes={C0.id: WISH, C1.id: replace(WISH, card=C1.id)})
    assert len(tuple(reconcile_modes(both))) == 1
    held = binding(claim(), C1, 7)
    assert tuple(reconcile_modes(replace(both, bindings=(held,)))) == ()


def test_a_refusal_is_tried_again_and_a_failure_is_not() -> None:
    refused = view(faults={C0.id: SwitchFault(3, "in use by pid 7")})
    assert len(tuple(reconcile_modes(refused))) == 1
    assert answer(refused, C0, Switching()) == Switching(3, "in use by pid 7")
    failed = view(faults={C0.id: SwitchFault(3, "no driver", final=True)})
    assert tuple(reconcile_modes(failed)) == ()
    told = answer(failed, C0, Switching())
    assert told == Switching(3, "no driver", BOOT)
    again = view(cards=(replace(C0, switching=told),))  # the next daemon knows it from the row
    assert tuple(reconcile_modes(again)) == ()
    assert answer(again, replace(C0, switching=told), told) == told
    assert len(tuple(reconcile_modes(replace(again, boot_id=type(BOOT)("boot-2"))))) == 1
    assert len(tuple(reconcile_modes(replace(again, wishes={C0.id: NEXT})))) == 1


def test_the_configuration_speaks_only_where_nobody_has() -> None:
    configured = view(initial={C0.address: OFF, C1.address: OFF}, default=VGPU)
    assert [step for step in reconcile_modes(configured) if isinstance(step, RecordMode)] == [
        RecordMode(CardWish(C1.id, mode=OFF, mode_ticket=1, by="the configuration"), "off, as the configuration says")
    ]
    assert not any(isinstance(s, RecordMode) for s in reconcile_modes(replace(configured, unread_wishes={C1.id})))  # type: ignore[arg-type]


def test_asking_keeps_what_else_is_wished() -> None:
    wish = CardWish(C0.id, cordoned=True, restore=2, reason="fan", mode_ticket=5)
    assert asking(wish, OFF, "uid 0") == replace(wish, mode=OFF, mode_ticket=6, by="uid 0")


# --- in the rows ------------------------------------------------------------------------------------------------------


def steps(seen: CardSeen, published: Card, **more: object) -> tuple[CardStep, ...]:
    base = CardsView(H0, cards=(seen,), health={seen.id: C0.health}, published={published.id: published}, boot_id=BOOT)
    return reconcile_cards(replace(base, **more))  # type: ignore[arg-type]


def test_a_card_that_changed_its_driver_keeps_its_model_and_its_row_says_the_mode() -> None:
    seen = CardSeen(C0.id, C0.address, "", 0, "vfio-pci", mode=PASS)
    (step,) = steps(seen, C0)
    assert isinstance(step, PublishCard)
    assert (step.card.mode, step.card.model, step.card.memory_mib) == (PASS, C0.model, C0.memory_mib)
    assert step.mode_event == ("mode", "passthrough, was vgpu (driver vfio-pci)")


def test_a_card_whose_driver_tells_nothing_can_still_be_given_to_another() -> None:
    seen = CardSeen(
        C0.id, C0.address, "", 0, "nvidia", fault="driver and NVML differ", pci=PciFacts(ids="10de:2330:0:0")
    )
    found = steps(seen, C0, wishes={C0.id: WISH})
    assert isinstance(found[-1], SwitchMode)
    gone = replace(seen, present=False)
    assert not any(isinstance(step, SwitchMode) for step in steps(gone, C0, wishes={C0.id: WISH}))


def test_a_card_that_tells_its_uuid_for_the_first_time_takes_over_its_row() -> None:
    facts = PciFacts(ids="10de:2330:10de:16c1", slot="0000:00-01.0-00.0")
    old = replace(C0, id=slot_name(facts), pci=facts, mode=PASS)
    seen = CardSeen(C0.id, C0.address, C0.model, C0.memory_mib, pci=facts)
    (step,) = steps(seen, old)
    assert isinstance(step, PublishCard)
    assert (step.card.id, step.replaces) == (C0.id, old.id)
    held = replace(binding(claim(), C0, 7), card=old.id)
    assert not any(s.replaces for s in steps(seen, old, bindings=(held,)) if isinstance(s, PublishCard))


def test_nothing_new_lands_on_a_card_that_is_to_change_its_mode() -> None:
    asked = claim()
    pool = rows([C0], [asked], wishes=[WISH])
    assert first_failing(asked, C0, pool, taken_by(()), 1.0) == "its mode is to be passthrough"
    told = replace(C0, switching=Switching(3, "held by vm9/gpu0#1"))
    assert first_failing(asked, told, pool, taken_by(()), 1.0).endswith("passthrough: held by vm9/gpu0#1")
    assert first_failing(asked, C0, rows([C0], [asked], wishes=[replace(WISH, mode=VGPU)]), taken_by(()), 1.0) == ""


# --- health -----------------------------------------------------------------------------------------------------------


def test_a_fatal_bus_error_fails_a_card_and_another_makes_it_suspect() -> None:
    limits, at = Limits(), 100.0
    fatal = BusErrorSignal(CardId("GPU-0"), at, True, "AER: DLP")
    failed = fold(health(), fatal, at, BOOT, limits)
    assert (failed.verdict, failed.reason, failed.fatal) == (Verdict.FAILED, "AER: DLP", False)
    assert settle(failed, False, at, limits).verdict is Verdict.QUARANTINED
    assert fold(failed, fatal, at + 1, BOOT, limits).failures == failed.failures  # once an incident
    suspect = fold(health(), replace(fatal, fatal=False), at, BOOT, limits)
    assert suspect.verdict is Verdict.SUSPECT


def test_a_wedged_card_stays_so_until_the_host_reboots() -> None:
    limits = Limits()
    wedged = fold(health(), WedgedSignal(CardId("GPU-0"), 1.0, "stuck"), 1.0, BOOT, limits)
    assert (wedged.verdict, wedged.reason) == (Verdict.WEDGED, "stuck")
    assert restore(settle(wedged, False, 2.0, limits), 1, 2.0).verdict is Verdict.WEDGED
    assert on_boot(wedged, 3.0, type(BOOT)("boot-2")).verdict is Verdict.RESETTING

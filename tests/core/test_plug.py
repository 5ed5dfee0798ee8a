"""How a domain's passthrough cards are plugged: one claim in each state, and what follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from kvmpool.core.model import (
    AttachDevice,
    Binding,
    Claim,
    ClaimKey,
    DetachDevice,
    DomainSeen,
    ForceUnplug,
    Forget,
    Generation,
    HostdevSeen,
    Mode,
    OnUnplug,
    Phase,
    Plug,
    PlugStep,
    RecordPointed,
    ReportBroken,
)
from kvmpool.core.plug import UNPLUG_LIMIT, PlugView, alias_of, plug_steps, worker_of
from tests.core.build import binding, card, claim, spec

ONE, TWO = "0000:41:00.0", "0000:42:00.0"
VM = replace(claim(0, spec(mode=Mode.PASSTHROUGH, memory_mib=0, memory_limit_mib=0)), spec=spec(mode=Mode.PASSTHROUGH))
SERVED = replace(VM, pointed=Generation(1))
UUID = VM.key.domain
ALIAS = alias_of(VM.key.name)


def bound(generation: int, address: str, phase: Phase = Phase.READY) -> Binding:
    worker = "" if phase is Phase.PREPARING else worker_of(address)
    return replace(
        binding(VM, card()), generation=Generation(generation), mode=Mode.PASSTHROUGH, phase=phase, worker=worker
    )


def domain(*addresses: str, running: bool = True, alias: str = ALIAS) -> DomainSeen:
    return DomainSeen(UUID, "vm0", running, hostdevs=tuple(HostdevSeen(address, alias) for address in addresses))


def steps(
    bindings: tuple[Binding, ...],
    seen: DomainSeen | None,
    of: Claim | None = VM,
    *,
    fresh: bool = True,
    failures: Mapping[tuple[ClaimKey, Generation], tuple[int, str]] | None = None,
    tries: int = 0,
) -> list[PlugStep]:
    claims = (of,) if of is not None else ()
    return list(plug_steps(PlugView(claims, bindings, seen, fresh, failures or {}, {VM.key: tries})))


def test_a_ready_card_is_attached_and_then_told_as_served() -> None:
    ready = bound(1, ONE)
    assert steps((ready,), domain()) == [AttachDevice(UUID, ready, ONE)]
    assert steps((ready,), domain(ONE)) == [RecordPointed(VM.key, Generation(1), VM.endpoint)]
    assert steps((ready,), domain(ONE), SERVED) == []


def test_nothing_is_plugged_before_the_domain_runs_or_before_the_card_is_ready() -> None:
    assert steps((bound(1, ONE),), domain(running=False)) == []
    assert steps((bound(1, ONE),), None) == []
    assert steps((bound(1, ONE, Phase.PREPARING),), domain()) == []


def test_a_list_of_domains_from_before_the_last_plug_says_nothing() -> None:
    assert steps((bound(1, ONE),), domain(), fresh=False) == []
    assert steps((bound(1, ONE, Phase.RELEASING),), domain(), fresh=False) == []


def test_a_failed_card_leaves_before_its_successor_comes() -> None:
    old, new = bound(1, ONE, Phase.RELEASING), bound(2, TWO)
    unsaid = RecordPointed(VM.key, None, VM.endpoint)
    leave = DetachDevice(UUID, "vm0", ALIAS, ONE, f"{new.label} is to take its place")
    assert steps((old, new), domain(ONE), SERVED) == [unsaid, leave]
    (attach, forget) = steps((old, new), domain(), VM)
    assert attach == AttachDevice(UUID, new, TWO)
    assert isinstance(forget, Forget)
    assert forget.binding == old
    assert steps((new,), domain(TWO)) == [RecordPointed(VM.key, Generation(2), VM.endpoint)]


def test_a_card_without_a_successor_leaves_too() -> None:
    [unsaid, leave] = steps((bound(1, ONE, Phase.RELEASING),), domain(ONE), SERVED)
    assert isinstance(unsaid, RecordPointed)
    assert isinstance(leave, DetachDevice)


def test_a_card_whose_binding_is_made_anew_stays_where_it_is() -> None:
    assert steps((bound(2, ONE, Phase.PREPARING),), domain(ONE)) == []
    assert steps((bound(2, ONE),), domain(ONE)) == [RecordPointed(VM.key, Generation(2), VM.endpoint)]


def test_a_card_that_no_row_names_leaves() -> None:
    # kvmpoold was killed while libvirt attached it, and its binding was released meanwhile
    [leave] = steps((), domain(ONE))
    assert isinstance(leave, DetachDevice)


def test_the_devices_of_a_domain_without_rows_are_left_alone() -> None:
    assert steps((), domain(ONE), None) == []
    assert steps((bound(1, ONE),), domain(TWO, alias="hostdev0"), None) == []


@pytest.mark.parametrize("phase", [Phase.RELEASING, Phase.LOST])
@pytest.mark.parametrize("seen", [None, domain(running=False), domain(), domain(TWO, alias="hostdev0")])
def test_a_released_card_is_free_once_it_is_in_no_domain(phase: Phase, seen: DomainSeen | None) -> None:
    gone = bound(1, ONE, phase)
    [forget] = steps((gone,), seen, None)
    assert isinstance(forget, Forget)
    assert forget.binding == gone
    assert steps((gone,), domain(ONE), None) == []


def test_what_libvirt_refuses_to_attach_is_reported_broken_with_its_reason() -> None:
    ready = bound(1, ONE)
    key = (VM.key, Generation(1))
    assert steps((ready,), domain(), failures={key: (2, "No more available PCI slots")}) == [
        AttachDevice(UUID, ready, ONE)
    ]
    [broken] = steps((ready,), domain(), failures={key: (3, "No more available PCI slots")})
    assert isinstance(broken, ReportBroken)
    assert broken.reason == "its card could not be attached (3 tries): No more available PCI slots"


@pytest.mark.parametrize("how", list(OnUnplug))
def test_a_guest_that_does_not_answer_gets_what_its_claim_says(how: OnUnplug) -> None:
    asked = replace(VM, spec=replace(VM.spec, on_unplug=how))
    old = (bound(1, ONE, Phase.RELEASING),)
    [patient] = steps(old, domain(ONE), asked, tries=UNPLUG_LIMIT - 1)
    assert isinstance(patient, DetachDevice)
    [last] = steps(old, domain(ONE), asked, tries=UNPLUG_LIMIT)
    if how is OnUnplug.HOT_ONLY:
        assert isinstance(last, DetachDevice)
    else:
        assert isinstance(last, ForceUnplug)
        assert last.how is how


@pytest.mark.parametrize("how", list(OnUnplug))
def test_a_guest_that_qemu_has_stopped_for_its_card_is_reset_whatever_its_claim_says(how: OnUnplug) -> None:
    asked = replace(SERVED, pointed=None, spec=replace(VM.spec, on_unplug=how))
    halted = replace(domain(ONE), halted=True)
    [forced] = steps((bound(1, ONE, Phase.RELEASING), bound(2, TWO)), halted, asked)
    assert isinstance(forced, ForceUnplug)
    assert forced.how is OnUnplug.RESET
    assert ONE in forced.reason
    assert steps((bound(1, ONE),), halted, replace(asked, pointed=Generation(1))) == [], "its card is not to leave"


# --- plug="boot" ------------------------------------------------------------------------------------------------------

BOOT = replace(VM, spec=replace(VM.spec, plug=Plug.BOOT))
BOOT_COLD = replace(BOOT, spec=replace(BOOT.spec, on_unplug=OnUnplug.COLD), served=Generation(1))


def test_a_card_that_the_domain_was_started_with_is_adopted() -> None:
    assert steps((bound(1, ONE),), domain(ONE), BOOT) == [RecordPointed(VM.key, Generation(1), VM.endpoint)]


def test_with_plug_boot_nothing_is_attached_to_a_running_domain() -> None:
    assert steps((bound(1, ONE),), domain(), BOOT) == []
    assert steps((bound(2, TWO),), domain(), replace(BOOT, served=Generation(1))) == []


def test_with_plug_boot_a_failed_card_still_leaves() -> None:
    old, new = bound(1, ONE, Phase.RELEASING), bound(2, TWO)
    found = steps((old, new), domain(ONE), BOOT)
    assert found == [DetachDevice(UUID, "vm0", ALIAS, ONE, f"{new.label} is to take its place")]


def test_with_plug_boot_and_cold_the_domain_is_powered_off_at_once_for_the_next_card() -> None:
    old, new = bound(1, ONE, Phase.RELEASING), bound(2, TWO)
    for seen in (domain(ONE), domain()):
        (force,) = [step for step in steps((old, new), seen, BOOT_COLD) if isinstance(step, ForceUnplug)]
        assert (force.how, force.alias) == (OnUnplug.COLD, ALIAS)
        assert new.label in force.reason


def test_no_domain_is_powered_off_for_a_card_that_its_claim_gets_for_the_first_time() -> None:
    assert steps((bound(1, ONE),), domain(), replace(BOOT_COLD, served=None)) == []

"""What the host of the domains does about attempts, domains and relays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmpool.core.model import (
    Attempt,
    BootId,
    CloseRelay,
    DomainSeen,
    DomainStep,
    FollowDomain,
    Generation,
    MarkStarted,
    Mode,
    OpenRelay,
    Phase,
    PointRelay,
    RecordPointed,
    RelaySeen,
    UnpointRelay,
    Withdraw,
)
from kvmpool.core.reconcile_domains import DomainsView, next_deadline, reconcile_domains
from tests.core.build import BOOT, H0, binding, card, claim, spec

VM = claim()
UUID = VM.key.domain
ENDPOINT = "tcp:10.77.0.1:9960"
SERVED = replace(VM, pointed=Generation(1), endpoint=ENDPOINT, served=Generation(1))
OPEN = Attempt(UUID, "vm0", H0, 1, deadline=60.0, boot_id=BOOT)
STARTED = replace(OPEN, started=True)
READY = binding(VM, card())
RUNNING = DomainSeen(UUID, "vm0", True)
OFF = DomainSeen(UUID, "vm0", False)
POINTED = RelaySeen(UUID, ENDPOINT, 7, {"gpu0": Generation(1)})
NOWHERE = RelaySeen(UUID, ENDPOINT, 7)
GONE = Withdraw(UUID, "vm0", (VM.key,), "its domain has stopped")

STEADY = DomainsView(BOOT, (SERVED,), (STARTED,), (READY,), (RUNNING,), 100.0, (POINTED,))


def steps(**changes: object) -> tuple[DomainStep, ...]:
    """What changes in a steady state lead to."""
    return reconcile_domains(replace(STEADY, **changes))  # type: ignore[arg-type]


def test_a_served_running_domain_needs_nothing() -> None:
    assert steps() == ()


# --- attempts ---------------------------------------------------------------------------------------------------------


def test_a_domain_seen_running_is_marked_started() -> None:
    assert steps(attempts=(OPEN,)) == (MarkStarted(OPEN),)


@pytest.mark.parametrize("domains", [(), (OFF,)])
def test_an_open_attempt_counts_as_starting_until_its_deadline(domains: tuple[DomainSeen, ...]) -> None:
    assert steps(attempts=(OPEN,), domains=domains, domains_at=59.0) == ()
    (withdraw, close) = steps(attempts=(OPEN,), domains=domains, domains_at=60.1)
    assert withdraw == Withdraw(UUID, "vm0", (VM.key,), "its domain did not start in time")
    assert close == CloseRelay(UUID, "its domain did not start in time")


def test_a_list_asked_for_before_the_deadline_cannot_say_that_it_was_missed() -> None:
    assert steps(attempts=(OPEN,), domains=(), domains_at=60.0) == ()


@pytest.mark.parametrize("domains", [(), (OFF,)])
def test_a_started_domain_that_is_gone_is_withdrawn_and_its_relay_closed(domains: tuple[DomainSeen, ...]) -> None:
    assert steps(domains=domains) == (GONE, CloseRelay(UUID, GONE.reason))


def test_while_libvirt_is_away_no_domain_is_taken_for_absent() -> None:
    assert steps(domains=None) == ()
    assert steps(domains=None, attempts=(OPEN,), domains_at=1000.0) == ()


def test_a_list_older_than_the_attempts_row_says_nothing_of_it() -> None:
    assert steps(domains=(), domains_at=100.0, rows_since={UUID: 100.5}) == ()
    assert steps(domains=(), domains_at=101.0, rows_since={UUID: 100.5})[0] == GONE


def test_claims_without_an_attempt_go_once_their_domain_is_absent() -> None:
    assert steps(attempts=(), domains=())[0] == replace(GONE, reason="its domain is not running")
    assert steps(attempts=()) == ()


def test_an_attempt_of_another_boot_needs_no_list_of_domains() -> None:
    old = replace(STARTED, boot_id=BootId("boot-0"))
    assert steps(attempts=(old,), domains=None, relays=())[0] == replace(GONE, reason="the host has rebooted")
    assert steps(attempts=(old,)) == ()  # it runs: an autostart that prepare has not told yet


def test_an_attempt_without_claims_is_withdrawn_too() -> None:
    assert steps(claims=(), bindings=(), relays=(), domains=())[0] == Withdraw(UUID, "vm0", (), GONE.reason)


def test_a_running_domain_without_rows_gets_nothing() -> None:
    asked = replace(RUNNING, claims=(spec(),))
    assert steps(claims=(), attempts=(), bindings=(), relays=(), domains=(asked,)) == ()


def test_the_next_deadline_is_that_of_the_attempts_still_open() -> None:
    later = replace(OPEN, domain=claim(1).key.domain, deadline=70.0)
    assert next_deadline(replace(STEADY, attempts=(later, OPEN))) == 60.0
    assert next_deadline(STEADY) is None


# --- relays -----------------------------------------------------------------------------------------------------------


def test_a_domain_with_claims_gets_a_relay_before_anything_is_bound() -> None:
    found = steps(claims=(VM,), attempts=(OPEN,), bindings=(), domains=None, relays=())
    assert found == (OpenRelay(UUID, "vm0", ("gpu0",), ""),)


def test_a_relay_that_died_is_opened_at_the_endpoint_that_the_guest_knows() -> None:
    assert steps(relays=()) == (OpenRelay(UUID, "vm0", ("gpu0",), ENDPOINT),)


def test_a_new_relay_is_pointed_and_then_the_claim_says_so() -> None:
    assert steps(claims=(VM,), relays=(NOWHERE,)) == (
        PointRelay(UUID, "gpu0", Generation(1), "unix:/w", 4096),
        RecordPointed(VM.key, Generation(1), ENDPOINT),
    )


def test_the_endpoint_is_recorded_while_nothing_is_served_yet() -> None:
    found = steps(claims=(VM,), bindings=(binding(VM, card(), phase=Phase.PREPARING),), relays=(NOWHERE,))
    assert found == (RecordPointed(VM.key, None, ENDPOINT),)


def test_a_relay_follows_to_the_next_generation_at_the_same_endpoint() -> None:
    old = binding(VM, card(0), 1, Phase.RELEASING)
    new = binding(VM, card(1), 2, worker="unix:/w2")
    assert steps(bindings=(old, new)) == (
        PointRelay(UUID, "gpu0", Generation(2), "unix:/w2", 4096),
        RecordPointed(VM.key, Generation(2), ENDPOINT),
    )


@pytest.mark.parametrize("phase", [Phase.BROKEN, Phase.RELEASING, Phase.LOST])
def test_sessions_end_as_soon_as_their_binding_is_not_ready(phase: Phase) -> None:
    gone = binding(VM, card(), phase=phase, reason="Xid 79")
    assert steps(bindings=(gone,)) == (
        UnpointRelay(UUID, "gpu0", f"vm0/gpu0#1 is {phase.value}: Xid 79"),
        RecordPointed(VM.key, None, ENDPOINT),
    )


def test_a_vanished_binding_unpoints_too() -> None:
    assert steps(bindings=())[0] == UnpointRelay(UUID, "gpu0", "the claim has no binding")


def test_a_row_that_lags_behind_its_relay_is_put_right() -> None:
    assert steps(claims=(replace(SERVED, pointed=None),)) == (RecordPointed(VM.key, Generation(1), ENDPOINT),)


def test_a_point_of_a_claim_that_is_gone_is_cut() -> None:
    extra = replace(POINTED, points={"gpu0": Generation(1), "gpu1": Generation(5)})
    assert steps(relays=(extra,)) == (UnpointRelay(UUID, "gpu1", "its claim is withdrawn"),)


def test_a_relay_without_claims_is_closed() -> None:
    found = steps(claims=(), attempts=(), bindings=(), domains=None)
    assert found == (CloseRelay(UUID, "no claim of its domain is left"),)


def test_a_passthrough_claim_needs_no_relay() -> None:
    direct = replace(VM, spec=spec(mode=Mode.PASSTHROUGH))
    assert steps(claims=(direct,), bindings=(), relays=()) == ()


def test_what_a_relay_left_that_died_is_removed_with_its_domains_rows() -> None:
    assert steps(domains=(), relays=()) == (GONE, CloseRelay(UUID, GONE.reason))


def test_a_running_domains_relay_is_told_once_to_end_with_its_qemu() -> None:
    seen = replace(RUNNING, pid=4711)
    assert steps(domains=(seen,)) == (FollowDomain(UUID, 4711),)
    assert steps(domains=(seen,), relays=(replace(POINTED, follows=4711),)) == ()
    assert steps(domains=(seen,), relays=(replace(POINTED, follows=99),)) == (FollowDomain(UUID, 4711),)
    assert [type(step) for step in steps(domains=(seen,), claims=(VM,), relays=(NOWHERE,))] == [
        PointRelay, RecordPointed, FollowDomain,
    ]  # fmt: skip


def test_nobody_is_followed_whose_process_or_relay_is_not_known() -> None:
    assert steps(relays=(replace(POINTED, follows=99),)) == ()  # the list does not say: it stays as it is
    assert FollowDomain not in map(type, steps(domains=(replace(RUNNING, pid=4711),), relays=()))
    assert steps(domains=(replace(OFF, pid=4711),), attempts=(OPEN,), domains_at=59.0) == ()
    assert steps(domains=None) == ()


def test_while_relays_cannot_be_listed_none_is_touched_and_domains_are_still_withdrawn() -> None:
    assert steps(relays=None, bindings=()) == ()
    assert steps(relays=None, domains=()) == (GONE,)


def test_domains_are_independent_and_come_in_order() -> None:
    other = claim(1)
    found = steps(claims=(other, SERVED), attempts=(STARTED,), relays=(POINTED,), domains=(OFF,))
    assert [type(step) for step in found] == [Withdraw, CloseRelay, Withdraw, CloseRelay]
    assert [getattr(step, "domain", None) for step in found[1:]] == [UUID, other.key.domain, other.key.domain]

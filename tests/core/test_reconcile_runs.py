"""Runs: claims that a process of the host holds instead of a domain."""

from __future__ import annotations

from dataclasses import replace

from kvmpool.core.model import Attempt, BootId, CloseRelay, DomainUuid, Process, RelaySeen, Unread, Withdraw
from kvmpool.core.reconcile_domains import DomainsView, next_deadline, reconcile_domains
from tests.core.build import BOOT, H0, claim

UUID = DomainUuid("uuid-0")
RUN = Attempt(UUID, "run-7", H0, 1, deadline=10.0, boot_id=BOOT, started=True, holder=Process(7, 4711))
CLAIM = claim(0)
RELAY = RelaySeen(UUID, CLAIM.endpoint, 99)


def steps(**change: object) -> list[object]:
    view = DomainsView(BOOT, claims=(CLAIM,), attempts=(RUN,), relays=(RELAY,), domains=None, domains_at=99.0)
    return list(reconcile_domains(replace(view, **change)))  # type: ignore[arg-type]


def withdrawn(found: list[object]) -> str:
    return next((step.reason for step in found if isinstance(step, Withdraw)), "")


def test_a_run_stays_while_its_process_lives_whatever_libvirt_says() -> None:
    for domains in (None, ()):
        assert not withdrawn(steps(living=frozenset({UUID}), domains=domains))


def test_a_run_goes_with_its_process_without_a_list_of_domains() -> None:
    found = steps()
    assert withdrawn(found) == "its process has ended"
    assert CloseRelay(UUID, "its process has ended") in found


def test_a_session_of_a_child_keeps_the_run() -> None:
    assert not withdrawn(steps(relays=(replace(RELAY, sessions=1),)))


def test_while_the_relays_cannot_be_listed_no_session_is_taken_for_absent() -> None:
    assert steps(relays=None) == []


def test_after_a_reboot_nothing_of_a_run_is_left() -> None:
    assert withdrawn(steps(attempts=(replace(RUN, boot_id=BootId("other")),))) == "the host has rebooted"


def test_a_run_has_no_deadline_to_appear_by() -> None:
    view = DomainsView(BOOT, attempts=(RUN,))
    assert next_deadline(view) is None


def test_a_run_of_which_a_row_cannot_be_read_is_left_as_it_is() -> None:
    assert steps(unread=Unread(attempts=frozenset({UUID}))) == []


def test_a_domain_is_not_held_by_sessions() -> None:
    domain = replace(RUN, holder=None)
    found = steps(attempts=(domain,), domains=(), relays=(replace(RELAY, sessions=1),))
    assert withdrawn(found) == "its domain has stopped"

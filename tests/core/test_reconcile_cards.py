"""What the host of the cards does about each pair of a row and a worker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmpool.core.model import (
    Binding,
    CardSeen,
    CardStep,
    Claim,
    Forget,
    Phase,
    PublishCard,
    ReportBroken,
    ReportReady,
    StartWorker,
    StopWorker,
    Verdict,
    WorkerSeen,
)
from kvmpool.core.reconcile_cards import CardsView, reconcile_cards
from tests.core.build import BOOT, H0, binding, card, claim, failed, health

C0 = card(0)


def worker(of: Binding, *, serving: bool = True, pid: int = 42) -> WorkerSeen:
    return WorkerSeen(of.claim, of.generation, "unix:/w", pid, card=of.card, serving=serving)


def steps(held: Binding | None = None, seen: WorkerSeen | None = None, **more: object) -> tuple[CardStep, ...]:
    view = CardsView(
        H0, (held,) if held else (), (seen,) if seen else (), health={C0.id: C0.health}, published={C0.id: C0}
    )
    return reconcile_cards(replace(view, **more))  # type: ignore[arg-type]


def row(phase: Phase, of: Claim | None = None) -> Binding:
    return binding(of or claim(), C0, 3, phase, reason="because")


def test_a_preparing_binding_without_a_worker_is_started() -> None:
    assert steps(row(Phase.PREPARING)) == (StartWorker(row(Phase.PREPARING)),)


def test_a_worker_that_serves_is_reported_ready() -> None:
    held = row(Phase.PREPARING)
    assert steps(held, worker(held)) == (ReportReady(held, "unix:/w"),)


def test_a_worker_that_is_there_but_does_not_serve_yet_is_waited_for() -> None:
    held = row(Phase.PREPARING)
    assert steps(held, worker(held, serving=False)) == (StartWorker(held),)


def test_a_worker_that_cannot_be_started_breaks_its_binding_with_the_reason() -> None:
    held = row(Phase.PREPARING)
    assert steps(held, start_failures={(held.claim, held.generation): (2, "no such file")}) == (StartWorker(held),)
    assert steps(held, start_failures={(held.claim, held.generation): (3, "no such file")}) == (
        ReportBroken(held, "its worker could not be started (3 tries): no such file"),
    )


def test_no_worker_is_started_on_a_card_that_has_failed() -> None:
    dead = failed().health
    assert steps(row(Phase.PREPARING), health={C0.id: dead}, published={C0.id: failed()}) == ()


def test_a_ready_binding_is_left_alone_while_its_worker_lives() -> None:
    held = row(Phase.READY)
    assert steps(held, worker(held)) == ()
    assert steps(held, worker(held, serving=False)) == ()


def test_a_ready_binding_whose_worker_is_gone_is_broken() -> None:
    assert steps(row(Phase.READY)) == (ReportBroken(row(Phase.READY), "its worker has ended"),)


def test_a_worker_that_left_with_the_relay_of_a_withdrawn_claim_broke_nothing() -> None:
    held = row(Phase.READY)
    assert steps(held, withdrawn=frozenset({held.claim})) == ()


@pytest.mark.parametrize("phase", [Phase.RELEASING, Phase.LOST])
def test_a_row_on_its_way_out_goes_only_when_its_worker_is_gone(phase: Phase) -> None:
    held = row(phase)
    assert steps(held, worker(held)) == (StopWorker(held.claim, held.generation, 42, "because"),)
    assert steps(held) == (Forget(held, "its worker is gone (because)"),)


def test_a_broken_binding_waits_for_the_leader() -> None:
    assert steps(row(Phase.BROKEN)) == ()


def test_a_worker_without_a_row_is_stopped_also_one_of_another_generation() -> None:
    held = row(Phase.READY)
    old = replace(worker(held, pid=7), generation=held.generation.__class__(2))
    found = steps(held, None, workers=(worker(held), old))
    assert found == (StopWorker(held.claim, old.generation, 7, "no binding row names it"),)


def test_a_worker_whose_row_cannot_be_read_is_left_alone() -> None:
    lone = worker(row(Phase.READY))
    assert steps(None, lone, unreadable=frozenset({(lone.claim, lone.generation)})) == ()
    assert len(steps(None, lone)) == 1


def test_while_workers_cannot_be_listed_nothing_is_concluded_of_them() -> None:
    news = replace(C0, health=health(Verdict.FAILED, "Xid 79"))
    found = steps(row(Phase.READY), workers=None, health={C0.id: news.health})
    assert found == (PublishCard(news, "failed: Xid 79"),)


# --- cards ------------------------------------------------------------------------------------------------------------

SEEN = CardSeen(C0.id, C0.address, C0.model, C0.memory_mib)


def test_a_new_card_is_published() -> None:
    (step,) = steps(None, cards=(SEEN,), published={})
    assert isinstance(step, PublishCard)
    assert step.card == C0
    assert step.reason.startswith("found: Soft GPU, 8192 MiB")


def test_a_card_is_not_published_again_without_news() -> None:
    assert steps(None, cards=(SEEN,)) == ()
    counted = replace(C0.health, clean_probes=3, last_signal_at=5.0)
    assert steps(None, cards=(SEEN,), health={C0.id: counted}) == ()


def test_a_verdict_is_published_before_anything_else_is_done() -> None:
    dead = health(Verdict.FAILED, "Xid 79")
    found = steps(row(Phase.READY), None, cards=(SEEN,), health={C0.id: dead})
    assert found[0] == PublishCard(replace(C0, health=dead), "failed: Xid 79")
    assert isinstance(found[1], ReportBroken)


def test_a_changed_fact_is_published_quietly() -> None:
    (step,) = steps(None, cards=(replace(SEEN, driver="580.1"),))
    assert isinstance(step, PublishCard)
    assert (step.card.driver, step.reason) == ("580.1", "")


def test_a_card_with_a_fault_is_believed_in_nothing_but_its_verdict() -> None:
    lie = replace(SEEN, memory_mib=1, model="?", fault="NVML: version mismatch")
    assert steps(None, cards=(lie,)) == ()
    assert steps(None, cards=(lie,), published={}) == ()
    unknown = health(Verdict.UNKNOWN, "NVML: version mismatch")
    (step,) = steps(None, cards=(lie,), health={C0.id: unknown})
    assert step == PublishCard(replace(C0, health=unknown), "unknown: NVML: version mismatch")


def test_a_card_that_left_the_bus_keeps_its_row_with_its_verdict() -> None:
    gone = health(Verdict.FAILED, "its address left the bus", hard=True)
    (step,) = steps(None, cards=(), health={C0.id: gone})
    assert step == PublishCard(replace(C0, health=gone), "failed: its address left the bus")
    assert gone.boot_id == BOOT


def test_an_inventory_that_cannot_be_read_changes_no_row() -> None:
    assert steps(None, cards=None) == ()

"""What the leader decides: rule by rule, then laws over random pools."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmpool.core.health import OUT_OF_SERVICE
from kvmpool.core.model import (
    Bind,
    Breaker,
    Card,
    CardId,
    CardWish,
    Decision,
    Generation,
    Hold,
    Lose,
    OnFailure,
    Phase,
    Release,
    Rows,
    Settings,
    TripBreaker,
    Verdict,
    Wait,
)
from kvmpool.core.phase import MOVES, OPEN, Owner, may
from kvmpool.core.reconcile_cluster import explain, open_binding, queue, reconcile_cluster
from tests.core.build import BOOT, HOST, applied, binding, card, claim, failed, health, rows, spec

SETTINGS = Settings()
C0, C1, C2 = card(0), card(1), card(2)


def decide(pool: Rows, policy: Settings = SETTINGS, now: float = 100.0) -> tuple[Decision, ...]:
    return reconcile_cluster(pool, policy, now)


def the_wait(pool: Rows, policy: Settings = SETTINGS) -> Wait:
    (only,) = decide(pool, policy)
    assert isinstance(only, Wait)
    return only


# --- new claims -------------------------------------------------------------------------------------------------------


def test_a_new_claim_is_bound_with_the_next_generation() -> None:
    (only,) = decide(replace(rows([C0], [claim()]), counter=7))
    assert isinstance(only, Bind)
    assert only.binding == binding(claim(), C0, 8, Phase.PREPARING, worker="", reason="on h0/0000:41:00.0")
    assert only.failover_of is None


def test_a_served_claim_is_left_alone_whatever_better_card_there_is() -> None:
    assert decide(rows([C0, C1], [claim()], [binding(claim(), C1)])) == ()
    assert decide(rows([C0, C1], [claim()], [binding(claim(), C1, phase=Phase.PREPARING)])) == ()


def test_a_plan_sees_its_own_earlier_decisions() -> None:
    claims = [claim(n, spec(4096)) for n in range(3)]
    decisions = decide(rows([card(0, 8192)], claims))
    assert [type(each) for each in decisions] == [Bind, Bind, Wait]


def test_the_queue_is_recovery_then_priority_then_age() -> None:
    old, young, important = claim(0), claim(1), claim(2, spec(priority=80))
    lost = claim(3, served=Generation(4))
    assert [each.label for each in queue(rows([], [young, old, important, lost]))] == [
        "vm3/gpu0",
        "vm2/gpu0",
        "vm0/gpu0",
        "vm1/gpu0",
    ]


def test_a_claim_without_a_fitting_card_waits_with_every_cards_first_failing_predicate() -> None:
    wait = the_wait(rows([card(0, 1024), failed(1)], [claim()]))
    assert wait.cards == (
        ("h0/0000:41:00.0", "1024 of 1024 MiB free, the claim asks for 4096"),
        ("h0/0000:42:00.0", "failed: Xid 79"),
    )
    assert wait.reason == (
        "no card can serve 4096 MiB (2 cards; h0/0000:41:00.0: 1024 of 1024 MiB free, the claim asks for 4096;"
        " h0/0000:42:00.0: failed: Xid 79)"
    )
    assert "\n" not in wait.reason


def test_a_pool_without_cards_says_so() -> None:
    assert "the pool has no cards" in the_wait(rows([], [claim()])).reason


@pytest.mark.parametrize("asked", [spec(count=2), spec(hold=Hold.PROCESS)])
def test_a_claim_that_cannot_be_performed_yet_waits_with_that_reason(asked: object) -> None:
    assert "not supported yet" in the_wait(rows([C0], [claim(0, asked)])).reason  # type: ignore[arg-type]


# --- what gives a binding up ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.READY, Phase.BROKEN])
def test_a_withdrawn_claims_binding_is_released(phase: Phase) -> None:
    held = binding(claim(), C0, phase=phase)
    assert decide(rows([C0], [], [held])) == (Release(held, "its claim is withdrawn"),)


@pytest.mark.parametrize("phase", [Phase.RELEASING, Phase.LOST])
def test_a_binding_on_its_way_out_is_not_touched_again(phase: Phase) -> None:
    assert decide(rows([C0], [], [binding(claim(), C0, phase=phase)])) == ()


@pytest.mark.parametrize("verdict", [each for each in Verdict if each in OUT_OF_SERVICE])
def test_a_card_out_of_service_is_failed_over_in_one_plan(verdict: Verdict) -> None:
    dead = card(0, state=health(verdict, "Xid 79"))
    held = binding(claim(), dead)
    release, bind = decide(rows([dead, C1], [claim()], [held]))
    assert release == Release(held, f"card h0/0000:41:00.0 {verdict.value}: Xid 79", failover_of=dead.id)
    assert isinstance(bind, Bind)
    assert (bind.binding.card, bind.binding.generation, bind.failover_of) == (C1.id, 2, dead.id)
    assert "instead of #1" in bind.reason


@pytest.mark.parametrize("verdict", [each for each in Verdict if each not in OUT_OF_SERVICE])
def test_a_card_in_service_keeps_its_bindings_whatever_is_suspected(verdict: Verdict) -> None:
    doubtful = card(0, state=health(verdict, "Xid 109"))
    assert decide(rows([doubtful, C1], [claim()], [binding(claim(), doubtful)])) == ()


def test_a_failed_card_without_a_successor_is_released_all_the_same_and_the_claim_waits_first() -> None:
    held = binding(claim(0, served=Generation(1)), failed())
    release, wait = decide(rows([failed()], [claim(0, served=Generation(1))], [held]))
    assert isinstance(release, Release)
    assert isinstance(wait, Wait)
    later = rows([C0], [claim(0, served=Generation(1)), claim(1, spec(8192, priority=100))])
    assert [each.binding.claim for each in decide(later) if isinstance(each, Bind)] == [claim(0).key]


def test_memory_given_up_is_not_free_before_its_host_has_proved_it() -> None:
    broken = binding(claim(0, spec(8192)), C0, phase=Phase.BROKEN)
    pool = rows([C0], [claim(0, spec(8192))], [broken])
    release, wait = decide(pool)
    assert isinstance(release, Release)
    assert isinstance(wait, Wait)
    assert "0 of 8192 MiB free" in wait.reason


def test_a_broken_worker_is_replaced_elsewhere_if_there_is_room_and_here_if_not() -> None:
    broken = binding(claim(0, spec(2048)), C0, phase=Phase.BROKEN, reason="its worker has ended")
    for cards, expected in (([C0, C1], C1), ([C0], C0)):
        release, bind = decide(rows(cards, [claim(0, spec(2048))], [broken]))
        assert isinstance(release, Release)
        assert release.broken
        assert release.failover_of is None
        assert isinstance(bind, Bind)
        assert bind.binding.card == expected.id


def test_a_claim_whose_workers_always_break_waits_before_the_next() -> None:
    memory = Breaker(broken=((90.0, "vm0/gpu0"), (91.0, "vm0/gpu0"), (92.0, "vm0/gpu0")))
    pool = rows([C0], [claim()], [binding(claim(), C0, phase=Phase.BROKEN)], memory=memory)
    assert "3 workers broke within 60 s" in the_wait(pool).reason
    assert [type(each) for each in decide(pool, now=151.0)] == [Release, Bind]


def test_a_host_that_is_gone_loses_its_bindings_and_keeps_their_capacity() -> None:
    other = replace(HOST, name=C1.host.__class__("h1"))
    far = card(1, host=other.name)
    pool = rows([C0, far], [claim()], [binding(claim(), C0)], hosts=[replace(HOST, up=False), other])
    lose, bind = decide(pool)
    assert isinstance(lose, Lose)
    assert isinstance(bind, Bind)
    assert bind.binding.card_host == "h1"
    after = applied(pool, (lose, bind), SETTINGS, 100.0)
    assert [each.phase for each in after.bindings.values()] == [Phase.LOST, Phase.PREPARING]


def test_what_a_gone_host_was_releasing_is_lost_too() -> None:
    held = binding(claim(), C0, phase=Phase.RELEASING)
    pool = rows([C0], [], [held], hosts=[replace(HOST, up=False)])
    assert decide(pool) == (Lose(held, "host h0 is gone"),)


def test_a_changed_claim_is_bound_anew() -> None:
    held = binding(claim(0, spec(2048)), C0)
    release, bind = decide(rows([C0], [claim(0, spec(1024))], [held]))
    assert release == Release(held, "the claim was changed")
    assert isinstance(bind, Bind)
    assert bind.binding.memory_mib == 1024


def test_a_drained_card_is_moved_off_once_there_is_room_and_kept_until_then() -> None:
    wish = CardWish(C0.id, drain=True, by="uid 0", reason="fan")
    held = binding(claim(), C0)
    release, bind = decide(rows([C0, C1], [claim()], [held], wishes=[wish]))
    assert release == Release(held, "card drained by uid 0: fan")
    assert isinstance(bind, Bind)
    wait = the_wait(rows([C0, failed(1)], [claim()], [held], wishes=[wish]))
    assert "it stays" in wait.reason


def test_a_drain_never_takes_the_room_that_a_recovery_needs() -> None:
    wish = CardWish(C0.id, drain=True)
    drained, lost = binding(claim(0), C0, 1), binding(claim(1), failed(1), 2)
    one_place = card(2, 4096)
    decisions = decide(rows([C0, failed(1), one_place], [claim(0), claim(1)], [drained, lost], wishes=[wish]))
    assert [each.binding.claim for each in decisions if isinstance(each, Bind)] == [claim(1).key]
    assert drained not in [each.binding for each in decisions if isinstance(each, Release)]


def test_a_cordon_keeps_what_is_served() -> None:
    assert decide(rows([C0, C1], [claim()], [binding(claim(), C0)], wishes=[CardWish(C0.id, cordoned=True)])) == ()


def test_on_failure_none_is_released_and_not_bound_again() -> None:
    proud = claim(0, spec(on_failure=OnFailure.NONE), served=Generation(1))
    pool = rows([failed(), C1], [proud], [binding(proud, failed())])
    release, wait = decide(pool)
    assert isinstance(release, Release)
    assert isinstance(wait, Wait)
    assert 'on_failure="none"' in wait.reason
    assert isinstance(the_wait(rows([failed(), C1], [proud])), Wait)


def test_on_failure_none_that_was_never_served_may_still_start_elsewhere() -> None:
    proud = claim(0, spec(on_failure=OnFailure.NONE))
    pool = rows([failed(), C1], [proud], [binding(proud, failed(), phase=Phase.PREPARING)])
    assert [type(each) for each in decide(pool)] == [Release, Bind]


# --- breaker and pause ------------------------------------------------------------------------------------------------


def storm(count: int, *, hard: bool = False) -> Rows:
    """`count` cards of twelve failed, each with a binding."""
    cards = [failed(n, hard=hard) if n < count else card(n) for n in range(12)]
    claims = [claim(n) for n in range(count)]
    return rows(cards, claims, [binding(each, cards[n], n + 1) for n, each in enumerate(claims)])


def test_one_card_too_many_opens_the_breaker_and_the_rest_waits() -> None:
    decisions = decide(storm(5))
    trips = [each for each in decisions if isinstance(each, TripBreaker)]
    assert len(trips) == 1
    assert "3 of 12 cards" in trips[0].reason
    assert len([each for each in decisions if isinstance(each, Release)]) == 2
    waits = [each for each in decisions if isinstance(each, Wait)]
    assert len(waits) == 3
    assert all("the failover breaker is open" in each.reason for each in waits)


def test_the_most_important_claims_move_before_the_breaker_opens() -> None:
    pool = storm(5)
    key = claim(4).key
    pool.claims[key] = replace(pool.claims[key], spec=spec(priority=90))
    moved = [each.binding.claim for each in decide(pool) if isinstance(each, Release)]
    assert key in moved


def test_an_open_breaker_stops_failover_and_nothing_else() -> None:
    memory = Breaker(open_reason="3 of 12 cards", opened_at=50.0)
    pool = replace(storm(1), breaker=memory)
    assert "breaker is open" in the_wait(pool).reason
    pool.claims[claim(7).key] = claim(7)
    assert [type(each) for each in decide(pool)] == [Bind, Wait]
    del pool.claims[claim(0).key]
    assert {type(each) for each in decide(pool)} == {Release, Bind}


def test_hard_evidence_is_exempt_from_the_breaker() -> None:
    decisions = decide(replace(storm(6, hard=True), breaker=Breaker(open_reason="x", opened_at=1.0)))
    assert [type(each) for each in decisions] == [Release] * 6 + [Bind] * 6
    assert all(each.failover_of is None for each in decisions if isinstance(each, Release))


def test_a_closed_breaker_lets_the_waiting_move() -> None:
    opened = applied(storm(3), decide(storm(3)), SETTINGS, 100.0)
    assert opened.breaker.open_reason
    closed = replace(opened, breaker=Breaker())
    assert [type(each) for each in decide(closed)] == [Release, Bind]


def test_a_paused_pool_says_what_it_would_do_and_does_nothing() -> None:
    pool = rows([failed(0), C1], [claim(0), claim(1)], [binding(claim(0), failed(0))])
    waits = decide(pool, Settings(paused=True))
    assert all(isinstance(each, Wait) for each in waits)
    text = " ".join(each.reason for each in waits if isinstance(each, Wait))
    assert "would release vm0/gpu0#1" in text
    assert "would bind vm1/gpu0#" in text


# --- reading ----------------------------------------------------------------------------------------------------------


def test_explain_gives_every_card_and_leaves_the_claims_own_binding_out() -> None:
    pool = rows([C0, failed(1)], [claim(0, spec(8192))], [binding(claim(0, spec(8192)), C0)])
    found = explain(pool, SETTINGS, claim().key)
    assert found is not None
    assert found.card == C0
    assert [label for label, _ in found.refused] == ["h0/0000:42:00.0"]
    assert explain(pool, SETTINGS, claim(9).key) is None


def test_the_open_binding_is_the_newest_open_one() -> None:
    held = [binding(claim(), C0, 1, Phase.RELEASING), binding(claim(), C1, 2, Phase.PREPARING)]
    found = open_binding(rows([C0, C1], [claim()], held), claim().key)
    assert found is not None
    assert found.generation == 2
    assert open_binding(rows([C0], [claim()], held[:1]), claim().key) is None


def test_only_the_leader_binds_and_releases_and_only_the_cards_host_frees() -> None:
    assert may(Owner.LEADER, None, Phase.PREPARING)
    assert not may(Owner.CARD_HOST, None, Phase.PREPARING)
    assert {old for (old, new) in MOVES if new is None} == {Phase.RELEASING, Phase.LOST}
    assert all(MOVES[old, None] is Owner.CARD_HOST for old in (Phase.RELEASING, Phase.LOST))
    assert not may(Owner.LEADER, Phase.RELEASING, Phase.READY)


# --- laws -------------------------------------------------------------------------------------------------------------

_VERDICTS = [Verdict.HEALTHY] * 5 + [each for each in Verdict if each is not Verdict.HEALTHY]


@st.composite
def _pools(draw: st.DrawFn) -> Rows:
    """Any pool that could have come about: at most one open binding a claim, capacity respected."""
    cards = [
        card(
            n,
            draw(st.sampled_from([4096, 8192])),
            health(draw(st.sampled_from(_VERDICTS)), "x", hard=draw(st.booleans())),
        )
        for n in range(draw(st.integers(0, 5)))
    ]
    claims = [
        claim(
            n,
            spec(
                draw(st.sampled_from([1024, 2048, 4096])),
                priority=draw(st.integers(0, 3)),
                on_failure=draw(st.sampled_from([OnFailure.REBIND, OnFailure.NONE])),
            ),
            served=draw(st.sampled_from([None, Generation(1)])),
        )
        for n in range(draw(st.integers(0, 6)))
    ]
    held, used, generation = [], {each.id: 0 for each in cards}, 0
    for each in claims:
        for phase in draw(st.lists(st.sampled_from(list(Phase)), max_size=2, unique_by=lambda phase: phase in OPEN)):
            on = draw(st.sampled_from(cards)) if cards else None
            if on is None or used[on.id] + each.spec.memory_mib > on.memory_mib:
                continue
            used[on.id] += each.spec.memory_mib
            generation += 1
            held.append(binding(each, on, generation, phase))
    wishes = [CardWish(each.id, draw(st.booleans()), draw(st.booleans())) for each in cards if draw(st.booleans())]
    kept = [each for each in claims if draw(st.integers(0, 9))]
    memory = Breaker(open_reason=draw(st.sampled_from(["", "", "x"])))
    return rows(cards, kept, held, wishes=wishes, memory=memory)


def _fits(pool: Rows) -> None:
    used: dict[CardId, int] = {}
    for each in pool.bindings.values():
        used[each.card] = used.get(each.card, 0) + each.memory_mib
    assert all(memory <= pool.cards[on].memory_mib for on, memory in used.items()), "a card is never promised twice"


@given(_pools())
@settings(max_examples=400, deadline=None)
def test_no_decision_ever_breaks_an_invariant(pool: Rows) -> None:
    decisions = decide(pool)
    after = applied(pool, decisions, SETTINGS, 100.0)
    _fits(after)
    for each in after.claims:
        open_ = [held for held in after.bindings.values() if held.claim == each and held.phase in OPEN]
        assert len(open_) <= 1, "a claim never has two open bindings"
    for bind in (each for each in decisions if isinstance(each, Bind)):
        on: Card = pool.cards[bind.binding.card]
        wish = pool.wishes.get(on.id)
        assert (on.health.verdict, on.health.boot_id) == (Verdict.HEALTHY, BOOT), "nothing new lands on a sick card"
        assert wish is None or not (wish.cordoned or wish.drain), "nothing new lands on a cordoned card"
    generations = [each.binding.generation for each in decisions if isinstance(each, Bind)]
    assert generations == list(range(pool.counter + 1, pool.counter + 1 + len(generations))), "generations only grow"
    for move in decisions:
        if isinstance(move, Release | Lose):
            new = Phase.RELEASING if isinstance(move, Release) else Phase.LOST
            assert may(Owner.LEADER, move.binding.phase, new)


@given(_pools())
@settings(max_examples=400, deadline=None)
def test_after_a_plan_there_are_only_waits(pool: Rows) -> None:
    after = applied(pool, decide(pool), SETTINGS, 100.0)
    assert all(isinstance(each, Wait) for each in decide(after))


@given(_pools())
@settings(max_examples=200, deadline=None)
def test_any_prefix_of_a_plan_leads_to_a_pool_that_goes_on(pool: Rows) -> None:
    decisions = decide(pool)
    for cut in range(len(decisions)):
        after = applied(pool, decisions[:cut], SETTINGS, 100.0)
        _fits(applied(after, decide(after), SETTINGS, 100.0))


@given(_pools())
@settings(max_examples=200, deadline=None)
def test_no_claim_waits_for_room_while_a_later_one_takes_it(pool: Rows) -> None:
    decisions = decide(pool)
    moved = {each.binding.claim: each.binding for each in decisions if isinstance(each, Release | Lose)}
    order = [each.key for each in queue(pool, moved)]
    for wait in (each for each in decisions if isinstance(each, Wait) and each.reason.startswith("no card")):
        for bind in (each for each in decisions if isinstance(each, Bind)):
            later = order.index(bind.binding.claim) > order.index(wait.claim)
            smaller = bind.binding.memory_mib < pool.claims[wait.claim].spec.memory_mib
            assert not later or smaller, "no claim waits while a later one is given what it could use"


@given(_pools())
@settings(max_examples=200, deadline=None)
def test_every_claim_is_served_bound_or_told_why_not(pool: Rows) -> None:
    decisions = decide(pool)
    told = {each.claim for each in decisions if isinstance(each, Wait)}
    after = applied(pool, decisions, SETTINGS, 100.0)
    for key in pool.claims:
        assert open_binding(after, key) is not None or key in told


@given(_pools(), st.permutations(range(6)))
@settings(max_examples=100, deadline=None)
def test_the_order_of_rows_changes_nothing(pool: Rows, order: list[int]) -> None:
    cards = dict(sorted(pool.cards.items(), reverse=True))
    claims = dict(sorted(pool.claims.items(), key=lambda item: order[int(item[1].domain_name[2:])]))
    held = dict(reversed(pool.bindings.items()))
    assert decide(replace(pool, cards=cards, claims=claims, bindings=held)) == decide(pool)


@given(_pools())
@settings(max_examples=100, deadline=None)
def test_a_paused_pool_never_changes(pool: Rows) -> None:
    assert all(isinstance(each, Wait) for each in decide(pool, Settings(paused=True)))

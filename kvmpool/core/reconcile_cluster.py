"""Decides which claim is served by which card: the rows of the pool in, decisions out. Run by the leader.

Every binding row is judged first, then every claim without an open binding is placed, in the order of the queue:
    claim withdrawn or changed        release
    card out of service               release, and bind elsewhere in the same plan; the breaker may refuse (a Wait)
    its host is not up                lose (the row keeps its capacity until there is proof), and bind elsewhere
    worker broken                     release and bind again, on any card that fits, but not without end
    a person drains the card          move, once there is somewhere to move to: never to nowhere
    draining, suspect, unknown card   keep: what is served is never made worse on a suspicion
A claim that was served and says on_failure="none" is released and not bound again.
`reconcile(after(reconcile(rows)))` holds only Waits.
Capacity that a Release gives up is not free in the same plan: its row goes when the card's host has proved it free.
A row that cannot be read is there: what it is about is left as it is.
This module does not know when it is called; `now` is the leader's boottime and only the breaker uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvmpool.core import breaker, place
from kvmpool.core.health import OUT_OF_SERVICE
from kvmpool.core.model import (
    Bind,
    Binding,
    CardId,
    Claim,
    ClaimKey,
    Decision,
    Generation,
    Lose,
    Mode,
    OnFailure,
    Phase,
    Release,
    Rows,
    Settings,
    TripBreaker,
    Wait,
)
from kvmpool.core.phase import OPEN

_HELD = frozenset({Phase.RELEASING, Phase.LOST})


@dataclass(slots=True)
class _Plan:
    """One plan in the making: what was decided so far is seen by what is decided next."""

    rows: Rows
    settings: Settings
    now: float
    taken: place.Taken
    decisions: list[Decision] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    failing: list[CardId] = field(default_factory=list)  # cards whose failure this plan answers, on soft evidence
    open_reason: str = ""  # of the breaker
    moved: dict[ClaimKey, Binding] = field(default_factory=dict)  # given up in this plan
    drained: list[Binding] = field(default_factory=list)  # to be moved, where there is room after everybody else
    bound: int = 0
    stay: set[ClaimKey] = field(default_factory=set)  # has an open binding, or must not get one

    def wait(self, claim: Claim, reason: str, cards: tuple[tuple[str, str], ...] = ()) -> None:
        self.stay.add(claim.key)
        self.waits.append(Wait(claim.key, claim.label, reason, cards))


def reconcile_cluster(rows: Rows, settings: Settings, now: float) -> tuple[Decision, ...]:
    """What the leader does now: releases and binds in an order of which every prefix is safe, then the Waits."""
    plan = _Plan(rows, settings, now, place.taken_by(rows.bindings.values()), open_reason=rows.breaker.open_reason)
    for binding in sorted(rows.bindings.values(), key=lambda binding: _queue_key_of(plan, binding)):
        if binding.claim in rows.unread.touched:
            continue
        if binding.phase not in _HELD:
            _judge(plan, binding)
        elif binding.phase is Phase.RELEASING and not _host_is_up(rows, binding):
            plan.decisions.append(Lose(binding, f"host {binding.card_host} is gone"))
    for claim in queue(rows, plan.moved):
        if claim.key not in plan.stay:
            _serve(plan, claim)
    for binding in plan.drained:
        _drain(plan, rows.claims[binding.claim], binding)
    if settings.paused:
        return tuple(_paused(plan))
    return (*plan.decisions, *plan.waits)


def queue(rows: Rows, moved: dict[ClaimKey, Binding] | None = None) -> list[Claim]:
    """Every claim in the order in which they are served: recovery first, then priority, then age (design 07)."""
    return sorted(rows.claims.values(), key=lambda claim: _queue_key(claim, moved or {}))


def explain(rows: Rows, settings: Settings, key: ClaimKey) -> place.Choice | None:
    """Which card the claim would get were it placed now, and why each other one does not fit; None: no such claim."""
    claim = rows.claims.get(key)
    if claim is None:
        return None
    others = [binding for binding in rows.bindings.values() if binding.claim != key]
    return place.choose_card(claim, rows, place.taken_by(others), settings.memory_ratio)


# --- bindings ---------------------------------------------------------------------------------------------------------


def _judge(plan: _Plan, binding: Binding) -> None:
    """Keep, release or lose one open binding."""
    claim = plan.rows.claims.get(binding.claim)
    card = plan.rows.cards.get(binding.card)
    if claim is None:
        plan.decisions.append(Release(binding, "its claim is withdrawn"))
    elif not _host_is_up(plan.rows, binding):
        plan.decisions.append(Lose(binding, f"host {binding.card_host} is gone"))
        _give_up(plan, claim, binding, after_failure=True)
    elif place.binding_spec_differs(binding, claim.spec):
        plan.decisions.append(Release(binding, "the claim was changed"))
        _give_up(plan, claim, binding, after_failure=False)
    elif card is not None and card.health.verdict in OUT_OF_SERVICE:
        _fail_over(plan, claim, binding, soft=not card.health.hard)
    elif binding.phase is Phase.BROKEN:
        _replace_broken(plan, claim, binding)
    elif _is_drained(plan.rows, binding):
        plan.stay.add(claim.key)
        plan.drained.append(binding)
    else:
        plan.stay.add(claim.key)


def _fail_over(plan: _Plan, claim: Claim, binding: Binding, *, soft: bool) -> None:
    """The card is out of service: give the binding up, unless the breaker says that this is one card too many."""
    card = plan.rows.cards[binding.card]
    why = f"card {card.label} {card.health.verdict.value}"
    if card.health.reason:
        why += f": {card.health.reason}"
    if soft and _breaker_holds(plan, card.id):
        reason = f"{why}; the failover breaker is open: {plan.open_reason}. Next: look, then kvmpool breaker close"
        plan.wait(claim, reason)
        return
    if soft and card.id not in plan.failing:
        plan.failing.append(card.id)
    plan.decisions.append(Release(binding, why, failover_of=card.id if soft else None))
    _give_up(plan, claim, binding, after_failure=True)


def _breaker_holds(plan: _Plan, card: CardId) -> bool:
    if not plan.open_reason:
        failing = tuple(plan.failing)
        reason = breaker.would_trip(plan.rows, card, failing, plan.settings, plan.now)
        if reason:
            plan.open_reason = reason
            plan.decisions.append(TripBreaker(reason))
    return bool(plan.open_reason)


def _replace_broken(plan: _Plan, claim: Claim, binding: Binding) -> None:
    """Its worker is gone on a card that works: try again, but a worker that always breaks must not fill the log."""
    why = f"worker broken: {binding.reason}" if binding.reason else "worker broken"
    if plan.open_reason:
        plan.wait(claim, f"{why}; the failover breaker is open: {plan.open_reason}. Next: kvmpool breaker close")
        return
    if breaker.broken_too_often(plan.rows.breaker, claim.label, plan.settings, plan.now):
        window = f"{plan.settings.breaker_window_s:.0f} s"
        plan.wait(claim, f"{why}; {plan.settings.broken_limit} workers broke within {window}: waiting before the next")
        return
    plan.decisions.append(Release(binding, why, broken=True))
    _give_up(plan, claim, binding, after_failure=True)


def _drain(plan: _Plan, claim: Claim, binding: Binding) -> None:
    wish = plan.rows.wishes[binding.card]
    choice = place.choose_card(claim, plan.rows, plan.taken, plan.settings.memory_ratio)
    if choice.card is None:
        plan.wait(claim, "its card is being drained, but no other card fits: it stays", choice.refused)
        return
    by = f" by {wish.by}" if wish.by else ""
    plan.decisions.append(Release(binding, f"card drained{by}" + (f": {wish.reason}" if wish.reason else "")))
    plan.moved[claim.key] = binding
    _serve(plan, claim)


def _give_up(plan: _Plan, claim: Claim, binding: Binding, *, after_failure: bool) -> None:
    plan.moved[claim.key] = binding
    if after_failure and claim.served is not None and claim.spec.on_failure is OnFailure.NONE:
        plan.wait(claim, 'it lost its card and says on_failure="none": it is not bound again')


def _is_drained(rows: Rows, binding: Binding) -> bool:
    wish = rows.wishes.get(binding.card)
    return wish is not None and wish.drain


def _host_is_up(rows: Rows, binding: Binding) -> bool:
    """A host without a row has not registered yet in this store: nobody has said that it is gone."""
    host = rows.hosts.get(binding.card_host)
    return host is None or host.up


# --- claims -----------------------------------------------------------------------------------------------------------


def _serve(plan: _Plan, claim: Claim) -> None:
    """Bind one claim that has no open binding, or say why it waits."""
    reason = place.unsupported(claim.spec) or _unread(plan.rows, claim, plan.moved)
    before = plan.moved.get(claim.key)
    if reason:
        plan.wait(claim, reason)
        return
    if claim.served is not None and before is None and claim.spec.on_failure is OnFailure.NONE:
        plan.wait(claim, 'it lost its card and says on_failure="none": it is not bound again')
        return
    avoid = before.card if before is not None else None
    choice = place.choose_card(claim, plan.rows, plan.taken, plan.settings.memory_ratio, avoid=avoid)
    if choice.card is None:
        plan.wait(claim, no_card(claim, choice), choice.refused)
        return
    plan.bound += 1
    whole = choice.mode is Mode.PASSTHROUGH  # of a card that is passed through nothing is counted: nobody shares it
    spec = claim.spec
    binding = Binding(
        claim=claim.key,
        generation=Generation(plan.rows.counter + plan.bound),
        domain_name=claim.domain_name,
        domain_host=claim.host,
        card=choice.card.id,
        card_host=choice.card.host,
        memory_mib=0 if whole else spec.memory_mib,
        memory_limit_mib=0 if whole else spec.memory_limit_mib,
        compute_percent=0 if whole else spec.compute_percent,
        compute_limit_percent=0 if whole else spec.compute_limit_percent,
        mode=choice.mode,
        reason=f"on {choice.card.label}" + (f", instead of #{before.generation}" if before else ""),
    )
    plan.taken = plan.taken.plus(binding)
    plan.decisions.append(Bind(binding, binding.reason, failover_of=_failed_card(plan, before)))


def _unread(rows: Rows, claim: Claim, moved: dict[ClaimKey, Binding]) -> str:
    """Why rows that cannot be read keep this claim from being bound; recovery goes on with less than all figures."""
    if claim.key in rows.unread.touched:
        return "a binding row of it cannot be read: it keeps what it has. Next: journalctl -u kvmpoold"
    if rows.unread.counter:
        return "the counter of generations cannot be read. Next: journalctl -u kvmpoold"
    if rows.unread.bindings and not _is_recovery(claim, moved):
        return "a binding row cannot be read, so what is free is not known. Next: journalctl -u kvmpoold"
    return ""


def no_card(claim: Claim, choice: place.Choice) -> str:
    """The line a person sees: what was asked, and what each card fails."""
    asked = f"{claim.spec.memory_mib} MiB" if claim.spec.mode is not Mode.PASSTHROUGH else "a passthrough claim"
    if claim.spec.compute_percent:
        asked += f" and {claim.spec.compute_percent} %"
    if not choice.refused:
        return f"no card can serve {asked}: the pool has no cards"
    cards = "; ".join(f"{label}: {why}" for label, why in choice.refused)
    return f"no card can serve {asked} ({len(choice.refused)} cards; {cards})"


def _failed_card(plan: _Plan, before: Binding | None) -> CardId | None:
    return before.card if before is not None and before.card in plan.failing else None


def _queue_key(claim: Claim, moved: dict[ClaimKey, Binding]) -> tuple[int, int, int, ClaimKey]:
    return (0 if _is_recovery(claim, moved) else 1, -claim.spec.priority, claim.sequence, claim.key)


def _is_recovery(claim: Claim, moved: dict[ClaimKey, Binding]) -> bool:
    """It had a card and lost it."""
    return claim.served is not None or claim.key in moved


def _queue_key_of(plan: _Plan, binding: Binding) -> tuple[int, int, int, ClaimKey, int]:
    """Bindings are judged in the queue's order of their claims: the important ones move before the breaker opens."""
    claim = plan.rows.claims.get(binding.claim)
    if claim is None:
        return (-1, 0, 0, binding.claim, binding.generation)
    return (*_queue_key(claim, {}), binding.generation)


def _paused(plan: _Plan) -> Iterator[Wait]:
    """What would be done, as Waits: a pause changes nothing and hides nothing."""
    told: set[ClaimKey] = set()
    for decision in plan.decisions:
        match decision:
            case Bind(binding=binding) | Release(binding=binding) | Lose(binding=binding):
                if binding.claim in told or binding.claim not in plan.rows.claims:
                    continue
                told.add(binding.claim)
                verb = {Bind: "bind", Release: "release", Lose: "lose"}[type(decision)]
                label = plan.rows.claims[binding.claim].label
                yield Wait(
                    binding.claim, label, f"the pool is paused; it would {verb} {binding.label}: {decision.reason}"
                )
            case _:
                continue
    yield from (wait for wait in plan.waits if wait.claim not in told)


def open_binding(rows: Rows, key: ClaimKey) -> Binding | None:
    """The claim's one open binding, if it has one."""
    found = [binding for binding in rows.bindings.values() if binding.claim == key and binding.phase in OPEN]
    return max(found, key=lambda binding: binding.generation, default=None)

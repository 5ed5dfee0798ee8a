"""Bugs to plant: each replaces one function of the product by a wrong one. The walk has to find every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from kvmpool.core import (
    model,
    place,
    plug,
    reconcile_cards,
    reconcile_cluster,
    reconcile_domains,
    xid,
)
from kvmpool.core.model import Forget, OpenRelay, Phase, RecordPointed, StopWorker, Verdict
from kvmpool.daemon import card_loop, domain_loop, perform


@dataclass(frozen=True, slots=True)
class Bug:
    """`wrong` gets the right function and gives the one to put in its place, at every name in `places`."""

    name: str
    places: tuple[tuple[Any, str], ...]
    wrong: Callable[[Any], Any]

    @contextmanager
    def planted(self) -> Iterator[None]:
        right = [getattr(owner, name) for owner, name in self.places]
        for (owner, name), function in zip(self.places, right, strict=True):
            setattr(owner, name, self.wrong(function))
        try:
            yield
        finally:
            for (owner, name), function in zip(self.places, right, strict=True):
                setattr(owner, name, function)


def _without(*kinds: type) -> Callable[[Any], Any]:
    """A reconcile function that forgets some of its steps."""
    return lambda right: lambda view: tuple(step for step in right(view) if not isinstance(step, kinds))


def _releasing_is_free(right: Any) -> Any:
    return lambda bindings: right(b for b in bindings if b.phase is not Phase.RELEASING)


def _unknown_is_healthy(right: Any) -> Any:
    return lambda spec, card: "" if card.health.verdict is Verdict.UNKNOWN else right(spec, card)


def _forgets_before_it_stops(right: Any) -> Any:
    def wrong(view: Any) -> Any:
        for step in right(view):
            binding = next((b for b in view.bindings if (b.claim, b.generation) == _of(step)), None)
            yield Forget(binding, "too early") if isinstance(step, StopWorker) and binding else step

    return lambda view: tuple(wrong(view))


def _of(step: Any) -> Any:
    return (getattr(step, "claim", None), getattr(step, "generation", None))


def _counter_stands_still(right: Any) -> Any:
    def wrong(self: Any, page: Any, decision: Any, counter: int) -> Any:
        return right(self, page, decision, max(0, counter - 1))

    return wrong


def _silence_is_absence(right: Any) -> Any:
    return lambda view: right(replace(view, domains=() if view.domains is None else view.domains))


def _application_errors_are_fatal(right: Any) -> Any:
    def wrong(code: int, text: str = "", recovery_action: int | None = None) -> Any:
        kind = right(code, text, recovery_action)
        return xid.XidClass.RESET_NEEDED if kind is xid.XidClass.APP else kind

    return wrong


def _suspects_are_moved(right: Any) -> Any:
    return frozenset({*right, Verdict.SUSPECT})


def _endpoint_is_chosen_anew(right: Any) -> Any:
    return lambda view: tuple(replace(s, endpoint="") if isinstance(s, OpenRelay) else s for s in right(view))


def _cordon_is_ignored(right: Any) -> Any:
    return lambda card, rows: ""


def _attempts_have_no_deadline(right: Any) -> Any:
    return lambda view: right(replace(view, attempts=tuple(replace(a, deadline=1e12) for a in view.attempts)))


def _orphans_are_left(right: Any) -> Any:
    return lambda view, workers: iter(())


def _served_claims_are_bound_again(right: Any) -> Any:
    def wrong(plan: Any, binding: Any) -> None:
        right(plan, binding)
        plan.stay.discard(binding.claim)

    return wrong


def _a_released_card_is_free_at_once(right: Any) -> Any:
    return lambda view: right(replace(view, seen=replace(view.seen, hostdevs=())) if view.seen else view)


def _nowhere(right: Any) -> Any:
    return lambda claim, pointed, endpoint: right(claim, None, endpoint)


def _never(right: Any) -> Any:
    return lambda *_: iter(())


_CARDS = ((card_loop, "reconcile_cards"),)
_DOMAINS = ((domain_loop, "reconcile_domains"),)

_PLUGS = ((reconcile_domains, "plug_steps"),)

# Found by the walk over cards that are passed through.
PLUG_BUGS = (
    Bug("a card is forgotten while it is in its domain", _PLUGS, _a_released_card_is_free_at_once),
    Bug("a card is never attached", ((plug, "_attach"),), _never),
    Bug("nothing is plugged", _PLUGS, _never),
    Bug("nobody records which card is in a domain", ((plug, "RecordPointed"),), _nowhere),
)
BUGS = (
    Bug("memory of a releasing binding counts as free", ((place, "taken_by"),), _releasing_is_free),
    Bug("an unknown card counts as healthy", ((place, "_health_refuses"),), _unknown_is_healthy),
    Bug("a row goes before its worker", _CARDS, _forgets_before_it_stops),
    Bug("generations are given out twice", ((perform.ClusterHands, "_bind"),), _counter_stands_still),
    Bug("a silent libvirt means that no domain runs", _DOMAINS, _silence_is_absence),
    Bug("application errors fail a card", ((xid, "classify"),), _application_errors_are_fatal),
    Bug("a suspicion moves bindings", ((reconcile_cluster, "OUT_OF_SERVICE"),), _suspects_are_moved),
    Bug("a relay comes back at another endpoint", _DOMAINS, _endpoint_is_chosen_anew),
    Bug("a cordon is ignored", ((place, "_wish_refuses"),), _cordon_is_ignored),
    Bug("a relay is never pointed", _DOMAINS, _without(model.PointRelay)),
    Bug("an attempt never expires", _DOMAINS, _attempts_have_no_deadline),
    Bug("workers without a row are left alone", ((reconcile_cards, "_orphans"),), _orphans_are_left),
    Bug("a broken worker is not noticed", _CARDS, _without(model.ReportBroken)),
    Bug("a relay is never closed", _DOMAINS, _without(model.CloseRelay)),
    Bug("nobody records where a relay points", _DOMAINS, _without(RecordPointed)),
    Bug("a freed binding keeps its row", _CARDS, _without(Forget)),
    Bug("a lost domain keeps its claims", _DOMAINS, _without(model.Withdraw)),
    Bug("a served claim is bound once more", ((reconcile_cluster, "_judge"),), _served_claims_are_bound_again),
)

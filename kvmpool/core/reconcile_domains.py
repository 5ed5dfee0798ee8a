"""Decides what the host of the domains does: its claims, its domains and relays, in; steps out. Run on every host.

    attempt open                 the domain counts as starting, until the deadline
    domain seen running          the attempt is marked started
    domain absent                claims and attempt are withdrawn: once it was started, or once the deadline has passed
    claim rows                   their domain has a relay, at the endpoint it always had
    binding READY                the relay points at its worker; then the claim row says so
    no binding READY             the relay points nowhere: its old sessions end now, not when a hung card lets go
    passthrough claim            its card is plugged into the running domain and out of it (core/plug.py)
    domain seen running          its relay ends with its QEMU from then on where no kvmpoold is left to close it
    relay without claim rows     closed, and what it left is removed with the withdrawn claims

Absence is concluded only from a list of domains: none (`domains` None) concludes nothing, a list asked for before the
attempt's row was what it is now says nothing of that attempt, nor one asked for before its deadline that it missed it.
A domain of which a row cannot be read is left as it is.
A run (an attempt with a holder) is no domain: it goes when its process has ended and no session of it is left, for a
child of the process may compute on. No list of domains is asked for that.
A running domain whose metadata holds claims but which has no rows (the claim was added while it ran, or the store was
lost) gets nothing: its QEMU was started without endpoint and token, so a binding would hold memory that nobody reaches.
It is served from its next start.
This module does not know about libvirt, hooks or processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvmpool.core.model import (
    Attempt,
    Binding,
    BootId,
    Claim,
    ClaimKey,
    CloseRelay,
    DomainSeen,
    DomainStep,
    DomainUuid,
    FollowDomain,
    Generation,
    MarkStarted,
    Mode,
    OpenRelay,
    Phase,
    PointRelay,
    PowerOn,
    RecordPointed,
    RelaySeen,
    UnpointRelay,
    Unread,
    Withdraw,
)
from kvmpool.core.place import modes
from kvmpool.core.plug import UNPLUG_LIMIT, PlugView, plug_steps


@dataclass(frozen=True, slots=True)
class DomainsView:
    """One look of a host at its domains' share of the pool. Rows: those whose `host` (`domain_host`) is this one."""

    boot_id: BootId
    claims: tuple[Claim, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    bindings: tuple[Binding, ...] = ()
    domains: tuple[DomainSeen, ...] | None = None  # None: the hypervisor does not answer
    domains_at: float = 0.0  # boottime when the list of domains was asked for
    relays: tuple[RelaySeen, ...] | None = ()  # None: they cannot be listed; then none is opened, pointed or closed
    unread: Unread = field(default_factory=Unread)
    living: frozenset[DomainUuid] = frozenset()  # runs whose process lives
    rows_since: Mapping[DomainUuid, float] = field(default_factory=dict)  # boottime when its attempt was first read so
    plugged_at: Mapping[DomainUuid, float] = field(default_factory=dict)  # boottime when its last plug ended
    attach_failures: Mapping[tuple[ClaimKey, Generation], tuple[int, str]] = field(default_factory=dict)
    unplug_tries: Mapping[ClaimKey, int] = field(default_factory=dict)
    unplug_limit: int = UNPLUG_LIMIT


def reconcile_domains(view: DomainsView) -> tuple[DomainStep, ...]:
    """The host's steps, domain by domain in the order of uuids; every prefix is safe."""
    attempts = {attempt.domain: attempt for attempt in view.attempts}
    relays = {relay.domain: relay for relay in view.relays or ()}
    claims: dict[DomainUuid, list[Claim]] = {}
    for claim in sorted(view.claims, key=lambda claim: claim.key):
        claims.setdefault(claim.key.domain, []).append(claim)
    steps: list[DomainStep] = []
    plugged = {binding.claim.domain for binding in view.bindings if binding.mode is Mode.PASSTHROUGH}
    for domain in sorted((attempts.keys() | claims.keys() | relays.keys() | plugged) - view.unread.domains):
        steps += _domain(view, domain, claims.get(domain, []), attempts.get(domain), relays.get(domain))
        steps += plug_steps(_plug_view(view, domain, claims.get(domain, [])))
    return tuple(steps)


def next_deadline(view: DomainsView) -> float | None:
    """The boottime of the next attempt's deadline: a look after it may withdraw."""
    return min((attempt.deadline for attempt in view.attempts if not attempt.started), default=None)


def _domain(
    view: DomainsView, domain: DomainUuid, claims: list[Claim], attempt: Attempt | None, relay: RelaySeen | None
) -> Iterator[DomainStep]:
    seen = next((seen for seen in view.domains or () if seen.uuid == domain), None)
    if attempt is not None and attempt.holder is not None:
        running = domain in view.living or (relay is not None and relay.sessions > 0)
    else:
        running = seen is not None and seen.running
    if running and attempt is not None and not attempt.started:
        yield MarkStarted(attempt)
    reason = "" if running else _withdrawn(view, domain, bool(claims), attempt)
    if reason and attempt is not None and attempt.restart and seen is not None and attempt.boot_id == view.boot_id:
        yield PowerOn(domain, attempt.domain_name, "it was powered off to get rid of a card")
        return
    if reason:
        name = attempt.domain_name if attempt is not None else claims[0].domain_name
        yield Withdraw(domain, name, tuple(claim.key for claim in claims), reason)
        if view.relays is not None:
            yield CloseRelay(domain, reason)
        return
    if view.relays is None:
        return
    served = [claim for claim in claims if Mode.VGPU in modes(claim.spec)]
    if served:
        yield from _relay(view, domain, served, relay, attempt.shared_mib if attempt is not None else 0)
        if relay is not None and seen is not None and running and seen.pid not in (0, relay.follows):
            yield FollowDomain(domain, seen.pid)
    elif relay is not None:
        yield CloseRelay(domain, "no claim of its domain is left")


def _plug_view(view: DomainsView, domain: DomainUuid, claims: list[Claim]) -> PlugView:
    bindings = [b for b in view.bindings if b.claim.domain == domain and b.mode is Mode.PASSTHROUGH]
    since = max(view.plugged_at.get(domain, 0.0), view.rows_since.get(domain, 0.0))
    return PlugView(
        claims=tuple(claims),
        bindings=tuple(bindings),
        seen=next((seen for seen in view.domains or () if seen.uuid == domain), None),
        fresh=view.domains is not None and view.domains_at >= since,
        failures=view.attach_failures,
        tries=view.unplug_tries,
        unplug_limit=view.unplug_limit,
    )


def _withdrawn(view: DomainsView, domain: DomainUuid, has_claims: bool, attempt: Attempt | None) -> str:
    """Why the rows of a domain that is not seen running have to go; "" to keep them."""
    if attempt is not None and attempt.boot_id != view.boot_id:
        return "the host has rebooted"
    if attempt is not None and attempt.holder is not None:
        return "" if view.relays is None else "its process has ended"
    if view.domains is None or view.domains_at < view.rows_since.get(domain, 0.0):
        return ""
    if attempt is None:
        return "its domain is not running" if has_claims else ""
    if attempt.started:
        return "its domain has stopped"
    if view.domains_at > attempt.deadline:
        return "its domain did not start in time"
    return ""


def _relay(
    view: DomainsView, domain: DomainUuid, claims: list[Claim], relay: RelaySeen | None, shared_mib: int
) -> Iterator[DomainStep]:
    if relay is None:
        names = tuple(claim.key.name for claim in claims)
        endpoint = next((claim.endpoint for claim in claims if claim.endpoint), "")
        yield OpenRelay(domain, claims[0].domain_name, names, endpoint, shared_mib)
        return
    for claim in claims:
        yield from _point(view, claim, relay)
    for name in sorted(relay.points.keys() - {claim.key.name for claim in claims}):
        yield UnpointRelay(domain, name, "its claim is withdrawn")


def _point(view: DomainsView, claim: Claim, relay: RelaySeen) -> Iterator[DomainStep]:
    of_claim = [binding for binding in view.bindings if binding.claim == claim.key]
    mine = [binding for binding in of_claim if binding.mode is Mode.VGPU]
    ready = _newest(binding for binding in mine if binding.phase is Phase.READY)
    points = relay.points.get(claim.key.name)
    if ready is not None:
        if points != ready.generation:
            yield PointRelay(claim.key.domain, claim.key.name, ready.generation, ready.worker, ready.memory_mib)
        points = ready.generation
    elif points is not None:
        yield UnpointRelay(claim.key.domain, claim.key.name, _why_unserved(mine))
        points = None
    if claim.pointed is not None and any(b.generation == claim.pointed for b in of_claim if b not in mine):
        points = claim.pointed  # a card's that is passed through: core/plug.py says when that ends
    if (claim.pointed, claim.endpoint) != (points, relay.endpoint):
        yield RecordPointed(claim.key, points, relay.endpoint)


def _why_unserved(bindings: list[Binding]) -> str:
    last = _newest(bindings)
    if last is None:
        return "the claim has no binding"
    return f"{last.label} is {last.phase.value}" + (f": {last.reason}" if last.reason else "")


def _newest(bindings: Iterable[Binding]) -> Binding | None:
    return max(bindings, key=lambda binding: binding.generation, default=None)

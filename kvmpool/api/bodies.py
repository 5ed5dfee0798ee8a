"""Turns rows of the store and the loops' last look into the JSON bodies of the API. Pure: values in, bodies out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvmpool.api.served import served_by, waiting
from kvmpool.api.shapes import (
    BindingBody,
    BreakerBody,
    CardBody,
    CardReason,
    ClaimBody,
    EventBody,
    ExplainBody,
    HostBody,
)
from kvmpool.core.model import (
    Binding,
    Card,
    Claim,
    ClaimKey,
    ClaimSpec,
    DomainSeen,
    DomainUuid,
    Event,
    Host,
    HostName,
    Mode,
    Phase,
    Plug,
    Rows,
    Settings,
    Verdict,
    Wait,
    WorkerSeen,
)
from kvmpool.core.place import modes, taken_by, unsupported
from kvmpool.core.reconcile_cluster import explain, open_binding


@dataclass(frozen=True, slots=True)
class Look:
    """Everything an answer is made of: the rows at one revision, what the host's loops saw last, and when it is."""

    rows: Rows
    settings: Settings
    host: HostName
    now: float  # boottime
    wall: float
    domains: tuple[DomainSeen, ...] = ()
    workers: tuple[WorkerSeen, ...] = ()
    faults: tuple[str, ...] = field(default=())


def host_body(look: Look, host: Host) -> HostBody:
    cards = [card for card in look.rows.cards.values() if card.host == host.name]
    return HostBody(
        name=host.name,
        state="up" if host.up else "down",
        version=host.version,
        boot_id=host.boot_id,
        cards=len(cards),
        cards_healthy=sum(card.health.verdict is Verdict.HEALTHY for card in cards),
        bindings=sum(binding.domain_host == host.name for binding in look.rows.bindings.values()),
    )


def card_body(look: Look, card: Card) -> CardBody:
    wish = look.rows.wishes.get(card.id)
    use = taken_by(look.rows.bindings.values()).of(card.id)
    return CardBody(
        id=card.id,
        host=card.host,
        address=card.address,
        label=card.label,
        model=card.model,
        mode=card.mode.value,
        mode_wish=wish.mode.value if wish and wish.mode else "",
        mode_ticket=wish.mode_ticket if wish else 0,
        mode_answered=card.switching.answered,
        mode_fault=card.switching.fault,
        iommu_group=card.pci.iommu_group,
        functions=list(card.pci.functions),
        verdict=card.health.verdict.value,
        reason=card.health.reason,
        since_s=max(0.0, round(look.now - card.health.since, 3)) if card.health.since else 0.0,
        cordoned=bool(wish and wish.cordoned),
        drain=bool(wish and wish.drain),
        cordon_reason=wish.reason if wish and (wish.cordoned or wish.drain) else "",
        driver=card.driver,
        compute_capability=card.compute_capability,
        numa_node=card.numa_node,
        memory_mib=card.memory_mib,
        memory_taken_mib=use.memory_mib,
        compute_taken_percent=use.compute_percent,
        last_xid=card.health.last_xid,
        app_xids=card.health.app_xids,
        bindings=[binding.label for binding in look.rows.bindings.values() if binding.card == card.id],
    )


def binding_body(look: Look, binding: Binding) -> BindingBody:
    claim = look.rows.claims.get(binding.claim)
    card = look.rows.cards.get(binding.card)
    worker = _worker_of(look, binding)
    return BindingBody(
        label=binding.label,
        domain=binding.domain_name,
        uuid=binding.claim.domain,
        claim=binding.claim.name,
        generation=binding.generation,
        phase=binding.phase.value,
        reason=binding.reason,
        mode=binding.mode.value,
        card=card.label if card else binding.card,
        card_id=binding.card,
        card_host=binding.card_host,
        memory_mib=binding.memory_mib,
        memory_limit_mib=binding.memory_limit_mib,
        memory_used_mib=worker.memory_used_mib if worker else 0,
        pinned_mib=worker.pinned_mib if worker else 0,
        pinned_used_mib=worker.pinned_used_mib if worker else 0,
        compute_percent=binding.compute_percent,
        compute_limit_percent=binding.compute_limit_percent,
        sessions=worker.sessions if worker else 0,
        transports=list(worker.transports) if worker else [],
        worker=binding.worker,
        worker_pid=worker.pid if worker else 0,
        endpoint=claim.endpoint if claim else "",
        pointed=bool(claim and claim.pointed == binding.generation),
    )


def _worker_of(look: Look, binding: Binding) -> WorkerSeen | None:
    key = (binding.claim, binding.generation)
    return next((worker for worker in look.workers if (worker.claim, worker.generation) == key), None)


def claim_bodies(look: Look) -> list[ClaimBody]:
    """Live claims, and those in the metadata of domains that are not running, by label."""
    waits = waiting(look.rows, look.settings, look.now)
    bodies = [_live(look, claim, waits.get(key)) for key, claim in look.rows.claims.items()]
    for domain in look.domains:
        if domain.claims_error:
            bodies.append(_invalid(look, domain))
        for spec in domain.claims:
            if ClaimKey(domain.uuid, spec.name) not in look.rows.claims:
                bodies.append(inactive_body(look, domain, spec))
    return sorted(bodies, key=lambda body: (body["label"], body["uuid"]))


def _live(look: Look, claim: Claim, wait: Wait | None) -> ClaimBody:
    binding = open_binding(look.rows, claim.key)
    card = look.rows.cards.get(binding.card) if binding else None
    if binding is not None and _in_use(look, claim, binding):
        state, reason = "served", _second_choice(look, claim, binding)
    elif wait is not None:
        state, reason = "waiting", wait.reason
    elif binding is not None:
        state = "starting"
        reason = binding.reason if binding.phase is not Phase.READY else _unused(claim, binding)
    else:
        state, reason = "starting", "it is not bound yet"
    body = _claim(claim.domain_name, claim.key, claim.spec, claim.host, state, reason)
    body["binding"] = binding.label if binding else ""
    body["serves"] = binding.mode.value if binding else ""
    body["card"] = card.label if card else ""
    body["endpoint"] = claim.endpoint
    return body


def _in_use(look: Look, claim: Claim, binding: Binding) -> bool:
    """Of a card that is passed through the hook only asks that it is ready; a person, that the domain has it."""
    return served_by(look.rows, claim) is not None and claim.pointed == binding.generation


def _unused(claim: Claim, binding: Binding) -> str:
    """Why a binding that is ready does not serve its claim."""
    if binding.mode is not Mode.PASSTHROUGH:
        return "its relay is not pointed at the worker yet"
    if claim.spec.plug is Plug.BOOT and claim.served is not None:
        return 'with plug="boot" the domain gets its card at its next start'
    return "its card is not in the domain yet"


def _second_choice(look: Look, claim: Claim, binding: Binding) -> str:
    """Why a claim of mode "any" is served in another mode than its first; "" where it is not."""
    first = modes(claim.spec)[0]
    if binding.mode is first:
        return ""
    choice = explain(look.rows, look.settings, claim.key)
    free = choice is not None and choice.card is not None and choice.mode is first
    now = f"a card for {first.value} is free now" if free else f"no card fits {first.value}"
    return f"as {binding.mode.value}: {now}; it is asked for again at the next start"


def inactive_body(look: Look, domain: DomainSeen, spec: ClaimSpec) -> ClaimBody:
    """A claim of the metadata that nobody serves: its domain is off, or has been started without it."""
    state, reason = "inactive", unsupported(spec) or ""
    if domain.running and not reason:
        reason = "added to a running domain: it is served from the domain's next start on"
    return _claim(domain.name, ClaimKey(domain.uuid, spec.name), spec, look.host, state, reason)


def _invalid(look: Look, domain: DomainSeen) -> ClaimBody:
    spec = ClaimSpec(name="?", mode=Mode.VGPU)  # nothing of it could be read
    return _claim(domain.name, ClaimKey(domain.uuid, "?"), spec, look.host, "invalid", domain.claims_error)


def _claim(domain: str, key: ClaimKey, spec: ClaimSpec, host: HostName, state: str, reason: str) -> ClaimBody:
    return ClaimBody(
        domain=domain,
        uuid=key.domain,
        name=spec.name,
        label=f"{domain}/{spec.name}",
        state=state,
        host=host,
        mode=spec.mode.value,
        serves="",
        memory_mib=spec.memory_mib,
        memory_limit_mib=spec.memory_limit_mib,
        compute_percent=spec.compute_percent,
        compute_limit_percent=spec.compute_limit_percent,
        priority=spec.priority,
        preemptible=spec.preemptible,
        on_failure=spec.on_failure.value,
        binding="",
        card="",
        endpoint="",
        reason=reason,
    )


def explain_body(look: Look, body: ClaimBody) -> ExplainBody:
    """Every card with its first failing predicate or its score, for a live claim or one that would be made now."""
    key = ClaimKey(DomainUuid(body["uuid"]), body["name"])
    rows = look.rows if key in look.rows.claims else _with_claim(look, key)
    choice = explain(rows, look.settings, key)
    cards: list[CardReason] = []
    if choice is not None:
        cards += [CardReason(card=card, fits=True, reason=f"score {points:.2f}") for card, points in choice.scores]
        cards += [CardReason(card=card, fits=False, reason=why) for card, why in choice.refused]
    reason = body["reason"]
    if not reason and body["state"] == "inactive":
        fits = choice is not None and choice.card is not None
        reason = f"the domain is not running; {'a card' if fits else 'no card'} would fit now"
    return ExplainBody(
        label=body["label"],
        state=body["state"],
        serves=body["serves"],
        binding=body["binding"],
        reason=reason,
        cards=cards,
    )


def _with_claim(look: Look, key: ClaimKey) -> Rows:
    """The rows as they were if the domain started now."""
    for domain in look.domains:
        for spec in domain.claims:
            if ClaimKey(domain.uuid, spec.name) == key:
                claim = Claim(key, domain.name, look.host, spec, attempt=0, sequence=look.rows.sequence + 1)
                return replace(look.rows, claims={**look.rows.claims, key: claim})
    return look.rows


def breaker_body(look: Look) -> BreakerBody:
    breaker = look.rows.breaker
    recent = []
    for at, card_id in breaker.failovers:
        card = look.rows.cards.get(card_id)
        recent.append(f"{look.now - at:.0f} s ago: failover from {card.label if card else card_id}")
    recent += [f"{look.now - at:.0f} s ago: {label} bound again after its worker broke" for at, label in breaker.broken]
    return BreakerBody(open=bool(breaker.open_reason), reason=breaker.open_reason, recent=recent)


def event_body(event: Event) -> EventBody:
    return EventBody(at=event.wall, host=event.host, subject=event.subject, kind=event.kind, reason=event.reason)


def metrics_text(look: Look, events: int) -> str:
    """Prometheus' text format, one family a call of _family."""
    rows = look.rows
    cards = list(rows.cards.values())
    taken = taken_by(rows.bindings.values())
    bodies = claim_bodies(look)
    states = ("served", "starting", "waiting", "inactive", "invalid")
    families = [
        _family("host_up", "1 while the host is up", [({"host": h.name}, int(h.up)) for h in rows.hosts.values()]),
        _family(
            "card_verdict",
            "1 for the card's verdict",
            [({"card": c.label, "verdict": c.health.verdict.value}, 1) for c in cards],
        ),
        _family("card_memory_mib", "Memory of the card", [({"card": c.label}, c.memory_mib) for c in cards]),
        _family(
            "card_memory_taken_mib",
            "Memory held by bindings in any phase",
            [({"card": c.label}, taken.of(c.id).memory_mib) for c in cards],
        ),
        _family("card_app_xids", "XIDs that a program caused", [({"card": c.label}, c.health.app_xids) for c in cards]),
        _family("bindings", "Bindings by phase", [({"phase": p.value}, _count(rows, p)) for p in Phase]),
        _family("claims", "Claims by state", [({"state": s}, sum(b["state"] == s for b in bodies)) for s in states]),
        _family("breaker_open", "1 while the failover breaker is open", [({}, int(bool(rows.breaker.open_reason)))]),
        _family("store_revision", "The store's revision", [({}, rows.revision)]),
        _family("events_kept", "Events in the log", [({}, events)]),
    ]
    return "".join(families)


def _count(rows: Rows, phase: Phase) -> int:
    return sum(binding.phase is phase for binding in rows.bindings.values())


def _family(name: str, told: str, samples: Sequence[tuple[dict[str, str], int]]) -> str:
    lines = [f"# HELP kvmpool_{name} {told}", f"# TYPE kvmpool_{name} gauge"]
    for labels, value in samples:
        inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        lines.append(f"kvmpool_{name}{{{inner}}} {value}" if inner else f"kvmpool_{name} {value}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

"""Short builders of rows for the core's tests: one host h0, cards c0, c1, ..., domains vm0, vm1, ..."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvmpool.core import breaker
from kvmpool.core.model import (
    Bind,
    Binding,
    BootId,
    Breaker,
    Card,
    CardId,
    CardWish,
    Claim,
    ClaimKey,
    ClaimSpec,
    Decision,
    DomainUuid,
    Generation,
    Health,
    Host,
    HostName,
    Lose,
    Mode,
    Phase,
    Release,
    Rows,
    Settings,
    TripBreaker,
    Verdict,
)

H0 = HostName("h0")
BOOT = BootId("boot-1")
HOST = Host(H0, BOOT, "0.1.0")


def health(verdict: Verdict = Verdict.HEALTHY, reason: str = "", **more: bool) -> Health:
    return replace(Health(verdict, reason, boot_id=BOOT), **more)  # type: ignore[arg-type]


def card(n: int = 0, memory_mib: int = 8192, state: Health | None = None, host: HostName = H0) -> Card:
    return Card(CardId(f"GPU-{n}"), host, f"0000:{0x41 + n:02x}:00.0", "Soft GPU", memory_mib, health=state or health())


def failed(n: int = 0, *, hard: bool = False, fatal: bool = False) -> Card:
    return card(n, state=health(Verdict.FAILED, "Xid 79", hard=hard, fatal=fatal))


def spec(memory_mib: int = 4096, **more: object) -> ClaimSpec:
    base = ClaimSpec("gpu0", Mode.VGPU, memory_mib=memory_mib, memory_limit_mib=memory_mib)
    return replace(base, **more)  # type: ignore[arg-type]


def claim(n: int = 0, asked: ClaimSpec | None = None, **more: object) -> Claim:
    key = ClaimKey(DomainUuid(f"uuid-{n}"), "gpu0")
    base = Claim(key, f"vm{n}", H0, asked or spec(), attempt=n + 1, sequence=n + 1)
    return replace(base, **more)  # type: ignore[arg-type]


def binding(of: Claim, on: Card, generation: int = 1, phase: Phase = Phase.READY, **more: object) -> Binding:
    asked = of.spec
    base = Binding(
        of.key,
        Generation(generation),
        of.domain_name,
        of.host,
        on.id,
        on.host,
        asked.memory_mib,
        asked.memory_limit_mib,
        asked.compute_percent,
        asked.compute_limit_percent,
        phase=phase,
        worker="unix:/w" if phase is Phase.READY else "",
    )
    return replace(base, **more)  # type: ignore[arg-type]


def rows(
    cards: Iterable[Card] = (),
    claims: Iterable[Claim] = (),
    bindings: Iterable[Binding] = (),
    *,
    wishes: Iterable[CardWish] = (),
    hosts: Iterable[Host] = (HOST,),
    memory: Breaker | None = None,
) -> Rows:
    held = {(each.claim, each.generation): each for each in bindings}
    return Rows(
        revision=1,
        hosts={each.name: each for each in hosts},
        cards={each.id: each for each in cards},
        wishes={each.card: each for each in wishes},
        claims={each.key: each for each in claims},
        bindings=held,
        breaker=memory or Breaker(),
        counter=max((each.generation for each in held.values()), default=Generation(0)),
    )


def applied(before: Rows, decisions: Iterable[Decision], settings: Settings, now: float) -> Rows:
    """The rows after the leader has committed its decisions."""
    held, memory, counter = dict(before.bindings), before.breaker, before.counter
    for decision in decisions:
        match decision:
            case Bind(binding=new):
                assert (new.claim, new.generation) not in held
                assert new.generation > before.counter
                held[(new.claim, new.generation)] = new
                counter = max(counter, new.generation)
            case Release(binding=old):
                held[(old.claim, old.generation)] = replace(old, phase=Phase.RELEASING, reason=decision.reason)
                label = before.claims[old.claim].label if old.claim in before.claims else ""
                memory = breaker.record(memory, decision.failover_of, label if decision.broken else "", settings, now)
            case Lose(binding=old):
                held[(old.claim, old.generation)] = replace(old, phase=Phase.LOST)
            case TripBreaker(reason=reason):
                memory = breaker.opened(memory, reason, now)
    return replace(before, bindings=held, breaker=memory, counter=counter)

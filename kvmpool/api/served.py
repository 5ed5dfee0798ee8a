"""Whether a domain's claims are served, read from the store's rows alone, and why not where they are not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from kvmpool.core.model import Binding, Claim, ClaimKey, DomainUuid, Mode, Phase, Rows, Settings, Wait
from kvmpool.core.place import modes
from kvmpool.core.reconcile_cluster import open_binding, reconcile_cluster
from kvmpool.ports import Clock, Store
from kvmpool.store import codec

_LOOK_S = 0.25  # the longest time between two looks; a change of the store is seen at once


@dataclass(frozen=True, slots=True)
class Missing:
    """A claim that is not served. `hopeless`: as the pool is now, no card fits and none is being given up."""

    label: str
    reason: str
    hopeless: bool = False


async def read_rows(store: Store) -> Rows:
    """The pool's rows at one revision; rows that cannot be read are left out."""
    items, rev = await store.list("/")
    return codec.rows_from(items, rev)[0]


async def each_change(store: Store, clock: Clock, until: float) -> AsyncGenerator[Rows, None]:
    """The rows now, after every change, and a last time at `until`; without end: the caller leaves."""
    rows = await read_rows(store)
    changes = aiter(store.watch("/", rows.revision))
    pending = asyncio.ensure_future(anext(changes, None))
    try:
        while True:
            yield rows
            left = max(0.0, min(_LOOK_S, until - clock.now()))
            done, _ = await asyncio.wait({pending}, timeout=left)
            if done:
                if pending.result() is None:
                    return
                pending = asyncio.ensure_future(anext(changes, None))
            rows = await read_rows(store)
    finally:
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)


def served_by(rows: Rows, claim: Claim) -> Binding | None:
    """The binding that serves the claim: ready, and the domain's relay points at it.

    A card that is passed through is attached only once the domain runs: that it is ready must do. Where a vGPU may take
    its place later, the guest must find its relay's files when it boots.
    """
    binding = open_binding(rows, claim.key)
    if binding is None or binding.phase is not Phase.READY:
        return None
    if binding.mode is Mode.PASSTHROUGH:
        return binding if claim.endpoint or Mode.VGPU not in modes(claim.spec) else None
    return binding if claim.pointed == binding.generation else None


def missing(rows: Rows, settings: Settings, domain: DomainUuid, now: float) -> list[Missing]:
    """The required claims of `domain` that are not served, sorted by name, each with its reason."""
    claims = [claim for key, claim in sorted(rows.claims.items()) if key.domain == domain and claim.spec.required]
    unserved = [claim for claim in claims if served_by(rows, claim) is None]
    if not unserved:
        return []
    waits = waiting(rows, settings, now)
    return [_missing(rows, claim, waits.get(claim.key)) for claim in unserved]


def waiting(rows: Rows, settings: Settings, now: float) -> dict[ClaimKey, Wait]:
    """The claims that the leader would let wait now, with its reasons."""
    decisions = reconcile_cluster(rows, settings, now)
    return {each.claim: each for each in decisions if isinstance(each, Wait)}


def _missing(rows: Rows, claim: Claim, wait: Wait | None) -> Missing:
    binding = open_binding(rows, claim.key)
    if wait is not None:
        freeing = any(each.phase in (Phase.RELEASING, Phase.LOST) for each in rows.bindings.values())
        return Missing(claim.label, wait.reason, hopeless=bool(wait.cards) and not freeing)
    if binding is None:
        return Missing(claim.label, "it is not bound yet")
    card = rows.cards.get(binding.card)
    where = card.label if card else binding.card
    match binding.phase:
        case Phase.READY:
            return Missing(
                claim.label, f"{binding.label} on {where} is ready, but the domain's relay is not pointed at it"
            )
        case _:
            why = f" ({binding.reason})" if binding.reason else ""
            return Missing(claim.label, f"{binding.label} on {where} is still {binding.phase.value}{why}")

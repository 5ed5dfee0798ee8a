"""The invariants of the pool (design 01 §1.6) as checks over rows, world and each commit. A broken one is a `Broken`.

`Auditor` wraps the store: every commit is judged by what the rows were and what they became, against the truth of the
world at that moment. `check_world` judges what runs. `check_rest` judges a pool that was left in peace.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmpool.core.health import OUT_OF_SERVICE
from kvmpool.core.model import Binding, ClaimKey, Generation, Mode, Phase, Rows, Verdict
from kvmpool.core.phase import MOVES, OPEN
from kvmpool.core.place import binding_spec_differs
from kvmpool.core.plug import address_of, alias_of
from kvmpool.ports import Guard, Put, Store
from kvmpool.sim.gate import Gate
from kvmpool.sim.world import Condition, SimHost, World
from kvmpool.store import codec


class Broken(AssertionError):
    """A law of the pool does not hold."""


def law(holds: bool, text: str) -> None:
    if not holds:
        raise Broken(text)


class Auditor(Gate):
    """A store that judges every commit. `rows` are those after the last one."""

    def __init__(self, inner: Store, world: World) -> None:
        super().__init__(inner)
        self._world = world
        self.rows = Rows(0)
        self._given: dict[Generation, ClaimKey] = {}  # every generation ever seen

    async def commit(
        self,
        op_id: str,
        *,
        guards: Sequence[Guard] = (),
        puts: Sequence[Put] = (),
        deletes: Sequence[str] = (),
    ) -> int:
        revision = await self._inner.commit(op_id, guards=guards, puts=puts, deletes=deletes)
        old, new = self.rows, await self._read()
        self.rows = new
        self._judge(old, new)
        return revision

    async def _read(self) -> Rows:
        items, revision = await self._inner.list("/")
        rows, faults = codec.rows_from(items, revision)
        law(not faults, f"a row was written that cannot be read: {faults}")
        return rows

    def _judge(self, old: Rows, new: Rows) -> None:
        self._numbers(old, new)
        _capacity(new)
        for key in new.bindings.keys() - old.bindings.keys():
            self._born(old, new, new.bindings[key])
        for key in old.bindings.keys() & new.bindings.keys():
            _moved(old, old.bindings[key], new.bindings[key])
        for key in old.bindings.keys() - new.bindings.keys():
            _died(self._world, old.bindings[key])
        for claim in old.claims.keys() - new.claims.keys():
            domain = self._world.hosts[old.claims[claim].host].domains.get(claim.domain)
            law(domain is None or not domain.running, f"{old.claims[claim].label}: withdrawn while its domain runs")
        for claim in old.claims.keys() & new.claims.keys():
            before, after = old.claims[claim], new.claims[claim]
            same = before.attempt != after.attempt or before.endpoint in ("", after.endpoint)
            law(same, f"{after.label}: its endpoint changed from {before.endpoint} to {after.endpoint}")

    def _numbers(self, old: Rows, new: Rows) -> None:
        law(new.counter >= old.counter, f"the counter fell from {old.counter} to {new.counter}")
        for claim, generation in new.bindings.keys() - old.bindings.keys():
            law(generation not in self._given, f"generation {generation} was given out before")
            older = [g for g, owner in self._given.items() if owner == claim and g > generation]
            law(not older, f"generation {generation} of {claim} comes after {older}")
            law(generation <= new.counter, f"generation {generation} is past the counter {new.counter}")
            self._given[generation] = claim

    def _born(self, old: Rows, new: Rows, binding: Binding) -> None:
        law(binding.phase is Phase.PREPARING, f"{binding.label}: born {binding.phase.value}")
        card, claim = old.cards[binding.card], new.claims.get(binding.claim)
        assert claim is not None, f"{binding.label} serves a claim that is not there"
        fit = card.health.verdict is Verdict.HEALTHY
        fit = fit or (card.health.verdict is Verdict.PROBATION and claim.spec.preemptible)
        law(fit, f"{binding.label}: bound to {card.label}, which is {card.health.verdict.value}")
        wish = old.wishes.get(binding.card)
        law(wish is None or not (wish.cordoned or wish.drain), f"{binding.label}: bound to {card.label}, cordoned")
        others = [b for b in new.bindings.values() if b.claim == binding.claim and b.phase in OPEN]
        law(len(others) == 1, f"{binding.label}: its claim has {len(others)} open bindings")


def _capacity(rows: Rows) -> None:
    for card in rows.cards.values():
        held = sum(b.memory_mib for b in rows.bindings.values() if b.card == card.id)
        law(held <= card.memory_mib, f"{card.label}: its bindings hold {held} of {card.memory_mib} MiB")


def _moved(old: Rows, before: Binding, after: Binding) -> None:
    if before.phase is after.phase:
        return
    law((before.phase, after.phase) in MOVES, f"{after.label}: moved from {before.phase.value} to {after.phase.value}")
    if after.phase is Phase.RELEASING and before.phase is not Phase.BROKEN:
        law(_may_release(old, before), f"{after.label}: released for no reason that holds ({after.reason})")


def _may_release(rows: Rows, binding: Binding) -> bool:
    claim, card, wish = rows.claims.get(binding.claim), rows.cards[binding.card], rows.wishes.get(binding.card)
    return (
        claim is None
        or card.health.verdict in OUT_OF_SERVICE
        or (wish is not None and wish.drain)
        or binding_spec_differs(binding, claim.spec)
    )


def _died(world: World, binding: Binding) -> None:
    law(binding.phase in (Phase.RELEASING, Phase.LOST), f"{binding.label}: forgotten while {binding.phase.value}")
    host = world.hosts[binding.card_host]
    alive = (binding.claim, binding.generation) in host.workers
    law(not alive, f"{binding.label}: forgotten while its worker holds its memory")
    domain = host.domains.get(binding.claim.domain)
    held = domain is not None and address_of(binding) in domain.devices.values()
    law(not held, f"{binding.label}: forgotten while its card is in its domain")


def check_world(world: World, rows: Rows) -> None:
    """What runs is what the rows allow."""
    for host in world.hosts.values():
        for (claim, generation), worker in host.workers.items():
            known = worker.stray or (claim, generation) in rows.bindings
            law(known, f"worker {worker.binding.label} runs without a row")
        for card in host.cards.values():
            held = sum(w.binding.memory_mib for w in host.workers.values() if w.binding.card == card.id and not w.stray)
            law(held <= card.memory_mib, f"{card.address}: workers hold {held} of {card.memory_mib} MiB")
        _one_generation(host)
        inside = [address for domain in host.domains.values() for address in domain.devices.values()]
        law(len(inside) == len(set(inside)), f"{host.name}: a card is in two domains: {inside}")
        for address in inside:
            card = next(card for card in host.cards.values() if card.address == address)
            law(card.mode is Mode.PASSTHROUGH, f"{address}: in a domain, in mode {card.mode.value}")


def _one_generation(host: SimHost) -> None:
    reached: dict[ClaimKey, int] = {}
    for (claim, _), worker in host.workers.items():
        reached[claim] = reached.get(claim, 0) + worker.relay
    for claim, count in reached.items():
        law(count <= 1, f"{claim}: a guest reaches {count} generations")


def check_rest(world: World, rows: Rows) -> None:
    """A pool in peace: every running domain is served or has a reason, and nothing is left of the others."""
    for host in world.hosts.values():
        running = {uuid for uuid, domain in host.domains.items() if domain.running}
        law({key.domain for key in rows.claims} <= running, "claims of domains that do not run are left")
        law(set(rows.attempts) <= running, "attempts of domains that do not run are left")
        law(set(host.relays) <= running, "relays of domains that do not run are left")
        for uuid, domain in host.domains.items():
            kept = {alias_of(key.name) for key in rows.claims if key.domain == uuid}
            law(set(domain.devices) <= kept, f"{domain.name}: a card is left in it: {domain.devices}")
        for (claim, _), worker in host.workers.items():
            law(claim.domain in running and not worker.stray, f"worker {worker.binding.label} is left")
    for binding in rows.bindings.values():
        law(binding.phase is Phase.READY, f"{binding.label} is left {binding.phase.value} ({binding.reason})")
    for key, row in rows.claims.items():
        law(_served(world, rows, key), f"{row.label} is not served in peace")


def _served(world: World, rows: Rows, key: ClaimKey) -> bool:
    """Served in truth: a relay that points at a living worker of the claim's ready binding on a card that is fine."""
    ready = [b for b in rows.bindings.values() if b.claim == key and b.phase is Phase.READY]
    if len(ready) != 1 or rows.claims[key].pointed != ready[0].generation:
        return False
    host = world.hosts[rows.claims[key].host]
    if ready[0].mode is Mode.PASSTHROUGH:
        inside = host.domains[key.domain].devices.get(alias_of(key.name))
        return inside == host.cards[ready[0].card].address and host.cards[ready[0].card].condition is Condition.FINE
    relay, worker = host.relays.get(key.domain), host.workers.get((key, ready[0].generation))
    points = relay is not None and relay.points.get(key.name) == (ready[0].generation, ready[0].worker)
    fine = host.cards[ready[0].card].condition is Condition.FINE
    return points and fine and worker is not None and worker.relay

"""One host of the sim with the real loops over it and a store in memory: what the loops' tests stand on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvmpool.core.health import Limits
from kvmpool.core.model import (
    Attempt,
    Binding,
    CardId,
    CardWish,
    Claim,
    ClaimKey,
    ClaimSpec,
    DomainUuid,
    GoneSignal,
    Mode,
    Phase,
    Rows,
    Settings,
    XidSignal,
)
from kvmpool.daemon.card_loop import CardLoop
from kvmpool.daemon.cluster_loop import ClusterLoop
from kvmpool.daemon.domain_loop import DomainLoop
from kvmpool.daemon.ledger import Change, Ledger
from kvmpool.daemon.perform import no_checkpoint
from kvmpool.daemon.switches import AS_FOUND
from kvmpool.daemon.turns import Loop
from kvmpool.ports import Store
from kvmpool.sim.hypervisor import SimHypervisor
from kvmpool.sim.modes import SimModes
from kvmpool.sim.relays import SimRelays
from kvmpool.sim.world import (
    SimCards,
    SimClock,
    SimDomain,
    SimHealthSource,
    SimHost,
    SimWorkers,
    World,
)
from kvmpool.store import codec
from kvmpool.store.memory import MemoryStore

VM0 = DomainUuid("00000000-0000-4000-8000-000000000001")
GPU0 = ClaimKey(VM0, "gpu0")
LIMITS = Limits()
VGPU = ClaimSpec("gpu0", Mode.VGPU, memory_mib=4096, memory_limit_mib=4096)


class Killed(BaseException):
    """kill -9 of the daemon at a point."""


class Pool:
    """`settle` turns the loops until none has anything to do; `restart` is a new daemon over what is left running."""

    def __init__(
        self, cards: int = 2, store: Callable[[SimClock], Store] = MemoryStore, limits: Limits = LIMITS
    ) -> None:
        self.world = World()
        self.host: SimHost = self.world.add_host("h0", cards)
        self.clock = SimClock(self.world, self.host)
        self.store = store(self.clock)
        self.limits = limits
        self.settings = Settings()
        self.kill_at = ""
        self.initial_modes = AS_FOUND
        self.ledger = Ledger(self.store, self.clock, self.host.name)
        self.card_ids = list(self.host.cards)
        self.start()

    def start(self) -> None:
        self.host.daemon += 1
        where = (self.store, self.clock, self.host.name)
        at = self.checkpoint
        workers, relays = SimWorkers(self.world, self.host), SimRelays(self.world, self.host)
        cards, source = SimCards(self.world, self.host), SimHealthSource(self.host)
        self.cluster = ClusterLoop(*where, self.settings, checkpoint=at)
        modes = SimModes(self.world, self.host)
        self.card = CardLoop(
            *where,
            cards,
            [source],
            workers,
            limits=self.limits,
            checkpoint=at,
            modes=modes,
            initial_modes=self.initial_modes,
        )
        self.domain = DomainLoop(*where, SimHypervisor(self.host), relays, checkpoint=at)

    @property
    def loops(self) -> tuple[Loop, ...]:
        return (self.card, self.cluster, self.domain)

    def checkpoint(self, point: str) -> None:
        no_checkpoint(point)
        if point == self.kill_at:
            self.kill_at = ""
            raise Killed(point)

    async def settle(self, turns: int = 60) -> None:
        """Until a round in which no loop did anything; that there is one is checked."""
        for _ in range(turns):
            if not any([await loop.turn() for loop in self.loops]):
                return
        raise AssertionError(f"not quiet after {turns} rounds")

    async def run_for(self, seconds: float, step_s: float = 0.5) -> None:
        for _ in range(int(seconds / step_s)):
            self.world.advance(step_s)
            await self.settle()

    async def restart(self) -> None:
        for loop in self.loops:
            await loop.close()
        self.start()

    async def rows(self) -> Rows:
        return (await self.ledger.read()).rows

    # --- what others do -----------------------------------------------------------------------------------------------

    async def prepare(self, spec: ClaimSpec = VGPU, domain: DomainUuid = VM0, name: str = "vm0") -> None:
        """What the hook's prepare does: claim, attempt and counter in one commit."""
        page = await self.ledger.read()
        count = page.rows.sequence + 1
        claim = Claim(ClaimKey(domain, spec.name), name, self.host.name, spec, count, count)
        attempt = Attempt(domain, name, self.host.name, count, self.clock.now() + 60, self.clock.boot_id())
        await self.ledger.commit(page, Change(puts=[claim, attempt, codec.Counter(page.rows.counter, count)]))

    async def start_domain(self, spec: ClaimSpec = VGPU, domain: DomainUuid = VM0, name: str = "vm0") -> None:
        await self.prepare(spec, domain, name)
        await self.settle()
        self.host.domains[domain] = SimDomain(domain, name, (spec,), True, self.world.next_qemu())
        self.domain.refresh()
        await self.settle()

    def stop_domain(self, domain: DomainUuid = VM0) -> None:
        self.host.domains[domain].running = False
        self.domain.refresh()

    async def wish(self, card: CardId, **wishes: object) -> None:
        page = await self.ledger.read()
        wish = page.rows.wishes.get(card, CardWish(card))
        await self.ledger.commit(page, Change(puts=[replace(wish, **wishes)]))  # type: ignore[arg-type]

    def xid(self, card: CardId, code: int) -> None:
        self.card.offer(XidSignal(card, code, self.clock.now()))

    def gone(self, card: CardId) -> None:
        self.card.offer(GoneSignal(card, self.clock.now()))

    async def served_by(self, key: ClaimKey = GPU0) -> Binding:
        """The claim's READY binding, with its worker running, its relay pointed and its row saying so."""
        rows = await self.rows()
        ready = [b for b in rows.bindings.values() if b.claim == key and b.phase is Phase.READY]
        assert len(ready) == 1, rows.bindings
        assert (key, ready[0].generation) in self.host.workers
        relay = self.host.relays[key.domain]
        assert relay.points[key.name] == (ready[0].generation, ready[0].worker)
        assert rows.claims[key].pointed == ready[0].generation
        assert rows.claims[key].endpoint == relay.endpoint
        return ready[0]

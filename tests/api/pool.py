"""A simulated host with the real loops running over it, and the API's two halves on top."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvmpool.api.card_modes import CardModes
from kvmpool.api.hooks import HookCall, Hooks
from kvmpool.api.resources import Resources
from kvmpool.core.model import ClaimKey, ClaimSpec, DomainSeen, DomainUuid, HostName, Rows, Settings, WorkerSeen
from kvmpool.daemon.card_loop import CardLoop
from kvmpool.daemon.cluster_loop import ClusterLoop
from kvmpool.daemon.domain_loop import DomainLoop
from kvmpool.daemon.ledger import Ledger
from kvmpool.daemon.seen import SeenDomains, SeenWorkers
from kvmpool.daemon.wake import follow
from kvmpool.errors import NotFound
from kvmpool.sim.hypervisor import SimHypervisor
from kvmpool.sim.modes import SimModes
from kvmpool.sim.processes import SimProcesses
from kvmpool.sim.relays import SimRelays
from kvmpool.sim.world import (
    SimCards,
    SimClock,
    SimDomain,
    SimHealthSource,
    SimWorkers,
    World,
)
from kvmpool.store.memory import MemoryStore
from kvmpool.virt.domain_xml import claims_of

UUID = DomainUuid("9f1c2d3e-0000-4000-8000-000000000001")
KEY = ClaimKey(UUID, "gpu0")
SETTINGS = Settings(prepare_deadline_s=4.5)
SPEED = 10.0  # simulated seconds in a real one


def xml(*claims: str, name: str = "vm0", uuid: str = UUID) -> str:
    inner = "".join(f"<k:claim {claim}/>" for claim in claims)
    ours = f'<k:claims xmlns:k="urn:kvmpool:domain:1">{inner}</k:claims>'
    return f"<domain type='kvm'><name>{name}</name><uuid>{uuid}</uuid><metadata>{ours}</metadata></domain>"


ONE = xml('name="gpu0" mode="vgpu" memory="4096"')


class Pool:
    """One simulated host, its three loops running, and the hook's side of it."""

    def __init__(self, cards: int = 2, settings: Settings = SETTINGS, processes: SimProcesses | None = None) -> None:
        self.world = World()
        self.host = self.world.add_host("h0", cards)
        self.clock = SimClock(self.world, self.host)
        self.store = MemoryStore(self.clock)
        self.ledger = Ledger(self.store, self.clock, HostName("h0"))
        name = self.host.name
        self.cluster = ClusterLoop(self.store, self.clock, name, settings)
        cards_port = SimCards(self.world, self.host)
        self.sim_workers = SimWorkers(self.world, self.host)
        self.seen_workers = SeenWorkers(self.sim_workers)
        source = SimHealthSource(self.host)
        modes = SimModes(self.world, self.host)
        self.card = CardLoop(self.store, self.clock, name, cards_port, [source], self.seen_workers, modes=modes)
        relays = SimRelays(self.world, self.host)
        self.hypervisor = SimHypervisor(self.host)
        self.seen_domains = SeenDomains(self.hypervisor)
        self.domain = DomainLoop(self.store, self.clock, name, self.seen_domains, relays, processes=processes)
        self.hooks = Hooks(self.store, self.ledger, self.clock, settings, self._wake)
        self.resources = Resources(
            self.store, self.ledger, "memory", self.clock, settings, self, _Metadata(self), self._wake
        )
        self.modes = CardModes(self.resources, self.ledger, modes, self.seen_workers, self._wake)
        self.loops = [self.cluster, self.card, self.domain]

    async def __aenter__(self) -> Pool:
        self._tasks = [asyncio.create_task(loop.run()) for loop in self.loops]
        bells = [loop.wake.ring for loop in self.loops]
        self._tasks += [asyncio.create_task(follow(self.store, self.clock, bells)), asyncio.create_task(self._time())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _time(self) -> None:
        while True:
            await asyncio.sleep(0.005)
            self.world.advance(0.005 * SPEED)

    def _wake(self, _: str) -> None:
        self.domain.refresh()

    # what the loops saw last, for the resources

    def domains(self) -> tuple[DomainSeen, ...]:
        return self.seen_domains.last

    async def workers(self) -> tuple[WorkerSeen, ...]:
        return await self.seen_workers.now()

    def libvirt_fault(self) -> str:
        return self.seen_domains.fault

    def nvml_fault(self) -> str:
        return ""

    async def rows(self) -> Rows:
        return (await self.ledger.read()).rows

    async def call(self, op: str, text: str = ONE, domain: str = "vm0") -> None:
        await self.hooks.call(op, HookCall(domain, "begin", "-", text))

    def define(self, text: str = ONE, *, running: bool) -> None:
        asked = claims_of(text)
        self.host.domains[asked.uuid] = SimDomain(asked.uuid, asked.name, asked.claims, running)

    async def until(self, what: Callable[[Rows], bool], limit_s: float = 60.0) -> Rows:
        end = self.world.now + limit_s
        while self.world.now < end:
            rows = await self.rows()
            if what(rows):
                return rows
            await asyncio.sleep(0.01)
        raise AssertionError(f"not within {limit_s} s: {await self.rows()}")


class _Metadata:
    """Edits claims of the simulated domains as libvirt's adapter does of real ones."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def add_claim(self, domain: str, attributes: dict[str, str]) -> ClaimSpec:
        found = self._find(domain)
        claim = " ".join(f'{name}="{value}"' for name, value in attributes.items())
        [spec] = claims_of(xml(claim, name=domain)).claims
        if not found.running:  # a running domain keeps the metadata that it was started with
            found.claims += (spec,)
        return spec

    async def remove_claim(self, domain: str, name: str) -> None:
        found = self._find(domain)
        found.claims = tuple(spec for spec in found.claims if spec.name != name)

    def _find(self, domain: str) -> SimDomain:
        for found in self._pool.host.domains.values():
            if found.name == domain:
                return found
        raise NotFound(f"no domain {domain}")


def run(story: Callable[[Pool], Awaitable[None]], **options: int | Settings | SimProcesses) -> None:
    async def told() -> None:
        async with Pool(**options) as pool:  # type: ignore[arg-type]
            await pool.until(lambda rows: len(rows.cards) == len(pool.host.cards))
            await story(pool)

    asyncio.run(asyncio.wait_for(told(), 30))

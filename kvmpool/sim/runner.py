"""Drives the real loops and the real hook over a simulated world: turn by turn, with virtual time and kills anywhere.

`Simulation` is one pool of one host: world, store, daemon. The daemon may be killed between any two effects and started
again; the store may fail as stores do; time passes only when told. Nothing blocks: a whole day takes milliseconds.
This module checks nothing: sim/laws.py does.
"""

from __future__ import annotations

import asyncio
import hashlib
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from kvmpool.api.boot_starts import BootStarts
from kvmpool.api.hooks import HookCall, Hooks
from kvmpool.core.breaker import closed
from kvmpool.core.health import Limits
from kvmpool.core.model import CardId, CardWish, DomainUuid, Event, HealthSignal, Rows, Settings, XidSignal
from kvmpool.daemon.card_loop import CardLoop
from kvmpool.daemon.cluster_loop import ClusterLoop
from kvmpool.daemon.domain_loop import DomainLoop
from kvmpool.daemon.ledger import Change, Ledger
from kvmpool.daemon.turns import Loop
from kvmpool.errors import KvmpoolError, Unreachable
from kvmpool.ports import Store
from kvmpool.sim.gate import Gate
from kvmpool.sim.hypervisor import SimHypervisor, SimPlugs, SimStarter
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
from kvmpool.store.faulty import Faults, FaultyStore
from kvmpool.store.memory import MemoryStore
from kvmpool.virt.domain_xml import claims_of

T = TypeVar("T")

_PUMP_S = 0.05  # virtual time between two looks while somebody waits for an answer
_LET_RUN = 20  # rounds of the event loop: enough for a call to reach its first wait
_QUIET_ROUNDS = 200  # a plan is at most a few dozen steps: past this the loops chase each other


class Killed(BaseException):
    """kill -9 of the daemon at a point; passes through everything that catches Exception."""


class NotQuiet(AssertionError):
    """The loops go on doing things although nothing changes: a livelock."""


class _VirtualSelector(selectors.SelectSelector):
    """Never blocks: where the event loop would wait for a timer, virtual time passes instead."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self._world.advance(_PUMP_S if timeout is None else timeout)
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers run on the world's clock."""

    def __init__(self, world: World) -> None:
        self._world = world
        super().__init__(_VirtualSelector(world))

    def time(self) -> float:
        return self._world.now


class Simulation:
    """One host, its store and its daemon. Build it inside `run`."""

    def __init__(
        self,
        world: World,
        *,
        cards: int = 2,
        settings: Settings | None = None,
        limits: Limits | None = None,
        wrap: Callable[[Store], Store] = lambda store: store,
        seed: int = 0,
        order: Callable[[list[Loop]], None] = lambda loops: None,
    ) -> None:
        """`order` may reorder the loops of a round in place: on a real host they run beside one another."""
        self.world = world
        self.host: SimHost = world.add_host("h0", cards)
        self.clock = SimClock(world, self.host)
        self.settings = settings or Settings()
        self.limits = limits or Limits()
        self.faulty = FaultyStore(wrap(MemoryStore(self.clock)), self.clock, Faults(), seed)
        self._order = order
        self.alive = False
        self._daemons = 0
        self.points = 0  # checkpoints passed since the daemon started
        self.kill_at: Callable[[int, str], bool] = lambda count, point: False
        self._ledger = Ledger(self.faulty.inner, self.clock, self.host.name)
        self.start()

    # --- the daemon ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A new daemon over whatever is left running. Nothing is remembered but what is in the store."""
        self._gate = Gate(self.faulty)
        self.alive, self.points = True, 0
        self.host.daemon = self._daemons = self._daemons + 1
        where = (self._gate, self.clock, self.host.name)
        workers, relays = SimWorkers(self.world, self.host), SimRelays(self.world, self.host)
        cards, source = SimCards(self.world, self.host), SimHealthSource(self.host)
        at = self._checkpoint
        self.cluster = ClusterLoop(*where, self.settings, checkpoint=at)
        modes = SimModes(self.world, self.host)
        self.card = CardLoop(*where, cards, [source], workers, limits=self.limits, checkpoint=at, modes=modes)
        self.domain = DomainLoop(*where, SimHypervisor(self.host), relays, plugs=self._plugs(), checkpoint=at)
        ledger = Ledger(self._gate, self.clock, self.host.name)
        self.hooks = Hooks(self._gate, ledger, self.clock, self.settings, lambda _: self.domain.refresh())

    def _plugs(self) -> SimPlugs:
        return SimPlugs(self.world, self.host, self._power_on)

    async def _power_on(self, name: str) -> str:
        """A start by the daemon itself, while it turns."""
        try:
            await self._starts().start(name)
        except KvmpoolError as error:
            return str(error)
        return ""

    def _starts(self) -> BootStarts:
        async def prepare(name: str, xml: str) -> None:
            await self.hooks.call("prepare", HookCall(name, "begin", "-", xml))

        return BootStarts(SimStarter(self.host, prepare, self._qemu), self.hooks)

    def _qemu(self, domain: SimDomain) -> None:
        domain.running, domain.pid = True, self.world.next_qemu()
        self.domain.refresh()

    async def kill(self) -> None:
        """kill -9: what it was doing stops where it is; nothing is undone."""
        if not self.alive:
            return
        self.alive = False
        self.host.daemon = 0
        self._gate.shut = True
        for loop in self._loops:
            await loop.close()

    async def restart(self) -> None:
        await self.kill()
        self.start()

    @property
    def _loops(self) -> tuple[Loop, ...]:
        return (self.card, self.cluster, self.domain)

    def _checkpoint(self, point: str) -> None:
        if not self.alive:
            raise Killed(point)
        self.points += 1
        if self.kill_at(self.points, point):
            raise Killed(point)

    # --- time ---------------------------------------------------------------------------------------------------------

    async def turn(self) -> bool:
        """One turn of every loop; False where nothing was done. A kill ends the daemon."""
        if not self.alive:
            return False
        busy = False
        try:
            loops = list(self._loops)
            self._order(loops)
            for loop in loops:
                busy = await self._turn(loop) or busy
        except Killed as killed:
            self.world.note(f"kvmpoold killed at {killed}")
            await self.kill()
        return busy

    async def _turn(self, loop: Loop) -> bool:
        """As Loop.run does it: a store that does not answer is tried again later."""
        task = asyncio.ensure_future(loop.turn())
        while not task.done():
            await asyncio.wait({task})
        try:
            return task.result()
        except KvmpoolError:
            return False

    async def settle(self) -> None:
        """Turn until a round in which nothing was done. Raises NotQuiet where there is none."""
        for _ in range(_QUIET_ROUNDS):
            if not await self.turn():
                return
        raise NotQuiet(f"the loops are not quiet after {_QUIET_ROUNDS} rounds")

    async def pass_time(self, seconds: float, step_s: float = 0.5) -> None:
        """Let virtual time pass, settling after each step."""
        await self.settle()
        for _ in range(round(seconds / step_s)):
            self.world.advance(step_s)
            await self.settle()

    async def wait_for(self, call: Coroutine[Any, Any, T], meanwhile: Callable[[], None] = lambda: None) -> T:
        """Run `call` beside the loops, time passing, until it ends; `meanwhile` happens once it is under way.

        Raises what it raises; Unreachable if the daemon dies.
        """
        task = asyncio.ensure_future(call)
        for _ in range(_LET_RUN):
            await asyncio.sleep(0)
        meanwhile()
        while not task.done():
            await self.turn()
            await asyncio.sleep(0)
            if not self.alive:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                raise Unreachable("kvmpoold was killed while it answered")
            if not task.done():
                self.world.advance(_PUMP_S)
        return task.result()

    # --- what people, guests and libvirt do ---------------------------------------------------------------------------

    def define(self, name: str, *claims: str) -> SimDomain:
        """A domain with these `<claim>` attributes; its uuid follows from its name."""
        digest = hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()
        uuid = DomainUuid(f"{digest[:8]}-{digest[8:12]}-4{digest[13:16]}-8{digest[17:20]}-{digest[20:]}")
        asked = claims_of(domain_xml(name, uuid, claims))
        domain = SimDomain(uuid, name, asked.claims)
        domain.xml = domain_xml(name, uuid, claims)
        self.host.domains[uuid] = domain
        return domain

    async def virsh_start(
        self, name: str, *, qemu_starts: bool = True, meanwhile: Callable[[], None] = lambda: None
    ) -> str:
        """`virsh start`: the hook, then QEMU. "" where it runs, else the refusal a person reads.

        `qemu_starts` False: libvirtd dies (or QEMU fails without a word) after prepare.
        """
        domain = self.domain_named(name)
        if domain.running:
            return "domain is already running"
        if not self.alive or not self.host.libvirt_up:
            return "kvmpoold or libvirtd does not answer"
        try:
            await self.wait_for(self.hooks.call("prepare", HookCall(name, "begin", "-", domain.xml)), meanwhile)
        except KvmpoolError as error:
            return str(error)
        if qemu_starts:
            self._qemu(domain)
        return ""

    async def domain_start(self, name: str) -> str:
        """`kvmpool domain start`. "" where it runs, else the refusal a person reads."""
        if not self.alive or not self.host.libvirt_up:
            return "kvmpoold or libvirtd does not answer"
        try:
            await self.wait_for(self._starts().start(name))
        except KvmpoolError as error:
            return str(error)
        return ""

    def stop(self, name: str, *, told: bool = True) -> None:
        """The domain's QEMU is gone; `told`: libvirt's hooks and events reach a living daemon."""
        self.domain_named(name).stop()
        if told and self.alive:
            self.domain.refresh()

    def domain_named(self, name: str) -> SimDomain:
        return next(d for d in self.host.domains.values() if d.name == name)

    def card_at(self, index: int) -> CardId:
        return list(self.host.cards)[index]

    async def xid(self, card: CardId, code: int, text: str = "", recovery: int | None = None) -> None:
        """The driver reports an XID; a daemon that is dead does not hear it."""
        await self.signal(XidSignal(card, code, self.world.now, text, recovery))

    async def signal(self, signal: HealthSignal) -> None:
        if self.alive:
            self.card.offer(signal)

    async def wish(self, card: CardId, change: Callable[[CardWish], CardWish]) -> None:
        """A person's wish, as the API writes it."""
        page = await self._ledger.read()
        wish = change(page.rows.wishes.get(card, CardWish(card)))
        await self._ledger.commit(page, Change(puts=[wish]))

    async def restore(self, card: CardId) -> None:
        """An operator says that the card is repaired."""
        await self.wish(card, lambda wish: replace(wish, restore=wish.restore + 1))

    async def close_breaker(self) -> None:
        page = await self._ledger.read()
        await self._ledger.commit(
            page, Change(puts=[closed(page.rows.breaker, page.rows.cards.values(), self.clock.now())])
        )

    async def rows(self) -> Rows:
        """The truth of the store, past all faults."""
        return (await self._ledger.read()).rows

    async def events(self) -> list[str]:
        """The pool's event log as lines, oldest first."""
        items, _ = await self.faulty.inner.list("/event/")
        found = []
        for item in sorted(items, key=lambda item: (item.mod_rev, item.key)):
            row = codec.decode(item.key, item.value)
            assert isinstance(row, Event)
            found.append(f"{row.subject}: {row.kind}" + (f" ({row.reason})" if row.reason else ""))
        return found


def domain_xml(name: str, uuid: str, claims: tuple[str, ...]) -> str:
    """The least XML that the hook reads."""
    inner = "".join(f"<k:claim {claim}/>" for claim in claims)
    meta = f"<metadata><k:claims xmlns:k='urn:kvmpool:domain:1'>{inner}</k:claims></metadata>"
    return f"<domain type='kvm'><name>{name}</name><uuid>{uuid}</uuid>{meta}</domain>"


def run(play: Callable[[World], Awaitable[T]]) -> T:
    """Run a play on a world of its own, in virtual time."""
    world = World()

    async def main() -> T:
        return await play(world)

    with asyncio.Runner(loop_factory=lambda: _VirtualLoop(world)) as runner:
        return runner.run(main())

"""The truth of a simulated pool: hosts, domains, cards, workers and relays as they really are, and the ports onto them.

The ports (here Clock, Cards, HealthSource, Workers; hypervisor.py, modes.py, relays.py have the others) are what the
real loops see; the fields of SimHost and SimCard are what a test knows. Nothing here decides or reads the store. Times
are virtual seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import Enum

from kvmpool.core.model import (
    Binding,
    BootId,
    CardId,
    CardSeen,
    ClaimKey,
    ClaimSpec,
    DomainUuid,
    Generation,
    HealthSignal,
    HostName,
    Mode,
    ProbeSignal,
    UnknownSignal,
    WorkerSeen,
)
from kvmpool.errors import CardLost, DeadlinePassed, Unreachable


class Condition(Enum):
    """What a card really is; nobody but the test may read it."""

    FINE = "fine"
    LOST = "lost"  # on the bus, reads all ones
    GONE = "gone"  # off the bus
    HUNG = "hung"  # answers nothing; its workers cannot be killed
    MUTE = "mute"  # the driver cannot tell: version mismatch, NVML unreadable


@dataclass(slots=True)
class SimCard:
    """A card of a host and its real condition."""

    id: CardId
    address: str
    memory_mib: int = 16384
    model: str = "Soft GPU"
    condition: Condition = Condition.FINE
    mode: Mode = Mode.VGPU
    holder: str = ""  # who keeps the card from changing its driver: "pid 7 (python3)"
    reset_ends: str = ""  # "": well; "impossible"; "fails": it is not well after it; "hangs"
    resets: int = 0  # that worked
    switch_ends: str = ""  # "": well; "fails": it is undone; "hangs": the old driver does not let go


@dataclass(slots=True)
class SimDomain:
    """A libvirt domain: defined, and running or not."""

    uuid: DomainUuid
    name: str
    claims: tuple[ClaimSpec, ...]
    running: bool = False
    pid: int = 0  # of its QEMU; 0: libvirt does not tell
    xml: str = ""  # as libvirt gives it to the hook
    devices: dict[str, str] = field(default_factory=dict)  # alias -> card's address, of the QEMU that runs
    gives_back: bool = True  # its guest answers a request to give a card back

    def stop(self) -> None:
        """Its QEMU is gone, and with it all that it had."""
        self.running = False
        self.devices.clear()


@dataclass(slots=True)
class SimWorker:
    """A worker process. `generation` is the one it really serves."""

    binding: Binding
    pid: int
    relay: bool = False
    stray: bool = False  # put there by the test: no row has ever named it

    @property
    def address(self) -> str:
        return f"unix:/sim/{self.binding.claim.domain}/{self.binding.claim.name}#{self.binding.generation}"


@dataclass(slots=True)
class SimRelay:
    """A relay process and where each of its claims points."""

    endpoint: str
    pid: int
    points: dict[str, tuple[Generation, str]] = field(default_factory=dict)
    follows: int = 0  # the QEMU with which it ends, unless the kvmpoold that said so is there to close it
    watcher: int = 0


@dataclass(slots=True)
class SimHost:
    """One machine: what runs on it, and which of its parts answer."""

    name: HostName
    boot: int = 1
    libvirt_up: bool = True
    daemon: int = 1  # which kvmpoold runs; 0: none
    cards: dict[CardId, SimCard] = field(default_factory=dict)
    domains: dict[DomainUuid, SimDomain] = field(default_factory=dict)
    workers: dict[tuple[ClaimKey, Generation], SimWorker] = field(default_factory=dict)
    relays: dict[DomainUuid, SimRelay] = field(default_factory=dict)
    signals: asyncio.Queue[HealthSignal] = field(default_factory=asyncio.Queue)

    @property
    def boot_id(self) -> BootId:
        return BootId(f"{self.name}-boot-{self.boot}")

    def runs(self, domain: DomainUuid, pid: int) -> bool:
        found = self.domains.get(domain)
        return found is not None and found.running and found.pid == pid


class World:
    """All hosts and one virtual clock. `note` is called with a line for each real effect (for scenario logs)."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.hosts: dict[HostName, SimHost] = {}
        self.note: Callable[[str], None] = lambda line: None
        self._pid = 100
        self._qemu = 5000
        self._alarms: list[tuple[float, asyncio.Event]] = []

    def advance(self, seconds: float) -> None:
        """Let virtual time pass; whoever sleeps until then wakes at the next turn of the event loop."""
        for host in self.hosts.values():
            for domain in list(host.relays):
                self._leave(host, domain)
        self.now += seconds
        for _, event in (a for a in self._alarms if a[0] <= self.now):
            event.set()
        self._alarms = [a for a in self._alarms if a[0] > self.now]

    def _leave(self, host: SimHost, domain: DomainUuid) -> None:
        """A relay whose QEMU is gone ends by itself where nobody is left who will close it."""
        relay = host.relays[domain]
        if relay.follows and relay.watcher != host.daemon and not host.runs(domain, relay.follows):
            self.end_relay(host, domain)
            self.note(f"{host.name}: relay of {host.domains[domain].name} ended with its QEMU")

    def at(self, when: float) -> asyncio.Event:
        """An event that is set once virtual time reaches `when`."""
        event = asyncio.Event()
        if when <= self.now:
            event.set()
        else:
            self._alarms.append((when, event))
        return event

    def add_host(self, name: str, cards: int, memory_mib: int = 16384) -> SimHost:
        """A host with `cards` equal cards at 0000:41:00.0, 0000:42:00.0, ..."""
        host = SimHost(HostName(name))
        index = len(self.hosts)
        for n in range(cards):
            card = CardId(f"GPU-{index:08x}-0000-4000-8000-{n:012x}")
            host.cards[card] = SimCard(card, f"0000:{0x41 + n:02x}:00.0", memory_mib)
        self.hosts[host.name] = host
        return host

    def next_pid(self) -> int:
        self._pid += 1
        return self._pid

    def next_qemu(self) -> int:
        self._qemu += 1
        return self._qemu

    def end_worker(self, host: SimHost, key: tuple[ClaimKey, Generation]) -> None:
        """A worker process is gone: so is whatever it held."""
        host.workers.pop(key, None)

    def end_relay(self, host: SimHost, domain: DomainUuid) -> None:
        """A relay process is gone; a worker ends with its relay's connection (01 §1.4, 3)."""
        relay = host.relays.pop(domain, None)
        if relay is None:
            return
        for claim, (generation, _) in relay.points.items():
            self._drop(ClaimKey(domain, claim), generation)

    def point(self, host: SimHost, domain: DomainUuid, claim: str, target: tuple[Generation, str] | None) -> None:
        """Move one claim of a relay; the worker it leaves ends, the one it reaches is connected."""
        relay = host.relays[domain]
        old = relay.points.pop(claim, None)
        key = ClaimKey(domain, claim)
        if old is not None and (target is None or old[0] != target[0]):
            self._drop(key, old[0])
        if target is None:
            return
        for other in self.hosts.values():
            worker = other.workers.get((key, target[0]))
            if worker is not None and worker.address == target[1]:
                worker.relay = True
                relay.points[claim] = target
                return
        raise Unreachable(f"no worker listens at {target[1]}")

    def _drop(self, key: ClaimKey, generation: Generation) -> None:
        for host in self.hosts.values():
            worker = host.workers.get((key, generation))
            if worker is not None:
                worker.relay = False
                if host.cards[worker.binding.card].condition is not Condition.HUNG:
                    host.workers.pop((key, generation))


class SimClock:
    """ports.Clock over the world's virtual time."""

    def __init__(self, world: World, host: SimHost) -> None:
        self._world, self._host = world, host

    def now(self) -> float:
        return self._world.now

    def wall(self) -> float:
        return self._world.now

    def boot_id(self) -> BootId:
        return self._host.boot_id

    async def sleep(self, delay_s: float) -> None:
        await self._world.at(self._world.now + delay_s).wait()


class SimCards:
    """ports.Cards over a host's cards."""

    def __init__(self, world: World, host: SimHost) -> None:
        self._world, self._host = world, host

    async def inventory(self) -> tuple[CardSeen, ...]:
        seen = [
            CardSeen(
                card.id,
                card.address,
                card.model,
                card.memory_mib,
                driver=DRIVERS[card.mode],
                compute_capability="9.0",
                fault=_FAULTS.get(card.condition, ""),
                mode=card.mode,
            )
            for card in self._host.cards.values()
            if card.condition is not Condition.GONE
        ]
        return tuple(sorted(seen, key=lambda c: c.address))

    async def probe(self, card: CardId, deadline_s: float) -> ProbeSignal | UnknownSignal:
        condition = self._host.cards[card].condition if card in self._host.cards else Condition.GONE
        if condition is Condition.MUTE:
            return UnknownSignal(card, self._world.now, _FAULTS[condition])
        lost, hung = condition in (Condition.LOST, Condition.GONE), condition is Condition.HUNG
        return ProbeSignal(card, self._world.now, condition is Condition.FINE, lost, hung, text=condition.value)

    async def close(self) -> None:
        return None


DRIVERS = {Mode.VGPU: "sim", Mode.PASSTHROUGH: "vfio-pci", Mode.OFF: ""}
_FAULTS = {
    Condition.LOST: "GPU is lost",
    Condition.MUTE: "Driver/library version mismatch",
}


class SimHealthSource:
    """ports.HealthSource: what the test puts into the host's queue."""

    def __init__(self, host: SimHost) -> None:
        self._host = host

    async def signals(self) -> AsyncIterator[HealthSignal]:
        while True:
            yield await self._host.signals.get()

    async def close(self) -> None:
        return None


class SimWorkers:
    """ports.Workers over a host's worker processes."""

    def __init__(self, world: World, host: SimHost) -> None:
        self._world, self._host = world, host

    async def list(self) -> tuple[WorkerSeen, ...]:
        return tuple(self._seen(w) for _, w in sorted(self._host.workers.items()))

    async def start(self, binding: Binding) -> WorkerSeen:
        key = (binding.claim, binding.generation)
        if key not in self._host.workers:
            card = self._host.cards.get(binding.card)
            if card is None or card.condition is not Condition.FINE:
                why = card.condition.value if card else "not here"
                raise CardLost(f"{self._host.name}: worker for {binding.label} cannot open its card: {why}")
            self._host.workers[key] = SimWorker(binding, self._world.next_pid())
            self._world.note(f"{self._host.name}: worker {binding.label} runs on {card.address}")
        seen = self._seen(self._host.workers[key])
        if not seen.serving:
            raise DeadlinePassed(f"worker {binding.label} (pid {seen.pid}) runs but does not serve")
        return seen

    async def stop(self, claim: ClaimKey, generation: Generation, pid: int) -> None:
        worker = self._host.workers.get((claim, generation))
        if worker is None or worker.pid != pid:
            return
        if self._host.cards[worker.binding.card].condition is Condition.HUNG:
            raise DeadlinePassed(f"worker {worker.binding.label} (pid {pid}) does not end: its card hangs")
        self._world.end_worker(self._host, (claim, generation))
        self._world.note(f"{self._host.name}: worker {worker.binding.label} ended")

    def _seen(self, worker: SimWorker) -> WorkerSeen:
        b = worker.binding
        hung = self._host.cards[b.card].condition is Condition.HUNG
        return WorkerSeen(
            b.claim,
            b.generation,
            worker.address,
            worker.pid,
            relay_connected=worker.relay,
            card=b.card,
            serving=not hung,
        )

"""A seeded random walk over the pool: people, guests, hardware and crashes act, the laws are checked after every step.

It ends in peace: faults stop, cards are repaired, and then every running domain must be served and nothing be left.
The same seed walks the same way.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from kvmpool.core.health import Limits
from kvmpool.core.model import Binding, CardId, ClaimKey, Generation, GoneSignal, Mode, Phase, ProbeSignal
from kvmpool.core.xid import CATALOGUE, XidClass
from kvmpool.ports import Store
from kvmpool.sim.laws import Auditor, Broken, check_rest, check_world, law
from kvmpool.sim.runner import NotQuiet, Simulation, run
from kvmpool.sim.world import Condition, SimWorker, World
from kvmpool.store.faulty import Faults

DOMAINS = 5
PEACE_S = 200.0  # a suspicion takes 60 s to clear, a reset card's validation some seconds, its probation up to 60
_LIMITS = Limits(probation_s=20.0, probation_cap_s=60.0)  # a day of probation would only make walks longer
_VGPU = 'mode="vgpu" memory="{memory}"'
_WHOLE = tuple(f'mode="passthrough" on_unplug="{how}"' for how in ("hot-only", "reset", "cold"))
_MODES = (*_WHOLE, 'mode="any" order="passthrough vgpu" memory="{memory}" on_unplug="reset"')
_APP = sorted(code for code, row in CATALOGUE.items() if row.kind is XidClass.APP)
_FATAL = sorted(code for code, row in CATALOGUE.items() if row.kind in (XidClass.CARD_FATAL, XidClass.RESET_NEEDED))
_DOUBTFUL = sorted(code for code, row in CATALOGUE.items() if row.kind is XidClass.CORROBORATE)


@dataclass(frozen=True, slots=True)
class Result:
    """What a walk did; `failure` "" where every law held."""

    seed: int
    steps: tuple[str, ...]
    failure: str


def walk(seed: int, steps: int = 60, *, passthrough: bool = False) -> Result:
    """One walk. Never raises for a broken law: it is in the result, with the steps that led to it.

    `passthrough`: all cards but the first are handed out whole, and all domains but the first ask for that.
    """
    taken: list[str] = []

    async def play(world: World) -> None:
        walker = _Walker(world, seed, taken, passthrough)
        await walker.begin()
        for _ in range(steps):
            await walker.step()
        await walker.peace()

    try:
        run(play)
    except (Broken, NotQuiet, AssertionError) as error:
        return Result(seed, tuple(taken), str(error) or repr(error))
    return Result(seed, tuple(taken), "")


class _Walker:
    def __init__(self, world: World, seed: int, taken: list[str], passthrough: bool) -> None:
        self._random = random.Random(seed)
        self._passthrough = passthrough
        self._taken = taken
        self.world = world
        self.auditor: Auditor

        def audit(store: Store) -> Auditor:
            self.auditor = Auditor(store, world)
            return self.auditor

        cards = self._random.choice([1, 2, 3]) + 2 * passthrough
        self.sim = Simulation(world, cards=cards, limits=_LIMITS, wrap=audit, seed=seed, order=self._random.shuffle)
        self._actions: list[tuple[int, Callable[[], Awaitable[str]]]] = [
            (14, self._start),
            (8, self._stop),
            (10, self._start_while_another_stops),
            (3, self._goes_mute),
            (3, self._stray),
            (10, self._time),
            (4, self._worker_dies),
            (3, self._relay_dies),
            (6, self._app_xid),
            (4, self._fatal_xid),
            (4, self._doubtful_xid),
            (5, self._breaks),
            (5, self._repairs),
            (4, self._wishes),
            (6, self._dies),
            (6, self._dies_at_a_point),
            (8, self._restarts),
            (4, self._libvirt),
            (2, self._reboots),
            (5, self._store),
            (2, self._closes),
        ]

    async def begin(self) -> None:
        for n in range(DOMAINS):
            memory = self._random.choice([4096, 8192, 12288, 16384])
            extra = self._random.choice(["", "", ' compute="60"', ' priority="90"', ' on_failure="none"'])
            mode = self._random.choice(_MODES) if self._passthrough and n else _VGPU
            self.sim.define(f"vm{n}", f'name="gpu0" {mode.format(memory=memory)}{"" if mode in _WHOLE else extra}')
            self.sim.domain_named(f"vm{n}").gives_back = not self._passthrough or self._random.random() < 0.7
        for card in list(self.sim.host.cards.values())[1:]:
            card.mode = Mode.PASSTHROUGH if self._passthrough else Mode.VGPU
        await self.sim.pass_time(8)

    async def step(self) -> None:
        weights = [weight for weight, _ in self._actions]
        action = self._random.choices([act for _, act in self._actions], weights)[0]
        said = await action()
        if not said:
            return
        self._taken.append(said)
        for _ in range(self._random.choice([0, 1, 3])):
            await self.sim.turn()
            self._check()
        if self._random.random() < 0.5:
            await self.sim.settle()
            self._check()

    async def peace(self) -> None:
        """Faults stop; everything is mended; then only what fits must be served."""
        sim = self.sim
        sim.faulty.faults = Faults()
        sim.host.libvirt_up = True
        for card in sim.host.cards.values():
            card.condition = Condition.FINE
        for domain in sim.host.domains.values():
            domain.gives_back = True
        sim.kill_at = lambda count, point: False
        if not sim.alive:
            sim.start()
        await sim.pass_time(2)
        await self._forgive()
        await sim.pass_time(PEACE_S, 2.0)
        self._taken.append("peace")
        for domain in sim.host.domains.values():
            unserved = [c for c in self.auditor.rows.claims.values() if c.key.domain == domain.uuid and not c.pointed]
            if domain.running and unserved:  # it lost its card and nobody had room, or it asked not to be rebound
                domain.stop()
        await sim.pass_time(20)
        self._check()
        check_rest(self.world, self.auditor.rows)
        await self._serves_again()

    async def _serves_again(self) -> None:
        """I12: a mended, empty pool serves whoever starts."""
        for domain in self.sim.host.domains.values():
            domain.stop()
        await self.sim.pass_time(20, 2.0)
        for name in ("vm0", "vm1") if self._passthrough else ("vm0",):
            refused = await self.sim.virsh_start(name)
            law(not refused, f"a mended, empty pool refuses {name}: {refused}")
        await self.sim.pass_time(4)
        check_rest(self.world, self.auditor.rows)

    async def _forgive(self) -> None:
        for card in self.sim.host.cards:
            await self.sim.wish(card, lambda w: replace(w, cordoned=False, drain=False, restore=w.restore + 1))
        await self.sim.close_breaker()

    def _check(self) -> None:
        check_world(self.world, self.auditor.rows)

    # --- people and guests --------------------------------------------------------------------------------------------

    def _domain(self) -> str:
        return f"vm{self._random.randrange(DOMAINS)}"

    async def _start(self) -> str:
        name, starts = self._domain(), self._random.random() < 0.85
        refused = await self.sim.virsh_start(name, qemu_starts=starts)
        return f"virsh start {name}: {refused or ('runs' if starts else 'libvirtd died in prepare')}"

    async def _stop(self) -> str:
        name, told = self._domain(), self._random.random() < 0.7
        self.sim.stop(name, told=told)
        return f"{name} stops{'' if told else ', nobody is told'}"

    async def _start_while_another_stops(self) -> str:
        """The one that starts may need what the one that stops still holds."""
        running = [d.name for d in self.sim.host.domains.values() if d.running]
        idle = [d.name for d in self.sim.host.domains.values() if not d.running]
        if not running or not idle:
            return ""
        name, other = self._random.choice(idle), self._random.choice(running)
        refused = await self.sim.virsh_start(name, meanwhile=lambda: self.sim.stop(other))
        return f"virsh start {name} while {other} stops: {refused or 'runs'}"

    async def _stray(self) -> str:
        """A worker that no row names, as after the store was lost."""
        domain = self.sim.domain_named(self._domain())
        card = self._card()
        key = ClaimKey(domain.uuid, "gpu0")
        generation = Generation(900_000 + len(self._taken))
        binding = Binding(
            key, generation, domain.name, self.sim.host.name, card, self.sim.host.name, 1024, 1024, 0, 100
        )
        self.sim.host.workers[(key, generation)] = SimWorker(binding, self.world.next_pid(), stray=True)
        return f"a stray worker on {card[-4:]}"

    async def _wishes(self) -> str:
        card = self._card()
        word = self._random.choice(["cordon", "uncordon", "drain"])
        cordoned, drain = word == "cordon", word == "drain"
        await self.sim.wish(card, lambda w: replace(w, cordoned=cordoned, drain=drain))
        return f"{word} {card[-4:]}"

    async def _closes(self) -> str:
        await self.sim.close_breaker()
        return "breaker close"

    # --- hardware -----------------------------------------------------------------------------------------------------

    def _card(self) -> CardId:
        return self._random.choice(list(self.sim.host.cards))

    async def _app_xid(self) -> str:
        """I13: an application's error moves nothing, whatever else is going on."""
        await self.sim.settle()
        before = dict(self.auditor.rows.bindings)
        card, code = self._card(), self._random.choice(_APP)
        await self.sim.xid(card, code)
        await self.sim.settle()
        if self.auditor.rows.bindings != before and not self.sim.faulty.faults.unreachable:
            raise Broken(f"Xid {code}, an application's error, changed a binding")
        return f"Xid {code} on {card[-4:]}"

    async def _fatal_xid(self) -> str:
        card, code = self._card(), self._random.choice(_FATAL)
        await self.sim.xid(card, code)
        return f"Xid {code} on {card[-4:]}"

    async def _doubtful_xid(self) -> str:
        card, code = self._card(), self._random.choice(_DOUBTFUL)
        await self.sim.xid(card, code)
        return f"Xid {code} on {card[-4:]}"

    async def _breaks(self) -> str:
        card = self._card()
        condition = self._random.choice([Condition.LOST, Condition.GONE, Condition.HUNG, Condition.MUTE])
        self.sim.host.cards[card].condition = condition
        if condition is Condition.GONE and self._random.random() < 0.5:
            await self.sim.signal(GoneSignal(card, self.world.now, "udev remove"))
        return f"{card[-4:]} is {condition.value}"

    async def _goes_mute(self) -> str:
        """The driver cannot tell any more; then somebody starts."""
        card = self._card()
        self.sim.host.cards[card].condition = Condition.MUTE
        await self.sim.pass_time(2)
        return f"{card[-4:]} is mute; {await self._start()}"

    async def _repairs(self) -> str:
        card = self._card()
        self.sim.host.cards[card].condition = Condition.FINE
        if self._random.random() < 0.5:
            await self.sim.restore(card)
        await self.sim.signal(ProbeSignal(card, self.world.now, ok=True))
        return f"{card[-4:]} is repaired"

    # --- crashes ------------------------------------------------------------------------------------------------------

    async def _worker_dies(self) -> str:
        fine = [k for k, w in self.sim.host.workers.items() if self._can_die(w.binding.card)]
        if not fine:
            return ""
        key = self._random.choice(sorted(fine))
        label = self.sim.host.workers[key].binding.label
        self.world.end_worker(self.sim.host, key)
        if self._random.random() < 0.5:
            await self._is_noticed(key, label)
        return f"worker {label} dies"

    async def _is_noticed(self, key: tuple[ClaimKey, Generation], label: str) -> None:
        """Where daemon and store work, a dead worker's binding is not called ready for long."""
        self.sim.faulty.faults = Faults()
        self.sim.kill_at = lambda count, point: False
        await self.sim.pass_time(3)
        left = self.auditor.rows.bindings.get(key)
        law(not self.sim.alive or left is None or left.phase is not Phase.READY, f"{label} is ready without a worker")

    def _can_die(self, card: CardId) -> bool:
        return any(c.id == card and c.condition is not Condition.HUNG for c in self.sim.host.cards.values())

    async def _relay_dies(self) -> str:
        if not self.sim.host.relays:
            return ""
        domain = self._random.choice(sorted(self.sim.host.relays))
        self.world.end_relay(self.sim.host, domain)
        return f"relay of {self.sim.host.domains[domain].name} dies"

    async def _dies(self) -> str:
        await self.sim.kill()
        return "kvmpoold is killed"

    async def _dies_at_a_point(self) -> str:
        if not self.sim.alive:
            return ""
        at = self.sim.points + self._random.randrange(1, 12)
        self.sim.kill_at = lambda count, point: count == at
        return f"kvmpoold will be killed at its point {at}"

    async def _restarts(self) -> str:
        if self.sim.alive:
            return ""
        self.sim.kill_at = lambda count, point: False
        self.sim.start()
        return "kvmpoold starts"

    async def _libvirt(self) -> str:
        self.sim.host.libvirt_up = not self.sim.host.libvirt_up
        return f"libvirtd {'answers' if self.sim.host.libvirt_up else 'does not answer'}"

    async def _reboots(self) -> str:
        host = self.sim.host
        await self.sim.kill()
        host.boot += 1
        host.workers.clear()
        host.relays.clear()
        for domain in host.domains.values():
            domain.stop()
        self.sim.start()
        return "the host reboots"

    async def _store(self) -> str:
        word, faults = self._random.choice(
            [("works", Faults()), ("fails now and then", Faults.rough()), ("is late", Faults(commit_late=0.3))]
        )
        self.sim.faulty.faults = faults
        return f"the store {word}"

    async def _time(self) -> str:
        seconds = self._random.choice([0.5, 2.0, 8.0, 70.0])
        step_s = 0.5 if seconds < 10 else 2.0
        for _ in range(round(seconds / step_s)):
            self.world.advance(step_s)
            await self.sim.settle()
            self._check()
        return f"{seconds:g} s pass"

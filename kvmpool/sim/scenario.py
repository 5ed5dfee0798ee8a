"""Failovers as stories: a folder with world.toml and steps.txt plays in the sim, and its log reads like one.

steps.txt, a step a line, `#` begins a comment:
    define NAME ATTRIBUTES     a domain with one <claim>      start NAME                     virsh start
    stop NAME                  its QEMU ends                  start-dies NAME                libvirtd dies after prepare
    domain-start NAME          kvmpool domain start
    stop-during START STOP     STOP stops while START starts
    xid CARD CODE [TEXT]       card by its number             card CARD CONDITION            fine lost gone hung mute
    wish CARD cordon|uncordon|drain|restore                   close-breaker
    kill | kill-at POINT | restart                            of kvmpoold
    libvirt down|up            wait SECONDS                   pause SECONDS                  the whole host stands still
    worker-dies NAME           relay-dies NAME                show                           one line a claim
The log has each step, what the pool's events say and what really ran, with virtual seconds since the start.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kvmpool.core.health import Limits
from kvmpool.core.model import Mode, Settings
from kvmpool.errors import ConfigInvalid
from kvmpool.ports import Store
from kvmpool.sim.laws import Auditor, check_world
from kvmpool.sim.runner import Simulation, run
from kvmpool.sim.world import Condition, World


@dataclass(frozen=True, slots=True)
class Scenario:
    """What world.toml and steps.txt say. `cards` on one host, each of 16 GiB."""

    cards: int
    settings: Settings
    limits: Limits
    steps: tuple[str, ...]


def read(folder: Path) -> Scenario:
    """Raises ConfigInvalid, naming file and line."""
    try:
        world = tomllib.loads((folder / "world.toml").read_text())
        steps = (folder / "steps.txt").read_text().splitlines()
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigInvalid(f"scenario {folder.name}: {error}") from error
    try:
        settings, limits = Settings(**world.pop("settings", {})), Limits(**world.pop("limits", {}))
        cards = int(world.pop("cards", 2))
    except (TypeError, ValueError) as error:
        raise ConfigInvalid(f"scenario {folder.name}: world.toml: {error}") from error
    if world:
        raise ConfigInvalid(f"scenario {folder.name}: world.toml: unknown key {min(world)}")
    return Scenario(cards, settings, limits, tuple(line.partition("#")[0].strip() for line in steps))


def play(scenario: Scenario) -> list[str]:
    """The log. Raises laws.Broken where a law of the pool does not hold, ConfigInvalid for a step that is none."""
    log: list[str] = []

    async def main(world: World) -> None:
        teller = _Teller(world, scenario, log)
        await teller.begin()
        for number, line in enumerate(scenario.steps, 1):
            if line:
                await teller.step(number, line)

    run(main)
    return log


class _Teller:
    def __init__(self, world: World, scenario: Scenario, log: list[str]) -> None:
        self._world, self._log = world, log
        self._began = world.now
        self._told = 0
        self._auditor: Auditor
        world.note = lambda text: self._say(f"    {text}")

        def audit(store: Store) -> Auditor:
            self._auditor = Auditor(store, world)
            return self._auditor

        self._sim = Simulation(
            world, cards=scenario.cards, settings=scenario.settings, limits=scenario.limits, wrap=audit
        )

    async def begin(self) -> None:
        """The cards are found and healthy; the story begins after that."""
        await self._sim.pass_time(8)
        self._told = len(await self._sim.events())
        self._began = self._world.now

    async def step(self, number: int, line: str) -> None:
        self._say(f"> {line}")
        try:
            said = await act(self._sim, line)
        except ConfigInvalid as error:
            raise ConfigInvalid(f"steps.txt:{number}: {error}") from error
        await self._sim.settle()
        await self._events()
        if said:
            self._say(f"    {said}")
        if line == "show":
            self._show()
        check_world(self._world, self._auditor.rows)

    async def _events(self) -> None:
        events = await self._sim.events()
        for text in events[self._told :]:
            self._say(f"  {text}")
        self._told = len(events)

    def _show(self) -> None:
        rows = self._auditor.rows
        for key, claim in sorted(rows.claims.items()):
            bindings = sorted((b for b in rows.bindings.values() if b.claim == key), key=lambda b: b.generation)
            served = ", ".join(f"#{b.generation} {b.phase.value} on {rows.cards[b.card].label}" for b in bindings)
            wait = self._sim.cluster.waits.get(key)
            why = f"; waits: {wait.reason}" if wait else ""
            self._say(f"    {claim.label}: {served or 'no binding'}, pointed at {claim.pointed}{why}")
        if not rows.claims:
            self._say("    no claims")

    def _say(self, text: str) -> None:
        self._log.append(f"{self._world.now - self._began:7.1f} {text}")


async def act(sim: Simulation, line: str) -> str:
    """One step; what it has to say. Raises ConfigInvalid where it is none."""
    word, *words = shlex.split(line)
    if word not in _STEPS:
        raise ConfigInvalid(f"{word!r} is no step; there are {', '.join(sorted(_STEPS))}")
    try:
        return await _STEPS[word](sim, words)
    except (IndexError, ValueError, StopIteration, KeyError) as error:
        raise ConfigInvalid(f"{line}: {error!r}") from error


# --- the steps --------------------------------------------------------------------------------------------------------

Act = Callable[[Simulation, list[str]], Awaitable[str]]


async def _define(sim: Simulation, words: list[str]) -> str:
    sim.define(words[0], " ".join(f'{k}="{v}"' for k, _, v in (w.partition("=") for w in words[1:])))
    return ""


async def _start(sim: Simulation, words: list[str]) -> str:
    refused = await sim.virsh_start(words[0])
    return f"refused: {refused}" if refused else f"{words[0]} runs"


async def _domain_start(sim: Simulation, words: list[str]) -> str:
    refused = await sim.domain_start(words[0])
    return f"refused: {refused}" if refused else f"{words[0]} runs"


async def _start_dies(sim: Simulation, words: list[str]) -> str:
    refused = await sim.virsh_start(words[0], qemu_starts=False)
    return f"refused: {refused}" if refused else "prepare went well, then libvirtd died"


async def _stop_during(sim: Simulation, words: list[str]) -> str:
    refused = await sim.virsh_start(words[0], meanwhile=lambda: sim.stop(words[1]))
    return f"refused: {refused}" if refused else f"{words[0]} runs"


async def _stop(sim: Simulation, words: list[str]) -> str:
    sim.stop(words[0])
    return ""


async def _xid(sim: Simulation, words: list[str]) -> str:
    await sim.xid(sim.card_at(int(words[0])), int(words[1]), " ".join(words[2:]))
    return ""


async def _card(sim: Simulation, words: list[str]) -> str:
    sim.host.cards[sim.card_at(int(words[0]))].condition = Condition(words[1])
    return ""


async def _mode(sim: Simulation, words: list[str]) -> str:
    sim.host.cards[sim.card_at(int(words[0]))].mode = Mode(words[1])
    return ""


async def _guest(sim: Simulation, words: list[str]) -> str:
    sim.domain_named(words[0]).gives_back = {"answers": True, "silent": False}[words[1]]
    return ""


async def _wish(sim: Simulation, words: list[str]) -> str:
    card, word = sim.card_at(int(words[0])), words[1]
    if word == "restore":
        await sim.restore(card)
        return ""
    if word not in ("cordon", "uncordon", "drain"):
        raise ValueError(f"{word} is no wish")
    await sim.wish(card, lambda wish: replace(wish, cordoned=word == "cordon", drain=word == "drain"))
    return ""


async def _close_breaker(sim: Simulation, words: list[str]) -> str:
    await sim.close_breaker()
    return ""


async def _kill(sim: Simulation, words: list[str]) -> str:
    await sim.kill()
    return ""


async def _kill_at(sim: Simulation, words: list[str]) -> str:
    sim.kill_at = lambda count, point: point == words[0]
    return ""


async def _restart(sim: Simulation, words: list[str]) -> str:
    sim.kill_at = lambda count, point: False
    await sim.restart()
    return ""


async def _libvirt(sim: Simulation, words: list[str]) -> str:
    sim.host.libvirt_up = {"up": True, "down": False}[words[0]]
    sim.domain.refresh()
    return ""


async def _wait(sim: Simulation, words: list[str]) -> str:
    await sim.pass_time(float(words[0]))
    return ""


async def _pause(sim: Simulation, words: list[str]) -> str:
    sim.world.advance(float(words[0]))
    return ""


async def _worker_dies(sim: Simulation, words: list[str]) -> str:
    uuid = sim.domain_named(words[0]).uuid
    for key in [key for key in sim.host.workers if key[0].domain == uuid]:
        sim.world.end_worker(sim.host, key)
    return ""


async def _relay_dies(sim: Simulation, words: list[str]) -> str:
    sim.world.end_relay(sim.host, sim.domain_named(words[0]).uuid)
    return ""


async def _nothing(sim: Simulation, words: list[str]) -> str:
    return ""


_STEPS: dict[str, Act] = {
    "define": _define,
    "start": _start,
    "start-dies": _start_dies,
    "domain-start": _domain_start,
    "stop": _stop,
    "stop-during": _stop_during,
    "xid": _xid,
    "card": _card,
    "wish": _wish,
    "close-breaker": _close_breaker,
    "kill": _kill,
    "kill-at": _kill_at,
    "restart": _restart,
    "libvirt": _libvirt,
    "mode": _mode,
    "guest": _guest,
    "wait": _wait,
    "pause": _pause,
    "worker-dies": _worker_dies,
    "relay-dies": _relay_dies,
    "show": _nothing,
}

"""Plays a story again and again with the daemon killed at each point of perform.py: the end must be the same (I11).

What a person does who sees kvmpoold die is done here too: start it, and repeat the `virsh start` that failed.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmpool.daemon.perform import POINTS
from kvmpool.ports import Store
from kvmpool.sim.laws import Auditor
from kvmpool.sim.runner import Simulation, run
from kvmpool.sim.scenario import Scenario, act
from kvmpool.sim.world import World

_DOWN_S = 3.0  # how long kvmpoold stays dead
_REST_S = 10.0


@dataclass(frozen=True, slots=True)
class End:
    """What is left when all is quiet: served claims with their cards, worker and relay counts, phases of bindings."""

    served: tuple[tuple[str, str, bool], ...]
    phases: tuple[str, ...]
    workers: int
    relays: int
    kills: int = 0


def end_of(scenario: Scenario, point: str = "", visit: int = 1) -> End:
    """The end of the story with a kill at the `visit`-th passage of `point`; `kills` 0 where that never came."""
    found: list[End] = []

    async def main(world: World) -> None:
        auditors: list[Auditor] = []

        def audit(store: Store) -> Auditor:
            auditors.append(Auditor(store, world))
            return auditors[-1]

        sim = Simulation(
            world,
            cards=scenario.cards,
            settings=scenario.settings,
            limits=scenario.limits,
            wrap=audit,
            order=list.reverse,  # so that a worker is stopped before its relay leaves it
        )
        visits = kills = 0

        def kill_at(_: int, name: str) -> bool:
            nonlocal visits
            visits += name == point
            return name == point and visits == visit

        sim.kill_at = kill_at
        await sim.pass_time(8)
        for line in filter(None, scenario.steps):
            await act(sim, line)
            await sim.settle()
            if sim.alive:
                continue
            kills += 1
            world.advance(_DOWN_S)
            sim.start()
            await sim.pass_time(_REST_S)
            if line.startswith(("start ", "stop-during ")):
                await act(sim, f"start {line.split()[1]}")
        await sim.pass_time(_REST_S)
        found.append(_end(sim, auditors[0], kills))

    run(main)
    return found[0]


def _end(sim: Simulation, auditor: Auditor, kills: int) -> End:
    rows = auditor.rows
    served = []
    for key, claim in sorted(rows.claims.items()):
        mine = [b for b in rows.bindings.values() if b.claim == key and b.generation == claim.pointed]
        card = rows.cards[mine[0].card].label if mine else ""
        served.append((claim.label, card, claim.pointed is not None))
    phases = tuple(sorted(b.phase.value for b in rows.bindings.values()))
    return End(tuple(served), phases, len(sim.host.workers), len(sim.host.relays), kills)


def every_point(scenario: Scenario, visits: int = 3) -> tuple[list[str], list[str]]:
    """(points whose kill was survived with the same end, lines of those that were not). A point is passed many times:
    the first `visits` passages of each are tried."""
    right = end_of(scenario)
    survived, wrong = [], []
    for point in POINTS:
        for visit in range(1, visits + 1):
            end = end_of(scenario, point, visit)
            if not end.kills:
                break
            if (end.served, end.phases, end.workers, end.relays) == (
                right.served,
                right.phases,
                right.workers,
                right.relays,
            ):
                survived.append(f"{point}/{visit}")
            else:
                wrong.append(f"killed at {point}, passage {visit}: ends as {end}, not as {right}")
    return survived, wrong

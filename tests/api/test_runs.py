"""POST /v1/runs against the real loops over a simulated host: who holds what, and what a refusal leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvmpool.api.access import Peer
from kvmpool.api.runs import Runs
from kvmpool.core.model import DomainUuid, Phase, Rows
from kvmpool.errors import ClaimInvalid, KvmpoolError, NoCapacity, Refused
from kvmpool.sim.processes import SimProcesses
from kvmpool.sim.world import Condition
from tests.api import pool as sim
from tests.api.pool import Pool

PID, UID, GID = 4711, 1000, 1001
PEER = Peer(PID, UID, GID)
ASKED = {"memory": "4GiB", "compute": "30", "compute_limit": "60"}


class Places:
    """Endpoints by name; `left` is what nobody has removed."""

    def __init__(self) -> None:
        self.left: dict[DomainUuid, int] = {}

    def make(self, domain: DomainUuid, gid: int) -> str:
        self.left[domain] = gid
        return f"unix:/run/{domain}/cuda.sock"

    def token(self, domain: DomainUuid) -> str:
        return f"token of {domain}"

    def remove(self, domain: DomainUuid) -> None:
        pass


class Runner:
    """The runs of a pool, and the processes that hold them."""

    def __init__(self, pool: Pool, processes: SimProcesses) -> None:
        self.pool, self.processes, self.places = pool, processes, Places()
        self.runs = Runs(pool.hooks, pool.ledger, self.places, processes)


def run(story: Callable[[Runner], Awaitable[None]], cards: int = 2) -> None:
    processes = SimProcesses()
    processes.start(PID)

    async def told(pool: Pool) -> None:
        await story(Runner(pool, processes))

    sim.run(told, cards=cards, processes=processes)


def nothing_left(rows: Rows) -> bool:
    return not (rows.claims or rows.attempts or rows.bindings)


def test_the_process_that_asks_gets_a_served_claim_and_what_it_needs_to_reach_it() -> None:
    async def story(it: Runner) -> None:
        body = await it.runs.start(ASKED, PEER)
        rows = await it.pool.rows()
        [claim] = rows.claims.values()
        [binding] = rows.bindings.values()
        assert (binding.phase, claim.pointed) == (Phase.READY, binding.generation)
        assert (binding.memory_mib, binding.compute_percent, binding.compute_limit_percent) == (4096, 30, 60)
        assert body["endpoint"] == claim.endpoint == f"unix:/run/{body['uuid']}/cuda.sock"
        assert body["token"] == f"token of {body['uuid']}"
        assert body["binding"] == binding.label == f"run-{PID}/gpu0#1"
        assert it.places.left == {claim.key.domain: GID}

    run(story)


def test_the_claim_goes_with_its_process_while_libvirt_is_away() -> None:
    async def story(it: Runner) -> None:
        it.pool.host.libvirt_up = False
        await it.runs.start(ASKED, PEER)
        await it.pool.clock.sleep(20.0)
        assert len((await it.pool.rows()).bindings) == 1
        it.processes.end(PID)
        await it.pool.until(nothing_left, 3.0)
        assert not it.pool.host.relays
        assert not it.pool.host.workers

    run(story)


def test_another_process_with_its_pid_does_not_keep_it() -> None:
    async def story(it: Runner) -> None:
        await it.runs.start(ASKED, PEER)
        it.processes.end(PID)
        it.processes.start(PID)
        await it.pool.until(nothing_left, 10.0)

    run(story)


def test_a_process_that_ends_while_it_asks_leaves_nothing() -> None:
    async def story(it: Runner) -> None:
        for card in it.pool.host.cards.values():
            card.condition = Condition.HUNG  # workers do not come
        asking = asyncio.create_task(it.runs.start(ASKED, PEER))
        await it.pool.until(lambda rows: bool(rows.attempts))
        it.processes.end(PID)
        with pytest.raises(KvmpoolError):
            await asking
        for card in it.pool.host.cards.values():
            card.condition = Condition.FINE
        await it.pool.until(nothing_left)

    run(story)


def test_no_capacity_names_each_card_and_what_comes_next_and_leaves_nothing() -> None:
    async def story(it: Runner) -> None:
        with pytest.raises(NoCapacity) as refused:
            await it.runs.start({"memory": "100GiB"}, PEER)
        line = str(refused.value)
        cards = (await it.pool.rows()).cards.values()
        assert cards
        for card in cards:
            assert f"{card.label}: " in line
        assert line.endswith(". Next: kvmpool card list")
        assert line.count("Next:") == 1
        await it.pool.until(nothing_left)

    run(story)


def test_a_name_that_is_in_use_is_refused_and_free_again_afterwards() -> None:
    async def story(it: Runner) -> None:
        it.processes.start(PID + 1)
        await it.runs.start(ASKED | {"name": "job"}, PEER)
        with pytest.raises(Refused, match="the name job is taken"):
            await it.runs.start(ASKED | {"name": "job"}, Peer(PID + 1, UID, GID))
        it.processes.end(PID)
        await it.pool.until(nothing_left)
        assert (await it.runs.start(ASKED | {"name": "job"}, Peer(PID + 1, UID, GID)))["name"] == "job"

    run(story)


def test_who_cannot_be_seen_is_refused() -> None:
    async def story(it: Runner) -> None:
        with pytest.raises(Refused, match="another pid namespace"):
            await it.runs.start(ASKED, Peer(0, UID, GID))

    run(story)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, "memory is missing"),
        ({"memory": "much"}, "memory="),
        ({"memory": "4GiB", "compute": "101"}, "compute="),
        ({"memory": "4GiB", "mode": "passthrough"}, "no attribute 'mode'"),
        ({"memory": "4GiB", "required": "no"}, "no attribute 'required'"),
        ({"memory": "4GiB", "name": "A"}, "is no name for a run"),
        ({"memory": "4GiB", "name": "a/b#1"}, "is no name for a run"),
    ],
)
def test_what_is_asked_wrongly_is_refused_before_anything_is_written(asked: dict[str, str], words: str) -> None:
    async def story(it: Runner) -> None:
        with pytest.raises(ClaimInvalid, match=words) as refused:
            await it.runs.start(asked, PEER)
        assert "domain" not in str(refused.value)
        assert nothing_left(await it.pool.rows())

    run(story)

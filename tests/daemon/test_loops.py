"""The three loops together over one simulated host: the walk of a claim, and what failures make of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvmpool.core import breaker
from kvmpool.core.model import (
    Binding,
    BootId,
    CardId,
    CardSeen,
    ClaimKey,
    DomainSeen,
    DomainUuid,
    Generation,
    OnFailure,
    Phase,
    ProbeSignal,
    RelaySeen,
    Verdict,
    WorkerSeen,
)
from kvmpool.core.xid import CATALOGUE, XidClass
from kvmpool.daemon.ledger import Change
from kvmpool.errors import Unreachable
from kvmpool.ports import Put
from kvmpool.sim.world import Condition, SimDomain
from tests.daemon.pool import GPU0, VGPU, VM0, Pool

APP = sorted(code for code, xid in CATALOGUE.items() if xid.kind is XidClass.APP)


def story(tell: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run an async test from its first line to its last."""

    def run() -> None:
        asyncio.run(tell())

    run.__name__, run.__doc__ = tell.__name__, tell.__doc__
    return run


async def nothing_is_left(pool: Pool) -> None:
    rows = await pool.rows()
    assert (rows.claims, rows.attempts, rows.bindings) == ({}, {}, {})
    assert (pool.host.workers, pool.host.relays) == ({}, {})


# --- the walk ---------------------------------------------------------------------------------------------------------


@story
async def test_a_prepared_claim_is_bound_started_ready_and_pointed() -> None:
    pool = Pool()
    await pool.settle()
    await pool.prepare()
    await pool.settle()
    held = await pool.served_by()
    assert held.label == "vm0/gpu0#1"
    rows = await pool.rows()
    assert not rows.attempts[VM0].started
    assert rows.hosts["h0"].up  # type: ignore[index]
    assert {card.health.verdict for card in rows.cards.values()} == {Verdict.HEALTHY}


@story
async def test_a_stopped_domain_leaves_nothing_behind() -> None:
    pool = Pool()
    await pool.settle()
    await pool.start_domain()
    assert (await pool.rows()).attempts[VM0].started
    pool.stop_domain()
    await pool.settle()
    await nothing_is_left(pool)


@story
async def test_a_prepare_that_is_never_followed_is_withdrawn_after_its_deadline() -> None:
    pool = Pool()
    await pool.prepare()
    await pool.run_for(55, step_s=5)
    await pool.served_by()
    await pool.run_for(10, step_s=5)
    await nothing_is_left(pool)


@story
async def test_a_second_start_is_served_with_a_new_generation() -> None:
    pool = Pool()
    await pool.settle()
    await pool.start_domain()
    pool.stop_domain()
    await pool.settle()
    await pool.start_domain()
    assert (await pool.served_by()).generation == 2


@story
async def test_every_change_of_state_is_told_once_with_its_reason() -> None:
    pool = Pool()
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign, assignment]
    events = logging.getLogger("kvmpool.events")
    events.addHandler(handler)
    events.setLevel(logging.INFO)
    try:
        await pool.settle()
        await pool.start_domain()
    finally:
        events.removeHandler(handler)
    told = [record.getMessage() for record in records]
    about = [line for line in told if line.startswith("vm0/gpu0#1:")]
    assert about == [
        "vm0/gpu0#1: bound (on h0/0000:41:00.0)",
        "vm0/gpu0#1: ready (on h0/0000:41:00.0)",
        f"vm0/gpu0#1: served (its relay points there ({pool.host.relays[VM0].endpoint}))",
    ]
    items, _ = await pool.store.list("/event/")
    assert len([item for item in items if b"vm0/gpu0#1" in item.value]) == 3


# --- cards fail -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [79, 64, 48, 95, 119])
def test_a_failed_card_is_replaced_at_the_same_endpoint(code: int) -> None:
    async def tell() -> None:
        pool = Pool()
        await pool.settle()
        await pool.start_domain()
        before, endpoint = await pool.served_by(), pool.host.relays[VM0].endpoint
        pool.xid(before.card, code)
        await pool.settle()
        after = await pool.served_by()
        assert (after.generation, after.card) == (2, pool.card_ids[1])
        assert pool.host.relays[VM0].endpoint == endpoint
        rows = await pool.rows()
        assert list(rows.bindings) == [(GPU0, 2)]
        assert rows.cards[before.card].health.verdict is Verdict.QUARANTINED
        assert list(pool.host.workers) == [(GPU0, 2)]

    asyncio.run(tell())


@story
async def test_no_application_error_ever_moves_a_binding() -> None:
    pool = Pool()
    await pool.settle()
    await pool.start_domain()
    before = await pool.served_by()
    for code in APP:
        pool.xid(before.card, code)
        await pool.settle()
    assert await pool.served_by() == before
    health = pool.card.health[before.card]
    assert (health.verdict, health.app_xids) == (Verdict.HEALTHY, 63)


@story
async def test_a_card_that_leaves_the_bus_without_a_word_is_found_within_two_seconds() -> None:
    pool = Pool()
    await pool.settle()
    await pool.start_domain()
    before = await pool.served_by()
    pool.host.cards[before.card].condition = Condition.GONE
    await pool.run_for(2.0)
    assert (await pool.served_by()).generation == 2


@story
async def test_a_card_that_reads_all_ones_is_replaced_and_its_loss_is_hard() -> None:
    pool = Pool()
    await pool.settle()
    await pool.start_domain()
    before = await pool.served_by()
    pool.host.cards[before.card].condition = Condition.LOST
    await pool.run_for(3.0, step_s=0.25)
    assert (await pool.served_by()).generation == 2
    health = (await pool.rows()).cards[before.card].health
    assert health.hard
    assert health.fatal


@story
async def test_a_hung_card_is_replaced_and_its_memory_stays_taken_until_its_worker_is_gone() -> None:
    pool = Pool()
    await pool.settle()
    await pool.start_domain()
    before = await pool.served_by()
    pool.host.cards[before.card].condition = Condition.HUNG
    await pool.run_for(15.0)
    assert (await pool.served_by()).generation == 2
    rows = await pool.rows()
    assert rows.bindings[(GPU0, before.generation)].phase is Phase.RELEASING
    assert rows.cards[before.card].health.verdict is Verdict.FAILED  # held: not yet quarantined
    pool.host.cards[before.card].condition = Condition.FINE
    await pool.run_for(200.0, step_s=5)
    assert list((await pool.rows()).bindings) == [(GPU0, 2)]


@story
async def test_a_card_of_which_nothing_can_be_read_keeps_its_binding_and_gets_no_other() -> None:
    pool = Pool(cards=1)
    await pool.settle()
    await pool.start_domain()
    before = await pool.served_by()
    pool.host.cards[before.card].condition = Condition.MUTE
    await pool.run_for(1.5)
    assert pool.card.health[before.card].verdict in (Verdict.UNKNOWN, Verdict.SUSPECT)
    await pool.prepare(VGPU, DomainUuid("00000000-0000-4000-8000-000000000002"), "vm1")
    await pool.settle()
    assert (await pool.served_by()).generation == before.generation
    assert "vm1/gpu0" in [wait.label for wait in pool.cluster.waits.values()]


@story
async def test_without_another_card_the_claim_waits_and_is_served_when_one_comes_back() -> None:
    pool = Pool(cards=1)
    await pool.settle()
    await pool.start_domain()
    card = pool.card_ids[0]
    pool.xid(card, 79)
    await pool.settle()
    (wait,) = pool.cluster.waits.values()
    assert "Xid 79" in wait.reason
    assert pool.host.relays[VM0].points == {}
    assert (await pool.rows()).claims[GPU0].pointed is None
    await pool.wish(card, restore=1)
    await pool.run_for(620, step_s=5)
    assert (await pool.served_by()).generation == 2


@story
async def test_on_failure_none_loses_its_card_for_good() -> None:
    pool = Pool()
    await pool.settle()
    await pool.start_domain(replace(VGPU, on_failure=OnFailure.NONE))
    pool.xid(pool.card_ids[0], 79)
    await pool.run_for(10)
    rows = await pool.rows()
    assert rows.bindings == {}
    assert GPU0 in rows.claims


@story
async def test_a_storm_of_soft_failures_opens_the_breaker_and_a_person_closes_it() -> None:
    pool = Pool(cards=8)
    await pool.settle()
    domains = [DomainUuid(f"00000000-0000-4000-8000-{n:012d}") for n in range(5)]
    for n, domain in enumerate(domains):
        await pool.start_domain(replace(VGPU, memory_mib=16384, memory_limit_mib=16384), domain, f"vm{n}")
    held = {key: binding.card for (key, _), binding in (await pool.rows()).bindings.items()}
    for card in held.values():
        pool.xid(card, 95)
    await pool.settle()
    rows = await pool.rows()
    assert "cards on h0 failed within 60 s" in rows.breaker.open_reason
    unmoved = [key for (key, _), each in rows.bindings.items() if each.card == held[key]]
    assert len(unmoved) == 3
    page = await pool.ledger.read()
    await pool.ledger.commit(page, Change(puts=[breaker.closed(rows.breaker, rows.cards.values(), pool.clock.now())]))
    await pool.settle()
    rows = await pool.rows()
    unmoved = [key for (key, _), each in rows.bindings.items() if each.card == held[key]]
    assert unmoved == []  # he has looked at all five: none of them opens it again
    assert rows.breaker.open_reason == ""
    assert len(rows.bindings) == 3  # there were three free cards


# --- processes die ----------------------------------------------------------------------------------------------------


@story
async def test_a_worker_that_dies_is_replaced() -> None:
    pool = Pool()
    await pool.settle()
    await pool.start_domain()
    pool.world.end_worker(pool.host, (GPU0, Generation(1)))
    await pool.run_for(6)
    assert (await pool.served_by()).generation == 2


@story
async def test_a_worker_that_always_dies_is_not_replaced_without_end() -> None:
    pool = Pool()
    await pool.settle()
    await pool.start_domain()
    for _ in range(10):
        for key in list(pool.host.workers):
            pool.world.end_worker(pool.host, key)
        await pool.run_for(5, step_s=2.5)
    assert (await pool.rows()).counter <= 4
    (wait,) = pool.cluster.waits.values()
    assert "workers broke within" in wait.reason
    await pool.run_for(60, step_s=5)
    await pool.served_by()


@story
async def test_a_relay_that_dies_is_opened_again_at_the_same_endpoint() -> None:
    pool = Pool()
    await pool.settle()
    await pool.start_domain()
    endpoint = pool.host.relays[VM0].endpoint
    pool.world.end_relay(pool.host, VM0)
    await pool.run_for(6)
    assert pool.host.relays[VM0].endpoint == endpoint
    await pool.served_by()


@story
async def test_a_new_daemon_adopts_what_runs() -> None:
    pool = Pool()
    await pool.settle()
    await pool.start_domain()
    before, worker, relay = await pool.served_by(), dict(pool.host.workers), dict(pool.host.relays)
    await pool.restart()
    pool.world.advance(600)
    await pool.settle()
    assert await pool.served_by() == before
    assert pool.host.workers == worker
    assert pool.host.relays == relay


@story
async def test_a_card_that_failed_while_no_daemon_ran_is_found_by_the_next() -> None:
    pool = Pool()
    await pool.settle()
    await pool.start_domain()
    pool.host.cards[pool.card_ids[0]].condition = Condition.GONE
    await pool.restart()
    await pool.settle()
    assert (await pool.served_by()).generation == 2


@story
async def test_a_domain_that_stopped_while_no_daemon_ran_is_withdrawn_by_the_next() -> None:
    pool = Pool()
    await pool.settle()
    await pool.start_domain()
    pool.host.domains[VM0].running = False
    await pool.restart()
    await pool.settle()
    await nothing_is_left(pool)


@story
async def test_while_libvirt_is_away_everything_stays_and_failover_goes_on() -> None:
    pool = Pool()
    await pool.settle()
    await pool.start_domain()
    pool.host.libvirt_up = False
    await pool.run_for(10)
    assert pool.domain.hypervisor_fault
    pool.xid(pool.card_ids[0], 79)
    await pool.settle()
    assert (await pool.served_by()).generation == 2
    pool.host.libvirt_up = True
    await pool.run_for(5)
    assert pool.domain.hypervisor_fault == ""
    await pool.served_by()


@story
async def test_a_reboot_withdraws_what_ran_and_validates_what_had_failed() -> None:
    pool = Pool()
    await pool.settle()
    await pool.start_domain()
    pool.xid(pool.card_ids[0], 79)
    await pool.settle()
    pool.host.boot += 1
    pool.host.workers.clear()
    pool.host.relays.clear()
    pool.host.domains[VM0].running = False
    await pool.restart()
    await pool.settle()
    await nothing_is_left(pool)
    rows = await pool.rows()
    assert rows.hosts["h0"].boot_id == BootId("h0-boot-2")  # type: ignore[index]
    assert rows.cards[pool.card_ids[0]].health.verdict is Verdict.RESETTING
    await pool.run_for(5)
    assert pool.card.health[pool.card_ids[0]].verdict is Verdict.PROBATION
    assert pool.card.health[pool.card_ids[1]].verdict is Verdict.HEALTHY


@story
async def test_a_worker_whose_row_is_gone_is_stopped() -> None:
    pool = Pool()
    await pool.settle()
    await pool.start_domain()
    page = await pool.ledger.read()
    keys = [key for key in page.revisions if key.startswith("/binding/")]
    await pool.ledger.commit(page, Change(deletes=keys))
    await pool.settle()
    assert list(pool.host.workers) == [(GPU0, 2)]


@story
async def test_a_worker_whose_row_became_unreadable_is_left_alone() -> None:
    pool = Pool()
    await pool.settle()
    await pool.start_domain()
    key = next(iter([key for key in (await pool.ledger.read()).revisions if key.startswith("/binding/")]))
    await pool.store.commit("test", puts=[Put(key, b'{"v": 99}')])
    await pool.run_for(2)
    pool.xid(pool.card_ids[0], 79)
    await pool.settle()
    assert list(pool.host.workers) == [(GPU0, 1)]
    assert pool.host.relays[VM0].points["gpu0"][0] == 1
    assert (await pool.rows()).bindings == {}
    await pool.prepare(VGPU, DomainUuid("00000000-0000-4000-8000-000000000002"), "vm1")
    await pool.settle()
    reasons = {wait.label: wait.reason for wait in pool.cluster.waits.values()}
    assert "keeps what it has" in reasons["vm0/gpu0"]
    assert "what is free is not known" in reasons["vm1/gpu0"]


@pytest.mark.parametrize("kind", ["claim", "attempt", "card", "host", "wish/card", "counter", "breaker"])
def test_no_unreadable_row_ends_a_running_session_or_the_loops(kind: str) -> None:
    async def tell() -> None:
        pool = Pool()
        await pool.settle()
        await pool.start_domain()
        page = await pool.ledger.read()
        key = next((key for key in page.revisions if key.startswith(f"/{kind}/")), f"/{kind}")
        if kind == "wish/card":
            key = f"/wish/card/{pool.card_ids[1]}"
        await pool.store.commit("test", puts=[Put(key, b'{"v": 99}')])
        await pool.run_for(10)
        assert list(pool.host.workers) == [(GPU0, 1)]
        assert pool.host.relays[VM0].points["gpu0"][0] == 1
        pool.xid(pool.card_ids[0], 79)
        await pool.settle()
        item = await pool.store.get(key)
        assert item is not None
        assert item.value == b'{"v": 99}', "a row that cannot be read is never written over"

    asyncio.run(tell())


# --- wishes -----------------------------------------------------------------------------------------------------------


@story
async def test_a_drained_card_is_left_and_a_cordoned_one_is_not() -> None:
    pool = Pool()
    await pool.settle()
    await pool.start_domain()
    first, second = pool.card_ids
    await pool.wish(first, cordoned=True)
    await pool.settle()
    assert (await pool.served_by()).card == first
    await pool.wish(first, drain=True)
    await pool.settle()
    assert (await pool.served_by()).card == second


@story
async def test_several_claims_and_domains_are_served_at_once() -> None:
    pool = Pool()
    await pool.settle()
    keys = []
    for n in range(6):
        domain = DomainUuid(f"00000000-0000-4000-8000-{n:012d}")
        await pool.prepare(VGPU, domain, f"vm{n}")
        keys.append(ClaimKey(domain, "gpu0"))
    await pool.settle()
    cards = [(await pool.served_by(key)).card for key in keys]
    assert {cards.count(card) for card in pool.card_ids} == {4, 2}


# --- slow and lying ports ---------------------------------------------------------------------------------------------


@story
async def test_a_binding_released_while_its_worker_is_being_started_is_not_forgotten_before_that_ends() -> None:
    pool = Pool(cards=1)
    await pool.settle()
    gate, start = asyncio.Event(), pool.card._workers.start

    async def slow(binding: Binding) -> WorkerSeen:
        await gate.wait()
        return await start(binding)

    pool.card._workers.start = slow  # type: ignore[method-assign]
    await pool.prepare()
    await pool.settle()
    page = await pool.ledger.read()
    keys = [key for key in page.revisions if key.startswith(("/claim/", "/attempt/"))]
    await pool.ledger.commit(page, Change(deletes=keys))
    await pool.settle()
    rows = await pool.rows()
    assert [each.phase for each in rows.bindings.values()] == [Phase.RELEASING]
    gate.set()
    await pool.settle()
    assert (await pool.rows()).bindings == {}
    assert pool.host.workers == {}


@story
async def test_a_start_that_hangs_holds_up_no_other_claim() -> None:
    pool = Pool()
    await pool.settle()
    start = pool.card._workers.start

    async def hangs_for_vm1(binding: Binding) -> WorkerSeen:
        if binding.domain_name == "vm1":
            await asyncio.Event().wait()
        return await start(binding)

    pool.card._workers.start = hangs_for_vm1  # type: ignore[method-assign]
    await pool.prepare(VGPU, DomainUuid("00000000-0000-4000-8000-000000000002"), "vm1")
    await pool.settle()
    await pool.start_domain()
    await pool.served_by()
    pool.xid(pool.card_ids[0], 79)
    await pool.settle()
    assert (await pool.served_by()).generation == 4
    await pool.card.close()


@story
async def test_a_worker_that_cannot_be_started_is_tried_again_and_then_its_card_is_left() -> None:
    pool = Pool()
    await pool.settle()
    start, tries = pool.card._workers.start, 0

    async def broken(binding: Binding) -> WorkerSeen:
        nonlocal tries
        if binding.card == pool.card_ids[0]:
            tries += 1
            raise Unreachable("no such program")
        return await start(binding)

    pool.card._workers.start = broken  # type: ignore[method-assign]
    await pool.prepare()
    await pool.run_for(3, step_s=0.1)
    assert tries == 3
    held = await pool.served_by()
    assert (held.generation, held.card) == (2, pool.card_ids[1])


@story
async def test_a_card_whose_inventory_and_probe_disagree_stays_unknown() -> None:
    pool = Pool()
    await pool.settle()
    inventory = pool.card._watch._cards.inventory

    async def lies() -> tuple[CardSeen, ...]:
        first, *others = await inventory()
        return (replace(first, fault="sysfs: vendor is 0xffff"), *others)

    pool.card._watch._cards.inventory = lies  # type: ignore[method-assign]
    await pool.run_for(10)
    healths = pool.card.health
    assert healths[pool.card_ids[0]].verdict is Verdict.UNKNOWN
    assert healths[pool.card_ids[1]].verdict is Verdict.HEALTHY


@story
async def test_while_nothing_can_be_read_every_card_is_unknown_and_no_session_ends() -> None:
    pool = Pool()
    await pool.settle()
    await pool.start_domain()
    before = await pool.served_by()

    async def away() -> tuple[CardSeen, ...]:
        raise Unreachable("NVML: driver/library version mismatch")

    async def no_probe(card: CardId, deadline_s: float) -> ProbeSignal:
        raise Unreachable("NVML: driver/library version mismatch")

    pool.card._watch._cards.inventory = away  # type: ignore[method-assign]
    pool.card._watch._cards.probe = no_probe  # type: ignore[method-assign]
    await pool.run_for(30)
    assert {health.verdict for health in pool.card.health.values()} == {Verdict.UNKNOWN}
    assert await pool.served_by() == before


@story
async def test_while_workers_cannot_be_listed_verdicts_are_published_and_no_binding_is_called_broken() -> None:
    pool = Pool()
    await pool.settle()
    await pool.start_domain()
    listing = pool.card._workers.list

    async def away() -> tuple[WorkerSeen, ...]:
        raise Unreachable("run dir is not readable")

    pool.card._workers.list = away  # type: ignore[method-assign]
    await pool.run_for(3)
    assert [each.phase for each in (await pool.rows()).bindings.values()] == [Phase.READY]
    pool.xid(pool.card_ids[1], 79)
    await pool.settle()
    assert (await pool.rows()).cards[pool.card_ids[1]].health.verdict is not Verdict.HEALTHY
    pool.card._workers.list = listing  # type: ignore[method-assign]
    await pool.run_for(2)
    await pool.served_by()


@story
async def test_a_relay_that_does_not_answer_is_tried_again_and_holds_up_no_other_domain() -> None:
    pool = Pool()
    await pool.settle()
    relays = pool.domain._relays
    opening, refused = relays.open, 0

    async def flaky(
        domain: DomainUuid, domain_name: str, claims: Sequence[str], endpoint: str, shared_mib: int = 0
    ) -> RelaySeen:
        nonlocal refused
        if domain_name == "vm1" and refused < 3:
            refused += 1
            raise Unreachable("relay of vm1 does not answer")
        return await opening(domain, domain_name, claims, endpoint, shared_mib)

    relays.open = flaky  # type: ignore[method-assign]
    other = DomainUuid("00000000-0000-4000-8000-000000000002")
    await pool.prepare(VGPU, other, "vm1")
    await pool.prepare()
    await pool.settle()
    await pool.served_by()
    assert refused == 1, "it is tried again later, not at once"
    await pool.run_for(3, step_s=0.25)
    await pool.served_by(ClaimKey(other, "gpu0"))


@story
async def test_a_list_of_domains_that_is_held_up_by_a_hook_holds_up_nothing() -> None:
    pool = Pool()
    await pool.settle()
    held, domains = asyncio.Event(), pool.domain._hypervisor.domains

    async def waits() -> tuple[DomainSeen, ...]:
        await held.wait()
        return await domains()

    pool.domain._hypervisor.domains = waits  # type: ignore[method-assign]
    pool.world.advance(3)
    await pool.settle()
    await pool.prepare()
    await pool.settle()
    await pool.served_by()
    assert not (await pool.rows()).attempts[VM0].started
    held.set()
    pool.host.domains[VM0] = SimDomain(VM0, "vm0", (VGPU,), running=True)
    await pool.run_for(3)
    assert (await pool.rows()).attempts[VM0].started

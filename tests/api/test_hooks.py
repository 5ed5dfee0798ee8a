"""Hook calls against the real loops over a simulated host: what a start gets, and that a failed one leaves nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvmpool.core.model import Phase, Rows
from kvmpool.errors import ClaimInvalid, DeadlinePassed, NoCapacity, NotFound, Refused, StoreUnreachable
from kvmpool.sim.world import Condition
from kvmpool.virt.domain_xml import claims_of
from tests.api.pool import KEY, ONE, SETTINGS, SPEED, UUID, Pool, run, xml


def nothing_left(rows: Rows) -> bool:
    return not (rows.claims or rows.attempts or rows.bindings)


def test_a_start_is_let_through_when_worker_and_relay_serve_it() -> None:
    async def story(pool: Pool) -> None:
        await pool.call("prepare")
        rows = await pool.rows()
        [binding] = rows.bindings.values()
        assert binding.phase is Phase.READY
        assert rows.claims[KEY].pointed == binding.generation
        assert rows.claims[KEY].endpoint
        assert len(pool.host.workers) == len(pool.host.relays) == 1
        await pool.call("start")
        pool.define(running=True)
        await pool.call("started")
        await pool.until(lambda rows: rows.attempts[UUID].started)
        pool.define(running=False)
        for op in ("stopped", "release"):
            await pool.call(op)
        await pool.until(nothing_left)
        assert not pool.host.workers
        assert not pool.host.relays

    run(story)


def test_a_prepare_never_waits_for_libvirt() -> None:
    """libvirt holds the domain's lock, and with it every list of domains, until the hook has answered."""

    async def story(pool: Pool) -> None:
        async def held() -> object:
            return await asyncio.Event().wait()

        pool.hypervisor.domains = held  # type: ignore[method-assign,assignment]
        pool.domain.refresh()
        await asyncio.sleep(0.05)
        await pool.call("prepare")
        assert (await pool.rows()).claims[KEY].pointed

    run(story)


def test_no_capacity_names_each_cards_first_failing_predicate_and_leaves_nothing() -> None:
    async def story(pool: Pool) -> None:
        big = xml('name="gpu0" mode="vgpu" memory="64" priority="7"', 'name="gpu1" mode="vgpu" memory="99999"')
        with pytest.raises(NoCapacity) as refused:
            await pool.call("prepare", big)
        line = str(refused.value)
        assert line.startswith("vm0/gpu1: no card can serve 99999 MiB (2 cards; h0/0000:41:00.0: ")
        assert "h0/0000:42:00.0: " in line
        assert line.endswith("Next: kvmpool explain vm0/gpu1")
        await pool.until(nothing_left)
        assert not pool.host.workers
        await pool.until(lambda _: not pool.host.relays)

    run(story)


def test_a_pool_without_cards_refuses_at_the_deadline() -> None:
    async def story(pool: Pool) -> None:
        begun = pool.world.now
        with pytest.raises(DeadlinePassed, match="the pool has no cards"):
            await pool.call("prepare")
        assert pool.world.now - begun < SETTINGS.prepare_deadline_s + 2
        await pool.until(nothing_left)

    run(story, cards=0)


def test_a_worker_that_does_not_come_up_refuses_the_start_and_is_told() -> None:
    async def story(pool: Pool) -> None:
        async def hangs(*_: object) -> object:
            return await asyncio.Event().wait()

        pool.sim_workers.start = hangs  # type: ignore[method-assign,assignment]
        with pytest.raises(DeadlinePassed, match=r"vm0/gpu0#\d+ on h0/0000:4[12]:00.0 is still preparing"):
            await pool.call("prepare")
        rows = await pool.until(lambda rows: not rows.claims)
        assert not rows.attempts

    run(story)


def test_a_paused_pool_refuses_with_what_it_would_do() -> None:
    async def story(pool: Pool) -> None:
        with pytest.raises(DeadlinePassed, match="the pool is paused; it would bind"):
            await pool.call("prepare")
        await pool.until(nothing_left)

    run(story, settings=replace(SETTINGS, paused=True))


def test_capacity_that_is_being_freed_is_waited_for() -> None:
    async def story(pool: Pool) -> None:
        whole = 'name="gpu0" mode="vgpu" memory="16384"'
        first, second = xml(whole, name="a", uuid=UUID[:-1] + "2"), xml(whole)
        pool.define(first, running=True)
        await pool.call("prepare", first, "a")
        await pool.until(lambda rows: rows.attempts[claims_of(first).uuid].started)
        with pytest.raises(NoCapacity):
            await pool.call("prepare", second)
        prepared = asyncio.create_task(pool.call("prepare", second))
        await asyncio.sleep(0.05)
        pool.define(first, running=False)
        pool.domain.refresh()
        await prepared

    run(story, cards=1)


def test_a_card_that_dies_between_prepare_and_start_is_replaced_before_the_domain_starts() -> None:
    async def story(pool: Pool) -> None:
        await pool.call("prepare")
        [binding] = (await pool.rows()).bindings.values()
        pool.host.cards[binding.card].condition = Condition.GONE
        pool.host.workers.clear()
        await pool.until(lambda rows: rows.cards[binding.card].health.verdict.value != "healthy")
        await pool.call("start")
        claim = (await pool.rows()).claims[KEY]
        assert claim.pointed is not None
        assert claim.pointed > binding.generation

    run(story)


def test_a_domain_that_never_runs_is_withdrawn_by_release_at_once_or_by_its_deadline() -> None:
    async def story(pool: Pool) -> None:
        pool.define(running=False)
        await pool.call("prepare")
        begun = pool.world.now
        await pool.call("release")
        await pool.until(nothing_left)
        assert pool.world.now - begun < 10
        await pool.call("prepare")  # and now libvirtd is killed: no stopped, no release
        await pool.until(nothing_left, 90)

    run(story)


def test_while_libvirt_is_away_nothing_is_concluded() -> None:
    async def story(pool: Pool) -> None:
        pool.host.libvirt_up = False
        await pool.call("prepare")
        await asyncio.sleep(100 / SPEED)
        assert KEY in (await pool.rows()).claims
        assert pool.host.workers
        pool.define(running=False)
        pool.host.libvirt_up = True
        await pool.until(nothing_left)

    run(story)


def test_a_second_start_replaces_what_the_first_left_and_keeps_its_endpoint() -> None:
    async def story(pool: Pool) -> None:
        two = xml('name="gpu0" mode="vgpu" memory="4096"', 'name="old" mode="vgpu" memory="64"')
        await pool.call("prepare", two)
        before = await pool.rows()
        await pool.call("prepare", xml('name="gpu0" mode="vgpu" memory="8192"'))
        after = await pool.until(lambda rows: len(rows.bindings) == 1)
        assert set(after.claims) == {KEY}
        assert after.claims[KEY].endpoint == before.claims[KEY].endpoint
        assert after.attempts[UUID].counter > before.attempts[UUID].counter
        [binding] = after.bindings.values()
        assert (binding.memory_mib, binding.phase) == (8192, Phase.READY)

    run(story)


def test_a_call_that_is_cut_off_takes_its_rows_back() -> None:
    async def story(pool: Pool) -> None:
        pool.sim_workers.start = lambda *_: asyncio.Event().wait()  # type: ignore[method-assign,assignment]
        call = asyncio.create_task(pool.call("prepare"))
        await pool.until(lambda rows: KEY in rows.claims)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        rows = await pool.rows()
        assert not rows.claims
        assert not rows.attempts

    run(story)


def test_a_store_that_goes_away_refuses_the_start_and_the_deadline_cleans_up() -> None:
    async def story(pool: Pool) -> None:
        pool.sim_workers.start = lambda *_: asyncio.Event().wait()  # type: ignore[method-assign,assignment]
        pool.define(running=False)
        real, away = pool.store.list, False

        async def listing(prefix: str) -> object:
            if away:
                raise StoreUnreachable("the store is away")
            return await real(prefix)

        pool.store.list = listing  # type: ignore[method-assign,assignment]
        call = asyncio.create_task(pool.call("prepare"))
        await pool.until(lambda rows: KEY in rows.claims)
        away = True
        with pytest.raises(StoreUnreachable):
            await call
        away = False
        await pool.until(lambda rows: not rows.claims and not rows.attempts)

    run(story)


@pytest.mark.parametrize(
    ("claim", "told"),
    [
        ('name="gpu0" mode="any" order="passthrough vgpu"', "needs memory"),
        ('name="gpu0" mode="vgpu" memory="64" count="2"', 'count="2" is not supported yet'),
        ('name="gpu0" mode="vgpu"', "memory"),
        ('name="gpu0" mode="vgpu" memory="-1"', "memory"),
        ('name="GPU" mode="vgpu" memory="64"', "name"),
        ('name="gpu0" mode="vgpu" memory="64" colour="red"', "colour"),
    ],
)
@pytest.mark.parametrize("op", ["prepare", "start", "restore"])
def test_a_claim_that_cannot_be_is_refused_at_once_with_one_line(op: str, claim: str, told: str) -> None:
    async def story(pool: Pool) -> None:
        with pytest.raises(Refused) as refused:
            await pool.call(op, xml(claim))
        assert told in str(refused.value)
        assert "\n" not in str(refused.value)
        assert nothing_left(await pool.rows())

    run(story)


def test_an_optional_claim_stops_no_start() -> None:
    async def story(pool: Pool) -> None:
        await pool.call("prepare", xml('name="gpu0" mode="passthrough" hold="process" required="no"'))
        assert nothing_left(await pool.rows())
        optional = 'name="gpu0" mode="vgpu" memory="99999" required="no"'
        await pool.call("prepare", xml(optional, 'name="gpu1" mode="vgpu" memory="64"'))
        rows = await pool.rows()
        assert [binding.claim.name for binding in rows.bindings.values()] == ["gpu1"]
        await pool.call("start", xml(optional))

    run(story)


def test_the_other_calls_do_what_they_say() -> None:
    async def story(pool: Pool) -> None:
        foreign = xml()
        for op in ("prepare", "start", "migrate", "restore", "started", "reconnect", "stopped", "release"):
            await pool.call(op, foreign)
        with pytest.raises(Refused, match="live migration .* is not supported yet"):
            await pool.call("migrate")
        with pytest.raises(Refused, match="its prepare has expired"):
            await pool.call("start")
        with pytest.raises(ClaimInvalid, match="called for domain 'other'"):
            await pool.call("prepare", ONE, "other")
        with pytest.raises(NotFound):
            await pool.call("attach")
        await pool.call("restore")
        for op in ("reconnect", "started", "stopped", "release"):
            await pool.call(op)
        assert nothing_left(await pool.rows())

    run(story)


def test_two_prepares_of_one_domain_at_once_are_not_both_let_in() -> None:
    async def story(pool: Pool) -> None:
        first = asyncio.create_task(pool.call("prepare"))
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="another start"):
            await pool.call("prepare")
        await first

    run(story)


def test_ten_domains_that_start_at_once_are_all_served() -> None:
    async def story(pool: Pool) -> None:
        texts = {
            f"vm{n}": xml('name="gpu0" mode="vgpu" memory="1024"', name=f"vm{n}", uuid=f"{UUID[:-1]}{n:x}")
            for n in range(10)
        }
        await asyncio.gather(*(pool.call("prepare", text, name) for name, text in texts.items()))
        rows = await pool.rows()
        assert len({binding.generation for binding in rows.bindings.values()}) == 10
        assert len({claim.sequence for claim in rows.claims.values()}) == 10

    run(story)

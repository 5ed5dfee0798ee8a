"""What people read of a pool that runs: every state of a claim, the reasons, the wishes they may make."""

from __future__ import annotations

import asyncio
from typing import get_type_hints

import pytest

from kvmpool.api import shapes
from kvmpool.api.resources import Cordon
from kvmpool.core.model import Breaker, CardId, DomainSeen, Verdict
from kvmpool.daemon.ledger import Change
from kvmpool.errors import ClaimInvalid, NotFound, Refused
from kvmpool.ports import Put
from kvmpool.sim.world import Condition
from tests.api.pool import KEY, UUID, Pool, run, xml


def test_a_served_claim_is_read_the_same_in_every_resource() -> None:
    async def story(pool: Pool) -> None:
        pool.define(running=True)
        await pool.call("prepare")
        await pool.until(lambda rows: rows.attempts[UUID].started)
        read = pool.resources
        claim = await read.claim("vm0", "gpu0")
        assert (claim["state"], claim["reason"]) == ("served", "")
        binding = await read.binding(claim["binding"])
        assert binding == await read.binding("vm0/gpu0")
        assert binding["pointed"]
        assert binding["worker_pid"] > 0
        assert binding["endpoint"] == claim["endpoint"] != ""
        card = await read.card(binding["card"])
        assert card["bindings"] == [binding["label"]]
        assert card["memory_taken_mib"] == binding["memory_mib"] == 4096
        [host] = await read.hosts()
        assert (host["state"], host["cards"], host["cards_healthy"], host["bindings"]) == ("up", 2, 2, 1)
        status = await read.status()
        assert status["claims"] == [claim]
        assert (status["libvirt"], status["nvml"], status["faults"]) == ("connected", "ok", [])
        assert [domain["name"] for domain in await read.domains()] == ["vm0"]
        assert 'kvmpool_claims{state="served"} 1' in await read.metrics()
        for body, shape in ((claim, shapes.ClaimBody), (binding, shapes.BindingBody), (card, shapes.CardBody)):
            assert set(body) == set(get_type_hints(shape))

    run(story)


def test_claims_of_domains_that_are_off_are_inactive_and_explained_all_the_same() -> None:
    async def story(pool: Pool) -> None:
        two_cards = 'name="gpu1" mode="passthrough" count="2"'
        pool.define(xml('name="gpu0" mode="vgpu" memory="4096"', two_cards), running=False)
        pool.domain.refresh()
        await pool.until(lambda _: bool(pool.domains()))
        first, second = await pool.resources.claims()
        assert (first["label"], first["state"]) == ("vm0/gpu0", "inactive")
        assert "not supported yet" in second["reason"]
        told = await pool.resources.explain("vm0", "gpu0")
        assert [card["fits"] for card in told["cards"]] == [True, True]
        assert told["reason"] == "the domain is not running; a card would fit now"
        for card in pool.host.cards.values():
            card.condition = Condition.GONE
        await pool.until(lambda rows: all(c.health.verdict.value != "healthy" for c in rows.cards.values()))
        told = await pool.resources.explain(UUID, "gpu0")
        assert [card["fits"] for card in told["cards"]] == [False, False]
        assert told["reason"].endswith("no card would fit now")

    run(story)


def test_a_waiting_claim_says_why_and_a_running_domains_new_claim_when() -> None:
    async def story(pool: Pool) -> None:
        two = xml('name="gpu0" mode="vgpu" memory="99999" required="no"', 'name="gpu1" mode="vgpu" memory="64"')
        pool.define(two, running=True)
        await pool.call("prepare", two)
        waiting, served = await pool.resources.claims()
        assert (waiting["state"], served["state"]) == ("waiting", "served")
        assert "no card can serve 99999 MiB" in waiting["reason"]
        with pytest.raises(NotFound, match="kvmpool explain vm0/gpu0"):
            await pool.resources.binding("vm0/gpu0")
        assert (await pool.resources.explain("vm0", "gpu0"))["reason"] == waiting["reason"]
        added = await pool.resources.add_claim("vm0", {"name": "gpu2", "mode": "vgpu", "memory": "64"})
        assert added["state"] == "inactive"
        assert "next start" in added["reason"]

    run(story)


def test_metadata_that_cannot_be_read_is_shown_as_invalid() -> None:
    async def story(pool: Pool) -> None:
        async def domains() -> tuple[DomainSeen, ...]:
            return (DomainSeen(UUID, "vm0", False, claims_error="domain vm0: memory is missing"),)

        pool.hypervisor.domains = domains  # type: ignore[method-assign]
        pool.domain.refresh()
        await pool.until(lambda _: bool(pool.domains()))
        [body] = await pool.resources.claims()
        assert (body["state"], body["reason"]) == ("invalid", "domain vm0: memory is missing")

    run(story)


def test_an_edit_of_metadata_comes_back_as_the_claim_it_made() -> None:
    async def story(pool: Pool) -> None:
        pool.define(xml(), running=False)
        body = await pool.resources.add_claim("vm0", {"name": "gpu0", "mode": "vgpu", "memory": "512"})
        assert (body["label"], body["state"], body["memory_mib"]) == ("vm0/gpu0", "inactive", 512)
        await pool.resources.remove_claim("vm0", "gpu0")
        await pool.until(lambda _: pool.domains()[0].claims == ())
        with pytest.raises(NotFound, match="kvmpool claim list"):
            await pool.resources.claim("vm0", "gpu0")
        with pytest.raises(ClaimInvalid):
            await pool.resources.add_claim("vm0", {"name": "gpu0", "mode": "vgpu"})

    run(story)


def test_a_cordoned_card_gets_nothing_new_and_the_reason_is_read_back() -> None:
    async def story(pool: Pool) -> None:
        for address in ("0000:41:00.0", "h0/0000:42:00.0"):
            body = await pool.resources.cordon(address, Cordon.CORDON, "fan is loud", "root")
            assert (body["cordoned"], body["cordon_reason"]) == (True, "fan is loud")
        with pytest.raises(Refused, match="fan is loud"):
            await pool.call("prepare")
        assert not (await pool.resources.cordon("0000:42:00.0", Cordon.UNCORDON, "", "root"))["cordoned"]
        await pool.call("prepare")
        assert (await pool.resources.binding("vm0/gpu0"))["card"] == "h0/0000:42:00.0"

    run(story)


def test_a_drained_card_gives_its_binding_away_and_uncordon_ends_it() -> None:
    async def story(pool: Pool) -> None:
        pool.define(running=True)
        await pool.call("prepare")
        await pool.until(lambda rows: rows.attempts[UUID].started)
        first = await pool.resources.binding("vm0/gpu0")
        body = await pool.resources.cordon(first["card"], Cordon.DRAIN, "new fan", "root")
        assert (body["drain"], body["cordoned"], body["cordon_reason"]) == (True, False, "new fan")
        await pool.until(lambda rows: all(b.card != first["card_id"] for b in rows.bindings.values()))
        assert (await pool.resources.binding("vm0/gpu0"))["generation"] > first["generation"]
        body = await pool.resources.cordon(first["card"], Cordon.UNCORDON, "", "root")
        assert (body["drain"], body["cordoned"], body["cordon_reason"]) == (False, False, "")

    run(story)


def test_a_card_that_a_person_restores_is_validated_and_a_healthy_one_is_not() -> None:
    async def story(pool: Pool) -> None:
        card = next(iter(pool.host.cards.values()))
        label = (await pool.resources.cards())[0]["label"]
        with pytest.raises(Refused, match="is healthy, not out of service.*kvmpool card show h0/"):
            await pool.resources.restore(label, "", "root")
        card.condition = Condition.GONE
        await pool.until(lambda rows: rows.cards[card.id].health.verdict is Verdict.QUARANTINED)
        card.condition = Condition.FINE
        await pool.resources.restore(label, "reseated", "root")
        await pool.until(lambda rows: rows.cards[card.id].health.verdict is Verdict.PROBATION)
        told = next(event for event in await pool.resources.events() if event["kind"] == "restored")
        assert (told["subject"], told["reason"]) == (label, "by root: reseated")

    run(story)


def test_an_ambiguous_or_unknown_card_is_named() -> None:
    async def story(pool: Pool) -> None:
        with pytest.raises(Refused, match="names 2 cards: h0/0000:41:00.0, h0/0000:42:00.0"):
            await pool.resources.card("GPU-00000000")
        for named in ("", "GPU", "zz", "0000:43:00.0"):
            with pytest.raises(NotFound):
                await pool.resources.card(named)
        assert CardId((await pool.resources.card("0000:42:00.0"))["id"]) in pool.host.cards

    run(story)


def test_an_open_breaker_is_told_and_a_person_closes_it() -> None:
    async def story(pool: Pool) -> None:
        page = await pool.ledger.read()
        tripped = Breaker(open_reason="3 cards of h0 failed in 60 s", opened_at=pool.clock.now())
        await pool.ledger.commit(page, Change(puts=[tripped]))
        assert (await pool.resources.breaker())["open"]
        assert (await pool.resources.status())["breaker"] == "3 cards of h0 failed in 60 s"
        assert not (await pool.resources.close_breaker("root"))["open"]
        assert (await pool.resources.events())[-1]["kind"] == "closed"

    run(story)


def test_events_tell_the_life_of_a_binding_in_order() -> None:
    async def story(pool: Pool) -> None:
        await pool.call("prepare")
        await pool.call("release")
        await pool.until(lambda rows: not rows.bindings and not rows.claims)
        kinds = [event["kind"] for event in await pool.resources.events() if event["subject"].startswith("vm0")]
        assert kinds == ["prepare", "bound", "ready", "served", "withdrawn", "released", "freed"]

    run(story)


def test_a_follower_hears_each_new_event_once() -> None:
    async def story(pool: Pool) -> None:
        heard: list[str] = []

        async def listen() -> None:
            async for body in pool.resources.follow():
                heard.append(f"{body['subject']} {body['kind']}")

        listening = asyncio.create_task(listen())
        await asyncio.sleep(0.1)
        await pool.call("prepare")
        await pool.until(lambda _: any(line.endswith(" served") for line in heard))
        listening.cancel()
        assert [line.split()[1] for line in heard if line.startswith("vm0")] == ["prepare", "bound", "ready", "served"]

    run(story)


def test_a_row_that_cannot_be_read_is_named_in_the_status() -> None:
    async def story(pool: Pool) -> None:
        await pool.store.commit("op", puts=[Put(f"/claim/{KEY.domain}/{KEY.name}", b'{"v": 9}')])
        [fault] = (await pool.resources.status())["faults"]
        assert "version 9 is unknown" in fault

    run(story)

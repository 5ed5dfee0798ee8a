"""plug="boot": a start with reserved cards, and every start that the hook must not let through."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace

import pytest

from kvmpool.api.boot_starts import BootStarts, verify
from kvmpool.api.hooks import HookCall
from kvmpool.core.model import HostdevSeen, Mode, Plug, Rows
from kvmpool.errors import KvmpoolError, NoCapacity, Refused
from kvmpool.sim.hypervisor import SimStarter
from kvmpool.sim.world import SimDomain
from kvmpool.virt.device_xml import hostdevs_of, with_hostdevs
from kvmpool.virt.domain_xml import claims_of
from tests.api.pool import UUID, Pool, xml
from tests.core.build import spec

A, B = "0000:41:00.0", "0000:42:00.0"
ALIAS = "ua-kvmpool-gpu0"
BOOT = xml('name="gpu0" mode="passthrough" plug="boot"')
SPEC = replace(spec(mode=Mode.PASSTHROUGH), plug=Plug.BOOT)
LIVE = replace(SPEC, plug=Plug.LIVE)


def held(address: str, alias: str = ALIAS) -> tuple[HostdevSeen, ...]:
    return (HostdevSeen(address, alias),)


# --- what a start's XML may hold --------------------------------------------------------------------------------------


def test_a_plain_start_is_told_how_to_start_it() -> None:
    with pytest.raises(Refused, match=r"vm0/gpu0: .*Next: kvmpool domain start vm0$"):
        verify("vm0", [SPEC], (), None)
    with pytest.raises(Refused, match=r"Next: kvmpool domain start vm0$"):
        verify("vm0", [SPEC], held(A), None)


def test_the_reserved_card_and_nothing_else_passes() -> None:
    verify("vm0", [SPEC], held(A), {ALIAS: A})
    verify("vm0", [SPEC], (*held(A), HostdevSeen(B, "ua-somebody")), {ALIAS: A})
    verify("vm0", [LIVE], (), None)
    verify("vm0", [LIVE], held(A, "hostdev0"), None)


@pytest.mark.parametrize(
    ("devices", "reserved"),
    [
        pytest.param(held(B), {ALIAS: A}, id="another card in its place"),
        pytest.param((*held(A), *held(B, "ua-kvmpool-gpu1")), {ALIAS: A}, id="one too many of ours"),
        pytest.param((*held(A), *held(A)), {ALIAS: A}, id="twice"),
        pytest.param((), {ALIAS: A}, id="none"),
    ],
)
def test_any_other_set_of_our_cards_is_refused_in_one_line(
    devices: tuple[HostdevSeen, ...], reserved: dict[str, str]
) -> None:
    with pytest.raises(Refused, match="Next: ") as refused:
        verify("vm0", [SPEC], devices, reserved)
    assert "\n" not in str(refused.value)


def test_a_stale_device_of_ours_in_the_definition_of_a_live_claim_is_refused() -> None:
    with pytest.raises(Refused, match=f"{A} as {ALIAS}, not reserved for this start.*virsh edit vm0"):
        verify("vm0", [LIVE], held(A), None)


def test_a_card_is_put_at_the_guest_bus_that_is_kept_for_it() -> None:
    port = f"<controller type='pci' index='16'><alias name='{ALIAS}-port'/></controller>"
    definition = f"<domain><name>vm0</name><devices>{port}</devices></domain>"
    made = with_hostdevs(definition, {ALIAS: A})
    assert hostdevs_of(made) == held(A)
    assert 'bus="0x10"' in made
    assert 'managed="no"' in made
    with pytest.raises(Refused, match=f"{A} as {ALIAS}.*virsh edit vm0"):
        with_hostdevs(made, {ALIAS: B})


# --- the whole start --------------------------------------------------------------------------------------------------


class BootPool(Pool):
    """Both cards on vfio-pci; QEMU starts unless `qemu` raises."""

    def __init__(self, cards: int = 2) -> None:
        super().__init__(cards)
        for card in self.host.cards.values():
            card.mode = Mode.PASSTHROUGH
        self.host.domains[UUID] = SimDomain(UUID, "vm0", claims_of(BOOT).claims, xml=BOOT)
        self.qemu: Callable[[SimDomain], None] = self._runs
        self.starts = BootStarts(SimStarter(self.host, self._prepare, self._run), self.hooks)

    async def _prepare(self, name: str, text: str) -> None:
        await self.hooks.call("prepare", HookCall(name, "begin", "-", text))

    def _run(self, domain: SimDomain) -> None:
        self.qemu(domain)

    def _runs(self, domain: SimDomain) -> None:
        domain.running = True
        self.domain.refresh()

    @property
    def devices(self) -> dict[str, str]:
        return self.host.domains[UUID].devices

    async def ready(self) -> None:
        def healthy(rows: Rows) -> bool:
            good = [c for c in rows.cards.values() if c.health.verdict.value == "healthy" and c.driver == "vfio-pci"]
            return len(good) == len(self.host.cards)

        await self.until(healthy)


def play(story: Callable[[BootPool], Coroutine[object, object, None]], cards: int = 2) -> None:
    async def main() -> None:
        pool = BootPool(cards)
        async with pool:
            await pool.ready()
            await story(pool)

    asyncio.run(main())


def test_a_domain_is_started_with_the_card_that_is_reserved_for_it() -> None:
    async def story(pool: BootPool) -> None:
        with pytest.raises(Refused, match="kvmpool domain start vm0"):
            await pool.call("prepare", BOOT)
        assert not (await pool.rows()).claims
        await pool.starts.start("vm0")
        rows = await pool.until(lambda rows: any(claim.pointed for claim in rows.claims.values()))
        (binding,) = rows.bindings.values()
        assert pool.devices == {ALIAS: binding.worker.removeprefix("vfio:")}

    play(story)


def test_a_qemu_that_fails_leaves_no_rows_and_the_next_start_is_served() -> None:
    async def story(pool: BootPool) -> None:
        def fails(_: SimDomain) -> None:
            raise Refused("libvirt: QEMU says no")

        pool.qemu = fails
        with pytest.raises(Refused, match="QEMU says no"):
            await pool.starts.start("vm0")
        await pool.until(lambda rows: not rows.claims and not rows.attempts and not rows.bindings)
        pool.devices.clear()
        pool.qemu = pool._runs
        await pool.starts.start("vm0")
        assert pool.devices

    play(story)


def test_without_a_free_card_libvirt_is_not_asked_at_all() -> None:
    async def story(pool: BootPool) -> None:
        await pool.starts.start("vm0")
        other = xml('name="gpu0" mode="passthrough" plug="boot"', name="vm1", uuid=UUID[:-1] + "2")
        asked = claims_of(other)
        pool.host.domains[asked.uuid] = SimDomain(asked.uuid, "vm1", asked.claims, xml=other)
        with pytest.raises(NoCapacity, match="kvmpool explain vm1/gpu0"):
            await pool.starts.start("vm1")
        assert not pool.host.domains[asked.uuid].devices
        await pool.until(lambda rows: all(key.domain == UUID for key in rows.claims))

    play(story, cards=1)


def test_a_plain_start_meanwhile_is_refused_and_takes_nothing_away() -> None:
    """virsh start between the reservation and the start: its refusal and its release leave the reservation alone."""

    async def story(pool: BootPool) -> None:
        async with pool.hooks.reserved(claims_of(BOOT)) as cards:
            with pytest.raises(Refused, match="Next: kvmpool domain start vm0"):
                await pool.call("prepare", BOOT)
            await pool.call("release", BOOT)
            with pytest.raises(Refused, match="another start of it"):
                await pool.starts.start("vm0")
            await pool.call("prepare", with_hostdevs(BOOT, cards))
            assert (await pool.rows()).attempts[UUID].deadline > pool.clock.now()
        assert (await pool.rows()).claims

    play(story)


def test_a_reservation_that_kvmpoold_has_forgotten_is_refused_and_its_rows_expire() -> None:
    """kill -9 after the reservation: libvirt may still call the hook of the next kvmpoold."""

    async def story(pool: BootPool) -> None:
        reserved = pool.hooks.reserved(claims_of(BOOT))
        cards = await reserved.__aenter__()
        pool.hooks._reserved.clear()  # what a new process knows
        with pytest.raises(KvmpoolError, match="Next: kvmpool domain start vm0"):
            await pool.call("prepare", with_hostdevs(BOOT, cards))
        await pool.until(lambda rows: not rows.attempts and not rows.claims and not rows.bindings)
        await pool.starts.start("vm0")

    play(story)

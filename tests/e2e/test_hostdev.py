"""Cards plugged into running domains by libvirt's own hostdev code: virt/plugs.py against all that it may answer."""

from __future__ import annotations

import asyncio
import os
import re
import signal

import pytest

from kvmpool.core.model import DomainUuid
from kvmpool.errors import CardBusy, CardLost, DeadlinePassed, KvmpoolError, NotFound, Refused
from kvmpool.lab import hostdev
from kvmpool.lab.pool import SOFTGPU
from kvmpool.softgpu import sysfs
from kvmpool.virt import connection, plugs
from kvmpool.virt.connection import Libvirt
from kvmpool.virt.device_xml import hostdevs_of, kept_bus
from tests.e2e.hostdev import ALIAS, KEPT, A, B, Bench, guest
from tests.e2e.pool import until

pytestmark = pytest.mark.e2e

CARD_READS = "1234:11e8 bar"


def test_a_card_appears_at_the_guest_address_kept_for_it_and_leaves_again(bench: Bench) -> None:
    vm = guest()
    bench.up(vm)
    before = bench.dumped("vm0", "--inactive")
    bench.attach(vm)
    said = bench.until_said(vm, "PLUGGED 07")
    assert f"CARD {KEPT} {CARD_READS}" in said
    xml = bench.dumped("vm0")
    assert [(device.address, device.alias) for device in hostdevs_of(xml)] == [(A, ALIAS)]
    assert kept_bus(xml, ALIAS) == "0x07"
    assert re.search(r"<hostdev mode='subsystem' type='pci' managed='no'>", xml)
    bench.detach(vm)
    assert "UNPLUGGED 07" in bench.until_said(vm, "UNPLUGGED 07")
    assert not hostdevs_of(bench.dumped("vm0"))
    assert bench.dumped("vm0", "--inactive") == before


def test_the_next_card_takes_the_place_of_the_first(bench: Bench) -> None:
    vm = guest()
    bench.up(vm)
    bench.attach(vm, A)
    with pytest.raises(Refused, match=f"domain vm0: {A} is still in the place of {B}"):
        bench.attach(vm, B)
    bench.until_said(vm, "PLUGGED 07")
    bench.detach(vm)
    bench.attach(vm, B)
    until(lambda: bench.said(vm).count(f"CARD {KEPT}") == 2, 20, "the second card is not at the first one's address")
    assert [device.address for device in hostdevs_of(bench.dumped("vm0"))] == [B]


def test_plugging_twice_and_unplugging_twice_are_one(bench: Bench) -> None:
    vm = guest()
    bench.up(vm)
    bench.detach(vm)  # it has none
    for _ in range(2):
        bench.attach(vm)
    assert len(hostdevs_of(bench.dumped("vm0"))) == 1
    for _ in range(2):
        bench.detach(vm)
    assert not hostdevs_of(bench.dumped("vm0"))


def test_without_a_kept_port_libvirt_finds_room_and_two_cards_do_not_collide(bench: Bench) -> None:
    vm = guest(kept=())
    bench.up(vm)
    bench.attach(vm, A)
    bench.attach(vm, B, "ua-kvmpool-gpu1")
    assert {device.address for device in hostdevs_of(bench.dumped("vm0"))} == {A, B}
    bench.detach(vm, "ua-kvmpool-gpu1")
    assert [device.address for device in hostdevs_of(bench.dumped("vm0"))] == [A]


def test_a_card_that_another_domain_has_is_refused_naming_that_domain(bench: Bench) -> None:
    first, second = guest("vm0", 1), guest("vm1", 2)
    bench.up(first)
    bench.up(second)
    bench.attach(first)
    with pytest.raises(CardBusy, match=f"PCI device {A} is in use by driver QEMU, domain vm0"):
        bench.attach(second)
    assert not hostdevs_of(bench.dumped("vm1"))
    bench.host.virsh("destroy", "vm0")
    bench.attach(second)


def test_a_domain_without_a_free_port_says_so_and_what_to_do(bench: Bench) -> None:
    vm = guest(kept=(), ports=1)
    bench.up(vm)
    with pytest.raises(Refused, match="No more available PCI slots.*Next: ") as refused:
        bench.attach(vm)
    assert "\n" not in str(refused.value)


def test_a_card_that_no_longer_answers_is_refused_as_a_dead_one(bench: Bench) -> None:
    vm = guest()
    bench.up(vm)
    with bench.without_kvmpoold():  # which would see it as well, and rightly not trust it for a long time
        sysfs.lose_device(bench.host.outside(SOFTGPU), A)
        with pytest.raises(CardLost, match="Unknown PCI header type '127'.*Next: kvmpool card show"):
            bench.attach(vm)
        assert not hostdevs_of(bench.dumped("vm0"))
        sysfs.find_device(bench.host.outside(SOFTGPU), A)
        bench.attach(vm)


def test_a_device_of_another_alias_is_not_ours_to_take(bench: Bench) -> None:
    vm = guest()
    bench.up(vm)
    bench.attach(vm, A, "ua-somebody")
    bench.detach(vm)
    assert [device.alias for device in hostdevs_of(bench.dumped("vm0"))] == ["ua-somebody"]


def test_a_guest_that_rejects_the_request_keeps_its_card(bench: Bench) -> None:
    vm = guest()
    bench.up(vm)
    bench.attach(vm)
    hostdev.let_fail(bench.host, "device_del", "")
    with pytest.raises(Refused, match="the guest rejected it"):
        bench.detach(vm)
    assert hostdevs_of(bench.dumped("vm0"))
    hostdev.heal(bench.host)
    bench.detach(vm)
    assert not hostdevs_of(bench.dumped("vm0"))


def test_a_guest_that_never_answers_keeps_its_card_until_a_reset(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugs, "ANSWER_S", 1.0)
    vm = guest()
    bench.up(vm, deaf=True)
    bench.attach(vm)
    with pytest.raises(DeadlinePassed, match="did not give ua-kvmpool-gpu0 back within 1 s"):
        bench.detach(vm, answer_s=1.0)
    assert hostdevs_of(bench.dumped("vm0"))
    bench.libvirt(lambda libvirt: libvirt.reset(DomainUuid(vm.uuid)))
    until(lambda: not hostdevs_of(bench.dumped("vm0")), 10, "a reset does not complete the unplug")
    bench.attach(vm, B)


def test_a_card_that_leaves_while_nobody_listens_has_left_all_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event is missed; the domain's XML says it."""
    monkeypatch.setattr(plugs.Waiters, "tell", lambda *_: None)
    vm = guest()
    bench.up(vm)
    bench.attach(vm)
    bench.detach(vm, answer_s=1.0)
    assert not hostdevs_of(bench.dumped("vm0"))


def test_a_domain_that_stops_meanwhile_has_given_its_card_back(bench: Bench) -> None:
    vm = guest()
    bench.up(vm, deaf=True)
    bench.attach(vm)

    async def stopped(libvirt: Libvirt) -> None:
        asked = asyncio.ensure_future(libvirt.detach(DomainUuid(vm.uuid), ALIAS))
        await asyncio.sleep(0.5)
        await libvirt.power_off(DomainUuid(vm.uuid))
        async with asyncio.timeout(10):  # half of what a guest that is silent is waited for
            await asked

    bench.libvirt(stopped)
    with pytest.raises(NotFound, match="domain vm0 is not running"):
        bench.attach(vm)
    other = guest("vm1", 2)
    bench.up(other)
    bench.attach(other)


def test_a_domain_is_powered_off_and_on_again(bench: Bench) -> None:
    vm = guest()
    bench.up(vm)
    bench.attach(vm)
    bench.libvirt(lambda libvirt: libvirt.power_off(DomainUuid(vm.uuid)))
    assert bench.host.virsh("domstate", "vm0").strip() == "shut off"
    bench.libvirt(lambda libvirt: libvirt.power_on(DomainUuid(vm.uuid)))
    assert bench.host.virsh("domstate", "vm0").strip() == "running"
    assert not hostdevs_of(bench.dumped("vm0"))
    bench.host.virsh("undefine", "vm0")
    bench.host.virsh("destroy", "vm0")
    with pytest.raises(NotFound):
        bench.libvirt(lambda libvirt: libvirt.power_on(DomainUuid(vm.uuid)))


@pytest.mark.parametrize(
    ("text", "kind", "then"),
    [
        ("vfio 0000:41:00.0: group 41 is not viable", Refused, "kvmpool card mode 0000:41:00.0 passthrough"),
        ("vfio 0000:41:00.0: failed to open /dev/vfio/41: Device or resource busy", CardBusy, "fuser -v"),
        ("vfio 0000:41:00.0: VFIO_MAP_DMA failed: Cannot allocate memory", Refused, "virsh edit vm0"),
        ("vfio_dma_map(0x55, 0xc0000000, 0x4000, 0x7f) = -14 (Bad address)", Refused, "kvmpool doctor"),
        ("Unable to change power state from D3cold to D0, device inaccessible", CardLost, "kvmpool card show"),
    ],
    ids=["not-viable", "group-busy", "memlock", "dma-conflict", "d3cold"],
)
def test_what_qemu_says_of_a_card_is_told_with_what_is_next_and_nothing_is_left_plugged(
    bench: Bench, text: str, kind: type[KvmpoolError], then: str
) -> None:
    vm = guest()
    bench.up(vm)
    hostdev.let_fail(bench.host, "device_add", text)
    with pytest.raises(kind) as told:
        bench.attach(vm)
    line = str(told.value)
    assert text in line
    assert f"Next: {then}" in line
    assert "\n" not in line
    assert not hostdevs_of(bench.dumped("vm0"))
    hostdev.heal(bench.host)
    bench.attach(vm)


def test_a_guest_that_is_busy_is_asked_again(bench: Bench) -> None:
    vm = guest()
    bench.up(vm)
    bench.attach(vm)
    text = "Hot-unplug failed: guest is busy (power indicator blinking)"
    hostdev.let_fail(bench.host, "device_del", text)
    with pytest.raises(DeadlinePassed, match=re.escape(text)):
        bench.detach(vm)
    hostdev.heal(bench.host)
    bench.detach(vm)


def test_a_domain_whose_lock_is_held_is_a_deadline_and_not_a_refusal(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """QEMU does not answer the first plug; the second gets no lock of the domain (libvirt's error 68, after 30 s)."""
    vm = guest()
    bench.up(vm)
    qemu = bench.processes("qemu-system-x86_64")
    assert len(qemu) == 1
    os.kill(qemu[0], signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(connection, "PLUG_DEADLINE_S", 2.0)
            with pytest.raises(DeadlinePassed, match="did not answer within 2 s"):
                bench.attach(vm)
        with pytest.raises(DeadlinePassed, match="cannot acquire state change lock"):
            bench.attach(vm)
    finally:
        os.kill(qemu[0], signal.SIGCONT)
    bench.attach(vm)  # whatever became of the first
    assert len(hostdevs_of(bench.dumped("vm0"))) == 1


def test_libvirtd_that_restarts_knows_the_card_and_the_waiters_hear_it(bench: Bench) -> None:
    vm = guest()
    bench.up(vm)
    bench.attach(vm)
    bench.host.end_daemon("libvirtd")
    bench.host.start_libvirt(hostdev.environment())
    bench.attach(vm)
    bench.detach(vm)
    assert "UNPLUGGED 07" in bench.until_said(vm, "UNPLUGGED 07")

"""A card passed through by hand, as kvmpool does it later: vfio-pci, libvirt's hostdev, a guest that reads its BAR."""

from __future__ import annotations

import pytest

from kvmpool.lab import guests, vfio_cards
from kvmpool.lab.guests import GuestSpec
from tests.vfio.conftest import Bench, until

pytestmark = [pytest.mark.e2e, pytest.mark.vfio]

_EDU, _NVME, _TWIN = (vfio_cards.card(name) for name in ("gpu0", "gpu1", "gpu2"))
_EDU_READS = "010000ed fffffffa"  # its identification, and the complement of the 5 that the guest wrote
_NVME_READS = "0f0107ff 00401820"  # its capabilities (NVM Express 1.4, 3.1.1): 2048 entries a queue, 7.5 s to get ready


def _spec(name: str, *cards: tuple[str, int]) -> GuestSpec:
    return GuestSpec(name, 1, memory_mib=16, cards=cards)


def test_a_guest_finds_its_card_at_the_fixed_address_and_reads_it(bench: Bench) -> None:
    said = bench.start(_spec("vm0", (_EDU.address, 3), (_NVME.address, 4)))
    cards = [line for line in said.splitlines() if line.startswith("CARD ")]
    assert [line.split()[1:3] for line in cards] == [["03:00.0", _EDU.ids], ["04:00.0", _NVME.ids]]
    assert cards[0].endswith(_EDU_READS)
    assert cards[1].endswith(_NVME_READS)
    assert bench.host.driver(_EDU.address) == bench.host.driver(_NVME.address) == "vfio-pci"
    other = _spec("vm1", (_NVME.address, 3))
    bench.lab.define(other)
    assert "is in use by driver QEMU, domain vm0" in bench.refusal("start", "vm1")
    bench.host.virsh("destroy", "vm0")
    bench.host.virsh("start", "vm1")


def test_a_card_whose_neighbour_has_a_host_driver_is_refused(bench: Bench) -> None:
    bench.host.run("modprobe", "snd_hda_intel")
    bench.host.give(_EDU.address)
    audio = _EDU.address.replace(".0", ".1")
    bench.host.sh(
        'device=/sys/bus/pci/devices/$1; echo >"$device/driver_override" && echo "$1" >"$device/driver/unbind"'
        ' && echo "$1" >/sys/bus/pci/drivers_probe',
        audio,
    )
    assert bench.host.driver(audio) == "snd_hda_intel"
    bench.lab.define(_spec("vm0", (_EDU.address, 3)))
    said = bench.refusal("start", "vm0")
    bench.host.sh('echo "$1" >"/sys/bus/pci/devices/$1/driver/unbind"; rmmod snd_hda_intel', audio)
    assert "is not viable" in said


def test_a_card_is_attached_and_detached_while_the_guest_runs(bench: Bench) -> None:
    spec = _spec("vm0")
    bench.start(spec)
    bench.host.give(_NVME.address)
    bench.host.write("/run/hostdev.xml", guests.hostdev_xml(_NVME.address, 3))
    bench.host.virsh("attach-device", "vm0", "/run/hostdev.xml", "--live")
    said = bench.lab.wait_for_guest(spec, "PLUGGED 03")
    assert f"CARD 03:00.0 {_NVME.ids}" in said
    bench.host.virsh("detach-device", "vm0", "/run/hostdev.xml", "--live")
    bench.lab.wait_for_guest(spec, "UNPLUGGED 03")
    until(lambda: "device-removed" in bench.libvirt_events(), "libvirt does not say that the card is removed")
    assert "<hostdev" not in bench.host.virsh("dumpxml", "vm0")


def test_a_deaf_guest_keeps_its_card_until_a_reset(bench: Bench) -> None:
    bench.start(_spec("vm0", (_NVME.address, 3)), deaf=True)
    bench.host.write("/run/hostdev.xml", guests.hostdev_xml(_NVME.address, 3))
    bench.host.virsh("detach-device", "vm0", "/run/hostdev.xml", "--live")  # "requested" is all that success means
    assert "<hostdev" in bench.host.virsh("dumpxml", "vm0")
    assert "device-removed" not in bench.libvirt_events()
    bench.host.virsh("reset", "vm0")
    until(lambda: "device-removed" in bench.libvirt_events(), "a reset does not complete the removal")
    assert "<hostdev" not in bench.host.virsh("dumpxml", "vm0")

"""Each fault of `kvmpool lab fault`, and what the host sees of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvmpool.errors import Refused
from kvmpool.lab import vfio_cards
from kvmpool.lab.guests import GuestSpec
from kvmpool.lab.vfio_cards import Fault
from tests.vfio.conftest import Bench, until

pytestmark = [pytest.mark.e2e, pytest.mark.vfio]

_EDU, _NVME, _TWIN, _LONE_EDU = (vfio_cards.card(name) for name in ("gpu0", "gpu1", "gpu2", "gpu4"))


def _spec(name: str, card: vfio_cards.LabCard) -> GuestSpec:
    return GuestSpec(name, 1, memory_mib=16, cards=((card.address, 3),))


@pytest.fixture
def fallen(bench: Bench) -> Iterator[Bench]:
    """vm0 runs with gpu0, which then falls off the bus; afterwards it is back."""
    bench.start(_spec("vm0", _EDU))
    bench.host.inject(_EDU, Fault.FALLS_OFF)
    yield bench
    bench.host.virsh("destroy", "vm0", check=False)
    bench.host.inject(_EDU, Fault.COMES_BACK)
    _rescan(bench, _EDU)


def _rescan(bench: Bench, card: vfio_cards.LabCard) -> None:
    """Let the host forget and find it: a card that comes back has lost what the host had written into it."""
    bench.host.sh('echo 1 >"/sys/bus/pci/devices/$1/remove"; echo 1 >/sys/bus/pci/rescan', card.address)


def test_a_card_that_falls_off_the_bus_says_nothing_and_reads_all_ones(fallen: Bench) -> None:
    assert fallen.header(_EDU.address) == "ff" * 64
    vendor = f"/sys/bus/pci/devices/{_EDU.address}/vendor"
    assert fallen.host.read(vendor) == "0x1234\n"
    assert fallen.uevents(_EDU.address) == [], "an event after all"
    assert fallen.state("vm0").startswith("running")
    fallen.host.virsh("destroy", "vm0")
    assert "Unknown PCI header type '127'" in fallen.refusal("start", "vm0")
    fallen.host.inject(_EDU, Fault.COMES_BACK)
    _rescan(fallen, _EDU)
    fallen.host.give(_EDU.address)
    fallen.host.virsh("start", "vm0")
    fallen.host.virsh("destroy", "vm0")


_RELAYED = "vfio-pci {}: Relaying device request to user"


def test_a_removal_request_is_passed_to_a_guest_that_answers_and_the_card_leaves_its_domain(bench: Bench) -> None:
    spec = _spec("vm0", _LONE_EDU)
    bench.start(spec)
    bench.host.inject(_LONE_EDU, Fault.REMOVE)
    bench.lab.wait_for_guest(spec, "UNPLUGGED 03")
    until(lambda: not bench.on_bus(_LONE_EDU.address), "the card stays though its guest let it go")
    assert "device-removed" in bench.libvirt_events()
    assert bench.state("vm0").startswith("running")
    assert "<hostdev" not in bench.host.virsh("dumpxml", "vm0")


def test_a_removal_request_waits_for_the_domain_of_a_deaf_guest_and_the_card_can_be_put_back(bench: Bench) -> None:
    bench.start(_spec("vm0", _NVME), deaf=True)
    bench.host.inject(_NVME, Fault.REMOVE)
    relayed = _RELAYED.format(_NVME.address)
    until(lambda: relayed in bench.host.run("dmesg").stdout, "the kernel does not relay the request")
    assert bench.on_bus(_NVME.address)
    assert bench.state("vm0").startswith("running")
    bench.host.virsh("destroy", "vm0")
    until(lambda: not bench.on_bus(_NVME.address), "the card stays after its domain has ended")
    events = bench.uevents(_NVME.address)
    assert events.index("unbind pci") < events.index("remove pci")
    assert bench.refusal("start", "vm0")
    with pytest.raises(Refused):
        bench.host.inject(_NVME, Fault.REMOVE)
    bench.host.inject(_NVME, Fault.PLUG)
    until(lambda: bench.on_bus(_NVME.address), "the card that was put back is not seen")
    assert "add pci" in bench.uevents(_NVME.address)


@pytest.mark.parametrize("fault", [Fault.AER_NONFATAL, Fault.AER_FATAL])
def test_an_error_at_its_port_pauses_the_domain_of_a_pcie_card_and_no_other(bench: Bench, fault: Fault) -> None:
    bench.start(_spec("vm0", _NVME))
    bench.start(GuestSpec("vm1", 2, memory_mib=16, cards=((_TWIN.address, 3),)))
    bench.host.inject(_NVME, fault)
    until(lambda: bench.state("vm0").startswith("paused"), "the domain is not paused")
    errors = [event for event in until(lambda: bench.uevents(_NVME.address), "no event") if "RECOVERY" in event]
    assert errors[0] == "change pci BEGIN_RECOVERY"
    assert bench.state("vm0") == "paused (unknown)"
    assert bench.state("vm1").startswith("running")
    assert bench.uevents(_TWIN.address) == []
    bench.host.virsh("destroy", "vm0")


def test_an_error_at_the_port_of_a_conventional_card_does_not_stop_its_domain(bench: Bench) -> None:
    bench.start(_spec("vm0", _LONE_EDU))
    bench.host.inject(_LONE_EDU, Fault.AER_NONFATAL)
    port = bench.host.sh('basename "$(dirname "$(readlink -f "/sys/bus/pci/devices/$1")")"', _LONE_EDU.address).stdout
    until(
        lambda: "AER" in bench.host.sh('dmesg | grep -F "$1"', port.strip(), check=False).stdout, "no word of the error"
    )
    assert bench.state("vm0").startswith("running")

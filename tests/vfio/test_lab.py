"""The VFIO lab itself: commands in its host, what the host is, and what a reboot keeps."""

from __future__ import annotations

import threading
import time

import pytest

from kvmpool.errors import DeadlinePassed, Unreachable
from kvmpool.lab import vfio_cards
from kvmpool.lab.guests import GuestSpec
from tests.vfio.conftest import Bench

pytestmark = [pytest.mark.e2e, pytest.mark.vfio]


def test_a_command_s_streams_and_exit_code_come_back_apart(bench: Bench) -> None:
    done = bench.host.sh('cat; echo "$1" >&2; exit 7', 'it\'s "wrong"', check=False, stdin="given\n")
    assert (done.stdout, done.stderr, done.returncode) == ("given\n", 'it\'s "wrong"\n', 7)
    with pytest.raises(Unreachable, match="exit 7: it's"):
        bench.host.sh('echo "$1" >&2; exit 7', "it's wrong")
    assert len(bench.host.run("head", "-c", "300000", "/dev/zero").stdout) == 300000


def test_a_command_that_does_not_end_is_killed_and_others_go_on_meanwhile(bench: Bench) -> None:
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            bench.host.sh("sleep 1234 & sleep 1234", timeout_s=6)
        except BaseException as error:  # noqa: BLE001 - looked at below
            failures.append(error)

    slow = threading.Thread(target=wait)
    slow.start()
    time.sleep(0.5)
    assert bench.host.run("echo", "meanwhile").stdout == "meanwhile\n"
    slow.join()
    assert [type(failure) for failure in failures] == [DeadlinePassed]
    assert "sleep 1234" not in bench.host.run("ps", "-eo", "args").stdout


def test_the_host_has_an_iommu_and_groups_a_card_with_its_audio_function(bench: Bench) -> None:
    groups = bench.host.sh(
        "cd /sys/bus/pci/devices && for d in *; do echo $d $(basename $(readlink $d/iommu_group)); done"
    )
    group = dict(line.split() for line in groups.stdout.splitlines())
    gpu0 = vfio_cards.card("gpu0").address
    assert group[gpu0] == group[gpu0.replace(".0", ".1")]
    cards = [group[card.address] for card in vfio_cards.CARDS]
    assert len(set(cards)) == len(cards), "two cards in one group"
    ids = bench.host.sh(
        "cd /sys/bus/pci/devices && for d; do cat $d/vendor $d/device; done", *_addresses()
    ).stdout.split()
    found = [f"{vendor[2:]}:{device[2:]}" for vendor, device in zip(ids[::2], ids[1::2], strict=True)]
    assert found == [card.ids for card in vfio_cards.CARDS]


def _addresses() -> list[str]:
    return [card.address for card in vfio_cards.CARDS]


def test_nothing_in_the_host_reaches_the_machine_outside(bench: Bench) -> None:
    bench.host.sh("echo inside >/etc/kvmpool-lab-test && rm -rf /etc/hostname")
    with open("/etc/hostname") as file:
        assert file.read()
    assert bench.host.read("/etc/kvmpool-lab-test") == "inside\n"
    assert bench.host.sh("ls /sys/class/net").stdout.split() == ["br0", "lo"]


def test_a_reboot_keeps_the_domains_and_the_state_of_kvmpool_and_nothing_else(bench: Bench) -> None:
    spec = GuestSpec("vm0", 1, memory_mib=16)
    bench.start(spec)
    bench.host.write("/var/lib/kvmpool/kept", "on disk")
    bench.host.write("/run/lost", "in memory")
    boot = bench.host.read("/proc/sys/kernel/random/boot_id")
    bench.host.run("sync")
    before = bench.host.keeper
    host = bench.lab.reboot()
    assert host.keeper != before
    assert host.read("/proc/sys/kernel/random/boot_id") != boot
    assert host.read("/var/lib/kvmpool/kept") == "on disk"
    assert host.read("/run/lost") == ""
    host.start_libvirt()
    assert bench.state("vm0").startswith("shut off")

"""A real kvmpoold resets a passthrough card on a bus of files once it failed; killed in between, it resets again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from kvmpool.lab.fake_bus import FakeBus, adopt, hang, make_process
from tests.daemon.test_modes_host import A, B, ModesHost

pytestmark = [pytest.mark.native, pytest.mark.slow]
_FINE = "Undefined 0\nDLP 0\nTOTAL_ERR_FATAL 0\n"
_FATAL = "Undefined 0\nDLP 1\nTOTAL_ERR_FATAL 1\n"
_NONFATAL = "Undefined 0\nTLP {0}\nTOTAL_ERR_NONFATAL {0}\n"


class ResetsHost(ModesHost):
    """Card A is on vfio-pci and can fail."""

    bus: FakeBus

    def fail(self) -> None:
        """As the kernel counts a fatal error, after lesser ones: only what is counted after the first look is news."""
        counts = count(1)

        def is_looked_at() -> bool:
            self._device("aer_dev_nonfatal").write_text(_NONFATAL.format(next(counts)))
            return bool(self.card()["verdict"] == "suspect")

        self.until(is_looked_at, "nobody looks at its counters", 60)
        self._device("aer_dev_fatal").write_text(_FATAL)

    def _device(self, name: str) -> Path:
        return self.soft / "sys/bus/pci/devices" / A / name

    def resets(self) -> int:
        return self.bus.log.count(f"reset {A}")

    def kinds(self) -> list[str]:
        """What became of card A since it was out of service; a failed one that is free is so at once."""
        kinds = [event["kind"] for event in self.get("/events") if event["subject"] == f"h0/{A}"]
        return kinds[kinds.index("quarantined") :] if "quarantined" in kinds else []


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ResetsHost]:
    made = ResetsHost(tmp_path)
    adopt(made.soft)
    make_process(made.soft, 1, "systemd", "/dev/null")
    made._device("aer_dev_fatal").write_text(_FINE)
    made._device("aer_dev_nonfatal").write_text(_NONFATAL.format(0))
    made.bus = FakeBus(made.soft)
    with made.bus, made:
        made.until(made.healthy, "the cards are not healthy", 60)
        made.ask("passthrough")
        made.until_mode("passthrough")
        made.until(lambda: made.card()["verdict"] == "healthy", "the card on vfio-pci is not healthy", 60)
        yield made


def test_a_card_that_failed_is_reset_validated_and_on_probation(host: ResetsHost) -> None:
    host.fail()
    host.until(lambda: host.card()["verdict"] == "probation", "it is not on probation", 60)
    assert host.resets() == 1
    assert host.kinds() == ["quarantined", "resetting", "probation"]
    assert host.card(B)["verdict"] == "healthy"


def test_a_card_in_a_domain_is_not_reset_until_it_is_free(host: ResetsHost) -> None:
    node = f"/dev/vfio/{host.card()['iommu_group']}"
    make_process(host.soft, 77, "qemu-system-x86", node, cmdline="qemu -name guest=vm9")
    host.fail()
    said = "is in use by pid 77 (qemu-system-x86, domain vm9)"
    host.until(lambda: said in host.log.read_text(), "nobody says who holds it", 60)
    assert host.card()["verdict"] == "quarantined"
    assert host.resets() == 0
    (host.soft / "proc/77/fd/3").unlink()
    host.until(lambda: host.card()["verdict"] == "probation", "it is not reset when it is free", 120)
    assert host.resets() == 1


def test_a_card_without_a_reset_stays_quarantined_and_says_so(host: ResetsHost) -> None:
    host._device("reset").unlink()
    host.fail()
    host.until(lambda: "no working reset" in host.card()["reason"], "it does not say so", 60)
    assert host.card()["verdict"] == "quarantined"
    host.end(signal.SIGKILL)
    host.start()
    host.until(lambda: host.card()["verdict"] == "quarantined", "the next daemon has forgotten it", 60)
    assert "no working reset" in host.card()["reason"]


def test_a_daemon_killed_in_the_middle_of_a_reset_resets_again(host: ResetsHost) -> None:
    reset = host._device("reset")
    hang(host.soft, f"devices/{A}/reset")
    host.fail()
    host.until(lambda: f"h0/{A}: resetting it" in host.log.read_text(), "no reset begins", 60)
    assert host.card()["verdict"] == "quarantined"
    host.end(signal.SIGKILL)
    reset.unlink()
    reset.with_name("reset.unread").unlink()
    os.mkfifo(reset)
    host.start()
    host.until(lambda: host.card()["verdict"] == "probation", "the next daemon does not reset it", 60)
    assert host.kinds() == ["quarantined", "resetting", "probation"]

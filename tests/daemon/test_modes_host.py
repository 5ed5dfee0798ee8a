"""A real kvmpoold over soft cards whose bus can be told to bind: card mode by the CLI, under use, hanging, killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmpool.device.sysroot import Sysroot
from kvmpool.device.topology import function_at
from kvmpool.errors import CardBusy, Refused
from kvmpool.lab.fake_bus import FakeBus, adopt, hang, make_process
from tests.cli.served import kvmpool
from tests.daemon.host import CARDS, RealHost, xml

pytestmark = [pytest.mark.native, pytest.mark.slow]
A, B = (spec.pci_address for spec in CARDS)


class ModesHost(RealHost):
    """With a fake bus under its cards."""

    def driver(self, address: str = A) -> str:
        return function_at(Sysroot(self.soft), address).driver

    def ask(self, mode: str, address: str = A, **more: object) -> Any:
        return self.client.post(f"/cards/{address}/mode", {"mode": mode, **more})

    def card(self, address: str = A) -> Any:
        return self.get(f"/cards/{address}")

    def until_mode(self, mode: str, address: str = A) -> None:
        self.until(lambda: self.card(address)["mode"] == mode, f"{address} is not in mode {mode}", 60)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ModesHost]:
    made = ModesHost(tmp_path)
    adopt(made.soft)
    make_process(made.soft, 1, "systemd", "/dev/null")
    with FakeBus(made.soft), made:
        made.until(made.healthy, "the cards are not healthy", 60)
        yield made


def test_an_idle_card_is_switched_by_one_command_each_way(host: ModesHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMPOOL_SOCKET", str(host.client.socket))
    dry = kvmpool("card", "mode", A, "passthrough", "--dry-run")
    assert (dry.code, dry.out) == (0, f"would give {A} to vfio-pci (now: nvidia)\n")
    assert host.driver() == "nvidia"
    done = kvmpool("card", "mode", A, "passthrough", "--wait")
    assert (done.code, done.out) == (0, f"h0/{A} is in mode passthrough (driver vfio-pci)\n"), done.err
    assert host.driver() == "vfio-pci"
    card = host.card()
    assert (card["id"], card["model"], card["memory_mib"]) == (CARDS[0].uuid, "Soft GPU", 4096)  # as its driver said
    host.until(lambda: host.card()["verdict"] == "healthy", "a passthrough card that answers is not healthy")
    assert kvmpool("card", "mode", A, "passthrough", "--wait").out == f"h0/{A} is in mode passthrough\n"
    back = kvmpool("card", "mode", A, "vgpu", "--wait")
    assert (back.code, back.out) == (0, f"h0/{A} is in mode vgpu (driver nvidia)\n"), back.err
    kinds = [event["kind"] for event in host.get("/events") if event["subject"] == f"h0/{A}"]
    assert kinds.count("mode") == 2
    neighbour = [event["kind"] for event in host.get("/events") if event["subject"] == f"h0/{B}"]
    assert set(neighbour) <= {"unknown", "healthy"}, neighbour
    assert neighbour.count("healthy") == 1, "the neighbour was doubted while NVML was let go of"


def test_a_card_in_use_is_refused_with_its_holder_and_free_when_that_is_gone(host: ModesHost) -> None:
    host.prepare(xml())
    bound = host.get("/bindings/vm0/gpu0")
    address = host.card(bound["card_id"])["address"]
    with pytest.raises(CardBusy) as busy:
        host.ask("passthrough", address)
    assert str(busy.value) == (
        f"h0/{address} cannot be switched to passthrough: held by {bound['label']} of domain vm0"
    )  # fmt: skip
    assert host.card(address)["mode_wish"] == "", "nothing is written for a refused wish"
    other = B if address == A else A
    about = host.soft / f"proc/driver/nvidia/gpus/{other}/information"
    about.parent.mkdir(parents=True)
    about.write_text("Device Minor: \t 1\n")
    make_process(host.soft, 77, "python3", "/dev/nvidia1", cgroup="/system.slice/jupyter.service")
    with pytest.raises(CardBusy, match=r"in use by pid 77 \(python3, jupyter.service\) with /dev/nvidia1 open"):
        host.ask("passthrough", other)
    (host.soft / "proc/77/fd/3").unlink()
    host.ask("passthrough", other)
    host.until_mode("passthrough", other)
    assert host.get("/bindings/vm0/gpu0")["phase"] == "ready"  # the neighbour never noticed


def test_an_unbind_that_hangs_wedges_one_card_and_the_daemon_goes_on(host: ModesHost) -> None:
    hang(host.soft, "drivers/nvidia/unbind")
    host.ask("passthrough")
    slowest = 0.0
    begun = time.monotonic()
    while host.card()["verdict"] != "wedged":
        asked = time.monotonic()
        host.get("/status")
        slowest = max(slowest, time.monotonic() - asked)
        assert asked - begun < 60, host.log.read_text()
        time.sleep(0.05)
    assert slowest < 5
    assert host.card()["reason"].startswith(f"{A}: nvidia does not let go of it (writing '{A}' to ")
    assert host.card()["reason"].endswith("Next: reboot the host")
    assert host.card(B)["verdict"] == "healthy"
    host.prepare(xml())
    assert host.get("/bindings/vm0/gpu0")["card_id"] == CARDS[1].uuid
    with pytest.raises(Refused, match="is wedged"):
        host.ask("vgpu")
    with pytest.raises(Refused, match="is wedged"):
        host.client.post(f"/cards/{A}/restore", {"reason": "it looks fine"})
    host.end(signal.SIGKILL)
    host.start()
    host.until(lambda: host.card()["verdict"] == "wedged", "the next daemon has forgotten it")


def test_a_daemon_killed_in_the_middle_of_a_switch_ends_it_when_it_is_back(host: ModesHost) -> None:
    unbind = host.soft / "sys/bus/pci/drivers/nvidia/unbind"
    hang(host.soft, "drivers/nvidia/unbind")
    host.ask("passthrough")
    override = host.soft / "sys/bus/pci/devices" / A / "driver_override"
    host.until(lambda: override.read_text().strip() == "vfio-pci", "the switch does not begin")
    host.end(signal.SIGKILL)
    unbind.unlink()
    unbind.with_name("unbind.unread").unlink()
    os.mkfifo(unbind)
    host.start()
    assert "a switch to passthrough was cut off: undone" in host.log.read_text()
    host.until_mode("passthrough")
    assert host.driver() == "vfio-pci"
    host.end()
    host.start()
    host.until(lambda: host.card()["mode"] == "passthrough", "the mode is not known after a restart")
    assert host.card()["id"] == CARDS[0].uuid

"""The real libvirtd, in namespaces of its own: it restarts, hangs, and holds a domain's lock while a hook runs."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmpool.errors import Unreachable
from kvmpool.lab import guests, hosts, images
from kvmpool.lab.guests import GuestSpec
from kvmpool.lab.hosts import Host, HostSpec
from kvmpool.native import data
from kvmpool.virt.domain_xml import claims_of, fw_cfg_entries, with_fw_cfg

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
    pytest.mark.skipif(not shutil.which("libvirtd"), reason="libvirtd is not installed"),
]

VM = GuestSpec("vm0", 1, memory_mib=64)
VGPU = {"name": "gpu0", "mode": "vgpu", "memory": "4GiB"}
# Holds `prepare`, and with it the domain's lock, as long as /run/hold is there.
HOOK = '#!/bin/sh\n[ "$2" = prepare ] && while [ -e /run/hold ]; do sleep 0.05; done\nexit 0\n'


class Child:
    """tests/virt/libvirt_child.py inside the host."""

    def __init__(self, host: Host) -> None:
        root = Path(__file__).parents[2]
        environment = {"PYTHONPATH": os.fspath(root)}
        command = host.command([sys.executable, "-m", "tests.virt.libvirt_child"], environment)
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._said: dict[str, queue.Queue[Any]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def tell(self, *command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def hear(self, kind: str, timeout_s: float = 30) -> Any:
        return self._queue(kind).get(timeout=timeout_s)

    def ask(self, *command: object, timeout_s: float = 30) -> Any:
        self.tell(*command)
        return self.hear(str(command[0]), timeout_s)

    def until(self, wake: str, timeout_s: float = 40) -> None:
        end = time.monotonic() + timeout_s
        while wake not in self.hear("wake", max(0.01, end - time.monotonic())):
            pass

    def silent(self, kind: str) -> bool:
        return self._queue(kind).empty()

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(timeout=30)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            kind, _, value = json.loads(line)
            self._queue(kind).put(value)

    def _queue(self, kind: str) -> queue.Queue[Any]:
        with self._lock:
            return self._said.setdefault(kind, queue.Queue())


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("h")
    keepers: list[Any] = []
    try:
        host = hosts.boot(HostSpec("h0", 1), folder, keepers.append, {})
        hook = host.outside("/etc/libvirt/hooks/qemu")
        hook.write_text(HOOK)
        hook.chmod(0o755)
        host.outside(VM.console).parent.mkdir(parents=True)
        host.start_libvirt()
        host.run("virsh", "define", "/dev/stdin", stdin=guests.firmware_xml(VM, images.firmware()))
        yield host
    finally:
        for keeper in keepers:
            hosts.end(keeper)


@pytest.fixture
def child(host: Host) -> Iterator[Child]:
    child = Child(host)
    child.tell("listen")
    child.until("libvirt connected")
    yield child
    host.outside("/run/hold").unlink(missing_ok=True)
    host.virsh("destroy", "vm0", check=False)
    assert child.end() == 0


def seen(child: Child) -> tuple[bool, str, list[str]]:
    ((name, running, state, claims, fault),) = child.ask("domains")
    assert (name, fault) == ("vm0", "")
    return running, state, claims


def test_the_example_domain_is_one_that_libvirt_takes(host: Host) -> None:
    """Without KVM, which a machine that tests may lack."""
    text = data("xml", "domain.xml").read_text()
    plain = text.replace('type="kvm"', 'type="qemu"').replace('<cpu mode="host-passthrough"/>', "")
    plain = plain.replace("<name>vm0<", "<name>vm0-example<")
    host.run("virsh", "define", "--validate", "/dev/stdin", stdin=plain)
    kept = host.virsh("dumpxml", "--inactive", "vm0-example")
    assert claims_of(kept).claims == claims_of(text).claims
    assert with_fw_cfg(kept, fw_cfg_entries(f"/run/kvmpool/guests/{claims_of(text).uuid}")) is None
    host.virsh("undefine", "vm0-example")


def test_an_added_claim_is_kept_and_the_guest_is_started_with_its_files(host: Host, child: Child) -> None:
    assert child.ask("add", "vm0", VGPU) == "done"
    assert seen(child) == (False, "shut off", ["gpu0"])
    with pytest.raises(Unreachable, match=f"guests/{VM.uuid}/"):  # its files are not there: QEMU does not start
        host.virsh("start", "vm0")
    folder = host.outside(f"/run/kvmpool/guests/{VM.uuid}")
    folder.mkdir(parents=True)
    for name in ("endpoint", "token"):
        (folder / name).write_text("x")
    host.virsh("start", "vm0")
    child.until("vm0 started")
    assert seen(child) == (True, "running", ["gpu0"])
    host.virsh("destroy", "vm0")
    child.until("vm0 stopped")
    assert seen(child) == (False, "shut off", ["gpu0"])
    assert child.ask("remove", "vm0", "gpu0") == "done"
    assert seen(child)[2] == []
    text = host.virsh("dumpxml", "vm0")
    assert "urn:kvmpool" not in text
    assert "opt/org.kvmpool" not in text


def test_a_domains_lock_that_a_hook_holds_stops_nothing_but_the_list(host: Host, child: Child) -> None:
    host.outside("/run/hold").touch()
    start = subprocess.Popen(host.command(["virsh", "-q", "start", "vm0"]))
    time.sleep(0.5)
    child.tell("domains")
    for _ in range(5):
        assert child.ask("tick", timeout_s=5) == "done"
        time.sleep(0.2)
    assert child.silent("domains")
    host.outside("/run/hold").unlink()
    assert child.hear("domains", 15)[0][0] == "vm0"
    assert start.wait(timeout=30) == 0
    child.until("vm0 started")
    assert seen(child)[0] is True


def test_after_a_libvirtd_that_was_killed_all_is_heard_and_listed_again(host: Host, child: Child) -> None:
    host.virsh("start", "vm0")
    child.until("vm0 started")
    host.end_daemon("libvirtd", signal.SIGKILL)
    answer = child.ask("domains")
    assert answer.startswith("Unreachable: libvirt (qemu:///system): ")
    host.start_libvirt()
    child.until("libvirt connected")
    assert seen(child)[0] is True
    host.virsh("destroy", "vm0")
    child.until("vm0 stopped")
    assert seen(child)[0] is False


def test_a_libvirtd_that_is_stopped_for_a_while_is_waited_for(host: Host, child: Child) -> None:
    pid = str(host.daemon_pid("libvirtd"))
    host.run("kill", "-STOP", pid)
    try:
        child.tell("domains")
        for _ in range(5):
            assert child.ask("tick", timeout_s=5) == "done"
            time.sleep(0.2)
        assert child.silent("domains")
    finally:
        host.run("kill", "-CONT", pid)
    assert child.hear("domains", 15)[0][0] == "vm0"

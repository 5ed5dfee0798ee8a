"""The lab itself: it leaves nothing, whenever and however it ends; its guests boot and answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvmpool.errors import Refused, Unreachable
from kvmpool.lab import leftovers, process
from kvmpool.lab.folder import Folder
from kvmpool.lab.guests import GuestSpec
from kvmpool.lab.pool import Lab

pytestmark = pytest.mark.e2e


def _mentions(folder: Path) -> list[str]:
    """Processes whose words or environment name the lab's folder, and mounts that do."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        for name in ("cmdline", "environ", "mountinfo"):
            try:
                text = (entry / name).read_bytes()
            except OSError:
                continue
            if str(folder).encode() in text:
                found.append(f"{entry.name} {name}: {text[:200]!r}")
    return found


def test_a_linux_guest_boots_and_runs_a_command_and_down_leaves_nothing(lab_folder: Path) -> None:
    lab = Lab(Folder(lab_folder))
    host = lab.up(kvmpoold=False)
    spec = GuestSpec("vm1", 7)
    lab.define(host, spec)
    host.virsh("start", "vm1")
    lab.wait_for_guest(host, spec, 30.0)
    ran = lab.run("vm1", "ip -4 -o addr show eth0; ping -c 1 10.77.0.1 >/dev/null && echo reached; exit 5")
    assert "10.77.0.107/24" in ran.output
    assert ran.output.endswith("reached\n")
    assert ran.code == 5
    left = leftovers.footprint(host)
    assert leftovers.remains(left), "the check itself must see a running lab"
    assert _mentions(lab_folder), "and so must this one"
    assert lab.down()
    assert leftovers.remains(left) == []
    assert _mentions(lab_folder) == []
    assert not lab_folder.exists()
    assert not lab.down()


def test_the_firmware_guest_is_ready_at_once_and_obeys_the_power_button(lab_folder: Path) -> None:
    lab = Lab(Folder(lab_folder))
    host = lab.up(kvmpoold=False)
    spec = GuestSpec("fw0", 1, memory_mib=16)
    lab.define(host, spec, firmware=True)
    host.virsh("start", "fw0")
    lab.wait_for_guest(host, spec, 5.0)
    host.virsh("shutdown", "fw0")
    assert process.holds_within(lambda: "shut off" in host.virsh("domstate", "fw0"), 5.0)


def test_a_host_has_no_contact_with_the_machine_s_network(lab_folder: Path) -> None:
    host = Lab(Folder(lab_folder)).up(kvmpoold=False)
    links = host.run("ip", "-o", "link").stdout.splitlines()
    assert [line.split(": ")[1] for line in links] == ["lo", "br0"]
    assert "02:77:00:00:01:01" in links[1]
    outside = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    assert "br0" not in outside


@pytest.mark.parametrize("victim", ["keeper", "pid1"])
def test_the_death_of_a_host_s_first_process_ends_all_of_it(lab_folder: Path, victim: str) -> None:
    lab = Lab(Folder(lab_folder))
    host = lab.up(kvmpoold=False)
    left = leftovers.footprint(host)
    os.kill(host.keeper.pid if victim == "keeper" else process.children(host.keeper)[0], signal.SIGKILL)

    def only_files() -> bool:
        return all(line.startswith("file ") for line in leftovers.remains(left))

    assert process.holds_within(only_files, 5.0), leftovers.remains(left)
    with pytest.raises(Unreachable, match="kvmpool lab down"):
        lab.host()
    assert lab.down()
    assert leftovers.remains(left) == []


_CUT = """
import sys
from pathlib import Path
from kvmpool.lab.folder import Folder
from kvmpool.lab.pool import Lab
lab = Lab(Folder(Path(sys.argv[1])))
print("ready", flush=True)
sys.stdin.readline()
lab.down() if sys.argv[2] == "down" else lab.up(kvmpoold=False)
"""


def _cut_off(what: str, folder: Path, after_s: float) -> None:
    """Begin `up` or `down` in a process of its own, and SIGKILL it after a while."""
    words = [sys.executable, "-c", _CUT, str(folder), what]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin
    assert child.stdout
    assert child.stdout.readline() == "ready\n"
    child.stdin.write("\n")
    child.stdin.flush()
    time.sleep(after_s)
    child.kill()
    child.wait()


@pytest.mark.parametrize("share", [0.02, 0.15, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
def test_down_removes_all_after_up_was_killed_at_any_moment(lab_folder: Path, share: float, up_s: float) -> None:
    _cut_off("up", lab_folder, share * up_s)
    Lab(Folder(lab_folder)).down()
    assert process.holds_within(lambda: _mentions(lab_folder) == [], 5.0), _mentions(lab_folder)
    assert not lab_folder.exists()


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.02, 0.04])
def test_down_completes_a_down_that_was_killed(lab_folder: Path, after_s: float) -> None:
    Lab(Folder(lab_folder)).up(kvmpoold=False)
    _cut_off("down", lab_folder, after_s)
    Lab(Folder(lab_folder)).down()
    assert process.holds_within(lambda: _mentions(lab_folder) == [], 5.0), _mentions(lab_folder)
    assert not lab_folder.exists()


@pytest.fixture(scope="module")
def up_s(tmp_path_factory: pytest.TempPathFactory) -> float:
    """How long `up` takes on this machine now."""
    lab = Lab(Folder(tmp_path_factory.mktemp("timed") / "lab"))
    began = time.monotonic()
    try:
        lab.up(kvmpoold=False)
        return time.monotonic() - began
    finally:
        lab.down()


def test_a_second_up_is_refused_and_disturbs_nothing(lab_folder: Path) -> None:
    lab = Lab(Folder(lab_folder))
    host = lab.up(kvmpoold=False)
    with pytest.raises(Refused, match="is not empty"):
        lab.up(kvmpoold=False)
    assert host.alive()
    assert host.virsh("uri").strip() == "qemu:///system"

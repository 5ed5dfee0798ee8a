"""Each check on a machine that is sound, and on one where what it looks at is missing, old or wrong."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from kvmpool import native
from kvmpool.doctor import finding, gpu, host, libvirt, pool
from kvmpool.doctor.finding import Level
from kvmpool.errors import NotFound
from kvmpool.host import install
from kvmpool.softgpu import state as softgpu
from tests.cli.served import Served
from tests.doctor.place import Machine

PASS, WARN, FAIL = Level.PASS, Level.WARN, Level.FAIL

# --- the machine ------------------------------------------------------------------------------------------------------


def test_qemu(machine: Machine) -> None:
    assert machine.check(host.qemu) == (PASS, "8.2", "")
    machine.program("qemu-system-x86_64", "QEMU emulator version 7.1.0")
    assert machine.check(host.qemu)[:2] == (FAIL, "7.1 is older than 7.2")
    machine.program("qemu-system-x86_64", "Segmentation fault", code=139)
    assert machine.check(host.qemu)[0] is FAIL
    (machine.programs / "qemu-system-x86_64").unlink()
    assert machine.check(host.qemu) == (FAIL, "qemu-system-x86_64 is not installed", "apt install qemu-system-x86")


def test_a_device_node_alone_is_no_virtualisation(machine: Machine) -> None:
    assert machine.check(host.kvm)[:2] == (WARN, "No such file or directory")
    machine.write("/dev/kvm", "")
    level, detail, remedy = machine.check(host.kvm)
    assert (level, detail) == (WARN, "present, but cannot make a VM: Inappropriate ioctl for device")
    assert "TCG" in remedy


def test_vsock_and_iommu_are_wanted_not_needed(machine: Machine) -> None:
    assert machine.check(host.vsock)[0] is PASS
    assert machine.check(host.iommu) == (PASS, "1 groups", "")
    (machine.root / "dev/vhost-vsock").unlink()
    shutil.rmtree(machine.root / "sys/kernel/iommu_groups/0")
    assert machine.check(host.vsock)[0] is WARN
    assert machine.check(host.iommu)[:2] == (WARN, "none: no passthrough")


def test_sessions_are_confined_as_far_as_the_host_can(machine: Machine) -> None:
    assert machine.check(host.sessions_user)[0] is PASS
    assert machine.check(host.control_groups)[0] is PASS
    machine.write("/etc/passwd", "root:x:0:0::/root:/bin/sh\n")
    machine.write("/sys/fs/cgroup/cgroup.controllers", "hugetlb pids\n")
    assert machine.check(host.sessions_user) == (
        WARN, "there is no kvmpool-worker: sessions run as root", "systemd-sysusers"
    )  # fmt: skip
    assert machine.check(host.control_groups)[1].startswith("no cgroup2 with memory:")


def test_programs_that_are_not_built(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Path:
        raise NotFound(f"bin/kvmpool-{name} is not built. Next: make build")

    monkeypatch.setattr(host, "native", missing)
    assert machine.check(host.programs) == (FAIL, "bin/kvmpool-worker is not built", "make build")


# --- libvirt ----------------------------------------------------------------------------------------------------------


def test_libvirt_daemon(machine: Machine) -> None:
    assert machine.check(libvirt.daemon) == (PASS, "9.0 at qemu:///system", "")
    machine.program("virsh", "error: Failed to connect socket to '/run/libvirt.sock': refused", code=1)
    level, detail, remedy = machine.check(libvirt.daemon)
    assert (level, detail) == (FAIL, "Failed to connect socket to '/run/libvirt.sock': refused")
    assert "systemctl start libvirtd" in remedy
    machine.program("virsh", "Running against daemon: 8.10.0")
    assert machine.check(libvirt.daemon)[:2] == (FAIL, "8.10 is older than 9.0")
    (machine.programs / "virsh").unlink()
    assert machine.check(libvirt.daemon)[:2] == (FAIL, "virsh is not installed")


def test_a_libvirt_that_does_not_answer_is_not_waited_for(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "PROGRAM_DEADLINE_S", 0.2)
    (machine.programs / "virsh").write_text("#!/bin/sh\nexec sleep 30\n")
    assert machine.check(libvirt.daemon)[0] is FAIL


def test_hook(machine: Machine) -> None:
    assert machine.check(libvirt.hook)[0] is PASS
    (machine.root / install.HOOK).chmod(0o644)
    assert machine.check(libvirt.hook)[1] == "not executable: libvirt does not run it"
    install.apply(install.plan_leave(machine.root))
    assert machine.check(libvirt.hook) == (FAIL, "not installed: claims are ignored", "kvmpool host join")


def test_a_backup_beside_the_hook_is_run_too(machine: Machine) -> None:
    assert machine.check(libvirt.hook_neighbours)[:2] == (PASS, "none")
    other = machine.write("/etc/libvirt/hooks/qemu.d/10-site", "#!/bin/sh\n")
    other.chmod(0o755)
    assert machine.check(libvirt.hook_neighbours)[:2] == (PASS, "10-site")
    machine.write("/etc/libvirt/hooks/qemu.d/50-kvmpool~", "").chmod(0o755)
    level, _, remedy = machine.check(libvirt.hook_neighbours)
    assert (level, remedy) == (WARN, "rm /etc/libvirt/hooks/qemu.d/50-kvmpool~")


def test_interpreter_selinux_and_bridges(machine: Machine) -> None:
    for check in (libvirt.interpreter, libvirt.selinux, libvirt.bridge_mac):
        assert machine.check(check)[0] is PASS
    (machine.root / "usr/bin/python3").unlink()
    assert machine.check(libvirt.interpreter)[0] is FAIL
    machine.write("/sys/fs/selinux/enforce", "1\n")
    assert machine.check(libvirt.selinux)[1] == "enforcing"
    machine.write("/sys/class/net/br0/bridge/bridge_id", "8000.5254000000")
    machine.write("/sys/class/net/br0/addr_assign_type", "3\n")
    assert machine.check(libvirt.bridge_mac)[0] is PASS
    machine.write("/sys/class/net/br0/addr_assign_type", "1\n")
    assert machine.check(libvirt.bridge_mac)[:2] == (WARN, "br0's is not set")


# --- the cards --------------------------------------------------------------------------------------------------------


def test_without_a_driver_the_libraries_are_missing(machine: Machine) -> None:
    for check in (gpu.cuda_library, gpu.nvml_library):
        level, _, remedy = machine.check(check)
        assert level is FAIL
        assert "kvmpool lab up" in remedy


@pytest.mark.native
def test_soft_cards_are_seen_as_cards(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = softgpu.CardSpec(0, "GPU-5f0f0000-0000-4000-8000-000000000000", "0000:41:00.0", "Soft GPU", 4096)
    softgpu.create(machine.root / "soft", (spec,))
    monkeypatch.setenv("KVMPOOL_SOFTGPU", str(machine.root / "soft"))
    folder = native.native("softgpu-nvml").parent
    assert machine.check(gpu.cuda_library, folder)[0] is PASS
    assert machine.check(gpu.nvml_library, folder) == (PASS, "1 card", "")


_NVML = """
int nvmlInit_v2(void) { return %d; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 0; return 0; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize(
    ("code", "level", "told"),
    [
        (18, FAIL, "driver and library have different versions: a driver upgrade without a reboot"),
        (9, FAIL, "the driver is not loaded"),
        (999, FAIL, "nvmlInit answers 999"),
        (0, WARN, "the driver shows no card"),
    ],
)
def test_what_a_broken_driver_says(machine: Machine, code: int, level: Level, told: str) -> None:
    folder = machine.root / f"nvml{code}"
    folder.mkdir()
    library = folder / "libnvidia-ml.so.1"
    built = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(built, input=_NVML % code, text=True, check=True, timeout=60)
    assert machine.check(gpu.nvml_library, folder)[:2] == (level, told)


def test_a_library_that_is_none_is_named(machine: Machine) -> None:
    machine.write("/lib/libcuda.so.1", "not a library")
    level, detail, _ = machine.check(gpu.cuda_library)
    assert level is FAIL
    assert detail


def test_kernel_log(machine: Machine) -> None:
    assert machine.check(gpu.kernel_log)[0] is PASS
    (machine.root / "dev/kmsg").unlink()
    assert machine.check(gpu.kernel_log)[:2] == (WARN, "cannot be read")


# --- kvmpoold ---------------------------------------------------------------------------------------------------------


def test_configuration_names_the_first_fault_and_counts_the_others(machine: Machine) -> None:
    assert machine.check(pool.configuration)[0] is PASS
    machine.write("/etc/kvmpool/kvmpoold.toml", "[hook]\ndeadline_s = 0\n[colour]\n")
    level, detail, remedy = machine.check(pool.configuration)
    assert (level, remedy) == (FAIL, "kvmpoold --check")
    assert "kvmpoold.toml" in detail
    assert detail.endswith("(and 1 more)")
    machine.write("/etc/kvmpool/kvmpoold.toml", "")
    machine.write("/etc/kvmpool/conf.d/10.toml", "[api\n")
    assert "10.toml" in machine.check(pool.configuration)[1]


def test_the_hooks_settings_are_those_of_the_configuration(machine: Machine) -> None:
    assert machine.check(pool.hook_settings)[0] is PASS
    machine.write("/etc/kvmpool/kvmpoold.toml", "[hook]\ndeadline_s = 20\n")
    level, detail, remedy = machine.check(pool.hook_settings)
    assert (level, remedy) == (WARN, "kvmpool host join --deadline 20")
    assert detail == "it waits 5 s, kvmpoold's [hook] deadline_s is 20"
    machine.write("/etc/kvmpool/kvmpoold.toml", '[paths]\nrun = "/run/other"\n')
    level, _, remedy = machine.check(pool.hook_settings)
    assert (level, remedy) == (FAIL, "KVMPOOL_SOCKET=/run/other/kvmpoold.sock kvmpool host join")
    install.apply(install.plan_leave(machine.root))
    assert machine.check(pool.hook_settings)[2] == "kvmpool host join"


def test_group(machine: Machine) -> None:
    assert machine.check(pool.group) == (PASS, "alice, bob", "")
    machine.write("/etc/kvmpool/kvmpoold.toml", '[api]\ngroup = "gpus"\n')
    assert machine.check(pool.group) == (WARN, "absent: only root may use the CLI", "groupadd --system gpus")


def test_an_address_that_this_host_has_not_is_told_before_a_domain_starts(machine: Machine) -> None:
    for listen, level in (("tcp:127.0.0.1:0", PASS), ("unix", PASS), ("vsock", PASS), ("tcp:192.0.2.1:0", FAIL)):
        machine.write("/etc/kvmpool/kvmpoold.toml", f'[dataplane]\nlisten = "{listen}"\n')
        assert machine.check(pool.listen)[0] is level, listen
    assert "192.0.2.1: Cannot assign requested address" in machine.check(pool.listen)[1]


def test_kvmpoold_that_is_dead_or_talks_nonsense(machine: Machine) -> None:
    level, detail, remedy = machine.check(pool.answers)
    assert (level, remedy) == (FAIL, "systemctl start kvmpoold")
    assert "does not answer" in detail
    assert machine.check(pool.cards)[0] is WARN
    machine.socket.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(machine.socket))
        assert machine.check(pool.answers)[0] is FAIL


def test_kvmpoold_that_answers_says_what_is_wrong_with_the_pool(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = machine.root / "api"
    folder.mkdir()
    with Served(folder) as served:
        machine.socket = served.socket
        level, detail, _ = machine.check(pool.answers)
        assert level is PASS
        assert "store: memory" in detail
        assert machine.check(pool.cards) == (PASS, "2 healthy", "")
        monkeypatch.setattr(served.pool, "nvml_fault", lambda: "the driver is not loaded")
        assert machine.check(pool.answers)[:2] == (WARN, "nvml: the driver is not loaded")
        monkeypatch.setattr(pool, "__version__", "9.9")
        assert "restart" in machine.check(pool.answers)[2]


@pytest.mark.skipif(os.geteuid() != 0, reason="reads this machine's own device")
def test_this_machines_own_tree_can_be_looked_at() -> None:
    for check in (host.kvm, host.vsock, host.iommu, libvirt.hook, libvirt.bridge_mac, gpu.kernel_log, pool.group):
        assert check(finding.Place()).title

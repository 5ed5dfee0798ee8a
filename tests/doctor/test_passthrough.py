"""Each check of what passthrough takes, on a machine that is sound and on one where that is missing or wrong."""

from __future__ import annotations

import os
import socket

import pytest

from kvmpool.doctor import passthrough
from kvmpool.doctor.finding import Level
from kvmpool.lab.fake_bus import FakeFunction, make
from tests.doctor.place import Machine

PASS, WARN, FAIL = Level.PASS, Level.WARN, Level.FAIL
A, B, PORT = "0000:41:00.0", "0000:42:00.0", "0000:00:01.0"
CARD = FakeFunction(A, group="41", ports=(PORT,))
TWIN = FakeFunction(B, group="42", ports=("0000:00:02.0",))


def test_the_kernel_option_is_named_by_the_processor(machine: Machine) -> None:
    machine.write("/sys/class/iommu/dmar0/x", "")
    assert machine.check(passthrough.kernel_options)[0] is PASS
    (machine.root / "sys/class/iommu/dmar0/x").unlink()
    (machine.root / "sys/class/iommu/dmar0").rmdir()
    machine.write("/proc/cpuinfo", "vendor_id\t: GenuineIntel\n")
    machine.write("/proc/cmdline", "quiet\n")
    assert machine.check(passthrough.kernel_options)[1] == "intel_iommu=on is missing"
    machine.write("/proc/cmdline", "quiet intel_iommu=on\n")
    assert machine.check(passthrough.kernel_options)[1] == "the firmware shows no IOMMU to the kernel"
    machine.write("/proc/cpuinfo", "vendor_id\t: AuthenticAMD\n")
    machine.write("/proc/cmdline", "amd_iommu=off\n")
    assert machine.check(passthrough.kernel_options)[1] == "the kernel is told not to use it"


def test_a_group_with_a_device_of_the_host_is_named(machine: Machine) -> None:
    make(machine.root, (CARD, TWIN))
    assert machine.check(passthrough.groups)[0] is PASS
    make(machine.root, (FakeFunction("0000:43:00.0", "144d", "a80a", "010802", "41", "nvme", ports=(PORT,)),))
    level, detail, _ = machine.check(passthrough.groups)
    assert (level, detail) == (WARN, f"group 41 of {A} is not viable: 0000:43:00.0 (nvme)")


def test_cards_of_one_group_are_named_as_one_unit(machine: Machine) -> None:
    make(machine.root, (CARD, TWIN))
    assert machine.check(passthrough.acs)[0] is PASS
    make(machine.root, (FakeFunction("0000:44:00.0", group="41", ports=(PORT,)),))
    assert machine.check(passthrough.acs)[:2] == (WARN, f"group 41: {A} and 0000:44:00.0 go together")


def test_vfio_is_loaded_or_can_be(machine: Machine) -> None:
    machine.write("/proc/sys/kernel/osrelease", "6.1.0-x\n")
    assert machine.check(passthrough.vfio_modules)[:2] == (WARN, "kernel 6.1.0-x has no module vfio-pci")
    machine.write("/lib/modules/6.1.0-x/modules.dep", "kernel/drivers/vfio/pci/vfio-pci.ko: kernel/vfio.ko\n")
    assert machine.check(passthrough.vfio_modules)[:2] == (PASS, "loaded when the first card needs it")
    make(machine.root, ())
    assert machine.check(passthrough.vfio_modules)[:2] == (PASS, "loaded")


def test_the_hook_reaches_the_daemon_that_its_settings_name(machine: Machine) -> None:
    machine.write("/etc/libvirt/hooks/kvmpool/hook.conf", "socket=/run/kvmpool/kvmpoold.sock\ndeadline_s=5\n")
    level, detail, remedy = machine.check(passthrough.hook_reaches)
    assert (level, detail) == (FAIL, "/run/kvmpool/kvmpoold.sock: No such file or directory")
    assert remedy.startswith("systemctl start kvmpoold")
    machine.socket.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(machine.socket))
        listening.listen()
        assert machine.check(passthrough.hook_reaches)[0] is PASS
    assert machine.check(passthrough.hook_reaches)[1] == "/run/kvmpool/kvmpoold.sock: Connection refused"


def test_locked_memory_takes_a_right_or_a_limit(machine: Machine) -> None:
    assert machine.check(passthrough.memlock)[1] == "not known: libvirt does not run"
    machine.write("/proc/812/comm", "libvirtd\n")
    machine.write("/proc/812/limits", "Max locked memory         65536                8388608              bytes\n")
    machine.write("/proc/812/status", "Name:\tlibvirtd\nCapEff:\t00000000a80425fb\n")
    level, detail, _ = machine.check(passthrough.memlock)
    assert (level, detail) == (WARN, "libvirt cannot raise it over 8388608 bytes: VFIO_MAP_DMA will fail")
    machine.write("/proc/812/status", "CapEff:\t000001ffffffffff\n")
    assert machine.check(passthrough.memlock)[0] is PASS
    machine.write("/proc/812/status", "CapEff:\t0\n")
    machine.write("/proc/812/limits", "Max locked memory         65536                unlimited            bytes\n")
    assert machine.check(passthrough.memlock)[0] is PASS


def test_huge_pages_are_wanted_on_the_cards_node(machine: Machine) -> None:
    make(machine.root, (CARD,))
    assert machine.check(passthrough.hugepages)[:2] == (PASS, "none reserved")
    folder = "/sys/devices/system/node/node0/hugepages/hugepages-2048kB"
    machine.write(f"{folder}/nr_hugepages", "512\n")
    machine.write(f"{folder}/free_hugepages", "0\n")
    assert machine.check(passthrough.hugepages)[:2] == (WARN, "node 0 has 0 of 512 free")
    machine.write(f"{folder}/free_hugepages", "12\n")
    assert machine.check(passthrough.hugepages)[:2] == (PASS, "")


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("0x00000000e0000000 0x00000000efffffff 0x0000000000040200\n", ""),
        ("0x0000000000000000 0x000000000fffffff 0x0000000000140204\n", f"{A} BAR 0 has no address"),
        ("0x0000008000000000 0x0000009fffffffff 0x000000000014220c\n", f"{A} BAR 0 is 128 GiB"),
        ("garbage\n", ""),
    ],
)
def test_a_bar_without_an_address_or_too_large_for_guests_is_named(machine: Machine, lines: str, told: str) -> None:
    make(machine.root, (CARD,))
    machine.write(f"/sys/bus/pci/devices/{A}/resource", lines)
    assert machine.check(passthrough.window)[:2] == (WARN if told else PASS, told)


def test_the_boot_display_is_named(machine: Machine) -> None:
    make(machine.root, (CARD,))
    assert machine.check(passthrough.boot_display)[0] is PASS
    machine.write(f"/sys/bus/pci/devices/{A}/boot_vga", "1\n")
    assert machine.check(passthrough.boot_display)[:2] == (WARN, f"{A} is")


def test_lockdown(machine: Machine) -> None:
    assert machine.check(passthrough.lockdown)[:2] == (PASS, "none")
    machine.write("/sys/kernel/security/lockdown", "[none] integrity confidentiality\n")
    assert machine.check(passthrough.lockdown)[0] is PASS
    machine.write("/sys/kernel/security/lockdown", "none [integrity] confidentiality\n")
    assert machine.check(passthrough.lockdown)[:2] == (
        WARN, "integrity: modules without a signature are not loaded"
    )  # fmt: skip


def test_variant_drivers_and_virtual_functions_need_a_newer_libvirt(machine: Machine) -> None:
    make(machine.root, (CARD, TWIN))
    assert machine.check(passthrough.libvirt_gates)[0] is PASS
    os.symlink(f"../{A}", machine.root / f"sys/bus/pci/devices/{B}/physfn")
    level, detail, _ = machine.check(passthrough.libvirt_gates)
    assert (level, detail) == (FAIL, f"{B} needs libvirt 9.7, it is 9.0")
    machine.program("virsh", "Running against daemon: 9.7.0")
    assert machine.check(passthrough.libvirt_gates)[:2] == (PASS, "9.7")


def test_an_apparmor_that_confines_qemu_needs_a_rule(machine: Machine) -> None:
    assert machine.check(passthrough.apparmor)[:2] == (PASS, "libvirt is not confined")
    machine.write("/sys/kernel/security/apparmor/profiles", "libvirtd (enforce)\nman_groff (complain)\n")
    level, detail, remedy = machine.check(passthrough.apparmor)
    assert (level, detail) == (WARN, "QEMU may not read /run/kvmpool/guests: guests find no endpoint by fw_cfg")
    assert "local/abstractions/libvirt-qemu" in remedy
    machine.write("/etc/apparmor.d/local/abstractions/libvirt-qemu", "/run/kvmpool/guests/** r,\n")
    assert machine.check(passthrough.apparmor)[0] is PASS

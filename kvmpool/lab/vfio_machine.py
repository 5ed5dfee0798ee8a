"""The VFIO lab's host as QEMU sees it: its command line, what it boots, its disk.

A q35 machine under TCG with an emulated IOMMU. Its root is the machine outside, read-only over 9p; its own state is on
a small disk, so that it survives a reboot. It has no network.
"""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
from pathlib import Path

from kvmpool.errors import NotFound
from kvmpool.lab import initramfs, process, vfio_cards
from kvmpool.lab.initramfs import Entry
from kvmpool.lab.kernel import Flavour, Kernel, kernel
from kvmpool.lab.vfio_agent import PORT_PREFIX
from kvmpool.lab.vfio_cards import Device
from kvmpool.lab.vfio_channel import PORTS, socket_name

HOSTNAME = "l1"
CONSOLE, MONITOR = "console.log", "monitor"
_INITRD, _DISK = "initrd.cpio", "disk.img"
_DISK_BYTES = 256 << 20  # sparse
_SOURCES = Path(__file__).with_name("guest") / "host"
_FILE, _DIRECTORY = 0o100755, 0o040755
_FOLDERS = ("dev", "proc", "sys", "root", "outside", "layer", "host", "modules")
# To have a root. crc32c: ext4 asks for it by name when it mounts
_EARLY = ("virtio_pci", "9pnet_virtio", "9p", "overlay", "virtio_console", "virtio_blk", "crc32c_generic", "ext4")
_LATE = ("vfio-pci", "vhost_vsock", "vsock_loopback", "tun", "bridge")  # as modules-load.d of a host would name them
# intel_iommu=on and nopt: DMA is translated, as with a guest's card. no_timer_check: on a busy machine the timer's test
# finds too few ticks and panics. The rest saves seconds of boot under TCG.
_COMMAND_LINE = (
    "console=ttyS0 quiet panic=-1 tsc=reliable mitigations=off nokaslr random.trust_cpu=on cryptomgr.notests"
    " no_timer_check intel_iommu=on iommu=nopt"
)
_MEMORY_MIB = 2048
_MKFS_S = 60.0

# folder of the disk -> where it belongs in the host
KEPT = {
    "etc-libvirt": "/etc/libvirt",
    "etc-kvmpool": "/etc/kvmpool",
    "lib-libvirt": "/var/lib/libvirt",
    "lib-kvmpool": "/var/lib/kvmpool",
    "log-libvirt": "/var/log/libvirt",
    "cache-libvirt": "/var/cache/libvirt",
}


def write_image(folder: Path) -> Path:
    """What it boots, into the lab's folder; the kernel's own path. Raises as kernel() does."""
    chosen = kernel(Flavour.FULL)
    (folder / _INITRD).write_bytes(_initrd(chosen))
    return chosen.image


def _initrd(chosen: Kernel) -> bytes:
    settings = {
        "host": HOSTNAME,
        "modules": str(chosen.tree),
        "kept": " ".join(f"{name}:{target}" for name, target in KEPT.items()),
        "load": " ".join(_LATE),
    }
    text = "".join(f"{name}={shlex.quote(value)}\n" for name, value in settings.items())
    entries = [Entry(name, _DIRECTORY) for name in _FOLDERS]
    entries += [Entry("init", _FILE, (_SOURCES / "init").read_bytes())]
    entries += [Entry("host/settings", _FILE, text.encode())]
    entries += [Entry("host/boot", _FILE, (_SOURCES / "boot").read_bytes())]
    entries += [Entry("host/agent.py", _FILE, Path(__file__).with_name("vfio_agent.py").read_bytes())]
    entries += initramfs.busybox()
    entries += initramfs.module_entries(chosen, _EARLY)
    return initramfs.cpio(initramfs.with_parents(entries))


def write_disk(folder: Path, files: dict[str, bytes], trees: dict[str, Path]) -> None:
    """A new disk with these files, and copies of these folders; names are below KEPT's ("etc-libvirt/qemu.conf")."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".disk-") as text:
        root = Path(text)
        for name in KEPT:
            (root / name).mkdir()
        for name, tree in trees.items():
            shutil.copytree(tree, root / name, dirs_exist_ok=True)
        for name, data in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)
        with (folder / _DISK).open("wb") as file:
            file.truncate(_DISK_BYTES)
        process.run(["mke2fs", "-q", "-t", "ext4", "-d", root, folder / _DISK], timeout_s=_MKFS_S)


def command(image: Path) -> list[str]:
    """QEMU's words, to be run in the lab's folder: its sockets are named without a path, which may be too long."""
    qemu = shutil.which("qemu-system-x86_64")
    if qemu is None:
        raise NotFound("qemu-system-x86_64 is missing. Next: apt-get install qemu-system-x86")
    words = [qemu, "-name", f"kvmpool-{HOSTNAME}", "-nodefaults", "-display", "none", "-no-reboot"]
    words += ["-M", "q35,kernel-irqchip=off", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max"]
    words += ["-smp", "1", "-m", str(_MEMORY_MIB)]
    words += ["-kernel", str(image), "-initrd", _INITRD, "-append", _COMMAND_LINE]
    words += ["-serial", f"file:{CONSOLE}", "-qmp", f"unix:{MONITOR},server=on,wait=off"]
    words += ["-fsdev", "local,id=outside,path=/,security_model=none,readonly=on,multidevs=remap"]
    words += ["-drive", f"if=none,id=disk,file={_DISK},format=raw,cache=unsafe"]
    # PCI's own hot plug, as of a real slot; ACPI's would answer in its place
    words += ["-global", "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off"]
    for port in range(PORTS):
        words += ["-chardev", f"socket,id={socket_name(port)},path={socket_name(port)},server=on,wait=off"]
    for device in _devices():
        words += ["-device", json.dumps(device)]
    return words


def _devices() -> list[Device]:
    """The IOMMU first: it translates for what comes after it. Then the root ports: they number the buses."""
    devices: list[Device] = [{"driver": "intel-iommu", "caching-mode": True, "intremap": "on"}]
    devices += vfio_cards.root_ports()
    devices += [{"driver": "virtio-9p-pci", "fsdev": "outside", "mount_tag": "outside"}]
    devices += [{"driver": "virtio-blk-pci", "drive": "disk"}, {"driver": "virtio-serial-pci"}]
    for port in range(PORTS):
        devices += [{"driver": "virtserialport", "chardev": socket_name(port), "name": f"{PORT_PREFIX}{port}"}]
    for card in vfio_cards.CARDS:
        devices += card.devices()
    return devices

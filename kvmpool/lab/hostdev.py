"""A lab host whose libvirt passes its soft cards through: the tier between namespaces and a host with an IOMMU.

libvirt's own hostdev code runs for real, on the soft cards' sysfs in the place of the host's, and on files in the place
of /dev/vfio; a fake bus binds drivers (fake_bus.py), QEMU gets an `edu` card for each that libvirt gives it
(qemu_wrapper.py). No IOMMU, no DMA, no reset: for those there is `lab up --vfio`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from kvmpool.errors import NotFound
from kvmpool.lab import fake_bus, images
from kvmpool.lab.hosts import Host

QEMU = "/usr/bin/qemu-system-x86_64"
_FILES = "/run/kvmpool-lab"
_USR = f"{_FILES}/usr"  # a second view of /usr: QEMU looks for its modules and ROMs from where it is itself
_REAL = QEMU.replace("/usr", _USR, 1)
_FAULTS = f"{_FILES}/faults"
_PRELOAD = f"{_FILES}/memlock.so"
# Nodes of /dev that libvirtd, QEMU and kvmpoold open; all others stay outside of such a host.
_NODES = ("null", "zero", "full", "random", "urandom", "tty", "kvm", "kmsg", "net/tun", "vsock", "vhost-vsock")

_PRIVATE_DEV = r"""
set -e
new=$1; tree=$2; shift 2
mkdir -p "$new"; mount -t tmpfs dev "$new"; mkdir -p "$new/net"
for node; do
    if [ -e "/dev/$node" ]; then : >"$new/$node"; mount --bind "/dev/$node" "$new/$node"; fi
done
for folder in pts shm; do mkdir -p "$new/$folder"; mount --bind "/dev/$folder" "$new/$folder"; done
ln -s pts/ptmx "$new/ptmx"
ln -s /proc/self/fd "$new/fd"
mkdir "$new/vfio"; mount --bind "$tree/dev/vfio" "$new/vfio"
mount --move "$new" /dev
mount --bind "$tree/sys/bus/pci" /sys/bus/pci
mount --bind "$tree/sys/kernel/iommu_groups" /sys/kernel/iommu_groups
"""


def prepare(host: Host, tree: str) -> None:
    """Make it one, before its libvirtd is started. `tree`: the folder of its soft cards, inside."""
    outside = host.outside(tree)
    fake_bus.adopt(outside)
    (outside / "dev/vfio/vfio").touch()
    fake_bus.make_process(outside, 1, "init", "/dev/null")
    host.outside(_FAULTS).mkdir(parents=True, exist_ok=True)
    _install_qemu(host)
    shutil.copy(images.memlock(), host.outside(_PRELOAD))
    host.run("sh", "-c", _PRIVATE_DEV, "sh", f"{_FILES}/dev", tree, *_NODES)
    start_bus(host, tree)


def start_bus(host: Host, tree: str) -> None:
    """Its bus binds drivers from now on."""
    host.start_daemon("bus", sys.executable, "-m", "kvmpool.lab.fake_bus", tree)


def environment() -> dict[str, str]:
    """Of its libvirtd, which has to believe that QEMU may pin memory."""
    return {"LD_PRELOAD": _PRELOAD}


def let_fail(host: Host, command: str, error: str) -> None:
    """QEMU's monitor answers this command with `error` from now on; see qemu_wrapper.py for what "" does."""
    host.outside(f"{_FAULTS}/{command}").write_text(error, encoding="utf-8")


def heal(host: Host) -> None:
    """No command fails any more."""
    for file in host.outside(_FAULTS).iterdir():
        file.unlink()


def _install_qemu(host: Host) -> None:
    if not Path(QEMU).exists():
        raise NotFound(f"no {QEMU}. Next: apt install qemu-system-x86")
    source = Path(__file__).with_name("qemu_wrapper.py").read_text(encoding="utf-8")
    text = f"#!{sys.executable} -SI\nREAL = {_REAL!r}\nFAULTS = {_FAULTS!r}\n{source}"
    wrapper = host.outside(f"{_FILES}/qemu-wrapper")
    wrapper.write_text(text, encoding="utf-8")
    wrapper.chmod(0o755)
    host.outside(_USR).mkdir()
    host.run("mount", "--bind", "/usr", _USR)
    host.run("mount", "--bind", f"{_FILES}/qemu-wrapper", QEMU)

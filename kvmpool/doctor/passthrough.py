"""Checks of what passing a whole card through takes: the IOMMU, the groups, vfio, the memory window, locked memory.

Only passthrough needs it: without any of it vGPU claims work, so most of these warn. Each looks at files under a root
that can be moved. Sources: kernel, driver-api/vfio.rst, admin-guide/kernel-parameters; proc(5); capabilities(7).
"""

from __future__ import annotations

import re
import socket

from kvmpool.daemon.config import Config
from kvmpool.device import pci
from kvmpool.device.sysroot import Sysroot
from kvmpool.device.topology import DEVICES, Unit, is_vfio, unit_of
from kvmpool.doctor.finding import Finding, Level, Place
from kvmpool.doctor.pool import config_or_defaults

AREA = "passthrough"
VARIANT_FLOOR = (9, 7)  # design 04 §4.2: libvirt that knows variant drivers of vfio and VFs of NVIDIA's
_HOOK_CONF = "/etc/libvirt/hooks/kvmpool/hook.conf"
_CAP_SYS_RESOURCE = 1 << 24  # capability.h
_GIB = 1 << 30
_WINDOW_GIB = 32  # what firmware of guests lays out above 4 GiB without being told (OVMF before 2023-03, SeaBIOS)
_BARS = 6
_SHOWN = 3


def kernel_options(place: Place) -> Finding:
    """An IOMMU that the firmware has and the kernel does not use shows no groups at all."""
    title = "kernel option for the IOMMU"
    if place.at("/sys/class/iommu").is_dir() and any(place.at("/sys/class/iommu").iterdir()):
        return Finding(AREA, title, Level.PASS)
    options = place.read("/proc/cmdline").split()
    if "GenuineIntel" in place.read("/proc/cpuinfo") and "intel_iommu=on" not in options:
        remedy = "add intel_iommu=on to the kernel command line, and reboot"
        return Finding(AREA, title, Level.WARN, "intel_iommu=on is missing", remedy)
    if "iommu=off" in options or "amd_iommu=off" in options or "intel_iommu=off" in options:
        return Finding(AREA, title, Level.WARN, "the kernel is told not to use it", "take iommu=off out, and reboot")
    remedy = "enable VT-d or AMD-Vi (IOMMU) in the firmware"
    return Finding(AREA, title, Level.WARN, "the firmware shows no IOMMU to the kernel", remedy)


def groups(place: Place) -> Finding:
    """vfio gives a group away as a whole: what else is in it must not be on a driver of the host."""
    title = "IOMMU groups of the cards"
    bad = []
    for unit in _units(place):
        others = [each.words for each in unit.foreign if each.driver and not is_vfio(each.driver)]
        if others:
            bad.append(f"group {unit.group} of {unit.address} is not viable: {', '.join(others)}")
    if bad:
        remedy = "put the card into a slot of its own port, or unbind what nothing needs"
        return Finding(AREA, title, Level.WARN, _some(bad), remedy)
    return Finding(AREA, title, Level.PASS)


def acs(place: Place) -> Finding:
    """Without Access Control Services on the ports above, cards can reach one another: the kernel groups them."""
    title = "cards are isolated from one another (ACS)"
    shared = {unit.group: unit.cards for unit in _units(place) if unit.group and len(unit.cards) > 1}
    if not shared:
        return Finding(AREA, title, Level.PASS)
    told = [f"group {group}: {' and '.join(cards)} go together" for group, cards in sorted(shared.items())]
    remedy = "enable ACS in the firmware, or move a card below another root port; as it is they are one unit"
    return Finding(AREA, title, Level.WARN, _some(told), remedy)


def vfio_modules(place: Place) -> Finding:
    title = "vfio-pci"
    if place.at("/sys/bus/pci/drivers/vfio-pci").is_dir():
        return Finding(AREA, title, Level.PASS, "loaded")
    release = place.read("/proc/sys/kernel/osrelease").strip()
    folder = f"/lib/modules/{release}"
    known = place.read(f"{folder}/modules.dep") + place.read(f"{folder}/modules.builtin")
    if re.search(r"(^|/)vfio[-_]pci\.ko", known, re.MULTILINE):
        return Finding(AREA, title, Level.PASS, "loaded when the first card needs it")
    remedy = "install the kernel's full module package (linux-image-amd64, not -cloud)"
    return Finding(AREA, title, Level.WARN, f"kernel {release or '?'} has no module vfio-pci", remedy)


def hook_reaches(place: Place) -> Finding:
    """The hook asks kvmpoold on the socket that its settings name: a dead one refuses every start with a claim."""
    title = "the hook reaches kvmpoold"
    told = dict(line.split("=", 1) for line in place.read(_HOOK_CONF).splitlines() if "=" in line and line[:1] != "#")
    path = told.get("socket", str(config_or_defaults(place).socket))
    trial = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        trial.settimeout(2.0)
        trial.connect(str(place.at(path) if place.at(path).exists() else path))
    except OSError as error:
        detail = f"{path}: {error.strerror or error}"
        return Finding(AREA, title, Level.FAIL, detail, "systemctl start kvmpoold; domains with a claim cannot start")
    finally:
        trial.close()
    return Finding(AREA, title, Level.PASS, path)


def memlock(place: Place) -> Finding:
    """libvirt raises QEMU's limit of locked memory for vfio, which takes CAP_SYS_RESOURCE or a limit that is high."""
    title = "locked memory for guests with a card"
    for folder in sorted(place.at("/proc").glob("[0-9]*")):
        name = f"/proc/{folder.name}"
        if place.read(f"{name}/comm").strip() not in ("libvirtd", "virtqemud"):
            continue
        limit = re.search(r"^Max locked memory\s+\S+\s+(\S+)", place.read(f"{name}/limits"), re.MULTILINE)
        able = re.search(r"^CapEff:\s*([0-9a-f]+)", place.read(f"{name}/status"), re.MULTILINE)
        if (limit and limit[1] == "unlimited") or (able and int(able[1], 16) & _CAP_SYS_RESOURCE):
            return Finding(AREA, title, Level.PASS)
        detail = f"libvirt cannot raise it over {limit[1] if limit else '?'} bytes: VFIO_MAP_DMA will fail"
        return Finding(AREA, title, Level.WARN, detail, "give libvirtd CAP_SYS_RESOURCE or LimitMEMLOCK=infinity")
    return Finding(AREA, title, Level.PASS, "not known: libvirt does not run")


def hugepages(place: Place) -> Finding:
    """A guest on huge pages takes them from its card's node: "unable to map backing store for guest RAM" without."""
    title = "huge pages on the cards' nodes"
    nodes = sorted({card.numa_node for card in _cards(place) if card.numa_node >= 0})
    reserved = {node: _pages(place, node) for node in nodes}
    if not any(total for total, _ in reserved.values()) or not nodes:
        return Finding(AREA, title, Level.PASS, "none reserved")
    short = [f"node {node} has {free} of {total} free" for node, (total, free) in reserved.items() if not free]
    if short:
        remedy = "reserve some on that node: /sys/devices/system/node/nodeN/hugepages/*/nr_hugepages"
        return Finding(AREA, title, Level.WARN, _some(short), remedy)
    return Finding(AREA, title, Level.PASS)


def window(place: Place) -> Finding:
    """A BAR without an address is a card that cannot be passed on; a large one needs room in the guest too."""
    title = "memory window of the cards"
    lost, large = [], []
    for card in _cards(place):
        for index, (start, size, used) in enumerate(_bars(place, card.address)):
            if used and not start:
                lost.append(f"{card.address} BAR {index} has no address")
            elif size > _WINDOW_GIB * _GIB:
                large.append(f"{card.address} BAR {index} is {size // _GIB} GiB")
    if lost:
        remedy = "enable Above 4G Decoding (and Resizable BAR) in the firmware, or boot with pci=realloc"
        return Finding(AREA, title, Level.WARN, _some(lost), remedy)
    if large:
        remedy = "guests need a 64-bit window as large: OVMF with -fw_cfg opt/ovmf/X-PciMmio64Mb, not SeaBIOS"
        return Finding(AREA, title, Level.WARN, _some(large), remedy)
    return Finding(AREA, title, Level.PASS)


def boot_display(place: Place) -> Finding:
    """The firmware has run the ROM of the boot display: what is read of it then is its shadow."""
    title = "no card is the boot display"
    shown = [unit.address for unit in _units(place) if unit.boot_vga]
    if shown:
        remedy = "choose another primary display in the firmware; else guests need a <rom file=...> of the card"
        return Finding(AREA, title, Level.WARN, _some([f"{address} is" for address in shown]), remedy)
    return Finding(AREA, title, Level.PASS)


def lockdown(place: Place) -> Finding:
    title = "kernel lockdown (secure boot)"
    found = re.search(r"\[(\w+)\]", place.read("/sys/kernel/security/lockdown"))
    if not found or found[1] == "none":
        return Finding(AREA, title, Level.PASS, "none")
    remedy = "sign the NVIDIA module with a key the firmware knows (mokutil --import), or switch secure boot off"
    return Finding(AREA, title, Level.WARN, f"{found[1]}: modules without a signature are not loaded", remedy)


def libvirt_gates(place: Place) -> Finding:
    """Cards on a variant driver of vfio, and virtual functions, are passed through by libvirt 9.7 and later only."""
    title = "libvirt is new enough for these cards"
    tree = Sysroot(place.root)
    needs = [
        card.address
        for card in _cards(place)
        if (is_vfio(card.driver) and card.driver != "vfio-pci") or tree.exists(f"{DEVICES}/{card.address}/physfn")
    ]
    if not needs:
        return Finding(AREA, title, Level.PASS)
    _, text = place.run(["virsh", "-c", place.libvirt_uri, "version", "--daemon"])
    found = re.search(r"Running against daemon: (\d+)\.(\d+)", text)
    if found and (int(found[1]), int(found[2])) >= VARIANT_FLOOR:
        return Finding(AREA, title, Level.PASS, f"{found[1]}.{found[2]}")
    has = f"{found[1]}.{found[2]}" if found else "not known"
    detail = f"{_some(needs)} needs libvirt 9.7, it is {has}"
    return Finding(AREA, title, Level.FAIL, detail, "upgrade libvirt; vGPU claims work with this one")


def apparmor(place: Place) -> Finding:
    """Its profile of QEMU knows what libvirt puts into a domain's XML, not the files that fw_cfg entries name."""
    title = "AppArmor"
    profiles = place.read("/sys/kernel/security/apparmor/profiles")
    if not re.search(r"^(/usr/sbin/)?(libvirtd|virtqemud)\S* \(enforce\)", profiles, re.MULTILINE):
        return Finding(AREA, title, Level.PASS, "libvirt is not confined")
    folder = f"{config_or_defaults(place).run_dir}/guests"
    rules = [
        place.read(f"/etc/apparmor.d/{name}")
        for name in (
            "abstractions/libvirt-qemu",
            "local/abstractions/libvirt-qemu",
            "abstractions/libvirt-qemu.d/kvmpool",
        )
    ]
    if any(folder in each for each in rules):
        return Finding(AREA, title, Level.PASS, "enforcing, with a rule for guests' files")
    remedy = f"echo '{folder}/** r,' >> /etc/apparmor.d/local/abstractions/libvirt-qemu; systemctl reload apparmor"
    return Finding(AREA, title, Level.WARN, f"QEMU may not read {folder}: guests find no endpoint by fw_cfg", remedy)


# --- what they look at ------------------------------------------------------------------------------------------------


def _cards(place: Place) -> tuple[pci.PciCard, ...]:
    config: Config = config_or_defaults(place)
    return pci.cards(Sysroot(place.root), config.cards.match) or ()


def _units(place: Place) -> list[Unit]:
    addresses = frozenset(card.address for card in _cards(place))
    return [unit_of(Sysroot(place.root), address, addresses) for address in sorted(addresses)]


def _pages(place: Place, node: int) -> tuple[int, int]:
    """Huge pages of a node, of all sizes: reserved, free."""
    folder = place.at(f"/sys/devices/system/node/node{node}/hugepages")
    total = free = 0
    for size in sorted(folder.glob("hugepages-*")):
        name = f"/sys/devices/system/node/node{node}/hugepages/{size.name}"
        total += int(place.read(f"{name}/nr_hugepages") or 0)
        free += int(place.read(f"{name}/free_hugepages") or 0)
    return total, free


def _bars(place: Place, address: str) -> list[tuple[int, int, bool]]:
    """Start, size, and whether there is one."""
    found = []
    for line in place.read(f"/{DEVICES}/{address}/resource").splitlines()[:_BARS]:
        try:
            start, end, flags = (int(word, 16) for word in line.split())
        except ValueError:
            continue
        found.append((start, end - start + 1 if end else 0, bool(flags)))
    return found


def _some(told: list[str]) -> str:
    more = f" (and {len(told) - _SHOWN} more)" if len(told) > _SHOWN else ""
    return "; ".join(told[:_SHOWN]) + more


CHECKS = (
    *(kernel_options, groups, acs, vfio_modules, hook_reaches, memlock, hugepages),
    *(window, boot_display, lockdown, libvirt_gates, apparmor),
)

"""Plans a new domain: what a person says of it, in; the recommended domain XML (design 04 §4.2), out. Pure.

q35 with empty root ports, one of them kept for each card so that it always appears at the same guest address, vsock and
agent channel always there (a domain can go from passthrough to vGPU without a hot plug), no memory balloon (its pages
would be pinned memory of a passthrough card).
This module does not know libvirt; it looks at no disk.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID

from lxml import etree

from kvmpool.errors import ClaimInvalid
from kvmpool.virt.claim_attributes import shown, spec_of
from kvmpool.virt.domain_xml import MAX_CLAIMS, NAMESPACE, PREFIX, fw_cfg_entries

# Root ports that libvirt fills by itself in their order: at most 4 disks, 2 networks, usb, serial and vsock; then at
# least 4 that stay empty for what is attached later (04 §4.2). The cards' own ports come after them.
_FREE_PORTS = 15
_MAX_DISKS, _MAX_NETWORKS = 4, 2
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,62}")
_PATH = re.compile(r"/[^\0\n\r]{1,1000}")
_FORMATS = {".qcow2": "qcow2", ".img": "raw", ".raw": "raw"}
_UNITS = {"": 1, "MiB": 1, "GiB": 1024, "TiB": 1 << 20}


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk's image. The format is never probed: a raw image's content could name any file of the host."""

    path: str
    format: str  # "raw", "qcow2"


@dataclass(frozen=True, slots=True)
class DomainPlan:
    """A domain to define. `gpus`: the attributes of each <claim>; `networks`: "default", "bridge=br0"."""

    name: str
    memory_mib: int
    vcpus: int
    disks: tuple[Disk, ...] = ()
    networks: tuple[str, ...] = ()
    gpus: tuple[Mapping[str, str], ...] = ()
    cdrom: str = ""
    uefi: bool = False
    kvm: bool = True
    vsock: bool = True  # False: the host has none, and QEMU would not start


def disk_of(text: str) -> Disk:
    """`PATH` or `PATH,format=qcow2`. Raises ClaimInvalid."""
    path, comma, rest = text.partition(",")
    if not _PATH.fullmatch(path):
        raise ClaimInvalid(f"disk {shown(text)} is not an absolute path. Next: --disk /PATH/TO/vm0.qcow2")
    if comma and not re.fullmatch("format=(raw|qcow2)", rest):
        raise ClaimInvalid(f"disk {shown(text)}: {shown(rest)}. Allowed after the path: ,format=raw or ,format=qcow2")
    known = rest.removeprefix("format=") or _FORMATS.get(path[path.rfind(".") :], "")
    if not known:
        raise ClaimInvalid(f"disk {shown(text)}: its name does not say its format. Next: --disk {path},format=raw")
    return Disk(path, known)


def memory_of(text: str) -> int:
    """MiB of `4096`, `4096MiB`, `4GiB`. Raises ClaimInvalid."""
    match = re.fullmatch(r"([1-9][0-9]{0,8}) ?(MiB|GiB|TiB)?", text)
    mib = int(match[1]) * _UNITS[match[2] or ""] if match else 0
    if not 64 <= mib <= 64 << 20:
        raise ClaimInvalid(f"memory is {shown(text)}. Allowed: 64 MiB to 64 TiB, as 4096, 4096MiB or 4GiB")
    return mib


def gpu_of(text: str, number: int) -> dict[str, str]:
    """The claim of `mode=vgpu,memory=4GiB,compute=25`; its name is gpu<number> unless said. Raises ClaimInvalid."""
    attributes: dict[str, str] = {}
    for pair in filter(None, text.split(",")):
        key, sign, value = pair.partition("=")
        if not sign or not key or key in attributes:
            why = "is there twice" if key in attributes else "is not KEY=VALUE"
            raise ClaimInvalid(f"gpu {shown(text)}: {shown(pair)} {why}. Next: --gpu mode=vgpu,memory=4GiB")
        attributes[key] = value
    return {"name": f"gpu{number}", "mode": "vgpu", **attributes}


def checked(plan: DomainPlan) -> DomainPlan:
    """The plan itself. Raises ClaimInvalid for the first thing in it that no domain can be."""
    if not _NAME.fullmatch(plan.name):
        raise ClaimInvalid(f"name {shown(plan.name)}. Allowed: letters, digits, '_', '.', '+', '-', up to 63")
    limits = (
        (1 <= plan.vcpus <= 4096, f"{plan.vcpus} vcpus. Allowed: 1 to 4096"),
        (len(plan.disks) <= _MAX_DISKS, f"{len(plan.disks)} disks. Allowed: up to {_MAX_DISKS}; more: virsh edit"),
        (len(plan.networks) <= _MAX_NETWORKS, f"{len(plan.networks)} networks. Allowed: up to {_MAX_NETWORKS}"),
        (len(plan.gpus) <= MAX_CLAIMS, f"{len(plan.gpus)} GPUs. Allowed: up to {MAX_CLAIMS}"),
        (not plan.cdrom or bool(_PATH.fullmatch(plan.cdrom)), f"cdrom {shown(plan.cdrom)} is not an absolute path"),
    )
    for holds, fault in limits:
        if not holds:
            raise ClaimInvalid(f"domain {plan.name}: {fault}")
    for network in plan.networks:
        if not re.fullmatch(r"(bridge=)?[A-Za-z0-9_.-]{1,64}", network):
            raise ClaimInvalid(f"domain {plan.name}: network {shown(network)}. Allowed: NAME of a network, bridge=NAME")
    names = [spec_of(plan.name, gpu).name for gpu in plan.gpus]
    if len(set(names)) < len(names):
        raise ClaimInvalid(f"domain {plan.name}: claims {', '.join(names)}. Allowed: each name once")
    return plan


def card_port(claim: str) -> str:
    """The alias of the root port that is kept for a claim's card: it gives the card's address in the guest."""
    return f"ua-{PREFIX}-{claim}-port"


def claims_xml(gpus: tuple[Mapping[str, str], ...]) -> str:
    """The `<metadata>` element that asks for these claims, for virt-install, virt-xml or virsh edit."""
    metadata = etree.Element("metadata")
    _claims(metadata, gpus)
    etree.indent(metadata)
    return etree.tostring(metadata, encoding="unicode")


def domain_xml(plan: DomainPlan, uuid: UUID, guests: str) -> str:
    """The domain. `guests`: the folder of kvmpoold's files for guests. The same plan and uuid give the same text."""
    checked(plan)
    domain = etree.Element("domain", type="kvm" if plan.kvm else "qemu")
    _text(domain, "name", plan.name)
    _text(domain, "uuid", str(uuid))
    if plan.gpus:
        _claims(etree.SubElement(domain, "metadata"), plan.gpus)
    _text(domain, "memory", str(plan.memory_mib), unit="MiB")
    _text(domain, "vcpu", str(plan.vcpus))
    _boot(domain, plan)
    if any(gpu["mode"] != "passthrough" for gpu in plan.gpus):
        sysinfo = etree.SubElement(domain, "sysinfo", type="fwcfg")
        for name, file in fw_cfg_entries(f"{guests}/{uuid}").items():
            etree.SubElement(sysinfo, "entry", name=name, file=file)
    features = etree.SubElement(domain, "features")
    etree.SubElement(features, "acpi")
    etree.SubElement(features, "apic")
    etree.SubElement(domain, "cpu", mode="host-passthrough" if plan.kvm else "maximum")
    _devices(etree.SubElement(domain, "devices"), plan)
    etree.indent(domain)
    return etree.tostring(domain, encoding="unicode") + "\n"


def _claims(metadata: etree._Element, gpus: tuple[Mapping[str, str], ...]) -> None:
    claims = etree.SubElement(metadata, f"{{{NAMESPACE}}}claims", nsmap={PREFIX: NAMESPACE})
    for gpu in gpus:
        etree.SubElement(claims, f"{{{NAMESPACE}}}claim", dict(gpu))


def _boot(domain: etree._Element, plan: DomainPlan) -> None:
    os_element = etree.SubElement(domain, "os")
    if plan.uefi:
        os_element.set("firmware", "efi")
    _text(os_element, "type", "hvm", arch="x86_64", machine="q35")
    if plan.cdrom:
        etree.SubElement(os_element, "boot", dev="cdrom")
    etree.SubElement(os_element, "boot", dev="hd")


def _devices(devices: etree._Element, plan: DomainPlan) -> None:
    for number, disk in enumerate(plan.disks):
        element = etree.SubElement(devices, "disk", type="file", device="disk")
        etree.SubElement(element, "driver", name="qemu", type=disk.format)
        etree.SubElement(element, "source", file=disk.path)
        etree.SubElement(element, "target", dev=f"vd{chr(ord('a') + number)}", bus="virtio")
    if plan.cdrom:
        element = etree.SubElement(devices, "disk", type="file", device="cdrom")
        etree.SubElement(element, "driver", name="qemu", type="raw")
        etree.SubElement(element, "source", file=plan.cdrom)
        etree.SubElement(element, "target", dev="sda", bus="sata")
        etree.SubElement(element, "readonly")
    _ports(devices, plan)
    for network in plan.networks:
        bridge = network.removeprefix("bridge=") if network.startswith("bridge=") else ""
        element = etree.SubElement(devices, "interface", type="bridge" if bridge else "network")
        etree.SubElement(element, "source", {"bridge": bridge} if bridge else {"network": network})
        etree.SubElement(element, "model", type="virtio")
    if plan.vsock:
        vsock = etree.SubElement(devices, "vsock", model="virtio")
        etree.SubElement(vsock, "cid", auto="yes")
    channel = etree.SubElement(devices, "channel", type="unix")
    etree.SubElement(channel, "target", type="virtio", name="org.qemu.guest_agent.0")
    etree.SubElement(devices, "console", type="pty")
    etree.SubElement(devices, "memballoon", model="none")


def _ports(devices: etree._Element, plan: DomainPlan) -> None:
    etree.SubElement(devices, "controller", type="pci", index="0", model="pcie-root")
    claims = [""] * _FREE_PORTS + [gpu["name"] for gpu in plan.gpus]
    for index, claim in enumerate(claims, start=1):
        port = etree.SubElement(devices, "controller", type="pci", index=str(index), model="pcie-root-port")
        if claim:
            etree.SubElement(port, "alias", name=card_port(claim))


def _text(parent: etree._Element, tag: str, text: str, **attributes: str) -> None:
    etree.SubElement(parent, tag, attributes).text = text

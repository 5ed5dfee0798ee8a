"""The XML of a passthrough card in a domain, and which host devices a domain has. Pure; does not know libvirt."""

from __future__ import annotations

import re
from collections.abc import Mapping

from lxml import etree

from kvmpool.core.model import HostdevSeen
from kvmpool.core.plug import ALIAS
from kvmpool.errors import Refused
from kvmpool.virt.domain_xml import parse

_ADDRESS = re.compile(r"([0-9a-f]{4}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")


def hostdevs_of(xml: str) -> tuple[HostdevSeen, ...]:
    """The PCI devices of the host that a domain has, in its order."""
    found = []
    for element in parse(xml).iterfind("devices/hostdev[@type='pci']"):
        source = element.find("source/address")
        alias = element.find("alias")
        if source is not None:
            parts = [_number(source.get(name, "")) for name in ("domain", "bus", "slot", "function")]
            address = f"{parts[0]:04x}:{parts[1]:02x}:{parts[2]:02x}.{parts[3]:x}"
            found.append(HostdevSeen(address, "" if alias is None else alias.get("name", "")))
    return tuple(found)


def hostdev_xml(alias: str, address: str, bus: str) -> str:
    """A card as libvirt attaches it. `bus`: the guest's, "0x10", or "": where libvirt finds room.

    managed="no": kvmpool owns the binding to vfio-pci, libvirt must neither take nor give it back.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise Refused(f"{address!r} is not a PCI address such as 0000:41:00.0. Next: kvmpool card list")
    hostdev = etree.Element("hostdev", mode="subsystem", type="pci", managed="no")
    source = etree.SubElement(hostdev, "source")
    named = dict(zip(("domain", "bus", "slot", "function"), (f"0x{part}" for part in match.groups()), strict=True))
    etree.SubElement(source, "address", named)
    etree.SubElement(hostdev, "alias", name=alias)
    if bus:
        place = {"type": "pci", "domain": "0x0000", "bus": bus, "slot": "0x00", "function": "0x0"}
        etree.SubElement(hostdev, "address", place)
    return etree.tostring(hostdev, encoding="unicode")


def with_hostdevs(xml: str, cards: Mapping[str, str]) -> str:
    """The domain with these cards (alias -> host address) too. Raises Refused where it has one of that alias."""
    root = parse(xml)
    devices = root.find("devices")
    if devices is None:
        devices = etree.SubElement(root, "devices")
    taken = {device.alias: device.address for device in hostdevs_of(xml)}
    for alias, address in cards.items():
        if alias in taken:
            name = root.findtext("name")
            why = f"domain {name}: its definition has card {taken[alias]} as {alias}, which kvmpool gives it by itself"
            raise Refused(f"{why}. Next: virsh edit {name}, take that <hostdev> out")
        devices.append(etree.fromstring(hostdev_xml(alias, address, kept_bus(xml, alias))))
    return etree.tostring(root, encoding="unicode")


def kept_bus(xml: str, alias: str) -> str:
    """The guest's bus that a domain keeps for the card called `alias`: its root port has that alias and "-port".

    "" where it keeps none. libvirt's number of a bus is the index of the port's controller.
    """
    for port in parse(xml).iterfind("devices/controller[@type='pci']"):
        named = port.find("alias")
        if named is not None and named.get("name") == f"{alias}-port":
            return f"0x{int(port.get('index', '0')):02x}"
    return ""


def ours(devices: tuple[HostdevSeen, ...]) -> tuple[HostdevSeen, ...]:
    return tuple(device for device in devices if device.alias.startswith(ALIAS))


def _number(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        return 0

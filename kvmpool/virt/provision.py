"""Defines, starts and stops domains through libvirt, and reads back what libvirt kept. Blocking."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import libvirt

from kvmpool.errors import NotFound, Refused
from kvmpool.virt.device_xml import hostdevs_of
from kvmpool.virt.domain_xml import claims_of, parse
from kvmpool.virt.plan import DomainPlan, domain_xml
from kvmpool.virt.plugs import explained

_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
KVM, VSOCK = Path("/dev/kvm"), Path("/dev/vhost-vsock")


def define(connection: libvirt.virConnect, plan: DomainPlan, guests: str, *, only_print: bool) -> str:
    """The domain's XML: as it would be defined with `only_print`, else as libvirt has it after it was defined.

    Raises ClaimInvalid, and Refused where a domain has that name, a disk is missing, or libvirt dropped a claim.
    """
    plan = replace(plan, kvm=KVM.exists(), vsock=VSOCK.exists())
    xml = domain_xml(plan, uuid4(), guests)
    if only_print:
        return xml
    if _lookup(connection, plan.name) is not None:
        raise Refused(f"domain {plan.name} exists. Next: virsh undefine {plan.name}, or another name")
    for path in [disk.path for disk in plan.disks] + ([plan.cdrom] if plan.cdrom else []):
        if not os.path.exists(path):
            raise Refused(f"domain {plan.name}: {path} does not exist. Next: qemu-img create -f qcow2 {path} 20G")
    domain = connection.defineXMLFlags(xml, libvirt.VIR_DOMAIN_DEFINE_VALIDATE)
    kept: str = domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE | libvirt.VIR_DOMAIN_XML_SECURE)
    if claims_of(kept) != claims_of(xml):
        domain.undefine()
        raise Refused(f"domain {plan.name}: libvirt did not keep the claims as written. Next: kvmpool doctor")
    return kept


def start(connection: libvirt.virConnect, name: str) -> None:
    """As `virsh start`: the hook serves its claims first. Raises NotFound, Refused with the hook's own line."""
    domain = _find(connection, name)
    if domain.isActive():
        raise Refused(f"domain {name} is running. Next: kvmpool domain show {name}")
    domain.create()


def definition(connection: libvirt.virConnect, which: str) -> str:
    """The XML from which a domain (its name or uuid) would be started now.

    Raises NotFound, Refused where it runs.
    """
    domain = _find(connection, which)
    name = domain.name()
    if domain.isActive():
        raise Refused(f"domain {name} is running. Next: kvmpool domain show {name}")
    xml: str = domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE | libvirt.VIR_DOMAIN_XML_SECURE)
    return xml


def create(connection: libvirt.virConnect, xml: str) -> None:
    """Start a domain from this XML; its definition stays as it is. Raises Refused with the hook's own line."""
    name = parse(xml).findtext("name") or ""
    if _find(connection, name).hasManagedSaveImage():
        raise Refused(f"domain {name} has a saved state, with other cards. Next: virsh managedsave-remove {name}")
    cards = ", ".join(device.address for device in hostdevs_of(xml))
    with explained(name, cards):
        connection.createXML(xml, 0)


def stop(connection: libvirt.virConnect, name: str, *, force: bool) -> None:
    """Ask the guest to power off; with `force` end it at once. Raises NotFound, Refused."""
    domain = _find(connection, name)
    if not domain.isActive():
        raise Refused(f"domain {name} is not running. Next: kvmpool domain start {name}")
    if force:
        domain.destroy()
    else:
        domain.shutdown()


def runs(connection: libvirt.virConnect, name: str) -> bool:
    """False also for a domain that is not there any more."""
    domain = _lookup(connection, name)
    return domain is not None and bool(domain.isActive())


def _find(connection: libvirt.virConnect, name: str) -> libvirt.virDomain:
    domain = _lookup(connection, name)
    if domain is None:
        raise NotFound(f"no domain {name!r} on this host. Next: kvmpool domain list")
    return domain


def _lookup(connection: libvirt.virConnect, name: str) -> libvirt.virDomain | None:
    """By its name, or by its uuid."""
    try:
        return connection.lookupByUUIDString(name) if _UUID.fullmatch(name) else connection.lookupByName(name)
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
            return None
        raise

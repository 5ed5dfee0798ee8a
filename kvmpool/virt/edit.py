"""Writes claims into a domain's persistent definition and takes them out, and reads back what libvirt kept. Blocking.

A domain with claims finds its endpoint and token through fw_cfg. Where those entries change too, both are written in
one definition: both or nothing. A running domain keeps what it was started with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import libvirt
from lxml import etree

from kvmpool.core.model import ClaimSpec, Mode
from kvmpool.core.place import modes
from kvmpool.errors import NotFound, Refused
from kvmpool.native import data
from kvmpool.virt.claim_attributes import refusal, spec_of
from kvmpool.virt.domain_xml import (
    NAMESPACE,
    PREFIX,
    claims_of,
    fw_cfg_entries,
    namespaced,
    with_claim,
    with_fw_cfg,
    with_metadata,
    with_shared,
    without_claim,
)
from kvmpool.virt.shared_memory import wanted_mib

# SECURE: a definition that is read without it and written back has lost its passwords.
_DEFINITION = libvirt.VIR_DOMAIN_XML_INACTIVE | libvirt.VIR_DOMAIN_XML_SECURE
SHARED = "shared_memory"  # beside the attributes of <claim>: it is a device of the domain, for all its claims


Keep = Callable[[str, str], None]


def _nobody_keeps(uuid: str, xml: str) -> None:
    return None


def add_claim(
    connection: libvirt.virConnect, name: str, given: Mapping[str, str], guests: str, keep: Keep = _nobody_keeps
) -> ClaimSpec:
    """One claim more for the domain; what libvirt kept of it. `guests`: the folder of kvmpoold's files for guests.

    `given`: the attributes of <claim>, and SHARED where the domain's device of shared memory is to be changed.

    `keep`: is given the domain's uuid and its definition before it is edited.
    Raises NotFound, ClaimInvalid, Refused; then the domain is as it was.
    """
    domain = _find(connection, name)
    before = domain.XMLDesc(_DEFINITION)
    attributes = {key: value for key, value in given.items() if key != SHARED}
    shared = wanted_mib(name, given[SHARED]) if SHARED in given else None
    element = with_claim(before, attributes)
    asked = spec_of(name, attributes)
    _check_schema(name, element)
    keep(domain.UUIDString(), before)
    _write(connection, domain, before, element, _entries(before, element, f"{guests}/{domain.UUIDString()}"), shared)
    if asked not in claims_of(domain.XMLDesc(_DEFINITION)).claims:
        connection.defineXML(before)
        raise Refused(f"domain {name}: libvirt did not keep claim {asked.name} as written. Next: virsh dumpxml {name}")
    return asked


def remove_claim(connection: libvirt.virConnect, name: str, claim: str, guests: str) -> None:
    """The domain without that claim, and without our fw_cfg entries and device when it was the last.

    Raises NotFound, Refused.
    """
    domain = _find(connection, name)
    before = domain.XMLDesc(_DEFINITION)
    element = without_claim(before, claim)
    entries = _entries(before, element, f"{guests}/{domain.UUIDString()}")
    _write(connection, domain, before, element, entries, None if element else 0)


def _entries(before: str, element: str | None, folder: str) -> dict[str, str]:
    """For a domain that may get a vGPU: of others kvmpoold writes no files, and without them QEMU does not start."""
    claims = claims_of(with_metadata(before, element)).claims
    return fw_cfg_entries(folder) if any(Mode.VGPU in modes(claim) for claim in claims) else {}


def _find(connection: libvirt.virConnect, name: str) -> libvirt.virDomain:
    try:
        domain = connection.lookupByName(name)
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
            raise NotFound(f"no domain {name!r} on this host. Next: virsh list --all") from error
        raise
    if not domain.isPersistent():
        raise Refused(f"domain {name} is transient: its claims are in the XML it was created from. Next: virsh define")
    return domain


def _write(
    connection: libvirt.virConnect,
    domain: libvirt.virDomain,
    before: str,
    element: str | None,
    entries: Mapping[str, str],
    shared: int | None,
) -> None:
    """`shared`: the MiB of its device of shared memory, 0 for none, None to leave it as it is."""
    told = with_fw_cfg(before, entries)
    sharing = None if shared is None else with_shared(told or before, shared)
    definition = sharing or told
    if definition is None:
        kind, config = libvirt.VIR_DOMAIN_METADATA_ELEMENT, libvirt.VIR_DOMAIN_AFFECT_CONFIG
        domain.setMetadata(kind, element, PREFIX, NAMESPACE, config)
    else:
        connection.defineXMLFlags(with_metadata(definition, element), libvirt.VIR_DOMAIN_DEFINE_VALIDATE)


def _check_schema(domain: str, element: str) -> None:
    schema = _schema()
    if not schema.validate(namespaced(element)):
        last = schema.error_log.last_error
        raise refusal(domain, f"xml/claim.rng does not allow these claims: {last.message if last else '?'}")


@lru_cache(maxsize=1)
def _schema() -> etree.RelaxNG:
    return etree.RelaxNG(etree.parse(data("xml", "claim.rng")))

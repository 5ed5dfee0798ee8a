"""Reads the domains of a connection: which run, and what their metadata asks for. Blocking."""

from __future__ import annotations

import libvirt

from kvmpool.core.model import ClaimSpec, DomainSeen, DomainUuid
from kvmpool.errors import ClaimInvalid
from kvmpool.virt.domain_xml import cid_of, claims_of

_MARK = "urn:kvmpool:"  # what a domain of ours has in its XML, and hardly any other
_NO_ID = -1  # of a domain that has no QEMU

_STATES = {
    libvirt.VIR_DOMAIN_NOSTATE: "no state",
    libvirt.VIR_DOMAIN_RUNNING: "running",
    libvirt.VIR_DOMAIN_BLOCKED: "blocked",
    libvirt.VIR_DOMAIN_PAUSED: "paused",
    libvirt.VIR_DOMAIN_SHUTDOWN: "in shutdown",
    libvirt.VIR_DOMAIN_SHUTOFF: "shut off",
    libvirt.VIR_DOMAIN_CRASHED: "crashed",
    libvirt.VIR_DOMAIN_PMSUSPENDED: "suspended",
}


def domains(connection: libvirt.virConnect) -> tuple[DomainSeen, ...]:
    """All of them, sorted by name. A domain that goes away meanwhile is left out."""
    seen = []
    for domain, stats in connection.getAllDomainStats(libvirt.VIR_DOMAIN_STATS_STATE, 0):
        try:
            seen.append(_domain(domain, int(stats.get("state.state", libvirt.VIR_DOMAIN_NOSTATE))))
        except libvirt.libvirtError as error:
            if error.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN:
                raise
    return tuple(sorted(seen, key=lambda domain: domain.name))


def _domain(domain: libvirt.virDomain, state: int) -> DomainSeen:
    xml = domain.XMLDesc(0)
    claims: tuple[ClaimSpec, ...] = ()
    fault, cid = "", 0
    try:
        if _MARK in xml:
            claims, cid = claims_of(xml).claims, cid_of(xml)
    except ClaimInvalid as error:
        fault = str(error)
    return DomainSeen(
        uuid=DomainUuid(domain.UUIDString().lower()),
        name=domain.name(),
        running=domain.ID() != _NO_ID,
        claims=claims,
        claims_error=fault,
        state=_STATES.get(state, f"state {state}"),
        cid=cid,
    )

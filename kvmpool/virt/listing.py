"""Reads the domains of a connection: which run, and what their metadata asks for. Blocking."""

from __future__ import annotations

from pathlib import Path

import libvirt

from kvmpool.core.model import ClaimSpec, DomainSeen, DomainUuid
from kvmpool.errors import ClaimInvalid
from kvmpool.virt.device_xml import hostdevs_of
from kvmpool.virt.domain_xml import cid_of, claims_of
from kvmpool.virt.plugs import is_halted

_MARK = "urn:kvmpool:"  # what a domain of ours has in its XML, and hardly any other
QEMU_PIDS = Path("/run/libvirt/qemu")  # <name>.pid of each domain that libvirtd started on this host
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
            reason = int(stats.get("state.reason", -1))
            seen.append(_domain(domain, int(stats.get("state.state", libvirt.VIR_DOMAIN_NOSTATE)), reason))
        except libvirt.libvirtError as error:
            if error.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN:
                raise
    return tuple(sorted(seen, key=lambda domain: domain.name))


def _domain(domain: libvirt.virDomain, state: int, reason: int) -> DomainSeen:
    xml = domain.XMLDesc(0)
    claims: tuple[ClaimSpec, ...] = ()
    fault, cid = "", 0
    try:
        if _MARK in xml:
            claims, cid = claims_of(xml).claims, cid_of(xml)
    except ClaimInvalid as error:
        fault = str(error)
    uuid, name, running = DomainUuid(domain.UUIDString().lower()), domain.name(), domain.ID() != _NO_ID
    return DomainSeen(
        uuid=uuid,
        name=name,
        running=running,
        claims=claims,
        claims_error=fault,
        state=_STATES.get(state, f"state {state}"),
        pid=qemu_pid(name, uuid) if running and _MARK in xml else 0,
        cid=cid,
        hostdevs=hostdevs_of(xml) if running and "<hostdev" in xml else (),
        halted=running and is_halted(state, reason),
    )


def qemu_pid(name: str, uuid: DomainUuid, folder: Path = QEMU_PIDS, proc: Path = Path("/proc")) -> int:
    """The process of a running domain of this host; 0 where that is not certain.

    libvirt's API does not tell it. Its pid file does, of a QEMU that may have ended since: the process must be one that
    was started for this very domain (`-uuid` in QEMU's command line, src/qemu/qemu_command.c).
    """
    try:
        pid = int((folder / f"{name}.pid").read_text())
        words = (proc / str(pid) / "cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return 0
    return pid if (b"-uuid", uuid.encode()) in zip(words, words[1:], strict=False) else 0

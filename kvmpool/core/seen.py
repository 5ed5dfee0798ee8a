"""What is observed, as values: domains, cards, workers and relays at one look, and the signals of a card's health.

An observation is never an order: it is folded into a verdict or compared with rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvmpool.core.rows import (
    CardId,
    ClaimKey,
    ClaimSpec,
    DomainUuid,
    Generation,
    Mode,
    PciFacts,
)

# --- what is observed -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostdevSeen:
    """A PCI device of the host in a running domain. `alias` is ours (core/plug.py: alias_of) or ""."""

    address: str  # on the host, "0000:41:00.0"
    alias: str = ""


@dataclass(frozen=True, slots=True)
class DomainSeen:
    """A libvirt domain at one look. `claims` come from its metadata; `claims_error` says why they cannot be read."""

    uuid: DomainUuid
    name: str
    running: bool  # running or paused or in shutdown: a QEMU process exists
    claims: tuple[ClaimSpec, ...] = ()
    claims_error: str = ""
    state: str = ""  # libvirt's word, for people
    pid: int = 0  # of its QEMU, of a running domain with claims; 0: not known
    cid: int = 0  # the vsock address of its QEMU now, of a domain with claims; 0: none
    hostdevs: tuple[HostdevSeen, ...] = ()  # that it has now, running
    halted: bool = False  # QEMU itself has stopped it for an error (AER): `cont` is refused until a reset


@dataclass(frozen=True, slots=True)
class CardSeen:
    """A card at one look at NVML and sysfs. `fault` says what could not be read; then nothing else may be believed.

    Only a driver tells model and memory: without one they are "" and 0 where nobody has ever known them.
    """

    id: CardId
    address: str
    model: str
    memory_mib: int
    driver: str = ""
    compute_capability: str = ""
    numa_node: int = -1
    present: bool = True
    fault: str = ""
    mode: Mode = Mode.VGPU
    pci: PciFacts = field(default_factory=PciFacts)


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """A worker process of this host that is alive now (its lock is held)."""

    claim: ClaimKey
    generation: Generation
    address: str  # "unix:/..." where its relay connects
    pid: int
    sessions: int = 0
    memory_used_mib: int = 0
    pinned_mib: int = 0  # page-locked host memory that its claim may have
    pinned_used_mib: int = 0
    relay_connected: bool = False
    card: CardId | None = None
    transports: tuple[str, ...] = ()  # of its sessions: shm, unix, tcp, vsock
    serving: bool = True  # False: alive, not ready or not answering on its control socket


@dataclass(frozen=True, slots=True)
class RelaySeen:
    """A domain's relay of this host that is alive now. `points`: claim name -> generation it is pointed at."""

    domain: DomainUuid
    endpoint: str
    pid: int
    points: dict[str, Generation] = field(default_factory=dict)
    sessions: int = 0
    follows: int = 0  # the QEMU after which it ends, once we are not there to close it; 0: none


# --- health signals (folded by core/health.py) ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class XidSignal:
    """The driver reported an XID. `recovery_action`: NVML's verdict if the source knew it (0 none), None if unknown."""

    card: CardId
    xid: int
    at: float
    text: str = ""
    recovery_action: int | None = None


@dataclass(frozen=True, slots=True)
class ProbeSignal:
    """A probe's result. `lost`: it read all ones or GPU_IS_LOST; `timed_out`: no answer within its deadline."""

    card: CardId
    at: float
    ok: bool
    lost: bool = False
    timed_out: bool = False
    recovery_action: int = 0
    text: str = ""


@dataclass(frozen=True, slots=True)
class GoneSignal:
    """The card's address left the bus (udev remove or an inventory poll): hard evidence."""

    card: CardId
    at: float
    text: str = ""


@dataclass(frozen=True, slots=True)
class UnknownSignal:
    """Nothing can be said of the card now (no driver, version mismatch, NVML or sysfs unreadable)."""

    card: CardId
    at: float
    text: str = ""


@dataclass(frozen=True, slots=True)
class EccSignal:
    """NVML reported a double-bit ECC error."""

    card: CardId
    at: float
    text: str = ""


@dataclass(frozen=True, slots=True)
class BusErrorSignal:
    """The bus told an error of the card (AER, its link). `fatal`: whoever used it has lost it, a reset may cure it."""

    card: CardId
    at: float
    fatal: bool
    text: str


@dataclass(frozen=True, slots=True)
class WedgedSignal:
    """A driver does not let go of the card, and its unbind cannot be ended: only a reboot of the host does."""

    card: CardId
    at: float
    text: str


class ResetResult(Enum):
    """How a card's reset ended."""

    DONE = "done"  # it answers again, as the device that it was
    FAILED = "failed"  # it was tried, and the card is not well after it
    IMPOSSIBLE = "impossible"  # nobody knows how to reset it; nothing was tried


@dataclass(frozen=True, slots=True)
class ResetSignal:
    """The card was reset, or could not be."""

    card: CardId
    at: float
    result: ResetResult
    text: str = ""


HealthSignal = (
    XidSignal | ProbeSignal | GoneSignal | UnknownSignal | EccSignal | BusErrorSignal | WedgedSignal | ResetSignal
)

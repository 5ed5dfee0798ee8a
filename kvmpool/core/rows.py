"""The rows of the store as values, and the words they are made of.

Frozen everywhere; a change is a new value. Times are seconds on the host's CLOCK_BOOTTIME (floats), never wall clock,
and are compared only on the host (and boot) that wrote them. Memory is in MiB, compute in percent of one card.
This module does not know how rows are encoded (store/codec.py) nor when they change (phase.py, reconcile_*.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

HostName = NewType("HostName", str)
CardId = NewType("CardId", str)  # "GPU-8-4-4-4-12", lower case; "PCI-IDS@SLOT" where no driver has ever told it
DomainUuid = NewType("DomainUuid", str)  # lower case with dashes
Generation = NewType("Generation", int)  # pool-wide counter, starts at 1, never reused
BootId = NewType("BootId", str)


class Mode(Enum):
    """How a card is handed out, and what a claim asks for (`ANY`: claims only; `OFF`: cards only, no driver has it)."""

    VGPU = "vgpu"
    PASSTHROUGH = "passthrough"
    ANY = "any"
    OFF = "off"


class Verdict(Enum):
    """What is known of a card's health (design 05 §5.3). HEALTHY takes bindings, PROBATION preemptible ones."""

    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DRAINING = "draining"
    FAILED = "failed"
    QUARANTINED = "quarantined"
    RESETTING = "resetting"
    PROBATION = "probation"
    DEAD = "dead"
    LEMON = "lemon"
    WEDGED = "wedged"


class Phase(Enum):
    """Of a binding. PREPARING -> READY -> RELEASING -> (row deleted).

    BROKEN: its worker is gone or cannot start. LOST: its host is gone, without proof.
    """

    PREPARING = "preparing"
    READY = "ready"
    BROKEN = "broken"
    RELEASING = "releasing"
    LOST = "lost"


class Hold(Enum):
    """When a claim holds its card."""

    DOMAIN = "domain"
    PROCESS = "process"


class OnFailure(Enum):
    """What happens to a claim whose card fails."""

    REBIND = "rebind"
    REPLAY = "replay"
    NONE = "none"


class Plug(Enum):
    LIVE = "live"
    BOOT = "boot"


class OnUnplug(Enum):
    HOT_ONLY = "hot-only"
    RESET = "reset"
    COLD = "cold"


class Numa(Enum):
    ANY = "any"
    PREFERRED = "preferred"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True, order=True)
class ClaimKey:
    """Identity of a claim: the domain's uuid and the claim's name in it."""

    domain: DomainUuid
    name: str


@dataclass(frozen=True, slots=True)
class ClaimSpec:
    """What a domain's XML asks for under one `<claim>` (design 04 §4.2): already valid, defaults filled in."""

    name: str
    mode: Mode
    memory_mib: int = 0  # guaranteed; > 0 for vgpu
    memory_limit_mib: int = 0  # >= memory_mib
    compute_percent: int = 0  # guaranteed; 0 = best effort
    compute_limit_percent: int = 100
    count: int = 1
    order: tuple[Mode, ...] = ()
    model: str = ""
    vendor: str = ""
    min_memory_mib: int = 0
    numa: Numa = Numa.PREFERRED
    tenant: str = "default"
    priority: int = 50
    preemptible: bool = False
    hold: Hold = Hold.DOMAIN
    plug: Plug = Plug.LIVE
    on_unplug: OnUnplug = OnUnplug.HOT_ONLY
    on_failure: OnFailure = OnFailure.REBIND
    ha: bool = False
    required: bool = True


# --- rows of the store ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Host:
    """A machine that runs kvmpoold. Written by its own daemon; `up=False` only by the leader."""

    name: HostName
    boot_id: BootId
    version: str
    up: bool = True


@dataclass(frozen=True, slots=True)
class Health:
    """The fold of everything observed of one card (core/health.py owns its meaning). Times: boottime of `boot_id`."""

    verdict: Verdict = Verdict.UNKNOWN  # never assume health that nobody measured
    reason: str = ""
    since: float = 0.0
    boot_id: BootId = BootId("")
    last_xid: int = 0
    last_signal_at: float = 0.0  # last corroborating signal
    clean_probes: int = 0
    clean_since: float = 0.0
    lost_reads: int = 0
    lost_since: float = 0.0
    failures: tuple[float, ...] = ()  # times of FAILED in the lemon window
    probation_s: float = 0.0
    app_xids: int = 0  # counted only
    hard: bool = False  # the failure's evidence is hard (lease lost, address gone)
    fatal: bool = False  # only a reboot or an operator brings the card back
    on_probation: bool = False  # a suspicion that clears leads back to PROBATION, not to HEALTHY
    cleared_at: float = 0.0  # when it last entered RESETTING: older signals belong to the incident before
    restored: int = 0  # the last CardWish.restore that was obeyed


@dataclass(frozen=True, slots=True)
class PciFacts:
    """What the bus says of a card: who it is without a driver, and what has to go along when its mode is switched."""

    ids: str = ""  # vendor:device:subsystem vendor:subsystem device, in hex
    slot: str = ""  # the ports on the way to it, "0000:00-01.0-00.0": stays when the bus is numbered anew
    iommu_group: str = ""  # "": none, so it cannot be passed through
    functions: tuple[str, ...] = ()  # addresses that change their driver together: of the card, its siblings, its unit
    foreign: tuple[str, ...] = ()  # other devices of its IOMMU group, ports left out
    reset_methods: tuple[str, ...] = ()
    boot_vga: bool = False


def slot_name(facts: PciFacts) -> CardId:
    """The identity of a card whose uuid no driver has ever told."""
    return CardId(f"PCI-{facts.ids}@{facts.slot}")


@dataclass(frozen=True, slots=True)
class Switching:
    """What became of a person's wish for a mode (CardWish.mode). Written by the card's host."""

    answered: int = 0  # the CardWish.mode_ticket that was carried out or refused
    fault: str = ""  # why the card is not in the mode that is wished for; "" where it is, or is about to be
    failed_boot: BootId = BootId("")  # a switch of this ticket failed then and was undone: that boot tries no other


@dataclass(frozen=True, slots=True)
class Card:
    """A physical GPU as its host last published it. Written by its host only. `mode`: the one seen, by its driver."""

    id: CardId
    host: HostName
    address: str  # PCI, "0000:41:00.0"
    model: str
    memory_mib: int
    mode: Mode = Mode.VGPU
    driver: str = ""
    compute_capability: str = ""
    numa_node: int = -1
    health: Health = field(default_factory=Health)
    pci: PciFacts = field(default_factory=PciFacts)
    switching: Switching = field(default_factory=Switching)

    @property
    def label(self) -> str:
        """`host/address`, the form people read."""
        return f"{self.host}/{self.address}"


@dataclass(frozen=True, slots=True)
class CardWish:
    """What a person wants of a card."""

    card: CardId
    cordoned: bool = False
    drain: bool = False
    mode: Mode | None = None  # the one to be in, over reboots; None: as it is found
    mode_ticket: int = 0  # raised by one each time a mode is asked for
    restore: int = 0  # an operator's "it is repaired": raised by one each time (core/health.py: restore)
    reason: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """A domain's live request: exists from `prepare` until its domain is gone. Written by the domain's host."""

    key: ClaimKey
    domain_name: str
    host: HostName
    spec: ClaimSpec
    attempt: int
    sequence: int  # queue order, from the pool-wide sequence
    pointed: Generation | None = None  # the generation its relay serves; None: no relay points anywhere
    endpoint: str = ""  # what the guest dials, e.g. "tcp:10.77.0.1:9960"; constant over failovers
    served: Generation | None = None  # the last generation its relay ever pointed at: not None is "had a binding"

    @property
    def label(self) -> str:
        return f"{self.domain_name}/{self.key.name}"


@dataclass(frozen=True, slots=True, order=True)
class Process:
    """A process of a host. Pids are used again; the two together are not, within one boot."""

    pid: int
    started: int  # clock ticks since boot


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a domain. Open from `prepare` until the domain is seen running (`started=True`) or is withdrawn.

    With a `holder` there is no domain: it is a run of that process, started from the beginning.
    """

    domain: DomainUuid
    domain_name: str
    host: HostName
    counter: int
    deadline: float  # boottime on `host`: after it, without a running domain, the attempt is withdrawn
    boot_id: BootId
    started: bool = False
    holder: Process | None = None
    shared_mib: int = 0  # of the domain's device of shared memory; 0: it has none
    restart: bool = False  # it is powered off to get rid of a card (on_unplug="cold"), and is to be started again


@dataclass(frozen=True, slots=True)
class Binding:
    """ "This claim is served by this card", the Nth time. Prints as `vm0/gpu0#2`."""

    claim: ClaimKey
    generation: Generation
    domain_name: str
    domain_host: HostName
    card: CardId
    card_host: HostName
    memory_mib: int
    memory_limit_mib: int
    compute_percent: int
    compute_limit_percent: int
    mode: Mode = Mode.VGPU
    phase: Phase = Phase.PREPARING
    reason: str = ""  # why it is in this phase
    worker: str = ""  # where its relay reaches the worker, "unix:/run/kvmpool/..."; set with READY

    @property
    def label(self) -> str:
        return f"{self.domain_name}/{self.claim.name}#{self.generation}"


@dataclass(frozen=True, slots=True)
class Breaker:
    """The failover breaker's memory (core/breaker.py). Times: boottime of the leader.

    `open_reason` non-empty: there is no automatic failover on soft evidence until a person closes it.
    """

    failovers: tuple[tuple[float, CardId], ...] = ()  # (boottime, card) on soft evidence, in the window
    open_reason: str = ""
    opened_at: float = 0.0
    broken: tuple[tuple[float, str], ...] = ()  # (boottime, claim label) of rebinds after a worker broke, in the window
    acknowledged: tuple[tuple[float, CardId], ...] = ()  # (boottime, card) out of service when a person closed it


@dataclass(frozen=True, slots=True)
class Settings:
    """Pool-wide policy, from the config (and wishes). Windows in seconds."""

    paused: bool = False
    memory_ratio: float = 1.0
    breaker_window_s: float = 60.0
    breaker_host_fraction: float = 0.30
    breaker_pool_fraction: float = 0.20
    breaker_min_cards: int = 2
    breaker_incident_s: float = 2.0  # cards lost within it behind one host are one incident
    broken_limit: int = 3  # rebinds of one claim in the breaker's window whose workers broke on healthy cards
    prepare_deadline_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Unread:
    """What the rows that cannot be read are about (an unknown version, damage). They are never taken for absent."""

    hosts: frozenset[HostName] = frozenset()
    cards: frozenset[CardId] = frozenset()
    wishes: frozenset[CardId] = frozenset()
    claims: frozenset[ClaimKey] = frozenset()
    attempts: frozenset[DomainUuid] = frozenset()
    bindings: frozenset[tuple[ClaimKey, Generation]] = frozenset()
    counter: bool = False
    breaker: bool = False

    @property
    def touched(self) -> frozenset[ClaimKey]:
        """Claims of which the claim itself or a binding cannot be read."""
        return self.claims | {claim for claim, _ in self.bindings}

    @property
    def domains(self) -> frozenset[DomainUuid]:
        return self.attempts | {claim.domain for claim in self.touched}


@dataclass(frozen=True, slots=True)
class Rows:
    """The state read from the store at one revision. Maps are insertion-ordered by key.

    `revisions` is key text -> mod_rev, for guards.
    """

    revision: int
    hosts: dict[HostName, Host] = field(default_factory=dict)
    cards: dict[CardId, Card] = field(default_factory=dict)
    wishes: dict[CardId, CardWish] = field(default_factory=dict)
    claims: dict[ClaimKey, Claim] = field(default_factory=dict)
    attempts: dict[DomainUuid, Attempt] = field(default_factory=dict)
    bindings: dict[tuple[ClaimKey, Generation], Binding] = field(default_factory=dict)
    breaker: Breaker = field(default_factory=Breaker)
    counter: int = 0  # last generation given out
    sequence: int = 0  # last place in the queue (and attempt) given out
    revisions: dict[str, int] = field(default_factory=dict)
    unread: Unread = field(default_factory=Unread)


# --- the event log ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the pool's log as people and the API see it. `wall` is wall-clock seconds, for display only."""

    subject: str  # "vm0/gpu0#2", "h0/0000:41:00.0", "vm0"
    kind: str  # "bound", "ready", "released", "failed", "withdrawn", ...
    reason: str
    host: HostName
    at: float = 0.0
    wall: float = 0.0

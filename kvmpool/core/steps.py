"""What is decided and done, as values: the leader's decisions, and the steps of a host."""

from __future__ import annotations

from dataclasses import dataclass

from kvmpool.core.rows import (
    Attempt,
    Binding,
    Card,
    CardId,
    CardWish,
    ClaimKey,
    DomainUuid,
    Generation,
    Mode,
    OnUnplug,
)

# --- decisions of the leader ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bind:
    """Create this binding row (PREPARING); its generation is already the next of the counter."""

    binding: Binding
    reason: str
    failover_of: CardId | None = None  # the card whose failure it answers (for the breaker's memory)


@dataclass(frozen=True, slots=True)
class Release:
    """Move this binding to RELEASING. Its memory stays taken until its card's host deletes the row."""

    binding: Binding
    reason: str
    failover_of: CardId | None = None  # the failed card on soft evidence, for the breaker's memory
    broken: bool = False  # it answers a broken worker, for the breaker's memory


@dataclass(frozen=True, slots=True)
class Lose:
    """Move this binding to LOST: its host is gone without proof."""

    binding: Binding
    reason: str


@dataclass(frozen=True, slots=True)
class TripBreaker:
    """Open the breaker: stop automatic failovers until a person closes it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can be done for this claim now. `reason`: for the user; `cards`: each one's first failing predicate."""

    claim: ClaimKey
    label: str
    reason: str
    cards: tuple[tuple[str, str], ...] = ()  # (card label, predicate's sentence)


Decision = Bind | Release | Lose | TripBreaker | Wait


# --- steps of a host --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartWorker:
    binding: Binding


@dataclass(frozen=True, slots=True)
class StopWorker:
    claim: ClaimKey
    generation: Generation
    pid: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReportReady:
    binding: Binding
    worker: str


@dataclass(frozen=True, slots=True)
class ReportBroken:
    binding: Binding
    reason: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Delete the row of a RELEASING (or LOST, back on its host) binding: proved free."""

    binding: Binding
    reason: str


@dataclass(frozen=True, slots=True)
class PublishCard:
    card: Card
    reason: str  # "" when only an unimportant field moved
    mode_event: tuple[str, str] | None = None  # kind and reason of what its mode has become
    replaces: CardId | None = None  # the name it had before a driver told its uuid: its row and wish go over


@dataclass(frozen=True, slots=True)
class SwitchMode:
    """Give the card, and all functions of its unit, to the driver of another mode. `ticket`: of the wish it answers."""

    card: Card
    mode: Mode
    ticket: int
    reason: str


@dataclass(frozen=True, slots=True)
class ResetCard:
    """Reset a card that failed and that nobody holds; what became of it is a signal of its health."""

    card: Card
    reason: str


@dataclass(frozen=True, slots=True)
class RecordMode:
    """Write down the mode that the configuration wants of a card of which no person has said anything."""

    wish: CardWish
    reason: str


CardStep = (
    StartWorker | StopWorker | ReportReady | ReportBroken | Forget | PublishCard | SwitchMode | RecordMode | ResetCard
)


@dataclass(frozen=True, slots=True)
class OpenRelay:
    """Start the domain's relay. `endpoint` "" means: choose one; else the one it had (constant over restarts)."""

    domain: DomainUuid
    domain_name: str
    claims: tuple[str, ...]
    endpoint: str
    shared_mib: int = 0  # of the domain's device of shared memory


@dataclass(frozen=True, slots=True)
class PointRelay:
    """Point one claim of a relay at a worker; drops that claim's sessions of any other generation."""

    domain: DomainUuid
    claim: str
    generation: Generation
    worker: str
    memory_mib: int


@dataclass(frozen=True, slots=True)
class UnpointRelay:
    """The claim is served by nobody now: new sessions wait or are refused, the old ones are cut."""

    domain: DomainUuid
    claim: str
    reason: str


@dataclass(frozen=True, slots=True)
class FollowDomain:
    """Watch over the domain's relay. Once its QEMU has ended and nobody watches, it and its workers end themselves."""

    domain: DomainUuid
    pid: int


@dataclass(frozen=True, slots=True)
class RecordPointed:
    """Write into the claim row which generation its relay serves, and at which endpoint."""

    claim: ClaimKey
    pointed: Generation | None
    endpoint: str


@dataclass(frozen=True, slots=True)
class CloseRelay:
    """End the domain's relay, and remove what is left of one that has ended."""

    domain: DomainUuid
    reason: str


@dataclass(frozen=True, slots=True)
class AttachDevice:
    """Plug a binding's card into its running domain, at the guest address that its claim always has."""

    domain: DomainUuid
    binding: Binding
    address: str  # on the host


@dataclass(frozen=True, slots=True)
class DetachDevice:
    """Ask the guest to give a card back, and wait for libvirt's proof that it is gone."""

    domain: DomainUuid
    domain_name: str
    alias: str
    address: str  # on the host
    reason: str


@dataclass(frozen=True, slots=True)
class ForceUnplug:
    """The guest did not give the card back in as many tries as it has: what its claim's `on_unplug` says."""

    domain: DomainUuid
    domain_name: str
    alias: str
    how: OnUnplug
    reason: str


@dataclass(frozen=True, slots=True)
class PowerOn:
    """Start a domain again that was powered off to get rid of a card. Its `prepare` replaces the attempt."""

    domain: DomainUuid
    domain_name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Delete the claim rows and the attempt row of a domain."""

    domain: DomainUuid
    domain_name: str
    claims: tuple[ClaimKey, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class MarkStarted:
    """The domain of this attempt is seen running."""

    attempt: Attempt


PlugStep = AttachDevice | DetachDevice | ForceUnplug | RecordPointed | ReportBroken | Forget
RelayStep = OpenRelay | PointRelay | UnpointRelay | FollowDomain | CloseRelay
DomainStep = RelayStep | PlugStep | PowerOn | Withdraw | MarkStarted

"""Every effect kvmpool has on the world, as Protocols. Adapters have them, `sim.world` in memory; kvmpoold.py chooses.

All methods raise only kvmpool.errors. Every call has a deadline inside its adapter: none waits for ever.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvmpool.core.model import (
    Binding,
    BootId,
    Card,
    CardId,
    CardSeen,
    ClaimKey,
    DomainSeen,
    DomainUuid,
    Generation,
    HealthSignal,
    Mode,
    ProbeSignal,
    Process,
    RelaySeen,
    UnknownSignal,
    WorkerSeen,
)


class Clock(Protocol):
    """Time as the loops see it."""

    def now(self) -> float:
        """Seconds on CLOCK_BOOTTIME."""

    def wall(self) -> float:
        """Wall-clock seconds, for display only."""

    def boot_id(self) -> BootId:
        """Of this boot of this host."""

    async def sleep(self, delay_s: float) -> None: ...


# --- the store (design 06 §6.1) ---------------------------------------------------------------------------------------


class Must(Enum):
    """A guard that is not a revision."""

    ABSENT = "absent"
    PRESENT = "present"


Guard = tuple[str, int | Must]


@dataclass(frozen=True, slots=True)
class Item:
    key: str
    value: bytes
    mod_rev: int


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes
    lease: int | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """A right that ends by itself, never before sent_at + granted_ttl_s. `sent_at`: boottime of the grant."""

    id: int
    granted_ttl_s: float
    sent_at: float


class Resolution(Enum):
    NOT_APPLIED = "not-applied"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class WatchEvent:
    key: str
    value: bytes | None  # None: deleted
    mod_rev: int


@dataclass(frozen=True, slots=True)
class Batch:
    """All events of one revision, in order."""

    rev: int
    events: tuple[WatchEvent, ...]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Nothing happened up to `rev`."""

    rev: int


@dataclass(frozen=True, slots=True)
class Resync:
    """Events are missing: list again, then watch from `rev`."""

    rev: int


class Store(Protocol):
    """Linearizable keys and values. Keys: text without control characters, at most 512 bytes; values: at most 1 MiB."""

    async def get(self, key: str) -> Item | None: ...

    async def list(self, prefix: str) -> tuple[tuple[Item, ...], int]:
        """Items under `prefix` sorted by key, and the store's revision they were all read at."""

    async def commit(
        self,
        op_id: str,
        *,
        guards: Sequence[Guard] = (),
        puts: Sequence[Put] = (),
        deletes: Sequence[str] = (),
    ) -> int:
        """Apply all or nothing; returns the new revision. Raises Conflict, Ambiguous(op_id), StoreUnreachable."""

    async def resolve(self, op_id: str) -> int | Resolution:
        """The revision `op_id` was applied at, NOT_APPLIED, or UNKNOWN (its journal is collected after 10 min)."""

    async def lease_grant(self, ttl_s: float) -> Lease: ...

    async def lease_keepalive(self, lease_id: int) -> float:
        """The TTL granted anew. Raises NotFound when the lease is gone."""

    async def lease_revoke(self, lease_id: int) -> None: ...

    def watch(self, prefix: str, after_rev: int) -> AsyncIterator[Batch | Heartbeat | Resync]:
        """Every revision after `after_rev` on `prefix`, in order; yields within 5 s; ends when the store closes."""

    async def close(self) -> None: ...


# --- the host's hands and eyes ----------------------------------------------------------------------------------------


class Hypervisor(Protocol):
    """libvirt, as seen from one host. Never called on the path of a hook (the domain's lock is held there)."""

    async def domains(self) -> tuple[DomainSeen, ...]:
        """All domains of this host, sorted by name. Raises Unreachable: then nothing may be concluded."""

    def wakeups(self) -> AsyncIterator[str]:
        """A short text each time something may have changed (lifecycle, metadata, reconnect)."""

    async def close(self) -> None: ...


class Plugs(Protocol):
    """Cards in and out of running domains. Never called on the path of a hook."""

    async def attach(self, domain: DomainUuid, alias: str, address: str) -> None:
        """Give the host's device at `address` to the running domain, which knows it as `alias`; idempotent.

        At the guest address that the domain keeps for that alias, or where libvirt finds room. Raises Refused with
        libvirt's reason, NotFound, Unreachable.
        """

    async def detach(self, domain: DomainUuid, alias: str) -> None:
        """Ask the guest to give it back and wait for libvirt's proof. Idempotent.

        Raises DeadlinePassed where the guest has not answered, Refused where it said no, NotFound, Unreachable.
        """

    async def reset(self, domain: DomainUuid) -> None:
        """Reset the machine: an unplug that was asked for is then done. Raises NotFound, Refused, Unreachable."""

    async def power_off(self, domain: DomainUuid) -> None:
        """End its QEMU at once. Raises NotFound, Unreachable."""

    async def power_on(self, domain: DomainUuid) -> None:
        """Start the domain, as a person would: its hook runs. Raises NotFound, Refused, Unreachable."""


class Cards(Protocol):
    """The cards of this host as NVML and sysfs show them."""

    async def inventory(self) -> tuple[CardSeen, ...]:
        """All cards, sorted by address. Raises Unreachable when NVML and sysfs both tell nothing."""

    async def probe(self, card: CardId, deadline_s: float) -> ProbeSignal | UnknownSignal:
        """Ask the card something that a sick one fails. Never raises for a sick card: it says so.

        UnknownSignal where nothing can be said of it (no driver, another version of it): then it is not a sick card.
        """

    async def close(self) -> None: ...


class Modes(Protocol):
    """Gives cards to the driver of another mode, a card's whole unit together; resets cards. One at a time."""

    async def plan(self, card: Card, mode: Mode) -> tuple[str, ...]:
        """What `switch` would do, a line a change; () where the card is in that mode. Changes nothing.

        Raises CardBusy where somebody holds the card (the message names them), Refused where it cannot be done.
        """

    async def switch(self, card: Card, mode: Mode) -> None:
        """Idempotent. Raises CardBusy and Refused (nothing was changed), SwitchFailed (it was undone), CardWedged."""

    async def reset(self, card: Card) -> None:
        """Reset a card that is on vfio-pci and that nobody holds; it answers again when this returns.

        Raises NoReset where nobody knows how, CardBusy and Refused (nothing was done), CardLost where it was tried and
        the card is not well after it, CardWedged where the reset does not end.
        """

    async def recover(self) -> tuple[str, ...]:
        """Ends what an earlier life of ours left half done; a line for each unit, also where that could not be done."""


class HealthSource(Protocol):
    """NVML's event set, the kernel log, udev: whatever reports by itself."""

    def signals(self) -> AsyncIterator[HealthSignal]: ...

    async def close(self) -> None: ...


class Workers(Protocol):
    """The worker processes of this host. They outlive kvmpoold; `list` finds them by their locks."""

    async def list(self) -> tuple[WorkerSeen, ...]: ...

    async def start(self, binding: Binding) -> WorkerSeen:
        """Start the worker and wait until it serves. Raises CardLost, Unreachable.

        Idempotent: a live one of this generation is returned.
        """

    async def stop(self, claim: ClaimKey, generation: Generation, pid: int) -> None:
        """End it (and all its sessions) and return when its process is proved gone.

        Raises DeadlinePassed when it does not go (hung card).
        """


class Processes(Protocol):
    """Processes of this host that hold a run's claim."""

    def identify(self, pid: int) -> Process:
        """Raises NotFound."""

    def lives(self, process: Process) -> bool: ...

    def follow(self, processes: Collection[Process], ended: Callable[[], None]) -> None:
        """From now on call `ended` when one of these ends. Whom only an earlier call named is let go."""


class Relays(Protocol):
    """The relay processes of this host, one a domain. They outlive kvmpoold."""

    async def list(self) -> tuple[RelaySeen, ...]: ...

    async def open(
        self, domain: DomainUuid, domain_name: str, claims: Sequence[str], endpoint: str, shared_mib: int = 0
    ) -> RelaySeen:
        """Start the domain's relay listening; `endpoint` "" chooses one. Idempotent.

        Writes the guest's endpoint and token files, and makes the memory behind its device of shared memory, if any.
        """

    async def point(
        self, domain: DomainUuid, claim: str, generation: Generation, worker: str, memory_mib: int
    ) -> None: ...

    async def unpoint(self, domain: DomainUuid, claim: str, reason: str) -> None: ...

    async def follow(self, domain: DomainUuid, pid: int) -> None:
        """From now on the relay ends by itself once process `pid` (the domain's QEMU) and we have ended.

        Raises Unreachable, also where there is no such process.
        """

    async def close(self, domain: DomainUuid) -> None:
        """End it and remove its endpoint and token files. Idempotent."""

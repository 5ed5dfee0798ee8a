"""What POST /v1/runs does: a claim of its own for a process of this host, served before the answer.

The process is the one that asks, known by the kernel's word about its socket; it then becomes the program (exec), so
that the claim lives as long as the program does. Its rows are a domain's, with a made-up uuid and the process in them.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Protocol, TypedDict

from kvmpool.api.access import Peer
from kvmpool.api.hooks import Hooks
from kvmpool.core.model import ClaimKey, ClaimSpec, DomainUuid, Process
from kvmpool.core.place import unsupported
from kvmpool.daemon.ledger import Ledger
from kvmpool.errors import ClaimInvalid, NoCapacity, NotFound, Refused
from kvmpool.virt.claim_attributes import spec_of
from kvmpool.virt.domain_xml import DomainClaims

CLAIM = "gpu0"
_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
_ATTRIBUTES = frozenset(
    ("memory", "memory_limit", "compute", "compute_limit", "model", "priority", "preemptible", "on_failure", "tenant")
)


class RunBody(TypedDict):
    """POST /v1/runs: what the program needs to reach its GPU, and what it got."""

    name: str
    uuid: str
    claim: str
    endpoint: str
    token: str
    binding: str
    card: str
    memory_mib: int


class Places(Protocol):
    """Where a run reaches its relay. All raise Unreachable."""

    def make(self, domain: DomainUuid, gid: int) -> str: ...

    def token(self, domain: DomainUuid) -> str: ...

    def remove(self, domain: DomainUuid) -> None: ...


class Identify(Protocol):
    """ports.Processes, as far as it is needed here."""

    def identify(self, pid: int) -> Process: ...


class Runs:
    """The runs of one host."""

    def __init__(self, hooks: Hooks, ledger: Ledger, places: Places, processes: Identify) -> None:
        self._hooks = hooks
        self._ledger = ledger
        self._places = places
        self._processes = processes

    async def start(self, asked: Mapping[str, str], peer: Peer) -> RunBody:
        """A claim for the process that asks, served. Raises what the person should read."""
        holder = self._holder(peer)
        name = asked.get("name", f"run-{peer.pid}")
        spec = _spec(name, {key: value for key, value in asked.items() if key != "name"})
        await self._unused(name)
        domain = DomainUuid(str(uuid.uuid4()))
        try:
            endpoint = self._places.make(domain, peer.gid)
            claims = DomainClaims(domain, name, (spec,))
            await self._hooks.serve_run(claims, (spec,), holder, endpoint)
        except NoCapacity as error:
            raise NoCapacity(f"{str(error).rpartition('. Next:')[0]}. Next: kvmpool card list") from error
        finally:
            self._places.remove(domain)  # where no relay came
        return await self._body(domain, name)

    def _holder(self, peer: Peer) -> Process:
        try:
            return self._processes.identify(peer.pid)
        except NotFound as error:
            raise Refused(
                "kvmpoold does not see the process that asks: it is in another pid namespace. "
                "Next: call kvmpool run on the host itself"
            ) from error

    async def _unused(self, name: str) -> None:
        for attempt in (await self._ledger.read()).rows.attempts.values():
            if attempt.domain_name == name:
                raise Refused(f"the name {name} is taken by a run or a domain with claims. Next: choose another --name")

    async def _body(self, domain: DomainUuid, name: str) -> RunBody:
        rows = (await self._ledger.read()).rows
        claim = rows.claims.get(ClaimKey(domain, CLAIM))
        binding = claim and claim.pointed and rows.bindings.get((claim.key, claim.pointed))
        if not claim or not binding:
            raise Refused(f"{name}: its claim was withdrawn meanwhile. Next: journalctl -u kvmpoold")
        card = rows.cards.get(binding.card)
        return RunBody(
            name=name,
            uuid=domain,
            claim=CLAIM,
            endpoint=claim.endpoint,
            token=self._places.token(domain),
            binding=binding.label,
            card=card.label if card else binding.card,
            memory_mib=binding.memory_mib,
        )


def _spec(name: str, attributes: Mapping[str, str]) -> ClaimSpec:
    """Raises ClaimInvalid."""
    if not _NAME.fullmatch(name):
        raise ClaimInvalid(
            f"{name[:60]!r} is no name for a run. Allowed: a lower-case letter, then up to 31 of a-z, 0-9 and '-'"
        )
    unknown = sorted(attributes.keys() - _ATTRIBUTES)
    if unknown:
        allowed = ", ".join(sorted(_ATTRIBUTES))
        raise ClaimInvalid(f"a run has no attribute {unknown[0][:60]!r}. Allowed: name, {allowed}")
    try:
        spec = spec_of(name, {"name": CLAIM, "mode": "vgpu", **attributes})
    except ClaimInvalid as error:
        line = str(error).removeprefix(f"domain {name}: claim {CLAIM}: ").partition(". Next:")[0]
        raise ClaimInvalid(f"{line}. Next: kvmpool run --help") from error
    reason = unsupported(spec)
    if reason is not None:
        raise Refused(f"{name}: {reason}. Next: kvmpool run --help")
    return spec

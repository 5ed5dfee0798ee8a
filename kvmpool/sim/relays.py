"""The relays of a simulated host, as the port Relays that its loops see."""

from __future__ import annotations

from collections.abc import Sequence

from kvmpool.core.model import DomainUuid, Generation, RelaySeen
from kvmpool.errors import Unreachable
from kvmpool.sim.world import SimHost, SimRelay, World


class SimRelays:
    """ports.Relays over a host's relay processes."""

    def __init__(self, world: World, host: SimHost) -> None:
        self._world, self._host = world, host

    async def list(self) -> tuple[RelaySeen, ...]:
        return tuple(self._seen(uuid, relay) for uuid, relay in sorted(self._host.relays.items()))

    async def open(
        self, domain: DomainUuid, domain_name: str, claims: Sequence[str], endpoint: str, shared_mib: int = 0
    ) -> RelaySeen:
        if domain not in self._host.relays:
            pid = self._world.next_pid()
            self._host.relays[domain] = SimRelay(endpoint or f"tcp:10.77.0.1:{20000 + pid}", pid)
            self._world.note(f"{self._host.name}: relay of {domain_name} listens")
        return self._seen(domain, self._host.relays[domain])

    async def point(self, domain: DomainUuid, claim: str, generation: Generation, worker: str, memory_mib: int) -> None:
        if domain not in self._host.relays:
            raise Unreachable(f"domain {domain} has no relay on {self._host.name}")
        self._world.point(self._host, domain, claim, (generation, worker))
        self._world.note(f"{self._host.name}: relay points {claim} at #{generation}")

    async def unpoint(self, domain: DomainUuid, claim: str, reason: str) -> None:
        if domain in self._host.relays:
            self._world.point(self._host, domain, claim, None)

    async def follow(self, domain: DomainUuid, pid: int) -> None:
        if domain not in self._host.relays or not self._host.runs(domain, pid):
            raise Unreachable(f"domain {domain}: no relay here, or no process {pid} to follow")
        relay = self._host.relays[domain]
        relay.follows, relay.watcher = pid, self._host.daemon

    async def close(self, domain: DomainUuid) -> None:
        self._world.end_relay(self._host, domain)

    def _seen(self, domain: DomainUuid, relay: SimRelay) -> RelaySeen:
        points = {claim: generation for claim, (generation, _) in relay.points.items()}
        follows = relay.follows if relay.watcher == self._host.daemon else 0
        return RelaySeen(domain, relay.endpoint, relay.pid, points, follows=follows)

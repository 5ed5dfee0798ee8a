"""ports.Hypervisor and ports.Plugs over the domains of a simulated host: some guests give a card back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from kvmpool.core.model import DomainSeen, DomainUuid, HostdevSeen
from kvmpool.errors import DeadlinePassed, NotFound, Refused, Unreachable
from kvmpool.sim.world import Condition, SimDomain, SimHost, World
from kvmpool.virt.device_xml import hostdevs_of
from kvmpool.virt.domain_xml import claims_of


class SimHypervisor:
    """ports.Hypervisor over a host's domains."""

    def __init__(self, host: SimHost) -> None:
        self._host = host

    async def domains(self) -> tuple[DomainSeen, ...]:
        if not self._host.libvirt_up:
            raise Unreachable(f"libvirtd on {self._host.name} does not answer")
        return tuple(sorted((_seen(domain) for domain in self._host.domains.values()), key=lambda d: d.name))

    async def wakeups(self) -> AsyncIterator[str]:
        await asyncio.Event().wait()
        yield ""

    async def close(self) -> None:
        return None


class SimStarter:
    """api.boot_starts.Starter over a host's domains: each start calls the hook, then QEMU."""

    def __init__(
        self, host: SimHost, hook: Callable[[str, str], Awaitable[None]], qemu: Callable[[SimDomain], None]
    ) -> None:
        """`hook`: prepare, with a domain's name and XML. `qemu`: its QEMU runs from then on."""
        self._host, self._hook, self._qemu = host, hook, qemu

    async def definition(self, domain: str) -> str:
        found = self._named(domain)
        if found.running:
            raise Refused(f"domain {found.name} is running")
        return found.xml

    async def start(self, domain: str) -> None:
        found = self._named(domain)
        await self._hook(found.name, found.xml)
        self._qemu(found)

    async def create(self, xml: str) -> None:
        found = self._named(claims_of(xml).name)
        await self._hook(found.name, xml)
        found.devices = {device.alias: device.address for device in hostdevs_of(xml)}
        self._qemu(found)

    def _named(self, which: str) -> SimDomain:
        found = next((domain for domain in self._host.domains.values() if which in (domain.name, domain.uuid)), None)
        if found is None:
            raise NotFound(f"no domain {which}")
        return found


def _seen(domain: SimDomain) -> DomainSeen:
    return DomainSeen(
        domain.uuid,
        domain.name,
        domain.running,
        domain.claims,
        state="running" if domain.running else "shut off",
        pid=domain.pid if domain.running else 0,
        hostdevs=tuple(HostdevSeen(address, alias) for alias, address in domain.devices.items()),
    )


class SimPlugs:
    """ports.Plugs over a host's domains. `start` is what `virsh start` of a domain does."""

    def __init__(self, world: World, host: SimHost, start: Callable[[str], Awaitable[str]]) -> None:
        self._world, self._host, self._start = world, host, start
        self._asked: set[tuple[DomainUuid, str]] = set()

    async def attach(self, domain: DomainUuid, alias: str, address: str) -> None:
        found = self._running(domain)
        if found.devices.get(alias, address) != address:
            raise Refused(f"domain {found.name}: {found.devices[alias]} is still in the place of {address}")
        for other in self._host.domains.values():
            if other is not found and address in other.devices.values():
                raise Refused(f"PCI device {address} is in use by driver QEMU, domain {other.name}")
        card = next((card for card in self._host.cards.values() if card.address == address), None)
        if card is None or card.condition in (Condition.GONE, Condition.LOST):
            raise Refused(f"PCI device {address} not found")
        if alias not in found.devices:
            found.devices[alias] = address
            self._world.note(f"{self._host.name}: {address} is in {found.name}")

    async def detach(self, domain: DomainUuid, alias: str) -> None:
        found = self._running(domain)
        if alias not in found.devices:
            return
        if not found.gives_back:
            self._asked.add((domain, alias))
            raise DeadlinePassed(f"domain {found.name}: its guest did not give {alias} back")
        self._leave(found, alias)

    async def reset(self, domain: DomainUuid) -> None:
        found = self._running(domain)
        self._world.note(f"{self._host.name}: {found.name} is reset")
        for asked, alias in sorted(self._asked):
            if asked == domain and alias in found.devices:
                self._leave(found, alias)
        self._asked = {each for each in self._asked if each[0] != domain}

    async def power_off(self, domain: DomainUuid) -> None:
        found = self._running(domain)
        self._world.note(f"{self._host.name}: {found.name} is powered off")
        found.stop()

    async def power_on(self, domain: DomainUuid) -> None:
        found = self._host.domains.get(domain)
        if found is None:
            raise NotFound(f"no domain {domain}")
        refused = await self._start(found.name)
        if refused:
            raise Refused(refused)

    def _leave(self, domain: SimDomain, alias: str) -> None:
        self._world.note(f"{self._host.name}: {domain.devices.pop(alias)} has left {domain.name}")

    def _running(self, domain: DomainUuid) -> SimDomain:
        found = self._host.domains.get(domain)
        if not self._host.libvirt_up:
            raise Unreachable(f"libvirtd on {self._host.name} does not answer")
        if found is None or not found.running:
            raise NotFound(f"domain {domain} is not running")
        return found

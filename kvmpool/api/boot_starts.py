"""Starts domains that have passthrough cards from the beginning (plug="boot"): reserve, then start with the cards.

libvirt's hook cannot add a device to the domain that it is called for. So the claims are served before libvirt is asked
at all, and the domain is created from its definition plus the cards: the definition itself never changes. The hook then
only verifies that the domain has the cards that are reserved for this start, and no others of ours.
A kvmpoold that dies on the way has forgotten the reservation: the hook refuses, the rows go at the attempt's deadline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from kvmpool.core.model import ClaimSpec, DomainUuid, HostdevSeen, Mode, Plug
from kvmpool.core.place import modes
from kvmpool.errors import Refused
from kvmpool.ports import Plugs
from kvmpool.virt.device_xml import ours, with_hostdevs
from kvmpool.virt.domain_xml import DomainClaims, claims_of


class Starter(Protocol):
    """libvirt's side of it (virt/connection.py). `domain`: its name or uuid."""

    async def definition(self, domain: str) -> str: ...

    async def start(self, domain: str) -> None: ...

    async def create(self, xml: str) -> None: ...


class Reservations(Protocol):
    """The hook's side of it (api/hooks.py)."""

    def reserved(self, asked: DomainClaims) -> AbstractAsyncContextManager[Mapping[str, str]]: ...


def needs_cards_first(spec: ClaimSpec) -> bool:
    return spec.plug is Plug.BOOT and Mode.PASSTHROUGH in modes(spec)


class BootStarts:
    """`kvmpool domain start`, also for domains that need nothing of it."""

    def __init__(self, starter: Starter, reservations: Reservations) -> None:
        self._starter = starter
        self._reservations = reservations

    async def start(self, domain: str) -> None:
        """Raises NotFound, Refused with the line that says why, Unreachable; then the domain has no rows."""
        definition = await self._starter.definition(domain)
        asked = claims_of(definition)
        if not any(needs_cards_first(spec) for spec in asked.claims):
            await self._starter.start(asked.name)
            return
        async with self._reservations.reserved(asked) as cards:
            await self._starter.create(with_hostdevs(definition, cards))


class StartingPlugs:
    """ports.Plugs where a domain is powered on in the same way as by a person."""

    def __init__(self, plugs: Plugs, starts: BootStarts) -> None:
        self._starts = starts
        self.attach, self.detach = plugs.attach, plugs.detach
        self.reset, self.power_off = plugs.reset, plugs.power_off

    async def power_on(self, domain: DomainUuid) -> None:
        await self._starts.start(domain)


def verify(
    domain: str, specs: Iterable[ClaimSpec], devices: tuple[HostdevSeen, ...], reserved: Mapping[str, str] | None
) -> None:
    """A start's XML against what is reserved for it (alias -> address; None: nothing was). Raises Refused."""
    first = next((spec for spec in specs if needs_cards_first(spec)), None)
    if first is not None and reserved is None:
        why = (
            f'{domain}/{first.name}: with plug="boot" its card is reserved before the start, which this one did not do'
        )
        raise Refused(f"{why}. Next: kvmpool domain start {domain}")
    cards = dict(reserved or {})
    for device in ours(devices):
        if cards.pop(device.alias, "") != device.address:
            why = f"domain {domain}: its XML has card {device.address} as {device.alias}, not reserved for this start"
            raise Refused(f"{why}. Next: virsh edit {domain}, take that <hostdev> out")
    for alias, address in cards.items():
        why = f"domain {domain}: card {address} is reserved for this start, and no {alias} is in its XML"
        raise Refused(f"{why}. Next: kvmpool domain start {domain}")

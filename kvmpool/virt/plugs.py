"""Plugs cards into running domains and out of them, through libvirt. Blocking, but for the wait for the guest's answer.

detachDeviceFlags returning means only that the guest was asked: DEVICE_REMOVED is the one proof, and the domain's XML
read again afterwards (design 04 §4.3). Who waits is registered before the guest is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import libvirt

from kvmpool.core.model import DomainUuid
from kvmpool.errors import DeadlinePassed, NotFound, Refused
from kvmpool.virt import refusals
from kvmpool.virt.device_xml import hostdev_xml, hostdevs_of, kept_bus

ANSWER_S = 20.0  # a guest that is up answers in 1-3 s; one that boots is asked again (design 04 §4.3)

Key = tuple[str, str]  # (domain's uuid, alias)


class Waiters:
    """Who waits for a device to leave its domain. `tell` may be called from any thread."""

    def __init__(self) -> None:
        self._waiting: dict[Key, tuple[asyncio.AbstractEventLoop, asyncio.Future[str]]] = {}

    def expect(self, key: Key) -> asyncio.Future[str]:
        """Its result: "" the device has left, else why the guest refused."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[str] = loop.create_future()
        self._waiting[key] = (loop, future)
        return future

    def forget(self, key: Key) -> None:
        self._waiting.pop(key, None)

    def tell(self, key: Key, refusal: str) -> None:
        loop, future = self._waiting.get(key, (None, None))
        if loop is not None and future is not None:
            loop.call_soon_threadsafe(_resolve, future, refusal)

    def tell_stopped(self, domain: str) -> None:
        """A domain that stops has given back all it had; no event of libvirt says so of its devices."""
        for key in [key for key in self._waiting.copy() if key[0] == domain]:
            self.tell(key, "")

    def register(self, connection: libvirt.virConnect) -> None:
        """In the thread of a new connection."""
        removed, failed = libvirt.VIR_DOMAIN_EVENT_ID_DEVICE_REMOVED, libvirt.VIR_DOMAIN_EVENT_ID_DEVICE_REMOVAL_FAILED
        connection.domainEventRegisterAny(None, removed, self._removed, None)
        connection.domainEventRegisterAny(None, failed, self._failed, None)

    def _removed(self, _: object, domain: libvirt.virDomain, alias: str, opaque: object) -> None:
        self.tell((domain.UUIDString().lower(), alias), "")

    def _failed(self, _: object, domain: libvirt.virDomain, alias: str, opaque: object) -> None:
        self.tell((domain.UUIDString().lower(), alias), "the guest rejected it")


def _resolve(future: asyncio.Future[str], refusal: str) -> None:
    if not future.done():
        future.set_result(refusal)


def attach(connection: libvirt.virConnect, domain: DomainUuid, alias: str, address: str) -> None:
    """Raises NotFound, Refused where another card is in that place, what refusals.py makes of libvirt's errors."""
    found = _running(connection, domain)
    xml = found.XMLDesc(0)
    for device in hostdevs_of(xml):
        if device.alias == alias:
            if device.address == address:
                return
            raise Refused(f"domain {found.name()}: {device.address} is still in the place of {address}")
    with explained(found.name(), address):
        found.attachDeviceFlags(hostdev_xml(alias, address, kept_bus(xml, alias)), libvirt.VIR_DOMAIN_AFFECT_LIVE)


def ask_back(connection: libvirt.virConnect, domain: DomainUuid, alias: str) -> bool:
    """Ask the guest to give a device back; False where the domain has none of that alias."""
    found = _running(connection, domain)
    for device in hostdevs_of(found.XMLDesc(0)):
        if device.alias == alias:
            # By the alias: libvirt finds the device also where its card is gone from the host's bus.
            with explained(found.name(), device.address):
                found.detachDeviceAlias(alias, libvirt.VIR_DOMAIN_AFFECT_LIVE)
            return True
    return False


@contextlib.contextmanager
def explained(domain: str, address: str) -> Iterator[None]:
    """libvirt's errors about a card, where their text is known, as ours."""
    try:
        yield
    except libvirt.libvirtError as error:
        known = refusals.told(error.get_error_message() or str(error), domain, address)
        if known is None:
            raise
        raise known from error


def has(connection: libvirt.virConnect, domain: DomainUuid, alias: str) -> bool:
    return any(device.alias == alias for device in hostdevs_of(_running(connection, domain).XMLDesc(0)))


def on_domain(act: Callable[[libvirt.virDomain], object], domain: DomainUuid) -> Callable[[libvirt.virConnect], None]:
    """An act of libvirt on a domain by its uuid. Raises NotFound where it is not defined."""

    def do(connection: libvirt.virConnect) -> None:
        act(connection.lookupByUUIDString(domain))

    return do


def reset(domain: libvirt.virDomain) -> None:
    """As the reset button; a domain that QEMU had stopped for an error goes on from there."""
    stopped = is_halted(*domain.state()[:2])
    domain.reset(0)
    if stopped:
        domain.resume()


def is_halted(state: int, reason: int) -> bool:
    """Paused for no reason that libvirt knows: QEMU's own stop (run state internal-error), as on AER of a card."""
    return bool(state == libvirt.VIR_DOMAIN_PAUSED and reason == libvirt.VIR_DOMAIN_PAUSED_UNKNOWN)


def unanswered(domain: DomainUuid, alias: str, answer_s: float) -> DeadlinePassed:
    return DeadlinePassed(f"domain {domain}: its guest did not give {alias} back within {answer_s:g} s")


def _running(connection: libvirt.virConnect, domain: DomainUuid) -> libvirt.virDomain:
    found = connection.lookupByUUIDString(domain)
    if not found.isActive():
        raise NotFound(f"domain {found.name()} is not running. Next: virsh start {found.name()}")
    return found

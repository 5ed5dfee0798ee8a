"""libvirt as one host sees it: its domains, a word when something may have changed, edits of claims, starts and stops.

Implements ports.Hypervisor and ports.Plugs, and what the API needs to edit claims and to provision domains. A
connection each for events, reads, edits, starts and plugs, so that a start (its hook waits for a card) or a plug delays
no edit, a long edit no look and no look an event. A list of domains takes as long as a hook holds a domain's lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import libvirt

from kvmpool.core.model import ClaimSpec, DomainSeen, DomainUuid
from kvmpool.errors import DeadlinePassed, Refused, Unreachable
from kvmpool.virt import edit, listing, plugs, provision
from kvmpool.virt.link import PAUSE_FIRST_S, PAUSE_MAX_S, Link
from kvmpool.virt.originals import Originals
from kvmpool.virt.plan import DomainPlan

log = logging.getLogger("kvmpool.virt")

GUESTS = "/run/kvmpool/guests"
READ_DEADLINE_S = 15.0  # longer than a hook's deadline: libvirt lists no domain while a hook holds its lock
EDIT_DEADLINE_S = 15.0
START_DEADLINE_S = 120.0  # QEMU's own start: it allocates and pins the guest's memory
PLUG_DEADLINE_S = 60.0  # vfio pins the guest's memory and resets the card: seconds, more with large BARs
STOP_LOOK_S = 0.3  # how often a domain that was asked to power off is looked at
OPEN_DEADLINE_S = 10.0
ALIVE_S = 5.0  # how often the events' connection is looked at: a close callback may be missed

_LIFECYCLE = {
    libvirt.VIR_DOMAIN_EVENT_DEFINED: "defined",
    libvirt.VIR_DOMAIN_EVENT_UNDEFINED: "undefined",
    libvirt.VIR_DOMAIN_EVENT_STARTED: "started",
    libvirt.VIR_DOMAIN_EVENT_SUSPENDED: "suspended",
    libvirt.VIR_DOMAIN_EVENT_RESUMED: "resumed",
    libvirt.VIR_DOMAIN_EVENT_STOPPED: "stopped",
    libvirt.VIR_DOMAIN_EVENT_SHUTDOWN: "shutdown",
    libvirt.VIR_DOMAIN_EVENT_PMSUSPENDED: "suspended",
    libvirt.VIR_DOMAIN_EVENT_CRASHED: "crashed",
}


class Libvirt:
    """Use it from one event loop. Nothing is opened before the first call."""

    def __init__(
        self, uri: str, guests: str = GUESTS, originals: Path | None = None, answer_s: float = plugs.ANSWER_S
    ) -> None:
        """`guests`: where kvmpoold writes what a guest reads through fw_cfg, one folder a domain's uuid.

        `originals`: where a domain's definition is kept as it was before it is edited; None: nowhere.
        `answer_s`: how long a guest is given to give a card back.
        """
        self._answer_s = answer_s
        self._uri = uri
        self._keep = {"keep": Originals(originals).keep} if originals is not None else {}
        self._guests = guests
        self._reads = Link(uri, "reads")
        self._edits = Link(uri, "edits")
        self._starts = Link(uri, "starts")
        self._plugs = Link(uri, "plugs")
        self._waiters = plugs.Waiters()
        self._feed = _Feed(uri, self._waiters)

    async def domains(self) -> tuple[DomainSeen, ...]:
        return await self._reads.call(listing.domains, READ_DEADLINE_S)

    async def wakeups(self) -> AsyncIterator[str]:
        async for reason in self._feed.reasons():
            yield reason

    async def add_claim(self, domain: str, attributes: Mapping[str, str]) -> ClaimSpec:
        """Write a claim into the domain's metadata; what libvirt kept of it.

        Raises NotFound, ClaimInvalid, Refused, Unreachable.
        """
        return await self._edits.call(
            lambda conn: edit.add_claim(conn, domain, attributes, self._guests, **self._keep), EDIT_DEADLINE_S
        )

    async def remove_claim(self, domain: str, name: str) -> None:
        """Take a claim out of the domain's metadata. Raises NotFound, Refused, Unreachable."""
        await self._edits.call(lambda conn: edit.remove_claim(conn, domain, name, self._guests), EDIT_DEADLINE_S)

    async def define(self, plan: DomainPlan, *, only_print: bool) -> str:
        """The XML of a new domain, defined unless `only_print`. Raises ClaimInvalid, Refused, Unreachable."""
        return await self._edits.call(
            lambda conn: provision.define(conn, plan, self._guests, only_print=only_print), EDIT_DEADLINE_S
        )

    async def start(self, domain: str) -> None:
        """As `virsh start`. Raises NotFound, Refused with the hook's line, Unreachable."""
        await self._starts.call(lambda conn: provision.start(conn, domain), START_DEADLINE_S)

    async def definition(self, domain: str) -> str:
        """From which it would be started now; by its name or uuid. Raises NotFound, Refused, Unreachable."""
        return await self._edits.call(lambda conn: provision.definition(conn, domain), EDIT_DEADLINE_S)

    async def create(self, xml: str) -> None:
        """Start a domain from this XML instead of its definition. Raises as `start`."""
        await self._starts.call(lambda conn: provision.create(conn, xml), START_DEADLINE_S)

    async def stop(self, domain: str, *, force: bool, timeout_s: float) -> None:
        """Returns when it has stopped. Raises NotFound, Refused, Unreachable, DeadlinePassed: it still runs."""
        await self._edits.call(lambda conn: provision.stop(conn, domain, force=force), EDIT_DEADLINE_S)
        until = time.monotonic() + timeout_s
        while await self._edits.call(lambda conn: provision.runs(conn, domain), EDIT_DEADLINE_S):
            if time.monotonic() > until:
                why = f"domain {domain} did not power off within {timeout_s:g} s: its guest may ignore ACPI"
                raise DeadlinePassed(f"{why}. Next: kvmpool domain stop {domain} --force")
            await asyncio.sleep(STOP_LOOK_S)

    # --- ports.Plugs ---

    async def attach(self, domain: DomainUuid, alias: str, address: str) -> None:
        await self._plugs.call(lambda conn: plugs.attach(conn, domain, alias, address), PLUG_DEADLINE_S)

    async def detach(self, domain: DomainUuid, alias: str) -> None:
        left = self._waiters.expect((domain, alias))
        try:
            if not await self._plugs.call(lambda conn: plugs.ask_back(conn, domain, alias), PLUG_DEADLINE_S):
                return
            try:
                async with asyncio.timeout(self._answer_s):
                    refusal = await left
            except TimeoutError:  # an event may be missed, the domain's XML is not
                if await self._plugs.call(lambda conn: plugs.has(conn, domain, alias), PLUG_DEADLINE_S):
                    raise plugs.unanswered(domain, alias, self._answer_s) from None
                return
            if refusal:
                raise Refused(f"domain {domain}: {alias} was not given back: {refusal}")
        finally:
            self._waiters.forget((domain, alias))

    async def reset(self, domain: DomainUuid) -> None:
        await self._plugs.call(plugs.on_domain(plugs.reset, domain), PLUG_DEADLINE_S)

    async def power_off(self, domain: DomainUuid) -> None:
        await self._plugs.call(plugs.on_domain(lambda found: found.destroy(), domain), PLUG_DEADLINE_S)

    async def power_on(self, domain: DomainUuid) -> None:
        await self._starts.call(plugs.on_domain(lambda found: found.create(), domain), START_DEADLINE_S)

    async def close(self) -> None:
        await self._feed.close()
        for link in (self._reads, self._edits, self._starts, self._plugs):
            await link.close()


class _Feed:
    """Keeps one connection open, registers for events on each new one, and hands on a word for each."""

    def __init__(self, uri: str, waiters: plugs.Waiters) -> None:
        """`waiters` hear of devices on each new connection; of stops from here: libvirt takes one callback a kind."""
        self._uri = uri
        self._waiters = waiters
        self._link = Link(uri, "events", self._register, self._lost)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listeners: set[asyncio.Queue[str | None]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._broken = asyncio.Event()

    async def reasons(self) -> AsyncIterator[str]:
        self._loop = asyncio.get_running_loop()
        queue: asyncio.Queue[str | None] = asyncio.Queue(maxsize=1)  # one word waits: to look again is all it asks
        self._listeners.add(queue)
        if self._keeper is None:
            self._keeper = asyncio.ensure_future(self._keep())
        try:
            while (reason := await queue.get()) is not None:
                yield reason
        finally:
            self._listeners.discard(queue)

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        await self._link.close()
        self._say(None)

    async def _keep(self) -> None:
        """After each loss: open again, register again, and have everybody look at everything."""
        pause_s, told = PAUSE_FIRST_S, ""
        while True:
            try:
                self._broken.clear()
                await self._link.call(lambda conn: conn.isAlive(), OPEN_DEADLINE_S)
                log.info("libvirt %s: connected, listening", self._uri)
                self._say("libvirt connected")
                pause_s, told = PAUSE_FIRST_S, ""
                await self._watch()
            except (Unreachable, DeadlinePassed) as error:
                if str(error) != told:
                    log.warning("libvirt's events: %s", error)
                told = str(error)
            await asyncio.sleep(pause_s)
            pause_s = min(PAUSE_MAX_S, 2 * pause_s)

    async def _watch(self) -> None:
        """Returns or raises when the connection is lost."""
        while not self._broken.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ALIVE_S):
                    await self._broken.wait()
            await self._link.call(lambda conn: conn.getLibVersion(), OPEN_DEADLINE_S)
            if self._broken.is_set():
                log.warning("libvirt %s: the connection was lost", self._uri)

    # --- in other threads ---

    def _register(self, connection: libvirt.virConnect) -> None:
        life, metadata = libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, libvirt.VIR_DOMAIN_EVENT_ID_METADATA_CHANGE
        connection.domainEventRegisterAny(None, life, self._on_lifecycle, None)
        connection.domainEventRegisterAny(None, metadata, self._on_metadata, None)
        self._waiters.register(connection)

    def _on_lifecycle(self, _: object, domain: libvirt.virDomain, event: int, detail: int, opaque: object) -> None:
        if event == libvirt.VIR_DOMAIN_EVENT_STOPPED:
            self._waiters.tell_stopped(domain.UUIDString().lower())
        self._from_thread(self._say, f"{domain.name()} {_LIFECYCLE.get(event, 'changed')}")

    def _on_metadata(self, _: object, domain: libvirt.virDomain, kind: int, uri: str, opaque: object) -> None:
        self._from_thread(self._say, f"{domain.name()} metadata")

    def _lost(self) -> None:
        self._from_thread(self._broken.set)

    def _from_thread(self, act: object, *what: object) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(act, *what)  # type: ignore[arg-type]

    def _say(self, reason: str | None) -> None:
        for queue in self._listeners:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(reason)

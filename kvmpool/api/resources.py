"""What the API's resources are: reads of the store and of the loops' last look, and the wishes a person may write.

A person writes wishes, never bindings. Bodies are made in bodies.py; paths and statuses belong to app.py.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from enum import Enum
from typing import Protocol

from kvmpool import __version__
from kvmpool.api import bodies
from kvmpool.api.bodies import Look
from kvmpool.api.shapes import (
    BindingBody,
    BreakerBody,
    CardBody,
    ClaimBody,
    EventBody,
    ExplainBody,
    HostBody,
    StatusBody,
)
from kvmpool.core import breaker, health
from kvmpool.core.model import Card, CardWish, ClaimSpec, DomainSeen, Event, Rows, Settings, Verdict, WorkerSeen
from kvmpool.daemon.ledger import Change, Ledger
from kvmpool.daemon.turns import unless_conflict
from kvmpool.errors import Conflict, NotFound, Refused, Unreachable
from kvmpool.ports import Batch, Clock, Resync, Store
from kvmpool.store import codec

EVENTS_SHOWN = 500
_TRIES = 8


class Cordon(Enum):
    """What a person wants of a card's bindings. DRAIN: nothing new, and what it has moves where there is room."""

    UNCORDON = "uncordon"
    CORDON = "cordon"
    DRAIN = "drain"


class Observed(Protocol):
    """What the loops of this host saw last; "" for what is well."""

    def domains(self) -> tuple[DomainSeen, ...]: ...

    async def workers(self) -> tuple[WorkerSeen, ...]:
        """As they answer now; as they last did, where they cannot be asked."""

    def libvirt_fault(self) -> str: ...

    def nvml_fault(self) -> str: ...


class Metadata(Protocol):
    """Edits the claims in a domain's metadata, through libvirt. Raises NotFound, ClaimInvalid, Refused, Unreachable."""

    async def add_claim(self, domain: str, attributes: dict[str, str]) -> ClaimSpec: ...

    async def remove_claim(self, domain: str, name: str) -> None: ...


class Resources:
    """The reads and wishes of one daemon."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        store_words: str,
        clock: Clock,
        settings: Settings,
        observed: Observed,
        metadata: Metadata,
        wake: Callable[[str], None],
        faults: Sequence[str] = (),
    ) -> None:
        self._store = store
        self._ledger = ledger
        self._store_words = store_words
        self._clock = clock
        self._settings = settings
        self._observed = observed
        self._metadata = metadata
        self._wake = wake
        self._faults = tuple(faults)

    # --- reads --------------------------------------------------------------------------------------------------------

    async def status(self) -> StatusBody:
        look = await self._look()
        return StatusBody(
            host=self._ledger.host,
            version=__version__,
            leader=self._ledger.host,  # on SQLite the daemon that has the file open leads
            store=f"{self._store_words}, revision {look.rows.revision}",
            libvirt=self._observed.libvirt_fault() or "connected",
            nvml=self._observed.nvml_fault() or "ok",
            paused=self._settings.paused,
            breaker=look.rows.breaker.open_reason,
            hosts=[bodies.host_body(look, host) for host in look.rows.hosts.values()],
            cards=_cards(look),
            claims=bodies.claim_bodies(look),
            faults=[*self._faults, *look.faults],
        )

    async def hosts(self) -> list[HostBody]:
        look = await self._look()
        return [bodies.host_body(look, host) for host in look.rows.hosts.values()]

    async def cards(self) -> list[CardBody]:
        return _cards(await self._look())

    async def card(self, named: str) -> CardBody:
        look = await self._look()
        return bodies.card_body(look, find_card(look.rows, named))

    async def claims(self) -> list[ClaimBody]:
        return bodies.claim_bodies(await self._look())

    async def claim(self, domain: str, name: str) -> ClaimBody:
        return _find_claim(await self._look(), domain, name)

    async def explain(self, domain: str, name: str) -> ExplainBody:
        look = await self._look()
        return bodies.explain_body(look, _find_claim(look, domain, name))

    async def bindings(self) -> list[BindingBody]:
        look = replace(await self._look(), workers=await self._observed.workers())
        return [bodies.binding_body(look, binding) for binding in look.rows.bindings.values()]

    async def binding(self, label: str) -> BindingBody:
        """By its label, or by its claim's: then the newest one."""
        found = [body for body in await self.bindings() if label in (body["label"], body["label"].rpartition("#")[0])]
        if not found:
            claimed = any(body["label"] == label for body in await self.claims())
            raise NotFound(f"no binding {label}. Next: kvmpool {f'explain {label}' if claimed else 'binding list'}")
        return max(found, key=lambda body: body["generation"])

    async def domains(self) -> list[dict[str, str]]:
        return [{"name": d.name, "uuid": d.uuid, "state": d.state} for d in self._observed.domains()]

    async def breaker(self) -> BreakerBody:
        return bodies.breaker_body(await self._look())

    async def metrics(self) -> str:
        look = await self._look()
        return bodies.metrics_text(look, len((await self._events())[0]))

    async def events(self) -> list[EventBody]:
        """The newest ones, oldest first."""
        return [bodies.event_body(event) for event in (await self._events())[0]]

    async def follow(self, last: int = 0) -> AsyncIterator[EventBody]:
        """The `last` events so far, and without a gap every one from now on."""
        seen, rev = await self._events()
        for event in seen[max(0, len(seen) - last) :]:
            yield bodies.event_body(event)
        known = {codec.event_key(event) for event in seen}
        while True:
            async for change in self._store.watch("/event/", rev):
                rev = change.rev
                if isinstance(change, Resync):
                    break
                if isinstance(change, Batch):
                    for each in change.events:
                        if each.value is not None and each.key not in known:
                            yield bodies.event_body(_event(each.key, each.value))
            else:
                return
            for event in (await self._events())[0]:
                if codec.event_key(event) not in known:
                    known.add(codec.event_key(event))
                    yield bodies.event_body(event)

    # --- wishes -------------------------------------------------------------------------------------------------------

    async def cordon(self, named: str, wanted: Cordon, reason: str, by: str) -> CardBody:
        """Each wish replaces the one before: a drained card that is cordoned keeps what it still has."""

        def wish(_: Card, before: CardWish) -> CardWish:
            cordoned, drain = wanted is Cordon.CORDON, wanted is Cordon.DRAIN
            return replace(before, cordoned=cordoned, drain=drain, reason=reason if cordoned or drain else "")

        return await self._wish(named, wish, f"{wanted.value}ed", reason, by)

    async def restore(self, named: str, reason: str, by: str) -> CardBody:
        """A person says that the card is repaired: it is validated anew. Refused where it is not out of service."""

        def wish(card: Card, before: CardWish) -> CardWish:
            verdict = card.health.verdict
            if verdict is Verdict.WEDGED:
                raise Refused(f"{card.label} is wedged: {card.health.reason}. Next: reboot {card.host}")
            if verdict not in health.OUT_OF_SERVICE and verdict is not Verdict.DRAINING:
                sound = f"{card.label} is {verdict.value}, not out of service"
                raise Refused(f"{sound}: there is nothing to restore. Next: kvmpool card show {card.label}")
            return replace(before, restore=before.restore + 1)

        return await self._wish(named, wish, "restored", reason, by)

    async def _wish(
        self, named: str, change: Callable[[Card, CardWish], CardWish], kind: str, reason: str, by: str
    ) -> CardBody:
        if len(reason) > 500 or not reason.isprintable():
            raise Refused("a reason is one line of at most 500 printable characters")
        for _ in range(_TRIES):
            page = await self._ledger.read()
            card = find_card(page.rows, named)
            wish = replace(change(card, page.rows.wishes.get(card.id, CardWish(card.id))), by=by)
            told = self._ledger.event(card.label, kind, f"by {by}: {reason}" if reason else f"by {by}")
            if await unless_conflict(self._ledger.commit(page, Change(puts=[wish], events=[told]))):
                self._wake(told.kind)
                return await self.card(card.id)
        raise Conflict(f"the wish for {named} was written by others all the time. Next: try again")

    async def close_breaker(self, by: str) -> BreakerBody:
        for _ in range(_TRIES):
            page = await self._ledger.read()
            told = self._ledger.event("breaker", "closed", f"by {by}")
            closed = breaker.closed(page.rows.breaker, page.rows.cards.values(), self._clock.now())
            change = Change(puts=[closed], events=[told])
            if await unless_conflict(self._ledger.commit(page, change)):
                self._wake("breaker closed")
                return await self.breaker()
        raise Conflict("the breaker was written by others all the time. Next: try again")

    async def add_claim(self, domain: str, attributes: dict[str, str]) -> ClaimBody:
        spec = await self._metadata.add_claim(domain, attributes)
        self._wake(f"{domain} metadata")
        return await self._after_edit(domain, spec)

    async def remove_claim(self, domain: str, name: str) -> None:
        await self._metadata.remove_claim(domain, name)
        self._wake(f"{domain} metadata")

    async def _after_edit(self, domain: str, spec: ClaimSpec) -> ClaimBody:
        """The claim as the loop sees it, which looks at libvirt on its own; of a running domain it sees only what that
        was started with."""
        for _ in range(40):
            look = await self._look()
            for seen in look.domains:
                if seen.name == domain and seen.running:
                    return bodies.inactive_body(look, seen, spec)
            try:
                return _find_claim(look, domain, spec.name)
            except NotFound:
                await self._clock.sleep(0.05)
        label = f"{domain}/{spec.name}"
        raise Unreachable(f"{label} is written, but was not seen in libvirt yet. Next: kvmpool claim show {label}")

    # --- the store ----------------------------------------------------------------------------------------------------

    async def _look(self) -> Look:
        page = await self._ledger.read()
        return Look(
            rows=page.rows,
            settings=self._settings,
            host=self._ledger.host,
            now=self._clock.now(),
            wall=self._clock.wall(),
            domains=self._observed.domains(),
            faults=page.faults,
        )

    async def _events(self) -> tuple[list[Event], int]:
        items, rev = await self._store.list("/event/")
        newest = sorted(items, key=lambda item: (item.mod_rev, item.key))[-EVENTS_SHOWN:]
        events = []
        for item in newest:
            try:
                events.append(_event(item.key, item.value))
            except Refused:
                continue  # status names rows that cannot be read
        return events, rev


def _event(key: str, value: bytes) -> Event:
    row = codec.decode(key, value)
    assert isinstance(row, Event)
    return row


def _cards(look: Look) -> list[CardBody]:
    return [bodies.card_body(look, card) for card in sorted(look.rows.cards.values(), key=lambda card: card.label)]


def find_card(rows: Rows, named: str) -> Card:
    """By uuid, host/address, address, or a prefix of the uuid that only one card has."""
    cards = list(rows.cards.values())
    exact = [card for card in cards if named in (card.id, card.label, card.address)]
    prefix = re.sub(r"^(gpu-)?", "gpu-", named.lower())
    found = exact or [card for card in cards if len(named) >= 4 and card.id.lower().startswith(prefix)]
    if not found:
        raise NotFound(f"no card {named!r}. Next: kvmpool card list")
    if len(found) > 1:
        labels = ", ".join(sorted(card.label for card in found))
        raise Refused(f"{named!r} names {len(found)} cards: {labels}. Next: use host/address")
    return found[0]


def _find_claim(look: Look, domain: str, name: str) -> ClaimBody:
    for body in bodies.claim_bodies(look):
        if domain in (body["domain"], body["uuid"]) and body["name"] == name:
            return body
    raise NotFound(f"no claim {domain}/{name}. Next: kvmpool claim list")

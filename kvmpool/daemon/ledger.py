"""Reads the pool's rows and commits changes, each guarded by what was read, each with its line in the event log.

A commit that the store leaves ambiguous is resolved here; what cannot be resolved is Unreachable, and the next turn
reads what became of it. Events are written in the commit they tell of and logged when it has succeeded, once.
This module decides nothing.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvmpool.core.model import Event, HostName, Rows
from kvmpool.errors import Ambiguous, Conflict, StoreUnreachable
from kvmpool.ports import Clock, Guard, Must, Put, Resolution, Store
from kvmpool.store import codec

log = logging.getLogger("kvmpool.events")

_RESOLVE_TRIES = 3
_RESOLVE_PAUSE_S = 0.1
EVENTS_KEPT = 1000  # in the store; the journal has them all
_EVENTS_SLACK = 200  # removed at once, so that not every commit is followed by a removal
_EVENTS_CHUNK = 100  # deletes in one commit: etcd takes 128 operations


@dataclass(frozen=True, slots=True)
class Page:
    """The rows at one revision, for one turn. `revisions` follows this turn's own commits."""

    rows: Rows
    revisions: dict[str, int]
    faults: tuple[str, ...] = ()
    old_events: tuple[str, ...] = ()  # keys past EVENTS_KEPT, oldest first; empty until there are enough to remove


@dataclass(slots=True)
class Change:
    """What one commit does. Puts and deletes are guarded by the revision read, as are `reads`: what it relies on."""

    puts: list[codec.Row] = field(default_factory=list)
    deletes: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


class Ledger:
    """The store as one host's loops use it."""

    def __init__(
        self, store: Store, clock: Clock, host: HostName, new_op_id: Callable[[], str] = lambda: uuid.uuid4().hex
    ) -> None:
        self.host = host
        self._store = store
        self._clock = clock
        self._new_op_id = new_op_id
        self._told: frozenset[str] = frozenset()

    async def read(self) -> Page:
        """All rows at one revision. A row that cannot be read is told once and left out."""
        items, rev = await self._store.list("/")
        rows, faults = codec.rows_from(items, rev)
        for fault in faults:
            if fault not in self._told:
                log.error("%s", fault)
        self._told = frozenset(faults)
        events = sorted((item.mod_rev, item.key) for item in items if item.key.startswith("/event/"))
        excess = len(events) - EVENTS_KEPT
        old = tuple(key for _, key in events[:excess]) if excess > _EVENTS_SLACK else ()
        return Page(rows, dict(rows.revisions), faults, old)

    def event(self, subject: str, kind: str, reason: str) -> Event:
        return Event(subject, kind, reason, self.host, self._clock.now(), self._clock.wall())

    async def commit(self, page: Page, change: Change) -> int:
        """Apply all or nothing. Raises Conflict, StoreUnreachable."""
        keys = [codec.key_of(row) for row in change.puts]
        touched = dict.fromkeys([*keys, *change.deletes, *change.reads])
        guards: list[Guard] = [(key, page.revisions.get(key, Must.ABSENT)) for key in touched]
        puts = [Put(key, codec.encode(row)) for key, row in zip(keys, change.puts, strict=True)]
        puts += [Put(codec.key_of(event), codec.encode(event)) for event in change.events]
        rev = await self._apply(guards, puts, change.deletes)
        page.revisions.update(dict.fromkeys(keys, rev))
        for key in change.deletes:
            page.revisions.pop(key, None)
        tell(change.events)
        return rev

    async def forget_events(self, page: Page) -> None:
        """Remove the oldest lines of the event log. They are guarded by nothing: nobody relies on them."""
        for start in range(0, len(page.old_events), _EVENTS_CHUNK):
            await self._apply([], [], page.old_events[start : start + _EVENTS_CHUNK])

    async def _apply(self, guards: Sequence[Guard], puts: Sequence[Put], deletes: Sequence[str]) -> int:
        op_id = self._new_op_id()
        try:
            return await self._store.commit(op_id, guards=guards, puts=puts, deletes=deletes)
        except Ambiguous:
            return await self._resolve(op_id)

    async def _resolve(self, op_id: str) -> int:
        """NOT_APPLIED is final only for a store that has the commit's guards refuse it later: read again either way."""
        for attempt in range(_RESOLVE_TRIES):
            if attempt:
                await self._clock.sleep(_RESOLVE_PAUSE_S)
            try:
                found = await self._store.resolve(op_id)
            except StoreUnreachable:
                continue
            if isinstance(found, int):
                return found
            if found is Resolution.NOT_APPLIED:
                raise Conflict(f"commit {op_id} was not applied: read and decide again")
        raise StoreUnreachable(f"commit {op_id}: the store does not say whether it was applied; reading again")


def tell(events: Iterable[Event]) -> None:
    """One line at INFO for each change of state, id first, with the reason."""
    for event in events:
        reason = f" ({event.reason})" if event.reason else ""
        log.info("%s: %s%s", event.subject, event.kind, reason, extra={"subject": event.subject, "kind": event.kind})

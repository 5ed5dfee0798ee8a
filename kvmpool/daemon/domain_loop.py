"""The loop of a host's domains: opens, points and closes their relays, and withdraws the claims of those that are gone.

The list of domains is asked for beside the turns and used as it last was: while a hook is held, libvirt may not answer
for as long, and the hook waits for this loop to open a relay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from kvmpool.core.model import (
    Attempt,
    DomainSeen,
    DomainStep,
    DomainUuid,
    Forget,
    HostName,
    MarkStarted,
    PowerOn,
    RecordPointed,
    RelaySeen,
    ReportBroken,
)
from kvmpool.core.plug import UNPLUG_LIMIT
from kvmpool.core.reconcile_domains import DomainsView, next_deadline, reconcile_domains
from kvmpool.daemon.ledger import Ledger, Page
from kvmpool.daemon.perform import Checkpoint, DomainHands, no_checkpoint
from kvmpool.daemon.plugging import Plugging
from kvmpool.daemon.turns import Errands, Loop
from kvmpool.errors import Conflict, KvmpoolError
from kvmpool.ports import Clock, Hypervisor, Plugs, Processes, Relays, Store

log = logging.getLogger(__name__)

_IDLE_S = 5.0
_RETRY_S = 0.5  # after a step of a domain failed: its relay was away


_Errand = tuple[bool, DomainUuid]  # (it starts the domain, which)


class DomainLoop(Loop):
    """Owns the claims and attempts of this host's domains.

    `run` also listens to the hypervisor; who drives `turn` by hand calls `refresh` where a domain came or went.
    """

    name = "domain"

    def __init__(
        self,
        store: Store,
        clock: Clock,
        host: HostName,
        hypervisor: Hypervisor,
        relays: Relays,
        *,
        plugs: Plugs | None = None,
        processes: Processes | None = None,
        list_interval_s: float = 2.0,
        unplug_limit: int = UNPLUG_LIMIT,
        checkpoint: Checkpoint = no_checkpoint,
    ) -> None:
        super().__init__(clock)
        self.host = host
        self.hypervisor_fault = "not asked yet"  # why the domains are not known now; "" where they are
        self._hypervisor = hypervisor
        self._relays = relays
        self._processes = processes
        self._interval_s = list_interval_s
        self._ledger = Ledger(store, clock, host)
        self._hands = DomainHands(self._ledger, relays, plugs, checkpoint)
        self._plugs = Plugging(unplug_limit)
        self._errands = Errands(self.wake.ring)
        self._domains: tuple[DomainSeen, ...] | None = None
        self._domains_at = 0.0  # when the list now held was asked for
        self._asked_at: float | None = None  # when a list was last asked for
        self._ask_again = True
        self._since: dict[DomainUuid, tuple[int, float]] = {}  # revision of its attempt, when first read so
        self._retry_at: dict[_Errand, float] = {}
        self._faults: dict[_Errand, str] = {}  # what was told of each, once
        self._deadline: float | None = None  # of the next open attempt
        self._relays_fault = ""

    def refresh(self) -> None:
        """Something may have changed: ask for the domains anew, and turn now."""
        self._ask_again = True
        self.wake.ring()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen())
            group.create_task(super().run())

    async def close(self) -> None:
        await self._errands.close()

    async def turn(self) -> bool:
        page = await self._ledger.read()
        self._look()
        ended = await self._errands.settle()
        view = await self._view(page)
        self._deadline = next_deadline(view)
        plans = _by_errand(reconcile_domains(view))
        self._retry_at = {key: at for key, at in self._retry_at.items() if key in plans}
        for key, steps in plans.items():
            if key not in self._errands and self.clock.now() >= self._retry_at.get(key, 0.0):
                self._errands.run(key, partial(self._perform, page, key, steps))
        return await self._errands.settle() or ended

    def pause_s(self) -> float:
        now = self.clock.now()
        due = [now + _IDLE_S, *(at for at in self._retry_at.values() if at > self.turn_at)]
        if "list" not in self._errands:
            due.append((now if self._asked_at is None else self._asked_at) + self._interval_s)
            if self._deadline is not None and self._deadline >= (self._asked_at or 0.0):
                due.append(self._deadline + 0.01)  # only a list asked for after it can say that it was missed
        return max(0.0, min(due) - now)

    async def _listen(self) -> None:
        while True:
            try:
                async for _ in self._hypervisor.wakeups():
                    self.refresh()
            except KvmpoolError as error:
                log.warning("hypervisor's events: %s; listening again in %.0f s", error, _IDLE_S)
            await self.clock.sleep(_IDLE_S)

    def _look(self) -> None:
        now = self.clock.now()
        due = self._asked_at is None or now >= self._asked_at + self._interval_s
        missed = self._deadline is not None and now > self._deadline >= (self._asked_at or 0.0)
        if (self._ask_again or due or missed) and "list" not in self._errands:
            self._asked_at, self._ask_again = now, False
            self._errands.run("list", self._list)

    async def _list(self) -> None:
        asked_at = self.clock.now()
        try:
            domains = await self._hypervisor.domains()
        except KvmpoolError as error:
            if self.hypervisor_fault != str(error):
                log.warning("hypervisor: %s; no domain is taken for absent meanwhile", error)
            self._domains, self.hypervisor_fault = None, str(error)
            return
        if self._domains is None and self.hypervisor_fault:
            log.info("hypervisor: %d domains", len(domains))
        self._domains, self._domains_at, self.hypervisor_fault = domains, asked_at, ""

    async def _view(self, page: Page) -> DomainsView:
        rows = page.rows
        attempts = tuple(attempt for attempt in rows.attempts.values() if attempt.host == self.host)
        claims = tuple(claim for claim in rows.claims.values() if claim.host == self.host)
        return DomainsView(
            boot_id=self.clock.boot_id(),
            claims=claims,
            attempts=attempts,
            living=self._living(attempts),  # before the relays: a child's session is seen after its parent
            bindings=tuple(binding for binding in rows.bindings.values() if binding.domain_host == self.host),
            domains=self._domains,
            domains_at=self._domains_at,
            relays=await self._list_relays(),
            unread=rows.unread,
            plugged_at=self._plugs.at,
            attach_failures=self._plugs.failures,
            unplug_tries=self._plugs.tries,
            unplug_limit=self._plugs.unplug_limit,
            rows_since=self._rows_since(
                page, {row.domain for row in attempts} | {claim.key.domain for claim in claims}
            ),
        )

    def _living(self, attempts: Sequence[Attempt]) -> frozenset[DomainUuid]:
        """The runs whose process lives; the loop is woken when one ends."""
        if self._processes is None:
            return frozenset()
        boot_id = self.clock.boot_id()
        holders = {a.domain: a.holder for a in attempts if a.holder is not None and a.boot_id == boot_id}
        self._processes.follow(set(holders.values()), self.wake.ring)
        return frozenset(domain for domain, holder in holders.items() if self._processes.lives(holder))

    async def _list_relays(self) -> tuple[RelaySeen, ...] | None:
        try:
            relays = await self._relays.list()
        except KvmpoolError as error:
            if self._relays_fault != str(error):
                log.warning("relays cannot be listed: %s; none is opened, pointed or closed meanwhile", error)
            self._relays_fault = str(error)
            return None
        self._relays_fault = ""
        return relays

    def _rows_since(self, page: Page, domains: set[DomainUuid]) -> dict[DomainUuid, float]:
        """When each domain's attempt was first read as it is: an older list of domains says nothing of it."""
        now = self.clock.now()
        for domain in domains:
            revision = page.revisions.get(f"/attempt/{domain}", 0)
            if self._since.get(domain, (-1, 0.0))[0] != revision:
                self._since[domain] = (revision, now)
        self._since = {domain: since for domain, since in self._since.items() if domain in domains}
        return {domain: at for domain, (_, at) in self._since.items()}

    async def _perform(self, page: Page, key: _Errand, steps: Sequence[DomainStep]) -> None:
        """One domain's steps, in order, up to the first that fails. What follows a plug is decided after a new look."""
        try:
            for step in steps:
                await self._hands.perform(page, step)
                if self._plugs.ended(step, self.clock.now()):
                    self.refresh()
                    break
        except Conflict:
            return
        except KvmpoolError as error:
            pause_s = self._plugs.failed(step, error, self.clock.now()) or _RETRY_S
            self._ask_again = True  # a plug that was cut off may have been done all the same
            self._retry_at[key] = self.clock.now() + pause_s
            if self._faults.get(key) != str(error):
                log.warning("%s: %s: %s; trying again", key[1], type(step).__name__, error)
            self._faults[key] = str(error)
            return
        self._retry_at.pop(key, None)
        self._faults.pop(key, None)


def _by_errand(steps: Sequence[DomainStep]) -> dict[_Errand, list[DomainStep]]:
    """A domain's steps are one errand; its start is another, for its hook waits for us to take the first."""
    found: dict[_Errand, list[DomainStep]] = {}
    for step in steps:
        found.setdefault((isinstance(step, PowerOn), _domain_of(step)), []).append(step)
    return found


def _domain_of(step: DomainStep) -> DomainUuid:
    match step:
        case RecordPointed(claim=claim):
            return claim.domain
        case MarkStarted(attempt=attempt):
            return attempt.domain
        case ReportBroken(binding=binding) | Forget(binding=binding):
            return binding.claim.domain
        case _:
            return step.domain

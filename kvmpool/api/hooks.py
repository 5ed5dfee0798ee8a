"""What libvirt's hook calls do: `prepare` makes a domain's claims and waits until they are served, others wake loops.

Nothing here reads libvirt: it holds the domain's lock while it waits for us. A prepare that fails, for whatever reason,
takes its rows back; one that is killed leaves an attempt that its deadline withdraws.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from kvmpool.api import boot_starts, served
from kvmpool.core.model import Attempt, Claim, ClaimKey, ClaimSpec, DomainUuid, Phase, Process, Rows, Settings
from kvmpool.core.place import unsupported
from kvmpool.core.plug import address_of, alias_of
from kvmpool.core.reconcile_cluster import open_binding
from kvmpool.daemon.ledger import Change, Ledger
from kvmpool.daemon.turns import unless_conflict
from kvmpool.errors import (
    ClaimInvalid,
    DeadlinePassed,
    KvmpoolError,
    NoCapacity,
    NotFound,
    Refused,
    StoreUnreachable,
)
from kvmpool.ports import Clock, Store
from kvmpool.store import codec
from kvmpool.virt.device_xml import hostdevs_of
from kvmpool.virt.domain_xml import DomainClaims, claims_of

log = logging.getLogger("kvmpool.hooks")

# From the end of prepare until a list of domains must show it: libvirt lists it as active from before the hook on.
START_S = 10.0
# An answer that no card fits is believed after this long: a release under way takes less, and libvirt's lock is held.
HOPELESS_S = 1.5
_WITHDRAW_S = 2.0
_NEXT = "Next: journalctl -u kvmpoold"


@dataclass(frozen=True, slots=True)
class HookCall:
    """As libvirt made it; `xml` may hold secrets (migrate, restore): never logged."""

    domain: str
    subop: str
    extra: str
    xml: str


@dataclass(frozen=True, slots=True)
class _Reserved:
    """A domain's start that is under way with cards in its XML: alias -> address."""

    attempt: Attempt
    cards: Mapping[str, str]


class Hooks:
    """The hook operations of one host."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        clock: Clock,
        settings: Settings,
        wake: Callable[[str], None],
    ) -> None:
        self._store = store
        self._ledger = ledger
        self._clock = clock
        self._settings = settings
        self._wake = wake
        self._preparing: set[DomainUuid] = set()
        self._reserved: dict[DomainUuid, _Reserved] = {}

    async def call(self, op: str, call: HookCall) -> None:
        """One hook call. Raises KvmpoolError with the line that the person at virsh reads."""
        match op:
            case "prepare":
                await self._prepare(call)
            case "start":
                await self._start(call)
            case "migrate":
                self._migrate(call)
            case "restore":
                _supported(_claims(call), call.domain)
            case "release":
                await self._release(call)
            case "started" | "stopped" | "reconnect":
                self._wake(f"{call.domain} {op}")
            case _:
                raise NotFound(f"{op!r} is not a hook operation of kvmpool")

    # --- prepare ------------------------------------------------------------------------------------------------------

    async def _prepare(self, call: HookCall) -> None:
        until = self._clock.now() + self._settings.prepare_deadline_s
        asked = _claims(call)
        specs = _supported(asked, call.domain)
        if not specs:
            return
        reserved = self._reserved.get(asked.uuid)
        boot_starts.verify(call.domain, specs, hostdevs_of(call.xml), reserved.cards if reserved else None)
        if reserved is not None:
            await self._wait_served(reserved.attempt, until)
            await self._extend(reserved.attempt)
            return
        with self._alone(asked):
            await self._serve(asked, specs, until)

    @contextlib.contextmanager
    def _alone(self, asked: DomainClaims) -> Iterator[None]:
        if asked.uuid in self._preparing or asked.uuid in self._reserved:
            raise Refused(f"domain {asked.name}: another start of it is being prepared. Next: virsh list --all")
        self._preparing.add(asked.uuid)
        try:
            yield
        finally:
            self._preparing.discard(asked.uuid)

    @contextlib.asynccontextmanager
    async def reserved(self, asked: DomainClaims) -> AsyncIterator[Mapping[str, str]]:
        """Serve a domain's claims before libvirt starts it; the cards that it is to be started with, alias -> address.

        Within, `prepare` verifies instead of serving. Left with an exception, the claims are withdrawn.
        """
        specs = _supported(asked, asked.name)
        with self._alone(asked):
            attempt = await self._serve(asked, specs, self._clock.now() + self._settings.prepare_deadline_s)
            rows = (await self._ledger.read()).rows
            self._reserved[asked.uuid] = _Reserved(attempt, _cards(rows, asked.uuid, specs))
        try:
            yield self._reserved[asked.uuid].cards
        except BaseException as error:
            await asyncio.shield(self._withdraw(attempt, str(error) or "the start was cut off"))
            raise
        finally:
            del self._reserved[asked.uuid]

    async def serve_run(
        self, asked: DomainClaims, specs: tuple[ClaimSpec, ...], holder: Process, endpoint: str
    ) -> None:
        """Claims for a process of this host instead of a domain, as `prepare` makes them."""
        until = self._clock.now() + self._settings.prepare_deadline_s
        await self._serve(asked, specs, until, holder, endpoint)

    async def _serve(
        self,
        asked: DomainClaims,
        specs: tuple[ClaimSpec, ...],
        until: float,
        holder: Process | None = None,
        endpoint: str = "",
    ) -> Attempt:
        attempt = None
        try:
            attempt = await self._open_attempt(asked, specs, until, holder, endpoint)
            self._wake(f"{asked.name} prepare")
            await self._wait_served(attempt, until)
            await self._extend(attempt)
        except BaseException as error:
            if attempt is not None:
                await asyncio.shield(self._withdraw(attempt, str(error) or "the call was cut off"))
            raise
        log.info("%s: prepared, attempt %d (%s)", asked.name, attempt.counter, ", ".join(spec.name for spec in specs))
        return attempt

    async def _open_attempt(
        self, asked: DomainClaims, specs: tuple[ClaimSpec, ...], until: float, holder: Process | None, endpoint: str
    ) -> Attempt:
        """Claims and attempt in one commit. What an earlier start left behind is replaced; its bindings may be kept."""
        while True:
            page = await self._ledger.read()
            rows = page.rows
            attempt = Attempt(
                domain=asked.uuid,
                domain_name=asked.name,
                host=self._ledger.host,
                counter=rows.sequence + 1,
                deadline=until + _WITHDRAW_S,
                boot_id=self._clock.boot_id(),
                started=holder is not None,
                holder=holder,
                shared_mib=asked.shared_mib,
            )
            claims = [self._claim(asked, spec, rows, attempt, n, endpoint) for n, spec in enumerate(specs)]
            named = {claim.key for claim in claims}
            stale = [codec.claim_key(key) for key in rows.claims if key.domain == asked.uuid and key not in named]
            counter = codec.Counter(rows.counter, rows.sequence + 1 + len(claims))
            told = self._ledger.event(asked.name, "prepare", f"claims {', '.join(spec.name for spec in specs)}")
            change = Change(puts=[attempt, *claims, counter], deletes=stale, events=[told])
            if await unless_conflict(self._ledger.commit(page, change)):
                return attempt
            if self._clock.now() >= until:
                raise DeadlinePassed(f"domain {asked.name}: the store was too busy to take its claims. {_NEXT}")

    def _claim(
        self, asked: DomainClaims, spec: ClaimSpec, rows: Rows, attempt: Attempt, n: int, endpoint: str
    ) -> Claim:
        key = ClaimKey(asked.uuid, spec.name)
        before = rows.claims.get(key)
        return Claim(
            key=key,
            domain_name=asked.name,
            host=self._ledger.host,
            spec=spec,
            attempt=attempt.counter,
            sequence=attempt.counter + 1 + n,
            pointed=None,  # to be said anew, by whoever looks at the relay now
            endpoint=before.endpoint if before else endpoint,
        )

    async def _wait_served(self, attempt: Attempt, until: float) -> None:
        """Until every required claim of the attempt is served. Raises what the person should read."""
        hopeless_since: float | None = None
        async with contextlib.aclosing(served.each_change(self._store, self._clock, until)) as changes:
            async for rows in changes:
                if _attempt_of(rows, attempt) is None:
                    raise Refused(f"domain {attempt.domain_name}: its start was withdrawn meanwhile. {_NEXT}")
                missing = served.missing(rows, self._settings, attempt.domain, self._clock.now())
                if not missing:
                    return
                if not any(each.hopeless for each in missing):
                    hopeless_since = None
                elif hopeless_since is None:
                    hopeless_since = self._clock.now()
                now = self._clock.now()
                if now >= until or (hopeless_since is not None and now - hopeless_since >= HOPELESS_S):
                    raise _failure(missing)
        raise StoreUnreachable(f"domain {attempt.domain_name}: the store is closing. {_NEXT}")

    async def _extend(self, attempt: Attempt) -> None:
        """From now on the domain has the time that QEMU needs to appear."""
        page = await self._ledger.read()
        mine = _attempt_of(page.rows, attempt)
        if mine is not None and not mine.started:
            longer = replace(mine, deadline=self._clock.now() + START_S)
            await unless_conflict(self._ledger.commit(page, Change(puts=[longer])))

    async def _withdraw(self, attempt: Attempt, reason: str) -> None:
        """Take the attempt's rows back. What cannot be taken back now goes at the attempt's deadline."""
        try:
            async with asyncio.timeout(_WITHDRAW_S):
                while not await self._try_withdraw(attempt, reason):
                    pass
        except (KvmpoolError, TimeoutError) as error:
            log.warning("%s: attempt %d is left to its deadline: %s", attempt.domain_name, attempt.counter, error)
        self._wake(f"{attempt.domain_name} withdrawn")

    async def _try_withdraw(self, attempt: Attempt, reason: str) -> bool:
        page = await self._ledger.read()
        if _attempt_of(page.rows, attempt) is None:
            return True
        keys = [codec.attempt_key(attempt.domain)]
        keys += [codec.claim_key(key) for key in page.rows.claims if key.domain == attempt.domain]
        told = self._ledger.event(attempt.domain_name, "refused", reason)
        return await unless_conflict(self._ledger.commit(page, Change(deletes=keys, events=[told])))

    # --- the others ---------------------------------------------------------------------------------------------------

    async def _start(self, call: HookCall) -> None:
        asked = _claims(call)
        if not any(spec.required for spec in _supported(asked, call.domain)):
            return
        attempt = (await self._ledger.read()).rows.attempts.get(asked.uuid)
        if attempt is None:
            raise Refused(f"domain {call.domain}: its prepare has expired. Next: virsh start {call.domain}")
        await self._wait_served(attempt, self._clock.now() + self._settings.prepare_deadline_s)

    def _migrate(self, call: HookCall) -> None:
        asked = _claims(call)
        if asked.claims:
            raise Refused(
                f"domain {call.domain}: live migration of a domain with a GPU claim is not supported yet. "
                "Next: shut it down and start it on the other host"
            )

    async def _release(self, call: HookCall) -> None:
        """The start has failed or the domain has ended: an attempt that never ran need not wait for its deadline."""
        asked = _claims(call)
        page = await self._ledger.read()
        attempt = page.rows.attempts.get(asked.uuid)
        now = self._clock.now()
        busy = asked.uuid in self._preparing or asked.uuid in self._reserved
        if attempt and not attempt.started and attempt.deadline > now and not busy:
            await unless_conflict(self._ledger.commit(page, Change(puts=[replace(attempt, deadline=now)])))
        self._wake(f"{call.domain} release")


def _claims(call: HookCall) -> DomainClaims:
    asked = claims_of(call.xml)
    if asked.name != call.domain:
        raise ClaimInvalid(f"the hook was called for domain {call.domain!r} with the XML of {asked.name!r}")
    return asked


def _supported(asked: DomainClaims, domain: str) -> tuple[ClaimSpec, ...]:
    """The claims to serve: an optional one that this version cannot perform is left out, a required one is refused."""
    specs = []
    for spec in asked.claims:
        reason = unsupported(spec)
        if reason is None:
            specs.append(spec)
        elif spec.required:
            raise Refused(f"{domain}/{spec.name}: {reason}. Next: virsh edit {domain}")
        else:
            log.warning("%s/%s: started without: %s", domain, spec.name, reason)
    return tuple(specs)


def _cards(rows: Rows, domain: DomainUuid, specs: tuple[ClaimSpec, ...]) -> dict[str, str]:
    """The cards that the domain has to be started with."""
    found = {}
    for spec in filter(boot_starts.needs_cards_first, specs):
        binding = open_binding(rows, ClaimKey(domain, spec.name))
        if binding is not None and binding.phase is Phase.READY and address_of(binding):
            found[alias_of(spec.name)] = address_of(binding)
    return found


def _attempt_of(rows: Rows, attempt: Attempt) -> Attempt | None:
    row = rows.attempts.get(attempt.domain)
    return row if row is not None and row.counter == attempt.counter else None


def _failure(missing: list[served.Missing]) -> KvmpoolError:
    first = missing[0]
    line = "; ".join(f"{each.label}: {each.reason}" for each in missing)
    if any(each.hopeless for each in missing):
        return NoCapacity(f"{line}. Next: kvmpool explain {first.label}")
    return DeadlinePassed(f"{line}. Next: kvmpool explain {first.label}")

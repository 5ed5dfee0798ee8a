"""Turns decisions and steps into effects: the only place that does. One effect at a time, with a point around each.

A kill may come at any point of POINTS; every prefix of a plan is a state from which the next turn goes on. The points
are for tests, which pass a `Checkpoint` that kills there: between "after-start-worker" and "before-report-ready" lies
the moment when a worker runs that no row calls ready, and so on for each pair.
This module decides nothing: what to do, and in which order, was decided in kvmpool.core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvmpool.core import breaker
from kvmpool.core.model import (
    AttachDevice,
    Bind,
    Binding,
    Breaker,
    Claim,
    ClaimKey,
    CloseRelay,
    Decision,
    DetachDevice,
    DomainStep,
    FollowDomain,
    ForceUnplug,
    Forget,
    Generation,
    Host,
    Lose,
    MarkStarted,
    OnUnplug,
    OpenRelay,
    Phase,
    PointRelay,
    PowerOn,
    PublishCard,
    RecordMode,
    RecordPointed,
    RelayStep,
    Release,
    ReportBroken,
    ReportReady,
    ResetCard,
    Settings,
    StartWorker,
    StopWorker,
    SwitchMode,
    TripBreaker,
    UnpointRelay,
    Wait,
    Withdraw,
)
from kvmpool.core.plug import address_of, alias_of
from kvmpool.daemon.ledger import Change, Ledger, Page, log
from kvmpool.errors import Refused, Unreachable
from kvmpool.ports import Clock, Modes, Plugs, Relays, Workers
from kvmpool.store import codec

Checkpoint = Callable[[str], None]

_EFFECTS = (
    *("bind", "release", "rebind", "lose", "trip-breaker", "forget-events"),
    *("publish-host", "publish-card", "start-worker", "stop-worker", "report-ready", "report-broken", "forget"),
    *("record-mode", "switch-mode", "reset-card"),
    *("attach-device", "detach-device", "tell-force-unplug", "force-unplug", "power-on"),
    *("open-relay", "point-relay", "unpoint-relay", "follow-domain", "close-relay"),
    *("record-pointed", "withdraw", "mark-started"),
)
POINTS: tuple[str, ...] = tuple(f"{when}-{effect}" for effect in _EFFECTS for when in ("before", "after"))


def no_checkpoint(point: str) -> None:
    """Nothing happens between two effects outside of tests."""


class _Hands:
    """What the three performers share: commits between two points."""

    def __init__(self, ledger: Ledger, checkpoint: Checkpoint = no_checkpoint) -> None:
        self.ledger = ledger
        self._checkpoint = checkpoint

    async def _commit(self, effect: str, page: Page, change: Change) -> None:
        self._checkpoint(f"before-{effect}")
        await self.ledger.commit(page, change)
        self._checkpoint(f"after-{effect}")

    async def report_broken(self, page: Page, step: ReportBroken) -> None:
        broken = replace(step.binding, phase=Phase.BROKEN, reason=step.reason)
        event = self.ledger.event(broken.label, "broken", step.reason)
        await self._commit("report-broken", page, Change(puts=[broken], events=[event]))

    async def forget(self, page: Page, step: Forget) -> None:
        key = codec.key_of(step.binding)
        event = self.ledger.event(step.binding.label, "freed", step.reason)
        await self._commit("forget", page, Change(deletes=[key], events=[event]))


class ClusterHands(_Hands):
    """The leader's decisions. Each method raises Conflict where somebody wrote first: the rest of the plan is void."""

    def __init__(self, ledger: Ledger, clock: Clock, checkpoint: Checkpoint = no_checkpoint) -> None:
        super().__init__(ledger, checkpoint)
        self._clock = clock

    async def perform(self, page: Page, decisions: Sequence[Decision], settings: Settings) -> bool:
        """True where anything was committed. A binding given up and the one that replaces it are one commit."""
        binds = {decision.binding.claim: decision for decision in decisions if isinstance(decision, Bind)}
        memory, counter, done = page.rows.breaker, page.rows.counter, False
        for decision in decisions:
            match decision:
                case Wait():
                    continue
                case TripBreaker():
                    memory = await self._trip(page, memory, decision)
                case Release() | Lose():
                    bind = binds.pop(decision.binding.claim, None)
                    counter = max(counter, bind.binding.generation) if bind else counter
                    memory = await self._give_up(page, memory, decision, bind, counter, settings)
                case Bind() if decision.binding.claim in binds:
                    del binds[decision.binding.claim]
                    counter = max(counter, decision.binding.generation)
                    await self._commit("bind", page, self._bind(page, decision, counter))
                case _:
                    continue
            done = True
        return done

    async def forget_events(self, page: Page) -> None:
        if page.old_events:
            self._checkpoint("before-forget-events")
            await self.ledger.forget_events(page)
            self._checkpoint("after-forget-events")

    async def _trip(self, page: Page, memory: Breaker, decision: TripBreaker) -> Breaker:
        memory = breaker.opened(memory, decision.reason, self._clock.now())
        if page.rows.unread.breaker:
            return memory  # it holds for this plan; the row that cannot be read is not ours to write over
        events = [self.ledger.event("breaker", "opened", decision.reason)]
        await self._commit("trip-breaker", page, Change(puts=[memory], events=events))
        return memory

    async def _give_up(
        self, page: Page, memory: Breaker, decision: Release | Lose, bind: Bind | None, counter: int, settings: Settings
    ) -> Breaker:
        """Move one binding to RELEASING or LOST, with its successor in the same commit if the plan has one."""
        old = decision.binding
        change = self._bind(page, bind, counter) if bind else Change()
        change.reads += [codec.claim_key(old.claim), codec.card_key(old.card)]
        lost = isinstance(decision, Lose)
        phase = Phase.LOST if lost else Phase.RELEASING
        change.puts.insert(0, replace(old, phase=phase, reason=decision.reason))
        change.events.insert(0, self.ledger.event(old.label, "lost" if lost else "released", decision.reason))
        if isinstance(decision, Release) and (decision.failover_of is not None or decision.broken):
            broken = _label(page, old) if decision.broken else ""
            memory = breaker.record(memory, decision.failover_of, broken, settings, self._clock.now())
            if not page.rows.unread.breaker:
                change.puts.append(memory)
        effect = "rebind" if bind else ("lose" if lost else "release")
        await self._commit(effect, page, change)
        return memory

    def _bind(self, page: Page, decision: Bind, counter: int) -> Change:
        """The new row and the counter; relies on claim, card, host and the person's wish being as they were read."""
        new = decision.binding
        reads = [codec.claim_key(new.claim), codec.card_key(new.card), codec.wish_key(new.card)]
        return Change(
            puts=[new, codec.Counter(counter, page.rows.sequence)],
            reads=[*reads, codec.host_key(new.card_host)],
            events=[self.ledger.event(new.label, "bound", decision.reason)],
        )


def _label(page: Page, binding: Binding) -> str:
    claim = page.rows.claims.get(binding.claim)
    return claim.label if claim else binding.label


class CardHands(_Hands):
    """The steps of the host of the cards."""

    def __init__(
        self, ledger: Ledger, workers: Workers, checkpoint: Checkpoint = no_checkpoint, modes: Modes | None = None
    ) -> None:
        super().__init__(ledger, checkpoint)
        self._workers = workers
        self._modes = modes

    async def publish_host(self, page: Page, host: Host) -> None:
        old = page.rows.hosts.get(host.name)
        reason = "kvmpoold is up" if old is None or not old.up else f"version {host.version}, boot {host.boot_id}"
        event = self.ledger.event(host.name, "up", reason)
        await self._commit("publish-host", page, Change(puts=[host], events=[event]))

    async def publish_card(self, page: Page, step: PublishCard) -> None:
        verdict = step.card.health.verdict.value
        reason = step.reason.removeprefix(verdict).removeprefix(": ")
        events = [self.ledger.event(step.card.label, verdict, reason)] if step.reason else []
        if step.mode_event is not None:
            events.append(self.ledger.event(step.card.label, *step.mode_event))
        change = Change(puts=[step.card], events=events)
        if step.replaces is not None:
            change.deletes.append(codec.card_key(step.replaces))
            wish = page.rows.wishes.get(step.replaces)
            if wish is not None and step.card.id not in page.rows.wishes:
                change.puts.append(replace(wish, card=step.card.id))
                change.deletes.append(codec.wish_key(step.replaces))
        await self._commit("publish-card", page, change)

    async def record_mode(self, page: Page, step: RecordMode) -> None:
        card = page.rows.cards.get(step.wish.card)
        label = card.label if card else step.wish.card
        events = [self.ledger.event(label, "mode-wished", step.reason)]
        await self._commit("record-mode", page, Change(puts=[step.wish], events=events))

    async def switch_mode(self, step: SwitchMode) -> None:
        """Raises CardBusy, Refused, SwitchFailed, CardWedged: see ports.Modes."""
        if self._modes is None:
            raise Refused(f"{step.card.label}: this kvmpoold cannot switch modes")
        self._checkpoint("before-switch-mode")
        log.info("%s: switching its mode (%s)", step.card.label, step.reason)
        await self._modes.switch(step.card, step.mode)
        self._checkpoint("after-switch-mode")

    async def reset_card(self, step: ResetCard) -> None:
        """Raises as ports.Modes.reset does."""
        if self._modes is None:
            raise Refused("this kvmpoold resets no cards")
        self._checkpoint("before-reset-card")
        log.info("%s: resetting it (%s)", step.card.label, step.reason)
        await self._modes.reset(step.card)
        self._checkpoint("after-reset-card")

    async def start_worker(self, step: StartWorker) -> None:
        """Raises CardLost, Unreachable."""
        self._checkpoint("before-start-worker")
        await self._workers.start(step.binding)
        self._checkpoint("after-start-worker")

    async def stop_worker(self, step: StopWorker) -> None:
        """Raises DeadlinePassed where the process does not go."""
        self._checkpoint("before-stop-worker")
        await self._workers.stop(step.claim, step.generation, step.pid)
        self._checkpoint("after-stop-worker")

    async def report_ready(self, page: Page, step: ReportReady) -> None:
        ready = replace(step.binding, phase=Phase.READY, worker=step.worker)
        event = self.ledger.event(ready.label, "ready", ready.reason)
        await self._commit("report-ready", page, Change(puts=[ready], events=[event]))


class DomainHands(_Hands):
    """The steps of the host of the domains. Without `plugs` no card is passed through: such a step is Unreachable."""

    def __init__(
        self, ledger: Ledger, relays: Relays, plugs: Plugs | None = None, checkpoint: Checkpoint = no_checkpoint
    ) -> None:
        super().__init__(ledger, checkpoint)
        self._relays = relays
        self._plugs = plugs

    async def perform(self, page: Page, step: DomainStep) -> None:
        """One step. Raises Conflict where somebody wrote first, Unreachable where relay or store do not answer."""
        match step:
            case MarkStarted(attempt=attempt):
                event = self.ledger.event(attempt.domain_name, "started", "its domain is running")
                change = Change(puts=[replace(attempt, started=True)], events=[event])
                await self._commit("mark-started", page, change)
            case Withdraw():
                await self._withdraw(page, step)
            case RecordPointed(claim=key):
                await self._record(page, key, step)
            case ReportBroken():
                await self.report_broken(page, step)
            case Forget():
                await self.forget(page, step)
            case AttachDevice() | DetachDevice() | ForceUnplug():
                await self._plug(page, step)
            case PowerOn():
                await self._power_on(step)
            case _:
                await self._relay(step)

    async def _power_on(self, step: PowerOn) -> None:
        if self._plugs is not None:
            self._checkpoint("before-power-on")
            await self._plugs.power_on(step.domain)
            log.info("%s: started again (%s)", step.domain_name, step.reason)
            self._checkpoint("after-power-on")

    async def _plug(self, page: Page, step: AttachDevice | DetachDevice | ForceUnplug) -> None:
        if self._plugs is None:
            raise Unreachable("no hypervisor here plugs cards")
        match step:
            case AttachDevice(binding=binding):
                self._checkpoint("before-attach-device")
                await self._plugs.attach(step.domain, alias_of(binding.claim.name), step.address)
                log.info("%s: card %s is attached", binding.label, step.address)
                self._checkpoint("after-attach-device")
            case DetachDevice():
                self._checkpoint("before-detach-device")
                await self._plugs.detach(step.domain, step.alias)
                log.info("%s: card %s has left (%s)", step.domain_name, step.address, step.reason)
                self._checkpoint("after-detach-device")
            case ForceUnplug(how=how):
                attempt = page.rows.attempts.get(step.domain)
                told = self.ledger.event(step.domain_name, "forced", step.reason)
                cold = [replace(attempt, restart=True)] if attempt is not None and how is OnUnplug.COLD else []
                await self._commit("tell-force-unplug", page, Change(puts=[*cold], events=[told]))
                self._checkpoint("before-force-unplug")
                await (self._plugs.reset if how is OnUnplug.RESET else self._plugs.power_off)(step.domain)
                self._checkpoint("after-force-unplug")

    async def _relay(self, step: RelayStep) -> None:
        match step:
            case OpenRelay():
                self._checkpoint("before-open-relay")
                relay = await self._relays.open(
                    step.domain, step.domain_name, step.claims, step.endpoint, step.shared_mib
                )
                log.info("%s: relay listens (%s)", step.domain_name, relay.endpoint)
                self._checkpoint("after-open-relay")
            case PointRelay():
                self._checkpoint("before-point-relay")
                await self._relays.point(step.domain, step.claim, step.generation, step.worker, step.memory_mib)
                self._checkpoint("after-point-relay")
            case UnpointRelay():
                self._checkpoint("before-unpoint-relay")
                await self._relays.unpoint(step.domain, step.claim, step.reason)
                self._checkpoint("after-unpoint-relay")
            case FollowDomain():
                self._checkpoint("before-follow-domain")
                await self._relays.follow(step.domain, step.pid)
                self._checkpoint("after-follow-domain")
            case CloseRelay():
                self._checkpoint("before-close-relay")
                await self._relays.close(step.domain)
                log.info("%s: relay closed (%s)", step.domain, step.reason)
                self._checkpoint("after-close-relay")

    async def _withdraw(self, page: Page, step: Withdraw) -> None:
        keys = [codec.claim_key(key) for key in step.claims]
        if step.domain in page.rows.attempts:
            keys.append(codec.attempt_key(step.domain))
        event = self.ledger.event(step.domain_name, "withdrawn", step.reason)
        await self._commit("withdraw", page, Change(deletes=keys, events=[event]))

    async def _record(self, page: Page, key: ClaimKey, step: RecordPointed) -> None:
        claim: Claim = page.rows.claims[key]
        served = claim.served if step.pointed is None else step.pointed
        change = Change(puts=[replace(claim, pointed=step.pointed, endpoint=step.endpoint, served=served)])
        if step.pointed is not None:
            subject = f"{claim.label}#{step.pointed}"
            change.events.append(self.ledger.event(subject, "served", _served(page, step)))
        elif claim.pointed is not None:
            subject = f"{claim.label}#{claim.pointed}"
            change.events.append(self.ledger.event(subject, "unserved", _unserved(page, claim)))
        await self._commit("record-pointed", page, change)


def _unserved(page: Page, claim: Claim) -> str:
    return "its card is not in its domain" if _card_of(page, claim.key, claim.pointed) else "its relay points nowhere"


def _card_of(page: Page, claim: ClaimKey, generation: Generation | None) -> str:
    """The address of the card that a generation passes through; "" where it is no such."""
    binding = page.rows.bindings.get((claim, generation)) if generation is not None else None
    return address_of(binding) if binding is not None else ""


def _served(page: Page, step: RecordPointed) -> str:
    """By what: a worker behind the relay, or a card in the domain."""
    address = _card_of(page, step.claim, step.pointed)
    return f"card {address} is in its domain" if address else f"its relay points there ({step.endpoint})"

"""The loop of a host's cards: publishes their verdicts, and starts, stops and reports the workers of their bindings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvmpool import __version__
from kvmpool.core.health import Limits
from kvmpool.core.model import (
    Binding,
    CardId,
    CardSeen,
    CardStep,
    Forget,
    Health,
    HealthSignal,
    Host,
    HostName,
    PublishCard,
    RecordMode,
    ReportBroken,
    ReportReady,
    ResetCard,
    StartWorker,
    StopWorker,
    SwitchMode,
    Unread,
    WorkerSeen,
)
from kvmpool.core.reconcile_cards import CardsView, WorkerKey, reconcile_cards
from kvmpool.daemon.card_watch import CardWatch
from kvmpool.daemon.ledger import Ledger, Page
from kvmpool.daemon.perform import CardHands, Checkpoint, no_checkpoint
from kvmpool.daemon.resets import Resets
from kvmpool.daemon.switches import AS_FOUND, InitialModes, Switches
from kvmpool.daemon.turns import Errands, Loop, unless_conflict
from kvmpool.errors import CardLost, KvmpoolError
from kvmpool.ports import Cards, Clock, HealthSource, Modes, Store, Workers

log = logging.getLogger(__name__)

_IDLE_S = 5.0
_START_RETRY_S = 0.2  # doubled each time: a program or a socket that is missing does not come back sooner
_STOP_RETRY_S = 5.0  # a worker inside a hung card's driver goes when the driver lets go of it
_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class _Failure:
    """A call that failed: how often in a row, why, and not before when it is made again."""

    times: int
    reason: str
    retry_at: float


class CardLoop(Loop):
    """Owns this host's Host and Card rows, and the ready, broken and freed of its bindings.

    `run` also listens to the sources; who drives `turn` by hand passes signals to `offer`.
    """

    name = "card"

    def __init__(
        self,
        store: Store,
        clock: Clock,
        host: HostName,
        cards: Cards,
        sources: Sequence[HealthSource],
        workers: Workers,
        *,
        limits: Limits = _LIMITS,
        inventory_interval_s: float = 1.0,
        checkpoint: Checkpoint = no_checkpoint,
        modes: Modes | None = None,
        initial_modes: InitialModes = AS_FOUND,
    ) -> None:
        super().__init__(clock)
        self.host = host
        self._initial_modes = initial_modes
        self._sources = sources
        self._workers = workers
        self._ledger = Ledger(store, clock, host)
        self._hands = CardHands(self._ledger, workers, checkpoint, modes)
        self._errands = Errands(self.wake.ring)
        self._watch = CardWatch(clock, cards, self._errands, limits, inventory_interval_s)
        self._failures: dict[WorkerKey, _Failure] = {}
        self._list_fault = ""
        self._switches = Switches(clock, self._hands, self._errands, self._watch)
        self._resets = Resets(clock, self._hands, self._watch, self._switches)

    @property
    def health(self) -> dict[CardId, Health]:
        """The verdicts as of now; a copy."""
        return dict(self._watch.health)

    def offer(self, signal: HealthSignal) -> None:
        """Something was observed: fold it in the next turn, and have that now."""
        self._watch.offer(signal)
        self.wake.ring()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for source in self._sources:
                group.create_task(self._listen(source))
            group.create_task(super().run())

    async def close(self) -> None:
        await self._errands.close()

    async def turn(self) -> bool:
        page = await self._ledger.read()
        self._watch.look(page.rows, self.host)
        ended = await self._errands.settle()
        held = {binding.card for binding in page.rows.bindings.values()}
        self._watch.judge(held, self._switches.under_way())
        if not await self._publish_host(page):
            return True
        view = await self._view(page)
        self._forget_failures(view)
        self._switches.forget(page.rows.wishes)
        done = await self._perform(page, reconcile_cards(view))
        return await self._errands.settle() or done or ended

    def pause_s(self) -> float:
        now = self.clock.now()
        retries = [failure.retry_at for failure in self._failures.values()]
        retries += self._switches.retries.times() + self._resets.retries.times()
        due = [at - now for at in retries if at > self.turn_at]
        return max(0.0, min([_IDLE_S, self._watch.due_in_s(), *due]))

    async def _listen(self, source: HealthSource) -> None:
        """Hand on a source's signals, for ever. Where a source ends, the cards are still probed and looked at."""
        while True:
            try:
                async for signal in source.signals():
                    self.offer(signal)
            except KvmpoolError as error:
                log.warning("%s: %s; listening again in %.0f s", type(source).__name__, error, _IDLE_S)
            await self.clock.sleep(_IDLE_S)

    async def _publish_host(self, page: Page) -> bool:
        """False where somebody wrote first."""
        host = Host(self.host, self.clock.boot_id(), __version__)
        if page.rows.hosts.get(self.host) == host or self.host in page.rows.unread.hosts:
            return True
        return await unless_conflict(self._hands.publish_host(page, host))

    async def _view(self, page: Page) -> CardsView:
        """Workers are listed after the rows were read: see reconcile_cards."""
        rows = page.rows
        workers: tuple[WorkerSeen, ...] | None = None
        try:
            workers = await self._workers.list()
            self._list_fault = ""
        except KvmpoolError as error:
            if self._list_fault != str(error):
                log.warning("workers cannot be listed: %s; none is started, stopped or reported meanwhile", error)
            self._list_fault = str(error)
        return CardsView(
            host=self.host,
            bindings=tuple(binding for binding in rows.bindings.values() if binding.card_host == self.host),
            workers=workers,
            cards=_readable(self._switches.seen(self._watch.seen), rows.unread),
            health={card: health for card, health in self.health.items() if card not in rows.unread.cards},
            published={card.id: card for card in rows.cards.values() if card.host == self.host},
            unreadable=rows.unread.bindings,
            withdrawn=frozenset(key for key, _ in rows.bindings if key not in rows.claims),
            start_failures={key: (failure.times, failure.reason) for key, failure in self._failures.items()},
            boot_id=self.clock.boot_id(),
            wishes=rows.wishes,
            unread_wishes=rows.unread.wishes,
            switch_faults=dict(self._switches.faults),
            initial_modes=self._initial_modes.by_address,
            default_mode=self._initial_modes.default,
            limits=self._watch.limits,
        )

    # --- steps --------------------------------------------------------------------------------------------------------

    async def _perform(self, page: Page, steps: Sequence[CardStep]) -> bool:
        """Commits in order, long calls beside; True where a commit was applied or refused."""
        done = False
        for step in steps:
            match step:
                case StartWorker():
                    self._send(_key(step.binding), partial(self._start, step))
                case StopWorker():
                    self._send((step.claim, step.generation), partial(self._stop, step))
                case SwitchMode():
                    self._switches.run(step, page.rows.cards.values())
                case ResetCard():
                    self._resets.run(step)
                case ReportReady() | ReportBroken() | Forget() if _key(step.binding) in self._errands:
                    continue  # its worker is being started or stopped: what becomes of it is not known yet
                case _:
                    done = True
                    if not await unless_conflict(self._commit(page, step)):
                        break
        return done

    async def _commit(self, page: Page, step: PublishCard | ReportReady | ReportBroken | Forget | RecordMode) -> None:
        match step:
            case RecordMode():
                await self._hands.record_mode(page, step)
            case PublishCard():
                await self._hands.publish_card(page, step)
            case ReportReady():
                await self._hands.report_ready(page, step)
            case ReportBroken():
                await self._hands.report_broken(page, step)
            case Forget():
                await self._hands.forget(page, step)

    def _send(self, key: WorkerKey, call: Callable[[], Awaitable[None]]) -> None:
        failure = self._failures.get(key)
        if failure is None or self.clock.now() >= failure.retry_at:
            self._errands.run(key, call)

    async def _start(self, step: StartWorker) -> None:
        key = _key(step.binding)
        try:
            await self._hands.start_worker(step)
        except KvmpoolError as error:
            times = self._failed(key, step.binding.label, "start its worker", str(error), _START_RETRY_S)
            if isinstance(error, CardLost) or times == 1:
                self._watch.probe_soon(step.binding.card)
        else:
            self._failures.pop(key, None)

    async def _stop(self, step: StopWorker) -> None:
        key = (step.claim, step.generation)
        try:
            await self._hands.stop_worker(step)
        except KvmpoolError as error:
            label = f"{step.claim.domain}/{step.claim.name}#{step.generation}"
            self._failed(key, label, "stop its worker", str(error), _STOP_RETRY_S)
        else:
            self._failures.pop(key, None)

    def _failed(self, key: WorkerKey, label: str, what: str, reason: str, pause_s: float) -> int:
        before = self._failures.get(key)
        times = before.times + 1 if before else 1
        if before is None or before.reason != reason:
            log.warning("%s: could not %s: %s; trying again", label, what, reason)
        self._failures[key] = _Failure(times, reason, self.clock.now() + pause_s * 2 ** min(times - 1, 5))
        return times

    def _forget_failures(self, view: CardsView) -> None:
        known = {_key(binding) for binding in view.bindings}
        known |= {(worker.claim, worker.generation) for worker in view.workers or ()}
        self._failures = {key: failure for key, failure in self._failures.items() if key in known}


def _key(binding: Binding) -> WorkerKey:
    return binding.claim, binding.generation


def _readable(seen: tuple[CardSeen, ...] | None, unread: Unread) -> tuple[CardSeen, ...] | None:
    """Without the cards whose row is there but cannot be read: it is not ours to write over."""
    return None if seen is None else tuple(card for card in seen if card.id not in unread.cards)

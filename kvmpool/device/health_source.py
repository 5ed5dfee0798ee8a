"""What reports by itself that a card is sick: NVML's events, the kernel log, udev, the bus. One stream of signals.

Implements ports.HealthSource. The same XID comes by several ways within a second: it is told once, and again only
where the later word weighs differently (only the kernel's text of XID 154 names the recovery action).
A source that fails is tried again and never ends the others.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

from kvmpool.core.model import BusErrorSignal, CardId, EccSignal, GoneSignal, HealthSignal, Mode, ProbeSignal, XidSignal
from kvmpool.core.xid import XidClass, classify
from kvmpool.device import kmsg, pci, udev
from kvmpool.device.bus_errors import BusErrors
from kvmpool.device.cards import SystemCards
from kvmpool.device.kmsg import KernelDead, KernelXid
from kvmpool.device.nvml import EventKind, Nvml, NvmlEvent
from kvmpool.device.pci import BusState
from kvmpool.device.udev import PciEvent, PciEventKind
from kvmpool.errors import CardLost, Unreachable
from kvmpool.ports import Clock

log = logging.getLogger("kvmpool.device")

ECHO_S = 1.0  # NVML and the kernel log tell the same XID some milliseconds apart
RETRY_S = 1.0
FIRST_RETRY_S = 0.05  # a card's loss ends NVML's watch of all cards: the others must not be unheard for long
QUEUE_MAX = 4096  # echoes are dropped before; more than this waiting means that nobody reads
NAMELESS_MAX = 256  # messages about addresses that no inventory has named yet
NAMELESS_S = 30.0
VERDICT_DEADLINE_S = 2.0
BUS_POLL_S = 0.5  # reads of counters that the kernel keeps: where no netlink tells, half of what a silent loss may take


class SystemHealthSource:
    """One reader; `cards` names the addresses and is asked for NVML's verdict after an XID."""

    def __init__(
        self,
        cards: SystemCards,
        clock: Clock,
        *,
        kernel_log: Path | None,
        udev_source: str = "udev",
        bus_poll_s: float = BUS_POLL_S,
    ) -> None:
        """`kernel_log` None, `udev_source` "": not listened to."""
        self._cards = cards
        self._clock = clock
        self._kernel_log = kernel_log
        self._udev_source = udev_source
        self._bus_poll_s = bus_poll_s
        self._queue: asyncio.Queue[HealthSignal | None] = asyncio.Queue(QUEUE_MAX)
        self._echoes: dict[tuple[CardId, int], dict[XidClass, float]] = {}
        self._nameless: deque[tuple[float, KernelXid | KernelDead]] = deque(maxlen=NAMELESS_MAX)
        self._asked: dict[CardId, float] = {}  # when NVML's verdict was last asked for, or will be
        self._log_was_missing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._nvml_ends = threading.Event()
        self._closed = threading.Event()

    async def signals(self) -> AsyncIterator[HealthSignal]:
        self._start()
        try:
            while (signal := await self._queue.get()) is not None:
                yield signal
        finally:
            self._stop()

    async def close(self) -> None:
        self._stop()
        while self._queue.full():
            self._queue.get_nowait()
        self._queue.put_nowait(None)

    # --- sources ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._kernel_log is not None:
            path = self._kernel_log
            self._spawn(self._keep("kernel log", lambda: self._follow_kernel_log(path)))
        if self._udev_source:
            self._spawn(self._keep("udev", self._follow_udev))
        if self._cards.nvml is not None:
            nvml, loop = self._cards.nvml, asyncio.get_running_loop()
            threading.Thread(target=self._watch_nvml, args=(nvml, loop), name="nvml events", daemon=True).start()
        self._spawn(self._keep("roster", self._follow_roster))
        self._spawn(self._keep("bus errors", self._follow_bus_errors))

    def _stop(self) -> None:
        self._closed.set()
        self._nvml_ends.set()  # the thread ends within half a second, or hangs in the driver and ends with the process
        for task in self._tasks:
            task.cancel()

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a source of health signals ended", exc_info=task.exception())

    async def _keep(self, name: str, follow: Callable[[], Awaitable[None]]) -> None:
        told = ""
        while True:
            try:
                await follow()
            except Unreachable as error:
                if str(error) != told:
                    log.warning("%s: %s", name, error)
                told = str(error)
            await asyncio.sleep(RETRY_S)

    async def _follow_kernel_log(self, path: Path) -> None:
        whole, self._log_was_missing = self._log_was_missing, _is_missing(path)
        async for found in kmsg.follow(path, whole=whole):
            if not self._kernel_said(self._clock.now(), found):
                self._nameless.append((self._clock.now(), found))

    async def _follow_udev(self) -> None:
        async for event in udev.follow(self._udev_source):
            self._bus_said(event)

    async def _follow_roster(self) -> None:
        """When addresses get names: tell what waited for one, and watch the new cards too."""
        version = self._cards.roster.version
        while True:
            await asyncio.sleep(RETRY_S / 4)
            for at, found in [self._nameless.popleft() for _ in range(len(self._nameless))]:
                if not self._kernel_said(at, found) and self._clock.now() - at < NAMELESS_S:
                    self._nameless.append((at, found))
            if version != self._cards.roster.version:
                version = self._cards.roster.version
                self._watch_all()

    async def _follow_bus_errors(self) -> None:
        """AER counters and the link of every card, by all its functions."""
        errors = BusErrors(self._cards.sysroot)
        while True:
            await asyncio.sleep(self._bus_poll_s)
            look = partial(errors.look, list(self._cards.roster.seen.values()))
            for card, fatal, text in await self._cards.bounded("bus errors", look):
                self._put(BusErrorSignal(card, self._clock.now(), fatal, text))

    def _watch_all(self) -> None:
        """End NVML's watch where it leaves out a card: the next one begins with a new list."""
        known = {card.id for card in self._cards.roster.seen.values()}
        if self._cards.nvml is not None and known - self._cards.nvml.watched:
            self._nvml_ends.set()

    def _watch_nvml(self, nvml: Nvml, loop: asyncio.AbstractEventLoop) -> None:
        """A thread's life: the driver may hang it for ever, and nobody waits for it."""
        told = ""

        def tell(act: Callable[..., None], *what: object) -> None:
            if not self._closed.is_set():
                loop.call_soon_threadsafe(act, *what)

        pause_s = FIRST_RETRY_S
        while not self._closed.is_set():
            self._nvml_ends.clear()
            if self._closed.is_set():
                return  # it was set before it was cleared
            begun = self._clock.now()
            try:
                nvml.watch(lambda e: tell(self._nvml_said, e), lambda c: tell(self._nvml_lost, c), self._nvml_ends)
                told = ""
            except (Unreachable, CardLost) as error:
                if str(error) != told:
                    log.warning("NVML's events: %s; trying again", error)
                told = str(error)
                held = self._clock.now() - begun > 2 * RETRY_S
                pause_s = FIRST_RETRY_S if held else min(RETRY_S, 2 * pause_s)
                self._closed.wait(pause_s)
            except RuntimeError:
                return  # the loop is gone

    # --- what they say ------------------------------------------------------------------------------------------------

    def _kernel_said(self, at: float, found: KernelXid | KernelDead) -> bool:
        """False: no card is known at that address (yet)."""
        card = self._cards.roster.ids.get(found.address)
        if card is None:
            return False
        if isinstance(found, KernelDead):
            self._put(BusErrorSignal(card, at, True, found.text))
            return True
        self._xid(XidSignal(card, found.xid, at, found.text))
        return True

    def _nvml_said(self, event: NvmlEvent) -> None:
        now = self._clock.now()
        match event.kind:
            case EventKind.XID:
                self._xid(XidSignal(event.card, event.value, now))
            case EventKind.DOUBLE_BIT:
                self._put(EccSignal(event.card, now, "NVML: double-bit ECC error"))
            case EventKind.RECOVERY_ACTION if event.value:
                self._put(ProbeSignal(event.card, now, ok=True, recovery_action=event.value, text="NVML event"))
            case EventKind.UNAVAILABLE:
                self._put(ProbeSignal(event.card, now, ok=False, text="NVML: the card is unavailable"))
            case _:
                pass

    def _nvml_lost(self, card: CardId) -> None:
        self._put(ProbeSignal(card, self._clock.now(), ok=False, lost=True, text="NVML: GPU is lost"))

    def _bus_said(self, event: PciEvent) -> None:
        """Messages can be forged where netlink is shared: hard evidence is what sysfs shows."""
        card, now = self._cards.roster.card_with(event.address), self._clock.now()
        if card is None:
            return
        known = next((each for each in self._cards.roster.seen.values() if each.id == card), None)
        passed = known is not None and known.mode is Mode.PASSTHROUGH
        state = pci.bus_state(self._cards.sysroot, event.address)
        match event.kind:
            case PciEventKind.REMOVED if state is BusState.GONE:
                self._put(GoneSignal(card, now, f"{event.address} has left the bus"))
            case PciEventKind.RECOVERY_BEGINS:
                # QEMU stops a domain whose card the kernel begins to recover; a driver of the host may live on.
                self._put(BusErrorSignal(card, now, passed, f"the bus reported an error of {event.address} (AER)"))
            case PciEventKind.RECOVERY_FAILED:
                self._put(BusErrorSignal(card, now, True, f"the bus could not recover {event.address} (AER)"))
            case _:
                pass

    def _xid(self, signal: XidSignal) -> None:
        kind = classify(signal.xid, signal.text, signal.recovery_action)
        told = self._echoes.setdefault((signal.card, signal.xid), {})
        if signal.at - told.get(kind, -ECHO_S) < ECHO_S:
            return
        told[kind] = signal.at
        self._put(signal)
        now = self._clock.now()
        ask_at = max(now, self._asked.get(signal.card, 0.0) + ECHO_S)
        if now >= self._asked.get(signal.card, 0.0):  # else it will be asked after this XID anyway
            self._asked[signal.card] = ask_at
            self._spawn(self._ask_verdict(signal.card, ask_at - now))

    async def _ask_verdict(self, card: CardId, pause_s: float) -> None:
        """NVML's recovery action, or its loss; a slow answer says nothing here: the regular probe judges that."""
        await asyncio.sleep(pause_s)
        signal = await self._cards.probe(card, VERDICT_DEADLINE_S)
        if isinstance(signal, ProbeSignal) and (signal.recovery_action or signal.lost):
            self._put(signal)

    def _put(self, signal: HealthSignal) -> None:
        try:
            self._queue.put_nowait(signal)
        except asyncio.QueueFull:
            log.error("health signals are not read: %s dropped", signal)


def _is_missing(path: Path) -> bool:
    return not path.exists()

"""The cards of this host: an inventory out of sysfs and NVML, and probes that a hung driver cannot hold up.

Implements ports.Cards. Every look runs in a thread with a deadline; what hangs is left behind and reported as such.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from kvmpool.core.model import CardId, CardSeen, Mode, PciFacts, ProbeSignal, UnknownSignal
from kvmpool.device import pci
from kvmpool.device.bounded import Bounded
from kvmpool.device.inventory import NVIDIA_DRIVER, Look, merged
from kvmpool.device.nvml import Answer, Nvml, NvmlCard
from kvmpool.device.pci import BusState, PciCard
from kvmpool.device.roster import Roster
from kvmpool.device.sysroot import Sysroot
from kvmpool.device.topology import DEVICES, mode_of
from kvmpool.errors import CardLost, DeadlinePassed, NotFound, Unreachable
from kvmpool.ports import Clock

log = logging.getLogger("kvmpool.device")
T = TypeVar("T")

LET_GO_DEADLINE_S = 5.0  # the watch of its events notices within half a second
_NOTHING = PciFacts()
# Of one look at the bus or at NVML's list. A config read of a dead card ends by the root port's completion timeout,
# within 50 ms; NVML's first list after a boot takes about a second a card.
LOOK_DEADLINE_S = 2.0


class SystemCards:
    """Use it from one event loop."""

    def __init__(
        self,
        clock: Clock,
        *,
        root: Path,
        match: Sequence[str],
        nvml: bool = True,
        look_deadline_s: float = LOOK_DEADLINE_S,
    ) -> None:
        """`root`: where `sys/` is ("/"). `match`: `vendor:device` patterns. `nvml=False`: never asked."""
        self._look_s = look_deadline_s
        self.roster = Roster()
        self.sysroot = Sysroot(root)
        self.nvml = Nvml() if nvml else None
        self.nvml_fault = "" if nvml else "NVML is switched off (device.nvml)"
        self._clock = clock
        self._match = tuple(match)
        self._calls = Bounded("the driver")
        self._resumed = asyncio.Event()  # unset while NVML is let go
        self._resumed.set()

    def remember(self, card: CardId, address: str, facts: PciFacts = _NOTHING) -> None:
        """Tell, before the first inventory, who was where when an earlier kvmpoold looked."""
        self.roster.remember(card, address, facts)

    def addresses(self) -> frozenset[str]:
        """Of all cards on the bus now. Blocking."""
        return frozenset(card.address for card in pci.cards(self.sysroot, self._match) or ())

    async def bounded(self, key: str, act: Callable[[], T]) -> T:
        """A look at the bus, in a thread that may be left behind. Raises Unreachable."""
        return await self._calls.call(key, act, self._look_s)

    @asynccontextmanager
    async def let_go(self, cards: Sequence[CardId]) -> AsyncIterator[None]:
        """Inside, nothing of ours holds a device node of the driver, and these cards do not persist without users.

        Meanwhile the other cards are as they were last seen, and are probed afterwards. Raises Unreachable.
        """
        nvml = self.nvml
        if nvml is None:
            yield
            return
        self._resumed.clear()
        try:
            await self._calls.call("let go", lambda: nvml.let_go(cards), LET_GO_DEADLINE_S)
            yield
        finally:
            nvml.resume()
            self._resumed.set()

    async def inventory(self) -> tuple[CardSeen, ...]:
        listed, slow = await self._listed()
        try:
            bus, states, on_bus = await self._calls.call("sysfs", self._look_at_bus, self._look_s)
        except Unreachable:
            bus, states, on_bus = None, {}, frozenset()
        if bus is None and listed is None:
            raise Unreachable(f"no card can be seen: sysfs cannot be read, {self.nvml_fault}. Next: kvmpool doctor")
        look = Look(bus, states, on_bus, listed, self.nvml_fault, slow)
        cards = merged(look, self.roster)
        self.roster.learn(card for card in cards if card.present and not card.fault)
        return cards

    async def probe(self, card: CardId, deadline_s: float) -> ProbeSignal | UnknownSignal:
        until = self._clock.now() + deadline_s
        driver = self._driver(card)
        try:
            state = await self._bus_state(card, deadline_s)
            if state in (BusState.ALL_ONES, BusState.GONE):
                return ProbeSignal(card, self._clock.now(), ok=False, lost=True, text=state.value)
            if state is BusState.UNREADABLE:
                return UnknownSignal(card, self._clock.now(), state.value)
            mode = None if driver is None else mode_of(driver)
            if mode is Mode.PASSTHROUGH:  # no driver of ours to ask: that the bus answers is all there is to know
                return ProbeSignal(card, self._clock.now(), ok=True)
            if mode is Mode.OFF:
                return UnknownSignal(card, self._clock.now(), "off: no driver has it")
            if not self._resumed.is_set():
                await self._resumed.wait()
                until = self._clock.now() + deadline_s
            answer = await self._answer(card, max(0.05, until - self._clock.now()))
        except CardLost as error:
            return ProbeSignal(card, self._clock.now(), ok=False, lost=True, text=str(error))
        except DeadlinePassed:
            text = f"a probe did not end within {deadline_s:g} s"
            return ProbeSignal(card, self._clock.now(), ok=False, timed_out=True, text=text)
        except (NotFound, Unreachable) as error:
            foreign = driver not in (None, NVIDIA_DRIVER)
            text = f"it is bound to {driver}, not to {NVIDIA_DRIVER}" if foreign else str(error)
            return UnknownSignal(card, self._clock.now(), text)
        ok = not answer.fault
        return ProbeSignal(card, self._clock.now(), ok, recovery_action=answer.recovery_action, text=answer.fault)

    async def close(self) -> None:
        """Nothing to give back: threads that still hang end with the process."""

    async def _listed(self) -> tuple[tuple[NvmlCard, ...] | None, bool]:
        """NVML's list, or None; and whether it is None because NVML is slow."""
        if self.nvml is None:
            return None, False
        if not self._resumed.is_set():
            return None, True
        try:
            listed = await self._calls.call("list", self.nvml.cards, self._look_s)
        except DeadlinePassed as error:
            self._nvml_is(str(error))
            return None, True
        except Unreachable as error:
            self._nvml_is(str(error))
            return None, False
        self._nvml_is("")
        return listed, False

    def _nvml_is(self, fault: str) -> None:
        if fault != self.nvml_fault:
            if fault:
                log.warning("NVML: %s: cards are unknown until it answers", fault)
            else:
                log.info("NVML: answers again")
            self.nvml_fault = fault

    def _look_at_bus(self) -> tuple[tuple[PciCard, ...] | None, dict[str, BusState], frozenset[str]]:
        cards = pci.cards(self.sysroot, self._match)
        states = {card.address: pci.bus_state(self.sysroot, card.address) for card in cards or ()}
        return cards, states, frozenset(self.sysroot.names(DEVICES) or ())

    def _driver(self, card: CardId) -> str | None:
        """None for a card of unknown address."""
        address = self.roster.address_of(card)
        return None if address is None else self.sysroot.link_name(f"{DEVICES}/{address}/driver") or ""

    async def _bus_state(self, card: CardId, deadline_s: float) -> BusState:
        """ANSWERS for a card of unknown address: then only the driver can be asked."""
        address = self.roster.address_of(card)
        if address is None:
            return BusState.ANSWERS
        return await self._calls.call(
            f"config {address}", lambda: pci.bus_state(self.sysroot, address), min(deadline_s, self._look_s)
        )

    async def _answer(self, card: CardId, deadline_s: float) -> Answer:
        nvml = self.nvml
        if nvml is None:
            raise Unreachable(self.nvml_fault)
        return await self._calls.call(f"probe {card}", lambda: nvml.probe(card), deadline_s)

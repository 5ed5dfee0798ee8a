"""Switches the mode of cards: gives every function of a card's unit to vfio-pci, to its own driver, or to none.

    journal    what is about to change, on disk
    d3cold     a card that sleeps that deep does not wake up for vfio (passthrough only)
    override   per address: ids would take twin cards along
    unbind     each function from its driver, in a child with a deadline
    probe      the kernel binds what the override says
    verify     the driver link and the vfio node are read again: a probe that does nothing tells nobody
    settle     the override that is to stay
    finish     the journal's entry goes

Every step may be the last one of this process: the next one finds the entry and undoes the switch, or ends it where all
is as wanted. A step that fails is undone at once, by the same compensation. A driver that does not let go cannot be
stopped: the card is wedged, the entry stays, and nothing more is tried before the host has rebooted. Kernel modules are
never unloaded, new_id is never written. Source: kernel, driver-api/vfio.rst, ABI/testing/sysfs-bus-pci.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from kvmpool.core.model import Card, CardId, Mode
from kvmpool.device.bounded import Bounded
from kvmpool.device.child_write import WriteRefused, child_write
from kvmpool.device.holders import told
from kvmpool.device.preflight import Situation, check, check_identity, missing_module, wanted_driver
from kvmpool.device.reset import RESET_DEADLINE_S, functions_to_reset, reset
from kvmpool.device.situation import look
from kvmpool.device.switch_journal import Before, Entry, Journal, before
from kvmpool.device.sysroot import Sysroot
from kvmpool.device.topology import DEVICES, DRIVERS, Function, Unit, function_at, is_vfio, mode_of
from kvmpool.errors import CardBusy, CardLost, CardWedged, DeadlinePassed, KvmpoolError, Refused, SwitchFailed

log = logging.getLogger("kvmpool.device.vfio")

STEPS = ("journal", "d3cold", "override", "unbind", "probe", "verify", "settle", "finish")
POINTS: tuple[str, ...] = tuple(f"{when}-{step}" for step in STEPS for when in ("before", "after"))
NO_DRIVER = "kvmpool-off"  # no driver has this name: an override that keeps every one away
UNBIND_DEADLINE_S = 10.0  # NVIDIA's driver takes a few seconds to let go of a large card
SETTLE_S = 2.0  # the kernel binds within the write; its vfio node is made by then too
_POLL_S = 0.01
LOOK_DEADLINE_S = 10.0  # at the unit and at every process that may hold it

LetGo = Callable[[Sequence[CardId]], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def nothing_held(_: Sequence[CardId]) -> AsyncIterator[None]:
    """For who has no handle of a driver of its own."""
    yield


class VfioModes:
    """Implements ports.Modes. One switch at a time; use it from one event loop."""

    def __init__(
        self,
        root: Path,
        state: Path,
        boot_id: str,
        cards: Callable[[], frozenset[str]],
        *,
        let_go: LetGo = nothing_held,
        load: Callable[[str], Awaitable[None]] | None = None,
        unbind_deadline_s: float = UNBIND_DEADLINE_S,
        reset_deadline_s: float = RESET_DEADLINE_S,
        look_deadline_s: float = LOOK_DEADLINE_S,
        settle_s: float = SETTLE_S,
        checkpoint: Callable[[str], None] = lambda point: None,
    ) -> None:
        """`root`: where sys/, proc/ and dev/ are; `state`: the journal's folder; `cards`: addresses of all cards.

        `load`: loads a kernel module; None: nobody does. Raises Refused, Unreachable.
        """
        self.journal = Journal(state)
        self._sysroot = Sysroot(root)
        self._boot_id = boot_id
        self._cards = cards
        self._let_go = let_go
        self._load = load
        self._unbind_deadline_s = unbind_deadline_s
        self._reset_deadline_s = reset_deadline_s
        self._look_deadline_s = look_deadline_s
        self._settle_s = settle_s
        self._checkpoint = checkpoint
        self._lock = asyncio.Lock()
        self._calls = Bounded("the card's look")

    async def plan(self, card: Card, mode: Mode) -> tuple[str, ...]:
        self._refuse_wedged(card)
        situation = await self._look(card.address, own=os.getpid())
        if self._is_in(situation.unit, mode):
            return ()
        missing = missing_module(situation, mode) if self._load is not None else ""
        check(card, replace(situation, drivers=situation.drivers | {missing}), mode)
        lines = [f"load {missing}"] if missing else []
        for function in situation.unit.functions:
            wanted = self._wanted(situation.unit, function, mode)
            driver = "its own driver" if wanted is None else wanted or "no driver"
            lines.append(f"give {function.address} to {driver} (now: {function.driver or 'no driver'})")
        return tuple(lines)

    async def switch(self, card: Card, mode: Mode) -> None:
        async with self._lock:
            self._refuse_wedged(card)
            for entry in self.journal.under_way():
                if any(each.address == card.address for each in entry.before):
                    await self._end(entry)
            situation = await self._look(card.address, own=os.getpid())
            if self._is_in(situation.unit, mode):
                return
            missing = missing_module(situation, mode)
            if missing and self._load is not None:
                await self._load(missing)
                situation = await self._look(card.address, own=os.getpid())
            check(card, situation, mode)
            async with self._let_go([card.id]):
                situation = await self._look(card.address)  # now ours are gone too, or they are told as holders
                check(card, situation, mode)
                await self._carry_out(card, situation.unit, mode)

    async def reset(self, card: Card) -> None:
        async with self._lock:
            self._refuse_wedged(card)
            situation = await self._look(card.address)
            check_identity(card, situation.unit)
            functions = functions_to_reset(self._sysroot, situation)
            await reset(self._sysroot, card.address, functions, self._reset_deadline_s)

    async def recover(self) -> tuple[str, ...]:
        lines = []
        async with self._lock:
            for entry in self.journal.under_way():
                try:
                    lines.append(await self._end(entry))
                except KvmpoolError as error:
                    lines.append(f"{entry.address}: the switch to {entry.mode.value} is not undone: {error}")
        return tuple(lines)

    async def give_back(self) -> tuple[str, ...]:
        """Restore what every function was before kvmpool touched it; a line each. For who leaves the pool.

        Raises CardBusy, SwitchFailed, CardWedged at the first that cannot be given back: those before it are.
        """
        lines = []
        async with self._lock:
            for entry in self.journal.under_way():
                await self._end(entry)
            for old in self.journal.origins():
                lines.append(await self._give_back(old))
        return tuple(lines)

    # --- one switch ---------------------------------------------------------------------------------------------------

    async def _carry_out(self, card: Card, unit: Unit, mode: Mode) -> None:
        entry = Entry(card.address, mode, self._boot_id, tuple(before(each) for each in unit.functions))
        self._checkpoint("before-journal")
        self.journal.remember(entry.before)
        self.journal.begin(entry)
        self._checkpoint("after-journal")
        try:
            await self._forward(unit, mode)
        except DeadlinePassed as error:
            raise self._wedged(entry, str(error)) from error
        except KvmpoolError as error:
            why = str(error)
            log.warning("%s: %s; undoing the switch to %s", card.label, why, mode.value)
            await self._undo(entry)
            raise SwitchFailed(f"{card.label}: {why}; it is on {_drivers(unit)} again") from error
        self._finish(entry)

    async def _forward(self, unit: Unit, mode: Mode) -> None:
        wanted = {each.address: self._wanted(unit, each, mode) for each in unit.functions}
        moving = [each for each in unit.functions if wanted[each.address] != each.driver]
        for each in moving:
            if mode is Mode.PASSTHROUGH and each.d3cold == "1":
                await self._write("d3cold", f"{DEVICES}/{each.address}/d3cold_allowed", "0")
        for each in moving:
            driver = wanted[each.address]
            await self._override(each.address, NO_DRIVER if driver == "" else driver or "")
        for each in moving:
            await self._unbind(each.address)
        for each in moving:
            if wanted[each.address] != "":
                await self._probe(each.address)
        self._checkpoint("before-verify")
        for each in moving:
            await self._verify(unit, each, wanted[each.address])
        self._checkpoint("after-verify")
        for each in moving:
            await self._settle(each.address, mode)

    async def _settle(self, address: str, mode: Mode) -> None:
        """What is to stay where passthrough has ended: the function's own settings."""
        origin = next(each for each in self.journal.origins() if each.address == address)
        if mode is Mode.VGPU:
            await self._override(address, origin.override, "settle")
        if mode is not Mode.PASSTHROUGH:
            await self._allow_d3cold(origin, "settle")

    async def _verify(self, unit: Unit, function: Function, wanted: str | None) -> None:
        """Raises Refused: the link says who has it, whatever the probe has answered."""

        def right() -> bool:
            driver = self._driver(function.address)
            if wanted is not None:
                return driver == wanted
            return not is_vfio(driver) and (bool(driver) or function.address not in unit.cards)

        if not await self._until(right):
            has = self._driver(function.address) or "no driver"
            if wanted is None:
                raise Refused(f"no driver of this host takes {function.address} (it has {has})")
            raise Refused(f"{function.address} has {has} after its probe, not {wanted or 'none'}")
        node = f"dev/vfio/{unit.group}"
        if wanted and is_vfio(wanted) and not await self._until(lambda: self._sysroot.exists(node)):
            raise Refused(f"Could not open '/{node}': {function.address} is on {wanted}, the node was not made")

    # --- undoing one --------------------------------------------------------------------------------------------------

    async def _end(self, entry: Entry) -> str:
        """Of an earlier process: done where all is as wanted, else undone. Who is in use is left as it is."""
        if entry.boot_id != self._boot_id:
            self.journal.end(entry)  # the kernel has chosen anew, and overrides do not outlive a boot
            return f"{entry.address}: the host has rebooted during a switch to {entry.mode.value}; nothing to undo"
        if entry.wedged:
            raise CardWedged(entry.wedged)
        situation = await self._look(entry.address)
        unit = situation.unit
        cut_off = f"{entry.address}: a switch to {entry.mode.value} was cut off"
        if self._is_in(unit, entry.mode) and all(self._is_settled(each, unit, entry.mode) for each in entry.before):
            self._finish(entry)
            return f"{cut_off}: it was done"
        if situation.holders:
            for old in entry.before:  # what has no driver, or its old one, is put right without disturbing anybody
                if self._driver(old.address) in ("", old.driver):
                    await self._restore(old)
            self._finish(entry)
            return f"{cut_off}: in use, so left as it is ({told(situation.holders)})"
        await self._undo(entry)
        return f"{cut_off}: undone"

    async def _undo(self, entry: Entry) -> None:
        """The compensation of every step, in an order that any of them may have been the last. May be repeated."""
        try:
            for old in reversed(entry.before):
                await self._restore(old)
        except DeadlinePassed as error:
            raise self._wedged(entry, str(error)) from error
        self._finish(entry)

    async def _restore(self, old: Before) -> None:
        """One function as it was. Raises CardLost where it has left the bus, SwitchFailed, DeadlinePassed."""
        if not self._sysroot.exists(f"{DEVICES}/{old.address}"):
            raise CardLost(f"{old.address} has left the bus")
        try:
            if self._driver(old.address) != old.driver:
                await self._override(old.address, old.driver or NO_DRIVER)
                await self._unbind(old.address)
                if old.driver:
                    await self._probe(old.address)
            await self._override(old.address, old.override)
            await self._allow_d3cold(old, "d3cold")
        except WriteRefused as error:
            raise SwitchFailed(
                f"{old.address} could not be given back to {old.driver or 'no driver'}: {error}"
            ) from error
        if not await self._until(lambda: self._driver(old.address) == old.driver):
            has, was = self._driver(old.address) or "no driver", old.driver or "no driver"
            raise SwitchFailed(f"{old.address} was not given back: it has {has}, it had {was}. Next: kvmpool doctor")

    async def _give_back(self, old: Before) -> str:
        now = function_at(self._sysroot, old.address)
        if (now.ids, now.slot) != (old.ids, old.slot):
            self.journal.forget(old)
            return f"{old.address} is another device now: left as it is"
        situation = await self._look(old.address)
        if now.driver != old.driver and situation.holders:
            raise CardBusy(f"{old.address} is in use by {told(situation.holders)}. Next: stop it, then try again")
        await self._restore(old)
        self.journal.forget(old)
        return f"{old.address} is on {old.driver or 'no driver'}, as before kvmpool"

    def _finish(self, entry: Entry) -> None:
        self._checkpoint("before-finish")
        self.journal.end(entry)
        self._checkpoint("after-finish")

    def _wedged(self, entry: Entry, why: str) -> CardWedged:
        """Remember it for this boot, and say it."""
        stuck = next((each.driver for each in entry.before if each.driver), "its driver")
        told = f'the kernel log may say "Attempting to remove device {entry.address} with non-zero usage count!"'
        text = f"{entry.address}: {stuck} does not let go of it ({why}; {told}). Next: reboot the host"
        self.journal.begin(replace(entry, wedged=text))
        return CardWedged(text)

    def _refuse_wedged(self, card: Card) -> None:
        for entry in self.journal.under_way():
            mine = any(each.address == card.address for each in entry.before)
            if mine and entry.wedged and entry.boot_id == self._boot_id:
                raise CardWedged(entry.wedged)

    # --- looking ------------------------------------------------------------------------------------------------------

    async def _look(self, address: str, own: int = 0) -> Situation:
        return await self._calls.call(
            "look", lambda: look(self._sysroot, address, self._cards, own), self._look_deadline_s
        )

    def _wanted(self, unit: Unit, function: Function, mode: Mode) -> str | None:
        origins = {each.address: each.driver for each in self.journal.origins()}
        return wanted_driver(unit, function, mode, origins.get(function.address, ""))

    def _is_in(self, unit: Unit, mode: Mode) -> bool:
        """All cards of the unit are in that mode, and all siblings agree with it."""
        cards = all(mode_of(each.driver) is mode for each in unit.functions if each.address in unit.cards)
        siblings = [each for each in unit.functions if each.address not in unit.cards]
        if mode is Mode.VGPU:  # a sibling that no driver takes is at home so
            return cards and not any(is_vfio(each.driver) for each in siblings)
        return cards and all(mode_of(each.driver) is mode for each in siblings)

    def _is_settled(self, old: Before, unit: Unit, mode: Mode) -> bool:
        """Is its override the one that is to stay?"""
        now = function_at(self._sysroot, old.address)
        if mode is Mode.VGPU:
            origin = next((each for each in self.journal.origins() if each.address == old.address), old)
            return (now.override, now.d3cold) == (origin.override, origin.d3cold)
        wanted = self._wanted(unit, now, mode)
        return now.driver == old.driver or now.override == (wanted or NO_DRIVER)

    def _driver(self, address: str) -> str:
        return self._sysroot.link_name(f"{DEVICES}/{address}/driver") or ""

    async def _until(self, right: Callable[[], bool]) -> bool:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._settle_s
        while not right():
            if loop.time() >= until:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    # --- writing ------------------------------------------------------------------------------------------------------

    async def _override(self, address: str, driver: str, step: str = "override") -> None:
        """ "" takes it away: an empty line does, for the kernel."""
        if function_at(self._sysroot, address).override != driver:
            await self._write(step, f"{DEVICES}/{address}/driver_override", driver)

    async def _allow_d3cold(self, old: Before, step: str) -> None:
        if old.d3cold == "1" and function_at(self._sysroot, old.address).d3cold == "0":
            await self._write(step, f"{DEVICES}/{old.address}/d3cold_allowed", "1")

    async def _unbind(self, address: str) -> None:
        driver = self._driver(address)
        if not driver:
            return
        try:
            await self._write("unbind", f"{DRIVERS}/{driver}/unbind", address)
        except WriteRefused:
            if self._driver(address):  # else somebody else was faster
                raise
        if not await self._until(lambda: not self._driver(address)):
            raise Refused(f"{address} is still on {driver} after its unbind")

    async def _probe(self, address: str) -> None:
        await self._write("probe", "sys/bus/pci/drivers_probe", address)

    async def _write(self, step: str, path: str, text: str) -> None:
        """Raises WriteRefused with file and the kernel's word, DeadlinePassed where it does not return."""
        self._checkpoint(f"before-{step}")
        try:
            await child_write(self._sysroot.root / path, text, self._unbind_deadline_s)
        except WriteRefused as error:
            raise WriteRefused(f"writing {text!r} to /{path}: {error}") from error
        self._checkpoint(f"after-{step}")


def _drivers(unit: Unit) -> str:
    return ", ".join(each.words for each in unit.functions)

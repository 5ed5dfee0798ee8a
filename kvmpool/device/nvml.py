"""NVIDIA's management library: which cards the driver knows, how they answer, what it reports. Blocking; thread-safe.

The only module that knows pynvml. Every error of it becomes one of ours: CardLost for a card that is gone,
Unreachable for a library that says nothing of any card (missing, no driver, another version): maintenance, no failure.
Codes and structures: NVIDIA, nvml.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import pynvml

from kvmpool.core.model import CardId
from kvmpool.device.pci import normal_address
from kvmpool.errors import CardLost, KvmpoolError, NotFound, Unreachable

log = logging.getLogger("kvmpool.device.nvml")
T = TypeVar("T")

WAIT_MS = 500  # how soon a watch notices that it shall end; events themselves come at once
FIELD_RECOVERY_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, driver 565 and later
RECOVERY_ACTIONS_KNOWN = 64  # a larger number is garbage
_MEMORY_MIB_MAX = 1 << 24

# Answers that say nothing of a card: the library or the driver as a whole is not there for us.
_DOWN = {
    pynvml.NVML_ERROR_UNINITIALIZED: "NVML is not initialised",
    pynvml.NVML_ERROR_NO_PERMISSION: "NVML refuses us: no permission",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 is not installed",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "libnvidia-ml.so.1 is too old",
    pynvml.NVML_ERROR_OPERATING_SYSTEM: "the operating system blocks NVML",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "driver and NVML have different versions (upgraded, not rebooted)",
    pynvml.NVML_ERROR_MEMORY: "NVML has no memory",
}
_RESET_REQUIRED_ACTION = 1  # nvmlDeviceGpuRecoveryAction_t: GPU reset


class EventKind(Enum):
    XID = "xid"
    DOUBLE_BIT = "double-bit"
    RECOVERY_ACTION = "recovery-action"
    UNAVAILABLE = "unavailable"


_EVENT_BITS = {
    pynvml.nvmlEventTypeXidCriticalError: EventKind.XID,
    pynvml.nvmlEventTypeDoubleBitEccError: EventKind.DOUBLE_BIT,
    pynvml.nvmlEventTypeGpuRecoveryAction: EventKind.RECOVERY_ACTION,
    pynvml.nvmlEventTypeGpuUnavailableError: EventKind.UNAVAILABLE,
}


@dataclass(frozen=True, slots=True)
class NvmlCard:
    """A card as the driver lists it. `fault`: why it is not to be believed."""

    id: CardId
    address: str
    model: str
    memory_mib: int
    compute_capability: str
    fault: str = ""


@dataclass(frozen=True, slots=True)
class NvmlEvent:
    """`value`: the XID or the recovery action."""

    kind: EventKind
    card: CardId
    value: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What a probed card said. `fault` non-empty: something that a well card does not say."""

    recovery_action: int = 0
    fault: str = ""


class Nvml:
    """One for a process. A driver that comes, goes or is exchanged is found out by asking again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready = False
        self._let_go = False
        self._persisted: frozenset[CardId] = frozenset()  # whose persistence mode `let_go` has switched off
        self.watched: frozenset[CardId] = frozenset()  # whose events are waited for now

    def cards(self) -> tuple[NvmlCard, ...]:
        """Every card that can say who it is, in the driver's order. Raises Unreachable."""
        count = self._ask(pynvml.nvmlDeviceGetCount)
        found = []
        for index in range(count):
            try:
                found.append(self._card(index))
            except (CardLost, NotFound):
                continue  # it cannot say who it is: whoever knows its address will miss it
        return _without_twins(found)

    def probe(self, card: CardId) -> Answer:
        """Asks for what a sick card fails. Raises CardLost, Unreachable, NotFound (the driver does not know it)."""
        try:
            handle = self._ask(pynvml.nvmlDeviceGetHandleByUUID, card)
            memory = self._ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
            self._ask(pynvml.nvmlDeviceGetPciInfo, handle)
            action = self.recovery_action(handle)
        except _Sick as sick:
            return Answer(sick.recovery_action, str(sick))
        if not 0 < memory.total >> 20 <= _MEMORY_MIB_MAX:
            return Answer(action, f"it says it has {memory.total} bytes of memory")
        return Answer(action)

    def let_go(self, cards: Sequence[CardId]) -> None:
        """Close every device node, until `resume`; of `cards` the driver holds none open for itself either.

        Calls meanwhile raise Unreachable.
        """
        persisted = set()
        for card in cards:
            with contextlib.suppress(_Sick, CardLost, NotFound, Unreachable):
                handle = self._ask(pynvml.nvmlDeviceGetHandleByUUID, card)
                if self._ask(pynvml.nvmlDeviceGetPersistenceMode, handle):
                    self._ask(pynvml.nvmlDeviceSetPersistenceMode, handle, 0)
                    persisted.add(card)
        with self._lock:
            self._let_go, self._persisted = True, frozenset(persisted)
            if self._ready:
                self._ready = False
                with contextlib.suppress(pynvml.NVMLError):
                    pynvml.nvmlShutdown()

    def resume(self) -> None:
        """May be called without a `let_go`. Cards that the driver still has persist as before."""
        self._let_go = False
        for card in self._persisted:
            with contextlib.suppress(_Sick, CardLost, NotFound, Unreachable):
                handle = self._ask(pynvml.nvmlDeviceGetHandleByUUID, card)
                self._ask(pynvml.nvmlDeviceSetPersistenceMode, handle, 1)
        self._persisted = frozenset()

    def recovery_action(self, handle: Any) -> int:
        """NVML's verdict (0: none); 0 also where the driver is too old to have one."""
        try:
            value = self._ask(pynvml.nvmlDeviceGetFieldValues, handle, [FIELD_RECOVERY_ACTION])[0]
        except _Sick as sick:
            if sick.code in (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT):
                return 0
            raise
        if value.nvmlReturn == pynvml.NVML_ERROR_GPU_IS_LOST:
            raise CardLost("NVML: GPU is lost")
        if value.nvmlReturn != pynvml.NVML_SUCCESS:
            return 0
        action = int(value.value.uiVal)
        return action if action < RECOVERY_ACTIONS_KNOWN else 0

    def watch(self, emit: Callable[[NvmlEvent], None], lost: Callable[[CardId], None], ends: threading.Event) -> None:
        """Hand every event of every card to `emit` until `ends` is set. Raises Unreachable, CardLost: watch again.

        `lost` is told of cards that cannot be watched because they are lost. Both are called in this thread.
        """
        cards = self.cards()
        events = self._ask(pynvml.nvmlEventSetCreate)
        try:
            handles: dict[int, CardId] = {}
            for card in cards:
                try:
                    handles[self._register(events, card.id)] = card.id
                except CardLost:
                    lost(card.id)
                except (NotFound, _Sick) as error:
                    log.warning("%s (%s): NVML reports no events of it: %s", card.address, card.id, error)
            self.watched = frozenset(handles.values())
            self._wait(events, handles, emit, ends)
        finally:
            self.watched = frozenset()
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(events)

    def _register(self, events: Any, card: CardId) -> int:
        """The number by which events name the card's handle."""
        handle = self._ask(pynvml.nvmlDeviceGetHandleByUUID, card)
        supported = self._ask(pynvml.nvmlDeviceGetSupportedEventTypes, handle)
        self._ask(pynvml.nvmlDeviceRegisterEvents, handle, supported & sum(_EVENT_BITS), events)
        return _pointer(handle)

    def _wait(
        self, events: Any, handles: dict[int, CardId], emit: Callable[[NvmlEvent], None], ends: threading.Event
    ) -> None:
        while not ends.is_set():
            try:
                data = self._ask(pynvml.nvmlEventSetWait_v2, events, WAIT_MS)
            except _Sick as sick:
                if sick.code == pynvml.NVML_ERROR_TIMEOUT:
                    continue
                raise Unreachable(f"NVML's events: {sick}") from sick
            card = handles.get(_pointer(data.device))
            kind = _EVENT_BITS.get(data.eventType)
            if card is not None and kind is not None:
                emit(NvmlEvent(kind, card, int(data.eventData)))

    def _card(self, index: int) -> NvmlCard:
        handle = self._ask(pynvml.nvmlDeviceGetHandleByIndex, index)
        uuid = _card_id(self._ask(pynvml.nvmlDeviceGetUUID, handle))
        address = normal_address(_text(self._ask(pynvml.nvmlDeviceGetPciInfo, handle).busId))
        if uuid is None or address is None:
            raise NotFound(f"NVML's card {index} has no usable uuid and address")
        try:
            model = _text(self._ask(pynvml.nvmlDeviceGetName, handle))
            memory_mib = int(self._ask(pynvml.nvmlDeviceGetMemoryInfo, handle).total) >> 20
            major, minor = self._ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
        except _Sick as sick:
            return NvmlCard(uuid, address, "", 0, "", fault=str(sick))
        except CardLost as error:
            return NvmlCard(uuid, address, "", 0, "", fault=str(error))
        fault = "" if 0 < memory_mib <= _MEMORY_MIB_MAX else f"it says it has {memory_mib} MiB of memory"
        return NvmlCard(uuid, address, model, memory_mib, f"{major}.{minor}", fault)

    def _ask(self, call: Callable[..., T], *arguments: object) -> T:
        """One call; a library that was shut down under us is opened again once."""
        try:
            self._open()
            return call(*arguments)
        except pynvml.NVMLError as error:
            if error.value not in (pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
                raise _translated(error) from error
        try:
            self._ready = False
            self._open()
            return call(*arguments)
        except pynvml.NVMLError as error:
            raise _translated(error) from error

    def _open(self) -> None:
        if not self._ready:
            with self._lock:
                if self._let_go:
                    raise Unreachable("NVML is let go of while a card's mode is switched")
                if not self._ready:
                    pynvml.nvmlInit()
                    self._ready = True


class _Sick(KvmpoolError):
    """An answer that a well card does not give."""

    def __init__(self, code: int, line: str) -> None:
        super().__init__(line)
        self.code = code
        self.recovery_action = _RESET_REQUIRED_ACTION if code == pynvml.NVML_ERROR_RESET_REQUIRED else 0


def _translated(error: pynvml.NVMLError) -> KvmpoolError:
    code = int(error.value)
    if code in _DOWN:
        return Unreachable(_DOWN[code])
    if code == pynvml.NVML_ERROR_GPU_IS_LOST:
        return CardLost("NVML: GPU is lost")
    if code in (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_GPU_NOT_FOUND):
        return NotFound("NVML does not know the card")
    return _Sick(code, f"NVML: {_text(str(error)) or code}")


def _without_twins(cards: list[NvmlCard]) -> tuple[NvmlCard, ...]:
    """Two cards of one uuid or address: which is which cannot be known."""
    ids = [card.id for card in cards]
    addresses = [card.address for card in cards]
    return tuple(
        card
        if ids.count(card.id) == 1 and addresses.count(card.address) == 1
        else NvmlCard(card.id, card.address, "", 0, "", fault="NVML shows two cards of this uuid or address")
        for card in cards
    )


def _pointer(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _text(value: object) -> str:
    """What may be shown and stored of a foreign text."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return "".join(letter for letter in text if letter.isprintable()).strip()[:96]


def _card_id(value: object) -> CardId | None:
    text = _text(value)
    if not re.fullmatch(r"GPU-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", text):
        return None
    return CardId("GPU-" + text[4:].lower())

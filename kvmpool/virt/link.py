"""One connection to libvirt, with a thread of its own, a deadline for each call, and our errors for libvirt's.

libvirt's own event loop runs in one more thread of the process: connections are opened and used in threads, and
libvirtaio's loop may only be touched from the thread of asyncio. Its callbacks never call libvirt.
A connection that is lost is dropped with every object of it; the next call opens another, after a pause that grows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import libvirt

from kvmpool.errors import CardBusy, ClaimInvalid, DeadlinePassed, Denied, KvmpoolError, NotFound, Refused, Unreachable

log = logging.getLogger("kvmpool.virt")
T = TypeVar("T")

KEEPALIVE_S, KEEPALIVE_TRIES = 5, 3  # a libvirtd that is stopped (or hangs) ends our calls after 15 s
PAUSE_FIRST_S, PAUSE_MAX_S = 0.2, 5.0
_SHOWN_CHARS = 300  # of libvirt's text
_HOOK = "kvmpool: "  # how hooks/hook.py begins its line

# libvirt's error code -> what the caller does next (design 04 §4.3; include/libvirt/virterror.h)
_ERRORS: dict[int, type[KvmpoolError]] = {
    libvirt.VIR_ERR_NO_DOMAIN: NotFound,
    libvirt.VIR_ERR_NO_NODE_DEVICE: NotFound,
    libvirt.VIR_ERR_NO_DOMAIN_METADATA: NotFound,
    libvirt.VIR_ERR_DEVICE_MISSING: NotFound,
    libvirt.VIR_ERR_OPERATION_TIMEOUT: DeadlinePassed,  # somebody holds the domain's lock
    libvirt.VIR_ERR_RESOURCE_BUSY: CardBusy,
    libvirt.VIR_ERR_OPERATION_DENIED: Denied,
    libvirt.VIR_ERR_ACCESS_DENIED: Denied,
    libvirt.VIR_ERR_AUTH_FAILED: Denied,
    libvirt.VIR_ERR_XML_ERROR: ClaimInvalid,
    libvirt.VIR_ERR_XML_DETAIL: ClaimInvalid,
    libvirt.VIR_ERR_XML_INVALID_SCHEMA: ClaimInvalid,
    libvirt.VIR_ERR_OPERATION_INVALID: Refused,
    libvirt.VIR_ERR_OPERATION_UNSUPPORTED: Refused,
    libvirt.VIR_ERR_OPERATION_FAILED: Refused,
    libvirt.VIR_ERR_CONFIG_UNSUPPORTED: Refused,
    libvirt.VIR_ERR_ARGUMENT_UNSUPPORTED: Refused,
    libvirt.VIR_ERR_HOOK_SCRIPT_FAILED: Refused,
    libvirt.VIR_ERR_MIGRATE_UNSAFE: Refused,
    libvirt.VIR_ERR_INVALID_ARG: Refused,
    libvirt.VIR_ERR_NO_SUPPORT: Refused,
}

_events_lock = threading.Lock()
_events_run = False


def run_events() -> None:
    """Start libvirt's event loop, once a process; before the first connection is opened, or it has none for ever."""
    global _events_run
    with _events_lock:
        if _events_run:
            return
        libvirt.registerErrorHandler(lambda *_: None, None)  # else every error is printed on stderr too
        libvirt.virEventRegisterDefaultImpl()
        threading.Thread(target=_events, name="libvirt events", daemon=True).start()
        _events_run = True


def _events() -> None:
    while True:
        try:
            libvirt.virEventRunDefaultImpl()
        except libvirt.libvirtError as error:
            log.error("libvirt's event loop: %s", error)
            time.sleep(1.0)


def translated(error: libvirt.libvirtError) -> KvmpoolError:
    """Ours for libvirt's. What is in no table is "try again later": most of them are libvirtd on its way up or down."""
    said = error.get_error_message() or str(error)
    if error.get_error_code() == libvirt.VIR_ERR_HOOK_SCRIPT_FAILED and _HOOK in said:
        return Refused(" ".join(said.rpartition(_HOOK)[2].split()))  # our own hook's line, without libvirt's around it
    text = " ".join(said.split())[:_SHOWN_CHARS]
    return _ERRORS.get(error.get_error_code(), Unreachable)(f"libvirt: {text}")


class Link:
    """A connection for one purpose. Use it from one event loop; `act` runs in its thread, one after the other."""

    def __init__(
        self,
        uri: str,
        purpose: str,
        opened: Callable[[libvirt.virConnect], None] = lambda _: None,
        closed: Callable[[], None] = lambda: None,
    ) -> None:
        """`opened` runs in the link's thread for each new connection; `closed` in any thread when one is lost."""
        self._uri = uri
        self._opened = opened
        self._closed = closed
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"libvirt {purpose}")
        self._connection: libvirt.virConnect | None = None  # only touched in the thread
        self._failed: tuple[float, float, str] = (0.0, 0.0, "")  # when, pause after it, why
        self._ended = False

    async def call(self, act: Callable[[libvirt.virConnect], T], deadline_s: float) -> T:
        """Raises DeadlinePassed (what was begun goes on), Unreachable, or what libvirt's error means."""
        if self._ended:
            raise Unreachable(f"libvirt ({self._uri}): the connection was given up")
        future = asyncio.get_running_loop().run_in_executor(self._executor, self._act, act)
        try:
            async with asyncio.timeout(deadline_s):  # wait_for of Python 3.11 can swallow a cancellation
                return await future
        except TimeoutError:
            why = "a domain's lock is held, or libvirtd hangs"
            raise DeadlinePassed(f"libvirt ({self._uri}) did not answer within {deadline_s:g} s: {why}") from None

    async def close(self, deadline_s: float = 1.0) -> None:
        """Gives up the connection; one that hangs is left to the process's end."""
        if self._ended:
            return
        self._ended = True
        future = asyncio.get_running_loop().run_in_executor(self._executor, self._drop)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await future
        self._executor.shutdown(wait=False, cancel_futures=True)

    # --- in the thread ---

    def _act(self, act: Callable[[libvirt.virConnect], T]) -> T:
        if self._connection is not None and self._is_lost(self._connection):
            self._drop()
        connection = self._connection or self._open()
        try:
            return act(connection)
        except libvirt.libvirtError as error:
            if self._is_lost(connection):
                self._drop()
                raise Unreachable(f"libvirt ({self._uri}): {translated(error)}. Next: kvmpool doctor") from error
            raise translated(error) from error

    def _open(self) -> libvirt.virConnect:
        """A new connection, unless one has just failed: then that failure again, without asking."""
        at, pause_s, why = self._failed
        if why and time.monotonic() - at < pause_s:
            raise Unreachable(why)
        run_events()
        try:
            connection = self._connection = libvirt.open(self._uri)
            with contextlib.suppress(libvirt.libvirtError):  # drivers inside the process have no keepalive
                connection.setKeepAlive(KEEPALIVE_S, KEEPALIVE_TRIES)
            connection.registerCloseCallback(self._on_close, None)
            self._opened(connection)
        except libvirt.libvirtError as error:
            self._drop()
            why = f"libvirt ({self._uri}): {translated(error)}. Next: kvmpool doctor"
            self._failed = (time.monotonic(), min(PAUSE_MAX_S, max(PAUSE_FIRST_S, 2 * pause_s)), why)
            raise Unreachable(why) from error
        self._failed = (0.0, 0.0, "")
        return connection

    def _is_lost(self, connection: libvirt.virConnect) -> bool:
        try:
            return not connection.isAlive()
        except libvirt.libvirtError:
            return True

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        with contextlib.suppress(libvirt.libvirtError):
            connection.unregisterCloseCallback()
        with contextlib.suppress(libvirt.libvirtError):
            connection.close()
        self._closed()

    def _on_close(self, _: libvirt.virConnect, __: int, ___: object) -> None:
        """In libvirt's event thread, where nothing may be called: the next call finds the connection dead."""
        self._closed()

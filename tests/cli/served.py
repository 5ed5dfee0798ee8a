"""The command line against the real API over a simulated host; and how a test types a command."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path
from typing import Any, Self, TypeVar

from kvmpool.api import access
from kvmpool.api.app import Server, build_app
from kvmpool.cli.main import main
from tests.api.pool import Pool

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str


def kvmpool(*words: str) -> Ran:
    """Type a command, its output in pipes; in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(words))
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return Ran(code, out.getvalue(), err.getvalue())


def command(*words: str) -> list[str]:
    """The same as a process of its own."""
    return [sys.executable, "-c", "from kvmpool.cli.main import main; main()", *words]


def in_terminal(*words: str, columns: int = 80, **environment: str) -> str:
    """Type a command in a terminal of so many columns; what that shows."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {**os.environ, "TERM": "xterm", **environment}
    if "NO_COLOR" not in environment:
        env.pop("NO_COLOR", None)
    child = subprocess.Popen(command(*words), stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # the terminal's end, when its last process has gone
        while part := os.read(ours, 65536):
            seen += part
    os.close(ours)
    child.wait(30)
    return seen.decode().replace("\r\n", "\n")


class Served:
    """As a context: the simulated host runs, and its API answers on `socket`."""

    def __init__(self, folder: Path, cards: int = 2) -> None:
        self.socket = folder / "d.sock"
        self._cards = cards
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with Pool(cards=self._cards) as self.pool:
            await self.pool.until(
                lambda rows: (
                    len(rows.cards) == self._cards
                    and all(card.health.verdict.value == "healthy" for card in rows.cards.values())
                )
            )
            self.server = Server(build_app(self.pool.hooks, self.pool.resources, "kvmpool-test-no-such-group"))
            listening = access.listen(self.socket, "kvmpool-test-no-such-group")
            self._ready.set()
            await self.server.run_on(listening)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it beside the loops and wait for it."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def story(self, told: Callable[[Pool], Awaitable[None]]) -> None:
        async def tell() -> None:
            await told(self.pool)

        self.do(tell())

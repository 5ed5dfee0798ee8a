"""Writes to the kernel's files in a disposable child, for a write that makes a driver act may never return.

A child that hangs in a driver cannot be ended, not even by SIGKILL: it is left behind, and whoever waits is told so.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path

from kvmpool.errors import DeadlinePassed, Refused, Unreachable

# tee tells the kernel's answer in the kernel's words; setpriv (util-linux) has it end with us where it can be ended:
# what a daemon that was killed had begun must not go on beside what the next one undoes.
_TEE = ("/usr/bin/setpriv", "--pdeathsig", "KILL", "/usr/bin/tee")
_END_S = 0.2  # a child that can be ended at all ends at once


class WriteRefused(Refused):
    """The kernel did not take what was written; the message is its own word, such as "Invalid argument"."""


async def child_write(path: Path, text: str, deadline_s: float) -> None:
    """Write `text` and a newline. Raises WriteRefused, DeadlinePassed (the child hangs), Unreachable (no child)."""
    try:
        child = await asyncio.create_subprocess_exec(
            *_TEE, str(path), stdin=PIPE, stdout=DEVNULL, stderr=PIPE, start_new_session=True, env={"LC_ALL": "C"}
        )
    except OSError as error:
        raise Unreachable(f"{_TEE[0]}: {error.strerror}") from error
    try:
        async with asyncio.timeout(deadline_s):
            _, said = await child.communicate(f"{text}\n".encode())
    except TimeoutError:
        await _leave(child)
        raise DeadlinePassed(f"writing {text!r} to {path} did not end within {deadline_s:g} s") from None
    except asyncio.CancelledError:
        await _leave(child)
        raise
    if child.returncode:
        words = said.decode(errors="replace").strip().splitlines()
        raise WriteRefused(words[0].rpartition(": ")[2] if words else f"exit {child.returncode}")


async def _leave(child: Process) -> None:
    """End it, or leave it where the kernel does not let it end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, 9)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(child.wait(), _END_S)

"""Loads a kernel module, and never unloads one."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import DEVNULL, PIPE, STDOUT

from kvmpool.errors import DeadlinePassed, Refused, Unreachable

_DEADLINE_S = 30.0  # NVIDIA's module looks at every card while it is loaded


async def modprobe(module: str) -> None:
    """Raises Refused with modprobe's own words, Unreachable where there is no modprobe or it does not end."""
    try:
        child = await asyncio.create_subprocess_exec(
            "modprobe", module, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True
        )
    except OSError as error:
        raise Unreachable(f"modprobe {module}: {error.strerror}. Next: load {module} by hand") from error
    try:
        async with asyncio.timeout(_DEADLINE_S):
            said, _ = await child.communicate()
    except TimeoutError:
        raise DeadlinePassed(f"modprobe {module} did not end within {_DEADLINE_S:g} s. Next: dmesg") from None
    if child.returncode:
        words = " ".join(said.decode(errors="replace").split()) or f"exit {child.returncode}"
        raise Refused(f"modprobe {module}: {words}. Next: dmesg")

"""Speaks to the control socket of a relay or worker: one question, one answer, one deadline (form: src/control.h)."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path
from typing import Any

from kvmpool.errors import DeadlinePassed, Refused, Unreachable

_MESSAGE_BYTES = 64 * 1024  # above KP_CONTROL_MAX: an answer is never cut


async def ask(path: Path, who: str, text: str, deadline_s: float) -> str:
    """The answer to `text` ("VERB word...", newline, payload) of the program at `path`; `who` names it in errors.

    Raises DeadlinePassed, Unreachable (nobody listens, or it hung up), Refused (it answered ERROR).
    """
    connection, answer = await _asked(path, who, text, deadline_s)
    connection.close()
    return answer


async def hold(path: Path, who: str, text: str, deadline_s: float) -> socket.socket:
    """As `ask`, for a question that holds for as long as its connection: that one, the caller's to close."""
    connection, _ = await _asked(path, who, text, deadline_s)
    return connection


async def _asked(path: Path, who: str, text: str, deadline_s: float) -> tuple[socket.socket, str]:
    try:
        async with asyncio.timeout(deadline_s):
            connection, answer = await _exchange(path, text.encode())
    except TimeoutError as error:
        raise DeadlinePassed(f"{who} did not answer {text.split()[0]} within {deadline_s:g} s") from error
    except OSError as error:
        raise Unreachable(f"{who} is not reached at {path}: {error.strerror or error}") from error
    if answer and not answer.startswith("ERROR"):
        return connection, answer
    connection.close()
    if not answer:
        raise Unreachable(f"{who} hung up on {text.split()[0]}")
    raise Refused(f"{who} refused {text.split()[0]}: {answer[6:]}")


async def status(path: Path, who: str, deadline_s: float) -> dict[str, Any]:
    """The STATUS object. Raises as `ask`, and Unreachable when it is none."""
    answer = await ask(path, who, "STATUS", deadline_s)
    try:
        seen = json.loads(answer)
    except ValueError as error:
        raise Unreachable(f"{who} answers STATUS with no object") from error
    if not isinstance(seen, dict):
        raise Unreachable(f"{who} answers STATUS with no object")
    return seen


async def _exchange(path: Path, data: bytes) -> tuple[socket.socket, str]:
    loop = asyncio.get_running_loop()
    # A socket's address holds 107 bytes, a run directory may be deeper: go through a descriptor of the directory.
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        connection.connect(f"/proc/self/fd/{folder}/{path.name}")  # a local socket connects at once or not at all
        await loop.sock_sendall(connection, data)
        return connection, (await loop.sock_recv(connection, _MESSAGE_BYTES)).decode()
    except BaseException:
        connection.close()
        raise
    finally:
        os.close(folder)

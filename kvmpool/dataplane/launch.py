"""Starts a program that outlives its starter: in a session and, where systemd runs, a scope of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvmpool.errors import DeadlinePassed, Unreachable

_SYSTEMD = Path("/run/systemd/system")  # sd_booted(3)
# What systemd tells kvmpoold's own unit; a program of another scope must not answer for it.
_NOT_PASSED_ON = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


def command(program: Path, options: Sequence[str], description: str, systemd: bool) -> list[str]:
    """The whole command line. A scope, because kvmpoold's unit takes its own processes with it when it restarts."""
    scope = ["systemd-run", "--scope", "--quiet", "--collect", "--slice=kvmpool.slice"]
    scope.append("--property=Delegate=yes")  # a worker makes a group below it for each session
    scope += [f"--description={description}", "--"]
    return [*(scope if systemd else []), str(program), *options, "--detach"]


async def launch(program: Path, options: Sequence[str], description: str, log: Path, deadline_s: float) -> str:
    """Start it and wait for its one line of readiness: "ready ...", "failed ...", "busy"; "" when it ended without one.

    Its own output goes to `log`. The program detaches itself, so it is no child of ours. Raises DeadlinePassed.
    """
    reader, writer = os.pipe()
    words = command(program, [*options, "--ready-fd", str(writer)], description, _systemd_runs())
    try:
        starter = await _spawn(words, log, writer)
    except OSError as error:
        os.close(reader)
        raise Unreachable(f"{description}: {words[0]} cannot be started: {error.strerror or error}") from error
    finally:
        os.close(writer)
    try:
        async with asyncio.timeout(deadline_s):
            line = await _first_line(reader)
            await starter.wait()
    except TimeoutError as error:
        with suppress(ProcessLookupError):
            starter.kill()
        raise DeadlinePassed(f"{description}: not ready within {deadline_s:g} s; see {log}") from error
    return line


def _systemd_runs() -> bool:
    return _SYSTEMD.is_dir()


async def _spawn(words: Sequence[str], log: Path, writer: int) -> asyncio.subprocess.Process:
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
    try:
        return await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(writer,),
            env=environment,
        )
    finally:
        os.close(output)


async def _first_line(descriptor: int) -> str:
    """Takes the descriptor over."""
    loop = asyncio.get_running_loop()
    stream = asyncio.StreamReader()
    pipe = os.fdopen(descriptor, "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
    try:
        return (await stream.readline()).decode(errors="replace").strip()
    finally:
        transport.close()


def prepare(log: Path) -> None:
    """Make the folder of a program's log, socket and lock. Raises Unreachable."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
    except OSError as error:
        raise Unreachable(f"{log.parent} cannot be made: {error.strerror or error}") from error


def last_words(log: Path) -> str:
    """The last line of a program's log, for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return "it left no log"
    return lines[-1] if lines else "it said nothing"

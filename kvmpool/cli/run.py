"""`kvmpool run`: a program of this host with a claim of its own, without a domain.

Gets the claim and then becomes the program: it stays the same process, so that signals, the terminal and the exit code
are the program's own, and kvmpoold releases the claim when that process has ended, however it ended.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from typing import NoReturn

import click

from kvmpool.api.client import Client
from kvmpool.native import native

_DEADLINE_S = 30.0  # kvmpoold says before that what is missing
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # as a shell tells it
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--memory", required=True, metavar="SIZE", help="GPU memory, for example 8GiB.")
@click.option("--compute", metavar="PERCENT", help="Share of a card's time that is kept for it [default: best effort].")
@click.option("--compute-limit", metavar="PERCENT", help="Most of a card's time that it ever gets [default: 100].")
@click.option("--model", metavar="TEXT", help="Only a card whose model has this in its name.")
@click.option("--priority", metavar="0..100", help="Who goes first where cards are short [default: 50].")
@click.option("--name", metavar="NAME", help="What it is called in lists and events [default: run-PID].")
@click.argument("command", metavar="COMMAND [ARG]...", nargs=-1, required=True, type=click.UNPROCESSED)
def run(command: tuple[str, ...], **asked: str | None) -> None:
    """Run COMMAND on this host with a GPU claim of its own.

    The claim is bound before COMMAND starts and released when it, and every child that still uses the GPU, has ended.
    If the card fails meanwhile, the claim moves to another one. Exit code: COMMAND's (as a shell tells it: 128 + N
    where signal N ended it); 4 where no card fits, 126 or 127 where COMMAND cannot be run.
    """
    program = shutil.which(command[0])
    if program is None:
        click.echo(f"kvmpool: {command[0]}: command not found", err=True)
        sys.exit(_NOT_FOUND)
    shim = native("shim").parent
    got = Client(deadline_s=_DEADLINE_S).post("/runs", {key: text for key, text in asked.items() if text is not None})
    libraries = [str(shim), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    ours = {
        "KVMPOOL_ENDPOINT": got["endpoint"],
        "KVMPOOL_TOKEN": got["token"],
        "KVMPOOL_CLAIM": got["claim"],
        "LD_LIBRARY_PATH": ":".join(libraries),
    }
    _become(program, command, os.environ | ours)


def _become(program: str, command: tuple[str, ...], environment: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    for number in _IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(program, command, environment)
    except OSError as error:
        click.echo(f"kvmpool: {command[0]}: {error.strerror}", err=True)
        sys.exit(_NOT_EXECUTABLE)

"""The root command: loads a subcommand only when it is asked for, and turns errors into one line and an exit code.

Exit codes: 0 ok, 1 failure, 2 usage, 3 not found, 4 refused, 6 unreachable, 7 timed out, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import click
from click.exceptions import Exit
from click.shell_completion import shell_complete

from kvmpool import __version__
from kvmpool.errors import DeadlinePassed, KvmpoolError, NotFound, Refused, Unreachable

_COMPLETE = "_KVMPOOL_COMPLETE"
_INTERRUPTED = 130  # 128 + SIGINT, as a shell tells it

_EPILOG = "Exit codes: 0 ok, 1 failure, 2 usage, 3 not found, 4 refused, 6 unreachable, 7 timed out, 130 interrupted."

_COMMANDS = {
    "status": ("kvmpool.cli.status", "The pool at a glance."),
    "host": ("kvmpool.cli.host", "List hosts; join this host to the pool, or leave it."),
    "card": ("kvmpool.cli.card", "List and show cards; cordon, drain, uncordon and restore them."),
    "claim": ("kvmpool.cli.claim", "List, show, add and remove the claims of domains."),
    "domain": ("kvmpool.cli.domain", "Define, start, stop, list and show the domains of this host."),
    "binding": ("kvmpool.cli.binding", "List and show bindings: which card serves which claim."),
    "breaker": ("kvmpool.cli.breaker", "Show the failover breaker, or close it again."),
    "events": ("kvmpool.cli.events", "What happened, and why."),
    "explain": ("kvmpool.cli.explain", "Why a claim is, or is not, served."),
    "doctor": ("kvmpool.cli.doctor", "Check this host: PASS, WARN or FAIL, each with its remedy."),
    "run": ("kvmpool.cli.run", "Run a program of this host with a GPU claim of its own."),
    "support": ("kvmpool.cli.support", "What of the CUDA driver API works in a guest."),
    "compat": ("kvmpool.cli.compat", "Whether the CUDA of a program works in a guest, and what to do."),
    "completion": ("kvmpool.cli.completion", "Print the script that makes a shell complete commands and names."),
    "lab": ("kvmpool.cli.lab", "A real pool on this machine alone, without a GPU."),
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = getattr(import_module(_COMMANDS[cmd_name][0]), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            close = get_close_matches(args[0], _COMMANDS)
            ctx.fail(f"No such command '{args[0]}'." + (f" Did you mean '{close[0]}'?" if close else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EPILOG)
@click.version_option(__version__, prog_name="kvmpool")
@click.option(
    "--socket", type=click.Path(path_type=Path), help="kvmpoold's socket [default: /run/kvmpool/kvmpoold.sock]."
)
def cli(socket: Path | None) -> None:
    """One pool for all GPUs of all KVM hosts."""
    if socket is not None:
        os.environ["KVMPOOL_SOCKET"] = str(socket)


def exit_code(error: KvmpoolError) -> int:
    """What a script sees; the same numbers in every command."""
    for cls, code in ((NotFound, 3), (Refused, 4), (DeadlinePassed, 7), (Unreachable, 6)):
        if isinstance(error, cls):
            return code
    return 1


def main(args: list[str] | None = None) -> NoReturn:
    """Run the command line and exit. The entry point of the `kvmpool` script."""
    asked = os.environ.get(_COMPLETE)
    if asked:
        sys.exit(shell_complete(cli, {}, "kvmpool", _COMPLETE, asked))
    sys.exit(_run(sys.argv[1:] if args is None else list(args)))


def _run(args: list[str]) -> int:
    """The exit code. Not click's own main: it ends with 1 where the reader of a pipe has left."""
    try:
        try:
            with cli.make_context("kvmpool", args) as ctx:
                cli.invoke(ctx)
            return 0
        except SystemExit as end:  # of a command that has its own exit code
            return int(end.code or 0)
        except Exit as end:
            return end.exit_code
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # `kvmpool events | head`: nothing is wrong. Keep Python's exit from flushing into the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KvmpoolError as error:
        click.echo(f"kvmpool: {' '.join(str(error).split())}", err=True)
        return exit_code(error)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return _INTERRUPTED


if __name__ == "__main__":
    main()

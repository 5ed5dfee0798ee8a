"""`kvmpool host`: the machines of the pool; makes this machine one of them, or takes it out again.

Joining installs libvirt's hook and, under systemd, the units (kvmpool/host/install.py); both ways may be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import click

from kvmpool.api.client import Client, socket_path
from kvmpool.cli.output import Column, column, output_option, print_rows
from kvmpool.errors import Denied, KvmpoolError, Refused
from kvmpool.host import install

F = TypeVar("F", bound=Callable[..., None])

HOST_COLUMNS = (
    column("HOST", "name"),
    column("STATE", "state"),
    Column("HEALTHY/CARDS", lambda r: f"{r['cards_healthy']}/{r['cards']}"),
    column("BINDINGS", "bindings"),
    column("VERSION", "version"),
)
_DONE = {"make folder": "made folder", "write": "wrote", "remove": "removed", "remove folder": "removed folder"}
_SHOWN_LABELS = 3
_ASK_S = 2.0  # kvmpoold may be gone already when its host leaves


@click.group()
def host() -> None:
    """List hosts; join this host to the pool, or leave it."""


@host.command("list")
@output_option
def list_hosts(output: str) -> None:
    """All hosts of the pool."""
    empty = "no hosts. Next: systemctl status kvmpoold"
    print_rows(Client().get("/hosts"), HOST_COLUMNS, output, lambda r: str(r["name"]), empty)


def _plan_options(function: F) -> F:
    root = click.option(
        "--root",
        type=click.Path(path_type=Path, file_okay=False, exists=True),
        default=Path("/"),
        help="Below this folder instead of /, for images that are not running.",
    )
    return root(click.option("--dry-run", is_flag=True, help="Only say what would be done.")(function))


@host.command()
@_plan_options
@click.option("--units/--no-units", default=None, help="systemd's units too. [default: where systemd runs]")
@click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(1, 120),
    default=5.0,
    show_default=True,
    help="Seconds after which the hook refuses a start; as [hook] deadline_s of kvmpoold's configuration.",
)
@click.option(
    "--mode",
    "modes",
    multiple=True,
    metavar="ADDRESS=MODE",
    help="The mode a card begins with: passthrough, vgpu or off. May be repeated; later: kvmpool card mode.",
)
def join(root: Path, dry_run: bool, units: bool | None, deadline_s: float, modes: tuple[str, ...]) -> None:
    """Make this machine a host: libvirt's hook, and the service's units. May be repeated."""
    from kvmpool.host import devices  # only here: it costs every other command 100 ms

    wants_units = _systemd_runs(root) if units is None else units
    with _readable():
        begin = devices.checked_modes(root, modes)
        plan = install.plan_join(root, socket=socket_path(), deadline_s=deadline_s, units=wants_units, modes=begin)
    _carry_out(plan, dry_run, f"nothing to do: {install.HOOK} is installed and up to date")


@host.command()
@_plan_options
@click.option("--force", is_flag=True, help="Also while domains of this host have bindings.")
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="kvmpoold's, if not the default.")
def leave(root: Path, dry_run: bool, force: bool, config: Path | None) -> None:
    """Give the cards back to the drivers they had, and remove what `join` installed. May be repeated."""
    from kvmpool.host import devices

    with _readable():
        plan = install.plan_leave(root)
        changed = devices.changed(root, config)
    if (plan.actions or changed) and not force and root == Path("/"):
        _refuse_while_bound()
    if changed and root == Path("/"):
        _refuse_while_served()
    for line in changed if dry_run else devices.give_back(root, config):
        click.echo(f"would {line}" if dry_run else line)
    _carry_out(plan, dry_run, "" if changed else "nothing to do: this host has not joined")


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise Denied(f"{error.filename} cannot be read: {error.strerror}. Next: be root") from error


def _carry_out(plan: install.Plan, dry_run: bool, nothing: str) -> None:
    if not plan.actions:
        if nothing:
            click.echo(nothing)
        return
    for action in plan.actions:
        if dry_run:
            click.echo(f"would {action}")
        else:
            install.apply(install.Plan((action,)))  # one by one: what was told is done, what was not told is not
            click.echo(f"{_DONE[action.verb]} {str(action).removeprefix(action.verb).strip()}")
    for note in plan.notes:
        click.echo(f"Next: {note}")


def _systemd_runs(root: Path) -> bool:
    return (root / "run/systemd/system").is_dir()  # sd_booted(3)


def _refuse_while_served() -> None:
    """A kvmpoold that runs would switch the cards again."""
    try:
        Client(deadline_s=_ASK_S).get("/status")
    except KvmpoolError:
        return
    raise Refused("kvmpoold runs, and would switch its cards again. Next: systemctl disable --now kvmpoold")


def _refuse_while_bound() -> None:
    """Nobody would end the workers of a host whose daemon is removed: its domains go first."""
    try:
        client = Client(deadline_s=_ASK_S)
        name = client.get("/status")["host"]
        here = {row["label"] for row in client.get("/bindings") if row["card_host"] == name}
        here |= {row["binding"] for row in client.get("/claims") if row["host"] == name and row["binding"]}
    except KvmpoolError:
        return
    if here:
        more = f" and {len(here) - _SHOWN_LABELS} more" if len(here) > _SHOWN_LABELS else ""
        shown = ", ".join(sorted(here)[:_SHOWN_LABELS])
        raise Refused(f"bound here: {shown}{more}. Next: shut these domains down, or kvmpool host leave --force")

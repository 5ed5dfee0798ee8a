"""`kvmpool events`: what happened, and why."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import click

from kvmpool.api.client import Client
from kvmpool.cli.output import output_option, paint, print_value, wrapped
from kvmpool.errors import Unreachable

Event = dict[str, Any]

_KEPT = 500  # more than kvmpoold shows


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on printing as things happen.")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=50, show_default=True, help="How many past events.")
@click.option("--subject", default="", help="Only events of this binding, claim, card or domain (vm0/gpu0#2, vm0).")
@output_option
def events(follow: bool, lines: int, subject: str, output: str) -> None:
    """What happened, oldest first, a line each with its reason."""
    client = Client()
    past = client.get("/events")
    told = [row for row in past if _about(row, subject)]
    told = told[max(0, len(told) - lines) :]
    if follow:
        _tell(told, output)
        _follow(client, past, subject, output)
    elif output != "table":
        print_value(told, output, lambda rows: [r["subject"] for r in rows])
    elif told:
        _tell(told, output)
    else:
        click.echo(f"no events of {subject}. Next: kvmpool events" if subject else "no events", err=True)


def _follow(client: Client, past: list[Event], subject: str, output: str) -> None:
    for row in _news(client, past):
        if _about(row, subject):
            _tell([row], output)
    raise Unreachable("kvmpoold has ended. Next: systemctl status kvmpoold")


def _news(client: Client, past: list[Event]) -> Iterator[Event]:
    """Events that are not in `past`; the stream repeats the last ones, so that none between the two calls is missed."""
    for row in client.lines("/events", follow="1", last=str(_KEPT)):
        if row not in past:
            yield row


def _about(row: Event, subject: str) -> bool:
    name = row["subject"]
    return not subject or name == subject or name.startswith((f"{subject}/", f"{subject}#"))


def _tell(rows: list[Event], output: str) -> None:
    """One line an event (in YAML: an item of a list), at once: its reader may be a program."""
    for row in rows:
        if output == "json":
            click.echo(json.dumps(row))
        elif output == "yaml":
            print_value([row], output, lambda _: ())
        elif output == "name":
            click.echo(row["subject"])
        else:
            clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["at"]))
            reason = f" ({row['reason']})" if row["reason"] else ""
            kind = row["kind"]
            first, *more = wrapped(f"{clock}  {row['subject']}: {kind}{reason}", len(clock) + 2)
            click.echo(first.replace(f": {kind}", f": {paint(kind)}", 1))
            for line in more:
                click.echo(line)

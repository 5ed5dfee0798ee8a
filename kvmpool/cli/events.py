"""`kvmpool events`: what happened, and why."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from kvmpool.api.client import Client
from kvmpool.cli.output import output_option, print_value


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on printing as things happen.")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=50, show_default=True, help="How many past events.")
@click.option("--subject", default="", help="Only events of this binding, claim, card or domain (vm0/gpu0#2, vm0).")
@output_option
def events(follow: bool, lines: int, subject: str, output: str) -> None:
    """What happened, oldest first, a line each with its reason."""
    client = Client()
    past = [row for row in client.get("/events") if _about(row, subject)]
    past = past[len(past) - lines :] if lines < len(past) else past
    if output == "yaml" or (output in ("json", "name") and not follow):
        print_value(past, output, lambda rows: [r["subject"] for r in rows])
    else:
        for row in past:
            _line(row, output)
    if not follow:
        return
    for row in client.lines("/events", follow="1"):
        if _about(row, subject):
            _line(row, output)


def _about(row: dict[str, Any], subject: str) -> bool:
    name = row["subject"]
    return not subject or name == subject or name.startswith((f"{subject}/", f"{subject}#"))


def _line(row: dict[str, Any], output: str) -> None:
    if output == "json":
        click.echo(json.dumps(row))
    elif output == "name":
        click.echo(row["subject"])
    else:
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["at"]))
        click.echo(f"{clock}  {row['subject']}: {row['kind']}" + (f" ({row['reason']})" if row["reason"] else ""))

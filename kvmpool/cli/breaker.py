"""`kvmpool breaker`: what stops automatic failovers when too many cards seem to fail at once."""

from __future__ import annotations

import click

from kvmpool.api.client import Client
from kvmpool.cli.output import output_option, print_fields, print_value


@click.group()
def breaker() -> None:
    """Show the failover breaker, or close it again."""


@breaker.command()
@output_option
def show(output: str) -> None:
    """Whether automatic failover is stopped, and why."""
    body = Client().get("/breaker")
    if output != "table":
        print_value(body, output, lambda b: ["open" if b["open"] else "closed"])
        return
    fields = [("Breaker", "open" if body["open"] else "closed"), ("Reason", body["reason"] or "-")]
    print_fields([*fields, *(("Recent failover", text) for text in body["recent"])])


@breaker.command()
def close() -> None:
    """Let automatic failovers happen again."""
    Client().post("/breaker/close")
    click.echo("breaker closed: automatic failovers happen again")

"""`kvmpool status`: the pool at a glance."""

from __future__ import annotations

from typing import Any

import click

from kvmpool.api.client import Client
from kvmpool.cli.card import CARD_COLUMNS
from kvmpool.cli.claim import CLAIM_COLUMNS
from kvmpool.cli.output import output_option, paint, print_rows, print_value

_NO_CLAIMS = "no claims. Next: kvmpool claim add DOMAIN"


@click.command()
@output_option
def status(output: str) -> None:
    """The pool at a glance: hosts, cards, claims, and whatever is not as it should be."""
    body = Client().get("/status")
    if output != "table":
        print_value(body, output, lambda b: [h["name"] for h in b["hosts"]])
        return
    hosts = ", ".join(f"{h['name']} {paint(h['state'])}" for h in body["hosts"])
    click.echo(f"hosts: {hosts or 'none yet'}   store: {body['store']}")
    click.echo(f"libvirt: {body['libvirt']}   NVML: {body['nvml']}")
    _warnings(body)
    click.echo()
    print_rows(body["cards"], CARD_COLUMNS, output, lambda r: str(r["id"]), "no cards. Next: kvmpool doctor")
    click.echo()
    print_rows(body["claims"], CLAIM_COLUMNS, output, lambda r: str(r["label"]), _NO_CLAIMS)


def _warnings(body: dict[str, Any]) -> None:
    if body["paused"]:
        click.echo(paint("WARN") + " paused: decisions are logged, not made. Next: set [policy] paused = false")
    if body["breaker"]:
        click.echo(paint("WARN") + f" failover breaker open: {body['breaker']}. Next: kvmpool breaker close")
    for fault in body["faults"]:
        click.echo(paint("WARN") + f" {fault}")

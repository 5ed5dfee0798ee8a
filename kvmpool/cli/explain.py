"""`kvmpool explain`: why a claim is, or is not, served."""

from __future__ import annotations

import click

from kvmpool.api.client import Client
from kvmpool.cli.claim import claim_path
from kvmpool.cli.complete import claims as complete_claims
from kvmpool.cli.output import Column, column, output_option, print_fields, print_rows, print_value

_COLUMNS = (
    column("CARD", "card"),
    Column("FITS", lambda r: "yes" if r["fits"] else "no"),
    column("WHY", "reason", note=True),
)


@click.command()
@click.argument("claim_name", metavar="CLAIM", shell_complete=complete_claims)
@output_option
def explain(claim_name: str, output: str) -> None:
    """Why CLAIM (DOMAIN/NAME) is, or is not, served: every card with its first failing predicate or its score."""
    body = Client().get(f"{claim_path(claim_name)}/explain")
    if output != "table":
        print_value(body, output, lambda b: [b["label"]])
        return
    print_fields(
        [
            ("Claim", body["label"]),
            ("State", body["state"]),
            ("Served as", body["serves"] or "-"),
            ("Binding", body["binding"] or "-"),
            ("Reason", body["reason"] or "-"),
        ]
    )
    click.echo()
    print_rows(body["cards"], _COLUMNS, output, lambda r: str(r["card"]), "no cards. Next: kvmpool doctor")

"""`kvmpool card`: the physical GPUs of the pool."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click

from kvmpool.api.client import Client
from kvmpool.cli.complete import cards as complete_cards
from kvmpool.cli.output import Column, column, mib, output_option, print_fields, print_rows, print_value


def _verdict(row: Any) -> str:
    return str(row["verdict"])


CARD_COLUMNS = (
    column("CARD", "label"),
    column("MODEL", "model", flexible=True),
    column("MODE", "mode"),
    Column("HEALTH", _verdict),
    Column("CORDON", lambda r: "yes" if r["cordoned"] else "-"),
    Column("TAKEN/MEMORY", lambda r: f"{mib(r['memory_taken_mib'])}/{mib(r['memory_mib'])}"),
    Column("BINDINGS", lambda r: ",".join(r["bindings"]) or "-", flexible=True),
)


@click.group()
def card() -> None:
    """List, show, cordon and uncordon cards.

    A CARD is named by its address (h0/0000:41:00.0), its GPU uuid, or the start of it.
    """


@card.command("list")
@output_option
def list_cards(output: str) -> None:
    """All cards, with their health and what is taken of them."""
    print_rows(Client().get("/cards"), CARD_COLUMNS, output, lambda r: str(r["id"]), "no cards. Next: kvmpool doctor")


@card.command()
@click.argument("card_name", metavar="CARD", shell_complete=complete_cards)
@output_option
def show(card_name: str, output: str) -> None:
    """One card in full."""
    body = Client().get(f"/cards/{quote(card_name, safe='')}")
    if output == "table":
        print_fields(_fields(body))
    else:
        print_value(body, output, lambda b: [b["id"]])


@card.command()
@click.argument("card_name", metavar="CARD", shell_complete=complete_cards)
@click.option("--reason", default="", help="Shown beside the cordon, for the next person.")
def cordon(card_name: str, reason: str) -> None:
    """No new bindings on this card; those it has stay."""
    body = Client().post(f"/cards/{quote(card_name, safe='')}/cordon", {"reason": reason})
    click.echo(f"{body['label']} cordoned")


@card.command()
@click.argument("card_name", metavar="CARD", shell_complete=complete_cards)
def uncordon(card_name: str) -> None:
    """The card may get new bindings again."""
    body = Client().post(f"/cards/{quote(card_name, safe='')}/uncordon")
    click.echo(f"{body['label']} uncordoned")


def _cordon(body: dict[str, Any]) -> str:
    if not body["cordoned"]:
        return "no"
    return f"yes ({body['cordon_reason']})" if body["cordon_reason"] else "yes"


def _fields(body: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("Card", body["label"]),
        ("UUID", body["id"]),
        ("Model", body["model"]),
        ("Mode", body["mode"]),
        ("Health", body["verdict"]),
        ("Reason", body["reason"] or "-"),
        ("Since", f"{body['since_s']:.0f} s"),
        ("Cordoned", _cordon(body)),
        ("Driver", body["driver"] or "-"),
        ("Compute capability", body["compute_capability"] or "-"),
        ("NUMA node", str(body["numa_node"])),
        ("Memory", f"{mib(body['memory_mib'])}, {mib(body['memory_taken_mib'])} taken"),
        ("Compute", f"{body['compute_taken_percent']} % taken"),
        ("Last Xid", str(body["last_xid"] or "-")),
        ("Application Xids", str(body["app_xids"])),
        ("Bindings", ", ".join(body["bindings"]) or "-"),
    ]

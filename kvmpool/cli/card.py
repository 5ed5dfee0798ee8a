"""`kvmpool card`: the physical GPUs of the pool."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click

from kvmpool.api.client import Client
from kvmpool.cli.complete import cards as complete_cards
from kvmpool.cli.output import Column, age, column, mib, output_option, print_fields, print_rows, print_value

CARD_COLUMNS = (
    column("CARD", "label"),
    column("MODEL", "model", flexible=True, spare=True),
    column("MODE", "mode", spare=True),
    column("HEALTH", "verdict"),
    Column("CORDON", lambda r: "drain" if r["drain"] else "yes" if r["cordoned"] else "-"),
    Column("TAKEN/MEMORY", lambda r: f"{mib(r['memory_taken_mib'])}/{mib(r['memory_mib'])}"),
    column("BINDINGS", "bindings", flexible=True),
    column("REASON", "reason", note=True),
)

_card_argument = click.argument("card_name", metavar="CARD", shell_complete=complete_cards)
_reason_option = click.option("--reason", default="", help="Kept with it, for the next person.")


@click.group()
def card() -> None:
    """List and show cards; cordon, drain, uncordon and restore them.

    A CARD is named by its address (h0/0000:41:00.0, or without the host), by its GPU uuid, or by the start of that.
    """


@card.command("list")
@output_option
def list_cards(output: str) -> None:
    """All cards, with their health and what is taken of them."""
    print_rows(Client().get("/cards"), CARD_COLUMNS, output, lambda r: str(r["id"]), "no cards. Next: kvmpool doctor")


@card.command()
@_card_argument
@output_option
def show(card_name: str, output: str) -> None:
    """One card in full."""
    body = Client().get(f"/cards/{quote(card_name, safe='')}")
    if output == "table":
        print_fields(_fields(body))
    else:
        print_value(body, output, lambda b: [b["id"]])


@card.command()
@_card_argument
@_reason_option
def cordon(card_name: str, reason: str) -> None:
    """No new bindings on this card; those it has stay."""
    body = _wish(card_name, "cordon", reason)
    click.echo(f"{body['label']} cordoned{_holds(body, 'stays', 'stay')}")


@card.command()
@_card_argument
@_reason_option
def drain(card_name: str, reason: str) -> None:
    """Nothing new, and what it has moves where there is room."""
    body = _wish(card_name, "drain", reason)
    click.echo(f"{body['label']} is being drained{_holds(body, 'moves if it can', 'move if they can')}")


@card.command()
@_card_argument
def uncordon(card_name: str) -> None:
    """End a cordon or a drain: the card may get new bindings again."""
    body = Client().post(f"/cards/{quote(card_name, safe='')}/uncordon")
    click.echo(f"{body['label']} uncordoned")


@card.command()
@_card_argument
@_reason_option
def restore(card_name: str, reason: str) -> None:
    """Say that a card is repaired.

    For a card that is out of service: it is probed, and then on probation before it serves as before.
    """
    body = _wish(card_name, "restore", reason)
    click.echo(f"{body['label']} will be probed, then on probation. Next: kvmpool card show {body['label']}")


def _wish(card_name: str, verb: str, reason: str) -> dict[str, Any]:
    body = Client().post(f"/cards/{quote(card_name, safe='')}/{verb}", {"reason": reason})
    assert isinstance(body, dict)
    return body


def _holds(body: dict[str, Any], one: str, many: str) -> str:
    """What becomes of the bindings that the card has; "" where it has none."""
    labels = body["bindings"]
    return f"; {', '.join(labels)} {one if len(labels) == 1 else many}" if labels else ""


def _cordon(body: dict[str, Any]) -> str:
    if not body["cordoned"] and not body["drain"]:
        return "no"
    word = "being drained" if body["drain"] else "yes"
    return f"{word} ({body['cordon_reason']})" if body["cordon_reason"] else word


def _fields(body: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("Card", body["label"]),
        ("UUID", body["id"]),
        ("Model", body["model"]),
        ("Mode", body["mode"]),
        ("Health", body["verdict"]),
        ("Reason", body["reason"] or "-"),
        ("Since", age(body["since_s"])),
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

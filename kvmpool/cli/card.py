"""`kvmpool card`: the physical GPUs of the pool."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import quote

import click

from kvmpool.api.client import Client
from kvmpool.cli.complete import cards as complete_cards
from kvmpool.cli.output import Column, age, column, mib, output_option, print_fields, print_rows, print_value
from kvmpool.errors import DeadlinePassed, Refused

CARD_COLUMNS = (
    column("CARD", "label"),
    column("MODEL", "model", flexible=True, spare=True),
    column("MODE", "mode", spare=True),
    column("HEALTH", "verdict"),
    Column("CORDON", lambda r: "drain" if r["drain"] else "yes" if r["cordoned"] else "-"),
    Column("TAKEN/MEMORY", lambda r: f"{_taken(r)}/{mib(r['memory_mib'])}"),
    column("BINDINGS", "bindings", flexible=True),
    column("REASON", "reason", note=True),
)

_MODE_ASK_S = 30.0  # every process of the host is looked at, and the driver asked
_MODE_WAIT_S = 60.0  # an unbind that does not end is given up long before
_MODE_POLL_S = 0.2
_WAIT_HELP = f"Return when it is done, or refused; give up after so many seconds. [default: {_MODE_WAIT_S:g}]"

_card_argument = click.argument("card_name", metavar="CARD", shell_complete=complete_cards)
_reason_option = click.option("--reason", default="", help="Kept with it, for the next person.")


def _taken(body: Any) -> str:
    """Of a card that is passed through: all of it, whatever its bindings say of memory."""
    if body["mode"] == "passthrough":
        return "all" if body["bindings"] else "none"
    return mib(body["memory_taken_mib"])


@click.group()
def card() -> None:
    """List and show cards; cordon, drain, uncordon and restore them; switch their mode.

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


@card.command()
@_card_argument
@click.argument("mode", type=click.Choice(["passthrough", "vgpu", "off"]))
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@click.option("--wait", "wait_s", type=float, is_flag=False, flag_value=_MODE_WAIT_S, help=_WAIT_HELP)
def mode(card_name: str, mode: str, dry_run: bool, wait_s: float | None) -> None:
    """Hand the card out whole (passthrough), by slices (vgpu), or not at all (off).

    Refused while somebody holds it, with their name. The card keeps this mode over reboots of its host.
    """
    client = Client(deadline_s=_MODE_ASK_S)
    asked = client.post(f"/cards/{quote(card_name, safe='')}/mode", {"mode": mode, "dry_run": dry_run})
    body = asked["card"]
    if dry_run:
        for step in asked["steps"]:
            click.echo(f"would {step}")
    if not asked["steps"]:
        click.echo(f"{body['label']} is in mode {mode}")
    elif not dry_run and wait_s is None:
        click.echo(f"{body['label']} is being switched to {mode}. Next: kvmpool card show {body['label']}")
    elif not dry_run and wait_s is not None:
        body = _switched(client, body, wait_s)
        click.echo(f"{body['label']} is in mode {body['mode']} (driver {body['driver'] or 'none'})")


def _switched(client: Client, body: dict[str, Any], wait_s: float) -> dict[str, Any]:
    """The card once it is in the mode that was asked for. Raises Refused with the host's reason, DeadlinePassed."""
    ticket, until = body["mode_ticket"], time.monotonic() + wait_s
    while time.monotonic() < until:
        body = client.get(f"/cards/{quote(body['id'], safe='')}")
        if body["mode_ticket"] != ticket:
            raise Refused(f"{body['label']}: somebody asked for another mode. Next: kvmpool card show {body['label']}")
        if body["mode_answered"] >= ticket and body["mode_fault"]:
            raise Refused(f"{body['label']} is in mode {body['mode']}: {body['mode_fault']}")
        if body["mode_answered"] >= ticket:
            return body
        time.sleep(_MODE_POLL_S)
    what = f"{body['label']} is not in mode {body['mode_wish']} after {wait_s:g} s"
    raise DeadlinePassed(f"{what}. Next: kvmpool card show {body['label']}")


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


def _mode(body: dict[str, Any]) -> str:
    if not body["mode_wish"] or body["mode_wish"] == body["mode"]:
        return str(body["mode"])
    why = f": {body['mode_fault']}" if body["mode_fault"] else ""
    return f"{body['mode']}, to be {body['mode_wish']}{why}"


def _group(body: dict[str, Any]) -> str:
    others = [each for each in body["functions"] if each != body["address"]]
    together = f", with {', '.join(others)}" if others else ""
    return f"{body['iommu_group']}{together}" if body["iommu_group"] else "none: no passthrough"


def _fields(body: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("Card", body["label"]),
        ("UUID", body["id"]),
        ("Model", body["model"]),
        ("Mode", _mode(body)),
        ("IOMMU group", _group(body)),
        ("Health", body["verdict"]),
        ("Reason", body["reason"] or "-"),
        ("Since", age(body["since_s"])),
        ("Cordoned", _cordon(body)),
        ("Driver", body["driver"] or "-"),
        ("Compute capability", body["compute_capability"] or "-"),
        ("NUMA node", str(body["numa_node"])),
        ("Memory", f"{mib(body['memory_mib'])}, {_taken(body)} taken"),
        ("Compute", f"{body['compute_taken_percent']} % taken"),
        ("Last Xid", str(body["last_xid"] or "-")),
        ("Application Xids", str(body["app_xids"])),
        ("Bindings", ", ".join(body["bindings"]) or "-"),
    ]

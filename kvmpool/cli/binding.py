"""`kvmpool binding`: which card serves which claim, the Nth time."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click

from kvmpool.api.client import Client
from kvmpool.cli.complete import bindings as complete_bindings
from kvmpool.cli.output import (
    Column,
    column,
    compute,
    memory,
    mib,
    output_option,
    print_fields,
    print_rows,
    print_value,
)

_WHOLE = "whole card"

BINDING_COLUMNS = (
    column("BINDING", "label"),
    column("PHASE", "phase"),
    column("CARD", "card"),
    Column("USED/MEMORY", lambda r: _WHOLE if _passed(r) else f"{mib(r['memory_used_mib'])}/{mib(r['memory_mib'])}"),
    Column("SESSIONS", lambda r: "-" if _passed(r) else str(r["sessions"]), spare=True),
    column("REASON", "reason", note=True),
)


@click.group()
def binding() -> None:
    """List and show bindings: "this claim is served by this card", the Nth time (vm0/gpu0#2)."""


@binding.command("list")
@output_option
def list_bindings(output: str) -> None:
    """All bindings, those being released too: they still hold their memory."""
    rows = Client().get("/bindings")
    print_rows(rows, BINDING_COLUMNS, output, lambda r: str(r["label"]), "no bindings. Next: kvmpool claim list")


@binding.command()
@click.argument("binding_name", metavar="BINDING", shell_complete=complete_bindings)
@output_option
def show(binding_name: str, output: str) -> None:
    """One binding in full: vm0/gpu0#2, or vm0/gpu0 for the newest."""
    body = Client().get(f"/bindings/{quote(binding_name, safe='')}")
    if output == "table":
        print_fields(_fields(body))
    else:
        print_value(body, output, lambda b: [b["label"]])


def _passed(body: Any) -> bool:
    return bool(body["mode"] == "passthrough")


def _fields(body: dict[str, Any]) -> list[tuple[str, str]]:
    fields = [
        ("Binding", body["label"]),
        ("Phase", body["phase"]),
        ("Reason", body["reason"] or "-"),
        ("Mode", body["mode"]),
        ("Card", f"{body['card']} ({body['card_id']})"),
    ]
    if _passed(body):
        return [*fields, ("Memory", _WHOLE), ("Compute", _WHOLE), ("In the domain", "yes" if body["pointed"] else "no")]
    return [
        *fields,
        ("Memory", f"{memory(body)}, {mib(body['memory_used_mib'])} used"),
        ("Page-locked", f"{mib(body['pinned_mib'])}, {mib(body['pinned_used_mib'])} used"),
        ("Compute", compute(body)),
        ("Sessions", str(body["sessions"])),
        ("Worker", f"pid {body['worker_pid']}" if body["worker_pid"] else "-"),
        ("Worker's socket", body["worker"] or "-"),
        ("Endpoint", body["endpoint"] or "-"),
        ("Transport", ", ".join(body["transports"]) or body["endpoint"].partition(":")[0] or "-"),
        ("Relay points here", "yes" if body["pointed"] else "no"),
    ]

"""`kvmpool claim`: what domains ask for.

`add` and `remove` edit a domain's metadata through libvirt, by way of kvmpoold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import click

from kvmpool.api.client import Client
from kvmpool.cli.complete import claims as complete_claims
from kvmpool.cli.complete import claims_of_domain as complete_claims_of_domain
from kvmpool.cli.complete import domains as complete_domains
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
from kvmpool.errors import ClaimInvalid

CLAIM_COLUMNS = (
    column("CLAIM", "label"),
    column("STATE", "state"),
    Column("MODE", lambda r: _mode(r), spare=True),
    Column("MEMORY", lambda r: _whole(r) or (mib(r["memory_mib"]) if r["memory_mib"] else "-")),
    Column("COMPUTE", lambda r: _share(r), spare=True),
    column("BINDING", "binding"),
    column("CARD", "card"),
    column("REASON", "reason", note=True),
)


@click.group()
def claim() -> None:
    """List, show, add and remove the claims of domains.

    A CLAIM is named DOMAIN/NAME, for example vm0/gpu0.
    """


@claim.command("list")
@output_option
def list_claims(output: str) -> None:
    """All claims, also of domains that are shut off."""
    empty = "no claims. Next: kvmpool claim add DOMAIN --memory 4GiB"
    print_rows(Client().get("/claims"), CLAIM_COLUMNS, output, lambda r: str(r["label"]), empty)


@claim.command()
@click.argument("claim_name", metavar="CLAIM", shell_complete=complete_claims)
@output_option
def show(claim_name: str, output: str) -> None:
    """One claim in full."""
    body = Client().get(claim_path(claim_name))
    if output == "table":
        print_fields(_fields(body))
    else:
        print_value(body, output, lambda b: [b["label"]])


@claim.command()
@click.argument("domain", shell_complete=complete_domains)
@click.option("--name", default="gpu0", show_default=True, help="The claim's name in the domain.")
@click.option("--mode", type=click.Choice(["vgpu", "passthrough", "any"]), default="vgpu", show_default=True)
@click.option("--memory", help="Guaranteed GPU memory: MiB, or with a unit (512MiB, 4GiB). Required for vgpu.")
@click.option("--compute", help="Guaranteed percent of a card's compute, 1-100. Without it: best effort.")
@click.option("--compute-limit", help="Most percent of a card's compute it ever gets, 1-100; 100 where not given.")
@click.option("--priority", help="0-100; 50 where not given.")
@click.option(
    "--shared-memory", help="Of the domain and this host, for faster copies: 256MiB, 1GiB, ...; 0 removes it."
)
@click.option("--set", "extra", multiple=True, metavar="KEY=VALUE", help="Any other attribute of <claim>; repeatable.")
def add(domain: str, name: str, mode: str, extra: tuple[str, ...], **given: str | None) -> None:
    """Write a claim into DOMAIN's metadata. It is served from the domain's next start on."""
    attributes = _attributes(name, mode, extra, given)
    try:
        body = Client().post(f"/domains/{quote(domain, safe='')}/claims", attributes)
    except ClaimInvalid as error:  # the fault is in these words, not in what `virsh edit` shows
        raise ClaimInvalid(f"{str(error).partition('. Next: ')[0]}. Next: kvmpool claim add --help") from error
    click.echo(f"{body['label']} added: {_words(body)}" + ("" if body["reason"] else f". Next: virsh start {domain}"))


@claim.command()
@click.argument("domain", shell_complete=complete_domains)
@click.option(
    "--name",
    default="gpu0",
    show_default=True,
    shell_complete=complete_claims_of_domain,
    help="The claim's name in the domain.",
)
def remove(domain: str, name: str) -> None:
    """Take a claim out of DOMAIN's metadata. A running domain keeps its binding until it stops."""
    client = Client()
    client.delete(f"/domains/{quote(domain, safe='')}/claims/{quote(name, safe='')}")
    kept = next((row["binding"] for row in client.get("/claims") if row["label"] == f"{domain}/{name}"), "")
    click.echo(f"{domain}/{name} removed" + (f"; {kept} stays until the domain stops" if kept else ""))


@claim.command()
@click.option("--name", default="gpu0", show_default=True, help="The claim's name in the domain.")
@click.option("--mode", type=click.Choice(["vgpu", "passthrough", "any"]), default="vgpu", show_default=True)
@click.option("--memory", help="Guaranteed GPU memory: MiB, or with a unit (512MiB, 4GiB). Required for vgpu.")
@click.option("--compute", help="Guaranteed percent of a card's compute, 1-100. Without it: best effort.")
@click.option("--set", "extra", multiple=True, metavar="KEY=VALUE", help="Any other attribute of <claim>; repeatable.")
def xml(name: str, mode: str, extra: tuple[str, ...], **given: str | None) -> None:
    """Print a claim's <metadata> for a domain's XML: for virt-install, virsh edit or a template. Changes nothing.

    A vGPU also needs the fw_cfg entries or the vsock of a domain of `kvmpool domain define --print-xml`;
    `kvmpool claim add` writes both into a domain that exists.
    """
    click.echo(Client().post("/claim-xml", _attributes(name, mode, extra, given))["xml"])


def _attributes(name: str, mode: str, extra: tuple[str, ...], given: Mapping[str, str | None]) -> dict[str, str]:
    attributes = {"name": name, "mode": mode} | {k: v for k, v in given.items() if v is not None}
    for pair in extra:
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--set")
        attributes[key] = value
    return attributes


def _words(body: dict[str, Any]) -> str:
    words = [body["mode"], *([memory(body)] if body["memory_mib"] else [])]
    if body["compute_percent"] or body["compute_limit_percent"] < 100:
        words.append(f"compute {compute(body)}")
    return ", ".join(words) + (f"; {body['reason']}" if body["reason"] else "")


def _mode(body: Any) -> str:
    """In a list: what it asks for, and for what it is served where it left that open."""
    return f"{body['mode']}:{body['serves']}" if body["mode"] == "any" and body["serves"] else str(body["mode"])


def _whole(body: Any) -> str:
    """Of a claim that gets a card as a whole, now or always; "" of any other."""
    whole = "passthrough" in (body["serves"], body["mode"]) or (body["mode"] == "any" and not body["memory_mib"])
    return "whole card" if whole else ""


def _share(body: Any) -> str:
    """In a list: what it is sure of, and up to what where that has an end."""
    if _whole(body):
        return "-"
    sure, limit = body["compute_percent"], body["compute_limit_percent"]
    if limit < 100:
        return f"{sure}-{limit}%" if sure < limit else f"{limit}%"
    return f"{sure}%" if sure else "-"


def claim_path(claim_name: str) -> str:
    """The API path of `DOMAIN/NAME`. Raises ClaimInvalid where it has another form."""
    domain, sign, name = claim_name.rpartition("/")
    if not sign or not domain or not name:
        raise ClaimInvalid(f"{claim_name!r} is not DOMAIN/NAME, for example vm0/gpu0. Next: kvmpool claim list")
    return f"/claims/{quote(domain, safe='')}/{quote(name, safe='')}"


def _fields(body: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("Claim", body["label"]),
        ("Domain UUID", body["uuid"]),
        ("State", body["state"]),
        ("Reason", body["reason"] or "-"),
        ("Host", body["host"] or "-"),
        ("Mode", body["mode"]),
        ("Served as", body["serves"] or "-"),
        ("Memory", _whole(body) or memory(body)),
        ("Compute", _whole(body) or compute(body)),
        ("Priority", f"{body['priority']}{', preemptible' if body['preemptible'] else ''}"),
        ("On failure", body["on_failure"]),
        ("Binding", body["binding"] or "-"),
        ("Card", body["card"] or "-"),
        ("Endpoint", body["endpoint"] or "-"),
    ]

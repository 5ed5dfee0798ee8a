"""`kvmpool domain`: VMs with GPU claims, for who provisions them. virsh and virt-manager stay in charge of the rest."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click

from kvmpool.api.client import DEADLINE_S, Client
from kvmpool.cli.claim import CLAIM_COLUMNS
from kvmpool.cli.complete import domains as complete_domains
from kvmpool.cli.output import column, output_option, print_fields, print_rows, print_value

DOMAIN_COLUMNS = (column("DOMAIN", "name"), column("STATE", "state"), column("UUID", "uuid", spare=True))

_START_S = 150.0  # QEMU allocates and pins the guest's memory: kvmpoold gives up after 120 s
_domain_argument = click.argument("domain_name", metavar="DOMAIN", shell_complete=complete_domains)


@click.group()
def domain() -> None:
    """Define, start, stop, list and show the domains of this host.

    They are libvirt's: what virsh does to them is seen here, and the other way round.
    """


@domain.command("list")
@output_option
def list_domains(output: str) -> None:
    """All domains of this host, also those without a GPU."""
    empty = "no domains. Next: kvmpool domain define --help"
    print_rows(Client().get("/domains"), DOMAIN_COLUMNS, output, lambda r: str(r["name"]), empty)


@domain.command()
@_domain_argument
@output_option
def show(domain_name: str, output: str) -> None:
    """One domain and its claims."""
    body = Client().get(f"/domains/{quote(domain_name, safe='')}")
    if output != "table":
        print_value(body, output, lambda b: [b["name"]])
        return
    print_fields([("Domain", body["name"]), ("UUID", body["uuid"]), ("State", body["state"])])
    click.echo()
    empty = f"no GPU claims. Next: kvmpool claim add {body['name']} --memory 4GiB"
    print_rows(body["claims"], CLAIM_COLUMNS, output, lambda r: str(r["label"]), empty)


@domain.command()
@click.argument("name")
@click.option("--memory", required=True, help="The guest's memory: MiB, or with a unit (4096, 4GiB).")
@click.option("--vcpus", type=int, default=1, show_default=True, help="Virtual CPUs.")
@click.option("--disk", "disks", multiple=True, metavar="PATH[,format=F]", help="Image, raw or qcow2; repeatable.")
@click.option("--network", "networks", multiple=True, metavar="NAME|bridge=BR", help="Repeatable. Without it: none.")
@click.option("--gpu", "gpus", multiple=True, metavar="KEY=VALUE,...", help="A <claim>'s attributes; repeatable.")
@click.option("--cdrom", default="", metavar="ISO", help="Boot this first, to install from it.")
@click.option("--uefi", is_flag=True, help="UEFI firmware instead of BIOS; large BARs need it.")
@click.option("--print-xml", "only_print", is_flag=True, help="Print the XML and define nothing.")
@click.option("--start", "start_it", is_flag=True, help="Start it once it is defined.")
def define(name: str, start_it: bool, **given: Any) -> None:
    """Define a domain of the recommended form: q35, empty root ports, vsock, guest agent, a fixed address a card.

    \b
    kvmpool domain define vm0 --memory 8GiB --vcpus 4 \\
        --disk /var/lib/libvirt/images/vm0.qcow2 --network default \\
        --gpu mode=vgpu,memory=4GiB,compute=25
    """
    if start_it and given["only_print"]:
        raise click.UsageError("--start and --print-xml exclude each other.")
    wanted = {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}
    body = Client().post("/domains", {"name": name, **wanted})
    if given["only_print"]:
        click.echo(body["xml"], nl=False)
        return
    if "<vsock" not in body["xml"]:
        click.echo(f"{name} has no vsock: this host has no /dev/vhost-vsock. Next: modprobe vhost_vsock", err=True)
    claims = f" with {', '.join(body['claims'])}" if body["claims"] else " without a GPU"
    click.echo(f"{name} defined{claims}" + ("" if start_it else f". Next: kvmpool domain start {name}"))
    if start_it:
        _started(name)


@domain.command()
@_domain_argument
def start(domain_name: str) -> None:
    """Start DOMAIN, as virsh start does: its claims are served first."""
    _started(domain_name)


@domain.command()
@_domain_argument
@click.option("--force", is_flag=True, help="End it at once, as virsh destroy does.")
@click.option("--timeout", "timeout_s", type=float, default=60.0, show_default=True, help="Seconds to wait.")
def stop(domain_name: str, force: bool, timeout_s: float) -> None:
    """Ask DOMAIN's guest to power off, and wait until it has."""
    client = Client(deadline_s=timeout_s + 2 * DEADLINE_S)
    client.post(f"/domains/{quote(domain_name, safe='')}/stop", {"force": force, "timeout_s": timeout_s})
    click.echo(f"{domain_name} stopped")


def _started(name: str) -> None:
    body = Client(deadline_s=_START_S).post(f"/domains/{quote(name, safe='')}/start")
    served = [f"{claim['binding']} on {claim['card']}" for claim in body["claims"] if claim["binding"]]
    click.echo(f"{name} started" + (f": {', '.join(served)}" if served else ""))

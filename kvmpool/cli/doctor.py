"""`kvmpool doctor`: PASS, WARN and FAIL lines, each with its remedy."""

from __future__ import annotations

import sys

import click

from kvmpool.api.client import socket_path
from kvmpool.cli.output import output_option, paint, print_value
from kvmpool.doctor.finding import Finding, Level, Place
from kvmpool.doctor.run import findings


@click.command()
@click.option("--connect", "-c", "uri", default="qemu:///system", show_default=True, help="libvirt's URI.")
@output_option
def doctor(uri: str, output: str) -> None:
    """Check this host: PASS, WARN or FAIL, each with its remedy. Exit code 1 where anything FAILs."""
    found: list[Finding] = []
    for finding in findings(Place(socket=socket_path(), libvirt_uri=uri)):
        found.append(finding)
        if output == "table":
            _print(finding)
    if output != "table":
        rows = [
            {"area": f.area, "check": f.title, "level": f.level.value, "detail": f.detail, "remedy": f.remedy}
            for f in found
        ]
        print_value(rows, output, lambda value: [f"{r['level']} {r['area']}: {r['check']}" for r in value])
    sys.exit(1 if any(f.level is Level.FAIL for f in found) else 0)


def _print(finding: Finding) -> None:
    detail = f" ({finding.detail})" if finding.detail else ""
    click.echo(f"{paint(finding.level.value)} {finding.area}: {finding.title}{detail}")
    if finding.remedy:
        click.echo(f"     Next: {finding.remedy}")

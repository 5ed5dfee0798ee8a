"""`kvmpool doctor`: PASS, WARN and FAIL lines, each with its remedy."""

from __future__ import annotations

import sys

import click

from kvmpool.api.client import socket_path
from kvmpool.cli.output import output_option, paint, print_value, wrapped
from kvmpool.doctor.finding import Finding, Level, Place
from kvmpool.doctor.run import findings

_AREA = 12
_TITLE = 42


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
    counts = {level: sum(f.level is level for f in found) for level in Level}
    if output == "table":
        click.echo(", ".join(f"{count} {paint(level.value)}" for level, count in counts.items()))
    else:
        rows = [
            {"area": f.area, "check": f.title, "level": f.level.value, "detail": f.detail, "remedy": f.remedy}
            for f in found
        ]
        print_value(rows, output, lambda value: [f"{r['level']} {r['area']}: {r['check']}" for r in value])
    sys.exit(1 if counts[Level.FAIL] else 0)


def _print(finding: Finding) -> None:
    """As virt-host-validate does; what there is to do stands below."""
    head = f"{finding.area + ':':>{_AREA}} {finding.title:<{_TITLE}} : "
    detail = f" ({finding.detail})" if finding.detail else ""
    below = [f"Next: {finding.remedy}"] if finding.remedy else []
    if len(wrapped(f"{head}{finding.level.value}{detail}", 0)) > 1:
        below.insert(0, finding.detail)
        detail = ""
    click.echo(f"{head}{paint(finding.level.value)}{detail}")
    for text in below:
        for line in wrapped(" " * (_AREA + 1) + text, _AREA + 1):
            click.echo(line)

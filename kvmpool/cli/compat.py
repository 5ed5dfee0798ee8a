"""`kvmpool compat`: whether a program's CUDA will work in a guest, before anybody tries."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from kvmpool.cli.output import Column, column, output_option, print_fields, print_rows, print_value
from kvmpool.compat.classify import Class, driver_symbols, shown
from kvmpool.compat.search import Report, look, programs
from kvmpool.compat.support import driver_api
from kvmpool.errors import KvmpoolError, NotFound

_COLUMNS = (
    column("PROGRAM", "program", flexible=True),
    column("CLASS", "class"),
    column("WORKS", "works"),
    Column("CODE", lambda r: ", ".join(r["code"]) or "-", flexible=True, spare=True),
    Column("REASON", lambda r: "; ".join(r["reasons"]) or "-", note=True),
)
_FAILS, _NO_FILE, _REFUSED = 1, 3, 4


@click.command()
@click.argument("paths", metavar="PROGRAM...", nargs=-1, required=True, type=click.Path(path_type=Path))
@output_option
def compat(paths: tuple[Path, ...], output: str) -> None:
    """Say whether the CUDA of a program works in a guest, and what to do.

    PROGRAM: an ELF program or shared library, or a folder with extension modules. Libraries that it is linked with are
    looked at too. Classes: A, the driver API: works. B, NVIDIA's runtime as a library: not yet. C, cuBLAS and its kind:
    not yet. static cudart: cannot. Exit code: 0 all work, 4 one does not, 3 one is not there, 1 one cannot be read.
    """
    driver = driver_symbols(driver_api())
    reports: list[Report] = []
    faults: list[KvmpoolError] = []
    for path in _each(paths, faults):
        try:
            reports.append(look(path, driver, os.environ.get("LD_LIBRARY_PATH", "")))
        except KvmpoolError as error:
            faults.append(error)
    _print([_body(report) for report in reports], output, set(map(str, paths)), whole=len(reports) + len(faults) == 1)
    for fault in faults:
        click.echo(f"kvmpool: {fault}", err=True)
    if faults:
        sys.exit(_NO_FILE if all(isinstance(fault, NotFound) for fault in faults) else _FAILS)
    if not all(report.cls.works for report in reports):
        sys.exit(_REFUSED)


def _each(paths: tuple[Path, ...], faults: list[KvmpoolError]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        try:
            found += [each for each in programs(path) if each not in found]
        except KvmpoolError as error:
            faults.append(error)
    return found


def _print(bodies: list[dict[str, Any]], output: str, named: set[str], *, whole: bool) -> None:
    """`named`: whom a person named; of a folder's files those that use CUDA are enough."""
    if output != "table":
        print_value(bodies, output, lambda rows: [f"{row['program']}: {row['class']}" for row in rows])
    elif whole and bodies:
        print_fields(_fields(bodies[0]))
    elif bodies:
        shown_here = [body for body in bodies if body["class"] != Class.NONE.word or body["program"] in named]
        print_rows(shown_here, _COLUMNS, output, lambda row: str(row["program"]), "none of them uses CUDA")
        if 0 < len(shown_here) < len(bodies):
            click.echo(f"{len(bodies) - len(shown_here)} more use no CUDA", err=True)


def _body(report: Report) -> dict[str, Any]:
    facts = report.facts
    return {
        "program": str(facts.path),
        "class": report.cls.word,
        "works": report.cls.works,
        "reasons": list(report.reasons),
        "next": report.cls.next,
        "unsupported": list(report.unsupported),
        "unknown": list(report.verdict.unknown),
        "imports": list(facts.imports),
        "needed": list(facts.needed),
        "search": list(facts.search),
        "opens": list(facts.opens),
        "code": [code.label for code in facts.code],
        "fatbins": facts.fatbins,
        "damage": facts.damage,
        "libraries": [{"path": str(of.path), "class": verdict.cls.word} for of, verdict in report.libraries],
        "unread": list(report.unread),
        "machine": facts.machine,
    }


def _fields(body: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("Program", body["program"]), ("Class", body["class"]), ("Works", "yes" if body["works"] else "no")]
    rows += [("Because", reason) for reason in body["reasons"]]
    rows.append(("Next", body["next"]))
    if body["unsupported"]:
        names = shown(body["unsupported"])
        rows.append(("Unsupported", f"{names}: answer CUDA_ERROR_NOT_SUPPORTED when called"))
    if body["unknown"]:
        rows.append(("Unknown", f"{shown(body['unknown'])}: not of the driver API, and not in the guest's library"))
    if body["code"]:
        rows.append(("GPU code", ", ".join(body["code"])))
    if body["code"] and not any(word.startswith("PTX") for word in body["code"]):
        rows.append(("", "no PTX: runs only on cards of those kinds"))
    if body["damage"]:
        rows.append(("Damage", body["damage"]))
    if body["opens"]:
        rows.append(("Opens", ", ".join(body["opens"])))
    if body["search"]:
        rows.append(("Search path", ":".join(body["search"])))
    if body["machine"] != "X86_64":
        rows.append(("Machine", f"{body['machine']}: the guest's library is for X86_64"))
    return [*rows, *(("Unread", line) for line in body["unread"])]

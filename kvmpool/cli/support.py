"""`kvmpool support`: what of the CUDA driver API works in a guest."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import click

from kvmpool.cli.output import Row, column, output_option, print_rows
from kvmpool.compat.support import driver_api
from kvmpool.errors import NotFound

_COLUMNS = (
    column("SYMBOL", "symbol"),
    column("CUDA", "cuda"),
    column("STREAM", "per_thread", spare=True),
    column("SUPPORT", "support"),
    column("TRAVELS", "travels", spare=True),
)


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--class", "kind", type=click.Choice(["supported", "local", "unsupported"]), help="Only this class.")
@click.option("--cuda", metavar="VERSION", help="Only what CUDA VERSION has, for example 12.4.")
@output_option
def support(names: tuple[str, ...], kind: str | None, cuda: str | None, output: str) -> None:
    """What of the CUDA driver API works in a guest.

    NAME: a part of a name, or a pattern such as 'cuGraph*'. Each exported form of a call (its ABI) has its own line,
    with the CUDA version that brought it. supported: reaches the card; local: answered in the guest; unsupported:
    answers CUDA_ERROR_NOT_SUPPORTED.
    """
    newest = _version(cuda) if cuda is not None else None
    rows: list[Row] = []
    for row in driver_api():
        if names and not any(_matches(pattern, row.symbols) for pattern in names):
            continue
        if (kind and row.support.value != kind) or (newest is not None and row.version > newest):
            continue
        rows.append(
            {
                "symbol": row.symbol,
                "name": row.name,
                "cuda": row.cuda,
                "per_thread": row.per_thread,
                "support": row.support.value,
                "travels": row.how,
            }
        )
    if names and not rows:
        raise NotFound(f"no name of the driver API matches {' or '.join(names)}. Next: kvmpool support")
    print_rows(rows, _COLUMNS, output, lambda row: str(row["symbol"]), "no such names")


def _matches(pattern: str, symbols: tuple[str, ...]) -> bool:
    low = pattern.lower()
    if any(letter in low for letter in "*?["):
        return any(fnmatchcase(symbol.lower(), low) for symbol in symbols)
    return any(low in symbol.lower() for symbol in symbols)


def _version(text: str) -> int:
    match = re.fullmatch(r"(\d{1,2})\.(\d)", text)
    if match is None:
        raise click.BadParameter(f"{text!r} is not a CUDA version such as 12.4", param_hint="--cuda")
    return int(match[1]) * 1000 + int(match[2]) * 10

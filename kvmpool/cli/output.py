"""How answers are printed: a table, JSON, YAML or names; in a terminal cut to its width and coloured, in a pipe plain.

Knows columns and rows, not what they mean.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click

Row = Mapping[str, Any]
F = TypeVar("F", bound=Callable[..., Any])

FORMATS = ("table", "json", "yaml", "name")

_COLOURS = {
    "healthy": "green",
    "ready": "green",
    "running": "green",
    "served": "green",
    "up": "green",
    "PASS": "green",
    "suspect": "yellow",
    "preparing": "yellow",
    "waiting": "yellow",
    "draining": "yellow",
    "probation": "yellow",
    "unknown": "yellow",
    "releasing": "yellow",
    "WARN": "yellow",
    "failed": "red",
    "quarantined": "red",
    "broken": "red",
    "lost": "red",
    "dead": "red",
    "down": "red",
    "FAIL": "red",
}


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column: its heading, and how a row's text is made. `flexible`: may be cut to fit a narrow terminal."""

    heading: str
    text: Callable[[Row], str]
    flexible: bool = False


def column(heading: str, key: str, *, flexible: bool = False) -> Column:
    """A column that shows one field as it is; `-` where it is absent or empty."""
    return Column(heading, lambda row: _plain(row.get(key)), flexible)


def output_option(function: F) -> F:
    """The `-o` option, the same on every command that lists or shows."""
    return click.option(
        "-o", "--output", type=click.Choice(FORMATS), default="table", show_default=True, help="How to print it."
    )(function)


def print_rows(
    rows: Sequence[Row], columns: Sequence[Column], output: str, name: Callable[[Row], str], empty: str
) -> None:
    """Print a list. `empty` is what a person reads (on stderr) where a table would have no row."""
    if output != "table":
        print_value(list(rows), output, lambda _: [name(row) for row in rows])
    elif not rows:
        click.echo(empty, err=True)
    else:
        for line in _table(rows, columns):
            click.echo(line)


def print_value(value: Any, output: str, names: Callable[[Any], Iterable[str]]) -> None:
    """Print one object as JSON, YAML or names."""
    if output == "json":
        click.echo(json.dumps(value, indent=2))
    elif output == "yaml":
        import yaml  # costs 20 ms that a table need not pay

        click.echo(yaml.safe_dump(value, sort_keys=False).rstrip())
    else:
        for line in names(value):
            click.echo(line)


def print_fields(fields: Sequence[tuple[str, str]]) -> None:
    """Print one object for a person: a field a line, values aligned."""
    width = max((len(name) for name, _ in fields), default=0)
    for name, text in fields:
        click.echo(f"{name + ':':<{width + 1}} {paint(text)}")


def paint(text: str, padded: str | None = None) -> str:
    """`text` (or its padded form) in its colour, where standard output is a terminal and NO_COLOR is unset."""
    shown = text if padded is None else padded
    colour = _COLOURS.get(text)
    if colour is None or "NO_COLOR" in os.environ or not sys.stdout.isatty():
        return shown
    return click.style(shown, fg=colour)


def mib(value: int | None) -> str:
    """A size for people: GiB where it is whole or large, MiB otherwise."""
    if value is None:
        return "-"
    if value >= 1024:
        return f"{value / 1024:.1f}GiB" if value % 1024 else f"{value // 1024}GiB"
    return f"{value}MiB"


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> list[str]:
    cells = [[c.text(row) for c in columns] for row in rows]
    widths = [max(len(c.heading), *(len(line[i]) for line in cells)) for i, c in enumerate(columns)]
    _fit(widths, columns)
    lines = ["  ".join(c.heading.ljust(w) for c, w in zip(columns, widths, strict=True)).rstrip()]
    for line in cells:
        shown = [_cut(text, w, last=i == len(widths) - 1) for i, (text, w) in enumerate(zip(line, widths, strict=True))]
        lines.append("  ".join(paint(p.rstrip(), p) for p in shown).rstrip())
    return lines


def _fit(widths: list[int], columns: Sequence[Column]) -> None:
    """Shrink the flexible columns so that a row fits the terminal; in a pipe nothing is ever cut."""
    if not sys.stdout.isatty():
        return
    try:
        room = os.get_terminal_size(sys.stdout.fileno()).columns
    except OSError:
        room = 80
    over = sum(widths) + 2 * (len(widths) - 1) - room
    for i, c in enumerate(columns):
        if over > 0 and c.flexible:
            new = max(8, widths[i] - over)
            over -= widths[i] - new
            widths[i] = new


def _cut(text: str, width: int, *, last: bool) -> str:
    if len(text) > width:
        return text[: width - 1] + "…"
    return text if last else text.ljust(width)


def _plain(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ",".join(str(v) for v in value) or "-"
    return str(value)

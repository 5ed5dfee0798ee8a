"""How answers are printed: a table, JSON, YAML or names; fitted and coloured in a terminal, plain in a pipe.

In a pipe a row is one line with every column in full. In a terminal that is too narrow for that, sentences go below
their row, columns that can be spared are left out, and the rest is cut. Knows columns and rows, not what they mean.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click

Row = Mapping[str, Any]
F = TypeVar("F", bound=Callable[..., Any])

FORMATS = ("table", "json", "yaml", "name")
_CUT_TO = 8  # narrower than this a word says nothing
_MARGIN = 4

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
    """A table's column: its heading, how a row's text is made, and what becomes of it in a narrow terminal.

    `note`: a sentence, goes below its row. `spare`: is left out. `flexible`: is cut.
    """

    heading: str
    text: Callable[[Row], str]
    flexible: bool = False
    spare: bool = False
    note: bool = False


def column(heading: str, key: str, *, flexible: bool = False, spare: bool = False, note: bool = False) -> Column:
    """A column that shows one field as it is; `-` where it is absent or empty."""
    return Column(heading, lambda row: _plain(row.get(key)), flexible, spare, note)


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
    """Print one object for a person: a field a line, values aligned; in a terminal wrapped under each other."""
    width = max((len(name) for name, _ in fields), default=0) + 2
    for name, text in fields:
        head = f"{name + ':':<{width}}"
        [line, *more] = wrapped(head + text, width)
        click.echo(f"{head}{paint(line[width:])}".rstrip())
        for line in more:
            click.echo(line)


def wrapped(text: str, margin: int) -> list[str]:
    """`text` as lines that fit the terminal, all but the first moved in by `margin`; one line in a pipe.

    A word that fits no line, a long path, leaves all as it is: broken by us it could not be copied.
    """
    room, text = _room(), _clean(text)
    longest = max((len(word) for word in text.split()), default=0)
    if not room or len(text) <= room or longest > room - margin:
        return [text]
    return textwrap.wrap(text, room, subsequent_indent=" " * margin, replace_whitespace=False, break_on_hyphens=False)


def paint(text: str, padded: str | None = None) -> str:
    """`text` (or its padded form) in its colour, where standard output is a terminal and NO_COLOR is unset."""
    shown = text if padded is None else padded
    colour = _COLOURS.get(text)
    if colour is None or os.environ.get("NO_COLOR") or not sys.stdout.isatty():  # no-color.org: set and not empty
        return shown
    return click.style(shown, fg=colour)


def mib(value: int) -> str:
    """A size for people: GiB where it is whole or large, MiB otherwise."""
    if value >= 1024:
        return f"{value / 1024:.1f}GiB" if value % 1024 else f"{value // 1024}GiB"
    return f"{value}MiB"


def compute(body: Mapping[str, Any]) -> str:
    """What a claim or a binding may use of a card's compute, in words."""
    share = f"{body['compute_percent']} %" if body["compute_percent"] else "best effort"
    return share + (f", at most {body['compute_limit_percent']} %" if body["compute_limit_percent"] < 100 else "")


def memory(body: Mapping[str, Any]) -> str:
    """Likewise of memory; "-" for a passthrough claim, which gets a whole card, whatever that has."""
    if not body["memory_mib"]:
        return "-"
    more = body["memory_limit_mib"] > body["memory_mib"]
    return mib(body["memory_mib"]) + (f", at most {mib(body['memory_limit_mib'])}" if more else "")


def age(seconds: float) -> str:
    """A time that has passed, in the two largest units that say something."""
    days, rest = divmod(int(seconds), 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> list[str]:
    room = _room()
    columns, below = _fitted(rows, columns, room)
    cells = [[_clean(c.text(row)) for c in columns] for row in rows]
    widths = [max(len(c.heading), *(len(line[i]) for line in cells)) for i, c in enumerate(columns)]
    if room:
        _squeeze(widths, columns, room)
    lines = ["  ".join(c.heading.ljust(w) for c, w in zip(columns, widths, strict=True)).rstrip()]
    for row, line in zip(rows, cells, strict=True):
        shown = [_cut(text, w) for text, w in zip(line, widths, strict=True)]
        lines.append("  ".join(paint(text, cut) for text, cut in zip(line, shown, strict=True)).rstrip())
        for note in (c.text(row) for c in below):
            if note != "-":
                lines += wrapped(" " * _MARGIN + note, _MARGIN)
    return lines


def _fitted(rows: Sequence[Row], columns: Sequence[Column], room: int) -> tuple[list[Column], list[Column]]:
    """The columns that stay in the rows, and those that go below them. `room` 0: a pipe, all stay."""
    kept = list(columns)
    if not room:
        return kept, []
    kept = [c for c in kept if not c.note or any(c.text(row) != "-" for row in rows)]
    if _wide(rows, kept) <= room:
        return kept, []
    below = [c for c in kept if c.note]
    kept = [c for c in kept if not c.note]
    for spared in [c for c in reversed(kept) if c.spare]:
        if _wide(rows, kept) > room:
            kept.remove(spared)
    return kept, below


def _wide(rows: Sequence[Row], columns: Sequence[Column]) -> int:
    widths = [max(len(c.heading), *(len(c.text(row)) for row in rows)) for c in columns]
    return sum(widths) + 2 * (len(widths) - 1)


def _squeeze(widths: list[int], columns: Sequence[Column], room: int) -> None:
    """Take from the flexible columns what is too much for the terminal."""
    over = sum(widths) + 2 * (len(widths) - 1) - room
    for i, c in enumerate(columns):
        if over > 0 and c.flexible:
            new = min(widths[i], max(_CUT_TO, widths[i] - over))
            over -= widths[i] - new
            widths[i] = new


def _room() -> int:
    """The terminal's columns; 0 where standard output is none."""
    if not sys.stdout.isatty():
        return 0
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _cut(text: str, width: int) -> str:
    return text[: width - 1] + "…" if len(text) > width else text.ljust(width)


def _clean(text: str) -> str:
    """Nothing that a card, a guest or a domain is called may steer the terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def _plain(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ",".join(str(v) for v in value) or "-"
    return str(value)

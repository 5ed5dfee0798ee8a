"""Shell completion with live names: asks kvmpoold with a short deadline and stays silent when it does not answer."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from kvmpool.api.client import Client
from kvmpool.errors import KvmpoolError

_DEADLINE_S = 0.5  # a TAB that takes longer is worse than no answer


def _names(path: str, key: str, help_key: str, start: str) -> list[CompletionItem]:
    try:
        rows = Client(deadline_s=_DEADLINE_S).get(path)
    except KvmpoolError:
        return []
    items = {str(row[key]): str(row[help_key]) for row in rows if str(row[key]).startswith(start)}
    return [CompletionItem(name, help=text) for name, text in items.items()]


def cards(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _names("/cards", "label", "model", incomplete) or _names("/cards", "id", "label", incomplete)


def claims(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _names("/claims", "label", "state", incomplete)


def domains(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _names("/domains", "name", "state", incomplete)


def bindings(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _names("/bindings", "label", "phase", incomplete)

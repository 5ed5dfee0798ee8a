"""Shell completion with live names: asks kvmpoold with a short deadline and stays silent when it does not answer."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from kvmpool.api.client import Client
from kvmpool.errors import KvmpoolError

_DEADLINE_S = 0.5  # a TAB that takes longer is worse than no answer


def cards(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """By host/address; by uuid where that is what was begun."""
    by_label = _names(ctx, "/cards", "label", "model", incomplete)
    return by_label or _names(ctx, "/cards", "id", "label", incomplete)


def claims(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _names(ctx, "/claims", "label", "state", incomplete)


def domains(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _names(ctx, "/domains", "name", "state", incomplete)


def bindings(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _names(ctx, "/bindings", "label", "phase", incomplete)


def claims_of_domain(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of claims of the DOMAIN that stands before."""
    domain = ctx.params.get("domain") or next(iter(ctx.args), "")  # not parsed yet while an option waits for its value
    items = _names(ctx, "/claims", "label", "state", f"{domain}/{incomplete}")
    return [CompletionItem(str(item.value).rpartition("/")[2], help=item.help) for item in items]


def _names(ctx: click.Context, path: str, key: str, help_key: str, start: str) -> list[CompletionItem]:
    try:
        rows = Client(ctx.find_root().params.get("socket"), deadline_s=_DEADLINE_S).get(path)
    except KvmpoolError:
        return []
    items = {str(row[key]): str(row[help_key]) for row in rows if str(row[key]).startswith(start)}
    return [CompletionItem(name, help=text) for name, text in items.items()]

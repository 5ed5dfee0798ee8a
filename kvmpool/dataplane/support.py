"""Says of every name of the CUDA driver API what kvmpool's guest library does with it. Made from calls.toml.

What a name's CUDA version is comes in from outside: calls.toml knows the versions of what it supports only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from kvmpool.dataplane.calltable import Call, Class, Symbol, Table, base_name

_STREAMS = ("_ptds", "_ptsz")


class Support(Enum):
    """SUPPORTED: it reaches the card. LOCAL: the guest's library answers it alone. UNSUPPORTED: NOT_SUPPORTED (801)."""

    SUPPORTED = "supported"
    LOCAL = "local"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class ApiName:
    """One exported symbol, with its form for the per-thread default stream where that is treated alike."""

    symbol: str
    name: str  # as asked of cuGetProcAddress
    version: int  # of CUDA, 11040 is 11.4; 0: not known
    support: Support
    how: str = ""  # async, sync, blocking: how it travels; "" where it does not
    per_thread: str = ""  # "_ptds" or "_ptsz"

    @property
    def cuda(self) -> str:
        return f"{self.version // 1000}.{self.version % 1000 // 10}" if self.version else "-"

    @property
    def symbols(self) -> tuple[str, ...]:
        return (self.symbol, self.symbol + self.per_thread) if self.per_thread else (self.symbol,)


def api_names(table: Table, versions: Mapping[str, int]) -> tuple[ApiName, ...]:
    """Every name of the table, sorted. `versions`: symbol -> CUDA version, for those that calls.toml has none of."""
    found = {row.symbol: row for row in _rows(table, versions)}
    for symbol, row in list(found.items()):
        plain = found.get(symbol[:-5]) if symbol.endswith(_STREAMS) else None
        if plain is not None and (plain.support, plain.how, plain.per_thread) == (row.support, row.how, ""):
            found[plain.symbol] = ApiName(
                plain.symbol, plain.name, plain.version, plain.support, plain.how, symbol[-5:]
            )
            del found[symbol]
    return tuple(sorted(found.values(), key=lambda row: (row.symbol.lower(), row.symbol)))


def _rows(table: Table, versions: Mapping[str, int]) -> Iterator[ApiName]:
    ways = {entry.name: entry.cls for entry in table.wire()}
    calls = {call.name: call for call in table.calls}
    for call in table.calls:
        way = _way(call, calls, ways)
        for symbol in call.symbols:
            support = Support.LOCAL if way is None else Support.SUPPORTED
            yield ApiName(symbol.name, symbol.base, symbol.version, support, way.value if way else "")
    for name in table.unsupported:
        symbol = Symbol(name, versions.get(name, 0))
        yield ApiName(name, base_name(name), symbol.version, Support.UNSUPPORTED)


def _way(call: Call, calls: Mapping[str, Call], ways: Mapping[str, Class]) -> Class | None:
    """How it reaches the card; None where it does not."""
    if call.cls is Class.FORWARD:
        return _way(calls[call.target], calls, ways)
    return ways.get(call.via or call.name)


def markdown(names: tuple[ApiName, ...]) -> str:
    """docs/support.md."""
    counts = {kind: sum(len(row.symbols) for row in names if row.support is kind) for kind in Support}
    lines = [
        "# What of the CUDA driver API works",
        "",
        "Made by `python -m kvmpool.compat.support > docs/support.md`; `kvmpool support` prints the same table, and",
        "`kvmpool compat PROGRAM` looks up what a program needs of it.",
        "",
        f"* **supported** ({counts[Support.SUPPORTED]} symbols): reaches the card. *async*: sent and not waited for;",
        "  *sync*: one round trip; *blocking*: likewise, and other threads go on.",
        f"* **local** ({counts[Support.LOCAL]} symbols): answered in the guest, without a round trip.",
        f"* **unsupported** ({counts[Support.UNSUPPORTED]} symbols): answers `CUDA_ERROR_NOT_SUPPORTED` (801).",
        "  The name is always there, so a program that only looks it up goes on.",
        "",
        "CUDA: the version that brought this form of the call. Stream: its form for the per-thread default stream,",
        "which is treated alike.",
        "",
        "| Symbol | CUDA | Stream | Support | Travels |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.symbol} | {row.cuda} | {row.per_thread or '-'} | {row.support.value} | {row.how or '-'} |"
        for row in names
    ]
    return "\n".join(lines) + "\n"

"""Turns rows of core/model.py into keys and JSON bytes, and back, strictly.

    /host/<name>  /card/<card id>  /wish/card/<card id>  /claim/<uuid>/<name>  /attempt/<uuid>
    /binding/<uuid>/<claim>/<generation, 10 digits>  /counter  /breaker  /event/<boottime in us, 16 digits>-<digest>

A row is one JSON object with `"v": 1`. An unknown version, an unknown field, a wrong type or a row under a key that is
not its own is refused as a whole, in one line that names key and field; a missing field takes the model's default.
Within a host's boot event keys sort by time; over boots the order of events is that of their `mod_rev`.
This module does not know where the bytes are kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import types
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from kvmpool.core.model import (
    Attempt,
    Binding,
    Breaker,
    Card,
    CardId,
    CardWish,
    Claim,
    ClaimKey,
    DomainUuid,
    Event,
    Generation,
    Host,
    HostName,
    Rows,
    Unread,
)
from kvmpool.errors import Refused
from kvmpool.ports import Item

VERSION = 1
COUNTER_KEY = "/counter"
BREAKER_KEY = "/breaker"

_INT_MAX = 2**63 - 1  # what every backend and every reader's integers hold
_SHOWN_CHARS = 60  # of a wrong value, in a fault line


@dataclass(frozen=True, slots=True)
class Counter:
    """The pool-wide counters: the last generation, and the last place in the queue (or attempt), given out."""

    value: int = 0
    sequence: int = 0


Row = Host | Card | CardWish | Claim | Attempt | Binding | Counter | Breaker | Event

_KINDS: tuple[tuple[str, type[Row]], ...] = (
    ("/host/", Host),
    ("/card/", Card),
    ("/wish/card/", CardWish),
    ("/claim/", Claim),
    ("/attempt/", Attempt),
    ("/binding/", Binding),
    (COUNTER_KEY, Counter),
    (BREAKER_KEY, Breaker),
    ("/event/", Event),
)


def host_key(name: HostName) -> str:
    return f"/host/{name}"


def card_key(card: CardId) -> str:
    return f"/card/{card}"


def wish_key(card: CardId) -> str:
    return f"/wish/card/{card}"


def claim_key(claim: ClaimKey) -> str:
    return f"/claim/{claim.domain}/{claim.name}"


def attempt_key(domain: DomainUuid) -> str:
    return f"/attempt/{domain}"


def binding_key(claim: ClaimKey, generation: Generation) -> str:
    return f"/binding/{claim.domain}/{claim.name}/{generation:010d}"


def event_key(event: Event) -> str:
    """Equal events have one key: writing one twice (after an Ambiguous) is harmless."""
    digest = hashlib.sha256(_dump(event)).hexdigest()[:8]
    return f"/event/{int(event.at * 1e6):016d}-{digest}"


def key_of(row: Row) -> str:
    """The one key a row lives under."""
    match row:
        case Host():
            return host_key(row.name)
        case Card():
            return card_key(row.id)
        case CardWish():
            return wish_key(row.card)
        case Claim():
            return claim_key(row.key)
        case Attempt():
            return attempt_key(row.domain)
        case Binding():
            return binding_key(row.claim, row.generation)
        case Counter():
            return COUNTER_KEY
        case Breaker():
            return BREAKER_KEY
        case Event():
            return event_key(row)


def encode(row: Row) -> bytes:
    """Canonical: equal rows are equal bytes."""
    return _dump(row)


@lru_cache(maxsize=4096)  # rows are frozen, and most of a turn's are those of the turn before
def decode(key: str, value: bytes) -> Row:
    """The row under `key`. Raises Refused with one line naming key and field; raises nothing else."""
    try:
        row = _decode(key, value)
        own = key_of(row)
    except _Fault as fault:
        raise Refused(f"store row {key}: {fault}. Next: delete the row or upgrade kvmpool") from fault
    if own != key:
        raise Refused(f"store row {key}: its content belongs to {own}. Next: delete the row")
    return row


def rows_from(items: Iterable[Item], rev: int) -> tuple[Rows, tuple[str, ...]]:
    """What `list("/")` read at `rev`, as Rows, and one line for every row that was refused.

    A refused row has no entry in `Rows.revisions`: a commit that takes it for absent conflicts, never overwrites it.
    Events and keys of no known kind are left out without a word. Never raises.
    """
    rows = Rows(revision=rev)
    faults: list[str] = []
    refused_keys: list[str] = []
    single: dict[str, Row] = {}
    for item in sorted(items, key=lambda item: item.key):
        if _kind(item.key) in (None, Event):
            continue
        try:
            row = decode(item.key, item.value)
        except Refused as refused:
            faults.append(str(refused))
            refused_keys.append(item.key)
            continue
        rows.revisions[item.key] = item.mod_rev
        if isinstance(row, Counter | Breaker):
            single[item.key] = row
        else:
            _file(rows, row)
    counter = cast(Counter, single.get(COUNTER_KEY, Counter()))
    breaker = cast(Breaker, single.get(BREAKER_KEY, Breaker()))
    full = Rows(
        revision=rev,
        hosts=rows.hosts,
        cards=rows.cards,
        wishes=rows.wishes,
        claims=rows.claims,
        attempts=rows.attempts,
        bindings=rows.bindings,
        breaker=breaker,
        counter=counter.value,
        sequence=counter.sequence,
        revisions=rows.revisions,
        unread=_unread(refused_keys),
    )
    return full, tuple(faults)


def _unread(keys: list[str]) -> Unread:
    """What the refused rows are about, by their keys alone. A key of no valid form is about nothing."""
    parts = [key.split("/")[1:] for key in keys]
    bindings = [(p[1], p[2], p[3]) for p in parts if p[0] == "binding" and len(p) == 4 and p[3].isdigit()]
    return Unread(
        hosts=frozenset(HostName(p[1]) for p in parts if p[0] == "host" and len(p) == 2),
        cards=frozenset(CardId(p[1]) for p in parts if p[0] == "card" and len(p) == 2),
        wishes=frozenset(CardId(p[2]) for p in parts if p[:2] == ["wish", "card"] and len(p) == 3),
        claims=frozenset(ClaimKey(DomainUuid(p[1]), p[2]) for p in parts if p[0] == "claim" and len(p) == 3),
        attempts=frozenset(DomainUuid(p[1]) for p in parts if p[0] == "attempt" and len(p) == 2),
        bindings=frozenset((ClaimKey(DomainUuid(uuid), name), Generation(int(n))) for uuid, name, n in bindings),
        counter=COUNTER_KEY in keys,
        breaker=BREAKER_KEY in keys,
    )


def _file(rows: Rows, row: Row) -> None:
    match row:
        case Host():
            rows.hosts[row.name] = row
        case Card():
            rows.cards[row.id] = row
        case CardWish():
            rows.wishes[row.card] = row
        case Claim():
            rows.claims[row.key] = row
        case Attempt():
            rows.attempts[row.domain] = row
        case Binding():
            rows.bindings[(row.claim, row.generation)] = row
        case Counter() | Breaker() | Event():
            pass


def _kind(key: str) -> type[Row] | None:
    for prefix, kind in _KINDS:
        if key == prefix or (prefix.endswith("/") and key.startswith(prefix)):
            return kind
    return None


# --- values to JSON ---------------------------------------------------------------------------------------------------


def _dump(row: Row) -> bytes:
    plain = {"v": VERSION, **_plain(row)}
    return json.dumps(plain, allow_nan=False, separators=(",", ":")).encode("ascii")


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value


# --- JSON to values ---------------------------------------------------------------------------------------------------


class _Fault(Exception):
    """A sentence about one field."""


def _decode(key: str, value: bytes) -> Row:
    kind = _kind(key)
    if kind is None:
        raise _Fault("no row has such a key")
    try:
        plain = json.loads(value.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _Fault(f"not JSON ({str(error)[:_SHOWN_CHARS]})") from error
    if not isinstance(plain, dict):
        raise _Fault("not a JSON object")
    version = plain.pop("v", None)
    if type(version) is not int or version != VERSION:
        raise _Fault(f"field v: version {_shown(version)} is unknown (known: {VERSION})")
    return cast(Row, _read_object(kind, plain, ""))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    if len(plain) != len(pairs):
        raise ValueError("a field twice")
    return plain


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _read_object(kind: Any, plain: Any, where: str) -> Any:
    if not isinstance(plain, dict):
        raise _Fault(f"field {where}: {_shown(plain)} is not an object")
    prefix = f"{where}." if where else ""
    types_of = _fields_of(kind)
    unknown = sorted(set(plain) - set(types_of))
    if unknown:
        raise _Fault(f"field {_shown(prefix + unknown[0])} is unknown")
    values = {}
    for name, (hint, has_default) in types_of.items():
        if name in plain:
            values[name] = _read(hint, plain[name], prefix + name)
        elif not has_default:
            raise _Fault(f"field {prefix}{name} is missing")
    return kind(**values)


@lru_cache(maxsize=64)
def _fields_of(kind: Any) -> dict[str, tuple[Any, bool]]:
    hints = get_type_hints(kind)
    return {
        each.name: (hints[each.name], each.default is not MISSING or each.default_factory is not MISSING)
        for each in fields(kind)
    }


def _read(hint: Any, plain: Any, where: str) -> Any:
    hint = getattr(hint, "__supertype__", hint)  # a NewType is what it is made of
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        (some,) = (each for each in get_args(hint) if each is not type(None))
        return None if plain is None else _read(some, plain, where)
    if origin is tuple:
        return _read_tuple(get_args(hint), plain, where)
    if is_dataclass(hint):
        return _read_object(hint, plain, where)
    if issubclass(hint, Enum):
        return _read_enum(hint, plain, where)
    return _read_scalar(hint, plain, where)


def _read_tuple(args: tuple[Any, ...], plain: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(plain, list):
        raise _Fault(f"field {where}: {_shown(plain)} is not a list")
    if args[-1] is Ellipsis:
        return tuple(_read(args[0], each, f"{where}[{index}]") for index, each in enumerate(plain))
    if len(plain) != len(args):
        raise _Fault(f"field {where}: {len(plain)} values instead of {len(args)}")
    return tuple(_read(arg, each, f"{where}[{n}]") for n, (arg, each) in enumerate(zip(args, plain, strict=True)))


def _read_enum(kind: type[Enum], plain: Any, where: str) -> Enum:
    for member in kind:
        if type(plain) is str and member.value == plain:
            return member
    allowed = ", ".join(str(member.value) for member in kind)
    raise _Fault(f"field {where}: {_shown(plain)} is not one of {allowed}")


def _read_scalar(kind: type[Any], plain: Any, where: str) -> Any:
    if kind is float and type(plain) in (int, float):
        if type(plain) is int and abs(plain) > _INT_MAX:
            raise _Fault(f"field {where}: {_shown(plain)} is out of range")
        if not math.isfinite(plain):
            raise _Fault(f"field {where}: {_shown(plain)} is not finite")
        return float(plain)
    if type(plain) is not kind:
        raise _Fault(f"field {where}: {_shown(plain)} is not of type {kind.__name__}")
    if kind is int and abs(plain) > _INT_MAX:
        raise _Fault(f"field {where}: {_shown(plain)} is out of range")
    return plain


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."

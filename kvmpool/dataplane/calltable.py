"""Reads calls.toml into values that cannot be wrong. Knows nothing of the C that is made from them.

Runs at build time with nothing but the standard library, so it imports nothing of kvmpool.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

_SUFFIXES = ("_ptsz", "_ptds")
_PER_THREAD_VERSION = 7000


class TableInvalid(Exception):
    """calls.toml cannot be used; names the entry and what is allowed."""


class Class(Enum):
    LOCAL = "local"
    ASYNC = "async"
    SYNC = "sync"
    BLOCKING = "blocking"
    FORWARD = "as"


class Kind(Enum):
    VALUE = "value"
    DEVICE = "device"
    USE = "use"
    NEW = "new"
    DEL = "del"
    OUT = "out"
    OUT_OPTIONAL = "out?"
    TEXT = "text"


OBJECTS = ("context", "module", "function", "stream", "event", "library", "kernel", "link", "graph", "exec")


@dataclass(frozen=True, slots=True)
class Arg:
    """One parameter: `type` is C's, without the name ("CUstream *")."""

    name: str
    type: str
    kind: Kind = Kind.VALUE
    object: str = ""
    shape: tuple[str, ...] = field(default=(), repr=False)  # of DEVICE: element bytes, elements[, rows, pitch]

    @property
    def pointee(self) -> str:
        return self.type.removesuffix("*").strip()

    @property
    def declaration(self) -> str:
        return self.type + ("" if self.type.endswith("*") else " ") + self.name


@dataclass(frozen=True, slots=True)
class Symbol:
    """One exported name of a call and the CUDA version (11040 is 11.4) that brought it."""

    name: str
    version: int

    @property
    def per_thread(self) -> bool:
        return self.name.endswith(_SUFFIXES)

    @property
    def base(self) -> str:
        """What a program asks cuGetProcAddress for: without ABI version and stream suffix."""
        return base_name(self.name)


@dataclass(frozen=True, slots=True)
class Call:
    """An API function; `name` is its newest symbol with this signature."""

    name: str
    cls: Class
    args: tuple[Arg, ...]
    symbols: tuple[Symbol, ...]
    target: str = ""  # of Class.FORWARD
    worker_by_hand: bool = False
    needs_context: bool = True
    settles: bool = field(default=False, repr=False)  # of FORWARD
    unsafe: bool = field(default=False, repr=False)  # some captures forbid it
    via: str = field(default="", repr=False)  # how a LOCAL one reaches the card, if it does; no matter of the wire
    variable: bool = field(default=False, repr=False)  # its outs are the address and the bytes of a module's variable

    @property
    def sent(self) -> bool:
        return self.cls in (Class.ASYNC, Class.SYNC, Class.BLOCKING)

    def of(self, *kinds: Kind) -> tuple[Arg, ...]:
        return tuple(arg for arg in self.args if arg.kind in kinds)

    @property
    def numbers_in(self) -> tuple[Arg, ...]:
        return self.of(Kind.VALUE, Kind.DEVICE, Kind.USE, Kind.NEW, Kind.DEL)

    @property
    def outs(self) -> tuple[Arg, ...]:
        return self.of(Kind.OUT, Kind.OUT_OPTIONAL)

    @property
    def text(self) -> bool:
        return bool(self.of(Kind.TEXT))


@dataclass(frozen=True, slots=True)
class Op:
    """A frame between shim and session that is no single API function."""

    name: str
    cls: Class
    fields: tuple[str, ...]
    tail: str = ""  # "", "text" or "bytes"
    bulk: str = ""  # "", "in" or "out"
    needs_context: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    ops: tuple[Op, ...]
    calls: tuple[Call, ...]
    unsupported: tuple[str, ...]
    driver: tuple[tuple[str, tuple[str, ...]], ...]  # symbol, parameter types
    errors: tuple[tuple[int, str], ...]

    def wire(self) -> tuple[Op | Call, ...]:
        """All that has an op number, in the order of the numbers."""
        return (*self.ops, *(call for call in self.calls if call.sent))

    def capability_hash(self) -> bytes:
        """16 bytes that differ whenever two builds would read one frame differently."""
        text = "\n".join(f"{number} {entry!r}" for number, entry in enumerate(self.wire()))
        return hashlib.sha256(text.encode()).digest()[:16]


def base_name(symbol: str) -> str:
    for suffix in _SUFFIXES:
        symbol = symbol.removesuffix(suffix)
    return re.sub(r"_v\d+$", "", symbol)


def load(path: Path) -> Table:
    """Raises TableInvalid, naming the entry."""
    data = tomllib.loads(path.read_text())
    calls = tuple(_call(name, entry) for name, entry in data["call"].items())
    table = Table(
        ops=tuple(_op(name, entry) for name, entry in data["op"].items()),
        calls=calls,
        unsupported=tuple(data["unsupported"]["names"].split()),
        driver=tuple((name, tuple(types)) for name, types in data["driver"].items()),
        errors=tuple(sorted((int(code), name) for name, code in data["errors"].items())),
    )
    _check(table)
    return table


def _op(name: str, entry: dict[str, object]) -> Op:
    fields = entry.get("in", [])
    if not isinstance(fields, list) or not entry.get("why"):
        raise TableInvalid(f"op.{name}: needs `in`, a list, and `why` no generated call does")
    return Op(
        name,
        Class(str(entry["class"])),
        tuple(str(field) for field in fields),
        str(entry.get("tail", "")),
        str(entry.get("bulk", "")),
        bool(entry.get("context", True)),
    )


def _call(name: str, entry: dict[str, object]) -> Call:
    args, abi = entry["args"], entry["abi"]
    if not isinstance(args, list) or not isinstance(abi, dict):
        raise TableInvalid(f"call.{name}: args is a list, abi a table of symbol = version")
    cls, _, target = str(entry["class"]).partition(" ")
    return Call(
        name,
        Class(cls),
        tuple(_arg(name, str(text)) for text in args),
        tuple(Symbol(str(symbol), int(version)) for symbol, version in abi.items()),
        target,
        entry.get("worker") == "hand",
        bool(entry.get("context", True)),
        bool(entry.get("settles", False)),
        bool(entry.get("unsafe", False)),
        str(entry.get("via", "")),
        bool(entry.get("variable", False)),
    )


def _arg(call: str, text: str) -> Arg:
    declaration, _, kind = (part.strip() for part in text.partition(" : "))
    match = re.fullmatch(r"(.*?[\s*])(\w+)", declaration)
    word, _, thing = kind.partition(" ")
    if match is not None and word == "device":
        shape = tuple(thing.split())
        if len(shape) not in (2, 4):
            raise TableInvalid(f"call.{call}: {text!r}: a device address has element bytes, elements[, rows, pitch]")
        return Arg(match[2], match[1].strip(), Kind.DEVICE, shape=shape)
    if match is None or (thing and thing not in OBJECTS):
        raise TableInvalid(f"call.{call}: {text!r} is not 'type name : kind'; objects are {', '.join(OBJECTS)}")
    return Arg(match[2], match[1].strip(), Kind(word or "value"), thing)


def _check(table: Table) -> None:
    names = [symbol.name for call in table.calls for symbol in call.symbols] + list(table.unsupported)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise TableInvalid(f"listed twice: {', '.join(twice)}")
    known = {call.name: call for call in table.calls}
    wire = {entry.name for entry in table.wire()}
    for call in table.calls:
        if call.cls is Class.FORWARD and call.target not in known:
            raise TableInvalid(f"call.{call.name}: forwards to {call.target}, which is no call")
        if call.via and (call.cls is not Class.LOCAL or call.via not in wire):
            raise TableInvalid(f"call.{call.name}: via is of a local call, and names an op or a call that is sent")
        if call.settles and call.cls is not Class.FORWARD:
            raise TableInvalid(f"call.{call.name}: settles is of a call that names no stream")
        if call.cls is Class.ASYNC and call.outs:
            raise TableInvalid(f"call.{call.name}: is async, so nothing can come out")
        if call.sent and call.name not in {symbol.name for symbol in call.symbols}:
            raise TableInvalid(f"call.{call.name}: its own name is missing from abi")

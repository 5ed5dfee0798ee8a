"""What a PTX text says, as values: the parser builds these, the translator reads them.

Names are kept as written (`%r1`, `$L__BB0_2`). Nothing here knows about C.
"""

from __future__ import annotations

from dataclasses import dataclass, field


class PtxError(Exception):
    """The text does not parse, or asks for something that is not supported. `line` counts from 1."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")
        self.line = line


@dataclass(frozen=True, slots=True)
class Imm:
    """A number. `kind` is i (value is the integer), f or d (value is the bit pattern of an f32 or f64)."""

    value: int
    kind: str = "i"


@dataclass(frozen=True, slots=True)
class Name:
    """A register, special register, variable, parameter, function or label; `part` is x, y, z or w after a dot."""

    name: str
    part: str = ""
    negated: bool = False
    offset: int = 0  # of `symbol+4`


@dataclass(frozen=True, slots=True)
class Addr:
    """`[base+offset]`; base None is an absolute address."""

    base: Name | None
    offset: int


@dataclass(frozen=True, slots=True)
class Vec:
    """`{a, b}`."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """`(a, b)` of a call."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """`a|b`: a destination and a second, predicate destination."""

    first: Operand
    second: Operand


Operand = Imm | Name | Addr | Vec | Group | Pair


@dataclass(frozen=True, slots=True)
class Instr:
    line: int
    op: str
    mods: tuple[str, ...]
    args: tuple[Operand, ...]
    guard: Name | None = None

    @property
    def text(self) -> str:
        return ".".join((self.op, *self.mods))


@dataclass(frozen=True, slots=True)
class Label:
    line: int
    name: str


@dataclass(frozen=True, slots=True)
class RegDecl:
    """`.reg .b32 %r<5>` declares %r0..%r4 (count 5); without brackets count is None."""

    line: int
    type: str
    name: str
    count: int | None
    vector: int = 1


@dataclass(frozen=True, slots=True)
class Init:
    """One element of an initialiser: a number, or the address of a symbol."""

    value: Imm | Name


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable or parameter. `size` is in bytes, 0 for `name[]`."""

    line: int
    space: str  # global const shared local param reg
    type: str
    name: str
    size: int
    align: int
    init: tuple[Init, ...] = ()
    linkage: str = ""


@dataclass(slots=True)
class Block:
    """`{ ... }`: a scope of its own for registers, parameters and labels."""

    items: list[Item] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Targets:
    """`name: .branchtargets a, b;`."""

    line: int
    name: str
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prototype:
    """`name: .callprototype (ret) _ (params);`."""

    line: int
    name: str
    params: int
    returns: int


Item = Instr | Label | RegDecl | Variable | Block | Targets | Prototype


@dataclass(slots=True)
class Function:
    line: int
    name: str
    entry: bool
    returns: list[Variable]
    params: list[Variable]
    body: Block | None
    linkage: str = ""
    max_threads: int = 0  # of .maxntid / .reqntid; 0: none given


@dataclass(slots=True)
class Module:
    version: str = ""
    target: int = 0  # 75 of sm_75
    variables: list[Variable] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)

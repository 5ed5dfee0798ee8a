"""Gives every function and variable of one or more PTX modules its place: C names, offsets, who calls whom.

Layout: variables of .global and .const share one block. Shared variables of module scope or of device functions
lie at the same offset for every kernel; those declared inside a kernel follow, so kernels overlap each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvmpool.softgpu.ptx_tree import (
    Addr,
    Block,
    Function,
    Group,
    Instr,
    Label,
    Module,
    Name,
    Operand,
    Pair,
    PtxError,
    Variable,
    Vec,
)

# Functions of CUDA's device runtime that the engine has itself.
BUILTINS = {"vprintf", "malloc", "free", "__assertfail"}

_COLLECTIVE = {"bar", "barrier", "shfl", "vote", "match", "redux", "activemask", "elect"}
_SPIN_MODS = {"volatile", "acquire", "relaxed"}


@dataclass(frozen=True, slots=True)
class Symbol:
    """`kind`: memory (global or const), shared, dynamic, function, builtin. `offset` for memory and shared."""

    kind: str
    cname: str
    offset: int = 0
    size: int = 0


@dataclass(slots=True)
class Routine:
    """A function with a body, and what the whole program needs to know of it."""

    function: Function
    unit: int
    cname: str
    target: int
    shared: dict[str, Symbol] = field(default_factory=dict)
    callees: set[str] = field(default_factory=set)  # cnames
    indirect: bool = False
    fibers: bool = False
    yields: bool = False  # its memory polls give way to the other threads
    shared_bytes: int = 0
    local_bytes: int = 0
    param_bytes: int = 0
    registers: int = 0


@dataclass(slots=True)
class Program:
    symbols: list[dict[str, Symbol]]  # one a unit
    routines: list[Routine]
    variables: list[tuple[int, Variable, Symbol]]  # unit, variable, where
    memory_bytes: int
    const_bytes: int
    target: int


def link(modules: list[Module]) -> Program:
    """Raises PtxError for a name defined twice or nowhere."""
    layout = _Layout()
    tables: list[dict[str, Symbol]] = [{} for _ in modules]
    exported: dict[str, Symbol] = {}
    routines: list[Routine] = []
    for unit, module in enumerate(modules):
        _place_variables(layout, module, unit, tables[unit], exported)
        routines += _place_functions(module, unit, tables[unit], exported)
    for unit, module in enumerate(modules):
        _resolve_externs(module, tables[unit], exported)
    _place_local_shared(layout, routines)
    _close_over_calls(routines, tables, layout.common_shared)
    return Program(
        tables, routines, layout.variables, layout.memory, layout.const, max(module.target for module in modules)
    )


@dataclass(slots=True)
class _Layout:
    memory: int = 0
    const: int = 0
    common_shared: int = 0
    variables: list[tuple[int, Variable, Symbol]] = field(default_factory=list)


def align_up(value: int, align: int) -> int:
    return (value + align - 1) // max(align, 1) * max(align, 1)


def c_name(name: str, prefix: str) -> str:
    return prefix + name.replace("%", "_").replace("$", "_S")


def _place_variables(
    layout: _Layout, module: Module, unit: int, table: dict[str, Symbol], exported: dict[str, Symbol]
) -> None:
    for variable in module.variables:
        symbol = _place_variable(layout, variable, unit, exported)
        if symbol is None:
            continue
        table[variable.name] = symbol
        if variable.linkage in ("visible", "weak", "common"):
            exported.setdefault(variable.name, symbol)


def _place_variable(layout: _Layout, variable: Variable, unit: int, exported: dict[str, Symbol]) -> Symbol | None:
    cname = c_name(variable.name, f"g{unit}_")
    if variable.space == "shared":
        if variable.linkage == "extern":
            return Symbol("dynamic", cname)
        layout.common_shared = align_up(layout.common_shared, variable.align)
        symbol = Symbol("shared", cname, layout.common_shared, variable.size)
        layout.common_shared += variable.size
        return symbol
    if variable.linkage == "extern":
        return None
    if variable.space not in ("global", "const"):
        raise PtxError(variable.line, f"variables in .{variable.space} are not supported at module scope")
    if variable.linkage in ("weak", "common") and variable.name in exported:
        return exported[variable.name]
    layout.memory = align_up(layout.memory, max(variable.align, 16 if variable.size >= 16 else 1))
    symbol = Symbol("memory", cname, layout.memory, variable.size)
    layout.memory += variable.size
    layout.const += variable.size if variable.space == "const" else 0
    layout.variables.append((unit, variable, symbol))
    return symbol


def _place_functions(module: Module, unit: int, table: dict[str, Symbol], exported: dict[str, Symbol]) -> list[Routine]:
    routines: list[Routine] = []
    for function in module.functions:
        if function.body is None:
            continue
        if function.linkage == "weak" and function.name in exported:
            table[function.name] = exported[function.name]
            continue
        if function.name in table:
            raise PtxError(function.line, f"function {function.name} is defined twice")
        cname = c_name(function.name, f"f{unit}_")
        table[function.name] = Symbol("function", cname)
        if function.entry or function.linkage in ("visible", "weak"):
            exported.setdefault(function.name, table[function.name])
        routines.append(Routine(function, unit, cname, module.target))
    return routines


def _resolve_externs(module: Module, table: dict[str, Symbol], exported: dict[str, Symbol]) -> None:
    for alias, name in module.aliases.items():
        if name in table:
            table[alias] = table[name]
    names = [(f.name, f.line) for f in module.functions if f.body is None]
    names += [(v.name, v.line) for v in module.variables if v.linkage == "extern" and v.space != "shared"]
    for name, line in names:
        if name in table:
            continue
        if name in exported:
            table[name] = exported[name]
        elif name in BUILTINS:
            table[name] = Symbol("builtin", name)
        else:
            raise PtxError(line, f"{name} is declared but defined nowhere")


# -- inside functions ---------------------------------------------------------------------------------


def walk(block: Block) -> Iterator[object]:
    """Every item of the block and of the blocks inside it, in the order of the text."""
    for item in block.items:
        yield item
        if isinstance(item, Block):
            yield from walk(item)


def _place_local_shared(layout: _Layout, routines: list[Routine]) -> None:
    for routine in sorted(routines, key=lambda r: r.function.entry):
        at = layout.common_shared
        assert routine.function.body is not None
        for item in walk(routine.function.body):
            if isinstance(item, Variable) and item.space == "shared":
                at = align_up(at, item.align)
                routine.shared[item.name] = Symbol("shared", item.name, at, item.size)
                at += item.size
        routine.shared_bytes = at
        if not routine.function.entry:
            layout.common_shared = at


def _close_over_calls(routines: list[Routine], tables: list[dict[str, Symbol]], common: int) -> None:
    """Fills `callees`, `fibers` and `shared_bytes`: a function needs what any function it may call needs."""
    by_name = {routine.cname: routine for routine in routines}
    uses_common: set[str] = set()
    taken: set[str] = _addresses_in_initialisers(routines, tables)
    for routine in routines:
        taken |= _scan(routine, tables[routine.unit], uses_common)
    changed = True
    while changed:
        changed = False
        for routine in routines:
            reached = routine.callees | (taken if routine.indirect else set())
            fibers = routine.fibers or any(by_name[name].fibers for name in reached if name in by_name)
            common_too = routine.cname in uses_common or bool(reached & uses_common)
            changed |= fibers != routine.fibers or common_too != (routine.cname in uses_common)
            routine.fibers = fibers
            uses_common |= {routine.cname} if common_too else set()
    for routine in routines:
        own = bool(routine.shared)
        routine.shared_bytes = routine.shared_bytes if own else (common if routine.cname in uses_common else 0)


def _addresses_in_initialisers(routines: list[Routine], tables: list[dict[str, Symbol]]) -> set[str]:
    """Any function of a program with function addresses in its data may be called through a pointer."""
    return {symbol.cname for table in tables for symbol in table.values() if symbol.kind == "function"} - {
        routine.cname for routine in routines if routine.function.entry
    }


def _scan(routine: Routine, table: dict[str, Symbol], uses_common: set[str]) -> set[str]:
    """Reads the body once; returns the functions whose address it takes."""
    taken: set[str] = set()
    seen_labels: set[str] = set()
    spins = loops = False
    assert routine.function.body is not None
    for item in walk(routine.function.body):
        if isinstance(item, Label):
            seen_labels.add(item.name)
        if not isinstance(item, Instr):
            continue
        names = [operand.name for operand in _names(item.args)]
        symbols = [table[name] for name in names if name in table]
        functions = {symbol.cname for symbol in symbols if symbol.kind == "function"}
        if any(symbol.kind == "shared" for symbol in symbols) or names and set(names) & set(routine.shared):
            uses_common.add(routine.cname)
        if item.op == "call":
            routine.callees |= functions
            routine.indirect |= not any(symbol.kind in ("function", "builtin") for symbol in symbols)
        else:
            taken |= functions
        loops |= item.op in ("bra", "brx") and bool(seen_labels & set(names))
        spins |= _may_spin(item)
        routine.fibers |= item.op in _COLLECTIVE or (item.op == "exit" and not routine.function.entry)
        routine.fibers |= "volatile" in item.mods and not {"global", "local", "const", "param"} & set(item.mods)
    routine.yields = spins and loops
    routine.fibers |= routine.yields
    return taken


def _may_spin(item: Instr) -> bool:
    if item.op == "atom":
        return bool({"cas", "exch"} & set(item.mods))
    return item.op == "nanosleep" or (item.op == "ld" and bool(_SPIN_MODS & set(item.mods)))


def _names(operands: tuple[Operand, ...]) -> Iterator[Name]:
    for operand in operands:
        match operand:
            case Name():
                yield operand
            case Pair(first, second):
                yield from _names((first, second))
            case Vec(items) | Group(items):
                yield from _names(items)
            case Addr(Name() as base):
                yield base

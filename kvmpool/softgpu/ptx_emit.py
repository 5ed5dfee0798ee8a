"""Writes one PTX function as one C function: registers, scopes, labels, operands. The ops are in ptx_ops_*.

A register is a variable of its size: bits, except where it is only ever used as an f32 or f64 (found by a first pass),
because moving floats through integer registers costs a third of a kernel's time. Guards become `if`, labels stay
labels, `{}` scopes stay scopes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from kvmpool.softgpu.ptx_link import Program, Routine, Symbol, c_name
from kvmpool.softgpu.ptx_special import SPECIAL
from kvmpool.softgpu.ptx_tree import (
    Addr,
    Block,
    Imm,
    Instr,
    Label,
    Name,
    Operand,
    PtxError,
    RegDecl,
    Targets,
    Variable,
)
from kvmpool.softgpu.ptx_types import FLOATS, SIZES, STORAGE, VALUE, unsigned

MAX_REGISTERS = 65536

# What a handler runs into when an instruction has too few operands, or not the kind it should have.
_MALFORMED = (AssertionError, IndexError, KeyError, StopIteration, ValueError)


@dataclass(slots=True)
class Register:
    """`storage` is its C type; `type` as declared."""

    cname: str
    type: str
    storage: str
    used_as: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Scope:
    registers: dict[str, Register] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)  # .param and .local variables: their C expression
    labels: dict[str, str] = field(default_factory=dict)
    targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    ranges: dict[str, RegDecl] = field(default_factory=dict)


Handler = Callable[["Emitter", Instr], None]


@dataclass(frozen=True, slots=True)
class Op:
    handler: Handler
    mods: frozenset[str]


OPS: dict[str, Op] = {}


def op(names: str, mods: str) -> Callable[[Handler], Handler]:
    """Registers the handler of the ops `names`; a modifier that is not in `mods` is refused."""

    def register(handler: Handler) -> Handler:
        for name in names.split():
            OPS[name] = Op(handler, frozenset(mods.split()))
        return handler

    return register


class Emitter:
    """Emits one routine. `floats`: C names of bit registers that a first pass found to be floats only."""

    def __init__(self, program: Program, routine: Routine, floats: dict[str, str]) -> None:
        self.program = program
        self.routine = routine
        self.lines: list[str] = []
        self.registers: list[Register] = []
        self.local_bytes = 0
        self._floats = floats
        self._scopes: list[Scope] = []
        self._done_labels: set[str] = set()
        self._label_count = 0
        self._table: dict[str, Symbol] = program.symbols[routine.unit]

    # -- the whole function -----------------------------------------------------------------------

    def body(self) -> str:
        function = self.routine.function
        scope = Scope()
        self._scopes = [scope]
        offset = 0
        for index, param in enumerate(function.params):
            if function.entry:
                offset = -(-offset // param.align) * param.align
                scope.buffers[param.name] = f"(P + {offset})"
                offset += param.size
            elif param.space == "reg":
                self._register_param(param, f"p{index}")
            else:
                scope.buffers[param.name] = f"p{index}"
        for param in function.returns:
            if param.space == "reg":
                self._register_param(param, "")
            scope.buffers[param.name] = "ret"
        assert function.body is not None
        self._block(function.body)
        if not function.entry:
            self.leave()
        return "\n".join(self.lines)

    def _register_param(self, param: Variable, source: str) -> None:
        register = self._declare(param.name, param.type)
        if source:
            self.put(f"memcpy(&{register.cname}, {source}, {param.size});")

    def put(self, text: str) -> None:
        self.lines.append(text)

    def _block(self, block: Block) -> None:
        scope = Scope()
        self._scopes.append(scope)
        self.put("{")
        for item in block.items:
            if isinstance(item, Label):
                self._label_count += 1
                scope.labels[item.name] = f"L{self._label_count}"
            elif isinstance(item, Targets):
                scope.targets[item.name] = item.labels
        for item in block.items:
            self._item(item)
        self.put("}")
        self._scopes.pop()

    def _item(self, item: object) -> None:
        if isinstance(item, Instr):
            self._instruction(item)
        elif isinstance(item, Label):
            name = self._scopes[-1].labels[item.name]
            self._done_labels.add(name)
            self.put(f"{name}:;")
        elif isinstance(item, RegDecl):
            self._declare_all(item)
        elif isinstance(item, Block):
            self._block(item)
        elif isinstance(item, Variable):
            self._buffer(item)

    def _instruction(self, item: Instr) -> None:
        found = OPS.get(item.op)
        if found is None:
            raise self.unsupported(item)
        for mod in item.mods:
            if mod not in found.mods:
                raise self.unsupported(item)
        if item.guard is not None:
            self.put(f"if ({self.predicate(item.guard)}) {{")
        try:
            found.handler(self, item)
        except _MALFORMED as error:
            raise PtxError(item.line, f"the operands or modifiers of {item.text} are not those of {item.op}") from error
        if item.guard is not None:
            self.put("}")

    def unsupported(self, item: Instr) -> PtxError:
        return PtxError(item.line, f"{item.text} is not supported by the software GPU")

    # -- declarations -----------------------------------------------------------------------------

    def _declare_all(self, item: RegDecl) -> None:
        if item.vector != 1:
            for part in "xyzw"[: item.vector]:
                self._declare(f"{item.name}.{part}", item.type)
        elif item.count is None:
            self._declare(item.name, item.type)
        else:
            if item.count > MAX_REGISTERS:
                raise PtxError(item.line, f"more than {MAX_REGISTERS} registers in one declaration")
            self._scopes[-1].ranges[item.name] = item
            for index in range(item.count):
                self._declare(f"{item.name}{index}", item.type)

    def _declare(self, name: str, type_: str) -> Register:
        depth = len(self._scopes)
        cname = c_name(name.replace(".", "_"), f"r{depth}")
        storage = "uint8_t" if type_ == "pred" else VALUE[type_] if type_ in FLOATS else STORAGE[SIZES[type_]]
        register = Register(cname, type_, self._floats.get(cname, storage))
        self.registers.append(register)
        self._scopes[-1].registers[name] = register
        self.put(f"{register.storage} {cname} = 0;")
        return register

    def _buffer(self, item: Variable) -> None:
        if item.space == "shared":
            return
        cname = c_name(item.name, f"b{len(self._scopes)}_")
        size = max(item.size, 1)
        if item.space == "local":
            self.local_bytes += size
        self.put(f"_Alignas({max(item.align, 8)}) uint8_t {cname}[{size}];")
        self._scopes[-1].buffers[item.name] = cname

    # -- operands ---------------------------------------------------------------------------------

    def register(self, name: str) -> Register | None:
        for scope in reversed(self._scopes):
            if name in scope.registers:
                return scope.registers[name]
        return None

    def buffer(self, name: str) -> str | None:
        for scope in reversed(self._scopes):
            if name in scope.buffers:
                return scope.buffers[name]
        return None

    def symbol(self, name: str) -> Symbol | None:
        return self.routine.shared.get(name) or self._table.get(name)

    def predicate(self, operand: Operand) -> str:
        return self.read(operand, "pred")

    def read(self, operand: Operand, type_: str, line: int = 0) -> str:
        """A C expression of type VALUE[type_] with the operand's value."""
        if isinstance(operand, Imm):
            return immediate(operand, type_)
        if not isinstance(operand, Name):
            raise PtxError(line, "this kind of operand is not supported here")
        name = f"{operand.name}.{operand.part}" if operand.part else operand.name
        register = self.register(name)
        if register is None:
            return self._read_symbol(operand, name, type_, line)
        register.used_as.add(type_)
        text = convert(register.cname, register.storage, type_)
        if operand.offset:
            raise PtxError(line, f"{name}+{operand.offset} is not supported here")
        return f"(!{text})" if operand.negated else text

    def _read_symbol(self, operand: Name, name: str, type_: str, line: int) -> str:
        if name in SPECIAL:
            storage, text = SPECIAL[name]
            return convert(text, storage, type_)
        if name == "WARP_SZ":
            return immediate(Imm(32), type_)
        buffer = self.buffer(name)
        if buffer is not None:
            return f"({VALUE[type_]})((uint64_t)(uintptr_t){buffer} + {operand.offset})"
        symbol = self.symbol(name)
        if symbol is None:
            raise PtxError(line, f"{name} is not declared")
        return f"({VALUE[type_]})({self.address_of(symbol)} + {operand.offset})"

    def address_of(self, symbol: Symbol) -> str:
        """The address of a variable within its own space, or of a function."""
        if symbol.kind == "memory":
            return f"((uint64_t)(uintptr_t)t->b->memory + {symbol.offset}u)"
        if symbol.kind == "shared":
            return f"{symbol.offset}u"
        if symbol.kind == "dynamic":
            return "t->b->dynamic_shared"
        if symbol.kind == "builtin":
            raise PtxError(self.routine.function.line, f"the address of {symbol.cname} cannot be taken")
        return f"(uint64_t)(uintptr_t){symbol.cname}"

    def write(self, operand: Operand, type_: str, expression: str, line: int = 0) -> None:
        """Assigns a value of VALUE[type_] to a register; `_` takes anything."""
        if not isinstance(operand, Name):
            raise PtxError(line, "a result must go to a register")
        if operand.name == "_":
            self.put(f"(void)({expression});")
            return
        name = f"{operand.name}.{operand.part}" if operand.part else operand.name
        register = self.register(name)
        if register is None:
            raise PtxError(line, f"{name} is not declared")
        register.used_as.add(type_)
        value = f"({VALUE[type_]})({expression})"
        if register.storage in ("float", "double") and type_ not in FLOATS:
            size = 4 if register.storage == "float" else 8
            self.put(f"{register.cname} = kp_f{size * 8}(({unsigned(size)}){value});")
        elif type_ in FLOATS and register.storage not in ("float", "double"):
            self.put(f"{register.cname} = ({register.storage})kp_b{SIZES[type_] * 8}({value});")
        else:
            self.put(f"{register.cname} = ({register.storage}){value};")

    def address(self, operand: Operand, line: int) -> str:
        """The sum inside `[...]` as a uint64_t expression."""
        if not isinstance(operand, Addr):
            raise PtxError(line, "an address in [] is needed here")
        if operand.base is None:
            return f"{operand.offset & (2**64 - 1)}ull"
        base = self.read(operand.base, "u64", line)
        return f"({base} + ({operand.offset}))" if operand.offset else base

    # -- control flow -----------------------------------------------------------------------------

    def leave(self) -> None:
        """Returns, first copying a result that PTX declared as a register."""
        for param in self.routine.function.returns:
            register = self.register(param.name)
            if register is not None:
                self.put(f"if (ret) memcpy(ret, &{register.cname}, {param.size});")
        self.put("return;")

    def goto(self, label: str, line: int) -> str:
        for scope in reversed(self._scopes):
            if label in scope.labels:
                name = scope.labels[label]
                poll = "KP_POLL(t); " if name in self._done_labels else ""
                return f"{{ {poll}goto {name}; }}"
        raise PtxError(line, f"label {label} is not defined")

    def targets(self, name: str, line: int) -> tuple[str, ...]:
        for scope in reversed(self._scopes):
            if name in scope.targets:
                return scope.targets[name]
        raise PtxError(line, f"{name} is not a list of branch targets")


def convert(text: str, storage: str, type_: str) -> str:
    """Reads a C value of `storage` as `type_`: bits are reinterpreted, integers cut or extended."""
    if type_ in FLOATS:
        if storage == VALUE[type_]:
            return text
        if storage in ("float", "double"):
            return f"kp_f{SIZES[type_] * 8}(kp_b{32 if storage == 'float' else 64}({text}))"
        return f"kp_f{SIZES[type_] * 8}({text})"
    if storage in ("float", "double"):
        text = f"kp_b{32 if storage == 'float' else 64}({text})"
    if type_ == "pred":
        return text
    return f"(({VALUE[type_]}){text})"


def immediate(imm: Imm, type_: str) -> str:
    if type_ in FLOATS:
        return _float_immediate(imm, type_)
    if type_ == "pred":
        return str(int(imm.value != 0))
    size = SIZES[type_]
    value = imm.value
    if size == 4 and imm.kind == "d":
        value = _as_f32(value)
    value &= (1 << (8 * size)) - 1
    if size == 16:
        return f"(((kp_u128){value >> 64}ull << 64) | {value & (2**64 - 1)}ull)"
    return f"(({VALUE[type_]}){value:#x}{'ull' if size == 8 else 'u'})"


def _float_immediate(imm: Imm, type_: str) -> str:
    value = imm.value
    if imm.kind == "i":
        kind, value = "d", int.from_bytes(struct.pack("<d", float(value)), "little")
    else:
        kind = imm.kind
    if type_ == "f32":
        return f"kp_f32({value if kind == 'f' else _as_f32(value):#x}u)"
    if kind == "f":
        single = struct.unpack("<f", value.to_bytes(4, "little"))[0]
        value = int.from_bytes(struct.pack("<d", single), "little")
    return f"kp_f64({value:#x}ull)"


def _as_f32(double_bits: int) -> int:
    value = struct.unpack("<d", double_bits.to_bytes(8, "little"))[0]
    try:
        return int.from_bytes(struct.pack("<f", value), "little")
    except OverflowError:
        return 0x7F800000 if value > 0 else 0xFF800000

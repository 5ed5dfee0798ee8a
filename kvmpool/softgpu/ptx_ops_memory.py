"""Moves, loads, stores and address conversion (PTX ISA 9.7.9) as C.

Global, const and local addresses are host addresses. A shared address is an offset into the block's window; adding the
window's base makes it generic. Volatile accesses that may be to shared memory give way to the other threads first, so
that warp-synchronous code, which counts on lockstep, sees its neighbours' values.
"""

from __future__ import annotations

from kvmpool.softgpu.ptx_emit import Emitter, op
from kvmpool.softgpu.ptx_tree import Addr, Instr, Name, Operand, PtxError, Vec
from kvmpool.softgpu.ptx_types import SIZES, VALUE

_TYPES = "u8 s8 b8 u16 s16 b16 u32 s32 b32 u64 s64 b64 f16 f16x2 bf16 bf16x2 f32 f64 b128"
_SPACES = "global const shared shared::cta local param param::entry param::func"
_HINTS = (
    "ca cg cs lu cv wb wt nc L1::evict_normal L1::evict_unchanged L1::evict_first L1::evict_last L1::no_allocate "
    "L2::evict_last L2::evict_normal L2::evict_first L2::64B L2::128B L2::256B L2::cache_hint unified"
)
_ORDER = "weak volatile relaxed acquire release cta gpu sys cluster mmio"
_STRONG = {"volatile", "relaxed", "acquire", "release"}


def space_of(item: Instr) -> str:
    for mod in item.mods:
        if mod.split("::")[0] in ("global", "const", "shared", "local", "param"):
            return mod.split("::")[0]
    return "generic"


def pointer(e: Emitter, operand: Operand, space: str, line: int) -> str:
    """The host address that `[...]` of `space` means, as a uint64_t expression."""
    if space == "shared":
        return f"KP_SHARED(t, {e.address(operand, line)})"
    return e.address(operand, line)


def _width(item: Instr) -> int:
    return next((int(mod[1]) for mod in item.mods if mod in ("v2", "v4", "v8")), 1)


def _type(item: Instr) -> str:
    return next(mod for mod in reversed(item.mods) if mod in SIZES)


def _elements(e: Emitter, item: Instr, operand: Operand) -> tuple[Operand, ...]:
    width = _width(item)
    items = operand.items if isinstance(operand, Vec) else (operand,)
    if width != len(items):
        raise PtxError(item.line, f"{item.text} needs {width} elements, found {len(items)}")
    return items


def _gives_way(item: Instr, space: str) -> bool:
    return "volatile" in item.mods and space in ("shared", "generic")


@op("ld ldu", f"{_TYPES} {_SPACES} {_HINTS} {_ORDER} v2 v4 v8")
def _ld(e: Emitter, i: Instr) -> None:
    type_, space = _type(i), space_of(i)
    strong = bool(_STRONG & set(i.mods)) and space != "param"
    if _gives_way(i, space) or (strong and e.routine.yields):
        e.put("KP_YIELD(t);")
    elements = _elements(e, i, i.args[0])
    kind = "LDV" if strong else "LD"
    if len(elements) == 1:
        e.write(elements[0], type_, f"KP_{kind}({VALUE[type_]}, {pointer(e, i.args[1], space, i.line)})", i.line)
    else:
        e.put(f"{{ const uint64_t a = {pointer(e, i.args[1], space, i.line)};")
        for index in range(len(elements)):  # all loads before any write: an element may be part of the address
            e.put(f"const {VALUE[type_]} v{index} = KP_{kind}({VALUE[type_]}, a + {index * SIZES[type_]});")
        for index, element in enumerate(elements):
            e.write(element, type_, f"v{index}", i.line)
        e.put("}")
    if "acquire" in i.mods:
        e.put("__atomic_thread_fence(__ATOMIC_ACQUIRE);")


@op("st", f"{_TYPES} {_SPACES} {_HINTS} {_ORDER} v2 v4 v8")
def _st(e: Emitter, i: Instr) -> None:
    type_, space = _type(i), space_of(i)
    strong = bool(_STRONG & set(i.mods)) and space != "param"
    if _gives_way(i, space):
        e.put("KP_YIELD(t);")
    if "release" in i.mods:
        e.put("__atomic_thread_fence(__ATOMIC_RELEASE);")
    kind = "STV" if strong else "ST"
    elements = _elements(e, i, i.args[1])
    if isinstance(i.args[0], Addr) and i.args[0].base and space == "param" and _is_reg_return(e, i.args[0].base):
        e.write(i.args[0].base, type_, e.read(elements[0], type_, i.line), i.line)
        return
    e.put(f"{{ const uint64_t a = {pointer(e, i.args[0], space, i.line)};")
    for index, element in enumerate(elements):
        value = e.read(element, type_, i.line)
        e.put(f"KP_{kind}({VALUE[type_]}, a + {index * SIZES[type_]}, {value});")
    e.put("}")


def _is_reg_return(e: Emitter, name: Name) -> bool:
    return e.register(name.name) is not None and e.buffer(name.name) is not None


@op("mov", f"{_TYPES} pred")
def _mov(e: Emitter, i: Instr) -> None:
    type_ = i.mods[-1]
    target, source = i.args
    if isinstance(source, Vec):
        part = _part_type(i, type_, len(source.items))
        size = SIZES[part] * 8
        words = [e.read(item, part, i.line) for item in source.items]
        whole = VALUE[f"b{SIZES[type_] * 8}"]
        text = " | ".join(f"(({whole}){word} << {index * size})" for index, word in enumerate(words))
        e.write(target, f"b{SIZES[type_] * 8}", text, i.line)
    elif isinstance(target, Vec):
        part = _part_type(i, type_, len(target.items))
        size = SIZES[part] * 8
        whole = f"b{SIZES[type_] * 8}"
        e.put(f"{{ const {VALUE[whole]} w = {e.read(source, whole, i.line)};")
        for index, item in enumerate(target.items):
            e.write(item, part, f"({VALUE[part]})(w >> {index * size})", i.line)
        e.put("}")
    else:
        e.write(target, type_, e.read(source, type_, i.line), i.line)


def _part_type(i: Instr, type_: str, count: int) -> str:
    if count not in (2, 4) or SIZES[type_] % count:
        raise PtxError(i.line, f"{i.text} cannot be cut into {count}")
    return f"b{SIZES[type_] * 8 // count}"


@op("cvta", f"to {_SPACES} u32 u64")
def _cvta(e: Emitter, i: Instr) -> None:
    value = e.read(i.args[1], "u64", i.line)
    if space_of(i) != "shared":
        text = value
    elif "to" in i.mods:
        text = f"{value} - (uint64_t)(uintptr_t)t->b->shared"
    else:
        text = f"KP_SHARED(t, {value})"
    e.write(i.args[0], "u64", text, i.line)


@op("isspacep", f"{_SPACES} shared::cluster")
def _isspacep(e: Emitter, i: Instr) -> None:
    address = e.read(i.args[1], "u64", i.line)
    space = space_of(i)
    if space in ("shared", "local", "const", "param"):
        e.write(i.args[0], "pred", f"kp_is_{space}(t, {address})", i.line)
    else:
        e.write(i.args[0], "pred", f"!kp_is_shared(t, {address}) && !kp_is_local(t, {address})", i.line)


@op("mapa getctarank", "shared::cluster u32 u64")
def _mapa(e: Emitter, i: Instr) -> None:
    """Every block is a cluster of one, so its own address or rank 0 is the answer."""
    e.write(i.args[0], i.mods[-1], e.read(i.args[1], i.mods[-1], i.line) if i.op == "mapa" else "0", i.line)


@op("prefetch prefetchu applypriority discard", f"{_SPACES} {_HINTS} L1 L2 tensormap")
@op("createpolicy", f"{_HINTS} fractional b64 range {_SPACES}")
def _hint(e: Emitter, i: Instr) -> None:
    """Cache hints change nothing here; a policy is any number."""
    if i.op == "createpolicy":
        e.write(i.args[0], "b64", "0", i.line)


# -- atomics ------------------------------------------------------------------------------------------

_ATOMIC = "and or xor cas exch add inc dec min max noftz"
_ATOMIC_TYPES = "b16 b32 b64 b128 u32 s32 u64 s64 f32 f64 f16 f16x2 bf16 bf16x2"
_FLOAT_BITS = {"f32": "u32", "f64": "u64", "f16": "u16", "bf16": "u16", "f16x2": "u32", "bf16x2": "u32"}


@op(
    "atom red",
    f"{_ATOMIC} {_ATOMIC_TYPES} {_SPACES} relaxed acquire release acq_rel cta gpu sys cluster shared::cluster "
    "L2::cache_hint",
)
def _atom(e: Emitter, i: Instr) -> None:
    """All orders are sequentially consistent, which is stronger than asked."""
    what = next((mod for mod in i.mods if mod in _ATOMIC.split()), "")
    type_ = _type(i)
    target = i.args[0] if i.op == "atom" else Name("_")
    rest = i.args[1:] if i.op == "atom" else i.args
    if isinstance(target, Vec) or not what or (type_ == "b128" and what not in ("cas", "exch")):
        raise e.unsupported(i)
    if e.routine.yields and what in ("cas", "exch"):
        e.put("KP_YIELD(t);")
    address = pointer(e, rest[0], space_of(i), i.line)
    values = [e.read(arg, type_, i.line) for arg in rest[1 : 3 if what == "cas" else 2]]
    name = "swap" if what == "cas" else what
    e.write(target, type_, f"kp_atom_{name}_{_atom_type(type_, what)}({', '.join([address, *values])})", i.line)


def _atom_type(type_: str, what: str) -> str:
    """Bitwise ops know sizes only."""
    if what in ("and", "or", "xor", "cas", "exch"):
        return f"u{SIZES[type_] * 8}"
    return type_

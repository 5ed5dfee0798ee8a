"""Comparison and selection: setp, set, selp, slct (PTX ISA 9.7.6)."""

from __future__ import annotations

from kvmpool.softgpu.ptx_emit import Emitter, op
from kvmpool.softgpu.ptx_tree import Instr, Pair
from kvmpool.softgpu.ptx_types import FLOATS, HALVES, SIGNED, SIZES, bits

_INTS = "u8 s8 u16 s16 u32 s32 u64 s64 b8 b16 b32 b64"
_REALS = "f16 f16x2 bf16 bf16x2 f32 f64"
_ORDERED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_UNORDERED = {"equ": "==", "neu": "!=", "ltu": "<", "leu": "<=", "gtu": ">", "geu": ">="}
_COMPARE = {**_ORDERED, **_UNSIGNED, **_UNORDERED, "num": "", "nan": ""}
_BOOLEAN = {"and": "&", "or": "|", "xor": "^"}
_MODS = f"{_INTS} {_REALS} {' '.join(_COMPARE)} and or xor ftz"


def _compare(cmp: str, a: str, b: str, real: bool) -> str:
    """1 or 0. With a NaN: every ordered comparison is false, every ...u comparison is true."""
    if cmp == "num":
        return f"!__builtin_isunordered({a}, {b})"
    if cmp == "nan":
        return f"__builtin_isunordered({a}, {b})"
    if cmp in _UNORDERED:
        return f"(__builtin_isunordered({a}, {b}) || {a} {_UNORDERED[cmp]} {b})"
    if real and cmp == "ne":
        return f"(!__builtin_isunordered({a}, {b}) && {a} != {b})"
    return f"({a} {_COMPARE[cmp]} {b})"


def _values(e: Emitter, i: Instr, type_: str, half: str = "") -> tuple[str, str]:
    """The two operands as C values that C's own operators compare rightly."""
    out = []
    for arg in i.args[1:3]:
        if half:
            word = f"({e.read(arg, 'u32', i.line)} >> {16 if half == 'hi' else 0})"
            text = f"kp_{'h' if type_ == 'f16x2' else 'bf'}2f((uint16_t){word})"
        elif type_ in HALVES:
            text = f"kp_{'h' if type_ == 'f16' else 'bf'}2f({e.read(arg, 'u16', i.line)})"
        else:
            text = e.read(arg, f"u{bits(type_)}" if type_.startswith("b") else type_, i.line)
        out.append(f"kp_ftz({text})" if "ftz" in i.mods and type_ == "f32" else text)
    return out[0], out[1]


def _outcome(e: Emitter, i: Instr, type_: str, half: str = "") -> tuple[str, str]:
    """The comparison, and its opposite for the second destination, each combined with the predicate operand."""
    cmp = next(mod for mod in i.mods if mod in _COMPARE)
    a, b = _values(e, i, type_, half)
    if cmp in _UNSIGNED and type_ in SIGNED:
        raise e.unsupported(i)
    first = _compare(cmp, a, b, type_ in FLOATS or type_ in HALVES or bool(half))
    second = f"!{first}"
    boolean = next((mod for mod in i.mods if mod in _BOOLEAN), "")
    if boolean and len(i.args) > 3:
        c = e.read(i.args[3], "pred", i.line)
        return f"({first} {_BOOLEAN[boolean]} {c})", f"(({second}) {_BOOLEAN[boolean]} {c})"
    return first, second


@op("setp", _MODS)
def _setp(e: Emitter, i: Instr) -> None:
    type_ = i.mods[-1]
    target = i.args[0]
    if type_ in ("f16x2", "bf16x2"):
        if not isinstance(target, Pair):
            raise e.unsupported(i)
        low, high = _outcome(e, i, type_, "lo")[0], _outcome(e, i, type_, "hi")[0]
        e.put(f"{{ const uint8_t lo = {low}, hi = {high};")
        e.write(target.first, "pred", "lo", i.line)
        e.write(target.second, "pred", "hi", i.line)
        e.put("}")
        return
    first, second = _outcome(e, i, type_)
    if isinstance(target, Pair):
        e.put(f"{{ const uint8_t p = {first}, q = {second};")
        e.write(target.first, "pred", "p", i.line)
        e.write(target.second, "pred", "q", i.line)
        e.put("}")
    else:
        e.write(target, "pred", first, i.line)


@op("set", _MODS)
def _set(e: Emitter, i: Instr) -> None:
    """Writes all ones for an integer destination, 1.0 for a floating-point one."""
    types = [mod for mod in i.mods if mod in SIZES]
    source, target = types[-1], types[0] if len(types) > 1 else types[-1]
    if source in ("f16x2", "bf16x2"):
        low, high = _outcome(e, i, source, "lo")[0], _outcome(e, i, source, "hi")[0]
        one = {"f16x2": "0x3C00u", "bf16x2": "0x3F80u"}.get(target, "0xFFFFu")
        e.write(i.args[0], "u32", f"({low} ? {one} : 0u) | ({high} ? {one} << 16 : 0u)", i.line)
        return
    text = _outcome(e, i, source)[0]
    if target in FLOATS:
        e.write(i.args[0], target, f"({text} ? 1 : 0)", i.line)
    elif target in HALVES:
        e.write(i.args[0], "u16", f"({text} ? {'0x3C00' if target == 'f16' else '0x3F80'} : 0)", i.line)
    else:
        e.write(i.args[0], target, f"({text} ? -1 : 0)", i.line)


@op("selp", f"{_INTS} f16 f16x2 bf16 bf16x2 f32 f64")
def _selp(e: Emitter, i: Instr) -> None:
    type_ = i.mods[-1]
    a, b = e.read(i.args[1], type_, i.line), e.read(i.args[2], type_, i.line)
    e.write(i.args[0], type_, f"{e.read(i.args[3], 'pred', i.line)} ? {a} : {b}", i.line)


@op("slct", f"{_INTS} f32 f64 ftz")
def _slct(e: Emitter, i: Instr) -> None:
    types = [mod for mod in i.mods if mod in SIZES]
    a, b = e.read(i.args[1], types[0], i.line), e.read(i.args[2], types[0], i.line)
    c = e.read(i.args[3], types[1], i.line)
    e.write(i.args[0], types[0], f"{c} >= 0 ? {a} : {b}", i.line)

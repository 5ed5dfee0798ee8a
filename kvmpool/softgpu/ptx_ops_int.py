"""Integer, bit and logic ops (PTX ISA 9.7.1, 9.7.2, 9.7.8) as C.

Shifts clamp, division by zero gives all ones and a remainder the dividend (what NVIDIA's own sequence gives), and
nothing here may raise SIGFPE; the generated C is compiled with -fwrapv.
"""

from __future__ import annotations

from kvmpool.softgpu import ptx_ops_float as floats
from kvmpool.softgpu.ptx_emit import Emitter, op
from kvmpool.softgpu.ptx_tree import Imm, Instr
from kvmpool.softgpu.ptx_types import FLOATS, HALVES, PAIRS, SIGNED, SIZES, VALUE, bits, unsigned

INTS = "u8 s8 u16 s16 u32 s32 u64 s64"
BITS = "b8 b16 b32 b64"
_REAL = "f16 f16x2 bf16 bf16x2 f32 f64 f32x2"


def last_type(item: Instr) -> str:
    """The type of the op: its last modifier that is a type."""
    for mod in reversed(item.mods):
        if mod in SIZES or mod == "pred":
            return mod
    return "b32"


def is_real(type_: str) -> bool:
    return type_ in FLOATS or type_ in HALVES or type_ in PAIRS


def _u(type_: str) -> str:
    return f"u{bits(type_)}"


@op("add sub", f"{INTS} {_REAL} u16x2 s16x2 sat cc rn rz rm rp ftz lo")
def _add_sub(e: Emitter, i: Instr) -> None:
    type_ = last_type(i)
    if is_real(type_):
        floats.binary(e, i, type_)
        return
    sign = "+" if i.op == "add" else "-"
    if type_ in ("u16x2", "s16x2"):
        a, b = e.read(i.args[1], "u32", i.line), e.read(i.args[2], "u32", i.line)
        e.write(i.args[0], "u32", f"kp_{i.op}_u16x2({a}, {b})", i.line)
    elif "cc" in i.mods:
        _carry(e, i, type_, False)
    elif "sat" in i.mods:
        a, b = e.read(i.args[1], "s32", i.line), e.read(i.args[2], "s32", i.line)
        e.write(i.args[0], "s32", f"kp_clamp_s32((int64_t){a} {sign} (int64_t){b})", i.line)
    else:
        a, b = e.read(i.args[1], _u(type_), i.line), e.read(i.args[2], _u(type_), i.line)
        e.write(i.args[0], type_, f"{a} {sign} {b}", i.line)


@op("addc subc", f"{INTS} {BITS} cc")
def _addc_subc(e: Emitter, i: Instr) -> None:
    _carry(e, i, last_type(i), True)


def _carry(e: Emitter, i: Instr, type_: str, carry_in: bool) -> None:
    """`cc` is the carry, for subtraction the borrow."""
    u = _u(type_)
    wide = "uint64_t" if SIZES[type_] == 4 else "kp_u128"
    a, b = e.read(i.args[1], u, i.line), e.read(i.args[2], u, i.line)
    sign = "+" if i.op.startswith("add") else "-"
    extra = f" {sign} cc" if carry_in else ""
    e.put(f"{{ {wide} w = ({wide}){a} {sign} ({wide}){b}{extra};")
    if "cc" in i.mods:
        e.put(f"cc = (uint32_t)(w >> {bits(type_)}) & 1u;")
    e.write(i.args[0], type_, f"({unsigned(SIZES[type_])})w", i.line)
    e.put("}")


@op("mul mul24", f"{INTS} {_REAL} lo hi wide rn rz rm rp ftz sat")
def _mul(e: Emitter, i: Instr) -> None:
    type_ = last_type(i)
    if is_real(type_):
        floats.binary(e, i, type_)
        return
    target, text = _product(e, i, type_)
    e.write(i.args[0], target, text, i.line)


def _product(e: Emitter, i: Instr, type_: str) -> tuple[str, str]:
    """The type and C expression of the product, by .lo, .hi or .wide."""
    a, b = e.read(i.args[1], type_, i.line), e.read(i.args[2], type_, i.line)
    if i.op.endswith("24"):
        a, b = (f"(({x} << 8) >> 8)" for x in (a, b))
        shift = 16 if "hi" in i.mods else 0
        return type_, f"({VALUE[type_]})(((int64_t){a} * (int64_t){b}) >> {shift})"
    size = SIZES[type_]
    signed = type_ in SIGNED
    if "wide" in i.mods:
        wide = ("s" if signed else "u") + str(16 * size)
        return wide, f"({VALUE[wide]}){a} * ({VALUE[wide]}){b}"
    if "hi" in i.mods:
        wide_c = {1: "int16_t", 2: "int32_t", 4: "int64_t", 8: "kp_s128"}[size]
        if not signed:
            wide_c = {1: "uint16_t", 2: "uint32_t", 4: "uint64_t", 8: "kp_u128"}[size]
        return type_, f"({VALUE[type_]})((({wide_c}){a} * ({wide_c}){b}) >> {8 * size})"
    u = unsigned(size)
    work = "uint32_t" if size < 4 else u
    return type_, f"({work})({u}){a} * ({work})({u}){b}"


@op("mad madc mad24", f"{INTS} f32 f64 lo hi wide sat cc rn rz rm rp ftz")
def _mad(e: Emitter, i: Instr) -> None:
    type_ = last_type(i)
    if is_real(type_):
        floats.fma(e, i, type_)
        return
    target, product = _product(e, i, type_)
    if "cc" in i.mods or i.op == "madc":
        u = _u(target)
        wide = "uint64_t" if SIZES[target] == 4 else "kp_u128"
        carry = " + cc" if i.op == "madc" else ""
        c = e.read(i.args[3], u, i.line)
        e.put(f"{{ {wide} w = ({wide})({VALUE[u]})({product}) + ({wide}){c}{carry};")
        if "cc" in i.mods:
            e.put(f"cc = (uint32_t)(w >> {bits(target)}) & 1u;")
        e.write(i.args[0], target, f"({VALUE[u]})w", i.line)
        e.put("}")
    elif "sat" in i.mods:
        c = e.read(i.args[3], "s32", i.line)
        e.write(i.args[0], "s32", f"kp_clamp_s32((int64_t)({product}) + {c})", i.line)
    else:
        c = e.read(i.args[3], _u(target), i.line)
        e.write(i.args[0], target, f"({unsigned(SIZES[target])})({product}) + {c}", i.line)


@op("sad", INTS)
def _sad(e: Emitter, i: Instr) -> None:
    type_ = last_type(i)
    a, b = e.read(i.args[1], type_, i.line), e.read(i.args[2], type_, i.line)
    c = e.read(i.args[3], _u(type_), i.line)
    u = VALUE[_u(type_)]
    e.write(i.args[0], _u(type_), f"{c} + ({a} < {b} ? ({u}){b} - ({u}){a} : ({u}){a} - ({u}){b})", i.line)


@op("div rem", f"{INTS} f32 f64 rn rz rm rp ftz approx full")
def _div_rem(e: Emitter, i: Instr) -> None:
    type_ = last_type(i)
    if is_real(type_):
        floats.divide(e, i, type_)
        return
    a, b = e.read(i.args[1], type_, i.line), e.read(i.args[2], type_, i.line)
    e.write(i.args[0], type_, f"kp_{i.op}_{type_}({a}, {b})", i.line)


@op("neg abs", f"s16 s32 s64 {_REAL} ftz")
def _neg_abs(e: Emitter, i: Instr) -> None:
    type_ = last_type(i)
    if is_real(type_):
        floats.sign(e, i, type_)
        return
    a = e.read(i.args[1], type_, i.line)
    u = VALUE[_u(type_)]
    negative = f"({u})(0 - ({u}){a})"
    e.write(i.args[0], type_, negative if i.op == "neg" else f"{a} < 0 ? {negative} : ({u}){a}", i.line)


@op("min max", f"{INTS} {_REAL} u16x2 s16x2 relu ftz NaN xorsign abs")
def _min_max(e: Emitter, i: Instr) -> None:
    type_ = last_type(i)
    if is_real(type_):
        floats.min_max(e, i, type_)
        return
    a, b = e.read(i.args[1], type_, i.line), e.read(i.args[2], type_, i.line)
    if type_ in ("u16x2", "s16x2"):
        text = f"kp_{i.op}_{type_}({a}, {b})"
    else:
        text = f"({a} {'<' if i.op == 'min' else '>'} {b} ? {a} : {b})"
    if "relu" in i.mods:
        text = f"kp_max_s16x2({text}, 0u)" if type_ == "s16x2" else f"({text} > 0 ? {text} : 0)"
    e.write(i.args[0], type_, text, i.line)


@op("and or xor", f"{BITS} pred")
def _logic(e: Emitter, i: Instr) -> None:
    type_ = last_type(i)
    kind = type_ if type_ == "pred" else _u(type_)
    a, b = e.read(i.args[1], kind, i.line), e.read(i.args[2], kind, i.line)
    e.write(i.args[0], kind, f"{a} {({'and': '&', 'or': '|', 'xor': '^'})[i.op]} {b}", i.line)


@op("not cnot", f"{BITS} pred")
def _not(e: Emitter, i: Instr) -> None:
    type_ = last_type(i)
    kind = type_ if type_ == "pred" else _u(type_)
    a = e.read(i.args[1], kind, i.line)
    e.write(i.args[0], kind, f"!{a}" if i.op == "cnot" or kind == "pred" else f"~{a}", i.line)


@op("shl shr", f"{BITS} {INTS}")
def _shift(e: Emitter, i: Instr) -> None:
    type_ = last_type(i)
    kind = type_ if type_ in SIGNED and i.op == "shr" else _u(type_)
    a, n = e.read(i.args[1], kind, i.line), e.read(i.args[2], "u32", i.line)
    width = bits(type_)
    if isinstance(i.args[2], Imm) and 0 <= i.args[2].value < width:
        e.write(i.args[0], kind, f"{a} {'<<' if i.op == 'shl' else '>>'} {i.args[2].value}", i.line)
    elif i.op == "shl":
        e.write(i.args[0], kind, f"({n} < {width}u ? ({VALUE[kind]})({a} << {n}) : 0)", i.line)
    elif kind in SIGNED:
        e.write(i.args[0], kind, f"{a} >> ({n} < {width}u ? {n} : {width - 1}u)", i.line)
    else:
        e.write(i.args[0], kind, f"({n} < {width}u ? ({VALUE[kind]})({a} >> {n}) : 0)", i.line)


@op("shf", "l r wrap clamp b32")
def _funnel(e: Emitter, i: Instr) -> None:
    a, b, c = (e.read(arg, "u32", i.line) for arg in i.args[1:4])
    n = f"({c} & 31u)" if "wrap" in i.mods else f"({c} < 32u ? {c} : 32u)"
    pair = f"(((uint64_t){b} << 32) | {a})"
    text = f"(uint32_t)(({pair} << {n}) >> 32)" if "l" in i.mods else f"(uint32_t)({pair} >> {n})"
    e.write(i.args[0], "u32", text, i.line)


@op("bfe", "u32 s32 u64 s64")
def _bfe(e: Emitter, i: Instr) -> None:
    type_ = last_type(i)
    a = e.read(i.args[1], type_, i.line)
    b, c = e.read(i.args[2], "u32", i.line), e.read(i.args[3], "u32", i.line)
    e.write(i.args[0], type_, f"kp_bfe_{type_}({a}, {b}, {c})", i.line)


@op("bfi", "b32 b64")
def _bfi(e: Emitter, i: Instr) -> None:
    type_ = _u(last_type(i))
    a, b = e.read(i.args[1], type_, i.line), e.read(i.args[2], type_, i.line)
    c, d = e.read(i.args[3], "u32", i.line), e.read(i.args[4], "u32", i.line)
    e.write(i.args[0], type_, f"kp_bfi_{type_}({a}, {b}, {c}, {d})", i.line)


@op("bfind", "u32 s32 u64 s64 shiftamt")
def _bfind(e: Emitter, i: Instr) -> None:
    type_ = last_type(i)
    a = e.read(i.args[1], type_, i.line)
    text = f"kp_bfind_u{bits(type_)}({f'{a} < 0 ? ~{a} : {a}' if type_ in SIGNED else a})"
    if "shiftamt" in i.mods:
        text = f"kp_shiftamt({text}, {bits(type_) - 1}u)"
    e.write(i.args[0], "u32", text, i.line)


@op("clz popc", "b32 b64")
def _count(e: Emitter, i: Instr) -> None:
    type_ = _u(last_type(i))
    e.write(i.args[0], "u32", f"kp_{i.op}_{type_}({e.read(i.args[1], type_, i.line)})", i.line)


@op("brev", "b32 b64")
def _brev(e: Emitter, i: Instr) -> None:
    type_ = _u(last_type(i))
    e.write(i.args[0], type_, f"kp_brev_{type_}({e.read(i.args[1], type_, i.line)})", i.line)


@op("prmt", "b32 f4e b4e rc8 ecl ecr rc16")
def _prmt(e: Emitter, i: Instr) -> None:
    a, b, c = (e.read(arg, "u32", i.line) for arg in i.args[1:4])
    mode = next((mod for mod in i.mods if mod != "b32"), "")
    if mode:
        e.write(i.args[0], "u32", f"kp_prmt_{mode}({a}, {b}, {c})", i.line)
    else:
        e.write(i.args[0], "u32", f"kp_prmt({a}, {b}, {c})", i.line)


@op("lop3", "b32")
def _lop3(e: Emitter, i: Instr) -> None:
    a, b, c = (e.read(arg, "u32", i.line) for arg in i.args[1:4])
    table = i.args[4]
    if not isinstance(table, Imm):
        raise e.unsupported(i)
    terms = [
        f"({'' if n & 4 else '~'}{a} & {'' if n & 2 else '~'}{b} & {'' if n & 1 else '~'}{c})"
        for n in range(8)
        if table.value >> n & 1
    ]
    e.write(i.args[0], "u32", " | ".join(terms) or "0u", i.line)


@op("bmsk", "clamp wrap b32")
def _bmsk(e: Emitter, i: Instr) -> None:
    a, b = e.read(i.args[1], "u32", i.line), e.read(i.args[2], "u32", i.line)
    e.write(i.args[0], "u32", f"kp_bmsk_{'wrap' if 'wrap' in i.mods else 'clamp'}({a}, {b})", i.line)


@op("szext", "clamp wrap u32 s32")
def _szext(e: Emitter, i: Instr) -> None:
    type_ = last_type(i)
    a, b = e.read(i.args[1], type_, i.line), e.read(i.args[2], "u32", i.line)
    n = f"({b} & 31u)" if "wrap" in i.mods else b
    e.write(i.args[0], type_, f"kp_bfe_{type_}({a}, 0u, ({n} < 32u ? {n} : 32u))", i.line)


@op("fns", "b32")
def _fns(e: Emitter, i: Instr) -> None:
    a, b = e.read(i.args[1], "u32", i.line), e.read(i.args[2], "u32", i.line)
    e.write(i.args[0], "u32", f"kp_fns({a}, {b}, {e.read(i.args[3], 's32', i.line)})", i.line)


@op("dp4a dp2a", "u32 s32 lo hi")
def _dot(e: Emitter, i: Instr) -> None:
    types = [mod for mod in i.mods if mod in SIZES]
    a, b, c = (e.read(arg, "u32", i.line) for arg in i.args[1:4])
    signs = ", ".join(str(int(mod == "s32")) for mod in types)
    if i.op == "dp4a":
        e.write(i.args[0], "u32", f"kp_dp4a({a}, {b}, {c}, {signs})", i.line)
    else:
        e.write(i.args[0], "u32", f"kp_dp2a({a}, {b}, {c}, {signs}, {int('hi' in i.mods)})", i.line)

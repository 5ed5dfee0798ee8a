"""Floating-point ops (PTX ISA 9.7.3, 9.7.4) as C.

.rn is the CPU's own rounding; directed modes go through helpers that are exact; fma is a real fma and mul+add is never
contracted. The .approx ops give the correctly rounded or libm value, which is within NVIDIA's bounds.
"""

from __future__ import annotations

from kvmpool.softgpu.ptx_emit import Emitter, op
from kvmpool.softgpu.ptx_tree import Instr, Operand
from kvmpool.softgpu.ptx_types import FLOATS, PAIRS, SIZES

_DIRECTED = ("rz", "rm", "rp")
_SYMBOL = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


def _read(e: Emitter, i: Instr, operand: Operand, type_: str) -> str:
    text = e.read(operand, type_, i.line)
    return f"kp_ftz({text})" if "ftz" in i.mods and type_ == "f32" else text


def _write(e: Emitter, i: Instr, type_: str, text: str) -> None:
    if type_ == "f32":
        text = f"kp_ftz({text})" if "ftz" in i.mods else text
    if "sat" in i.mods:
        text = f"kp_sat_{type_}({text})"
    e.write(i.args[0], type_, text, i.line)


def _mode(i: Instr) -> str:
    return next((mod for mod in i.mods if mod in _DIRECTED), "")


def binary(e: Emitter, i: Instr, type_: str) -> None:
    """add, sub, mul."""
    a, b = _read(e, i, i.args[1], type_), _read(e, i, i.args[2], type_)
    mode = _mode(i)
    if type_ in FLOATS and not mode:
        text = f"{a} {_SYMBOL[i.op]} {b}"
    elif type_ in FLOATS:
        text = f"kp_{i.op}_{type_}_{mode}({a}, {b})"
    elif type_ == "f32x2" and mode:
        raise e.unsupported(i)
    else:
        text = f"kp_{i.op}_{type_}({a}, {b})"
    _write(e, i, type_, text)


def fma(e: Emitter, i: Instr, type_: str) -> None:
    a, b, c = (_read(e, i, arg, type_) for arg in i.args[1:4])
    mode = _mode(i)
    text = f"kp_fma_{type_}{'_' + mode if mode and type_ in FLOATS else ''}({a}, {b}, {c})"
    if "relu" in i.mods:
        text = f"kp_relu_{type_}({text})"
    _write(e, i, type_, text)


@op("fma", "f16 f16x2 bf16 bf16x2 f32 f64 f32x2 rn rz rm rp ftz sat relu")
def _fma(e: Emitter, i: Instr) -> None:
    fma(e, i, i.mods[-1])


def divide(e: Emitter, i: Instr, type_: str) -> None:
    a, b = _read(e, i, i.args[1], type_), _read(e, i, i.args[2], type_)
    mode = _mode(i)
    if i.op == "rem":
        raise e.unsupported(i)
    _write(e, i, type_, f"kp_div_{type_}_{mode}({a}, {b})" if mode else f"{a} / {b}")


def sign(e: Emitter, i: Instr, type_: str) -> None:
    """neg and abs flip or clear the sign bit, of a NaN too."""
    if type_ in FLOATS:
        a = _read(e, i, i.args[1], type_)
        name = "kp_fneg" if i.op == "neg" else "kp_fabs"
        _write(e, i, type_, f"{name}{SIZES[type_] * 8}({a})")
        return
    bits_type = "u32" if type_ in PAIRS else "u16"
    if type_ == "f32x2":
        raise e.unsupported(i)
    a = e.read(i.args[1], bits_type, i.line)
    mask = "0x80008000u" if type_ in PAIRS else "0x8000u"
    e.write(i.args[0], bits_type, f"{a} ^ {mask}" if i.op == "neg" else f"{a} & ~{mask}", i.line)


def min_max(e: Emitter, i: Instr, type_: str) -> None:
    if "xorsign" in i.mods or "abs" in i.mods or type_ == "f32x2" or "relu" in i.mods and type_ in FLOATS:
        raise e.unsupported(i)
    values = [_read(e, i, arg, type_) for arg in i.args[1:]]
    nan = "_nan" if "NaN" in i.mods else ""
    text = values[0]
    for value in values[1:]:
        text = f"kp_{i.op}_{type_}{nan}({text}, {value})"
    if "relu" in i.mods:
        text = f"kp_relu_{type_}({text})"
    _write(e, i, type_, text)


@op("rcp", "f32 f64 rn rz rm rp ftz approx")
def _rcp(e: Emitter, i: Instr) -> None:
    type_ = i.mods[-1]
    a = _read(e, i, i.args[1], type_)
    one = "1.0f" if type_ == "f32" else "1.0"
    mode = _mode(i)
    if mode:
        text = f"kp_div_{type_}_{mode}({one}, {a})"
    elif type_ == "f64" and "approx" in i.mods:
        text = f"kp_high_word(1.0 / {a})"
    else:
        text = f"{one} / {a}"
    _write(e, i, type_, text)


@op("sqrt", "f32 f64 rn rz rm rp ftz approx")
def _sqrt(e: Emitter, i: Instr) -> None:
    type_ = i.mods[-1]
    a = _read(e, i, i.args[1], type_)
    mode = _mode(i)
    name = f"kp_sqrt_{type_}_{mode}" if mode else "__builtin_sqrtf" if type_ == "f32" else "__builtin_sqrt"
    _write(e, i, type_, f"{name}({a})")


@op("rsqrt", "f32 f64 ftz approx")
def _rsqrt(e: Emitter, i: Instr) -> None:
    type_ = i.mods[-1]
    a = _read(e, i, i.args[1], type_)
    if type_ == "f32":
        text = f"(float)(1.0 / __builtin_sqrt((double){a}))"
    else:
        text = f"1.0 / __builtin_sqrt({a})"
        text = f"kp_high_word({text})" if "ftz" in i.mods else text
    _write(e, i, type_, text)


@op("sin cos lg2", "f32 ftz approx")
def _transcendental(e: Emitter, i: Instr) -> None:
    name = {"sin": "__builtin_sinf", "cos": "__builtin_cosf", "lg2": "__builtin_log2f"}[i.op]
    _write(e, i, "f32", f"{name}({_read(e, i, i.args[1], 'f32')})")


@op("ex2 tanh", "f32 f16 f16x2 bf16 bf16x2 ftz approx")
def _exponential(e: Emitter, i: Instr) -> None:
    type_ = i.mods[-1]
    a = _read(e, i, i.args[1], type_)
    _write(e, i, type_, f"kp_{i.op}_{type_}({a})")


@op("copysign", "f32 f64")
def _copysign(e: Emitter, i: Instr) -> None:
    type_ = i.mods[-1]
    a, b = e.read(i.args[1], type_, i.line), e.read(i.args[2], type_, i.line)
    e.write(i.args[0], type_, f"__builtin_copysign{'f' if type_ == 'f32' else ''}({b}, {a})", i.line)


@op("testp", "f32 f64 finite infinite number notanumber normal subnormal")
def _testp(e: Emitter, i: Instr) -> None:
    type_ = i.mods[-1]
    a = e.read(i.args[1], type_, i.line)
    text = {
        "finite": f"__builtin_isfinite({a})",
        "infinite": f"__builtin_isinf({a})",
        "number": f"!__builtin_isnan({a})",
        "notanumber": f"__builtin_isnan({a})",
        "normal": f"__builtin_isnormal({a})",
        "subnormal": f"(__builtin_isfinite({a}) && !__builtin_isnormal({a}) && {a} != 0)",
    }[i.mods[0]]
    e.write(i.args[0], "pred", f"({text}) != 0", i.line)

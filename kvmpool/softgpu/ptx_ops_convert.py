"""cvt (PTX ISA 9.7.9.21): every pair of types is a helper of the runtime header, by rounding mode."""

from __future__ import annotations

from kvmpool.softgpu.ptx_emit import Emitter, op
from kvmpool.softgpu.ptx_tree import Instr
from kvmpool.softgpu.ptx_types import FLOATS, HALVES, SIGNED, SIZES, VALUE, bits

_INTEGER_ROUNDING = {"rni": "n", "rzi": "z", "rmi": "m", "rpi": "p"}
_ROUNDING = {"rn": "n", "rz": "z", "rm": "m", "rp": "p", "rna": "a"}
_TYPES = "u8 s8 b8 u16 s16 b16 u32 s32 b32 u64 s64 b64 f16 f16x2 bf16 bf16x2 f32 f64 tf32"


@op("cvt", f"{_TYPES} {' '.join(_INTEGER_ROUNDING)} {' '.join(_ROUNDING)} ftz sat satfinite relu")
def _cvt(e: Emitter, i: Instr) -> None:
    types = [mod for mod in i.mods if mod in SIZES or mod == "tf32"]
    if len(types) != 2 or "satfinite" in i.mods:
        raise e.unsupported(i)
    target, source = types
    if target in ("f16x2", "bf16x2"):
        _pack(e, i, target, source)
    elif target == "tf32":
        value = e.read(i.args[1], "f32", i.line)
        e.write(i.args[0], "b32", f"kp_tf32({value}, '{_rounding(i)}')", i.line)
    elif _is_int(target) and _is_int(source):
        _int_to_int(e, i, target, source)
    elif _is_int(target):
        _real_to_int(e, i, target, source)
    elif _is_int(source):
        _int_to_real(e, i, target, source)
    else:
        _real_to_real(e, i, target, source)


def _is_int(type_: str) -> bool:
    return type_ not in FLOATS and type_ not in HALVES


def _rounding(i: Instr) -> str:
    return next((_ROUNDING[mod] for mod in i.mods if mod in _ROUNDING), "n")


def _int_to_int(e: Emitter, i: Instr, target: str, source: str) -> None:
    value = e.read(i.args[1], source, i.line)
    if "sat" in i.mods:
        low = -(1 << (bits(target) - 1)) if target in SIGNED else 0
        high = (1 << (bits(target) - (1 if target in SIGNED else 0))) - 1
        value = f"(kp_s128){value}"
        value = f"({value} < ({_wide(low)}) ? ({_wide(low)}) : {value} > ({_wide(high)}) ? ({_wide(high)}) : {value})"
    e.write(i.args[0], target, value, i.line)


def _wide(value: int) -> str:
    return f"-(kp_s128){-value}ull" if value < 0 else f"(kp_s128){value}ull"


def _as_double(e: Emitter, i: Instr, source: str) -> str:
    """The operand as a double, which holds every f16, bf16, f32 exactly."""
    if source in HALVES:
        return f"(double)kp_{'h' if source == 'f16' else 'bf'}2f({e.read(i.args[1], 'u16', i.line)})"
    value = e.read(i.args[1], source, i.line)
    if source == "f32":
        return f"(double){f'kp_ftz({value})' if 'ftz' in i.mods else value}"
    return value


def _real_to_int(e: Emitter, i: Instr, target: str, source: str) -> None:
    """Out of range clamps; a NaN is 0, or 1 << 63 where one side has 64 bits."""
    mode = next((_INTEGER_ROUNDING[mod] for mod in i.mods if mod in _INTEGER_ROUNDING), "z")
    wide = "_w" if source == "f64" or bits(target) == 64 else ""
    e.write(i.args[0], target, f"kp_to_{target}{wide}(kp_integral_{mode}({_as_double(e, i, source)}))", i.line)


def _int_to_real(e: Emitter, i: Instr, target: str, source: str) -> None:
    value = e.read(i.args[1], source, i.line)
    mode = _rounding(i)
    if target in HALVES:
        e.write(i.args[0], "u16", f"kp_d2{_short(target)}((double){value}, '{mode}')", i.line)
        return
    text = f"({VALUE[target]}){value}" if mode == "n" else f"kp_{target}_from_{_int64(source)}({value}, '{mode}')"
    e.write(i.args[0], target, f"kp_sat_{target}({text})" if "sat" in i.mods else text, i.line)


def _int64(source: str) -> str:
    return "s64" if source in SIGNED else "u64"


def _short(type_: str) -> str:
    return "h" if type_.startswith("f16") else "bf"


def _real_to_real(e: Emitter, i: Instr, target: str, source: str) -> None:
    value = _as_double(e, i, source)
    integral = next((_INTEGER_ROUNDING[mod] for mod in i.mods if mod in _INTEGER_ROUNDING), "")
    if integral:
        value = f"kp_integral_{integral}({value})"
    mode = _rounding(i)
    if target in HALVES:
        text = f"kp_d2{_short(target)}({value}, '{mode}')"
        text = f"kp_relu_{target}({text})" if "relu" in i.mods else text
        e.write(i.args[0], "u16", f"kp_sat_{target}({text})" if "sat" in i.mods else text, i.line)
        return
    text = value
    if target == "f32":
        text = f"(float){value}" if mode == "n" else f"kp_d2f({value}, '{mode}')"
        text = f"kp_ftz({text})" if "ftz" in i.mods else text
    e.write(i.args[0], target, f"kp_sat_{target}({text})" if "sat" in i.mods else text, i.line)


def _pack(e: Emitter, i: Instr, target: str, source: str) -> None:
    """`cvt.rn.f16x2.f32 d, a, b`: a goes to the upper half."""
    if source != "f32" or len(i.args) != 3:
        raise e.unsupported(i)
    halves = [f"kp_d2{_short(target)}((double){e.read(arg, 'f32', i.line)}, '{_rounding(i)}')" for arg in i.args[1:3]]
    if "relu" in i.mods:
        halves = [f"kp_relu_{target.removesuffix('x2')}({half})" for half in halves]
    e.write(i.args[0], "u32", f"((uint32_t){halves[0]} << 16) | {halves[1]}", i.line)

"""Each PTX op alone, in PTX, against values worked out by hand from the PTX ISA (or in Python, for the random ones)."""

# ruff: noqa: E501  (a table: one op, one line)

from __future__ import annotations

import random
import struct
from dataclasses import dataclass

import pytest

from tests.softgpu.engine import Buffer, Engine, Module

HEAD = ".version 8.6\n.target sm_90\n.address_size 64\n"
F = {"inf": 0x7F800000, "-inf": 0xFF800000, "nan": 0x7FC00000}


def f(value: float) -> int:
    """The bits of an f32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def d(value: float) -> int:
    """The bits of an f64."""
    return int(struct.unpack("<Q", struct.pack("<d", value))[0])


def h(value: float) -> int:
    """The bits of an f16."""
    return int(struct.unpack("<H", struct.pack("<e", value))[0])


@dataclass(frozen=True)
class Case:
    """`text` uses %o (result) and %a %b %c %d (inputs); `kinds` are their register types: o first."""

    text: str
    kinds: str
    inputs: tuple[int, ...]
    expected: int


def _i(text: str, *values: int) -> Case:
    """Integer op on 32-bit registers."""
    return Case(text, "b32 " * len(values), tuple(v & 0xFFFFFFFF for v in values[:-1]), values[-1] & 0xFFFFFFFF)


def _l(text: str, *values: int) -> Case:
    """On 64-bit registers."""
    mask = 2**64 - 1
    return Case(text, "b64 " * len(values), tuple(v & mask for v in values[:-1]), values[-1] & mask)


def _s(text: str, *values: int) -> Case:
    """On 16-bit registers."""
    return Case(text, "b16 " * len(values), tuple(v & 0xFFFF for v in values[:-1]), values[-1] & 0xFFFF)


def _k(text: str, kinds: str, *values: int) -> Case:
    """Registers of `kinds`."""
    sizes = [int(kind[1:]) for kind in kinds.split()]
    cut = [v & ((1 << size) - 1) for v, size in zip(values, [*sizes[1:], sizes[0]], strict=True)]
    return Case(text, kinds, tuple(cut[:-1]), cut[-1])


def _f(text: str, *values: float) -> Case:
    """On f32 registers; a value is a float."""
    bits = [f(v) for v in values]
    return Case(text, "f32 " * len(values), tuple(bits[:-1]), bits[-1])


def _d(text: str, *values: float) -> Case:
    bits = [d(v) for v in values]
    return Case(text, "f64 " * len(values), tuple(bits[:-1]), bits[-1])


def _p(text: str, kind: str, *values: int) -> Case:
    """`text` sets predicate %p from %a..; the result is 1 or 0."""
    kinds = " ".join(["b32", *[kind] * (len(values) - 1)])
    return Case(f"{text} selp.b32 %o, 1, 0, %p;", kinds, tuple(values[:-1]), values[-1])


MAX, MIN = 0x7FFFFFFF, 0x80000000
INF, NAN = float("inf"), float("nan")
TINY = 1e-40  # an f32 subnormal

INTEGER = [
    _i("add.s32 %o, %a, %b;", MAX, 1, MIN),
    _i("add.sat.s32 %o, %a, %b;", MAX, 1, MAX),
    _i("add.sat.s32 %o, %a, %b;", MIN, -1, MIN),
    _i("sub.sat.s32 %o, %a, %b;", MIN, 1, MIN),
    _i("sub.u32 %o, %a, %b;", 3, 5, -2),
    _s("add.u16 %o, %a, %b;", 0xFFFF, 2, 1),
    _i("add.u16x2 %o, %a, %b;", 0xFFFF0001, 0x00010002, 0x00000003),
    _i("mul.lo.s32 %o, %a, %b;", 0x10001, 0x10001, 0x20001),
    _i("mul.hi.s32 %o, %a, %b;", -2, 3, -1),
    _i("mul.hi.u32 %o, %a, %b;", -2, 3, 2),
    _k("mul.wide.s32 %o, %a, %b;", "b64 b32 b32", -2, 3, -6),
    _k("mul.wide.u32 %o, %a, %b;", "b64 b32 b32", -2, 3, 3 * 0xFFFFFFFE),
    _k("mul.wide.u16 %o, %a, %b;", "b32 b16 b16", 0xFFFF, 0xFFFF, 0xFFFE0001),
    _k("mul.wide.s16 %o, %a, %b;", "b32 b16 b16", 0xFFFF, 5, -5),
    _s("mul.lo.u16 %o, %a, %b;", 0xFFFF, 0xFFFF, 1),
    _s("mul.hi.u16 %o, %a, %b;", 0xFFFF, 0xFFFF, 0xFFFE),
    _l("mul.hi.u64 %o, %a, %b;", -1, -1, -2),
    _l("mul.hi.s64 %o, %a, %b;", -1, 5, -1),
    _l("mul.lo.s64 %o, %a, %b;", 1 << 40, 1 << 23, 1 << 63),
    _i("mul24.lo.s32 %o, %a, %b;", 0xFF000003, 5, 15),
    _i("mul24.hi.u32 %o, %a, %b;", 0xFFFFFF, 0xFFFFFF, 0xFFFFFE00),
    _i("mad.lo.s32 %o, %a, %b, %c;", 7, -3, 1, -20),
    _i("mad.hi.u32 %o, %a, %b, %c;", -1, -1, 5, 3),
    _i("mad.hi.sat.s32 %o, %a, %b, %c;", MAX, 4, MAX, MAX),
    _k("mad.wide.s32 %o, %a, %b, %c;", "b64 b32 b32 b64", -1, 1, 5, 4),
    _i("sad.s32 %o, %a, %b, %c;", -3, 4, 10, 17),
    _i("sad.u32 %o, %a, %b, %c;", 9, 4, 10, 15),
    _i("div.s32 %o, %a, %b;", -7, 2, -3),
    _i("div.s32 %o, %a, %b;", MIN, -1, MIN),
    _i("div.s32 %o, %a, %b;", 5, 0, -1),
    _i("rem.s32 %o, %a, %b;", -7, 2, -1),
    _i("rem.s32 %o, %a, %b;", MIN, -1, 0),
    _i("rem.u32 %o, %a, %b;", 9, 0, 9),
    _i("div.u32 %o, %a, %b;", -1, 2, MAX),
    _l("div.u64 %o, %a, %b;", 5, 0, -1),
    _l("div.s64 %o, %a, %b;", 1 << 63, -1, 1 << 63),
    _s("div.s16 %o, %a, %b;", 0x8000, 0xFFFF, 0x8000),
    _i("abs.s32 %o, %a;", MIN, MIN),
    _i("abs.s32 %o, %a;", -5, 5),
    _i("neg.s32 %o, %a;", 5, -5),
    _s("neg.s16 %o, %a;", 5, -5),
    _i("min.s32 %o, %a, %b;", -1, 1, -1),
    _i("min.u32 %o, %a, %b;", -1, 1, 1),
    _i("max.s32 %o, %a, %b;", -1, 1, 1),
    _i("max.relu.s32 %o, %a, %b;", -5, -9, 0),
    _i("min.s16x2 %o, %a, %b;", 0xFFFF0005, 0x00010003, 0xFFFF0003),
    _i("max.u16x2 %o, %a, %b;", 0xFFFF0005, 0x00010006, 0xFFFF0006),
    _i("and.b32 %o, %a, %b;", 0xFF00FF00, 0x0FF00FF0, 0x0F000F00),
    _i("or.b32 %o, %a, %b;", 0xF0, 0x0F, 0xFF),
    _i("xor.b32 %o, %a, %b;", 0xFF, 0x0F, 0xF0),
    _i("not.b32 %o, %a;", 0, -1),
    _s("not.b16 %o, %a;", 0x00FF, 0xFF00),
    _i("cnot.b32 %o, %a;", 0, 1),
    _i("cnot.b32 %o, %a;", 7, 0),
    _i("shl.b32 %o, %a, %b;", 1, 31, MIN),
    _i("shl.b32 %o, %a, %b;", 1, 32, 0),
    _i("shr.u32 %o, %a, %b;", MIN, 31, 1),
    _i("shr.u32 %o, %a, %b;", MIN, 40, 0),
    _i("shr.s32 %o, %a, %b;", MIN, 40, -1),
    _i("shr.b32 %o, %a, 4;", 0x80000010, 0x08000001),
    _k("shl.b64 %o, %a, %b;", "b64 b64 b32", 1, 63, 1 << 63),
    _k("shl.b64 %o, %a, %b;", "b64 b64 b32", 1, 64, 0),
    _k("shr.s64 %o, %a, %b;", "b64 b64 b32", 1 << 63, 200, -1),
    _k("shr.u16 %o, %a, %b;", "b16 b16 b32", 0x8000, 15, 1),
    _k("shr.s16 %o, %a, %b;", "b16 b16 b32", 0x8000, 3, 0xF000),
    _i("shf.l.wrap.b32 %o, %a, %b, %c;", 0x80000000, 1, 33, 3),
    _i("shf.l.clamp.b32 %o, %a, %b, %c;", 0x12345678, 1, 40, 0x12345678),
    _i("shf.r.wrap.b32 %o, %a, %b, %c;", 0x10, 0xF, 4, 0xF0000001),
    _i("shf.r.clamp.b32 %o, %a, %b, %c;", 0x10, 0xF, 33, 0xF),
    _i("bfe.u32 %o, %a, %b, %c;", 0xABCDEF12, 8, 8, 0xEF),
    _i("bfe.s32 %o, %a, %b, %c;", 0xABCDEF12, 8, 8, -17),
    _i("bfe.u32 %o, %a, %b, %c;", 0xABCDEF12, 28, 8, 0xA),
    _i("bfe.s32 %o, %a, %b, %c;", 0xABCDEF12, 28, 8, -6),
    _i("bfe.s32 %o, %a, %b, %c;", MIN, 40, 4, -1),
    _i("bfe.u32 %o, %a, %b, %c;", -1, 0, 0, 0),
    _i("bfe.u32 %o, %a, %b, %c;", -1, 0, 32, -1),
    _k("bfe.s64 %o, %a, %b, %c;", "b64 b64 b32 b32", 0xF0 << 40, 44, 4, -1),
    _i("bfi.b32 %o, %a, %b, %c, %d;", 0x5, 0xFFFFFFFF, 4, 4, 0xFFFFFF5F),
    _i("bfi.b32 %o, %a, %b, %c, %d;", 0xFF, 0, 28, 8, 0xF0000000),
    _i("bfi.b32 %o, %a, %b, %c, %d;", 0xFF, 7, 32, 8, 7),
    _k("bfi.b64 %o, %a, %b, %c, %d;", "b64 b64 b64 b32 b32", 0xAB, 0, 56, 8, 0xAB << 56),
    _i("bfind.u32 %o, %a;", 0x00010000, 16),
    _i("bfind.u32 %o, %a;", 0, -1),
    _i("bfind.s32 %o, %a;", -1, -1),
    _i("bfind.s32 %o, %a;", 0xFFFF0000, 15),
    _i("bfind.shiftamt.u32 %o, %a;", 0x00010000, 15),
    _k("bfind.u64 %o, %a;", "b32 b64", 1 << 40, 40),
    _i("clz.b32 %o, %a;", 0, 32),
    _k("clz.b64 %o, %a;", "b32 b64", 1, 63),
    _i("popc.b32 %o, %a;", 0xF0F0, 8),
    _k("popc.b64 %o, %a;", "b32 b64", -1, 64),
    _i("brev.b32 %o, %a;", 0x1, MIN),
    _l("brev.b64 %o, %a;", 0x3, 3 << 62),
    _i("prmt.b32 %o, %a, %b, %c;", 0x33221100, 0x77665544, 0x7531, 0x77553311),
    _i("prmt.b32 %o, %a, %b, %c;", 0x000000F0, 0, 0x0808, 0xF0FFF0FF),
    _i("prmt.b32.f4e %o, %a, %b, %c;", 0x33221100, 0x77665544, 1, 0x44332211),
    _i("prmt.b32.b4e %o, %a, %b, %c;", 0x33221100, 0x77665544, 1, 0x66770011),
    _i("prmt.b32.rc8 %o, %a, %b, %c;", 0x33221100, 0, 2, 0x22222222),
    _i("prmt.b32.ecl %o, %a, %b, %c;", 0x33221100, 0, 2, 0x33222222),
    _i("prmt.b32.ecr %o, %a, %b, %c;", 0x33221100, 0, 2, 0x22221100),
    _i("prmt.b32.rc16 %o, %a, %b, %c;", 0x33221100, 0, 1, 0x33223322),
    _i("lop3.b32 %o, %a, %b, %c, 0x96;", 0xF0, 0xCC, 0xAA, 0xF0 ^ 0xCC ^ 0xAA),
    _i("lop3.b32 %o, %a, %b, %c, 0xEA;", 0xF0, 0xCC, 0x01, (0xF0 & 0xCC) | 0x01),
    _i("bmsk.clamp.b32 %o, %a, %b;", 4, 8, 0xFF0),
    _i("bmsk.clamp.b32 %o, %a, %b;", 4, 99, 0xFFFFFFF0),
    _i("bmsk.wrap.b32 %o, %a, %b;", 36, 8, 0xFF0),
    _i("szext.clamp.s32 %o, %a, %b;", 0x8F, 8, 0xFFFFFF8F),
    _i("szext.wrap.u32 %o, %a, %b;", 0x18F, 40, 0x8F),
    _i("fns.b32 %o, %a, %b, 2;", 0b10110, 1, 2),
    _i("fns.b32 %o, %a, %b, -1;", 0b10110, 3, 2),
    _i("dp4a.s32.s32 %o, %a, %b, %c;", 0xFF010203, 0x02010101, 10, 10 - 2 + 1 + 2 + 3),
    _i("dp4a.u32.u32 %o, %a, %b, %c;", 0xFF010203, 0x02010101, 10, 10 + 510 + 6),
    _i("dp2a.lo.s32.u32 %o, %a, %b, %c;", 0xFFFF0002, 0x00000305, 1, 1 + 10 - 3),
    _i("dp2a.hi.u32.u32 %o, %a, %b, %c;", 0x00030002, 0x07050000, 1, 1 + 10 + 21),
    _i("{ .reg .b32 %t; add.cc.u32 %t, %a, %b; addc.u32 %o, 0, 0; }", -1, 1, 1),
    _i("{ .reg .b32 %t; sub.cc.u32 %t, %a, %b; subc.u32 %o, 5, 0; }", 1, 2, 4),
    _i("{ .reg .b32 %t; mad.lo.cc.u32 %t, %a, %b, %c; madc.hi.u32 %o, %a, %b, 0; }", -1, 2, 5, 2),
    _l("{ .reg .b64 %t; add.cc.u64 %t, %a, %b; addc.u64 %o, 10, 0; }", -1, 2, 11),
]  # fmt: skip

FLOAT = [
    _f("add.f32 %o, %a, %b;", 1.5, 2.25, 3.75),
    _f("add.rz.f32 %o, %a, %b;", 1.0, 2.0**-24 * 1.5, 1.0),
    _f("add.rp.f32 %o, %a, %b;", 1.0, 2.0**-60, 1.0 + 2.0**-23),
    _f("add.rm.f32 %o, %a, %b;", 1.0, -(2.0**-60), 1.0 - 2.0**-24),
    _f("sub.rz.f32 %o, %a, %b;", 1.0, 2.0**-60, 1.0 - 2.0**-24),
    _f("mul.rz.f32 %o, %a, %b;", 1.0 + 2.0**-23, 1.0 + 2.0**-23, 1.0 + 2.0**-22),
    _f("mul.rp.f32 %o, %a, %b;", 1.0 + 2.0**-23, 1.0 + 2.0**-23, 1.0 + 3 * 2.0**-23),
    _f("add.ftz.f32 %o, %a, %b;", TINY, 0.0, 0.0),
    _f("mul.ftz.f32 %o, %a, %b;", 1e-30, 1e-10, 0.0),
    _f("mul.f32 %o, %a, %b;", 1e-30, 1e-10, struct.unpack("<f", struct.pack("<f", 1e-40))[0]),
    _f("add.sat.f32 %o, %a, %b;", 0.75, 0.5, 1.0),
    _f("add.sat.f32 %o, %a, %b;", -3.0, 0.5, 0.0),
    _f("add.sat.f32 %o, %a, %b;", NAN, 0.5, 0.0),
    _f("fma.rn.f32 %o, %a, %b, %c;", 1.0 + 2.0**-23, 1.0 + 2.0**-23, -1.0, 2.0**-22 + 2.0**-46),
    _f("fma.rz.f32 %o, %a, %b, %c;", 2.0**-40, 2.0**-40, 1.0, 1.0),
    _f("fma.rp.f32 %o, %a, %b, %c;", 2.0**-40, 2.0**-40, 1.0, 1.0 + 2.0**-23),
    _f("mul.f32 %o, %a, %a; sub.f32 %o, %o, %b;", 1.0 + 2.0**-23, 1.0, 2.0**-22),
    _f("mad.rn.f32 %o, %a, %b, %c;", 2.0, 3.0, 4.0, 10.0),
    _f("div.rn.f32 %o, %a, %b;", 1.0, 3.0, 1 / 3),
    _f("div.rz.f32 %o, %a, %b;", 1.0, 3.0, 0.3333333134651184),
    _f("div.rp.f32 %o, %a, %b;", 1.0, 3.0, 0.3333333432674408),
    _f("div.full.f32 %o, %a, %b;", 1.0, 0.0, INF),
    _f("rcp.rn.f32 %o, %a;", 4.0, 0.25),
    _f("rcp.approx.ftz.f32 %o, %a;", TINY, INF),
    _f("sqrt.rn.f32 %o, %a;", 2.0, 2**0.5),
    _f("sqrt.rm.f32 %o, %a;", 2.0, 1.4142135381698608),
    _f("sqrt.rp.f32 %o, %a;", 2.0, 1.4142136573791504),
    _f("rsqrt.approx.f32 %o, %a;", 4.0, 0.5),
    _f("ex2.approx.f32 %o, %a;", 3.0, 8.0),
    _f("lg2.approx.f32 %o, %a;", 8.0, 3.0),
    _f("lg2.approx.f32 %o, %a;", 0.0, -INF),
    _f("sin.approx.f32 %o, %a;", 0.0, 0.0),
    _f("cos.approx.f32 %o, %a;", 0.0, 1.0),
    _f("tanh.approx.f32 %o, %a;", 50.0, 1.0),
    _f("neg.f32 %o, %a;", 0.0, -0.0),
    _f("abs.f32 %o, %a;", -INF, INF),
    _f("min.f32 %o, %a, %b;", -0.0, 0.0, -0.0),
    _f("max.f32 %o, %a, %b;", -0.0, 0.0, 0.0),
    _f("min.f32 %o, %a, %b;", NAN, 2.0, 2.0),
    _f("max.f32 %o, %a, %b;", 3.0, NAN, 3.0),
    _k("max.NaN.f32 %o, %a, %b;", "f32 f32 f32", f(3.0), f(NAN), 0x7FFFFFFF),
    _f("copysign.f32 %o, %a, %b;", -1.0, 5.0, -5.0),
    _d("add.f64 %o, %a, %b;", 0.1, 0.2, 0.1 + 0.2),
    _d("add.rp.f64 %o, %a, %b;", 1.0, 2.0**-90, 1.0 + 2.0**-52),
    _d("mul.rz.f64 %o, %a, %b;", 1.0 + 2.0**-52, 1.0 + 2.0**-52, 1.0 + 2.0**-51),
    _d("fma.rn.f64 %o, %a, %b, %c;", 1.0 + 2.0**-52, 1.0 + 2.0**-52, -1.0, 2.0**-51 + 2.0**-104),
    _d("fma.rm.f64 %o, %a, %b, %c;", 2.0**-90, -(2.0**-90), 1.0, 1.0 - 2.0**-53),
    _d("div.rn.f64 %o, %a, %b;", 1.0, 3.0, 1 / 3),
    _d("div.rp.f64 %o, %a, %b;", 1.0, 3.0, 1 / 3 + 2.0**-54),
    _d("sqrt.rn.f64 %o, %a;", 2.0, 2**0.5),
    _d("sqrt.rp.f64 %o, %a;", 2.0, 2**0.5),
    _d("sqrt.rm.f64 %o, %a;", 2.0, 2**0.5 - 2.0**-52),
    _d("rcp.approx.ftz.f64 %o, %a;", 3.0, struct.unpack("<d", struct.pack("<Q", d(1 / 3) >> 32 << 32))[0]),
    _d("min.f64 %o, %a, %b;", NAN, -1.0, -1.0),
    _d("neg.f64 %o, %a;", 1.5, -1.5),
    _d("abs.f64 %o, %a;", -1.5, 1.5),
    _d("copysign.f64 %o, %a, %b;", -1.0, 5.0, -5.0),
    _k("add.rn.f32x2 %o, %a, %b;", "b64 b64 b64", f(1.0) << 32 | f(2.0), f(3.0) << 32 | f(4.0), f(4.0) << 32 | f(6.0)),
    _k("fma.rn.f32x2 %o, %a, %b, %c;", "b64 b64 b64 b64", f(2.0) << 32 | f(3.0), f(3.0) << 32 | f(4.0), f(1.0) << 32 | f(2.0), f(7.0) << 32 | f(14.0)),
    _k("add.f16 %o, %a, %b;", "b16 b16 b16", h(1.5), h(2.0), h(3.5)),
    _k("mul.f16 %o, %a, %b;", "b16 b16 b16", h(300.0), h(300.0), 0x7C00),
    _k("fma.rn.f16 %o, %a, %b, %c;", "b16 b16 b16 b16", h(2.0**-14), h(2.0**-10), h(1.0), h(1.0)),
    # 1 + half an ulp + a little: rounds up only where the sum is rounded once
    _k("fma.rn.f16 %o, %a, %b, %c;", "b16 b16 b16 b16", h(2.0**-11 + 2.0**-21), h(1.0), h(1.0), h(1.0 + 2.0**-10)),
    _k("sub.f16x2 %o, %a, %b;", "b32 b32 b32", h(3.0) << 16 | h(5.0), h(1.0) << 16 | h(2.0), h(2.0) << 16 | h(3.0)),
    _k("max.f16x2 %o, %a, %b;", "b32 b32 b32", h(3.0) << 16 | h(-5.0), h(1.0) << 16 | h(2.0), h(3.0) << 16 | h(2.0)),
    _k("fma.rn.relu.f16 %o, %a, %b, %c;", "b16 b16 b16 b16", h(2.0), h(-3.0), h(1.0), 0),
    _k("neg.f16 %o, %a;", "b16 b16", h(1.0), h(-1.0)),
    _k("abs.bf16 %o, %a;", "b16 b16", 0xBF80, 0x3F80),
    _k("fma.rn.bf16 %o, %a, %b, %c;", "b16 b16 b16 b16", 0x4000, 0x4040, 0x3F80, 0x40E0),
    _k("ex2.approx.f16 %o, %a;", "b16 b16", h(3.0), h(8.0)),
    _k("tanh.approx.bf16x2 %o, %a;", "b32 b32", 0x42C80000, 0x3F800000),
]  # fmt: skip

CONVERT = [
    _k("cvt.rn.f32.s32 %o, %a;", "f32 b32", -7, f(-7.0)),
    _k("cvt.rn.f32.u32 %o, %a;", "f32 b32", -1, f(4294967296.0)),
    _k("cvt.rz.f32.u32 %o, %a;", "f32 b32", -1, f(4294967040.0)),
    _k("cvt.rp.f32.s64 %o, %a;", "f32 b64", 2**40 + 1, f(2.0**40 + 2.0**17)),
    _k("cvt.rm.f32.u64 %o, %a;", "f32 b64", -1, f(18446742974197923840.0)),
    _k("cvt.rp.f32.u64 %o, %a;", "f32 b64", 2**63 + 1, f(2.0**63 + 2.0**40)),
    _k("cvt.rn.f64.u64 %o, %a;", "f64 b64", -1, d(2.0**64)),
    _k("cvt.rz.f64.u64 %o, %a;", "f64 b64", -1, d(2.0**64 - 2048)),
    _k("cvt.rzi.s32.f32 %o, %a;", "b32 f32", f(-3.9), -3),
    _k("cvt.rni.s32.f32 %o, %a;", "b32 f32", f(2.5), 2),
    _k("cvt.rmi.s32.f32 %o, %a;", "b32 f32", f(-2.1), -3),
    _k("cvt.rpi.s32.f32 %o, %a;", "b32 f32", f(2.1), 3),
    _k("cvt.rzi.s32.f32 %o, %a;", "b32 f32", f(1e20), MAX),
    _k("cvt.rzi.s32.f32 %o, %a;", "b32 f32", f(-1e20), MIN),
    _k("cvt.rzi.s32.f32 %o, %a;", "b32 f32", f(NAN), 0),
    _k("cvt.rzi.u32.f32 %o, %a;", "b32 f32", f(-1.0), 0),
    _k("cvt.rzi.u32.f32 %o, %a;", "b32 f32", f(4e9), 4000000000),
    _k("cvt.rzi.u32.f64 %o, %a;", "b32 f64", d(4294967295.5), -1),
    _k("cvt.rzi.s64.f32 %o, %a;", "b64 f32", f(NAN), 1 << 63),
    _k("cvt.rzi.s64.f64 %o, %a;", "b64 f64", d(1e30), 2**63 - 1),
    _k("cvt.rzi.u64.f64 %o, %a;", "b64 f64", d(1.8e19), 18000000000000000000),
    _k("cvt.rzi.u8.f32 %o, %a;", "b16 f32", f(300.0), 255),
    _k("cvt.rni.f32.f32 %o, %a;", "f32 f32", f(2.5), f(2.0)),
    _k("cvt.rpi.f64.f64 %o, %a;", "f64 f64", d(-2.5), d(-2.0)),
    _k("cvt.f64.f32 %o, %a;", "f64 f32", f(1.5), d(1.5)),
    _k("cvt.rn.f32.f64 %o, %a;", "f32 f64", d(0.1), f(0.1)),
    _k("cvt.rz.f32.f64 %o, %a;", "f32 f64", d(0.1), f(0.1) - 1),
    _k("cvt.rp.f32.f64 %o, %a;", "f32 f64", d(1e300), F["inf"]),
    _k("cvt.rz.f32.f64 %o, %a;", "f32 f64", d(1e300), 0x7F7FFFFF),
    _k("cvt.sat.f32.f32 %o, %a;", "f32 f32", f(7.0), f(1.0)),
    _k("cvt.ftz.f32.f32 %o, %a;", "f32 f32", f(TINY), 0),
    _k("cvt.s64.s32 %o, %a;", "b64 b32", -5, -5),
    _k("cvt.u64.u32 %o, %a;", "b64 b32", -5, 0xFFFFFFFB),
    _k("cvt.u32.u64 %o, %a;", "b32 b64", 0x123456789A, 0x3456789A),
    _k("cvt.s32.s8 %o, %a;", "b32 b32", 0x1FF, -1),
    _k("cvt.u32.u16 %o, %a;", "b32 b16", 0xFFFF, 0xFFFF),
    _k("cvt.s32.s16 %o, %a;", "b32 b16", 0xFFFF, -1),
    _k("cvt.sat.s8.s32 %o, %a;", "b32 b32", 1000, 127),
    _k("cvt.sat.u8.s32 %o, %a;", "b32 b32", -3, 0),
    _k("cvt.sat.s32.u32 %o, %a;", "b32 b32", -3, MAX),
    _k("cvt.sat.u32.s64 %o, %a;", "b32 b64", 1 << 40, -1),
    _k("cvt.rn.f16.f32 %o, %a;", "b16 f32", f(65519.9), h(65504.0)),
    _k("cvt.rn.f16.f32 %o, %a;", "b16 f32", f(65520.0), 0x7C00),
    _k("cvt.rz.f16.f32 %o, %a;", "b16 f32", f(1e9), h(65504.0)),
    _k("cvt.rn.f16.f32 %o, %a;", "b16 f32", f(2.0**-25), 0),
    _k("cvt.rn.f16.f32 %o, %a;", "b16 f32", f(2.0**-25 * 1.01), 1),
    _k("cvt.rn.f16.f32 %o, %a;", "b16 f32", f(NAN), 0x7FFF),
    _k("cvt.f32.f16 %o, %a;", "f32 b16", 1, f(2.0**-24)),
    _k("cvt.f32.f16 %o, %a;", "f32 b16", 0xFC00, F["-inf"]),
    _k("cvt.f64.f16 %o, %a;", "f64 b16", h(1.5), d(1.5)),
    _k("cvt.rn.f16.f64 %o, %a;", "b16 f64", d(1.0 + 2.0**-11 + 2.0**-40), h(1.0 + 2.0**-10)),
    _k("cvt.rn.f16.s32 %o, %a;", "b16 b32", -3, h(-3.0)),
    _k("cvt.rzi.s32.f16 %o, %a;", "b32 b16", h(-3.5), -3),
    _k("cvt.rn.bf16.f32 %o, %a;", "b16 f32", 0x3F808000, 0x3F80),
    _k("cvt.rn.bf16.f32 %o, %a;", "b16 f32", 0x3F818000, 0x3F82),
    _k("cvt.f32.bf16 %o, %a;", "f32 b16", 0x4049, 0x40490000),
    _k("cvt.rn.f16x2.f32 %o, %a, %b;", "b32 f32 f32", f(1.0), f(2.0), h(1.0) << 16 | h(2.0)),
    _k("cvt.rn.bf16x2.f32 %o, %a, %b;", "b32 f32 f32", f(1.0), f(-2.0), 0x3F80C000),
    _k("cvt.rn.relu.f16x2.f32 %o, %a, %b;", "b32 f32 f32", f(-1.0), f(2.0), h(2.0)),
    _k("cvt.rna.tf32.f32 %o, %a;", "b32 f32", 0x3F801000, 0x3F802000),
    _k("mov.b64 %o, {%a, %b};", "b64 b32 b32", 1, 2, 2 << 32 | 1),
    _k("{ .reg .b32 %t; mov.b64 {%t, %o}, %a; }", "b32 b64", 5 << 32 | 9, 5),
    _k("{ .reg .b16 %t; mov.b32 {%o, %t}, %a; }", "b16 b32", 0x12345678, 0x5678),
    _k("{ .reg .b16 %t, %u, %v; mov.b64 {%t, %u, %v, %o}, %a; }", "b16 b64", 0x1234 << 48, 0x1234),
    _k("{ .reg .b128 %q; mov.b128 %q, {%a, %b}; mov.b128 {_, %o}, %q; }", "b64 b64 b64", 7, 9, 9),
    _k("mov.b32 %o, %a;", "b32 f32", f(2.5), f(2.5)),
    _k("mov.f32 %o, 0f40490FDB;", "f32 f32", 0, 0x40490FDB),
    _k("mov.f64 %o, 1.5;", "f64 f64", 0, d(1.5)),
    _k("mov.f32 %o, 2.5e1;", "f32 f32", 0, f(25.0)),
    _k("mov.u32 %o, 0x1F;", "b32 b32", 0, 31),
    _k("mov.u32 %o, 0b101;", "b32 b32", 0, 5),
    _k("mov.u32 %o, 017;", "b32 b32", 0, 15),
    _k("mov.u32 %o, WARP_SZ;", "b32 b32", 0, 32),
]  # fmt: skip

COMPARE = [
    _p("setp.lt.s32 %p, %a, %b;", "b32", 0xFFFFFFFF, 1, 1),
    _p("setp.lt.u32 %p, %a, %b;", "b32", 0xFFFFFFFF, 1, 0),
    _p("setp.lo.u32 %p, %a, %b;", "b32", 1, 0xFFFFFFFF, 1),
    _p("setp.hs.u32 %p, %a, %b;", "b32", 1, 1, 1),
    _p("setp.eq.b64 %p, %a, %b;", "b64", 1 << 40, 1 << 40, 1),
    _p("setp.ge.s64 %p, %a, %b;", "b64", 2**64 - 1, 0, 0),
    _p("setp.gt.s16 %p, %a, %b;", "b16", 0x8000, 1, 0),
    _p("setp.lt.f32 %p, %a, %b;", "f32", f(NAN), f(1.0), 0),
    _p("setp.ne.f32 %p, %a, %b;", "f32", f(NAN), f(1.0), 0),
    _p("setp.neu.f32 %p, %a, %b;", "f32", f(NAN), f(1.0), 1),
    _p("setp.geu.f32 %p, %a, %b;", "f32", f(0.5), f(1.0), 0),
    _p("setp.equ.f32 %p, %a, %b;", "f32", f(NAN), f(NAN), 1),
    _p("setp.num.f32 %p, %a, %b;", "f32", f(1.0), f(2.0), 1),
    _p("setp.nan.f64 %p, %a, %b;", "f64", d(1.0), d(NAN), 1),
    _p("setp.eq.f32 %p, %a, %b;", "f32", f(0.0), f(-0.0), 1),
    _p("setp.eq.ftz.f32 %p, %a, %b;", "f32", f(TINY), 0, 1),
    _p("setp.lt.f16 %p, %a, %b;", "b16", h(-1.0), h(1.0), 1),
    _p("setp.gt.bf16 %p, %a, %b;", "b16", 0x4000, 0x3F80, 1),
    _p("{ .reg .pred %q; setp.lt.s32 %q|%p, %a, %b; }", "b32", 1, 2, 0),
    _p("{ .reg .pred %q; setp.eq.s32 %q, 1, 1; setp.lt.and.s32 %p, %a, %b, !%q; }", "b32", 1, 2, 0),
    _p("{ .reg .pred %q; setp.eq.s32 %q, 1, 1; setp.gt.or.s32 %p, %a, %b, %q; }", "b32", 1, 2, 1),
    _p("{ .reg .pred %q; setp.lt.f16x2 %p|%q, %a, %b; not.pred %q, %q; and.pred %p, %p, %q; }", "b32", h(5.0) << 16 | h(1.0), h(2.0) << 16 | h(3.0), 1),
    _p("testp.infinite.f32 %p, %a;", "f32", f(INF), 1),
    _p("testp.subnormal.f32 %p, %a;", "f32", f(TINY), 1),
    _p("testp.normal.f64 %p, %a;", "f64", 0, 0),
    _p("testp.notanumber.f32 %p, %a;", "f32", f(NAN), 1),
    _i("set.lt.u32.s32 %o, %a, %b;", -1, 1, -1),
    _k("set.gt.f32.s32 %o, %a, %b;", "f32 b32 b32", 5, 1, f(1.0)),
    _k("set.eq.u32.f16x2 %o, %a, %b;", "b32 b32 b32", h(1.0) << 16, h(1.0) << 16 | h(2.0), 0xFFFF0000),
    _i("slct.b32.s32 %o, %a, %b, %c;", 10, 20, -1, 20),
    _k("slct.f32.f32 %o, %a, %b, %c;", "f32 f32 f32 f32", f(1.0), f(2.0), f(-0.0), f(1.0)),
    _i("{ .reg .pred %q; mov.pred %q, 1; @!%q mov.u32 %o, 9; @%q mov.u32 %o, %a; }", 4, 4),
    _i("{ @%np bra L; mov.u32 %o, %a; bra M; L: mov.u32 %o, 99; M: }", 6, 6),
    _i("{ T: .branchtargets A, B, C; brx.idx %a, T; A: mov.u32 %o, 10; bra E; B: mov.u32 %o, 11; bra E; C: mov.u32 %o, 12; E: }", 2, 12),
]  # fmt: skip

MEMORY = [
    _i("st.local.u8 [loc], %a; ld.local.s8 %o, [loc];", 0xFF, -1),
    _i("st.local.u8 [loc+3], %a; ld.local.u8 %o, [loc+3];", 0x1FF, 0xFF),
    _i("st.local.v2.b32 [loc], {%a, %b}; ld.local.v2.u32 {_, %o}, [loc];", 1, 2, 2),
    _i("{ .reg .b64 %t; mov.u64 %t, loc; cvta.local.u64 %t, %t; st.u32 [%t+4], %a; ld.local.u32 %o, [loc+4]; }", 9, 9),
    _i("st.shared.u32 [sh+4], %a; { .reg .b32 %t; mov.u32 %t, sh; ld.shared.u32 %o, [%t+4]; }", 12, 12),
    _i("{ .reg .b64 %t; mov.u64 %t, sh; cvta.shared.u64 %t, %t; st.u32 [%t], %a; ld.shared.u32 %o, [sh]; }", 13, 13),
    _i("{ .reg .b64 %t; cvta.shared.u64 %t, sh; cvta.to.shared.u64 %t, %t; st.shared.u32 [%t], %a; ld.shared.u32 %o, [sh]; }", 14, 14),
    _p("{ .reg .b64 %t; cvta.shared.u64 %t, sh; isspacep.shared %p, %t; }", "b32", 0, 1),
    _p("{ .reg .b64 %t; cvta.global.u64 %t, glob; isspacep.shared %p, %t; }", "b32", 0, 0),
    _p("{ .reg .b64 %t; cvta.global.u64 %t, glob; isspacep.global %p, %t; }", "b32", 0, 1),
    _p("{ .reg .b64 %t; mov.u64 %t, loc; cvta.local.u64 %t, %t; isspacep.local %p, %t; }", "b32", 0, 1),
    _i("ld.const.u32 %o, [con+4];", 0, 0x08070605),
    _i("ld.global.nc.v4.u8 {_, _, %o, _}, [raw];", 0, 3),
    _k("{ .reg .b64 %t; ld.global.u64 %t, [ptr]; ld.u32 %o, [%t]; }", "b32 b32", 0, 0x04030201),
    _i("st.volatile.global.u32 [glob], %a; ld.relaxed.gpu.global.u32 %o, [glob]; st.global.u32 [glob], 0;", 77, 77),
    _i("st.release.gpu.global.u32 [glob], %a; fence.acq_rel.gpu; ld.acquire.gpu.global.u32 %o, [glob];", 78, 78),
    _i("st.shared.u32 [sh], %a; atom.shared.add.u32 %o, [sh], 5; ld.shared.u32 %o, [sh];", 3, 8),
    _i("st.shared.u32 [sh], %a; atom.shared.cas.b32 %o, [sh], 3, %b; ld.shared.u32 %o, [sh];", 3, 44, 44),
    _i("st.shared.u32 [sh], %a; atom.shared.exch.b32 %o, [sh], %b;", 3, 44, 3),
    _i("st.shared.u32 [sh], %a; atom.shared.inc.u32 %o, [sh], %b; ld.shared.u32 %o, [sh];", 7, 7, 0),
    _i("st.shared.u32 [sh], %a; atom.shared.dec.u32 %o, [sh], %b; ld.shared.u32 %o, [sh];", 0, 7, 7),
    _i("st.shared.u32 [sh], %a; red.shared.min.s32 [sh], %b; ld.shared.u32 %o, [sh];", 3, -4, -4),
    _i("st.shared.u32 [sh], %a; red.shared.max.u32 [sh], %b; ld.shared.u32 %o, [sh];", 3, -4, -4),
    _i("st.shared.u32 [sh], %a; red.shared.xor.b32 [sh], %b; ld.shared.u32 %o, [sh];", 0xF0, 0xFF, 0x0F),
    _l("st.shared.u64 [sh], %a; atom.shared.add.u64 %o, [sh], %b; ld.shared.u64 %o, [sh];", 1 << 40, 5, (1 << 40) + 5),
    _k("st.shared.f32 [sh], %a; atom.shared.add.f32 %o, [sh], %b; ld.shared.f32 %o, [sh];", "f32 f32 f32", f(1.5), f(2.0), f(3.5)),
    _k("st.shared.f64 [sh], %a; red.shared.add.f64 [sh], %b; ld.shared.f64 %o, [sh];", "f64 f64 f64", d(1.5), d(2.0), d(3.5)),
    _k("st.shared.b16 [sh], %a; atom.shared.add.noftz.f16 %o, [sh], %b; ld.shared.b16 %o, [sh];", "b16 b16 b16", h(1.5), h(2.0), h(3.5)),
    _k("st.shared.b16 [sh], %a; atom.shared.cas.b16 %o, [sh], 7, %b; ld.shared.b16 %o, [sh];", "b16 b16 b16", 7, 9, 9),
    _i("{ .param .b32 m; st.param.b32 [m], %a; .param .b32 n; call (n), twice, (m); ld.param.b32 %o, [n]; }", 21, 42),
    _i("{ .reg .b64 %f; mov.u64 %f, twice; .param .b32 m; st.param.b32 [m], %a; .param .b32 n; P: .callprototype (.param .b32 _) _ (.param .b32 _); call (n), %f, (m), P; ld.param.b32 %o, [n]; }", 4, 8),
    _i("call (%o), thrice, (%a);", 5, 15),
    _i("prefetch.global.L1 [glob]; mov.u32 %o, %a;", 5, 5),
    _i("mov.u32 %o, %ntid.x;", 0, 1),
    _i("mov.u32 %o, %nctaid.y;", 0, 1),
    _i("mov.u32 %o, %lanemask_le;", 0, 1),
    _i("{ .reg .b64 %t, %u; mov.u64 %t, %clock64; mov.u64 %u, %clock64; setp.ge.u64 %p, %u, %t; selp.b32 %o, 1, 0, %p; }", 0, 1),
]  # fmt: skip

CASES = INTEGER + FLOAT + CONVERT + COMPARE + MEMORY
AROUND = """
.global .align 4 .u32 glob = 0;
.const .align 4 .b8 con[8] = {1, 2, 3, 4, 5, 6, 7, 8};
.global .align 4 .b8 raw[4] = {1, 2, 3, 4};
.global .align 8 .u64 ptr = con;
.func (.param .b32 r) twice(.param .b32 x) { .reg .b32 %v; ld.param.b32 %v, [x]; shl.b32 %v, %v, 1; st.param.b32 [r], %v; ret; }
.func (.reg .b32 r) thrice(.reg .b32 x) { mul.lo.u32 r, x, 3; ret; }
"""


def _kernel(number: int, case: Case) -> str:
    kinds = case.kinds.split()
    lines = [f".reg .{kind} %{name};" for kind, name in zip(kinds, "oabcd", strict=False)]
    loads = [
        f"ld.global.{kind} %{name}, [%in+{8 * index}];"
        for index, (kind, name) in enumerate(zip(kinds[1:], "abcd", strict=False))
    ]
    return "\n".join(
        [
            f".visible .entry k{number}(.param .u64 x, .param .u64 y) {{",
            ".reg .b64 %in, %out; .reg .pred %p, %np; .local .align 8 .b8 loc[16]; .shared .align 8 .b8 sh[16];",
            *lines,
            "ld.param.u64 %in, [x]; ld.param.u64 %out, [y]; setp.ne.u32 %np, 0, 0;",
            *loads,
            case.text,
            f"st.global.{kinds[0]} [%out], %o;",
            "ret; }",
        ]
    )


@pytest.fixture(scope="module")
def module(engine: Engine) -> Module:
    """All cases in one module: one run of gcc."""
    return engine.load(HEAD + AROUND + "\n".join(_kernel(number, case) for number, case in enumerate(CASES)))


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: f"{CASES[number].text[:40]}-{number}")
def test_op(module: Module, number: int) -> None:
    case = CASES[number]
    size = int(case.kinds.split()[0][1:])
    out = Buffer("Q", 1)
    done = module.launch(f"k{number}", [1], [1], [Buffer("Q", case.inputs or [0]), out])
    assert done.result == 0, done.message
    got = int(out.read()[0])
    assert got == case.expected, f"{case.text}: {got:#x}, expected {case.expected:#x}"
    assert got < 1 << size


def _random_kernel(text: str, count: int) -> str:
    loads = "".join(f"ld.global.u64 %{name}, [%in+{8 * i}];" for i, name in enumerate("abcd"[:count]))
    return f"""{HEAD}.visible .entry k(.param .u64 x, .param .u64 y) {{
.reg .b64 %in, %out, %a, %b, %c, %d, %o, %o2; .reg .b32 %t<20>; .reg .b32 %i;
ld.param.u64 %in, [x]; ld.param.u64 %out, [y]; mov.u32 %i, %tid.x; mad.wide.u32 %in, %i, {8 * count}, %in;
mad.wide.u32 %out, %i, 16, %out; {loads} {text} st.global.v2.u64 [%out], {{%o, %o2}}; ret; }}"""


def test_a_64_bit_product_by_carries_is_the_128_bit_product(engine: Engine) -> None:
    """The sequence that CUDA's own library uses."""
    text = """mov.b64 {%t0,%t1}, %a; mov.b64 {%t2,%t3}, %b;
    mul.lo.u32 %t4, %t0, %t2; mul.hi.u32 %t5, %t0, %t2;
    mad.lo.cc.u32 %t5, %t0, %t3, %t5; madc.hi.u32 %t6, %t0, %t3, 0;
    mad.lo.cc.u32 %t5, %t1, %t2, %t5; madc.hi.cc.u32 %t6, %t1, %t2, %t6; madc.hi.u32 %t7, %t1, %t3, 0;
    mad.lo.cc.u32 %t6, %t1, %t3, %t6; addc.u32 %t7, %t7, 0;
    mov.b64 %o, {%t4,%t5}; mov.b64 %o2, {%t6,%t7};"""
    rng = random.Random(11)
    values = [rng.randrange(2**64) for _ in range(400)]
    out = Buffer("Q", 400)
    engine.load(_random_kernel(text, 2)).launch("k", [1], [200], [Buffer("Q", values), out])
    got = out.read()
    for i in range(200):
        product = values[2 * i] * values[2 * i + 1]
        assert (got[2 * i], got[2 * i + 1]) == (product % 2**64, product >> 64)


def test_funnel_shifts_and_bit_fields_on_random_values(engine: Engine) -> None:
    text = """mov.b64 {%t0,%t1}, %a; mov.b64 {%t2,%t3}, %b;
    shf.r.wrap.b32 %t4, %t0, %t1, %t2; bfe.u32 %t5, %t0, %t2, %t3; bfe.s32 %t6, %t1, %t2, %t3;
    bfi.b32 %t7, %t0, %t1, %t2, %t3; mov.b64 %o, {%t4,%t5}; mov.b64 %o2, {%t6,%t7};"""
    rng = random.Random(12)
    values = [v for _ in range(300) for v in (rng.randrange(2**64), rng.randrange(40) | rng.randrange(40) << 32)]
    out = Buffer("I", 1200)
    engine.load(_random_kernel(text, 2)).launch("k", [1], [300], [Buffer("Q", values), out])
    got = out.read()
    for i in range(300):
        pair, pos, length = values[2 * i], values[2 * i + 1] & 255, values[2 * i + 1] >> 32 & 255
        low, high = pair % 2**32, pair >> 32
        signed = high - (high >> 31 << 32)
        field = (signed >> min(pos, 31)) & ((1 << length) - 1) if length else 0
        if length and (field >> (length - 1)) & 1:
            field -= 1 << length
        mask = ((1 << length) - 1) << pos & 0xFFFFFFFF if pos < 32 else 0
        expected = [
            pair >> (pos & 31) & 0xFFFFFFFF,
            low >> pos & ((1 << length) - 1),
            field & 0xFFFFFFFF,
            high & ~mask | low << pos & mask,
        ]
        assert got[4 * i : 4 * i + 4] == expected, (hex(pair), pos, length)

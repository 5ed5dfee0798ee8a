"""The fundamental types of PTX (PTX ISA 5.2) and what C type holds each."""

from __future__ import annotations

SIZES = {
    "u8": 1, "s8": 1, "b8": 1,
    "u16": 2, "s16": 2, "b16": 2, "f16": 2, "bf16": 2,
    "u32": 4, "s32": 4, "b32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "u16x2": 4, "s16x2": 4,
    "u64": 8, "s64": 8, "b64": 8, "f64": 8, "f32x2": 8,
    "b128": 16,
}  # fmt: skip

# How a value of the type is held while an op works on it. Halves are held as their bits.
VALUE = {
    "u8": "uint8_t", "s8": "int8_t", "b8": "uint8_t",
    "u16": "uint16_t", "s16": "int16_t", "b16": "uint16_t", "f16": "uint16_t", "bf16": "uint16_t",
    "u32": "uint32_t", "s32": "int32_t", "b32": "uint32_t", "f32": "float",
    "f16x2": "uint32_t", "bf16x2": "uint32_t", "u16x2": "uint32_t", "s16x2": "uint32_t",
    "u64": "uint64_t", "s64": "int64_t", "b64": "uint64_t", "f64": "double", "f32x2": "uint64_t",
    "b128": "kp_u128", "pred": "uint8_t",
}  # fmt: skip

FLOATS = {"f32", "f64"}
HALVES = {"f16", "bf16"}
PAIRS = {"f16x2", "bf16x2", "f32x2"}
SIGNED = {"s8", "s16", "s32", "s64"}

# What holds a register of the type: bits, except where the register is only ever used as a float.
STORAGE = {1: "uint16_t", 2: "uint16_t", 4: "uint32_t", 8: "uint64_t", 16: "kp_u128"}


def unsigned(size: int) -> str:
    """The unsigned C type of `size` bytes."""
    return {1: "uint8_t", 2: "uint16_t", 4: "uint32_t", 8: "uint64_t", 16: "kp_u128"}[size]


def bits(type_: str) -> int:
    return SIZES[type_] * 8

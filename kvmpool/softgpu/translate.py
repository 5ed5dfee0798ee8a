"""Translates PTX to C: `python3 -I translate.py OUT.c IN.ptx...`; the engine then compiles and loads OUT.c.

Standard library only: libcuda.so.1 starts this in whatever Python the machine has. Exit code 0; or 3, with one line
on stderr (`line N: OP is not supported ...`) where the PTX is refused.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # run as a script with -I: the package is two folders up
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvmpool.softgpu import (  # noqa: E402  (the path above must come first; each of these registers its ops)
    ptx_ops_compare,
    ptx_ops_control,
    ptx_ops_convert,
    ptx_ops_float,
    ptx_ops_int,
    ptx_ops_memory,
)
from kvmpool.softgpu.ptx_emit import Emitter  # noqa: E402
from kvmpool.softgpu.ptx_link import Program, Routine, link  # noqa: E402
from kvmpool.softgpu.ptx_parse import parse  # noqa: E402
from kvmpool.softgpu.ptx_tree import Imm, PtxError, Variable  # noqa: E402
from kvmpool.softgpu.ptx_types import FLOATS, SIZES  # noqa: E402

REFUSED = 3
_NEUTRAL = {"b32", "b64"}  # a move says nothing about what a register holds
_OPS = (ptx_ops_compare, ptx_ops_control, ptx_ops_convert, ptx_ops_float, ptx_ops_int, ptx_ops_memory)


def translate(texts: list[str]) -> str:
    """The C for one or more PTX texts linked together. Raises PtxError."""
    program = link([parse(text) for text in texts])
    parts = ['#include "rt_ops.h"', ""]
    bodies = []
    for routine in program.routines:
        emitter, body = _emit(program, routine)
        routine.local_bytes = emitter.local_bytes
        parts.append(_signature(routine) + ";")
        bodies.append(_function(routine, body))
        bodies.append(_kernel(routine, emitter) if routine.function.entry else "")
    _add_up_local(program)
    parts += [*bodies, _initialiser(program), _tables(program)]
    return "\n".join(parts) + "\n"


def _add_up_local(program: Program) -> None:
    """A kernel needs stack for all that it may call; through pointers that may be anything."""
    by_name = {routine.cname: routine for routine in program.routines}
    total = sum(routine.local_bytes for routine in program.routines if not routine.function.entry)
    for routine in program.routines:
        if not routine.function.entry:
            continue
        seen, todo = {routine.cname}, [routine.cname]
        while todo:
            new = by_name[todo.pop()].callees - seen
            seen |= new
            todo += sorted(new & by_name.keys())
        reached = [by_name[name] for name in seen if name in by_name]
        below = sum(other.local_bytes for other in reached if other is not routine)
        routine.local_bytes += total if any(other.indirect for other in reached) else below


def _emit(program: Program, routine: Routine) -> tuple[Emitter, str]:
    """Emits twice where the text types its registers by size only: the first pass finds those that are floats."""
    emitter = Emitter(program, routine, {})
    body = emitter.body()
    if any(register.type in FLOATS for register in emitter.registers):
        return emitter, body
    used: dict[str, set[str]] = {}
    for register in emitter.registers:
        used.setdefault(register.cname, set()).update(register.used_as)
    floats = {}
    for cname, types in used.items():
        real = types - _NEUTRAL
        if len(real) == 1 and real <= FLOATS:
            floats[cname] = {"f32": "float", "f64": "double"}[real.pop()]
    if not floats:
        return emitter, body
    emitter = Emitter(program, routine, floats)
    return emitter, emitter.body()


def _signature(routine: Routine) -> str:
    if routine.function.entry:
        return f"static void {routine.cname}(struct kp_thread *t)"
    params = "".join(f", const uint8_t *p{index}" for index in range(len(routine.function.params)))
    return f"static void {routine.cname}(struct kp_thread *t, uint8_t *ret{params})"


def _function(routine: Routine, body: str) -> str:
    lead = "uint32_t cc = 0; (void)cc; (void)t;"
    if routine.function.entry:
        lead += " const uint8_t *const P = t->b->param; (void)P;"
    return f"{_signature(routine)}\n{{\n{lead}\n{body}\n}}\n"


def _kernel(routine: Routine, emitter: Emitter) -> str:
    """The loop over a block's threads for a kernel without fibers, and the table of its parameters."""
    name = routine.cname
    offset, rows = 0, []
    for param in routine.function.params:
        offset = -(-offset // param.align) * param.align
        rows.append(f"{{{offset}, {param.size}}}")
        offset += param.size
    routine.param_bytes = offset
    routine.registers = min(255, max(16, len(emitter.registers)))
    table = f"static const struct kp_param_info {name}_params[] = {{{', '.join([*rows, '{0, 0}'])}}};\n"
    if routine.fibers:
        return table
    return f"""static void {name}_block(struct kp_thread *t)
{{
struct kp_thread me = *t;
for (me.tid[2] = 0; me.tid[2] < me.b->ntid[2]; me.tid[2]++)
for (me.tid[1] = 0; me.tid[1] < me.b->ntid[1]; me.tid[1]++)
for (me.tid[0] = 0; me.tid[0] < me.b->ntid[0]; me.tid[0]++, me.flat++)
{name}(&me);
}}
{table}"""


def _initialiser(program: Program) -> str:
    lines = ["static void kp_init(uint8_t *memory)", "{", "(void)memory;"]
    for unit, variable, symbol in program.variables:
        if variable.init:
            lines += _initial_values(program, unit, variable, symbol.offset)
    return "\n".join([*lines, "}", ""])


def _initial_values(program: Program, unit: int, variable: Variable, offset: int) -> list[str]:
    size = SIZES[variable.type]
    data = bytearray()
    addresses = []
    for index, init in enumerate(variable.init):
        value = init.value
        if isinstance(value, Imm):
            data += (value.value & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
            continue
        data += bytes(size)
        symbol = program.symbols[unit].get(value.name)
        if symbol is None or symbol.kind not in ("memory", "function") or size != 8:
            raise PtxError(variable.line, f"{variable.name} cannot be initialised with the address of {value.name}")
        base = f"(memory + {symbol.offset}u)" if symbol.kind == "memory" else symbol.cname
        address = f"(uint64_t)(uintptr_t){base} + {value.offset}"
        addresses.append(f"{{ const uint64_t a = {address}; memcpy(memory + {offset + index * 8}, &a, 8); }}")
    if not any(data):
        return addresses
    text = ",".join(str(byte) for byte in data)
    return [f"{{ static const uint8_t v[] = {{{text}}}; memcpy(memory + {offset}, v, {len(data)}); }}", *addresses]


def _tables(program: Program) -> str:
    kernels = [_kernel_row(routine) for routine in program.routines if routine.function.entry]
    variables = [
        f'{{"{variable.name}", {int(variable.space == "const")}, {symbol.offset}u, {symbol.size}u}},'
        for _, variable, symbol in program.variables
    ]
    return "\n".join(
        [
            "static const struct kp_kernel_info kp_kernels[] = {",
            *kernels,
            "{0}};",
            "static const struct kp_variable_info kp_variables[] = {",
            *variables,
            "{0}};",
            '__attribute__((visibility("default"))) const struct kp_unit kp_unit = {',
            f"KP_ABI, {program.target}, {len(kernels)}, {len(variables)}, kp_kernels, kp_variables,",
            f"{program.memory_bytes}u, {program.const_bytes}u, kp_init}};",
        ]
    )


def _kernel_row(routine: Routine) -> str:
    name = routine.cname
    block = "NULL" if routine.fibers else f"{name}_block"
    return (
        f'{{"{routine.function.name}", {name}, {block}, {name}_params, {len(routine.function.params)}, '
        f"{routine.param_bytes}, {routine.shared_bytes}, {routine.local_bytes}, {routine.registers}, "
        f"{routine.function.max_threads}}},"
    )


def main(argv: list[str]) -> int:
    if len(argv) < 3:
        sys.stderr.write("usage: translate.py OUT.c IN.ptx...\n")
        return 2
    try:
        text = translate([Path(name).read_text(encoding="utf-8", errors="replace") for name in argv[2:]])
    except (PtxError, RecursionError) as error:
        sys.stderr.write(f"{error}\n")
        return REFUSED
    Path(argv[1]).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))

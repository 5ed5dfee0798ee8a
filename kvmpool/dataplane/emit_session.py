"""Writes the worker's half: the driver's function table, handlers that decode, and the dispatch table."""

from __future__ import annotations

from kvmpool.dataplane.calltable import Arg, Call, Kind, Op, Table

_HEAD = "/* Generated from calls.toml by generate.py. */\n"


def op_header(table: Table) -> str:
    """calls.h: op numbers, fields of the hand-written ops, capability hash."""
    lines = [_HEAD + '#ifndef KVMPOOL_CALLS_H\n#define KVMPOOL_CALLS_H\n\n#include "frame.h"\n\nenum kp_call_op {']
    first = True
    for entry in table.wire():
        lines.append(f"    KP_OP_{entry.name}{' = KP_OP_CALLS' if first else ''},")
        first = False
    lines.append('    KP_OP_CALLS_END,\n};\n_Static_assert((int)KP_OP_CALLS_END <= (int)KP_OP_MAX, "op numbers");\n')
    for op in table.ops:
        if op.fields:
            fields = ", ".join(f"KP_{op.name.upper()}_{field.upper()}" for field in op.fields)
            lines.append(f"enum {{ {fields}, KP_{op.name.upper()}_IN }};")
    most_in = max(len(e.fields) if isinstance(e, Op) else len(e.numbers_in) for e in table.wire())
    most_out = max(0 if isinstance(e, Op) else len(e.outs) for e in table.wire())
    digest = ", ".join(f"0x{byte:02x}" for byte in table.capability_hash())
    lines.append(f"\n#define KP_IN_MAX {most_in}\n#define KP_OUT_MAX {max(1, most_out)}")
    lines.append(f"#define KP_CAPS_HASH {{{digest}}}\n\n#endif")
    return "\n".join(lines) + "\n"


def driver_header(table: Table) -> str:
    """session_driver.h: one function pointer for each driver function that the session calls."""
    lines = [_HEAD + '#ifndef KVMPOOL_SESSION_DRIVER_H\n#define KVMPOOL_SESSION_DRIVER_H\n\n#include "cuda_abi.h"\n']
    lines.append("struct kp_driver {")
    for name, types in _driver_functions(table):
        lines.append(f"    CUresult (*{name})({', '.join(types) or 'void'});")
    lines.append("};\n\n#endif")
    return "\n".join(lines) + "\n"


def handlers(table: Table) -> str:
    """session_handlers.c: decode, call, encode; and the tables that session_*.c walk."""
    lines = [_HEAD + '#include "session_state.h"\n\n#include <string.h>\n']
    lines += [_handler(call) for call in table.calls if call.sent and not call.worker_by_hand]
    lines.append("const struct kp_op_info kp_ops[KP_OP_CALLS_END - KP_OP_CALLS] = {")
    lines += [_row(entry) for entry in table.wire()]
    lines.append("};\n\nconst struct kp_driver_symbol kp_driver_symbols[] = {")
    lines += [f'    {{"{name}", offsetof(struct kp_driver, {name})}},' for name, _ in _driver_functions(table)]
    lines.append(f"}};\nconst unsigned kp_driver_symbol_count = {len(_driver_functions(table))};")
    return "\n".join(lines) + "\n"


def _driver_functions(table: Table) -> list[tuple[str, tuple[str, ...]]]:
    forwarded = [
        (call.name, tuple(arg.type for arg in call.args))
        for call in table.calls
        if call.sent and not call.worker_by_hand
    ]
    return list(table.driver) + forwarded


def _row(entry: Op | Call) -> str:
    if isinstance(entry, Op):
        numbers, outs, by_hand = len(entry.fields), 0, True
        tail, bulk, context = entry.tail, entry.bulk, entry.needs_context
    else:
        numbers, outs, by_hand = len(entry.numbers_in), len(entry.outs), entry.worker_by_hand
        tail, bulk, context = "text" if entry.text else "", "", entry.needs_context
    fields = {
        "name": f'"{entry.name}"',
        "cls": f"KP_CLASS_{entry.cls.name}",
        "numbers": numbers,
        "outs": outs,
        "tail": f"KP_TAIL_{(tail or 'none').upper()}",
        "bulk": f"KP_BULK_{(bulk or 'none').upper()}",
        "needs_context": int(context),
        "run": f"{'kp_do_' if by_hand else 'run_'}{entry.name}",
    }
    return "    {" + ", ".join(f".{key} = {value}" for key, value in fields.items()) + "},"


def _handler(call: Call) -> str:
    lines = [f"static int run_{call.name}(struct kp_server *s, struct kp_work *w)", "{"]
    numbers = {arg.name: index for index, arg in enumerate(call.numbers_in)}
    outs = {arg.name: index for index, arg in enumerate(call.outs)}
    values = []
    before: list[str] = []
    after: list[str] = []
    for arg in call.args:
        values.append(_argument(arg, numbers, outs, lines, before, after))
    lines.append("    int rc;\n")
    if not call.args:
        lines.append("    (void)w;")
    lines += before
    lines.append(f"    rc = s->driver.{call.name}({', '.join(values)});")
    lines += after
    lines.append("    return rc;\n}\n")
    return "\n".join(lines)


def _argument(
    arg: Arg, numbers: dict[str, int], outs: dict[str, int], declare: list[str], before: list[str], after: list[str]
) -> str:
    """The expression that stands for `arg` in the driver call, with what it needs around the call."""
    match arg.kind:
        case Kind.TEXT:
            return "(const char *)w->tail"
        case Kind.VALUE | Kind.DEVICE:
            return f"({arg.type})w->in[{numbers[arg.name]}]"
        case Kind.OUT | Kind.OUT_OPTIONAL:
            declare.append(f"    {arg.pointee} {arg.name} = 0;")
            after.append(f"    memcpy(&w->out[{outs[arg.name]}], &{arg.name}, sizeof {arg.name});")
            return f"&{arg.name}"
        case Kind.NEW:
            declare.append(f"    {arg.pointee} {arg.name} = NULL;")
            room = f"kp_may_adopt(s, w->in[{numbers[arg.name]}], KP_{arg.object.upper()})"
            before.append(f"    if ((rc = {room}) != CUDA_SUCCESS)\n        return rc;")
            adopt = f"kp_adopt(s, w, w->in[{numbers[arg.name]}], KP_{arg.object.upper()}, {arg.name})"
            after.append(f"    if (rc == CUDA_SUCCESS)\n        rc = {adopt};")
            return f"&{arg.name}"
        case _:
            declare.append(f"    void *{arg.name} = NULL;")
            slot = f"w->in[{numbers[arg.name]}]"
            look = f"kp_resolve(s, {slot}, KP_{arg.object.upper()}, &{arg.name})"
            before.append(f"    if ((rc = {look}) != CUDA_SUCCESS)\n        return rc;")
            if arg.kind is Kind.DEL:
                before.append(f"    kp_forget(s, {slot});")
            return arg.name

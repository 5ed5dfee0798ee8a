"""Writes a round trip of every op, for tests: what the shim encodes, the session decodes, and what comes back the shim.

tests/native/roundtrip.c has the two halves in one process, chooses the values and compares.
"""

from __future__ import annotations

from kvmpool.dataplane.calltable import Arg, Call, Class, Kind, Op, Table

_HEAD = "/* Generated from calls.toml by generate.py. */\n"


def cases(table: Table) -> str:
    """roundtrip_cases.c: for each call a caller and a driver's function; for each op its shape."""
    calls = [call for call in table.calls if call.sent]
    lines = [_HEAD + '#include "roundtrip.h"\n\n#include <errno.h>\n']
    lines += [_driver(call) for call in calls if not call.worker_by_hand]
    lines += [_caller(call) for call in calls]
    lines += [_by_hand(entry.name) for entry in table.wire() if _is_by_hand(entry)]
    lines.append("const struct rt_case rt_cases[] = {")
    lines += [_row(entry) for entry in table.wire()]
    lines.append("};\nconst unsigned rt_case_count = sizeof rt_cases / sizeof rt_cases[0];\n")
    lines.append("void rt_driver_fill(struct kp_driver *driver)\n{")
    lines += [f"    driver->{call.name} = drive_{call.name};" for call in calls if not call.worker_by_hand]
    lines.append("}")
    return "\n".join(lines) + "\n"


def _is_by_hand(entry: Op | Call) -> bool:
    return isinstance(entry, Op) or entry.worker_by_hand


def _by_hand(name: str) -> str:
    """The handlers are not what is tried here: rt_ops has a recorder in their place."""
    head = f"int kp_do_{name}(struct kp_server *s, struct kp_work *w)"
    return f"{head};\n__attribute__((weak)) {head}\n{{\n    (void)s;\n    (void)w;\n    return -ENOSYS;\n}}\n"


def _row(entry: Op | Call) -> str:
    if isinstance(entry, Op):
        numbers, outs, tail, bulk, run = len(entry.fields), 0, entry.tail or "none", entry.bulk or "none", "NULL"
    else:
        numbers, outs, bulk, run = len(entry.numbers_in), len(entry.outs), "none", f"call_{entry.name}"
        tail = "text" if entry.text else "none"
    waits = int(entry.cls is not Class.ASYNC)
    by_hand = int(_is_by_hand(entry))
    return (
        f'    {{"{entry.name}", KP_OP_{entry.name}, {waits}, {by_hand}, {numbers}, {outs}, RT_TAIL_{tail.upper()}, '
        f"RT_BULK_{bulk.upper()}, {run}}},"
    )


def _driver(call: Call) -> str:
    parameters = ", ".join(arg.declaration for arg in call.args) or "void"
    lines = [f"static CUresult drive_{call.name}({parameters})", "{"]
    lines.append(f"    if (!rt_tries(KP_OP_{call.name}))\n        return CUDA_SUCCESS;")
    for arg in call.args:
        match arg.kind:
            case Kind.OUT | Kind.OUT_OPTIONAL:
                lines.append(f"    rt_fill({arg.name}, sizeof *{arg.name});")
            case Kind.NEW:
                lines.append(f"    *{arg.name} = ({arg.pointee})rt_made();")
            case Kind.TEXT:
                lines.append(f"    rt_arrived({arg.name}, strlen({arg.name}) + 1);")
            case _:
                lines.append(f"    rt_arrived(&{arg.name}, sizeof {arg.name});")
    lines.append("    return rt_result();\n}\n")
    return "\n".join(lines)


def _caller(call: Call) -> str:
    lines = [f"static CUresult call_{call.name}(void)", "{"]
    choose: list[str] = []
    expect: list[str] = []
    after: list[str] = []
    for arg in call.args:
        lines.append(_variable(arg))
        _prepare(arg, call.worker_by_hand, choose, expect, after)
    choose += [_fit(arg) for arg in call.args if arg.kind is Kind.DEVICE]
    given = ", ".join(_given(arg) for arg in call.args)
    lines += ["    CUresult rc;\n", *choose, *expect]
    lines.append(f"    rc = kp_{call.name}({given});")
    lines += ["    rt_called(rc);", *after, "    return rc;\n}\n"]
    return "\n".join(lines)


def _variable(arg: Arg) -> str:
    match arg.kind:
        case Kind.OUT | Kind.OUT_OPTIONAL | Kind.NEW:
            return f"    {arg.pointee} {arg.name} = 0;"
        case Kind.TEXT:
            return f"    const char *{arg.name} = rt_text();"
        case Kind.USE | Kind.DEL:
            return f"    struct rt_object {arg.name};"
        case _:
            return f"    {arg.type} {arg.name} = 0;"


def _given(arg: Arg) -> str:
    match arg.kind:
        case Kind.OUT | Kind.OUT_OPTIONAL | Kind.NEW:
            return f"&{arg.name}"
        case Kind.USE | Kind.DEL:
            return f"({arg.type})(uintptr_t){arg.name}.number"
        case _:
            return arg.name


def _prepare(arg: Arg, by_hand: bool, choose: list[str], expect: list[str], after: list[str]) -> None:
    """How the argument is chosen, what must arrive of it, and what must be so behind the call."""
    name, kind = arg.name, f"KP_{arg.object.upper()}"
    match arg.kind:
        case Kind.OUT | Kind.OUT_OPTIONAL:
            after.append(f'    rt_came("{name}", &{name}, sizeof {name});')
        case Kind.NEW:
            after.append(f'    rt_adopted("{name}", {kind}, (uint64_t)(uintptr_t){name});')
        case Kind.TEXT:
            expect.append(f'    rt_expect("{name}", {name}, strlen({name}) + 1);')
        case Kind.USE | Kind.DEL:
            choose.append(f"    {name} = rt_object({kind}, {int(arg.kind is Kind.DEL)});")
            what = "number" if by_hand else "object"
            expect.append(f'    rt_expect("{name}", &{name}.{what}, sizeof {name}.{what});')
            after.append(f'    rt_let_go("{name}", {name}.number, {int(arg.kind is Kind.DEL and not by_hand)});')
        case _:
            choose.append(f"    rt_choose(&{name}, sizeof {name});")
            if by_hand:
                expect.append(f"    uint64_t {name}_sent = (uint64_t){name};")
            sent = f"{name}_sent" if by_hand else name
            expect.append(f'    rt_expect("{name}", &{sent}, sizeof {sent});')


def _fit(arg: Arg) -> str:
    """Values that the shim lets through: it looks at addresses before it sends them."""
    count, *plane = arg.shape[1:]
    lines = [f"    {arg.name} = rt_address({arg.name});", f"    {count} /= {arg.shape[0]};"]
    if plane:
        rows, pitch = plane
        lines = [f"    {arg.name} = rt_address({arg.name});"]
        lines.append(f"    rt_rectangle(&{count}, &{rows}, &{pitch}, {arg.shape[0]});")
    return "\n".join(lines)

"""Writes the guest's half: prototypes, exported symbols, stubs that encode, the proc-address table."""

from __future__ import annotations

from kvmpool.dataplane.calltable import Arg, Call, Class, Kind, Symbol, Table

_HEAD = "/* Generated from calls.toml by generate.py. */\n"


def api_header(table: Table) -> str:
    """shim_api.h: one kp_<name> for each call, whoever writes its body."""
    lines = [_HEAD + '#ifndef KVMPOOL_SHIM_API_H\n#define KVMPOOL_SHIM_API_H\n\n#include "cuda_abi.h"\n']
    for call in table.calls:
        if call.cls is not Class.FORWARD:
            lines.append(f"{_prototype(call)};")
    lines.append("\n#endif")
    return "\n".join(lines) + "\n"


def stubs(table: Table) -> str:
    """shim_stubs.c: the bodies of all calls that are sent as they are."""
    lines = [_HEAD + '#include "shim.h"\n\n#include <string.h>\n']
    lines += [_stub(call) for call in table.calls if call.sent]
    return "\n".join(lines)


def exports(table: Table) -> str:
    """shim_exports.c: every symbol of the driver API, and the table behind cuGetProcAddress."""
    lines = [_HEAD + '#include "shim.h"\n']
    for call in table.calls:
        for symbol in call.symbols:
            lines.append(_export(call, symbol, table))
    for name in table.unsupported:
        head = f"CUresult {name}(void)"
        lines.append(f'KP_EXPORT {head};\n{head}\n{{\n    return kp_unsupported("{name}");\n}}')
    rows = sorted((s.base, s.version, s.per_thread, s.name) for call in table.calls for s in call.symbols)
    lines.append("const struct kp_proc kp_procs[] = {")
    lines += [f'    {{"{b}", (void *){n}, {v}, {int(p)}}},' for b, v, p, n in rows]
    lines.append(f"}};\nconst unsigned kp_proc_count = {len(rows)};\n")
    lines.append("const struct kp_proc kp_unsupported_procs[] = {")
    lines += [f'    {{"{name}", (void *){name}, 0, 0}},' for name in sorted(table.unsupported)]
    lines.append(f"}};\nconst unsigned kp_unsupported_proc_count = {len(table.unsupported)};")
    lines.append("\nconst struct kp_error kp_errors[] = {")
    for code, name in table.errors:
        words = name.removeprefix("CUDA_").removeprefix("ERROR_").lower().replace("_", " ")
        lines.append(f'    {{{code}, "{name}", "{words}"}},')
    lines.append(f"}};\nconst unsigned kp_error_count = {len(table.errors)};")
    return "\n".join(lines) + "\n"


def _parameters(args: tuple[Arg, ...]) -> str:
    return ", ".join(arg.declaration for arg in args) or "void"


def _prototype(call: Call) -> str:
    return f"CUresult kp_{call.name}({_parameters(call.args)})"


def _export(call: Call, symbol: Symbol, table: Table) -> str:
    names = [arg.name for arg in call.args]
    target = f"kp_{call.name}"
    if call.cls is Class.FORWARD:
        target = f"kp_{call.target}"
        names.append("CU_STREAM_PER_THREAD" if symbol.per_thread else "NULL")
    elif symbol.per_thread:
        names = [f"kp_per_thread({arg.name})" if arg.type == "CUstream" else arg.name for arg in call.args]
        if call.name == "cuLaunchKernelEx":
            target = "kp_cuLaunchKernelEx_ptsz"
    head = f"CUresult {symbol.name}({_parameters(call.args)})"
    body = f"{target}({', '.join(names)})"
    if call.settles:
        body = f"kp_settle({body}, {names[-1]})"
    if call.target.startswith("cuMemcpy"):  # the Async one returns before the bytes of page-locked memory were copied
        return f"KP_EXPORT {head};\n{head}\n{{\n    kp_copy_begin();\n    return kp_copy_end({body}, {names[-1]});\n}}"
    return f"KP_EXPORT {head};\n{head}\n{{\n    return {body};\n}}"


def _stub(call: Call) -> str:
    numbers, outs, waits = call.numbers_in, call.outs, call.cls is not Class.ASYNC
    lines = [_prototype(call), "{"]
    lines.append(f"    uint64_t in[{max(1, len(numbers))}] = {{0}};")
    if waits:
        lines.append(f"    uint64_t out[{max(1, len(outs))}] = {{0}};")
        lines.append(f"    struct kp_answer answer = {{.out = out, .outs = {len(outs)}}};")
    tail, tail_bytes = "NULL", "0"
    if call.text:
        (text,) = call.of(Kind.TEXT)
        tail, tail_bytes = text.name, "(uint32_t)text_bytes"
        length = f"{text.name} == NULL ? KP_TEXT_MAX : strnlen({text.name}, KP_TEXT_MAX) + 1"
        lines.append(f"    size_t text_bytes = {length};")
    lines.append("    CUresult rc;\n")
    needed = [f"{arg.name} == NULL" for arg in call.of(Kind.OUT, Kind.NEW)]
    needed += ["text_bytes > KP_TEXT_MAX - 1"] if call.text else []
    if needed:
        lines.append(f"    if ({' || '.join(needed)})\n        return CUDA_ERROR_INVALID_VALUE;")
    if call.unsafe:
        lines.append("    if ((rc = kp_capture_unsafe()) != CUDA_SUCCESS)\n        return rc;")
    enter = "kp_enter()" if call.needs_context else "kp_enter_any()"
    lines.append(f"    if ((rc = {enter}) != CUDA_SUCCESS)\n        return rc;")
    lines += [_encode(arg, index) for index, arg in enumerate(numbers)]
    for index, arg in enumerate(numbers):
        if arg.kind is Kind.DEL:
            lines.append(f"    kp_object_drop(in[{index}]);")
    if waits:
        lines.append(f"    rc = kp_ask(KP_OP_{call.name}, in, {len(numbers)}, {tail}, {tail_bytes}, &answer);")
    else:
        lines.append(f"    rc = kp_send(KP_OP_{call.name}, in, {len(numbers)}, {tail}, {tail_bytes});")
    lines += _results(call)
    lines.append("    return rc;\n}\n")
    return "\n".join(lines)


def _encode(arg: Arg, index: int) -> str:
    slot = f"in[{index}]"
    match arg.kind:
        case Kind.NEW:
            failed = f"({slot} = kp_object_new(KP_{arg.object.upper()})) == 0"
            return f"    if ({failed})\n        return kp_leave(CUDA_ERROR_OUT_OF_MEMORY);"
        case Kind.USE if arg.object == "stream":
            check = f"kp_stream_number({arg.name}, &{slot})"
        case Kind.USE | Kind.DEL:
            check = f"kp_object_number(KP_{arg.object.upper()}, {arg.name}, &{slot})"
        case Kind.DEVICE:
            rows, pitch = arg.shape[2:] or ("1", "0")
            check = f"kp_device_number({arg.name}, {arg.shape[0]}, {arg.shape[1]}, {rows}, {pitch}, &{slot})"
        case _:
            return f"    {slot} = (uint64_t){arg.name};"
    return f"    if ((rc = {check}) != CUDA_SUCCESS)\n        return kp_leave(rc);"


def _results(call: Call) -> list[str]:
    lines = []
    for index, arg in enumerate(call.outs):
        optional = f" && {arg.name} != NULL" if arg.kind is Kind.OUT_OPTIONAL else ""
        copy = f"memcpy({arg.name}, &out[{index}], sizeof *{arg.name});"
        lines.append(f"    if (rc == CUDA_SUCCESS{optional})\n        {copy}")
    if call.variable:
        lines.append("    if (rc == CUDA_SUCCESS)\n        kp_global_keep(out[0], out[1]);")
    for index, arg in enumerate(call.numbers_in):
        if arg.kind is Kind.NEW:
            lines.append(f"    if (rc == CUDA_SUCCESS)\n        *{arg.name} = ({arg.pointee})(uintptr_t)in[{index}];")
    return lines

"""Control flow, barriers and warp-wide ops (PTX ISA 9.7.12 to 9.7.14, 9.7.19) as C.

What needs other threads goes through `t->b->rt`, the engine's side: it switches fibers until all have arrived.
"""

from __future__ import annotations

from kvmpool.softgpu.ptx_emit import Emitter, op
from kvmpool.softgpu.ptx_link import Symbol
from kvmpool.softgpu.ptx_tree import Group, Instr, Name, Operand, Pair, PtxError
from kvmpool.softgpu.ptx_types import SIZES


@op("bra", "uni")
def _bra(e: Emitter, i: Instr) -> None:
    target = i.args[0]
    assert isinstance(target, Name)
    e.put(e.goto(target.name, i.line))


@op("brx", "idx uni")
def _brx(e: Emitter, i: Instr) -> None:
    index, table = i.args
    assert isinstance(table, Name)
    e.put(f"switch ({e.read(index, 'u32', i.line)}) {{")
    for number, label in enumerate(e.targets(table.name, i.line)):
        e.put(f"case {number}: {e.goto(label, i.line)}")
    e.put("}")


@op("ret", "uni")
def _ret(e: Emitter, i: Instr) -> None:
    e.leave()


@op("exit", "")
def _exit(e: Emitter, i: Instr) -> None:
    if e.routine.function.entry:
        e.put("return;")
    else:
        e.put("t->b->rt->exit_thread(t);")


@op("trap brkpt", "")
def _trap(e: Emitter, i: Instr) -> None:
    e.put("t->b->rt->trap(t);")


@op("nop pmevent griddepcontrol setmaxnreg", "launch_dependents wait inc dec sync aligned u32 mask")
def _nothing(e: Emitter, i: Instr) -> None:
    """Hints to hardware that is not there."""


@op("membar fence", "cta gl sys gpu cluster proxy sc acq_rel acquire release alias async global shared::cta")
def _fence(e: Emitter, i: Instr) -> None:
    if "async" in i.mods:
        raise e.unsupported(i)
    e.put("__atomic_thread_fence(__ATOMIC_SEQ_CST);")


@op("nanosleep", "u32")
def _nanosleep(e: Emitter, i: Instr) -> None:
    e.put("KP_POLL(t); KP_YIELD(t);")


# -- calls --------------------------------------------------------------------------------------------


@op("call", "uni")
def _call(e: Emitter, i: Instr) -> None:
    args = list(i.args)
    returns: tuple[Operand, ...] = ()
    if isinstance(args[0], Group):
        returns = args[0].items
        del args[0]
    target = args.pop(0)
    given = args[0].items if args and isinstance(args[0], Group) else ()
    assert isinstance(target, Name)
    e.put("{")
    ret = "NULL"
    if returns:
        ret = _argument(e, i, returns[0], "ret0", None)
    values = [_argument(e, i, arg, f"arg{n}", arg) for n, arg in enumerate(given)]
    symbol = None if e.register(target.name) else e.symbol(target.name)
    if symbol is not None and symbol.kind == "builtin":
        e.put(f"kp_builtin_{symbol.cname.strip('_')}({', '.join(['t', ret, *values])});")
    else:
        call = f"{_callee(e, i, target, symbol, len(values))}({', '.join(['t', ret, *values])});"
        e.put(f"t->path += {_step(i)}ull; {call} t->path -= {_step(i)}ull;" if e.routine.fibers else call)
    if returns and isinstance(returns[0], Name) and e.buffer(returns[0].name) is None:
        register = e.register(returns[0].name)
        assert register is not None
        e.put(f"memcpy(&{register.cname}, ret0, sizeof({register.cname}));")
    e.put("}")


def _step(i: Instr) -> int:
    """Added to `path` for the time of a call: different for each line, so that sums of a few differ too."""
    return i.line * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFF0000


def _callee(e: Emitter, i: Instr, target: Name, symbol: Symbol | None, count: int) -> str:
    if symbol is not None:
        if symbol.kind != "function":
            raise PtxError(i.line, f"{target.name} is not a function")
        return symbol.cname
    params = ", ".join(["struct kp_thread *", "uint8_t *", *["const uint8_t *"] * count])
    return f"((void (*)({params}))(uintptr_t){e.read(target, 'u64', i.line)})"


def _argument(e: Emitter, i: Instr, operand: Operand, name: str, value: Operand | None) -> str:
    """A pointer to the argument's bytes: a .param variable as it is, a register or number copied to a buffer."""
    if isinstance(operand, Name):
        buffer = e.buffer(operand.name)
        if buffer is not None:
            return buffer
    e.put(f"_Alignas(16) uint8_t {name}[16] = {{0}};")
    if value is not None:
        register = e.register(value.name) if isinstance(value, Name) else None
        type_ = register.type if register is not None else "b64"
        e.put(f"{{ uint64_t w = {e.read(value, f'b{_size(type_) * 8}', i.line)}; memcpy({name}, &w, 8); }}")
    return name


def _size(type_: str) -> int:
    return max(2, SIZES.get(type_, 2))


# -- barriers -----------------------------------------------------------------------------------------


@op("bar barrier", "cta sync arrive red warp aligned popc and or u32 pred")
def _barrier(e: Emitter, i: Instr) -> None:
    if "warp" in i.mods:
        e.put(f"t->b->rt->warp(t, KP_WARP_SYNC, {e.read(i.args[0], 'u32', i.line)}, 0, 0, 0, NULL);")
        return
    args = list(i.args)
    if "red" in i.mods:
        _barrier_red(e, i)
        return
    number = e.read(args[0], "u32", i.line)
    count = e.read(args[1], "u32", i.line) if len(args) > 1 else "0"
    e.put(f"t->b->rt->barrier(t, {number}, {count}, {'KP_ARRIVE' if 'arrive' in i.mods else 'KP_SYNC'}, 0);")


def _barrier_red(e: Emitter, i: Instr) -> None:
    """`bar.red.popc.u32 d, a[, b], [!]c`."""
    target, number, *rest = i.args
    count = e.read(rest[0], "u32", i.line) if len(rest) > 1 else "0"
    predicate = e.read(rest[-1], "pred", i.line)
    what = next(mod for mod in i.mods if mod in ("popc", "and", "or"))
    text = f"t->b->rt->barrier(t, {e.read(number, 'u32', i.line)}, {count}, KP_RED_{what.upper()}, {predicate})"
    e.write(target, "u32" if what == "popc" else "pred", text, i.line)


# -- warps --------------------------------------------------------------------------------------------


def _warp(e: Emitter, i: Instr, what: str, mask: str, values: list[str], target: Operand, type_: str) -> None:
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    padded = (values + ["0", "0", "0"])[:3]
    e.put(f"{{ uint8_t p = 0; const uint64_t w = t->b->rt->warp(t, {what}, {mask}, {', '.join(padded)}, &p);")
    e.write(first, type_, f"({'uint8_t' if type_ == 'pred' else 'uint64_t'})w", i.line)
    if second is not None:
        e.write(second, "pred", "p", i.line)
    e.put("(void)p; }")


@op("shfl", "sync up down bfly idx b32")
def _shfl(e: Emitter, i: Instr) -> None:
    a, b, c = (e.read(arg, "u32", i.line) for arg in i.args[1:4])
    mode = next(mod for mod in i.mods if mod in ("up", "down", "bfly", "idx"))
    mask = e.read(i.args[4], "u32", i.line) if "sync" in i.mods else "KP_CONVERGED"
    _warp(e, i, f"KP_SHFL_{mode.upper()}", mask, [a, b, c], i.args[0], "u32")


@op("vote", "sync all any uni ballot pred b32")
def _vote(e: Emitter, i: Instr) -> None:
    mode = next(mod for mod in i.mods if mod in ("all", "any", "uni", "ballot"))
    mask = e.read(i.args[2], "u32", i.line) if "sync" in i.mods else "KP_CONVERGED"
    value = e.read(i.args[1], "pred", i.line)
    _warp(e, i, f"KP_VOTE_{mode.upper()}", mask, [value], i.args[0], "u32" if mode == "ballot" else "pred")


@op("match", "any all sync b32 b64")
def _match(e: Emitter, i: Instr) -> None:
    mode = "ALL" if "all" in i.mods else "ANY"
    value = e.read(i.args[1], f"u{i.mods[-1][1:]}", i.line)
    _warp(e, i, f"KP_MATCH_{mode}", e.read(i.args[2], "u32", i.line), [value], i.args[0], "u32")


@op("redux", "sync add min max and or xor u32 s32 b32")
def _redux(e: Emitter, i: Instr) -> None:
    mode = next(mod for mod in i.mods if mod in ("add", "min", "max", "and", "or", "xor"))
    sign = "_S" if i.mods[-1] == "s32" and mode in ("min", "max") else ""
    value = e.read(i.args[1], "u32", i.line)
    _warp(e, i, f"KP_REDUX_{mode.upper()}{sign}", e.read(i.args[2], "u32", i.line), [value], i.args[0], "u32")


@op("activemask", "b32")
def _activemask(e: Emitter, i: Instr) -> None:
    _warp(e, i, "KP_ACTIVE", "KP_CONVERGED", [], i.args[0], "u32")


@op("elect", "sync")
def _elect(e: Emitter, i: Instr) -> None:
    _warp(e, i, "KP_ELECT", e.read(i.args[1], "u32", i.line), [], i.args[0], "u32")

"""Frames as a guest would send them, valid or nearly so: seeds for fuzzing, and garbage for sessions."""

from __future__ import annotations

import os
import struct
from functools import cache

from kvmpool.dataplane.calltable import Op, Table, load
from tests.dataplane import shim

MAGIC, HELLO, WELCOME, REPLY, DATA, BYE, CONTEXT, CALLS = 0x4B51, 1, 2, 3, 4, 5, 6, 16
REPLY_WANTED = 1
VA_BASE = 1 << 45
HEADER = struct.Struct("<HHHHII")
CONTEXT_HANDLE = (1 << 48) | (1 << 20)
MODULE_HANDLE = (2 << 48) | (2 << 20) | 1
FUNCTION_HANDLE = (3 << 48) | (3 << 20) | 2
STREAM_HANDLE = (4 << 48) | (4 << 20) | 3
EVENT_HANDLE = (5 << 48) | (5 << 20) | 4
LIBRARY_HANDLE = (6 << 48) | (6 << 20) | 5
KERNEL_HANDLE = (7 << 48) | (7 << 20) | 6
LINK_HANDLE = (8 << 48) | (8 << 20) | 7
GRAPH_HANDLE = (11 << 48) | (9 << 20) | 8
EXEC_HANDLE = (13 << 48) | (11 << 20) | 9


@cache
def table() -> Table:
    return load(shim.DATAPLANE / "calls.toml")


def frame(op: int, body: bytes = b"", flags: int = 0, seq: int = 1) -> bytes:
    return HEADER.pack(MAGIC, op, flags, 0, len(body), seq) + body


def number_of(name: str) -> int:
    return CALLS + [entry.name for entry in table().wire()].index(name)


def call(name: str, *numbers: int, tail: bytes = b"", bulk: bytes = b"", wanted: bool = True, seq: int = 1) -> bytes:
    body = b"".join(struct.pack("<Q", number) for number in numbers) + tail
    sent = frame(number_of(name), body, REPLY_WANTED if wanted else 0, seq)
    return sent + (frame(DATA, bulk, 0, seq) if bulk else b"")


def hello(caps: bytes | None = None, claim: bytes = b"gpu0") -> bytes:
    digest = table().capability_hash() if caps is None else caps
    body = struct.pack("<I16s32s64sIIQQ64s", 1, digest, claim, b"", os.getpid(), 0, 1, VA_BASE, b"frames.py")
    return frame(HELLO, body, 0, 0)


def life() -> bytes:
    """A session that uses each kind of object once."""
    make = call("context_create", CONTEXT_HANDLE, 0) + frame(CONTEXT, struct.pack("<Q", CONTEXT_HANDLE))
    load_module = call("module_load", MODULE_HANDLE, 4, bulk=b"ptx\0")
    get = call("function_get", MODULE_HANDLE, FUNCTION_HANDLE, tail=b"fill\0")
    objects = call("cuStreamCreate", STREAM_HANDLE, 1, wanted=False) + call(
        "cuEventCreate", EVENT_HANDLE, 0, wanted=False
    )
    memory = call("alloc", VA_BASE, 4096) + call("copy_in", VA_BASE, 8, STREAM_HANDLE, bulk=b"12345678", wanted=False)
    back = call("copy_out", VA_BASE, 8, STREAM_HANDLE) + call("free", VA_BASE, wanted=False)
    return make + load_module + get + objects + memory + back + frame(BYE)


def graph_life() -> bytes:
    """A session that captures a graph, builds another, and asks, changes, launches and destroys both."""
    begin = call("context_create", CONTEXT_HANDLE, 0) + frame(CONTEXT, struct.pack("<Q", CONTEXT_HANDLE))
    begin += call("module_load", MODULE_HANDLE, 4, bulk=b"ptx\0") + call("alloc", VA_BASE, 4096)
    begin += call("function_get", MODULE_HANDLE, FUNCTION_HANDLE, tail=b"fill\0")
    begin += call("cuStreamCreate", STREAM_HANDLE, 1, wanted=False)
    captured = call("capture_begin", STREAM_HANDLE) + call("capture_info", STREAM_HANDLE)
    captured += call("capture_end", STREAM_HANDLE, GRAPH_HANDLE) + call("graph_clone", GRAPH_HANDLE, GRAPH_HANDLE + 1)
    kernel, one = (FUNCTION_HANDLE, 1, 1, 1, 32, 1, 1, 0), struct.pack("<I", 0)
    made = call("graph_create", GRAPH_HANDLE + 2)
    made += call("node_kernel", GRAPH_HANDLE + 2, 0, 0, *kernel, tail=b"12345678")
    made += call("node_fill", GRAPH_HANDLE + 2, 1, 1, VA_BASE, 64, 5, 4, 8, 2, tail=one)
    made += call("node_copy", GRAPH_HANDLE + 2, 2, 1, VA_BASE, 64, 1, 4096, 64, 1, 64, 1, 1, 2, tail=one)
    made += call("node_graph", GRAPH_HANDLE + 2, 3, 1, GRAPH_HANDLE, tail=one)
    made += call("graph_edges", GRAPH_HANDLE + 2, 0, tail=struct.pack("<4I", 1, 2, 2, 3))
    asked = b"".join(call("graph_list", GRAPH_HANDLE + 2, what, 1) for what in range(6))
    used = call("graph_exec", GRAPH_HANDLE + 2, EXEC_HANDLE, 0) + call("cuGraphLaunch", EXEC_HANDLE, STREAM_HANDLE)
    used += call("node_kernel_set", GRAPH_HANDLE + 2, 0, EXEC_HANDLE, *kernel, tail=b"12345678", wanted=False)
    used += call("exec_update", EXEC_HANDLE, GRAPH_HANDLE) + call("node_destroy", GRAPH_HANDLE + 2, 1)
    ended = call("cuGraphDestroy", GRAPH_HANDLE, wanted=False) + call("cuGraphExecDestroy", EXEC_HANDLE, wanted=False)
    return begin + captured + made + asked + used + ended + call("context_destroy", CONTEXT_HANDLE) + frame(BYE)


def each_call() -> list[bytes]:
    """One session for each op, in which that op is called with plausible numbers."""
    begin = call("context_create", CONTEXT_HANDLE, 0) + frame(CONTEXT, struct.pack("<Q", CONTEXT_HANDLE))
    handles = {"stream": STREAM_HANDLE, "event": EVENT_HANDLE, "module": MODULE_HANDLE, "function": FUNCTION_HANDLE}
    handles |= {"graph": GRAPH_HANDLE, "exec": EXEC_HANDLE, "child": GRAPH_HANDLE}
    handles |= {"library": LIBRARY_HANDLE, "kernel": KERNEL_HANDLE, "link": LINK_HANDLE, "of": LIBRARY_HANDLE}
    sessions = []
    for entry in table().wire():
        if isinstance(entry, Op):
            numbers = [VA_BASE if field == "va" else handles.get(field, 8) for field in entry.fields]
            tail = b"fill\0" if entry.tail else b""
            bulk = b"12345678" if entry.bulk == "in" else b""
        else:
            numbers = [handles.get(arg.object, VA_BASE if arg.type == "CUdeviceptr" else 1) for arg in entry.numbers_in]
            tail, bulk = (b"name\0" if entry.text else b""), b""
        sessions.append(begin + call(entry.name, *numbers, tail=tail, bulk=bulk))
    return sessions

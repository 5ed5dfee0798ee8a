"""An error of a call that nobody waits for reaches the program: from the next call that waits, or where it was made.

Every asynchronous op of calls.toml is tried, by the API call that sends it: a new one without a case in guest_async.c,
or without the driver's function that stands behind it here, fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvmpool.dataplane.calltable import Class, Op
from tests.dataplane import frames, shim

pytestmark = pytest.mark.native

LAUNCH_FAILED, NOT_PERMITTED = 719, 800  # the first leaves the context unusable, the second is of one call only

BEHIND = {
    "launch": "cuLaunchKernel",
    "free": "cuMemUnmap",
    "copy_in": "cuMemcpyHtoDAsync_v2",
    "arena_in": "cuMemcpyHtoDAsync_v2",
    "arena_out": "cuMemcpyDtoHAsync_v2",
    "settle": "cuEventCreate",  # of the mark behind the copy; the copy itself makes none
    "box_in": "cuMemcpy2DAsync_v2",
    "box_between": "cuMemcpy3DAsync_v2",
    "host_func": "cuStreamAddCallback",
    "physical_release": "cuMemRelease",
    "node_kernel_set": "cuGraphKernelNodeSetParams_v2",
}
"""Our own ops by the driver's function they come down to; a call is itself."""

CANNOT_FAIL = {"pinned_give", "host_next"}
"""Ops that only change what the session itself keeps: what is wrong in them ends the session."""


def asynchronous() -> list[str]:
    return [entry.name for entry in frames.table().wire() if entry.cls is Class.ASYNC and entry.name not in CANNOT_FAIL]


def function_behind(name: str) -> str:
    ours = {entry.name for entry in frames.table().wire() if isinstance(entry, Op)}
    return BEHIND[name] if name in ours else name


@contextmanager
def host(folder: Path, op: str, code: int) -> Iterator[shim.Host]:
    built = shim.build("plain")
    libraries = f"{shim.failing(built, function_behind(op))}:{built / 'stub'}"
    armed = str(folder / "armed")
    with shim.host(folder, "plain", LD_LIBRARY_PATH=libraries, STUB_ARMED=armed, STUB_CODE=str(code)) as running:
        yield running


def tried(running: shim.Host, op: str, *more: str, **extra: str) -> dict[str, int]:
    """What the calls of guest_async.c answered."""
    armed = running.folder / "armed"
    armed.unlink(missing_ok=True)
    run = running.run("async", op, str(armed), *more, **extra)
    assert run.code == 0, f"guest_async.c has no case of {op}, or it went wrong: {run.lines}"
    return {name: run[name] for name in (line.split("=")[0] for line in run.lines)}


@pytest.mark.parametrize("op", asynchronous())
def test_its_error_is_told_by_the_next_call_that_waits_and_once(tmp_path: Path, op: str) -> None:
    with host(tmp_path, op, NOT_PERMITTED) as running:
        later = tried(running, op)
        at_once = tried(running, op, KVMPOOL_SYNC="1")
        at_the_end = tried(running, op, "destroy")
    assert [later[name] for name in ("call", "next", "after")] == [0, NOT_PERMITTED, 0]
    assert [at_once[name] for name in ("call", "next", "after")] == [NOT_PERMITTED, 0, 0]
    assert [at_the_end[name] for name in ("call", "next")] == [0, NOT_PERMITTED], "no later call could tell it"


@pytest.mark.parametrize("op", asynchronous())
def test_a_fault_stays_for_all_later_calls(tmp_path: Path, op: str) -> None:
    with host(tmp_path, op, LAUNCH_FAILED) as running:
        later, at_once = tried(running, op), tried(running, op, KVMPOOL_SYNC="1")
    assert later.pop("call") == 0
    assert at_once.pop("call") == LAUNCH_FAILED
    assert set(later.values()) | set(at_once.values()) == {LAUNCH_FAILED}

"""What a guest without the shim may say to its session: all the shim's own checks are left out here."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from kvmpool.softgpu import state
from tests.bypass.raw import Raw
from tests.bypass.world import CLAIM_MIB, CONTEXT_MIB, LEFT_MIB, World
from tests.dataplane import frames
from tests.dataplane.frames import call, frame
from tests.dataplane.plane import wait_until

pytestmark = pytest.mark.native

INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT, INVALID_HANDLE = 1, 2, 201, 400
MIB = 1 << 20
CLAIM = CLAIM_MIB * MIB
BASE = frames.VA_BASE
MOST = (1 << 64) - 1

FILL = b""".version 7.0
.target sm_70
.address_size 64
.visible .entry fill(.param .u64 at) {
.reg .b64 %rd<2>;
.reg .b32 %r<2>;
ld.param.u64 %rd1, [at];
mov.u32 %r1, 1;
st.global.u32 [%rd1], %r1;
ret;
}
\0"""


def with_kernel(raw: Raw) -> None:
    assert raw.ask("module_load", frames.MODULE_HANDLE, len(FILL), bulk=FILL) == 0
    assert raw.ask("function_get", frames.MODULE_HANDLE, frames.FUNCTION_HANDLE, tail=b"fill\0") == 0


def launch(
    raw: Raw,
    function: int = frames.FUNCTION_HANDLE,
    grid: int = 1,
    block: int = 1,
    shared: int = 0,
    stream: int = 0,
    tail: bytes | None = None,
) -> int:
    parameters = struct.pack("<Q", BASE) if tail is None else tail
    return raw.ask("launch", function, grid, 1, 1, block, 1, 1, shared, stream, 0, tail=parameters)


@pytest.mark.parametrize("size", [CLAIM + 1, CLAIM * 4, 1 << 39, 1 << 63, MOST])
def test_more_than_the_claim_at_once(attack: World, size: int) -> None:
    with Raw(attack.attacker) as raw:
        assert raw.ask("alloc", BASE, size) in (INVALID_VALUE, OUT_OF_MEMORY)
        assert attack.attacker.used() == raw.base


def test_more_than_the_claim_piece_by_piece(attack: World) -> None:
    with Raw(attack.attacker) as raw:
        granted = 0
        while raw.ask("alloc", BASE + granted * 2 * MIB, 2 * MIB) == 0:
            granted += 1
        assert granted == LEFT_MIB // 2
        assert raw.ask("alloc", BASE + (1 << 36), 512) == OUT_OF_MEMORY, "a single block takes a page"
        assert attack.taken_mib() == CONTEXT_MIB + LEFT_MIB


@pytest.mark.parametrize("address", [0, 512, BASE - 512, BASE + 1, BASE + (1 << 40), MOST - 511, 1 << 63])
def test_memory_where_none_may_be(attack: World, address: int) -> None:
    with Raw(attack.attacker) as raw:
        assert raw.ask("alloc", address, 512) == INVALID_VALUE
        assert attack.attacker.used() == raw.base


def test_the_same_memory_asked_for_and_freed_twice_is_counted_once(attack: World) -> None:
    """A replayed frame is a call like any other: it is answered, and it gets nothing a second time."""
    with Raw(attack.attacker) as raw:
        assert [raw.ask("alloc", BASE, 2 * MIB) for _ in range(3)] == [0, INVALID_VALUE, INVALID_VALUE]
        assert attack.attacker.used() == raw.base + 2 * MIB
        assert [raw.ask("free", BASE) for _ in range(3)] == [0, INVALID_VALUE, INVALID_VALUE]
        wait_until(lambda: attack.attacker.used() == raw.base, 5.0, "it is free, once")


def test_gaps_and_repetitions_in_the_sequence_are_the_guests_own_affair(attack: World) -> None:
    with Raw(attack.attacker) as raw:
        for seq in (5, 5, 4_000_000_000, 0, 7):
            raw.send(call("cuMemGetInfo_v2", seq=seq))
            assert (raw.result(), raw.seq) == (0, seq)


def test_launches_that_the_shim_would_have_refused(attack: World) -> None:
    with Raw(attack.attacker) as raw:
        with_kernel(raw)
        assert raw.ask("alloc", BASE, 4096) == 0
        assert launch(raw) == 0
        refused = [
            launch(raw, grid=0),
            launch(raw, block=0),
            launch(raw, block=1 << 20),
            launch(raw, grid=1 << 40),
            launch(raw, shared=1 << 31),
            launch(raw, stream=4711),
            launch(raw, function=frames.FUNCTION_HANDLE + 1),
            launch(raw, function=frames.STREAM_HANDLE),
        ]
        assert 0 not in refused, refused
        assert launch(raw) == 0, "and the session goes on"
    for parameters in (b"", bytes(4096)):
        with Raw(attack.attacker) as raw:
            with_kernel(raw)
            assert launch(raw, tail=parameters) != 0 or raw.ask("cuCtxSynchronize") != 0, (
                "refused, or a fault of its own"
            )


def test_a_kernel_that_writes_where_the_neighbour_is(attack: World) -> None:
    """Device addresses are of one session: the same number is other memory, or none, in another."""
    with Raw(attack.neighbour) as victim, Raw(attack.attacker) as raw:
        secret = b"the neighbour's words".ljust(512, b".")
        assert victim.ask("alloc", BASE, 2 * MIB) == 0
        assert victim.ask("copy_in", BASE, len(secret), 0, bulk=secret) == 0
        assert raw.ask("copy_out", BASE, len(secret), 0) == INVALID_VALUE
        with_kernel(raw)
        launch(raw)
        assert raw.ask("cuCtxSynchronize") != 0, "there is nothing of its own"
        assert victim.ask("copy_out", BASE, len(secret), 0) == 0
        assert victim.data == secret


def test_memory_that_another_gave_back_holds_none_of_its_words(attack: World) -> None:
    secret = b"the neighbour's words".ljust(512, b".")
    with Raw(attack.neighbour) as victim:
        assert victim.ask("alloc", BASE, 32 * MIB) == 0
        for at in range(0, 32 * MIB, MIB):
            assert victim.ask("copy_in", BASE + at, len(secret), 0, bulk=secret) == 0
    wait_until(lambda: len(attack.neighbour.sessions()) == 1, 5.0, "its session is gone")
    with Raw(attack.attacker) as raw:
        assert raw.ask("alloc", BASE, 32 * MIB) == 0
        assert raw.ask("copy_out", BASE, 32 * MIB, 0) == 0
        assert secret[:21] not in raw.data


@pytest.mark.parametrize("size", [CLAIM + 1, 1 << 40, 1 << 63, MOST])
def test_copies_of_more_than_there_is(attack: World, size: int) -> None:
    with Raw(attack.attacker) as raw:
        assert raw.ask("alloc", BASE, 4096) == 0
        for numbers in ((BASE, size, 0), (BASE + 4096 - 1, size, 0), (MOST, size, 0)):
            assert raw.ask("copy_out", *numbers) != 0
            assert raw.data == b""
        assert raw.ask("box_out", BASE, size, size, 1, 1, size, 1, 0) == INVALID_VALUE
        assert raw.ask("box_out", BASE, 4096, 1 << 32, 1 << 32, 1 << 32, MOST, MOST, 0) == INVALID_VALUE
        assert raw.ask("cuMemcpyDtoDAsync_v2", BASE, BASE, size, 0) != 0
        assert raw.ask("cuMemsetD8Async", BASE, 1, size, 0) != 0


def test_each_call_with_handles_that_were_never_made_and_those_of_a_neighbour(attack: World) -> None:
    """The neighbour's session has made what these numbers name; here they name nothing."""
    with Raw(attack.neighbour) as victim:
        with_kernel(victim)
        for name, handle in (("cuStreamCreate", frames.STREAM_HANDLE), ("cuEventCreate", frames.EVENT_HANDLE)):
            assert victim.ask(name, handle, 0) == 0
        with Raw(attack.attacker) as raw:
            assert (
                raw.ask("function_get", frames.MODULE_HANDLE, frames.FUNCTION_HANDLE + 2, tail=b"fill\0")
                == INVALID_HANDLE
            )
            for name in ("cuStreamSynchronize", "cuStreamDestroy_v2", "cuStreamQuery"):
                assert raw.ask(name, frames.STREAM_HANDLE) == INVALID_HANDLE
            for name in ("cuEventSynchronize", "cuEventDestroy_v2", "cuEventQuery"):
                assert raw.ask(name, frames.EVENT_HANDLE) == INVALID_HANDLE
            assert launch(raw) == INVALID_HANDLE
            assert raw.ask("cuModuleUnload", frames.MODULE_HANDLE) == INVALID_HANDLE
        with Raw(attack.attacker, context=False) as raw:
            raw.send(frame(frames.CONTEXT, struct.pack("<Q", frames.CONTEXT_HANDLE)))
            assert raw.ended(), "a context of nobody's"
        assert victim.ask("cuStreamSynchronize", frames.STREAM_HANDLE) == 0
        assert victim.ask("cuEventQuery", frames.EVENT_HANDLE) == 0


def test_calls_before_there_is_a_context(attack: World) -> None:
    with Raw(attack.attacker, context=False) as raw:
        assert raw.ask("alloc", BASE, 512) == INVALID_CONTEXT
        assert raw.ask("cuCtxSynchronize") == INVALID_CONTEXT


LYING_FRAMES = {
    "a length of four gigabytes": struct.pack("<HHHHII", 0x4B51, 16, 1, 0, 0xFFFFFFFF, 1),
    "a length beyond a call's": frame(frames.number_of("alloc"), bytes(70_000), 1),
    "numbers cut short": frame(frames.number_of("alloc"), bytes(15), 1),
    "numbers and more": frame(frames.number_of("alloc"), bytes(17), 1),
    "data that nobody announced": frame(frames.DATA, b"x" * 100),
    "bulk of another call": call("copy_in", BASE, 8, 0) + frame(frames.DATA, b"12345678", 0, 99),
    "more bulk than announced": call("copy_in", BASE, 8, 0) + frame(frames.DATA, b"x" * 9, 0, 1),
    "empty bulk": call("copy_in", BASE, 8, 0) + frame(frames.DATA, b"", 0, 1),
    "a call that must be answered and is not": call("alloc", BASE, 512, wanted=False),
    "an op beyond the table": frame(1023, b"", 1),
    "a text without an end": call("function_get", 1, 2, tail=b"fill"),
    "a text with two ends": call("function_get", 1, 2, tail=b"fill\0more\0"),
}


@pytest.mark.parametrize("what", LYING_FRAMES)
def test_a_frame_that_lies_ends_its_session_only(attack: World, what: str) -> None:
    with Raw(attack.attacker) as raw, Raw(attack.attacker) as sibling:
        assert raw.ask("alloc", BASE, 4096) == 0
        raw.send(LYING_FRAMES[what])
        assert raw.ended()
        assert sibling.ask("alloc", BASE, 4096) == 0


def test_an_announced_upload_that_never_comes_holds_nobody_up(attack: World) -> None:
    with Raw(attack.attacker) as raw, Raw(attack.attacker) as sibling:
        assert raw.ask("alloc", BASE, 4 * MIB) == 0
        raw.send(call("copy_in", BASE, 4 * MIB, 0) + frame(frames.DATA, b"x" * 1000, 0, 1))
        assert sibling.ask("alloc", BASE, 4096) == 0
        assert sibling.ask("cuCtxSynchronize") == 0


def test_every_call_with_random_numbers(attack: World) -> None:
    """Each op of the table, in a session that has memory and a kernel, with numbers that are often nearly right."""
    chosen = random.Random(11)
    handles = [frames.CONTEXT_HANDLE, frames.STREAM_HANDLE, frames.MODULE_HANDLE, frames.FUNCTION_HANDLE]
    pool = [0, 1, 8, 512, 4096, BASE, BASE + 512, CLAIM, 1 << 32, 1 << 63, MOST, frames.EVENT_HANDLE, *handles]
    names = [(entry.name, entry) for entry in frames.table().wire()]
    for _ in range(60):
        with Raw(attack.attacker) as raw:
            with_kernel(raw)
            raw.ask("alloc", BASE, 4096)
            for _ in range(10):
                name, entry = chosen.choice(names)
                count = len(getattr(entry, "fields", ())) or len(getattr(entry, "numbers_in", ()))
                raw.send(
                    call(
                        name,
                        *(chosen.choice(pool) for _ in range(count)),
                        tail=chosen.choice([b"", b"fill\0", bytes(64)]),
                    )
                )
            assert attack.attacker.used() <= CLAIM
    assert attack.taken_mib() <= CLAIM_MIB


def test_the_card_itself_counts_what_the_worker_counts(attack: World, tmp_path: Path) -> None:
    """What makes `taken_mib` a proof: the card's own table, which no session writes but the driver in it."""
    with Raw(attack.attacker) as raw:
        assert raw.ask("alloc", BASE, 10 * MIB) == 0
        (card,) = state.read(attack.folder / "card")
        assert attack.taken_mib() == 10 + CONTEXT_MIB == attack.attacker.used() // MIB
        assert sum(process.memory_bytes for process in card.processes) // MIB >= 10

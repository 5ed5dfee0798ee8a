"""What kernels print comes out of the guest's process, where CUDA would print it; no guest makes the session grow."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dataplane import frames
from tests.dataplane.remote import Remote, remote
from tests.dataplane.shim import NATIVE, SOURCES
from tests.dataplane.test_guest_nvml import liar, welcome
from tests.softgpu.nvrtc import ptx

pytestmark = pytest.mark.native

PRINT_MAX = 4 << 20
ASSERT = 710
KERNELS = """
extern "C" __global__ void tell(int n)
{
    printf("%d %u %lld %5.2f|%-6s|%c %x %% %e\\n", n, 7u, 1ll << 40, n / 3.0, "text", 'c', 255, 1e10);
    for (int i = 0; i < n; i++) printf("%d,", i);
    printf("\\n");
}
extern "C" __global__ void line(int n) { printf("line %d\\n", n); }
extern "C" __global__ void flood(int n)
{
    for (int i = 0; i < n; i++) printf("%08d %01500d\\n", i, i);
}
extern "C" __global__ void claim(int n)
{
    printf("n is %d\\n", n);
    assert(n == 0);
}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    with remote(tmp_path_factory.mktemp("printing")) as running:
        yield running


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("cases")
    flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}"]
    command = ["gcc", *flags, NATIVE / "print_cases.c", "-o", folder / "print_cases", "-ldl", "-lpthread"]
    subprocess.run([str(word) for word in command], check=True, timeout=120)
    (folder / "kernels.ptx").write_text(ptx(KERNELS))
    return [folder / "print_cases", folder / "kernels.ptx"]


@pytest.mark.parametrize("way", ["1", "0"], ids=["shm", "socket"])
def test_the_same_text_at_the_same_places(place: Remote, program: list[Path], way: str) -> None:
    direct, guest = place.direct([*program, "places"]), place.guest([*program, "places"], KVMPOOL_SHM=way)
    assert (direct.code, direct.errors) == (0, "")
    assert direct.lines[0].startswith("1 7 1099511627776  0.33|text  |c ff % 1.000000e+10"), direct.lines
    assert direct.lines[2:4] == ["context=1", "2 7 1099511627776  0.67|text  |c ff % 1.000000e+10"]
    assert (guest.code, guest.out) == (0, direct.out)


def test_an_assertion_s_text_is_on_the_guest_s_standard_error(place: Remote, program: list[Path]) -> None:
    direct, guest = place.direct([*program, "asserts"]), place.guest([*program, "asserts"])
    words = "Assertion `n == 0` failed.\n"
    assert direct.errors.count(words) == 2
    assert (direct.out, direct.errors) == (guest.out, guest.errors)
    assert guest.lines == ["n is 0", "held=1", "n is 3", f"query={ASSERT}", "n is 5", f"context={ASSERT}"]
    for log in place.folder.glob("*.log"):
        assert words not in log.read_text(errors="replace"), log


def test_it_costs_no_round_trip(place: Remote, program: list[Path]) -> None:
    many = place.guest([*program, "flood"]).stats["round_trips"]
    assert many == place.guest([*program, "left"]).stats["round_trips"] + 2, "the two that synchronise"


def test_of_too_much_the_oldest_goes(place: Remote, program: list[Path]) -> None:
    direct, guest = place.direct([*program, "flood"]), place.guest([*program, "flood"])
    assert guest.code == 0
    first, again = (done.out.index("\n00000000", 1) for done in (direct, guest))
    whole, kept = direct.out[: first + 1], guest.out[: again + 1]
    assert len(whole) > 3 * PRINT_MAX
    assert len(kept) == PRINT_MAX
    assert whole.endswith(kept)
    assert guest.out[again + 1 :] == direct.out[first + 1 :]


def test_text_that_nobody_fetches_holds_nobody_up(place: Remote, program: list[Path]) -> None:
    assert place.guest([*program, "left"]).lines[-1] == "left=1"


def test_each_thread_gets_every_line_once(place: Remote, program: list[Path]) -> None:
    told = Counter(place.guest([*program, "threads"]).lines)
    assert told == {f"line {i}": 4 for i in range(20)}


def test_a_stdout_that_takes_nothing_is_no_error(place: Remote, program: list[Path]) -> None:
    assert place.guest(["sh", "-c", 'exec "$@" >/dev/full', "sh", *program, "places"]).code == 0


def test_nothing_of_it_is_on_the_worker_s_side(place: Remote, program: list[Path]) -> None:
    place.guest([*program, "places"])
    for log in place.folder.glob("*.log"):
        assert "text" not in log.read_text(errors="replace"), log


INIT = """
import ctypes
print("init=%d" % ctypes.CDLL("libcuda.so.1").cuInit(0), flush=True)
"""
PRINTED, ASSERTED = 8, 9
NO_DEVICE, UNAVAILABLE = 100, 46


@pytest.mark.parametrize("op", [PRINTED, ASSERTED])
@pytest.mark.parametrize(
    ("sent", "text", "result"),
    [
        ([b"words\n"], "words\n", NO_DEVICE),
        ([b"x" * (1 << 20)] * 4, "x" * PRINT_MAX, NO_DEVICE),
        ([b"x" * (1 << 20)] * 4 + [b"x"], "x" * PRINT_MAX, UNAVAILABLE),
        ([b""] * 9, "", NO_DEVICE),
    ],
)
def test_a_worker_that_sends_more_than_a_worker_sends_is_left(
    place: Remote, tmp_path: Path, op: int, sent: list[bytes], text: str, result: int
) -> None:
    def answer(seq: int) -> bytes:
        before = b"".join(frames.frame(op, body, 0, seq) for body in sent)
        return before + frames.frame(frames.REPLY, struct.pack("<ii", NO_DEVICE, 0), 0, seq)

    greeting = welcome(caps=frames.table().capability_hash())
    with liar(tmp_path, greeting, answer):
        done = place.guest([sys.executable, "-c", INIT], KVMPOOL_ENDPOINT=f"unix:{tmp_path}/l")
    ends = {PRINTED: (f"{text}init={result}\n", ""), ASSERTED: (f"init={result}\n", text)}
    assert (done.out, done.errors) == ends[op]


def test_text_for_nobody_is_no_worker_s(place: Remote, tmp_path: Path) -> None:
    def answer(seq: int) -> bytes:
        return frames.frame(PRINTED, b"words", 0, seq + 1)

    with liar(tmp_path, welcome(caps=frames.table().capability_hash()), answer):
        done = place.guest([sys.executable, "-c", INIT], KVMPOOL_ENDPOINT=f"unix:{tmp_path}/l")
    assert done.lines == [f"init={UNAVAILABLE}"]

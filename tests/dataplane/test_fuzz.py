"""Coverage-guided garbage for every decoder of bytes that another party sends, under ASan and UBSan.

KVMPOOL_FUZZ_S is for all targets together (CI: 240 s, at home 30); KVMPOOL_FUZZ_RUNS=1000000 runs each for that many
inputs instead. Not here: the acceptor, which reads no byte of a guest, and the translator of PTX, which is Python.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.dataplane import frames, plane, shim

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(shutil.which("clang") is None, reason="clang is not installed (libFuzzer)"),
]

FLAGS = ("-std=gnu11", "-O1", "-g", "-fno-sanitize-recover=all", "-fsanitize=fuzzer,address,undefined")
SOFTGPU = shim.ROOT / "kvmpool" / "softgpu" / "src"
CONTROL = tuple(Path(name).stem for name in plane.SHARED if name != "log.c")  # of a host's programs


@dataclass(frozen=True)
class Target:
    """tests/native/NAME.c includes what it tries; `sources` are the rest. `least`: inputs that 3 s must reach."""

    name: str
    sources: tuple[str, ...]
    seeds: Callable[[], list[bytes]]
    length: int
    least: int = 1000


def _frame_seeds() -> list[bytes]:
    return [frames.life(), frames.hello()]


def _hello_seeds() -> list[bytes]:
    seeds = [frames.hello()[16:], frames.hello(claim=b"a-b_9")[16:], bytes(260), b"\xff\xff\xff\xff" + bytes(256)]
    return [*seeds, bytes(1200)]  # of figures


def _ring_seeds() -> list[bytes]:
    return [
        b"\xff\xff\xff\xf0" * 2 + bytes([1, 0, 1, 0]) * 4,
        bytes(8) + bytes([2, 0, 0, 0, 0x80, 0, 0, 0, 40, 0, 0, 0, 9]),
    ]


def _session_seeds() -> list[bytes]:
    return [frames.life(), frames.graph_life(), *frames.each_call()]


def _relay_seeds() -> list[bytes]:
    hello = plane.hello
    guests = [b"\x00\xff" + hello(), b"\x01\x10" + hello(), b"\x00\x10" + hello(token="0123456789abcdef" * 2)]
    words = [
        b"POINT gpu0 1 64\n/nowhere/x.sock",
        b"UNPOINT gpu1\nbecause",
        b"STATUS",
        b"FOLLOW 1 2",
        b"CLAIM gpu3",
        b"CLOSE",
    ]
    return [*guests, *(b"\x02\x00" + word for word in words), b"\x04\x00OK", b"\x04\x00ERROR no"]


def _worker_seeds() -> list[bytes]:
    said = [b"\x00STATUS", b"\x00STOP", b"\x00RELAY 1", b"\x00RELAY 2", b"\x01KEEPALIVE"]
    window = b"\x0bSESSION 1048576 4096 " + b"0f" * 16 + b"\n" + plane.hello()[16:]
    return [*said, window, b"\x03SESSION\n" + plane.hello()[16:], b"\x02SESSION\n" + plane.hello()[16:]]


def _reply(length: int, body: bytes = b"", kind: int = 2) -> bytes:
    """As fuzz_shim.c reads one: 2 a reply, 1 data."""
    return struct.pack("<BH", kind, length) + body[:length]


def _shim_seeds() -> list[bytes]:
    done = bytes(8)
    info = done + struct.pack("<16i16BII", *([5] * 16), *([1] * 16), 2, 1) + struct.pack("<IIII", 0, 8, 8, 8)
    logs = _reply(40, done + struct.pack("<II", 10, 10) + b"x" * 24)
    function = _reply(len(info), info)
    linked = _reply(24, done + struct.pack("<QII", 16, 0, 0)) + _reply(16, b"x" * 16, 1)
    return [
        bytes([0, 20]) + logs * 2,
        bytes([1]) + function + bytes([1]) + function,
        bytes([2]) + function * 2 + _reply(8) + _reply(24) + _reply(14, done + b"a\0b\0c\0"),
        bytes([3]) + _reply(8) + _reply(16) + linked + _reply(8),
        bytes([4]) + _reply(24) + _reply(16) * 4 + _reply(12) + _reply(16),
        bytes([5, 2, 32]) + _reply(32, b"y" * 32, 1) + _reply(8) + _reply(128, b"", 1) + _reply(8),
        bytes([6]) + _reply(8 + 4 + 124 + 192 * 5),
    ]


def _observer_seeds() -> list[bytes]:
    figures = struct.pack("<QQQiiiiII", 5, 100, 10**9, 13000, 9, 0, 132, 1, 3) + b"card\0"
    asked = frames.frame(7, seq=1) + frames.frame(7, seq=2) + frames.frame(frames.BYE)
    return [b"\x01" + asked, b"\x00" + bytes([1, 200]) + figures + bytes(140) + bytes([1, 10]) + figures]


def _image_seeds() -> list[bytes]:
    ptx = b".version 8.0\n.target sm_75\n\0"
    packed = bytes([0xF0, len(ptx) - 15]) + ptx
    section = struct.pack("<IIQQQQIIQQ", 0, 1, 0, 0, 64, 0, 0, 0, 8, 0)
    elf = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 2, 190, 1, 0, 0, 64, 0, 64, 56, 0, 64, 2, 0)
    cubin = elf + bytes(64) + section

    def entry(kind: int, payload: bytes, target: int, flags: int = 0, plain: int = 0, packed: int = 0) -> bytes:
        head = struct.pack(
            "<HHIQIIHHIIIQQQ", kind, 0x101, 64, len(payload), packed, 0, 0, 0, target, 0, 0, flags, 0, plain
        )
        return head + payload

    def fatbin(*entries: bytes) -> bytes:
        return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(b"".join(entries))) + b"".join(entries)

    lz4 = entry(1, packed, 75, 0x2000, len(ptx), len(packed))
    return [ptx, fatbin(entry(1, ptx, 75), entry(2, cubin, 80)), fatbin(lz4), cubin]


def _shim_sources() -> tuple[str, ...]:
    included = ("shim_dial.c", "shim_receive.c")
    return tuple(str(file) for file in sorted(shim.SOURCES.glob("shim_*.c")) if file.name not in included)


SESSION = tuple(
    f"session_{name}"
    for name in ("arena", "capture", "container", "copy", "graph", "graph_list", "graph_nodes", "host",
                 "image", "library", "linker", "memory", "meter", "module", "objects",
                 "observe", "own", "read", "vmm", "wait")
)  # fmt: skip
TARGETS = (
    Target("fuzz_frame", (), _frame_seeds, 2000),
    Target("fuzz_hello", (), _hello_seeds, 1300),
    Target("fuzz_ring", (), _ring_seeds, 400),
    Target("fuzz_relay", ("quiet_log", *CONTROL, "relay_window"), _relay_seeds, 600),
    Target("fuzz_worker", ("quiet_log", *CONTROL, "account", "confine", "confine_calls", "confine_cgroup", "turns",
           "cache", "blake2b"), _worker_seeds, 600),
    Target("fuzz_session", (*SESSION, "frame", "handles", "account", "turns", "cache", "blake2b", "ring", "window",
           "made:session_handlers"), _session_seeds, 4000, 500),
    Target("fuzz_shim", (*_shim_sources(), "blake2b", "handles", "ring", "slots", "window", "made:shim_stubs",
           "made:shim_exports"), _shim_seeds, 1500, 500),
    Target("fuzz_observer", ("frame", "account", "turns", "gnvml_card", "gnvml_event", "gnvml_library",
           "gnvml_process"), _observer_seeds, 1000, 500),
    Target("fuzz_image", ("softgpu:fatbin", "softgpu:lz4"), _image_seeds, 600),
)  # fmt: skip


def _path(name: str, made: Path) -> Path:
    kind, _, stem = name.rpartition(":")
    if name.endswith(".c"):
        return Path(name)
    if name == "quiet_log":
        return shim.NATIVE / "quiet_log.c"
    return {"": shim.SOURCES, "made": made, "softgpu": SOFTGPU}[kind] / f"{stem}.c"


def _limit() -> str:
    runs = os.environ.get("KVMPOOL_FUZZ_RUNS")
    seconds = int(os.environ.get("KVMPOOL_FUZZ_S", "30")) // len(TARGETS)
    return f"-runs={runs}" if runs else f"-max_total_time={max(1, seconds)}"


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_garbage_does_no_harm(target: Target, tmp_path: Path) -> None:
    made = shim.generated(tmp_path)
    program, corpus = tmp_path / target.name, tmp_path / "corpus"
    includes = [f"-I{folder}" for folder in (shim.SOURCES, SOFTGPU, made)]
    sources = [shim.NATIVE / f"{target.name}.c", *(_path(name, made) for name in target.sources)]
    subprocess.run(["clang", *FLAGS, *includes, "-o", program, *sources, "-lpthread", "-ldl"], check=True)
    corpus.mkdir()
    for number, seed in enumerate(target.seeds()):
        (corpus / str(number)).write_bytes(seed)
    options = [_limit(), f"-max_len={target.length}", "-timeout=10", f"-artifact_prefix={tmp_path}/"]
    done = subprocess.run(
        [program, *options, "-print_final_stats=1", corpus],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    executed = int(done.stderr.partition("stat::number_of_executed_units:")[2].split()[0])
    print(f"{target.name}: {executed} inputs")
    assert executed > target.least

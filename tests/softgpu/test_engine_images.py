"""What can be loaded: PTX, fatbins as NVIDIA's fatbinary writes them, several linked; and how the rest is refused."""

# ruff: noqa: E501  (CUDA C and its answers, as they are)

from __future__ import annotations

import base64
import ctypes
import hashlib
import multiprocessing
import os
import random
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from tests.softgpu.engine import Buffer, Engine, Module, Refused
from tests.softgpu.nvrtc import ptx

# fatbinary 13.5 --compress-mode=speed (LZ4) and =size (zstd): PTX for sm_75, sm_86 and sm_100, whose kernel
# `which` stores its own number three times.
LZ4 = base64.b64decode("""
UO1VugEAEAAwAwAAAAAAAAEAAQFQAAAAwAAAAAAAAAC6AAAAQAAAAAAABwBLAAAAAAAAAAAAAAARIAAAAAAAAAAAAAAAAAAA7QAAAAAAAABIAA
AAAAAAAAAAAAAAAAAA9FMudmVyc2lvbiA3LjAKLnRhcmdldCBzbV83NQouYWRkcmVzc19zaXplIDY0Ci52aXNpYmxlIC5lbnRyeSB3aGljaCgu
cGFyYW0gLnU2NCBvdXQpIHsgLnJlZyAuYjY0ICVwOw4AkjMyICV2OyBsZDEAATAA8QElcCwgW291dF07IG1vdi51JADxACwgNzU7IHN0Lmdsb2
JhbBYAUVslcF0sQAANGAAvKzQaAAYTOBoAgHJldDsgfQoAAAAAAAAAAQABAVAAAADAAAAAAAAAALoAAABAAAAAAAAIAFYAAAAAAAAAAAAAABEg
AAAAAAAAAAAAAAAAAADtAAAAAAAAAEgAAAAAAAAAAAAAAAAAAAD0Uy52ZXJzaW9uIDguMAoudGFyZ2V0IHNtXzg2Ci5hZGRyZXNzX3NpemUgNj
QKLnZpc2libGUgLmVudHJ5IHdoaWNoKC5wYXJhbSAudTY0IG91dCkgeyAucmVnIC5iNjQgJXA7DgCSMzIgJXY7IGxkMQABMADxASVwLCBbb3V0
XTsgbW92LnUkAPEALCA4Njsgc3QuZ2xvYmFsFgBRWyVwXSxAAA0YAC8rNBoABhM4GgCAcmV0OyB9CgAAAAAAAAABAAEBUAAAAMAAAAAAAAAAvA
AAAEAAAAAGAAgAZAAAAAAAAAAAAAAAESAAAAAAAAAAAAAAAAAAAO8AAAAAAAAASAAAAAAAAAAAAAAAAAAAAPRULnZlcnNpb24gOC42Ci50YXJn
ZXQgc21fMTAwCi5hZGRyZXNzX3NpemUgNjQKLnZpc2libGUgLmVudHJ5IHdoaWNoKC5wYXJhbSAudTY0IG91dCkgeyAucmVnIC5iNjQgJXA7Dg
CSMzIgJXY7IGxkMQABMADxASVwLCBbb3V0XTsgbW92LnUkAPEBLCAxMDA7IHN0Lmdsb2JhbBcAUVslcF0sQQANGAAvKzQaAAYTOBoAgHJldDsg
fQoAAAAAAA==
""")
ZSTD = base64.b64decode("""
UO1VugEAEADgAgAAAAAAAAEAAQFQAAAAqAAAAAAAAAChAAAAQAAAAAAABwBLAAAAAAAAAAAAAAARgAAAAAAAAAAAAAAAAAAA7QAAAAAAAABIAA
AAAAAAAAAAAAAAAAAAKLUv/SDtxQQA0skfGVDVAwxEMU90xojuODMz6APrny94CTOpaEaA2zzqiRc47OdEcx9T5WOr9Dp7RBQnrN+W8thoyzJO
3BdVj/u5ccT7HCbPuzTxu+aCtqzDxHqnJJb3gwmi0+UY1tV8n/Whme53MPGZ0ezkPHEUyXeI4lDZ9ZSw1O+KV7yyNOO5PwgAIBM9F7wzuZxXHd
XgFZaqcWIQ0wwAAAAAAAAAAQABAVAAAACgAAAAAAAAAKAAAABAAAAAAAAIAFYAAAAAAAAAAAAAABGAAAAAAAAAAAAAAAAAAADtAAAAAAAAAEgA
AAAAAAAAAAAAAAAAAAAotS/9IO29BADSiR8ZYM8DPJ0hGozMndADKgh45PARgZx2kBuUEQC7POqJoRt2cyK5DalysdV5nT0+6IT020IeEy1ZxI
nbmupxNzeOeJu7t7w7E79bLmjJunvSOySxvB88DH0mp7CO5vusC810P3PPZ0WzkvPETSOfPahA2fV0sNTPioceWZrx3B8IACATPRe8M7mcVx3V
4BWWqnFiENMMAQABAVAAAACoAAAAAAAAAKIAAABAAAAABgAIAGQAAAAAAAAAAAAAABGAAAAAAAAAAAAAAAAAAADvAAAAAAAAAEgAAAAAAAAAAA
AAAAAAAAAotS/9IO/NBADyCSAZYM8DPJ0hbEbv3dgRHUWEcewyADntIDcoI0DLXGqKEThs54QyucRO5trndXb5XuEE9ftGLhVN3cSJyTnW5XZu
HHJyDiPz/lD8jrmgqeswUu/RxHP6AGoqVLmFtUTfqWVqrvsbjE6vmpecKXac+e29Yomya/rgqb/FR1y6NWO6PwgAIBM9F7wzOZ23HNX2FYCqcW
MQ0wwAAAAAAAA=
""")
WHICH = """.version 7.0
.target sm_75
.address_size 64
.visible .entry which(.param .u64 out) { .reg .b64 %p; .reg .b32 %v; ld.param.u64 %p, [out]; mov.u32 %v, NUMBER;
 st.global.v2.u32 [%p], {%v, %v}; st.global.u32 [%p+8], %v; ret; }
"""


def _which(module: Module) -> float:
    out = Buffer("i", 3)
    assert module.launch("which", [1], [1], [out]).result == 0
    assert len(set(out.read())) == 1
    return out.read()[0]


def _refusal(engine: Engine, *images: str | bytes) -> Refused:
    with pytest.raises(Refused) as caught:
        engine.load(*images)
    return caught.value


@pytest.mark.parametrize("image", [LZ4, ZSTD], ids=["lz4", "zstd"])
def test_a_fatbin_gives_its_newest_ptx_that_is_not_newer_than_sm_90(engine: Engine, image: bytes) -> None:
    assert _which(engine.load(image)) == 86


def test_a_fatbin_is_found_through_its_wrapper(engine: Engine) -> None:
    inner = ctypes.create_string_buffer(LZ4)
    wrapper = struct.pack("<IIQQ", 0x466243B1, 1, ctypes.addressof(inner), 0)
    assert _which(engine.load(wrapper)) == 86


def _entries(*entries: tuple[int, int, bytes]) -> bytes:
    """A fatbin of uncompressed entries (kind, target, payload)."""
    body = b""
    for kind, target, payload in entries:
        body += struct.pack("<HHIQIIHHIIIQQQ", kind, 0x101, 80, len(payload), 0, 64, 5, 9, target, 0, 0, 0x11, 0, 0)
        body += bytes(16) + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_a_plain_fatbin_and_one_with_too_new_ptx_or_none(engine: Engine) -> None:
    text = WHICH.replace("NUMBER", "5").encode()
    assert _which(engine.load(_entries((2, 90, b"\x7fELF"), (1, 75, text)))) == 5
    too_new = _refusal(engine, _entries((1, 100, text)))
    assert (too_new.error, "sm_100 or newer" in too_new.log) == (209, True)
    machine_code = _refusal(engine, _entries((2, 90, b"\x7fELF")))
    assert (machine_code.error, "machine code only" in machine_code.log) == (209, True)


def test_a_cubin_is_209_and_noise_200(engine: Engine) -> None:
    cubin = _refusal(engine, b"\x7fELF" + bytes(100))
    assert (cubin.error, "needs PTX" in cubin.log) == (209, True)
    assert _refusal(engine, bytes(range(1, 100))).error == 200


@pytest.mark.parametrize("image", [LZ4, ZSTD], ids=["lz4", "zstd"])
def test_a_damaged_fatbin_is_refused_and_nothing_else_happens(engine: Engine, image: bytes) -> None:
    """Cut at every length, and with random bytes changed."""
    rng = random.Random(1)
    library = engine.library

    def unpack(data: bytes) -> int:
        text, size = ctypes.c_char_p(), ctypes.c_size_t()
        log = ctypes.create_string_buffer(256)
        error = library.kp_image_to_ptx(
            data, ctypes.c_size_t(len(data)), ctypes.byref(text), ctypes.byref(size), log, ctypes.c_size_t(256)
        )
        if not error:
            ctypes.CDLL(None).free(text)
        return int(error)

    assert unpack(image) == 0
    for length in range(8, len(image)):
        assert unpack(image[:length]) in (200, 209), length
    for _ in range(3000):
        data = bytearray(image)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        assert unpack(bytes(data)) in (0, 2, 200, 209)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("tex.2d.v4.f32.f32 {%f0, %f1, %f2, %f3}, [t, {%f0, %f1}];", "line 5: tex.2d.v4.f32.f32 is not supported"),
        ("wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 %f0, %f1;", "line 5: wmma.mma.sync"),
        ("cp.async.ca.shared.global [%rd0], [%rd1], 16;", "line 5: cp.async.ca"),
        ("mbarrier.init.shared.b64 [%rd0], 1;", "line 5: mbarrier.init"),
        ("cvt.rn.satfinite.e4m3x2.f32 %rs0, %f0, %f1;", "line 5: cvt.rn.satfinite.e4m3x2.f32 is not supported"),
        ("barrier.cluster.arrive;", "line 5: barrier.cluster.arrive is not supported"),
        ("add.u32 %r0, %r1, %undeclared;", "line 5: %undeclared is not declared"),
        ("bra NOWHERE;", "line 5: label NOWHERE is not defined"),
        ("add.u32 %r0, %r1", "line 5: unexpected 'ret' in the operands of add"),
        ("call nothing, ();", "line 5: nothing is not declared"),
        ("mov.u32 %r0, @;", "line 5: expected a name"),
        ("ld.global.v2.u32 %r0, [%rd0];", "line 5: ld.global.v2.u32 needs 2 elements"),
        ("add.u32 %r0, %r1, \u00a7;", "line 5: unexpected character"),
    ],
)
def test_what_is_not_supported_is_refused_at_load_by_name_and_line(engine: Engine, body: str, said: str) -> None:
    head = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k() { .reg .b32 %r<4>; .reg .f32 %f<4>; "
    refused = _refusal(engine, f"{head}.reg .b64 %rd<4>; .reg .b16 %rs<4>;\n{body}\nret; }}")
    assert refused.error == 218
    assert said in refused.log, refused.log
    assert "\n" not in refused.log


def test_an_unresolved_function_is_refused_by_name(engine: Engine) -> None:
    refused = _refusal(engine, ptx("extern __device__ int other(int); __global__ void k(int *p) { *p = other(3); }",
                                   "compute_75", "-rdc=true"))  # fmt: skip
    assert refused.error == 218
    assert "_Z5otheri is declared but defined nowhere" in refused.log


def test_modules_are_linked_by_name(engine: Engine) -> None:
    one = ptx('extern __device__ int other(int); extern __device__ int shared_total; static __device__ int mine = 3;'
              'extern "C" __global__ void k(int *p) { p[0] = other(4) + mine; p[1] = shared_total; }',
              "compute_75", "-rdc=true")  # fmt: skip
    two = ptx("__device__ int shared_total = 100; static __device__ int mine = 20;"
              "__device__ int other(int x) { shared_total += x; return x * mine; }", "compute_75", "-rdc=true")  # fmt: skip
    out = Buffer("i", 2)
    assert engine.load(one, two).launch("k", [1], [1], [out]).result == 0
    assert out.read() == [83, 104]


def test_names_that_are_not_there_are_500(engine: Engine) -> None:
    module = engine.load(LZ4)
    for look_up in (module.function, module.variable):
        with pytest.raises(Refused, match="^500"):
            look_up("nothing")


def test_the_second_load_comes_from_the_cache(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    text = WHICH.replace("NUMBER", "31")
    assert _which(engine.load(text)) == 31
    monkeypatch.setenv("KVMPOOL_PYTHON", "/nonexistent")
    assert _which(engine.load(text)) == 31
    refused = _refusal(engine, WHICH.replace("NUMBER", "32"))
    assert (refused.error, "/nonexistent cannot be started" in refused.log) == (221, True)


def test_without_a_compiler_the_log_says_what_to_install(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMPOOL_CC", "/nonexistent")
    refused = _refusal(engine, WHICH.replace("NUMBER", "33"))
    assert (refused.error, "no C compiler" in refused.log) == (221, True)


def _load_in_a_process(library: str, root: str, number: int) -> None:
    os._exit(0 if _which(Engine(Path(library), Path(root)).load(WHICH.replace("NUMBER", str(number)))) == number else 1)


def test_processes_that_compile_the_same_at_once_all_succeed(engine: Engine) -> None:
    spawn = multiprocessing.get_context("fork")
    args = (engine.library._name, str(engine.root), 41)
    processes = [spawn.Process(target=_load_in_a_process, args=args) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert not list(engine.root.glob("cache/build.*"))


def test_a_cache_that_others_can_write_is_not_used(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies there is loaded into this process."""
    (tmp_path / "cache").mkdir(mode=0o777)
    (tmp_path / "cache").chmod(0o777)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert _which(Engine(Path(engine.library._name), tmp_path).load(WHICH.replace("NUMBER", "51"))) == 51
    assert list((tmp_path / "cache").iterdir()) == []
    assert list(tmp_path.glob("kvmpool-softgpu-*/*.so")), "but one of its own"


@pytest.mark.parametrize("length", [0, 3, 55, 56, 63, 64, 65, 1000])
def test_the_cache_key_is_sha256(engine: Engine, length: int) -> None:
    """struct kp_sha256 is 8 words, a length and a block: 104 bytes."""
    data, state, text = (
        random.Random(length).randbytes(length),
        ctypes.create_string_buffer(104),
        ctypes.create_string_buffer(65),
    )
    engine.library.kp_sha256_start(state)
    half = length // 2
    engine.library.kp_sha256_add(state, data[:half], ctypes.c_size_t(half))
    engine.library.kp_sha256_add(state, data[half:], ctypes.c_size_t(length - half))
    engine.library.kp_sha256_hex(state, text)
    assert text.value.decode() == hashlib.sha256(data).hexdigest()


def _lz4(data: bytes) -> bytes:
    """One block by the lz4 program: its frame without the 7-byte header, the block's length and the end marks."""
    options = ["lz4", "-9", "-c", "-B7", "--no-frame-crc"]
    frame = subprocess.run(options, input=data, capture_output=True, check=True).stdout
    length = int.from_bytes(frame[7:11], "little")
    return frame[11 : 11 + length]


def test_lz4_blocks_of_the_real_program_unpack(engine: Engine) -> None:
    if shutil.which("lz4") is None:
        pytest.skip("the lz4 program is not installed")
    rng = random.Random(3)
    for size in (40, 300, 5000, 200_000):
        data = b"".join(
            rng.choice([b"mov.u32 ", b"%r", b"\n", rng.randbytes(3)]) * rng.randrange(1, 40) for _ in range(size // 40)
        )
        block = _lz4(data)
        out = ctypes.create_string_buffer(len(data))
        unpack = engine.library.kp_lz4_block
        unpack.restype = ctypes.c_long
        assert unpack(block, ctypes.c_size_t(len(block)), out, ctypes.c_size_t(len(data))) == len(data)
        assert out.raw == data
        assert unpack(block, ctypes.c_size_t(len(block)), out, ctypes.c_size_t(len(data) - 1)) == -1

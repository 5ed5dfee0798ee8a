"""Kernels as NVRTC compiles them, for every dialect of PTX it writes, against references worked out here."""

from __future__ import annotations

import ctypes
import math
import random
import struct

import pytest

from tests.softgpu.engine import Arg, Buffer, Ctl, Engine
from tests.softgpu.nvrtc import ptx

ARCHES = ["compute_75", "compute_80", "compute_90", "compute_100", "compute_120", "compute_90 --device-debug"]


def f32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


@pytest.fixture(params=ARCHES)
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_vector_sum_is_exact(engine: Engine, arch: str) -> None:
    source = """extern "C" __global__ void vadd(const float *a, const float *b, float *c, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) c[i] = a[i] + b[i]; }"""
    module = engine.load(ptx(source, arch))
    n = 1000
    rng = random.Random(1)
    a, b = ([f32(rng.uniform(-1e3, 1e3)) for _ in range(n)] for _ in range(2))
    out = Buffer("f", n + 24)
    done = module.launch("vadd", [4], [256], [Buffer("f", a), Buffer("f", b), out, ("i", n)])
    assert done.result == 0
    assert out.read() == [f32(x + y) for x, y in zip(a, b, strict=True)] + [0.0] * 24


MATMUL = """#define BS 16
extern "C" __global__ void matmul(float *C, const float *A, const float *B, int wA, int wB) {
  __shared__ float As[BS][BS]; __shared__ float Bs[BS][BS];
  int bx = blockIdx.x, by = blockIdx.y, tx = threadIdx.x, ty = threadIdx.y; float s = 0;
  for (int a = wA * BS * by, b = BS * bx; a <= wA * BS * by + wA - 1; a += BS, b += BS * wB) {
    As[ty][tx] = A[a + wA * ty + tx]; Bs[ty][tx] = B[b + wB * ty + tx]; __syncthreads();
    for (int k = 0; k < BS; k++) s += As[ty][k] * Bs[k][tx];
    __syncthreads(); }
  C[wB * BS * by + BS * bx + wB * ty + tx] = s; }"""


def test_a_matrix_product_through_shared_memory_is_exact(engine: Engine, arch: str) -> None:
    n = 64
    a, b = [i % 7 for i in range(n * n)], [i % 5 for i in range(n * n)]
    out = Buffer("f", n * n)
    args: list[Arg] = [out, Buffer("f", a), Buffer("f", b), ("i", n), ("i", n)]
    done = engine.load(ptx(MATMUL, arch)).launch("matmul", [n // 16, n // 16], [16, 16], args)
    assert done.result == 0
    assert out.read() == [float(sum(a[i * n + k] * b[k * n + j] for k in range(n))) for i in range(n) for j in range(n)]


REDUCE = """
extern "C" __global__ void shuffle(const int *in, int *out, int n) {
  int v = 0; for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) v += in[i];
  __shared__ int part[32]; int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int d = 16; d; d >>= 1) v += __shfl_down_sync(~0u, v, d);
  if (lane == 0) part[warp] = v; __syncthreads();
  if (warp == 0) { v = lane < blockDim.x / 32 ? part[lane] : 0;
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
    if (lane == 0) atomicAdd(out, v); } }
extern "C" __global__ void tree(const int *in, int *out, int n) {
  extern __shared__ int s[]; int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
  s[t] = i < n ? in[i] : 0; __syncthreads();
  for (int d = blockDim.x / 2; d; d >>= 1) { if (t < d) s[t] += s[t + d]; __syncthreads(); }
  if (t == 0) atomicAdd(out, s[0]); }
extern "C" __global__ void lockstep(const int *in, int *out, int n) {
  __shared__ volatile int s[256]; int t = threadIdx.x, i = blockIdx.x * 256 + t;
  s[t] = i < n ? in[i] : 0; __syncthreads();
  if (t < 128) s[t] += s[t + 128]; __syncthreads();
  if (t < 64) s[t] += s[t + 64]; __syncthreads();
  if (t < 32) { s[t] += s[t + 32]; s[t] += s[t + 16]; s[t] += s[t + 8]; s[t] += s[t + 4];
    s[t] += s[t + 2]; s[t] += s[t + 1]; }
  if (t == 0) atomicAdd(out, s[0]); }
extern "C" __global__ void count(const int *in, int *out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  int c = __syncthreads_count(i < n && in[i] > 0); int any = __syncthreads_or(i == 77), all = __syncthreads_and(i < n);
  if (threadIdx.x == 0) { atomicAdd(out, c); atomicAdd(out + 1, any != 0); atomicAdd(out + 2, all != 0); } }
extern "C" __global__ void votes(const int *in, int *out, int n) {
  int i = threadIdx.x; unsigned b = __ballot_sync(~0u, in[i] > 0);
  out[i] = __popc(b) + 100 * __any_sync(~0u, i == 5) + 1000 * __all_sync(~0u, i >= 0);
  out[32 + i] = __shfl_up_sync(~0u, in[i], 3); out[64 + i] = __shfl_sync(~0u, in[i], i * 7, 8);
  out[96 + i] = __match_any_sync(~0u, i % 3); int p; out[128 + i] = __match_all_sync(~0u, 5, &p) + p; }
extern "C" __global__ void diverged(int *out) {
  int i = threadIdx.x; unsigned m = 0;
  if (i % 2) m = __activemask(); else m = ~__activemask();
  out[i] = m; if (i < 8) out[32 + i] = __shfl_sync(0xff, i, 7 - i); }
"""


@pytest.mark.parametrize("kernel", ["shuffle", "tree", "lockstep"])
def test_reductions_by_shuffle_by_barrier_and_in_lockstep_agree(engine: Engine, arch: str, kernel: str) -> None:
    rng = random.Random(2)
    values = [rng.randrange(-1000, 1000) for _ in range(5000)]
    out = Buffer("i", 1)
    args: list[Arg] = [Buffer("i", values), out, ("i", len(values))]
    done = engine.load(ptx(REDUCE, arch)).launch(kernel, [20], [256], args, shared=1024)
    assert (done.result, out.read()) == (0, [sum(values)])


def test_counting_barriers_count(engine: Engine, arch: str) -> None:
    values = [(-1) ** i * i for i in range(500)]
    out = Buffer("i", 3)
    engine.load(ptx(REDUCE, arch)).launch("count", [4], [128], [Buffer("i", values), out, ("i", 500)])
    assert out.read() == [sum(v > 0 for v in values), 1, 3]


def test_warp_votes_matches_and_shuffles(engine: Engine, arch: str) -> None:
    values = [(-1) ** i * (i + 1) for i in range(32)]
    out = Buffer("I", 160)
    engine.load(ptx(REDUCE, arch)).launch("votes", [1], [32], [Buffer("i", values), out, ("i", 32)])
    got = out.read()
    unsigned = [v % 2**32 for v in values]
    assert got[:32] == [1116] * 32
    assert got[32:64] == [unsigned[i - 3] if i >= 3 else unsigned[i] for i in range(32)]
    assert got[64:96] == [unsigned[i // 8 * 8 + i * 7 % 8] for i in range(32)]
    assert got[96:128] == [sum(1 << j for j in range(i % 3, 32, 3)) for i in range(32)]
    assert got[128:] == [0] * 32  # 0xffffffff + 1


def test_diverged_lanes_see_only_each_other(engine: Engine, arch: str) -> None:
    out = Buffer("I", 40)
    engine.load(ptx(REDUCE, arch)).launch("diverged", [1], [32], [out])
    assert out.read() == [0xAAAAAAAA] * 32 + [7 - i for i in range(8)]


WIDE = """
__constant__ double table[4] = {0.5, -1.25, 3.0, 1e10};
__device__ int counter = 40; __device__ unsigned char bytes[5] = {1, 2, 3, 4, 5};
__device__ int *pointer = &counter;
typedef double (*fn)(double, int);
__device__ __noinline__ double twice(double x, int n) { return x * 2 + n; }
__device__ __noinline__ double half_of(double x, int n) { return x / 2 - n; }
__device__ fn calls[2] = {twice, half_of};
__device__ __noinline__ int fib(int n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }
struct pair { char c; double d; short s[3]; };
extern "C" __global__ void saxpy(double a, const double *x, double *y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) y[i] = a * x[i] + y[i]; }
extern "C" __global__ void longs(const long long *a, const long long *b, long long *o, int n) {
  int i = threadIdx.x; if (i >= n) return; long long x = a[i], y = b[i];
  o[i * 8] = x * y; o[i * 8 + 1] = y ? x / y : 7; o[i * 8 + 2] = y ? x % y : 7; o[i * 8 + 3] = __mul64hi(x, y);
  o[i * 8 + 4] = (unsigned long long)x >> (y & 63); o[i * 8 + 5] = x >> (y & 63); o[i * 8 + 6] = x << (y & 63);
  o[i * 8 + 7] = __popcll(x) + 100 * __clzll(y) + 10000 * (__ffsll(x)); }
extern "C" __global__ void calls_(double *o, pair p) {
  int i = threadIdx.x; double local[16]; for (int k = 0; k < 16; k++) local[k] = k * p.d;
  o[i] = calls[i & 1](local[(i * 5) & 15], i) + table[i & 3] + fib(i) + p.c + p.s[i % 3];
  if (i == 0) { atomicAdd(pointer, 2); atomicAdd(&counter, bytes[4]); } }
extern "C" __global__ void mandel(int *o, int w, int n) {
  int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y;
  double cr = -2.0 + 3.0 * x / w, ci = -1.0 + 2.0 * y / w;
  double r = 0, i = 0; int k = 0;
  for (; k < n && r * r + i * i < 4.0; k++) { double t = r * r - i * i + cr; i = 2 * r * i + ci; r = t; }
  o[y * w + x] = k; }
extern "C" __global__ void trig(const double *x, double *o, int n) {
  int i = threadIdx.x; if (i < n) { o[i * 4] = sin(x[i]); o[i * 4 + 1] = exp(-fabs(x[i]));
  o[i * 4 + 2] = pow(fabs(x[i]), 0.3); o[i * 4 + 3] = atan2(x[i], 2.0); } }
"""


def test_doubles_are_not_contracted_where_the_source_was_compiled_without(engine: Engine, arch: str) -> None:
    rng = random.Random(3)
    x, y = ([rng.uniform(-9, 9) for _ in range(64)] for _ in range(2))
    out = Buffer("d", y)
    module = engine.load(ptx(WIDE, arch, "--fmad=false"))
    module.launch("saxpy", [1], [64], [("d", 1.7), Buffer("d", x), out, ("i", 64)])
    assert out.read() == [1.7 * a + b for a, b in zip(x, y, strict=True)]


def _truncated(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def _signed64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def test_64_bit_integers(engine: Engine, arch: str) -> None:
    rng = random.Random(4)
    a = [rng.randrange(-(2**63), 2**63) >> rng.randrange(64) for _ in range(60)] + [-(2**63), -(2**63), 2**63 - 1, 0]
    b = [rng.randrange(-(2**63), 2**63) >> rng.randrange(64) for _ in range(60)] + [2, 1, -1, 5]
    out = Buffer("q", 64 * 8)
    engine.load(ptx(WIDE, arch)).launch("longs", [1], [64], [Buffer("q", a), Buffer("q", b), out, ("i", 64)])
    got = out.read()
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        ux, uy, s = x % 2**64, y % 2**64, y & 63
        low = (ux & -ux).bit_length()
        expected = [
            _signed64(x * y), _signed64(_truncated(x, y)) if y else 7, _signed64(x - _truncated(x, y) * y) if y else 7,
            _signed64(x * y >> 64), _signed64(ux >> s), x >> s, _signed64(x << s),
            ux.bit_count() + 100 * (64 - uy.bit_length()) + 10000 * low,
        ]  # fmt: skip
        assert got[i * 8 : i * 8 + 8] == expected, (x, y)


def test_calls_through_pointers_recursion_local_arrays_and_struct_parameters(engine: Engine, arch: str) -> None:
    module = engine.load(ptx(WIDE, arch))
    out = Buffer("d", 12)
    fields = [("b", -3), ("d", 1.5), ("h", 10), ("h", 20), ("h", 30), ("h", 0)]
    done = module.launch("calls_", [1], [12], [out, *fields])
    assert done.result == 0
    fib = [0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89]
    table, s = [0.5, -1.25, 3.0, 1e10], [10, 20, 30]
    assert out.read() == [
        (v * 2 + i if i % 2 == 0 else v / 2 - i) + table[i & 3] + fib[i] - 3 + s[i % 3]
        for i, v in enumerate((i * 5 & 15) * 1.5 for i in range(12))
    ]
    address, size = module.variable("counter")
    assert size == 4

    assert ctypes.c_int.from_address(address).value == 47


def test_a_second_load_has_variables_of_its_own(engine: Engine) -> None:
    text = ptx(WIDE)
    first, second = engine.load(text), engine.load(text)
    first.launch("calls_", [1], [1], [Buffer("d", 1), ("d", 0), ("d", 0), ("d", 0)])

    values = [ctypes.c_int.from_address(module.variable("counter")[0]).value for module in (first, second)]
    assert values == [47, 40]


def test_mandelbrot(engine: Engine, arch: str) -> None:
    w, n = 32, 100
    out = Buffer("i", w * w)
    engine.load(ptx(WIDE, arch, "--fmad=false")).launch("mandel", [1, w], [w], [out, ("i", w), ("i", n)])

    def steps(x: int, y: int) -> int:
        c, r, i, k = (-2.0 + 3.0 * x / w, -1.0 + 2.0 * y / w), 0.0, 0.0, 0
        while k < n and r * r + i * i < 4.0:
            r, i, k = r * r - i * i + c[0], 2 * r * i + c[1], k + 1
        return k

    assert out.read() == [steps(x, y) for y in range(w) for x in range(w)]


def test_the_double_math_library_is_within_an_ulp_or_two(engine: Engine, arch: str) -> None:
    rng = random.Random(5)
    x = [rng.uniform(-5, 5) for _ in range(28)] + [1e9, -3e15, 0.0, 1e-9]
    out = Buffer("d", 128)
    engine.load(ptx(WIDE, arch)).launch("trig", [1], [32], [Buffer("d", x), out, ("i", 32)])
    got = out.read()
    for i, v in enumerate(x):
        expected = [math.sin(v), math.exp(-abs(v)), abs(v) ** 0.3, math.atan2(v, 2.0)]
        for result, exact in zip(got[i * 4 : i * 4 + 4], expected, strict=True):
            assert abs(result - exact) <= 2 * math.ulp(exact), (v, result, exact)


HALF = """#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void halves(const float *a, const float *b, unsigned short *h, unsigned *h2, unsigned short *bf) {
  int i = threadIdx.x; half x = __float2half(a[i]), y = __float2half(b[i]);
  half r[8] = {x + y, x - y, x * y, x / y, __hfma(x, y, x), __hmax(x, y), hsqrt(__habs(x)), __hneg(x)};
  for (int k = 0; k < 8; k++) h[i * 8 + k] = __half_as_ushort(r[k]);
  half2 v = __halves2half2(x, y), w = __hmul2(v, v); h2[i] = *(unsigned *)&w;
  __nv_bfloat16 p = __float2bfloat16(a[i]), q = __float2bfloat16(b[i]);
  bf[i * 2] = __bfloat16_as_ushort(p + q); bf[i * 2 + 1] = __bfloat16_as_ushort(p * q); }
"""


def _half(value: float) -> int:
    try:
        return int(struct.unpack("<H", struct.pack("<e", value))[0])
    except OverflowError:
        return 0x7C00 if value > 0 else 0xFC00


def _unhalf(bits: int) -> float:
    return float(struct.unpack("<e", struct.pack("<H", bits))[0])


def _bf16(value: float) -> int:
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return int((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def test_half_and_bfloat16_arithmetic(engine: Engine, arch: str) -> None:
    rng = random.Random(6)
    a, b = ([f32(rng.uniform(-300, 300)) for _ in range(64)] for _ in range(2))
    h, h2, bf = Buffer("H", 512), Buffer("I", 64), Buffer("H", 128)
    done = engine.load(ptx(HALF, arch)).launch("halves", [1], [64], [Buffer("f", a), Buffer("f", b), h, h2, bf])
    assert done.result == 0
    for i in range(64):
        x, y = _unhalf(_half(a[i])), _unhalf(_half(b[i]))
        expected = [x + y, x - y, x * y, x / y, x * y + x, max(x, y), math.sqrt(abs(x)), -x]
        assert [int(v) for v in h.read()[i * 8 : i * 8 + 8]] == [_half(v) for v in expected], (x, y)
        assert h2.read()[i] == _half(y * y) << 16 | _half(x * x)
        p, q = (struct.unpack("<f", struct.pack("<I", _bf16(v) << 16))[0] for v in (a[i], b[i]))
        assert bf.read()[i * 2 : i * 2 + 2] == [_bf16(f32(p + q)), _bf16(f32(p * q))]


GRID = """
__device__ unsigned *workspace() {  // as cooperative_groups/details/driver_abi.h finds it
  unsigned high, low; asm("mov.u32 %0, %%envreg1;" : "=r"(high)); asm("mov.u32 %0, %%envreg2;" : "=r"(low));
  return (unsigned *)((unsigned long long)high << 32 | low); }
__device__ void sync(unsigned round) {
  __syncthreads();
  if (threadIdx.x == 0) { __threadfence(); atomicAdd(workspace() + 1, 1);
    while (*(volatile unsigned *)(workspace() + 1) < round * gridDim.x); }
  __syncthreads(); }
extern "C" __global__ void steps(volatile int *a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x; unsigned round = 0;
  for (int d = 1; d < n; d *= 2) { int v = i >= d ? a[i - d] : 0; sync(++round); a[i] += v; sync(++round); } }
extern "C" __global__ void bare(unsigned long long *o) { *o = (unsigned long long)workspace(); }
"""


def test_a_cooperative_grid_has_a_workspace_to_meet_at(engine: Engine, arch: str) -> None:
    module = engine.load(ptx(GRID, arch))
    n = 256
    values = Buffer("i", [1] * n)
    ctl = Ctl()
    ctl.cooperative = 1
    assert module.launch("steps", [4], [64], [values, ("i", n)], ctl=ctl).result == 0
    assert values.read() == list(range(1, n + 1))
    none = Buffer("Q", [5])
    assert module.launch("bare", [1], [1], [none]).result == 0
    assert none.read() == [0]


STACKS = """
__device__ __noinline__ int big(int i) { int a[20000];
  for (int k = 0; k < 20000; k++) a[k] = k ^ i; return a[(i * 77) % 20000]; }
extern "C" __global__ void deep(int *o) { __syncthreads(); o[threadIdx.x] = big(threadIdx.x) + big(7); }
"""


def test_a_device_function_with_large_arrays_gets_the_stack_it_needs(engine: Engine, arch: str) -> None:
    out = Buffer("i", 64)
    module = engine.load(ptx(STACKS, arch))
    done = module.launch("deep", [2], [64], [out])
    assert done.result == 0, done.message
    assert out.read() == [(i * 77 % 20000 ^ i) + (539 ^ 7) for i in range(64)]

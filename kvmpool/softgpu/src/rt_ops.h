/* The ops of PTX as C functions: included by generated code only. By PTX ISA chapter. */
#ifndef KVMPOOL_SOFTGPU_RT_OPS_H
#define KVMPOOL_SOFTGPU_RT_OPS_H

#include "rt.h"

#define memcpy __builtin_memcpy
#define KP_INLINE static inline __attribute__((always_inline, unused))
#define KP_SLOW static __attribute__((noinline, unused))

typedef unsigned __int128 kp_u128;
typedef __int128 kp_s128;

/* ---- threads and memory ---- */

#define KP_POLL(t)                                                                                                     \
	do {                                                                                                           \
		if (__builtin_expect(*(volatile const int *)(t)->b->stop, 0))                                          \
			(t)->b->rt->stopped(t);                                                                        \
	} while (0)
#define KP_YIELD(t) ((t)->b->rt->yield(t))

#define KP_SHARED(t, a) ((uint64_t)(uintptr_t)(t)->b->shared + (uint32_t)(a))
#define KP_LD(type, a) (*(const __attribute__((may_alias)) type *)(uintptr_t)(a))
#define KP_LDV(type, a) (*(volatile const __attribute__((may_alias)) type *)(uintptr_t)(a))
#define KP_ST(type, a, v) (*(__attribute__((may_alias)) type *)(uintptr_t)(a) = (type)(v))
#define KP_STV(type, a, v) (*(volatile __attribute__((may_alias)) type *)(uintptr_t)(a) = (type)(v))

KP_INLINE uint8_t kp_is_shared(const struct kp_thread *t, uint64_t a)
{
	return a - (uint64_t)(uintptr_t)t->b->shared < 0x1000000u;
}

KP_INLINE uint8_t kp_is_local(const struct kp_thread *t, uint64_t a)
{
	return a >= t->b->stack_low && a < t->b->stack_high;
}

#define kp_is_const(t, a) ((void)(a), (uint8_t)0)
KP_INLINE uint8_t kp_is_param(const struct kp_thread *t, uint64_t a)
{
	return a - (uint64_t)(uintptr_t)t->b->param < 32764u;
}

KP_INLINE uint64_t kp_clock(void)
{
#if defined(__x86_64__)
	return __builtin_ia32_rdtsc();
#else
	uint64_t v;
	__asm__ volatile("mrs %0, cntvct_el0" : "=r"(v));
	return v;
#endif
}

/* ---- bits and floats ---- */

KP_INLINE float kp_f32(uint32_t v) { float f; memcpy(&f, &v, 4); return f; }
KP_INLINE uint32_t kp_b32(float f) { uint32_t v; memcpy(&v, &f, 4); return v; }
KP_INLINE double kp_f64(uint64_t v) { double f; memcpy(&f, &v, 8); return f; }
KP_INLINE uint64_t kp_b64(double f) { uint64_t v; memcpy(&v, &f, 8); return v; }

KP_INLINE float kp_ftz(float f)
{
	return (kp_b32(f) & 0x7f800000u) ? f : kp_f32(kp_b32(f) & 0x80000000u);
}

KP_INLINE float kp_sat_f32(float f) { return f > 0.0f ? (f < 1.0f ? f : 1.0f) : 0.0f; }
KP_INLINE double kp_sat_f64(double f) { return f > 0.0 ? (f < 1.0 ? f : 1.0) : 0.0; }
KP_INLINE float kp_fneg32(float f) { return kp_f32(kp_b32(f) ^ 0x80000000u); }
KP_INLINE double kp_fneg64(double f) { return kp_f64(kp_b64(f) ^ (1ull << 63)); }
KP_INLINE float kp_fabs32(float f) { return kp_f32(kp_b32(f) & 0x7fffffffu); }
KP_INLINE double kp_fabs64(double f) { return kp_f64(kp_b64(f) & ~(1ull << 63)); }
KP_INLINE double kp_high_word(double f) { return kp_f64(kp_b64(f) & 0xffffffff00000000ull); }
KP_INLINE float kp_fma_f32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
KP_INLINE double kp_fma_f64(double a, double b, double c) { return __builtin_fma(a, b, c); }

/* minimum and maximum: a NaN gives way to a number, with .NaN it wins; -0 is less than +0 */
#define KP_MIN_MAX(type, f, bits, from)                                                                                \
	KP_INLINE type kp_min_##f(type a, type b)                                                                      \
	{                                                                                                              \
		if (a < b) return a;                                                                                   \
		if (b < a) return b;                                                                                   \
		if (a == b) return from(bits(a) | bits(b));                                                            \
		return a != a ? b : a;                                                                                 \
	}                                                                                                              \
	KP_INLINE type kp_max_##f(type a, type b)                                                                      \
	{                                                                                                              \
		if (a > b) return a;                                                                                   \
		if (b > a) return b;                                                                                   \
		if (a == b) return from(bits(a) & bits(b));                                                            \
		return a != a ? b : a;                                                                                 \
	}
KP_MIN_MAX(float, f32, kp_b32, kp_f32)
KP_MIN_MAX(double, f64, kp_b64, kp_f64)
KP_INLINE float kp_min_f32_nan(float a, float b) { return a != a || b != b ? kp_f32(0x7fffffffu) : kp_min_f32(a, b); }
KP_INLINE float kp_max_f32_nan(float a, float b) { return a != a || b != b ? kp_f32(0x7fffffffu) : kp_max_f32(a, b); }

/* ---- rounding that is not to nearest ----
 * The rounding mode is switched around one operation on volatile operands, which the compiler cannot move out. */

extern int fesetround(int);
#if defined(__x86_64__)
enum { KP_FE_N = 0, KP_FE_M = 0x400, KP_FE_P = 0x800, KP_FE_Z = 0xc00 };
#elif defined(__aarch64__)
enum { KP_FE_N = 0, KP_FE_P = 0x400000, KP_FE_M = 0x800000, KP_FE_Z = 0xc00000 };
#else
#error "the software GPU knows x86-64 and aarch64"
#endif

KP_INLINE int kp_fe(int mode) { return mode == 'z' ? KP_FE_Z : mode == 'm' ? KP_FE_M : mode == 'p' ? KP_FE_P : KP_FE_N; }

#define KP_DIRECTED1(name, type, suffix, fe, expression)                                                               \
	KP_SLOW type kp_##name##_##suffix(type a)                                                                      \
	{                                                                                                              \
		volatile type x = a, r;                                                                                \
		fesetround(fe);                                                                                        \
		r = expression;                                                                                        \
		fesetround(KP_FE_N);                                                                                   \
		return r;                                                                                              \
	}
#define KP_DIRECTED2(name, type, suffix, fe, expression)                                                               \
	KP_SLOW type kp_##name##_##suffix(type a, type b)                                                              \
	{                                                                                                              \
		volatile type x = a, y = b, r;                                                                         \
		fesetround(fe);                                                                                        \
		r = expression;                                                                                        \
		fesetround(KP_FE_N);                                                                                   \
		return r;                                                                                              \
	}
#define KP_DIRECTED3(name, type, suffix, fe, expression)                                                               \
	KP_SLOW type kp_##name##_##suffix(type a, type b, type c)                                                      \
	{                                                                                                              \
		volatile type x = a, y = b, z = c, r;                                                                  \
		fesetround(fe);                                                                                        \
		r = expression;                                                                                        \
		fesetround(KP_FE_N);                                                                                   \
		return r;                                                                                              \
	}
#define KP_DIRECTED(mode, fe)                                                                                          \
	KP_DIRECTED2(add_f32, float, mode, fe, x + y)                                                                  \
	KP_DIRECTED2(sub_f32, float, mode, fe, x - y)                                                                  \
	KP_DIRECTED2(mul_f32, float, mode, fe, x * y)                                                                  \
	KP_DIRECTED2(div_f32, float, mode, fe, x / y)                                                                  \
	KP_DIRECTED1(sqrt_f32, float, mode, fe, __builtin_sqrtf(x))                                                    \
	KP_DIRECTED3(fma_f32, float, mode, fe, __builtin_fmaf(x, y, z))                                                \
	KP_DIRECTED2(add_f64, double, mode, fe, x + y)                                                                 \
	KP_DIRECTED2(sub_f64, double, mode, fe, x - y)                                                                 \
	KP_DIRECTED2(mul_f64, double, mode, fe, x * y)                                                                 \
	KP_DIRECTED2(div_f64, double, mode, fe, x / y)                                                                 \
	KP_DIRECTED1(sqrt_f64, double, mode, fe, __builtin_sqrt(x))                                                    \
	KP_DIRECTED3(fma_f64, double, mode, fe, __builtin_fma(x, y, z))
KP_DIRECTED(rz, KP_FE_Z)
KP_DIRECTED(rm, KP_FE_M)
KP_DIRECTED(rp, KP_FE_P)

#define KP_CONVERT(name, to, from)                                                                                     \
	KP_SLOW to name(from a, int mode)                                                                              \
	{                                                                                                              \
		volatile from x = a;                                                                                   \
		volatile to r;                                                                                         \
		fesetround(kp_fe(mode));                                                                               \
		r = (to)x;                                                                                             \
		fesetround(KP_FE_N);                                                                                   \
		return r;                                                                                              \
	}
KP_CONVERT(kp_d2f, float, double)
KP_CONVERT(kp_f32_from_s64, float, int64_t)
KP_CONVERT(kp_f64_from_s64, double, int64_t)

KP_SLOW double kp_f64_from_u64(uint64_t a, int mode)
{
	volatile double high = (double)(uint32_t)(a >> 32) * 4294967296.0, low = (double)(uint32_t)a, r;
	fesetround(kp_fe(mode));
	r = high + low; /* both exact, so one rounding */
	fesetround(KP_FE_N);
	return r;
}

KP_SLOW float kp_f32_from_u64(uint64_t a, int mode)
{
	/* below 2^53 a double is exact; above, the low bits only say whether something is left: a sticky bit keeps that */
	uint64_t v = a;
	if (v >> 53)
		v = (v & ~0xfffull) | ((v & 0xfffull) ? 0x800u : 0u);
	return kp_d2f((double)v, mode);
}

KP_INLINE double kp_integral_n(double x) { return __builtin_rint(x); }
KP_INLINE double kp_integral_z(double x) { return __builtin_trunc(x); }
KP_INLINE double kp_integral_m(double x) { return __builtin_floor(x); }
KP_INLINE double kp_integral_p(double x) { return __builtin_ceil(x); }

/* x is integral; out of range clamps */
#define KP_TO_INT(t, type, low, high, minimum, maximum, nan)                                                           \
	KP_INLINE type kp_to_##t(double x)                                                                             \
	{                                                                                                              \
		if (x >= (high)) return maximum;                                                                       \
		if (x > (low)) return (type)x;                                                                         \
		return x != x ? (type)0 : minimum;                                                                     \
	}                                                                                                              \
	KP_INLINE type kp_to_##t##_w(double x) { return x != x ? (type)(nan) : kp_to_##t(x); }
KP_TO_INT(s8, int8_t, -128.0, 127.0, -128, 127, 0x80)
KP_TO_INT(u8, uint8_t, 0.0, 255.0, 0, 255, 0x80)
KP_TO_INT(s16, int16_t, -32768.0, 32767.0, -32768, 32767, 0x8000)
KP_TO_INT(u16, uint16_t, 0.0, 65535.0, 0, 65535, 0x8000)
KP_TO_INT(s32, int32_t, -2147483648.0, 2147483647.0, (-2147483647 - 1), 2147483647, 0x80000000u)
KP_TO_INT(u32, uint32_t, 0.0, 4294967295.0, 0, 0xffffffffu, 0x80000000u)
KP_TO_INT(s64, int64_t, -0x1p63, 0x1p63, (int64_t)(1ull << 63), INT64_MAX, 1ull << 63)
KP_TO_INT(u64, uint64_t, 0.0, 0x1p64, 0, UINT64_MAX, 1ull << 63)

/* ---- halves: f16 and bf16 are held as bits ---- */

/* A double rounded to a smaller format of `mant` stored mantissa bits and `ebits` exponent bits. mode: n z m p a(way) */
KP_INLINE uint32_t kp_narrow(double x, int mant, int ebits, int mode)
{
	const uint64_t v = kp_b64(x);
	const uint32_t sign = (uint32_t)(v >> 63) << (mant + ebits), inf = ((1u << ebits) - 1) << mant;
	const int top = (int)(v >> 52 & 0x7ff);
	uint64_t m = v & ((1ull << 52) - 1);

	if (top == 0x7ff)
		return m ? (inf | ((1u << mant) - 1)) : sign | inf;
	if (!(v << 1))
		return sign;
	if (top)
		m |= 1ull << 52;
	int e = (top ? top : 1) - 1023 + ((1 << (ebits - 1)) - 1), shift = 52 - mant;
	if (e <= 0) {
		shift += 1 - e;
		e = 0;
	}
	if (shift > 62)
		shift = 62;
	const uint64_t rest = m & ((1ull << shift) - 1), half = 1ull << (shift - 1);
	uint64_t q = m >> shift;
	const int up = mode == 'n'   ? rest > half || (rest == half && (q & 1))
		       : mode == 'a' ? rest >= half
		       : mode == 'p' ? rest && !sign
		       : mode == 'm' ? rest && sign
				     : 0;
	q += (uint64_t)up;
	uint64_t r = e > 0 ? ((uint64_t)(e - 1) << mant) + q : q;
	if (r >= inf) {
		const int to_max = mode == 'z' || (mode == 'p' && sign) || (mode == 'm' && !sign);
		r = to_max ? inf - 1 : inf;
	}
	return sign | (uint32_t)r;
}

KP_INLINE float kp_h2f(uint16_t h)
{
	const uint32_t sign = (uint32_t)(h & 0x8000) << 16, m = h & 0x3ff, e = h >> 10 & 31;
	if (e == 31)
		return kp_f32(sign | 0x7f800000u | m << 13);
	if (e)
		return kp_f32(sign | (e + 112) << 23 | m << 13);
	return kp_f32(sign | kp_b32((float)m * 0x1p-24f));
}
KP_INLINE float kp_bf2f(uint16_t h) { return kp_f32((uint32_t)h << 16); }
KP_INLINE uint16_t kp_d2h(double x, int mode) { return (uint16_t)kp_narrow(x, 10, 5, mode); }
KP_INLINE uint16_t kp_d2bf(double x, int mode) { return (uint16_t)kp_narrow(x, 7, 8, mode); }
KP_INLINE uint32_t kp_tf32(float f, int mode) { return kp_narrow((double)f, 10, 8, mode) << 13; }

/* a * b + c with the sum rounded to odd, so that rounding it again to a half is right (a * b is exact) */
KP_INLINE double kp_fma_odd(double a, double b, double c)
{
	const double p = a * b, s = p + c, bb = s - p, error = (p - (s - bb)) + (c - bb);
	uint64_t v = kp_b64(s);
	if (error != 0.0 && error == error && !(v & 1) && (v << 1) != 0)
		v += (error > 0) == (s > 0) ? 1 : (uint64_t)-1;
	return kp_f64(v);
}

#define KP_HALF(h, x, narrow)                                                                                          \
	KP_INLINE uint16_t kp_add_##h(uint16_t a, uint16_t b) { return narrow((double)x(a) + x(b), 'n'); }             \
	KP_INLINE uint16_t kp_sub_##h(uint16_t a, uint16_t b) { return narrow((double)x(a) - x(b), 'n'); }             \
	KP_INLINE uint16_t kp_mul_##h(uint16_t a, uint16_t b) { return narrow((double)x(a) * x(b), 'n'); }             \
	KP_INLINE uint16_t kp_fma_##h(uint16_t a, uint16_t b, uint16_t c)                                              \
	{                                                                                                              \
		return narrow(kp_fma_odd(x(a), x(b), x(c)), 'n');                                                      \
	}                                                                                                              \
	KP_INLINE uint16_t kp_min_##h(uint16_t a, uint16_t b) { return narrow(kp_min_f32(x(a), x(b)), 'n'); }          \
	KP_INLINE uint16_t kp_max_##h(uint16_t a, uint16_t b) { return narrow(kp_max_f32(x(a), x(b)), 'n'); }          \
	KP_INLINE uint16_t kp_min_##h##_nan(uint16_t a, uint16_t b) { return narrow(kp_min_f32_nan(x(a), x(b)), 'n'); } \
	KP_INLINE uint16_t kp_max_##h##_nan(uint16_t a, uint16_t b) { return narrow(kp_max_f32_nan(x(a), x(b)), 'n'); } \
	KP_INLINE uint16_t kp_relu_##h(uint16_t a) { return x(a) != x(a) ? 0x7fff : a & 0x8000 ? 0 : a; }              \
	KP_INLINE uint16_t kp_sat_##h(uint16_t a) { return narrow(kp_sat_f32(x(a)), 'n'); }                            \
	KP_INLINE uint16_t kp_ex2_##h(uint16_t a) { return narrow(__builtin_exp2f(x(a)), 'n'); }                       \
	KP_INLINE uint16_t kp_tanh_##h(uint16_t a) { return narrow(__builtin_tanhf(x(a)), 'n'); }                      \
	KP_HALF2(add, h) KP_HALF2(sub, h) KP_HALF2(mul, h)                                                             \
	KP_HALF2(min, h) KP_HALF2(max, h)                                                                              \
	KP_HALF1(relu, h) KP_HALF1(sat, h) KP_HALF1(ex2, h) KP_HALF1(tanh, h)                                          \
	KP_INLINE uint32_t kp_min_##h##x2_nan(uint32_t a, uint32_t b) { return KP_LANES(kp_min_##h##_nan, a, b); }     \
	KP_INLINE uint32_t kp_max_##h##x2_nan(uint32_t a, uint32_t b) { return KP_LANES(kp_max_##h##_nan, a, b); }     \
	KP_INLINE uint32_t kp_fma_##h##x2(uint32_t a, uint32_t b, uint32_t c)                                          \
	{                                                                                                              \
		return (uint32_t)kp_fma_##h((uint16_t)(a >> 16), (uint16_t)(b >> 16), (uint16_t)(c >> 16)) << 16 |     \
		       kp_fma_##h((uint16_t)a, (uint16_t)b, (uint16_t)c);                                              \
	}
#define KP_LANES(f, a, b) ((uint32_t)f((uint16_t)((a) >> 16), (uint16_t)((b) >> 16)) << 16 | f((uint16_t)(a), (uint16_t)(b)))
#define KP_HALF2(name, h)                                                                                              \
	KP_INLINE uint32_t kp_##name##_##h##x2(uint32_t a, uint32_t b) { return KP_LANES(kp_##name##_##h, a, b); }
#define KP_HALF1(name, h)                                                                                              \
	KP_INLINE uint32_t kp_##name##_##h##x2(uint32_t a)                                                             \
	{                                                                                                              \
		return (uint32_t)kp_##name##_##h((uint16_t)(a >> 16)) << 16 | kp_##name##_##h((uint16_t)a);            \
	}
KP_HALF(f16, kp_h2f, kp_d2h)
KP_HALF(bf16, kp_bf2f, kp_d2bf)
KP_INLINE float kp_ex2_f32(float a) { return __builtin_exp2f(a); }
KP_INLINE float kp_tanh_f32(float a) { return __builtin_tanhf(a); }

#define KP_F32X2(name, sign)                                                                                           \
	KP_INLINE uint64_t kp_##name##_f32x2(uint64_t a, uint64_t b)                                                   \
	{                                                                                                              \
		return (uint64_t)kp_b32(kp_f32((uint32_t)(a >> 32)) sign kp_f32((uint32_t)(b >> 32))) << 32 |          \
		       kp_b32(kp_f32((uint32_t)a) sign kp_f32((uint32_t)b));                                           \
	}
KP_F32X2(add, +)
KP_F32X2(sub, -)
KP_F32X2(mul, *)
KP_INLINE uint64_t kp_fma_f32x2(uint64_t a, uint64_t b, uint64_t c)
{
	const float high = __builtin_fmaf(kp_f32((uint32_t)(a >> 32)), kp_f32((uint32_t)(b >> 32)), kp_f32((uint32_t)(c >> 32)));
	return (uint64_t)kp_b32(high) << 32 | kp_b32(__builtin_fmaf(kp_f32((uint32_t)a), kp_f32((uint32_t)b), kp_f32((uint32_t)c)));
}

#include "rt_int.h"
#include "rt_atomic.h"

#endif

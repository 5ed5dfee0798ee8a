/* Integer ops that are more than a C operator: part of rt_ops.h. */
#ifndef KVMPOOL_SOFTGPU_RT_INT_H
#define KVMPOOL_SOFTGPU_RT_INT_H

KP_INLINE int32_t kp_clamp_s32(int64_t v) { return v > INT32_MAX ? INT32_MAX : v < INT32_MIN ? INT32_MIN : (int32_t)v; }

#define KP_DIVIDE_U(t, type)                                                                                           \
	KP_INLINE type kp_div_##t(type a, type b) { return b ? (type)(a / b) : (type)-1; }                             \
	KP_INLINE type kp_rem_##t(type a, type b) { return b ? (type)(a % b) : a; }
#define KP_DIVIDE_S(t, type)                                                                                           \
	KP_INLINE type kp_div_##t(type a, type b) { return b == 0 ? (type)-1 : b == -1 ? (type)-a : (type)(a / b); }    \
	KP_INLINE type kp_rem_##t(type a, type b) { return b == 0 ? a : b == -1 ? (type)0 : (type)(a % b); }
KP_DIVIDE_U(u8, uint8_t)
KP_DIVIDE_U(u16, uint16_t)
KP_DIVIDE_U(u32, uint32_t)
KP_DIVIDE_U(u64, uint64_t)
KP_DIVIDE_S(s8, int8_t)
KP_DIVIDE_S(s16, int16_t)
KP_DIVIDE_S(s32, int32_t)
KP_DIVIDE_S(s64, int64_t)

/* bit fields: position and length are bytes; bits past the top are 0, or the sign */
#define KP_FIELD(t, s, type, stype, width)                                                                             \
	KP_INLINE type kp_bfe_##t(type a, uint32_t b, uint32_t c)                                                      \
	{                                                                                                              \
		const uint32_t pos = b & 255u, len = c & 255u;                                                         \
		if (!len || pos >= width) return 0;                                                                    \
		const type v = a >> pos;                                                                               \
		return len >= width ? v : v & (((type)1 << len) - 1);                                                  \
	}                                                                                                              \
	KP_INLINE stype kp_bfe_##s(stype a, uint32_t b, uint32_t c)                                                    \
	{                                                                                                              \
		const uint32_t pos = b & 255u, len = c & 255u;                                                         \
		if (!len) return 0;                                                                                    \
		const stype v = a >> (pos < width ? pos : width - 1);                                                  \
		if (len >= width || pos >= width || pos + len >= width) return v;                                      \
		return (stype)((type)v << (width - len)) >> (width - len);                                             \
	}                                                                                                              \
	KP_INLINE type kp_bfi_##t(type a, type b, uint32_t c, uint32_t d)                                              \
	{                                                                                                              \
		const uint32_t pos = c & 255u, len = d & 255u;                                                         \
		if (!len || pos >= width) return b;                                                                    \
		const type mask = (len >= width ? (type)-1 : ((type)1 << len) - 1) << pos;                             \
		return (b & ~mask) | ((a << pos) & mask);                                                              \
	}
KP_FIELD(u32, s32, uint32_t, int32_t, 32u)
KP_FIELD(u64, s64, uint64_t, int64_t, 64u)

KP_INLINE uint32_t kp_clz_u32(uint32_t a) { return a ? (uint32_t)__builtin_clz(a) : 32u; }
KP_INLINE uint32_t kp_clz_u64(uint64_t a) { return a ? (uint32_t)__builtin_clzll(a) : 64u; }
KP_INLINE uint32_t kp_popc_u32(uint32_t a) { return (uint32_t)__builtin_popcount(a); }
KP_INLINE uint32_t kp_popc_u64(uint64_t a) { return (uint32_t)__builtin_popcountll(a); }
KP_INLINE uint32_t kp_bfind_u32(uint32_t a) { return a ? 31u - (uint32_t)__builtin_clz(a) : 0xffffffffu; }
KP_INLINE uint32_t kp_bfind_u64(uint64_t a) { return a ? 63u - (uint32_t)__builtin_clzll(a) : 0xffffffffu; }
KP_INLINE uint32_t kp_shiftamt(uint32_t found, uint32_t top) { return found == 0xffffffffu ? found : top - found; }

KP_INLINE uint32_t kp_brev_u32(uint32_t v)
{
	v = (v >> 1 & 0x55555555u) | (v & 0x55555555u) << 1;
	v = (v >> 2 & 0x33333333u) | (v & 0x33333333u) << 2;
	v = (v >> 4 & 0x0f0f0f0fu) | (v & 0x0f0f0f0fu) << 4;
	return __builtin_bswap32(v);
}
KP_INLINE uint64_t kp_brev_u64(uint64_t v)
{
	return (uint64_t)kp_brev_u32((uint32_t)v) << 32 | kp_brev_u32((uint32_t)(v >> 32));
}

/* one byte of b:a; bit 3 of the selector spreads its sign */
KP_INLINE uint32_t kp_prmt_byte(uint64_t ba, uint32_t selector)
{
	const uint32_t byte = (uint32_t)(ba >> (8 * (selector & 7u))) & 255u;
	return selector & 8u ? (byte & 128u ? 255u : 0u) : byte;
}
KP_INLINE uint32_t kp_prmt(uint32_t a, uint32_t b, uint32_t c)
{
	const uint64_t ba = (uint64_t)b << 32 | a;
	return kp_prmt_byte(ba, c & 15u) | kp_prmt_byte(ba, c >> 4 & 15u) << 8 | kp_prmt_byte(ba, c >> 8 & 15u) << 16 |
	       kp_prmt_byte(ba, c >> 12 & 15u) << 24;
}
/* the named modes are tables of selectors (PTX ISA, prmt) */
KP_INLINE uint32_t kp_prmt_table(uint32_t a, uint32_t b, uint32_t c, uint64_t table)
{
	return kp_prmt(a, b, (uint32_t)(table >> (16 * (c & 3u))) & 0xffffu);
}
#define kp_prmt_f4e(a, b, c) kp_prmt_table(a, b, c, 0x6543543243213210ull)
#define kp_prmt_b4e(a, b, c) kp_prmt_table(a, b, c, 0x0123701267015670ull)
#define kp_prmt_rc8(a, b, c) kp_prmt_table(a, b, c, 0x3333222211110000ull)
#define kp_prmt_ecl(a, b, c) kp_prmt_table(a, b, c, 0x3333322232113210ull)
#define kp_prmt_ecr(a, b, c) kp_prmt_table(a, b, c, 0x3210221011100000ull)
#define kp_prmt_rc16(a, b, c) kp_prmt_table(a, b, c, 0x3232101032321010ull)

KP_INLINE uint32_t kp_bmsk_clamp(uint32_t a, uint32_t b)
{
	if (a > 31u || !b) return 0;
	return (b > 31u ? 0xffffffffu : (1u << b) - 1) << a;
}
KP_INLINE uint32_t kp_bmsk_wrap(uint32_t a, uint32_t b) { return ((1u << (b & 31u)) - 1) << (a & 31u); }

/* the position of the offset-th set bit from base on, up or down */
KP_INLINE uint32_t kp_fns(uint32_t mask, uint32_t base, int32_t offset)
{
	const int step = offset < 0 ? -1 : 1;
	int left = offset < 0 ? -offset : offset;
	if (base > 31u) return 0xffffffffu;
	if (offset == 0) return mask >> base & 1u ? base : 0xffffffffu;
	for (int at = (int)base; at >= 0 && at < 32; at += step)
		if (mask >> at & 1u && --left == 0)
			return (uint32_t)at;
	return 0xffffffffu;
}

KP_INLINE int32_t kp_byte(uint32_t v, int n, int sign)
{
	const uint32_t byte = v >> (8 * n) & 255u;
	return sign ? (int8_t)byte : (int32_t)byte;
}
KP_INLINE uint32_t kp_dp4a(uint32_t a, uint32_t b, uint32_t c, int sa, int sb)
{
	for (int n = 0; n < 4; n++)
		c += (uint32_t)(kp_byte(a, n, sa) * kp_byte(b, n, sb));
	return c;
}
KP_INLINE uint32_t kp_dp2a(uint32_t a, uint32_t b, uint32_t c, int sa, int sb, int high)
{
	for (int n = 0; n < 2; n++) {
		const int32_t half = sa ? (int16_t)(a >> (16 * n)) : (int32_t)(a >> (16 * n) & 0xffffu);
		c += (uint32_t)(half * kp_byte(b, n + 2 * high, sb));
	}
	return c;
}

#define KP_PAIR(name, t, type, expression)                                                                             \
	KP_INLINE uint32_t kp_##name##_##t##x2(uint32_t v, uint32_t w)                                                 \
	{                                                                                                              \
		uint32_t r = 0;                                                                                        \
		for (int n = 0; n < 32; n += 16) {                                                                     \
			const type a = (type)(v >> n), b = (type)(w >> n);                                             \
			r |= (uint32_t)(uint16_t)(expression) << n;                                                    \
		}                                                                                                      \
		return r;                                                                                              \
	}
KP_PAIR(add, u16, uint16_t, a + b)
KP_PAIR(sub, u16, uint16_t, a - b)
KP_PAIR(min, u16, uint16_t, a < b ? a : b)
KP_PAIR(max, u16, uint16_t, a > b ? a : b)
KP_PAIR(min, s16, int16_t, a < b ? a : b)
KP_PAIR(max, s16, int16_t, a > b ? a : b)

#endif

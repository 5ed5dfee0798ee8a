/* Atomics and the device runtime's own functions: part of rt_ops.h. Two streams may run kernels on the same memory. */
#ifndef KVMPOOL_SOFTGPU_RT_ATOMIC_H
#define KVMPOOL_SOFTGPU_RT_ATOMIC_H

#define KP_AT(type, a) ((__attribute__((may_alias)) type *)(uintptr_t)(a))

#define KP_ATOM_BITS(t, type)                                                                                          \
	KP_INLINE type kp_atom_and_##t(uint64_t a, type v) { return __atomic_fetch_and(KP_AT(type, a), v, __ATOMIC_SEQ_CST); } \
	KP_INLINE type kp_atom_or_##t(uint64_t a, type v) { return __atomic_fetch_or(KP_AT(type, a), v, __ATOMIC_SEQ_CST); } \
	KP_INLINE type kp_atom_xor_##t(uint64_t a, type v) { return __atomic_fetch_xor(KP_AT(type, a), v, __ATOMIC_SEQ_CST); } \
	KP_INLINE type kp_atom_exch_##t(uint64_t a, type v) { return __atomic_exchange_n(KP_AT(type, a), v, __ATOMIC_SEQ_CST); } \
	KP_INLINE type kp_atom_swap_##t(uint64_t a, type expected, type v)                                             \
	{                                                                                                              \
		__atomic_compare_exchange_n(KP_AT(type, a), &expected, v, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);      \
		return expected;                                                                                       \
	}
KP_ATOM_BITS(u16, uint16_t)
KP_ATOM_BITS(u32, uint32_t)
KP_ATOM_BITS(u64, uint64_t)

/* `next` from the old value, by compare and swap; size: the type that is swapped */
#define KP_ATOM_LOOP(name, value, bits, load, next)                                                                    \
	KP_INLINE value name(uint64_t a, value v)                                                                      \
	{                                                                                                              \
		bits seen = __atomic_load_n(KP_AT(bits, a), __ATOMIC_RELAXED), want;                                   \
		value old;                                                                                             \
		do {                                                                                                   \
			old = load(seen);                                                                              \
			want = next;                                                                                   \
		} while (!__atomic_compare_exchange_n(KP_AT(bits, a), &seen, want, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)); \
		return old;                                                                                            \
	}
#define KP_SAME(x) (x)
#define KP_ATOM_INT(t, type)                                                                                           \
	KP_INLINE type kp_atom_add_##t(uint64_t a, type v) { return __atomic_fetch_add(KP_AT(type, a), v, __ATOMIC_SEQ_CST); } \
	KP_ATOM_LOOP(kp_atom_min_##t, type, type, KP_SAME, old < v ? old : v)                                          \
	KP_ATOM_LOOP(kp_atom_max_##t, type, type, KP_SAME, old > v ? old : v)                                          \
	KP_ATOM_LOOP(kp_atom_inc_##t, type, type, KP_SAME, old >= v ? 0 : old + 1)                                     \
	KP_ATOM_LOOP(kp_atom_dec_##t, type, type, KP_SAME, old == 0 || old > v ? v : old - 1)
KP_ATOM_INT(u32, uint32_t)
KP_ATOM_INT(s32, int32_t)
KP_ATOM_INT(u64, uint64_t)
KP_ATOM_INT(s64, int64_t)

KP_ATOM_LOOP(kp_atom_add_f32, float, uint32_t, kp_f32, kp_b32(old + v))
KP_ATOM_LOOP(kp_atom_min_f32, float, uint32_t, kp_f32, kp_b32(kp_min_f32(old, v)))
KP_ATOM_LOOP(kp_atom_max_f32, float, uint32_t, kp_f32, kp_b32(kp_max_f32(old, v)))
KP_ATOM_LOOP(kp_atom_add_f64, double, uint64_t, kp_f64, kp_b64(old + v))
#define KP_ATOM_HALF(h)                                                                                                \
	KP_ATOM_LOOP(kp_atom_add_##h, uint16_t, uint16_t, KP_SAME, kp_add_##h(old, v))                                 \
	KP_ATOM_LOOP(kp_atom_min_##h, uint16_t, uint16_t, KP_SAME, kp_min_##h(old, v))                                 \
	KP_ATOM_LOOP(kp_atom_max_##h, uint16_t, uint16_t, KP_SAME, kp_max_##h(old, v))                                 \
	KP_ATOM_LOOP(kp_atom_add_##h##x2, uint32_t, uint32_t, KP_SAME, kp_add_##h##x2(old, v))                         \
	KP_ATOM_LOOP(kp_atom_min_##h##x2, uint32_t, uint32_t, KP_SAME, kp_min_##h##x2(old, v))                         \
	KP_ATOM_LOOP(kp_atom_max_##h##x2, uint32_t, uint32_t, KP_SAME, kp_max_##h##x2(old, v))
KP_ATOM_HALF(f16)
KP_ATOM_HALF(bf16)

/* ---- functions of the device runtime; `ret` may be NULL ---- */

#define KP_ARG(type, p) (*(const __attribute__((may_alias)) type *)(p))

KP_INLINE void kp_builtin_vprintf(struct kp_thread *t, uint8_t *ret, const uint8_t *format, const uint8_t *args)
{
	const int32_t n = t->b->rt->print(t, (const char *)(uintptr_t)KP_ARG(uint64_t, format),
					  (const uint8_t *)(uintptr_t)KP_ARG(uint64_t, args));
	if (ret)
		memcpy(ret, &n, 4);
}
KP_INLINE void kp_builtin_malloc(struct kp_thread *t, uint8_t *ret, const uint8_t *size)
{
	const uint64_t p = (uint64_t)(uintptr_t)t->b->rt->allocate(t, KP_ARG(uint64_t, size));
	if (ret)
		memcpy(ret, &p, 8);
}
KP_INLINE void kp_builtin_free(struct kp_thread *t, uint8_t *ret, const uint8_t *p)
{
	(void)ret;
	t->b->rt->release(t, (void *)(uintptr_t)KP_ARG(uint64_t, p));
}
KP_INLINE void kp_builtin_assertfail(struct kp_thread *t, uint8_t *ret, const uint8_t *message, const uint8_t *file,
				     const uint8_t *line, const uint8_t *function, const uint8_t *char_size)
{
	(void)ret;
	(void)char_size;
	t->b->rt->assert_fail(t, (const char *)(uintptr_t)KP_ARG(uint64_t, message),
			      (const char *)(uintptr_t)KP_ARG(uint64_t, file), KP_ARG(uint32_t, line),
			      (const char *)(uintptr_t)KP_ARG(uint64_t, function));
}

#endif

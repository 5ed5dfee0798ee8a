/*
 * What the C that translate.py writes is made of: types, one small function an op, and the table by which it reaches
 * the engine. Included by generated code (compiled with -ffp-contract=off -fwrapv) and by the engine, nothing else.
 */
#ifndef KVMPOOL_SOFTGPU_RT_H
#define KVMPOOL_SOFTGPU_RT_H

#include <stddef.h>
#include <stdint.h>

#define KP_ABI 3 /* of everything below; part of the cache's key */

#define KP_CONVERGED 0u /* instead of a member mask: whoever of the warp waits at the same place */

enum kp_barrier_kind { KP_SYNC, KP_ARRIVE, KP_RED_POPC, KP_RED_AND, KP_RED_OR };

enum kp_warp_op {
	KP_WARP_SYNC,
	KP_SHFL_UP,
	KP_SHFL_DOWN,
	KP_SHFL_BFLY,
	KP_SHFL_IDX,
	KP_VOTE_ALL,
	KP_VOTE_ANY,
	KP_VOTE_UNI,
	KP_VOTE_BALLOT,
	KP_MATCH_ANY,
	KP_MATCH_ALL,
	KP_REDUX_ADD,
	KP_REDUX_MIN,
	KP_REDUX_MAX,
	KP_REDUX_MIN_S,
	KP_REDUX_MAX_S,
	KP_REDUX_AND,
	KP_REDUX_OR,
	KP_REDUX_XOR,
	KP_ACTIVE,
	KP_ELECT,
};

struct kp_block;

/* One CUDA thread, as its kernel sees it; the engine's fiber begins with it. */
struct kp_thread {
	uint32_t tid[3];
	uint32_t flat; /* x + y * ntid.x + z * ntid.x * ntid.y */
	const struct kp_block *b;
	uint64_t path; /* a number for the chain of calls it is in: tells places in a device function apart by their callers */
};

/* What the engine does for a kernel. `trap`, `stopped`, `exit_thread` and `assert_fail` do not return. */
struct kp_rt {
	uint32_t (*barrier)(struct kp_thread *t, uint32_t number, uint32_t count, int kind, uint32_t predicate);
	uint64_t (*warp)(struct kp_thread *t, int op, uint32_t mask, uint64_t a, uint32_t b, uint32_t c, uint8_t *second);
	void (*yield)(struct kp_thread *t);
	void (*stopped)(struct kp_thread *t);
	void (*exit_thread)(struct kp_thread *t);
	void (*trap)(struct kp_thread *t);
	void (*assert_fail)(struct kp_thread *t, const char *message, const char *file, uint32_t line, const char *function);
	int32_t (*print)(struct kp_thread *t, const char *format, const uint8_t *args);
	void *(*allocate)(struct kp_thread *t, uint64_t size);
	void (*release)(struct kp_thread *t, void *memory);
	uint64_t (*timer_ns)(void);
};

/* The block that is running, and what is the same for the whole launch. */
struct kp_block {
	const uint8_t *param;
	uint8_t *shared; /* base of the shared window */
	uint8_t *memory; /* the module's variables */
	const int *stop;
	const struct kp_rt *rt;
	uint32_t ctaid[3], nctaid[3], ntid[3];
	uint32_t dynamic_shared; /* offset of the dynamic part */
	uint32_t shared_bytes, dynamic_bytes;
	uint64_t grid_id;
	uint64_t grid_workspace; /* of a cooperative launch: where cooperative groups keep the grid's barrier; else 0 */
	uintptr_t stack_low, stack_high; /* where .local memory may lie */
};

/* What a translated module tells the engine: the one symbol it exports is `kp_unit`. */
struct kp_param_info {
	uint32_t offset, size;
};

struct kp_kernel_info {
	const char *name;
	void (*body)(struct kp_thread *t);  /* one thread; to be run on a fiber */
	void (*block)(struct kp_thread *t); /* all threads of a block, one after the other; NULL where fibers are needed */
	const struct kp_param_info *params;
	uint32_t param_count, param_bytes;
	uint32_t shared_bytes, local_bytes, registers, max_threads;
};

struct kp_variable_info {
	const char *name;
	uint32_t is_const;
	uint64_t offset, size;
};

struct kp_unit {
	uint32_t abi, target; /* target: 75 of sm_75 */
	uint32_t kernel_count, variable_count;
	const struct kp_kernel_info *kernels;
	const struct kp_variable_info *variables;
	uint64_t memory_bytes, const_bytes;
	void (*init)(uint8_t *memory); /* fills in the initial values */
};

#endif

/*
 * CUDA threads as fibers: a stack each, switched by hand, and the rules by which they wait for each other (barriers,
 * warp-wide ops). A team is one block; a gang is the teams that run at the same time (one, or all of a cooperative
 * launch). Everything here runs on the one OS thread that launched.
 */
#ifndef KVMPOOL_SOFTGPU_FIBER_H
#define KVMPOOL_SOFTGPU_FIBER_H

#include "rt.h"

#define KP_MAX_FIBERS 16384      /* of one gang: two mappings each, well below vm.max_map_count */
#define KP_MAX_BARRIERS 16       /* of a block, by PTX */
#define KP_MIN_STACK (128 << 10) /* reserved, touched only as used */
#define KP_MAX_WARPS 32

enum kp_fiber_state { KP_RUNNING, KP_AT_BARRIER, KP_AT_WARP, KP_DONE };

struct kp_team;
struct kp_gang;

struct kp_fiber {
	struct kp_thread t; /* first: the kernel's pointer is the fiber's */
	void *sp;
	struct kp_fiber *next, *prev; /* ring of those that can run */
	struct kp_team *team;
	enum kp_fiber_state state;
	/* what it waits for */
	uint32_t barrier, result;
	int op;
	uint32_t mask;
	uint64_t site; /* where in the code: tells groups of KP_CONVERGED apart */
	uint64_t a, value;
	uint32_t b, c;
	uint8_t second;
};

struct kp_barrier {
	uint32_t arrived, waiting, expected; /* expected 0: all threads that have not ended */
	uint32_t popc, and, or;
	int kind;
};

struct kp_team {
	struct kp_block block;
	struct kp_gang *gang;
	struct kp_fiber *fibers; /* `count` of them, by flat thread number */
	uint32_t count, alive;
	uint32_t warp_alive[KP_MAX_WARPS], warp_running[KP_MAX_WARPS];
	struct kp_barrier barriers[KP_MAX_BARRIERS];
};

struct kp_gang {
	struct kp_fiber *current; /* in the ring; NULL when nobody can run */
	void *scheduler;          /* stack pointer of kp_gang_run */
	void (*body)(struct kp_thread *t);
	struct kp_team *teams;
	uint32_t team_count;
};

/* Stacks for `count` fibers, kept between launches. */
struct kp_stacks {
	uint8_t *base;
	size_t stack_bytes; /* of one, with its guard page at the low end */
	uint32_t count;
};

int kp_stacks_reserve(struct kp_stacks *stacks, uint32_t count, size_t stack_bytes);
void kp_stacks_release(struct kp_stacks *stacks);
int kp_stacks_is_guard(const struct kp_stacks *stacks, uintptr_t address);

/*
 * Runs the teams to their end. The caller has filled in `body`, `teams`, each team's block, count and fibers.
 * Returns 0, or -EDEADLK where every thread waits and none can be woken.
 */
int kp_gang_run(struct kp_gang *gang, const struct kp_stacks *stacks);

/* The fiber's part of struct kp_rt. */
uint32_t kp_fiber_barrier(struct kp_thread *t, uint32_t number, uint32_t count, int kind, uint32_t predicate);
uint64_t kp_fiber_warp(struct kp_thread *t, int op, uint32_t mask, uint64_t a, uint32_t b, uint32_t c, uint8_t *second);
void kp_fiber_yield(struct kp_thread *t);
void kp_fiber_exit(struct kp_thread *t);

/* ---- between fiber.c, barrier.c and warp.c ---- */

void kp_fiber_wait(struct kp_fiber *fiber, enum kp_fiber_state state); /* returns once woken */
void kp_fiber_wake(struct kp_fiber *fiber);
void kp_barriers_check(struct kp_team *team);                  /* after a thread ended */
void kp_warp_check(struct kp_team *team, uint32_t warp);       /* after a lane ended or stopped running */
int kp_warp_force(struct kp_team *team);                       /* all are stuck: let incomplete groups go; 1 if any did */

#endif

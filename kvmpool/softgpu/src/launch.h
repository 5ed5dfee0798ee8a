/* One running launch: what a signal handler and the device runtime need to find. */
#ifndef KVMPOOL_SOFTGPU_LAUNCH_H
#define KVMPOOL_SOFTGPU_LAUNCH_H

#include <setjmp.h>

#include "fiber.h"
#include "module.h"

#define KP_BEFORE (1u << 20) /* reserved below the window, for generic addresses that fall short of it */

struct kp_window {
	uint8_t *base;     /* of shared memory; a reservation of `reserved` bytes of which `usable` can be touched */
	size_t reserved, usable;
};

/* Memory for launches, kept and reused: a launch takes one executor for itself. */
struct kp_executor {
	struct kp_executor *next;
	struct kp_stacks stacks;
	struct kp_fiber *fibers;
	uint32_t fiber_count;
	struct kp_window *windows;
	struct kp_team *teams;
	uint32_t team_count;
};

struct kp_launch {
	sigjmp_buf out;
	struct kp_launch_ctl *ctl;
	struct kp_executor *executor;
	const struct kp_function *function;
	int result;
};

/* The launch that runs on this OS thread; NULL outside kernels. */
struct kp_launch *kp_current_launch(void);

/* Ends the launch from inside a kernel: records why, leaves to kp_launch. */
void kp_launch_fail(int result, int xid, uint64_t address, const char *message) __attribute__((noreturn));

/* executor.c */
struct kp_executor *kp_executor_take(uint32_t fibers, uint32_t teams, size_t stack_bytes, uint32_t shared_bytes);
void kp_executor_give(struct kp_executor *executor);

/* device_rt.c: their side of struct kp_rt */
int32_t kp_device_print(struct kp_thread *t, const char *format, const uint8_t *args);
void kp_device_assert_fail(struct kp_thread *t, const char *message, const char *file, uint32_t line, const char *function);
void *kp_device_allocate(struct kp_thread *t, uint64_t size);
void kp_device_release(struct kp_thread *t, void *pointer);

/* signals.c: makes sure that this thread's faults inside kernels come to us. */
int kp_signals_ready(void);
void kp_set_current_launch(struct kp_launch *launch);

#endif

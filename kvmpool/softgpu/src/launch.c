/* Runs a kernel: block after block on the calling thread, each block as a plain loop or as a gang of fibers. */
#include "launch.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define KP_MAX_GRID_X 2147483647u
#define KP_MAX_GRID_YZ 65535u
#define KP_COOPERATIVE_TOO_LARGE 720
/* A plain kernel's .local memory lies on the caller's stack; nothing below this far from here can be it. */
#define KP_STACK_REACH (64u << 20)

/* cooperative_groups/details/driver_abi.h: its address is in %envreg1 and %envreg2 */
struct kp_grid_workspace {
	uint32_t bytes, barrier;
};

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void kp_launch_fail(int result, int xid, uint64_t address, const char *message)
{
	struct kp_launch *launch = kp_current_launch();
	struct kp_launch_ctl *ctl = launch->ctl;

	kp_set_current_launch(NULL); /* a fault in what follows would be ours, not the kernel's */
	launch->result = result;
	ctl->xid = xid;
	ctl->fault_address = address;
	snprintf(ctl->message, sizeof(ctl->message), "%s: %s at 0x%llx", launch->function->info->name, message,
		 (unsigned long long)address);
	siglongjmp(launch->out, 1);
}

/* ---- the engine's side of struct kp_rt that ends a launch or a thread ---- */

static void rt_stopped(struct kp_thread *t)
{
	(void)t;
	kp_launch_fail(*(volatile const int *)t->b->stop, 0, 0, "stopped from outside");
}

static void rt_trap(struct kp_thread *t)
{
	(void)t;
	kp_launch_fail(KP_LAUNCH_FAILED, 13, 0, "trap");
}

static const struct kp_rt engine_rt = {
	.barrier = kp_fiber_barrier,
	.warp = kp_fiber_warp,
	.yield = kp_fiber_yield,
	.stopped = rt_stopped,
	.exit_thread = kp_fiber_exit,
	.trap = rt_trap,
	.assert_fail = kp_device_assert_fail,
	.print = kp_device_print,
	.allocate = kp_device_allocate,
	.release = kp_device_release,
	.timer_ns = now_ns,
};

/* ---- checks ---- */

static int check(const struct kp_function *function, const uint32_t grid[3], const uint32_t block[3], uint32_t dynamic,
		 size_t params_len)
{
	const struct kp_kernel_info *info = function->info;
	const uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
	const uint32_t limit = info->max_threads && info->max_threads < KP_MAX_THREADS_PER_BLOCK
				       ? info->max_threads
				       : KP_MAX_THREADS_PER_BLOCK;

	if (!grid[0] || !grid[1] || !grid[2] || grid[0] > KP_MAX_GRID_X || grid[1] > KP_MAX_GRID_YZ || grid[2] > KP_MAX_GRID_YZ)
		return KP_INVALID_VALUE;
	if (!block[0] || !block[1] || !block[2] || block[0] > 1024 || block[1] > 1024 || block[2] > 64 ||
	    threads > KP_MAX_THREADS_PER_BLOCK)
		return KP_INVALID_VALUE;
	if (params_len < info->param_bytes)
		return KP_INVALID_VALUE;
	if (threads > limit)
		return KP_LAUNCH_OUT_OF_RESOURCES;
	if ((uint64_t)info->shared_bytes + dynamic > KP_MAX_SHARED_BYTES)
		return KP_INVALID_VALUE;
	return 0;
}

/* ---- running ---- */

static void describe_block(struct kp_block *b, const struct kp_function *function, const uint32_t grid[3],
			   const uint32_t block[3], uint32_t dynamic, const void *params, struct kp_launch_ctl *ctl)
{
	static uint64_t grids;

	memset(b, 0, sizeof(*b));
	b->param = params;
	b->memory = function->module->memory;
	b->stop = &ctl->stop;
	b->rt = &engine_rt;
	memcpy(b->nctaid, grid, sizeof(b->nctaid));
	memcpy(b->ntid, block, sizeof(b->ntid));
	b->dynamic_shared = (function->info->shared_bytes + 15u) / 16u * 16u;
	b->dynamic_bytes = dynamic;
	b->shared_bytes = b->dynamic_shared + dynamic;
	b->grid_id = __atomic_add_fetch(&grids, 1, __ATOMIC_RELAXED);
}

static void place_block(struct kp_block *b, uint64_t index)
{
	b->ctaid[0] = (uint32_t)(index % b->nctaid[0]);
	b->ctaid[1] = (uint32_t)(index / b->nctaid[0] % b->nctaid[1]);
	b->ctaid[2] = (uint32_t)(index / ((uint64_t)b->nctaid[0] * b->nctaid[1]));
}

static void check_stop(struct kp_launch_ctl *ctl)
{
	const int stop = __atomic_load_n(&ctl->stop, __ATOMIC_RELAXED);

	if (__builtin_expect(stop, 0))
		kp_launch_fail(stop, 0, 0, "stopped from outside");
}

static void run_plain(const struct kp_launch *launch, struct kp_block *b, uint64_t blocks)
{
	b->shared = launch->executor->windows[0].base;
	b->stack_high = (uintptr_t)__builtin_frame_address(0);
	b->stack_low = b->stack_high - KP_STACK_REACH;
	struct kp_thread t = {.b = b};

	for (uint64_t i = 0; i < blocks; i++) {
		check_stop(launch->ctl);
		place_block(b, i);
		launch->function->info->block(&t);
	}
}

/* `together` blocks at a time: 1, or all of a cooperative launch. */
static void run_gangs(const struct kp_launch *launch, const struct kp_block *b, uint64_t blocks, uint32_t together)
{
	struct kp_executor *executor = launch->executor;
	const uint32_t threads = b->ntid[0] * b->ntid[1] * b->ntid[2];
	struct kp_gang gang = {.body = launch->function->info->body, .teams = executor->teams, .team_count = together};

	for (uint32_t i = 0; i < together; i++) {
		struct kp_team *team = &executor->teams[i];

		team->block = *b;
		team->block.shared = executor->windows[i].base;
		team->block.stack_low = (uintptr_t)executor->stacks.base;
		team->block.stack_high = team->block.stack_low + executor->stacks.count * executor->stacks.stack_bytes;
		team->fibers = executor->fibers + (size_t)i * threads;
		team->count = threads;
	}
	for (uint64_t i = 0; i < blocks; i += together) {
		check_stop(launch->ctl);
		for (uint32_t j = 0; j < together; j++)
			place_block(&executor->teams[j].block, i + j);
		if (kp_gang_run(&gang, &executor->stacks))
			kp_launch_fail(KP_LAUNCH_TIMEOUT, 43, 0, "all its threads wait for each other");
	}
}

static int run(struct kp_launch *launch, struct kp_block *b, uint64_t blocks, uint32_t together)
{
	struct kp_launch_ctl *ctl = launch->ctl;
	const uint64_t start = now_ns();

	__atomic_store_n(&ctl->started_ns, start, __ATOMIC_RELAXED);
	kp_set_current_launch(launch);
	if (sigsetjmp(launch->out, 0) == 0) {
		if (launch->function->info->block && !ctl->cooperative)
			run_plain(launch, b, blocks);
		else
			run_gangs(launch, b, blocks, together);
		launch->result = 0;
	}
	kp_set_current_launch(NULL);
	__atomic_store_n(&ctl->busy_ns, now_ns() - start, __ATOMIC_RELAXED);
	return launch->result;
}

int kp_launch(const struct kp_function *function, const uint32_t grid[3], const uint32_t block[3], uint32_t dynamic_shared_bytes,
	      const void *params, size_t params_len, struct kp_launch_ctl *ctl)
{
	const int refused = check(function, grid, block, dynamic_shared_bytes, params_len);

	if (refused)
		return refused;
	const uint64_t blocks = (uint64_t)grid[0] * grid[1] * grid[2];
	const uint32_t threads = block[0] * block[1] * block[2];
	const int fibers = !function->info->block || ctl->cooperative;

	if (ctl->cooperative && blocks * threads > KP_MAX_FIBERS)
		return KP_COOPERATIVE_TOO_LARGE;
	const uint32_t together = ctl->cooperative ? (uint32_t)blocks : 1;
	struct kp_block b;

	describe_block(&b, function, grid, block, dynamic_shared_bytes, params, ctl);
	struct kp_launch launch = {.ctl = ctl, .function = function};

	if (kp_signals_ready())
		return KP_OUT_OF_MEMORY;
	launch.executor = kp_executor_take(fibers ? together * threads : 0, together,
					   KP_MIN_STACK + 4 * (size_t)function->info->local_bytes, b.shared_bytes);
	if (!launch.executor)
		return KP_OUT_OF_MEMORY;
	struct kp_grid_workspace workspace = {sizeof(workspace), 0};

	if (ctl->cooperative)
		b.grid_workspace = (uint64_t)(uintptr_t)&workspace;
	const int result = run(&launch, &b, blocks, together);

	kp_executor_give(launch.executor);
	return result;
}

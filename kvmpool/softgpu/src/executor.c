/* Executors: fibers' stacks and shared-memory windows, kept between launches because mapping them costs a millisecond. */
#include "launch.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#define KP_PAGE 4096u
/* Shared addresses are 32 bits, so with 4 GiB reserved every wrong one faults; where that much is refused, 16 MiB. */
#define KP_WINDOW_BYTES (4ull << 30)
#define KP_SMALL_WINDOW_BYTES (16ull << 20)
#define KP_KEPT 8

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct kp_executor *kept;
static uint32_t kept_count;

static int window_open(struct kp_window *window, uint32_t bytes)
{
	const size_t usable = ((size_t)bytes + KP_PAGE - 1) / KP_PAGE * KP_PAGE;

	if (!window->base) {
		size_t size = KP_WINDOW_BYTES + KP_BEFORE;
		uint8_t *base = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

		if (base == MAP_FAILED) {
			size = KP_SMALL_WINDOW_BYTES + KP_BEFORE;
			base = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		}
		if (base == MAP_FAILED)
			return -ENOMEM;
		*window = (struct kp_window){base + KP_BEFORE, size - KP_BEFORE, 0};
	}
	if (usable > window->usable && mprotect(window->base, usable, PROT_READ | PROT_WRITE))
		return -ENOMEM;
	if (usable < window->usable && mprotect(window->base + usable, window->usable - usable, PROT_NONE))
		return -ENOMEM;
	window->usable = usable;
	return 0;
}

static void destroy(struct kp_executor *executor)
{
	kp_stacks_release(&executor->stacks);
	for (uint32_t i = 0; i < executor->team_count; i++)
		if (executor->windows[i].base)
			munmap(executor->windows[i].base - KP_BEFORE, executor->windows[i].reserved + KP_BEFORE);
	free(executor->windows);
	free(executor->teams);
	free(executor->fibers);
	free(executor);
}

static int grow(struct kp_executor *executor, uint32_t fibers, uint32_t teams)
{
	if (fibers > executor->fiber_count) {
		struct kp_fiber *more = calloc(fibers, sizeof(*more));

		if (!more)
			return -ENOMEM;
		free(executor->fibers);
		executor->fibers = more;
		executor->fiber_count = fibers;
	}
	if (teams > executor->team_count) {
		struct kp_window *windows = calloc(teams, sizeof(*windows));
		struct kp_team *more = calloc(teams, sizeof(*more));

		if (!windows || !more) {
			free(windows);
			free(more);
			return -ENOMEM;
		}
		for (uint32_t i = 0; i < executor->team_count; i++)
			windows[i] = executor->windows[i];
		free(executor->windows);
		free(executor->teams);
		executor->windows = windows;
		executor->teams = more;
		executor->team_count = teams;
	}
	return 0;
}

struct kp_executor *kp_executor_take(uint32_t fibers, uint32_t teams, size_t stack_bytes, uint32_t shared_bytes)
{
	pthread_mutex_lock(&lock);
	struct kp_executor *executor = kept;

	if (executor) {
		kept = executor->next;
		kept_count--;
	}
	pthread_mutex_unlock(&lock);
	if (!executor)
		executor = calloc(1, sizeof(*executor));
	if (!executor)
		return NULL;
	int error = grow(executor, fibers, teams);

	if (!error && fibers)
		error = kp_stacks_reserve(&executor->stacks, fibers, stack_bytes);
	for (uint32_t i = 0; i < teams && !error; i++)
		error = window_open(&executor->windows[i], shared_bytes);
	if (error) {
		destroy(executor);
		return NULL;
	}
	return executor;
}

void kp_executor_give(struct kp_executor *executor)
{
	pthread_mutex_lock(&lock);
	const int keep = kept_count < KP_KEPT && executor->team_count <= 64;

	if (keep) {
		executor->next = kept;
		kept = executor;
		kept_count++;
	}
	pthread_mutex_unlock(&lock);
	if (!keep)
		destroy(executor);
}

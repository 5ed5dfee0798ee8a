/* The watch: one thread a process that sees faults of the cards and launches that run too long, and ends them.
 *
 * It looks every 20 ms. Calls see faults by themselves; the watch is for those who wait.
 */
#include "cuda_core.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define PERIOD_NS 20000000
#define MAX_LAUNCHES 256

struct launch {
	struct sg_context *context;
	struct kp_launch_ctl *ctl;
	uint64_t since_ns;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct launch launches[MAX_LAUNCHES];
static unsigned top; /* launches beyond it are free */
static uint64_t limit_ns; /* of one launch; 0: none */

void sg_watch_begin(struct sg_context *context, struct kp_launch_ctl *ctl)
{
	pthread_mutex_lock(&lock);
	for (unsigned i = 0; i < MAX_LAUNCHES; i++) {
		if (launches[i].ctl)
			continue;
		launches[i] = (struct launch){context, ctl, sg_now_ns()};
		if (i >= top)
			top = i + 1;
		break;
	}
	pthread_mutex_unlock(&lock);
}

void sg_watch_end(struct kp_launch_ctl *ctl)
{
	pthread_mutex_lock(&lock);
	for (unsigned i = 0; i < top; i++)
		if (launches[i].ctl == ctl)
			launches[i] = (struct launch){0};
	while (top && !launches[top - 1].ctl)
		top--;
	pthread_mutex_unlock(&lock);
}

/* Contexts hold the process's lock only for moments, and a launch's context lives while it runs. */
static void look(void)
{
	pthread_mutex_lock(&lock);
	for (unsigned i = 0; i < top; i++) {
		struct launch *launch = &launches[i];
		if (!launch->ctl)
			continue;
		CUresult error = sg_context_status(launch->context);
		if (!error && limit_ns && sg_now_ns() - launch->since_ns > limit_ns)
			error = CUDA_ERROR_LAUNCH_TIMEOUT;
		if (error)
			__atomic_store_n(&launch->ctl->stop, error, __ATOMIC_SEQ_CST);
	}
	pthread_mutex_unlock(&lock);
}

static void *watch_main(void *unused)
{
	const struct timespec period = {.tv_nsec = PERIOD_NS};

	(void)unused;
	for (;;) {
		nanosleep(&period, NULL);
		look();
	}
	return NULL;
}

static void start(void)
{
	sigset_t all, old;
	pthread_t thread;
	const char *limit = getenv("KVMPOOL_SOFTGPU_WATCHDOG_S");

	limit_ns = (uint64_t)((limit ? strtod(limit, NULL) : 120.0) * 1e9);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	if (!pthread_create(&thread, NULL, watch_main, NULL))
		pthread_detach(thread);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
}

void sg_watch_start(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, start);
}

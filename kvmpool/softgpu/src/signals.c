/*
 * Faults inside kernels. One handler for SIGSEGV, SIGBUS, SIGFPE and SIGILL, installed when the first kernel runs and
 * again where the program has put its own in place since; a fault outside a kernel goes to whoever was there before.
 */
#include "launch.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define KP_ALT_STACK (64u << 10)

static const int caught[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
#define CAUGHT (sizeof(caught) / sizeof(caught[0]))

static struct sigaction before[CAUGHT];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_key_t alt_stack_key;
static pthread_once_t alt_stack_once = PTHREAD_ONCE_INIT;

/* initial-exec: the handler must not be the first to touch lazily made thread-local storage */
static __thread struct kp_launch *current __attribute__((tls_model("initial-exec")));

struct kp_launch *kp_current_launch(void)
{
	return current;
}

void kp_set_current_launch(struct kp_launch *launch)
{
	current = launch;
}

static int is_shared(const struct kp_executor *executor, uint64_t address)
{
	for (uint32_t i = 0; i < executor->team_count; i++) {
		const struct kp_window *window = &executor->windows[i];

		if (window->base && address + KP_BEFORE - (uint64_t)(uintptr_t)window->base < window->reserved + KP_BEFORE)
			return 1;
	}
	return 0;
}

static void fail_for(const struct kp_launch *launch, int number, const siginfo_t *info) __attribute__((noreturn));
static void fail_for(const struct kp_launch *launch, int number, const siginfo_t *info)
{
	const uint64_t address = (uint64_t)(uintptr_t)info->si_addr;

	if (number == SIGFPE || number == SIGILL)
		kp_launch_fail(KP_LAUNCH_FAILED, 13, address, "illegal instruction");
	if (number == SIGBUS && info->si_code == BUS_ADRALN)
		kp_launch_fail(KP_MISALIGNED_ADDRESS, 13, address, "misaligned address");
	if (is_shared(launch->executor, address))
		kp_launch_fail(KP_ILLEGAL_ADDRESS, 13, address, "shared memory address out of range");
	if (kp_stacks_is_guard(&launch->executor->stacks, (uintptr_t)address))
		kp_launch_fail(KP_ILLEGAL_ADDRESS, 13, address, "stack overflow");
	kp_launch_fail(KP_ILLEGAL_ADDRESS, 31, address, "illegal memory access");
}

static void pass_on(int number, siginfo_t *info, void *context)
{
	const struct sigaction *old = NULL;

	for (size_t i = 0; i < CAUGHT; i++)
		if (caught[i] == number)
			old = &before[i];
	if (old && (old->sa_flags & SA_SIGINFO) && old->sa_sigaction) {
		old->sa_sigaction(number, info, context);
	} else if (old && old->sa_handler != SIG_DFL && old->sa_handler != SIG_IGN) {
		old->sa_handler(number);
	} else {
		struct sigaction plain = {.sa_handler = SIG_DFL};

		sigaction(number, &plain, NULL); /* the instruction runs again and the process dies of it, as it should */
	}
}

static void handler(int number, siginfo_t *info, void *context)
{
	if (current && info->si_code > 0) /* > 0: by the CPU, not by kill */
		fail_for(current, number, info);
	pass_on(number, info, context);
}

/* ---- the alternate stack: a fiber's or the thread's own stack may be the one that overflowed ---- */

static void alt_stack_end(void *memory)
{
	stack_t none = {.ss_flags = SS_DISABLE};

	sigaltstack(&none, NULL);
	munmap(memory, KP_ALT_STACK);
}

static void alt_stack_key_make(void)
{
	pthread_key_create(&alt_stack_key, alt_stack_end);
}

static int alt_stack_ready(void)
{
	stack_t have;

	if (!sigaltstack(NULL, &have) && !(have.ss_flags & SS_DISABLE))
		return 0; /* the program's own, or ours */
	pthread_once(&alt_stack_once, alt_stack_key_make);
	void *memory = mmap(NULL, KP_ALT_STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		return -ENOMEM;
	stack_t stack = {.ss_sp = memory, .ss_size = KP_ALT_STACK};

	if (sigaltstack(&stack, NULL)) {
		munmap(memory, KP_ALT_STACK);
		return -EINVAL;
	}
	pthread_setspecific(alt_stack_key, memory);
	return 0;
}

int kp_signals_ready(void)
{
	struct sigaction have, ours = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
	const int error = alt_stack_ready();

	if (error)
		return error;
	sigemptyset(&ours.sa_mask);
	if (!sigaction(SIGSEGV, NULL, &have) && have.sa_sigaction == handler)
		return 0;
	pthread_mutex_lock(&lock);
	for (size_t i = 0; i < CAUGHT; i++) {
		if (sigaction(caught[i], NULL, &have) || have.sa_sigaction == handler)
			continue;
		before[i] = have;
		sigaction(caught[i], &ours, NULL);
	}
	pthread_mutex_unlock(&lock);
	return 0;
}

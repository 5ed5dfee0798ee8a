/* Fibers: stacks, the switch between them, the ring of those that can run. */
#include "fiber.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#define KP_GUARD 4096u

/* Saves the callee-saved registers on the stack, stores the stack pointer in *save, goes on at `to`. */
void kp_switch(void **save, void *to) __attribute__((visibility("hidden")));
void kp_fiber_start(void) __attribute__((visibility("hidden")));
void kp_fiber_main(struct kp_fiber *fiber) __attribute__((visibility("hidden"), noreturn, used));

#if defined(__x86_64__)
__asm__(".text\n"
	".hidden kp_switch\n.globl kp_switch\n.type kp_switch,@function\n"
	"kp_switch:\n"
	"	pushq %rbp\n	pushq %rbx\n	pushq %r12\n	pushq %r13\n	pushq %r14\n	pushq %r15\n"
	"	movq %rsp, (%rdi)\n"
	"	movq %rsi, %rsp\n"
	"	popq %r15\n	popq %r14\n	popq %r13\n	popq %r12\n	popq %rbx\n	popq %rbp\n"
	"	ret\n"
	".size kp_switch,.-kp_switch\n"
	".hidden kp_fiber_start\n.globl kp_fiber_start\n.type kp_fiber_start,@function\n"
	"kp_fiber_start:\n"
	"	movq %rbx, %rdi\n"
	"	call kp_fiber_main\n"
	"	ud2\n"
	".size kp_fiber_start,.-kp_fiber_start\n");

static void *first_frame(uint8_t *top, struct kp_fiber *fiber)
{
	uint64_t *sp = (uint64_t *)top;

	/* at the call in kp_fiber_start the stack is at `top`, which is aligned */
	*--sp = (uint64_t)(uintptr_t)kp_fiber_start;
	*--sp = 0;                          /* rbp */
	*--sp = (uint64_t)(uintptr_t)fiber; /* rbx */
	*--sp = 0;
	*--sp = 0;
	*--sp = 0;
	*--sp = 0;
	return sp;
}
#elif defined(__aarch64__)
__asm__(".text\n"
	".hidden kp_switch\n.globl kp_switch\n.type kp_switch,%function\n"
	"kp_switch:\n"
	"	sub sp, sp, #160\n"
	"	stp x19, x20, [sp]\n	stp x21, x22, [sp, #16]\n	stp x23, x24, [sp, #32]\n"
	"	stp x25, x26, [sp, #48]\n	stp x27, x28, [sp, #64]\n	stp x29, x30, [sp, #80]\n"
	"	stp d8, d9, [sp, #96]\n	stp d10, d11, [sp, #112]\n	stp d12, d13, [sp, #128]\n	stp d14, d15, [sp, #144]\n"
	"	mov x2, sp\n	str x2, [x0]\n	mov sp, x1\n"
	"	ldp x19, x20, [sp]\n	ldp x21, x22, [sp, #16]\n	ldp x23, x24, [sp, #32]\n"
	"	ldp x25, x26, [sp, #48]\n	ldp x27, x28, [sp, #64]\n	ldp x29, x30, [sp, #80]\n"
	"	ldp d8, d9, [sp, #96]\n	ldp d10, d11, [sp, #112]\n	ldp d12, d13, [sp, #128]\n	ldp d14, d15, [sp, #144]\n"
	"	add sp, sp, #160\n	ret\n"
	".hidden kp_fiber_start\n.globl kp_fiber_start\n.type kp_fiber_start,%function\n"
	"kp_fiber_start:\n	mov x0, x19\n	bl kp_fiber_main\n	brk #0\n");

static void *first_frame(uint8_t *top, struct kp_fiber *fiber)
{
	uint64_t *sp = (uint64_t *)top - 20;

	memset(sp, 0, 160);
	sp[0] = (uint64_t)(uintptr_t)fiber;           /* x19 */
	sp[11] = (uint64_t)(uintptr_t)kp_fiber_start; /* x30 */
	return sp;
}
#else
#error "the software GPU knows x86-64 and aarch64"
#endif

/* ---- stacks ---- */

int kp_stacks_reserve(struct kp_stacks *stacks, uint32_t count, size_t stack_bytes)
{
	if (count <= stacks->count && stack_bytes <= stacks->stack_bytes)
		return 0;
	count = count > stacks->count ? count : stacks->count;
	kp_stacks_release(stacks);
	stack_bytes = (stack_bytes + KP_GUARD - 1) / KP_GUARD * KP_GUARD;
	uint8_t *base = mmap(NULL, count * stack_bytes, PROT_READ | PROT_WRITE,
			     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
	if (base == MAP_FAILED)
		return -ENOMEM;
	stacks->base = base;
	stacks->stack_bytes = stack_bytes;
	stacks->count = count;
	for (uint32_t i = 0; i < count; i++) {
		if (mprotect(base + i * stack_bytes, KP_GUARD, PROT_NONE)) {
			kp_stacks_release(stacks);
			return -ENOMEM;
		}
	}
	return 0;
}

void kp_stacks_release(struct kp_stacks *stacks)
{
	if (stacks->base)
		munmap(stacks->base, stacks->count * stacks->stack_bytes);
	memset(stacks, 0, sizeof(*stacks));
}

int kp_stacks_is_guard(const struct kp_stacks *stacks, uintptr_t address)
{
	const uintptr_t base = (uintptr_t)stacks->base;

	if (!base || address < base || address >= base + stacks->count * stacks->stack_bytes)
		return 0;
	return (address - base) % stacks->stack_bytes < KP_GUARD;
}

/* ---- the ring ---- */

static void ring_add(struct kp_gang *gang, struct kp_fiber *fiber)
{
	struct kp_fiber *current = gang->current;

	if (!current) {
		fiber->next = fiber->prev = fiber;
		gang->current = fiber;
		return;
	}
	fiber->next = current; /* last in turn */
	fiber->prev = current->prev;
	current->prev->next = fiber;
	current->prev = fiber;
}

/* Takes the running fiber out and goes on with the next one, or with the scheduler. Returns when it is woken. */
static void leave_ring(struct kp_fiber *fiber)
{
	struct kp_gang *gang = fiber->team->gang;

	if (fiber->next == fiber) {
		gang->current = NULL;
		kp_switch(&fiber->sp, gang->scheduler);
		return;
	}
	fiber->prev->next = fiber->next;
	fiber->next->prev = fiber->prev;
	gang->current = fiber->next;
	kp_switch(&fiber->sp, gang->current->sp);
}

void kp_fiber_wait(struct kp_fiber *fiber, enum kp_fiber_state state)
{
	struct kp_team *team = fiber->team;
	const uint32_t warp = fiber->t.flat >> 5;

	fiber->state = state;
	if (--team->warp_running[warp] == 0)
		kp_warp_check(team, warp);
	if (fiber->state == KP_RUNNING)
		return; /* its own arrival completed the group: kp_fiber_wake has not moved it */
	leave_ring(fiber);
}

void kp_fiber_wake(struct kp_fiber *fiber)
{
	struct kp_gang *gang = fiber->team->gang;

	if (fiber->state == KP_RUNNING || fiber->state == KP_DONE)
		return;
	fiber->state = KP_RUNNING;
	fiber->team->warp_running[fiber->t.flat >> 5]++;
	if (gang->current != fiber)
		ring_add(gang, fiber);
}

void kp_fiber_yield(struct kp_thread *t)
{
	struct kp_fiber *fiber = (struct kp_fiber *)t;
	struct kp_gang *gang = fiber->team->gang;

	if (__builtin_expect(*(volatile const int *)t->b->stop, 0))
		t->b->rt->stopped(t);
	if (fiber->next == fiber)
		return;
	gang->current = fiber->next;
	kp_switch(&fiber->sp, gang->current->sp);
}

void kp_fiber_exit(struct kp_thread *t)
{
	struct kp_fiber *fiber = (struct kp_fiber *)t;
	struct kp_team *team = fiber->team;
	const uint32_t warp = t->flat >> 5;

	fiber->state = KP_DONE;
	team->alive--;
	team->warp_running[warp]--;
	team->warp_alive[warp] &= ~(1u << (t->flat & 31));
	kp_barriers_check(team);
	kp_warp_check(team, warp);
	leave_ring(fiber);
	__builtin_unreachable();
}

void kp_fiber_main(struct kp_fiber *fiber)
{
	fiber->team->gang->body(&fiber->t);
	kp_fiber_exit(&fiber->t);
	__builtin_unreachable();
}

/* ---- a gang ---- */

static void prepare_team(struct kp_team *team, const struct kp_stacks *stacks, uint32_t first)
{
	const struct kp_block *block = &team->block;

	team->alive = team->count;
	memset(team->barriers, 0, sizeof(team->barriers));
	memset(team->warp_alive, 0, sizeof(team->warp_alive));
	memset(team->warp_running, 0, sizeof(team->warp_running));
	for (uint32_t i = 0; i < team->count; i++) {
		struct kp_fiber *fiber = &team->fibers[i];
		uint8_t *top = stacks->base + (first + i + 1) * stacks->stack_bytes;

		/* tops at different cache lines: all fibers' hot lines would else fall into one set of the cache */
		top -= (i & 31u) * 64u;
		fiber->t.tid[0] = i % block->ntid[0];
		fiber->t.tid[1] = i / block->ntid[0] % block->ntid[1];
		fiber->t.tid[2] = i / (block->ntid[0] * block->ntid[1]);
		fiber->t.flat = i;
		fiber->t.b = block;
		fiber->t.path = 0;
		fiber->team = team;
		fiber->state = KP_RUNNING;
		fiber->sp = first_frame(top, fiber);
		team->warp_alive[i >> 5] |= 1u << (i & 31);
		team->warp_running[i >> 5]++;
		ring_add(team->gang, fiber);
	}
}

int kp_gang_run(struct kp_gang *gang, const struct kp_stacks *stacks)
{
	uint32_t first = 0;

	gang->current = NULL;
	for (uint32_t i = 0; i < gang->team_count; i++) {
		gang->teams[i].gang = gang;
		prepare_team(&gang->teams[i], stacks, first);
		first += gang->teams[i].count;
	}
	for (;;) {
		uint32_t alive = 0;
		int woken = 0;

		if (gang->current)
			kp_switch(&gang->scheduler, gang->current->sp);
		for (uint32_t i = 0; i < gang->team_count; i++)
			alive += gang->teams[i].alive;
		if (!alive)
			return 0;
		for (uint32_t i = 0; i < gang->team_count && !gang->current; i++)
			woken |= kp_warp_force(&gang->teams[i]);
		if (!woken && !gang->current)
			return -EDEADLK;
	}
}

/* Barriers of a block: bar.sync, bar.arrive, bar.red. Threads that have ended do not count. */
#include "fiber.h"

static void release(struct kp_team *team, uint32_t number)
{
	struct kp_barrier *barrier = &team->barriers[number];
	uint32_t result = barrier->popc;

	if (barrier->kind == KP_RED_AND)
		result = barrier->and;
	else if (barrier->kind == KP_RED_OR)
		result = barrier->or;
	uint32_t waiting = barrier->waiting;
	*barrier = (struct kp_barrier){0};
	for (uint32_t i = 0; i < team->count && waiting; i++) {
		struct kp_fiber *fiber = &team->fibers[i];

		if (fiber->state == KP_AT_BARRIER && fiber->barrier == number) {
			fiber->result = result;
			kp_fiber_wake(fiber);
			waiting--;
		}
	}
}

static int complete(const struct kp_team *team, const struct kp_barrier *barrier)
{
	const uint32_t expected = barrier->expected ? barrier->expected : team->alive;

	return barrier->arrived && barrier->arrived >= expected;
}

uint32_t kp_fiber_barrier(struct kp_thread *t, uint32_t number, uint32_t count, int kind, uint32_t predicate)
{
	struct kp_fiber *fiber = (struct kp_fiber *)t;
	struct kp_team *team = fiber->team;

	if (__builtin_expect(*(volatile const int *)t->b->stop, 0))
		t->b->rt->stopped(t);
	if (number >= KP_MAX_BARRIERS || count > team->count)
		t->b->rt->trap(t);
	struct kp_barrier *barrier = &team->barriers[number];

	if (!barrier->arrived)
		barrier->and = 1;
	barrier->arrived++;
	if (count)
		barrier->expected = count;
	barrier->popc += predicate != 0;
	barrier->and &= predicate != 0;
	barrier->or |= predicate != 0;
	if (kind != KP_ARRIVE)
		barrier->kind = kind;
	if (kind == KP_ARRIVE) {
		if (complete(team, barrier))
			release(team, number);
		return 0;
	}
	barrier->waiting++;
	fiber->barrier = number;
	if (complete(team, barrier)) {
		/* the last one goes on at once: mark it waiting without leaving the ring, so that it gets the result too */
		fiber->state = KP_AT_BARRIER;
		team->warp_running[t->flat >> 5]--;
		release(team, number);
		return fiber->result;
	}
	kp_fiber_wait(fiber, KP_AT_BARRIER);
	return fiber->result;
}

void kp_barriers_check(struct kp_team *team)
{
	for (uint32_t i = 0; i < KP_MAX_BARRIERS; i++) {
		if (team->barriers[i].waiting && complete(team, &team->barriers[i]))
			release(team, i);
	}
}

/*
 * Warp-wide ops: each lane of the group leaves its values and waits; the last to arrive works out every lane's result.
 * A lane that is not in the group, or has ended, counts as 0. A group with a mask is complete when all its lanes that
 * have not ended are there; a KP_CONVERGED group when no lane of the warp can run (then all lanes at one place in
 * the code are the group, the earliest place first, so that those behind catch up).
 */
#include "fiber.h"

#include <string.h>

struct group {
	struct kp_fiber *lanes; /* of the warp, 32 or fewer */
	uint32_t members;       /* who is in it */
};

static struct kp_fiber *lane(const struct group *group, uint32_t n)
{
	return (group->members >> n & 1u) ? &group->lanes[n] : NULL;
}

static void shuffle(const struct group *group, struct kp_fiber *me, uint32_t n)
{
	const uint32_t clamp = me->c & 31u, segment = me->c >> 8 & 31u, by = me->b & 31u;
	const uint32_t max_lane = (n & segment) | (clamp & ~segment), min_lane = n & segment;
	int64_t from = 0;
	int in_range = 0;

	switch (me->op) {
	case KP_SHFL_UP:
		from = (int64_t)n - by;
		in_range = from >= (int64_t)max_lane;
		break;
	case KP_SHFL_DOWN:
		from = n + by;
		in_range = from <= (int64_t)max_lane;
		break;
	case KP_SHFL_BFLY:
		from = n ^ by;
		in_range = from <= (int64_t)max_lane;
		break;
	default:
		from = min_lane | (by & ~segment);
		in_range = from <= (int64_t)max_lane;
		break;
	}
	if (!in_range)
		from = n;
	const struct kp_fiber *other = lane(group, (uint32_t)from & 31u);

	me->value = other ? (uint32_t)other->a : 0;
	me->second = (uint8_t)in_range;
}

static uint32_t votes(const struct group *group)
{
	uint32_t set = 0;

	for (uint32_t n = 0; n < 32; n++)
		if (lane(group, n) && lane(group, n)->a)
			set |= 1u << n;
	return set;
}

static uint32_t same(const struct group *group, uint64_t value)
{
	uint32_t set = 0;

	for (uint32_t n = 0; n < 32; n++)
		if (lane(group, n) && lane(group, n)->a == value)
			set |= 1u << n;
	return set;
}

static uint32_t combine(int op, uint32_t x, uint32_t y)
{
	switch (op) {
	case KP_REDUX_ADD:
		return x + y;
	case KP_REDUX_MIN:
		return x < y ? x : y;
	case KP_REDUX_MAX:
		return x > y ? x : y;
	case KP_REDUX_MIN_S:
		return (int32_t)x < (int32_t)y ? x : y;
	case KP_REDUX_MAX_S:
		return (int32_t)x > (int32_t)y ? x : y;
	case KP_REDUX_AND:
		return x & y;
	case KP_REDUX_OR:
		return x | y;
	default:
		return x ^ y;
	}
}

static uint32_t reduce(const struct group *group, int op)
{
	uint32_t result = 0;
	int first = 1;

	for (uint32_t n = 0; n < 32; n++) {
		if (!lane(group, n))
			continue;
		result = first ? (uint32_t)lane(group, n)->a : combine(op, result, (uint32_t)lane(group, n)->a);
		first = 0;
	}
	return result;
}

static void work_out(const struct group *group, struct kp_fiber *me, uint32_t n)
{
	switch (me->op) {
	case KP_WARP_SYNC:
		break;
	case KP_SHFL_UP:
	case KP_SHFL_DOWN:
	case KP_SHFL_BFLY:
	case KP_SHFL_IDX:
		shuffle(group, me, n);
		break;
	case KP_VOTE_ALL:
		me->value = votes(group) == group->members;
		break;
	case KP_VOTE_ANY:
		me->value = votes(group) != 0;
		break;
	case KP_VOTE_UNI:
		me->value = votes(group) == group->members || votes(group) == 0;
		break;
	case KP_VOTE_BALLOT:
		me->value = votes(group);
		break;
	case KP_MATCH_ANY:
		me->value = same(group, me->a);
		break;
	case KP_MATCH_ALL:
		me->second = same(group, me->a) == group->members;
		me->value = me->second ? group->members : 0;
		break;
	case KP_ACTIVE:
		me->value = group->members;
		break;
	case KP_ELECT:
		me->value = (uint32_t)__builtin_ctz(group->members);
		me->second = me->value == n;
		break;
	default:
		me->value = reduce(group, me->op);
		break;
	}
}

static void complete(const struct group *group)
{
	for (uint32_t n = 0; n < 32; n++)
		if (lane(group, n))
			work_out(group, lane(group, n), n);
	for (uint32_t n = 0; n < 32; n++)
		if (lane(group, n))
			kp_fiber_wake(lane(group, n));
}

/* Those of the warp that wait for the same op with the same mask (and place, where the mask is KP_CONVERGED). */
static struct group group_of(struct kp_team *team, const struct kp_fiber *one)
{
	const uint32_t warp = one->t.flat >> 5;
	struct group group = {&team->fibers[warp * 32], 0};

	for (uint32_t n = 0; n < 32 && warp * 32 + n < team->count; n++) {
		const struct kp_fiber *fiber = &group.lanes[n];

		if (fiber->state == KP_AT_WARP && fiber->op == one->op && fiber->mask == one->mask &&
		    (one->mask != KP_CONVERGED || fiber->site == one->site))
			group.members |= 1u << n;
	}
	return group;
}

static int is_complete(const struct kp_team *team, const struct kp_fiber *one, const struct group *group)
{
	return one->mask != KP_CONVERGED && group->members == (one->mask & team->warp_alive[one->t.flat >> 5]);
}

uint64_t kp_fiber_warp(struct kp_thread *t, int op, uint32_t mask, uint64_t a, uint32_t b, uint32_t c, uint8_t *second)
{
	struct kp_fiber *fiber = (struct kp_fiber *)t;
	struct kp_team *team = fiber->team;

	if (__builtin_expect(*(volatile const int *)t->b->stop, 0))
		t->b->rt->stopped(t);
	fiber->op = op;
	fiber->mask = mask;
	fiber->site = (uint64_t)(uintptr_t)__builtin_return_address(0) + t->path;
	fiber->a = a;
	fiber->b = b;
	fiber->c = c;
	fiber->value = 0;
	fiber->second = 0;
	fiber->state = KP_AT_WARP;
	struct group group = group_of(team, fiber);

	if (is_complete(team, fiber, &group)) {
		team->warp_running[t->flat >> 5]--; /* kp_fiber_wake counts it again */
		complete(&group);
	} else {
		kp_fiber_wait(fiber, KP_AT_WARP);
	}
	if (second)
		*second = fiber->second;
	return fiber->value;
}

/* The waiting lane whose group should go next, or NULL: a complete one, else the earliest converged one. */
static struct kp_fiber *ready(struct kp_team *team, uint32_t warp, int force)
{
	struct kp_fiber *best = NULL;

	for (uint32_t n = warp * 32; n < warp * 32 + 32 && n < team->count; n++) {
		struct kp_fiber *fiber = &team->fibers[n];

		if (fiber->state != KP_AT_WARP)
			continue;
		struct group group = group_of(team, fiber);

		if (is_complete(team, fiber, &group))
			return fiber;
		if (team->warp_running[warp] || (fiber->mask != KP_CONVERGED && !force))
			continue;
		if (!best || fiber->site < best->site)
			best = fiber;
	}
	return best;
}

void kp_warp_check(struct kp_team *team, uint32_t warp)
{
	struct kp_fiber *fiber = ready(team, warp, 0);

	if (fiber) {
		struct group group = group_of(team, fiber);

		complete(&group);
	}
}

int kp_warp_force(struct kp_team *team)
{
	for (uint32_t warp = 0; warp * 32 < team->count; warp++) {
		struct kp_fiber *fiber = ready(team, warp, 1);

		if (fiber) {
			struct group group = group_of(team, fiber);

			complete(&group);
			return 1;
		}
	}
	return 0;
}

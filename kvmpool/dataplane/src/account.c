/* account.c: see account.h.
 *
 * Why the limit holds without a lock: a charge adds to its slot first and sums all slots after. Of the charges held at any
 * moment the last added sees all the others in its sum, so it could not have been let through above the limit.
 */
#define _GNU_SOURCE
#include "account.h"

#include <errno.h>
#include <sched.h>
#include <stddef.h>
#include <sys/mman.h>

#define CHARGE_TRIES 16 /* two charges that race for the last bytes both step back; one of them gets it on a later try */

struct kp_account *kp_account_new(uint64_t limit_bytes)
{
    struct kp_account *account;

    if (limit_bytes > KP_ACCOUNT_LIMIT_MAX) {
        errno = EINVAL;
        return NULL;
    }
    account = mmap(NULL, sizeof(*account), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (account == MAP_FAILED)
        return NULL;
    account->limit = account->pinned_limit = limit_bytes;
    return account;
}

void kp_account_unmap(struct kp_account *account)
{
    if (account)
        munmap(account, sizeof(*account));
}

static uint64_t sum_of(const _Atomic uint64_t *slots)
{
    uint64_t sum = 0;

    for (unsigned i = 0; i < KP_ACCOUNT_SLOTS; i++)
        sum += atomic_load(&slots[i]);
    return sum;
}

static int fits(uint64_t limit, const _Atomic uint64_t *slots, uint64_t bytes)
{
    uint64_t used = sum_of(slots);

    return used <= limit && bytes <= limit - used;
}

static int take(uint64_t limit, _Atomic uint64_t *slots, unsigned slot, uint64_t bytes)
{
    if (slot >= KP_ACCOUNT_SLOTS)
        return -EINVAL;
    for (int i = 0; i < CHARGE_TRIES; i++) {
        /* Asked before anything is added: a request that cannot fit never shows up in a neighbour's sum. */
        if (!fits(limit, slots, bytes))
            return -ENOMEM;
        atomic_fetch_add(&slots[slot], bytes);
        if (fits(limit, slots, 0))
            return 0;
        atomic_fetch_sub(&slots[slot], bytes);
        sched_yield();
    }
    return -ENOMEM;
}

static void give(_Atomic uint64_t *slots, unsigned slot, uint64_t bytes)
{
    uint64_t held;

    if (slot >= KP_ACCOUNT_SLOTS)
        return;
    held = atomic_load(&slots[slot]);
    while (!atomic_compare_exchange_weak(&slots[slot], &held, held > bytes ? held - bytes : 0))
        ;
}

uint64_t kp_account_used(const struct kp_account *account)
{
    return sum_of(account->slot);
}

int kp_account_charge(struct kp_account *account, unsigned slot, uint64_t bytes)
{
    return take(account->limit, account->slot, slot, bytes);
}

void kp_account_release(struct kp_account *account, unsigned slot, uint64_t bytes)
{
    give(account->slot, slot, bytes);
}

void kp_account_admit(struct kp_account *account, unsigned slot, uint64_t bytes)
{
    if (slot < KP_ACCOUNT_SLOTS)
        atomic_fetch_add(&account->slot[slot], bytes);
}

int kp_account_pin(struct kp_account *account, unsigned slot, uint64_t bytes)
{
    return take(account->pinned_limit, account->pinned, slot, bytes);
}

void kp_account_unpin(struct kp_account *account, unsigned slot, uint64_t bytes)
{
    give(account->pinned, slot, bytes);
}

uint64_t kp_account_pinned(const struct kp_account *account)
{
    return sum_of(account->pinned);
}

uint64_t kp_account_clear(struct kp_account *account, unsigned slot)
{
    if (slot >= KP_ACCOUNT_SLOTS)
        return 0;
    atomic_store(&account->pid[slot], 0);
    atomic_store(&account->pinned[slot], 0);
    atomic_store(&account->shared[slot], 0);
    return atomic_exchange(&account->slot[slot], 0);
}

/* account.h: the device memory and the page-locked host memory of one claim, counted over all its sessions in a mapping they share.
 *
 * The parent makes the account before it forks; each session charges its own slot only. There is no lock and no total: the
 * use is the sum of the slots, so a session killed at any instruction leaves nothing to repair; the parent clears its slot.
 */
#ifndef KP_ACCOUNT_H
#define KP_ACCOUNT_H

#include <stdatomic.h>
#include <stdint.h>

#define KP_ACCOUNT_SLOTS 64u /* sessions a worker serves at once; one of them is one guest process on one card */

struct kp_account {
    uint64_t limit; /* bytes; written once, before the first fork; at most KP_ACCOUNT_LIMIT_MAX */
    _Atomic uint64_t slot[KP_ACCOUNT_SLOTS];
    uint64_t pinned_limit; /* likewise, of page-locked host memory; at first equal to `limit` */
    _Atomic uint64_t pinned[KP_ACCOUNT_SLOTS];
    _Atomic uint32_t shared[KP_ACCOUNT_SLOTS]; /* 1: the slot's process has shared memory with its session */
    _Atomic uint32_t pid[KP_ACCOUNT_SLOTS]; /* in the guest, as the slot's process says; 0: none, or an observer */
};

#define KP_ACCOUNT_LIMIT_MAX (UINT64_C(1) << 56) /* so that the sum of all slots cannot wrap */

/* A shared mapping that children inherit; NULL (errno set) when there is no memory or the limit is too large. */
struct kp_account *kp_account_new(uint64_t limit_bytes);
void kp_account_unmap(struct kp_account *account);

/* Takes `bytes` for `slot`: 0, or -ENOMEM when the claim's limit would be passed (then nothing was taken). */
int kp_account_charge(struct kp_account *account, unsigned slot, uint64_t bytes);

/* Gives `bytes` of `slot` back; more than it holds empties it. */
void kp_account_release(struct kp_account *account, unsigned slot, uint64_t bytes);

/* Takes them though the limit is passed: what the driver has taken already is told, not asked for. */
void kp_account_admit(struct kp_account *account, unsigned slot, uint64_t bytes);

/* The same for page-locked host memory, against its own limit. */
int kp_account_pin(struct kp_account *account, unsigned slot, uint64_t bytes);
void kp_account_unpin(struct kp_account *account, unsigned slot, uint64_t bytes);
uint64_t kp_account_pinned(const struct kp_account *account);

/* Gives back all that `slot` holds (the parent, once the slot's process is gone) and returns how much device memory that was. */
uint64_t kp_account_clear(struct kp_account *account, unsigned slot);

/* Bytes in use over all slots. */
uint64_t kp_account_used(const struct kp_account *account);

#endif

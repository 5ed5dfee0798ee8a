/* account.h: the device memory of one claim, counted over all its sessions in a mapping they share.
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

/* Gives back all that `slot` holds (the parent, once the slot's process is gone) and returns how much that was. */
uint64_t kp_account_clear(struct kp_account *account, unsigned slot);

/* Bytes in use over all slots. */
uint64_t kp_account_used(const struct kp_account *account);

#endif

/* Images that a claim's sessions have loaded, by the hash of their content: what one has sent, no session sends again.
 *
 * The memory is shared by a worker and its sessions, so the cache is a claim's own and goes with its worker. A session
 * may be anybody's in the guest, and may die at any moment: what is taken out is copied and hashed again.
 */
#ifndef KVMPOOL_CACHE_H
#define KVMPOOL_CACHE_H

#include <stdint.h>

#include "blake2b.h"

#define KP_CACHE_BYTES (64ull << 20) /* of images; used pages only are real memory */

struct kp_cache;

struct kp_cache *kp_cache_new(void); /* NULL where there is no memory: then nothing is kept */

/* A copy with an end behind it, to be freed; NULL where the image is not there. */
unsigned char *kp_cache_get(struct kp_cache *cache, const uint8_t hash[KP_HASH_BYTES], uint64_t bytes);

/* Keeps a copy; the oldest make room. An image larger than the cache is not kept. */
void kp_cache_put(struct kp_cache *cache, const uint8_t hash[KP_HASH_BYTES], const void *image, uint64_t bytes);

#endif

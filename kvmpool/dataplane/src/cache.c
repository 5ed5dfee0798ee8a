/* A ring of images in shared memory. See cache.h. */
#define _GNU_SOURCE
#include "cache.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define ENTRIES 256u
#define NAP_NS 100000
#define NAPS_MAX 10000 /* a second, longer than any copy: then who holds it was killed */

struct entry {
    uint8_t hash[KP_HASH_BYTES];
    uint64_t at, bytes; /* bytes 0: free */
};

struct kp_cache {
    _Atomic uint32_t holder; /* its pid, 0: free. A mutex of the C library's that a neighbour wrote over would write anywhere */
    uint64_t next;           /* where the next image goes */
    unsigned turn;           /* the entry that is given away next */
    struct entry entry[ENTRIES];
    unsigned char images[KP_CACHE_BYTES];
};

struct kp_cache *kp_cache_new(void)
{
    struct kp_cache *cache = mmap(NULL, sizeof *cache, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    return cache != MAP_FAILED ? cache : NULL;
}

/* False: others have kept it busy for too long; then the image is sent. */
static bool enter(struct kp_cache *cache)
{
    const struct timespec nap = {.tv_nsec = NAP_NS};
    uint32_t mine = (uint32_t)getpid(), seen = 0, held = 0;

    for (unsigned naps = 0, all = 0; !atomic_compare_exchange_strong(&cache->holder, &seen, mine); seen = 0) {
        naps = seen == held ? naps + 1 : 0;
        held = seen;
        if (naps == NAPS_MAX && atomic_compare_exchange_strong(&cache->holder, &seen, mine)) {
            memset(cache->entry, 0, sizeof cache->entry); /* it may have been writing anything */
            cache->next = 0;
            return true;
        }
        if (all++ > 2 * NAPS_MAX)
            return false;
        nanosleep(&nap, NULL);
    }
    return true;
}

static void leave(struct kp_cache *cache)
{
    uint32_t mine = (uint32_t)getpid();

    atomic_compare_exchange_strong(&cache->holder, &mine, 0);
}

static struct entry *find(struct kp_cache *cache, const uint8_t hash[KP_HASH_BYTES], uint64_t bytes)
{
    for (unsigned i = 0; i < ENTRIES; i++) {
        struct entry *entry = &cache->entry[i];
        if (entry->bytes == bytes && memcmp(entry->hash, hash, KP_HASH_BYTES) == 0)
            return entry;
    }
    return NULL;
}

unsigned char *kp_cache_get(struct kp_cache *cache, const uint8_t hash[KP_HASH_BYTES], uint64_t bytes)
{
    uint8_t got[KP_HASH_BYTES];
    unsigned char *copy = NULL;
    const struct entry *entry;
    uint64_t at;

    if (cache == NULL || bytes == 0 || bytes > KP_CACHE_BYTES || !enter(cache))
        return NULL;
    if ((entry = find(cache, hash, bytes)) != NULL && (copy = malloc(bytes + 1)) != NULL) {
        at = *(const volatile uint64_t *)&entry->at; /* another session writes it, whenever it likes: read once */
        if (at <= KP_CACHE_BYTES - bytes)
            memcpy(copy, cache->images + at, bytes);
        copy[bytes] = 0;
    }
    leave(cache);
    if (copy == NULL)
        return NULL;
    kp_hash(copy, bytes, got);
    if (memcmp(got, hash, sizeof got) != 0) {
        free(copy);
        copy = NULL;
    }
    return copy;
}

void kp_cache_put(struct kp_cache *cache, const uint8_t hash[KP_HASH_BYTES], const void *image, uint64_t bytes)
{
    struct entry *entry;
    uint64_t at;

    if (cache == NULL || bytes == 0 || bytes > KP_CACHE_BYTES || !enter(cache))
        return;
    if (find(cache, hash, bytes) == NULL) {
        at = *(const volatile uint64_t *)&cache->next;
        at = at <= KP_CACHE_BYTES - bytes ? at : 0;
        for (unsigned i = 0; i < ENTRIES; i++) { /* what the new one overwrites is gone */
            entry = &cache->entry[i];
            if (entry->at < at + bytes && at < entry->at + entry->bytes)
                entry->bytes = 0;
        }
        entry = &cache->entry[cache->turn++ % ENTRIES];
        memcpy(cache->images + at, image, bytes);
        memcpy(entry->hash, hash, KP_HASH_BYTES);
        entry->at = at;
        entry->bytes = bytes;
        cache->next = at + bytes;
    }
    leave(cache);
}

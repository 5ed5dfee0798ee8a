/* Fatbins are made for many cards: only what the claim's card can use is sent.
 *
 * A driver takes the newest machine code of the card's own major version, else compiles the newest PTX that is not newer
 * than the card; these two targets are kept, with all that has them, and kinds that we do not know. A container that is
 * not understood is sent whole: its judge is the card's driver.
 */
#include "shim.h"

#include <stdlib.h>
#include <string.h>

#define KIND_PTX 1
#define KIND_ELF 2
#define ENTRIES_MAX 4096

struct header {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes; /* of all entries */
};

struct entry {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t bytes; /* of the payload with its padding */
    uint32_t compressed, options;
    uint16_t minor, major;
    uint32_t target; /* 90: compute capability 9.0 */
};

/* The entry at `at`, and where the next one is; false where it leaves the container. */
static bool read_entry(const unsigned char *at, uint64_t left, struct entry *entry, uint64_t *whole)
{
    if (left < sizeof *entry)
        return false;
    memcpy(entry, at, sizeof *entry);
    if (entry->header_bytes < sizeof *entry || entry->header_bytes > left || entry->bytes > left - entry->header_bytes)
        return false;
    *whole = entry->header_bytes + entry->bytes;
    return true;
}

static bool usable(const struct entry *entry, uint32_t card)
{
    return entry->target <= card && (entry->kind != KIND_ELF || entry->target / 10 == card / 10);
}

/* The newest usable target of machine code and of PTX. False: the container is damaged. */
static bool find_best(const unsigned char *at, uint64_t left, uint32_t card, uint32_t best[KIND_ELF + 1])
{
    struct entry entry;
    uint64_t whole;

    for (unsigned i = 0; left > 0; i++, at += whole, left -= whole) {
        if (i == ENTRIES_MAX || !read_entry(at, left, &entry, &whole))
            return false;
        if (entry.kind <= KIND_ELF && usable(&entry, card) && entry.target > best[entry.kind])
            best[entry.kind] = entry.target;
    }
    return true;
}

void kp_fatbin_prune(struct kp_image *image)
{
    const int32_t *device = kp_shim.device.value;
    uint32_t best[KIND_ELF + 1] = {0};
    uint32_t card = (uint32_t)(device[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR] * 10 + device[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR]);
    const unsigned char *at = image->data;
    unsigned char *pruned;
    struct header header;
    struct entry entry;
    uint64_t left, whole;
    size_t kept;

    memcpy(&header, at, sizeof header);
    if (!atomic_load(&kp_shim.ready) || header.header_bytes < sizeof header || header.header_bytes > image->bytes)
        return;
    kept = header.header_bytes;
    left = image->bytes - kept;
    if (!find_best(at + kept, left, card, best) || (best[KIND_PTX] == 0 && best[KIND_ELF] == 0))
        return;
    if ((pruned = malloc(image->bytes)) == NULL)
        return;
    memcpy(pruned, at, kept);
    for (at += kept; left > 0 && read_entry(at, left, &entry, &whole); at += whole, left -= whole) {
        if (entry.kind <= KIND_ELF && entry.kind > 0 && entry.target != best[entry.kind])
            continue;
        memcpy(pruned + kept, at, whole);
        kept += whole;
    }
    header.bytes = kept - header.header_bytes;
    memcpy(pruned, &header, sizeof header);
    image->data = image->owned = pruned;
    image->bytes = kept;
}

/* Cases of test_image_cache.py: the cache of images that a worker and its sessions share.
 *
 * usage: cache_cases [hash FILE]: the hash of a file's bytes; without, all cases. Says what went wrong and exits 1.
 */
#define _GNU_SOURCE
#include "../../kvmpool/dataplane/src/cache.c"

#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB (1ull << 20)

static void check(int fine, const char *what)
{
    if (fine)
        return;
    printf("%s\n", what);
    exit(1);
}

static unsigned char *image_of(unsigned char fill, uint64_t bytes, uint8_t hash[KP_HASH_BYTES])
{
    unsigned char *image = malloc(bytes);

    memset(image, fill, bytes);
    kp_hash(image, bytes, hash);
    return image;
}

static int holds(struct kp_cache *cache, unsigned char fill, uint64_t bytes)
{
    uint8_t hash[KP_HASH_BYTES];
    unsigned char *image = image_of(fill, bytes, hash), *got = kp_cache_get(cache, hash, bytes);
    int right = got != NULL && memcmp(got, image, bytes) == 0 && got[bytes] == 0;

    free(image);
    free(got);
    return right;
}

static void keep(struct kp_cache *cache, unsigned char fill, uint64_t bytes)
{
    uint8_t hash[KP_HASH_BYTES];
    unsigned char *image = image_of(fill, bytes, hash);

    kp_cache_put(cache, hash, image, bytes);
    free(image);
}

static void other_process(struct kp_cache *cache, void (*act)(struct kp_cache *))
{
    pid_t pid = fork();

    if (pid == 0) {
        act(cache);
        _exit(0);
    }
    waitpid(pid, NULL, 0);
}

static void keeps_one(struct kp_cache *cache)
{
    keep(cache, 1, 5000);
}

static void dies_in_it(struct kp_cache *cache)
{
    enter(cache);
    memset(cache->entry, 0xff, sizeof cache->entry);
    cache->next = UINT64_MAX;
    raise(SIGKILL);
}

static void scribbles(struct kp_cache *cache)
{
    memset(cache->images, 0x55, 10000);
    cache->entry[0].at = UINT64_MAX;
}

static void all_cases(void)
{
    struct kp_cache *cache = kp_cache_new();
    uint8_t hash[KP_HASH_BYTES] = {0};

    check(cache != NULL, "no cache");
    check(!holds(cache, 1, 5000), "it has what nobody kept");
    other_process(cache, keeps_one);
    check(holds(cache, 1, 5000), "another process does not see it");
    check(!holds(cache, 1, 5001), "another length is another image");
    for (unsigned i = 2; i < 9; i++)
        keep(cache, (unsigned char)i, 9 * MIB);
    check(holds(cache, 8, 9 * MIB) && holds(cache, 3, 9 * MIB), "it holds less than it has room for");
    keep(cache, 9, 9 * MIB);
    check(holds(cache, 9, 9 * MIB) && !holds(cache, 1, 5000) && !holds(cache, 2, 9 * MIB), "the oldest make room");
    keep(cache, 10, KP_CACHE_BYTES);
    check(holds(cache, 10, KP_CACHE_BYTES) && !holds(cache, 9, 9 * MIB), "one as large as all of it");
    keep(cache, 11, KP_CACHE_BYTES + 1);
    check(!holds(cache, 11, KP_CACHE_BYTES + 1) && holds(cache, 10, KP_CACHE_BYTES), "one that is too large");
    for (unsigned i = 0; i < 3 * ENTRIES; i++)
        keep(cache, (unsigned char)i, 4096 + i);
    check(holds(cache, (unsigned char)(3 * ENTRIES - 1), 4096 + 3 * ENTRIES - 1), "more images than entries");
    other_process(cache, dies_in_it);
    check(!holds(cache, (unsigned char)(3 * ENTRIES - 1), 4096 + 3 * ENTRIES - 1), "what a killed session left is not trusted");
    keep(cache, 1, 5000);
    check(holds(cache, 1, 5000), "it goes on after that");
    other_process(cache, scribbles);
    check(!holds(cache, 1, 5000), "changed bytes are found out");
    check(kp_cache_get(NULL, hash, 10) == NULL && kp_cache_get(cache, hash, 0) == NULL, "nothing");
    kp_cache_put(NULL, hash, hash, 10);
}

int main(int argc, char **argv)
{
    static unsigned char data[1 << 16];
    uint8_t hash[KP_HASH_BYTES];
    FILE *file;

    if (argc < 3) {
        all_cases();
        return 0;
    }
    if ((file = fopen(argv[2], "rb")) == NULL)
        return 2;
    kp_hash(data, fread(data, 1, sizeof data, file), hash);
    fclose(file);
    for (unsigned i = 0; i < sizeof hash; i++)
        printf("%02x", hash[i]);
    return 0;
}

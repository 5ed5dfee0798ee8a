/* Cases of tests/dataplane/test_memory_api.py: stream-ordered allocation, pools, and memory that the program maps itself. Each
 * says what it computed, so that a run on the card's own driver and a remoted one can be compared line by line.
 *
 * usage: memory_cases KERNELS.ptx CASE
 */
#define _GNU_SOURCE
#include "guest.h"

enum { BYTES = 4 << 20, WORDS = BYTES / 4 };

void *library;
static char *kernels;
static unsigned back[WORDS];

static CUfunction named(const char *name)
{
    CUmodule module;
    CUfunction f;

    must(cuModuleLoadData, &module, kernels);
    must(cuModuleGetFunction, &f, module, name);
    return f;
}

static unsigned different(unsigned value)
{
    unsigned found = 0;

    for (unsigned i = 0; i < WORDS; i++)
        found += back[i] != value;
    return found;
}

static unsigned long long attribute(CUmemoryPool pool, int which)
{
    unsigned long long value = 0;

    must(cuMemPoolGetAttribute, pool, which, &value);
    return value;
}

/* Memory is had, used, freed and had again in the order of one stream, without anybody waiting. */
static void case_order(void)
{
    CUfunction late = named("late");
    CUstream stream;
    CUdeviceptr first, second, result;
    long rounds = 3000000;
    int value = 77;
    void *params[] = {&first, &value, &rounds};

    must(cuStreamCreate, &stream, 1u);
    must(cuMemAlloc_v2, &result, (size_t)BYTES);
    must(cuMemAllocAsync, &first, (size_t)BYTES, stream);
    must(cuMemsetD32Async, first, 5u, (size_t)WORDS, stream);
    must(cuLaunchKernel, late, 1u, 1u, 1u, 1u, 1u, 1u, 0u, stream, params, NULL);
    must(cuMemcpyDtoDAsync_v2, result, first, (size_t)BYTES, stream);
    must(cuMemFreeAsync, first, stream);
    must(cuMemAllocAsync, &second, (size_t)BYTES, stream);
    say("same_place", first == second);
    must(cuMemsetD32Async, second, 9u, (size_t)WORDS, stream);
    must(cuMemcpyDtoH_v2, back, result, (size_t)BYTES); /* of the default stream, which does not wait for this one */
    must(cuStreamSynchronize, stream);
    must(cuMemcpyDtoH_v2, back, result, (size_t)BYTES);
    say("kernel_wrote", back[0]);
    say("rest", different(5));
    must(cuMemcpyDtoH_v2, back, second, (size_t)BYTES);
    say("second", different(9));
    must(cuMemFreeAsync, second, stream);
    say("freed_twice", cu(cuMemFreeAsync, second, stream));
    say("synchronise", cu(cuStreamSynchronize, stream));
}

/* What another stream frees is not written to before its work is over. */
static void case_streams(void)
{
    CUfunction late = named("late");
    CUstream slow, fast;
    CUdeviceptr first, second, result;
    unsigned long long keep = 64 * MIB;
    long rounds = 20000000;
    int value = 77;
    CUmemoryPool pool;
    void *params[] = {&first, &value, &rounds};

    must(cuDeviceGetDefaultMemPool, &pool, 0);
    must(cuMemPoolSetAttribute, pool, 4, &keep);
    must(cuStreamCreate, &slow, 1u);
    must(cuStreamCreate, &fast, 1u);
    must(cuMemAlloc_v2, &result, (size_t)BYTES);
    must(cuMemAllocAsync, &first, (size_t)BYTES, slow);
    must(cuMemsetD32Async, first, 5u, (size_t)WORDS, slow);
    must(cuLaunchKernel, late, 1u, 1u, 1u, 1u, 1u, 1u, 0u, slow, params, NULL);
    must(cuMemcpyDtoDAsync_v2, result, first, (size_t)BYTES, slow);
    must(cuMemFreeAsync, first, slow);
    must(cuMemAllocAsync, &second, (size_t)BYTES, fast);
    must(cuMemsetD32Async, second, 9u, (size_t)WORDS, fast);
    must(cuStreamSynchronize, fast);
    must(cuMemcpyDtoH_v2, back, second, (size_t)BYTES);
    say("second", different(9));
    must(cuStreamSynchronize, slow);
    must(cuMemcpyDtoH_v2, back, result, (size_t)BYTES);
    say("kernel_wrote", back[0]);
    say("rest", different(5));
}

/* What a pool has, keeps and gives back. */
static void case_pools(void)
{
    CUmemPoolProps props = {.allocType = 1, .location = {.type = 1}, .maxSize = 32 * MIB};
    CUmemAccessDesc access = {.location = {.type = 1}, .flags = 3};
    CUmemoryPool usual, current, pool;
    CUdeviceptr at[5];
    size_t before, after, total;
    unsigned long long zero = 0, keep = 8 * MIB;
    int flag = 7;

    must(cuDeviceGetDefaultMemPool, &usual, 0);
    must(cuDeviceGetMemPool, &current, 0);
    say("default_is_current", usual == current);
    must(cuMemPoolCreate, &pool, &props);
    must(cuDeviceSetMemPool, 0, pool);
    must(cuDeviceGetMemPool, &current, 0);
    say("set", current == pool);
    must(cuMemPoolGetAttribute, pool, 1, &flag);
    say("follow_events", flag);
    must(cuMemGetInfo_v2, &before, &total);
    for (int i = 0; i < 3; i++)
        must(cuMemAllocAsync, &at[i], (size_t)(8 * MIB), NULL);
    must(cuMemAllocFromPoolAsync, &at[3], (size_t)(8 * MIB), pool, NULL);
    say("beyond_most", cu(cuMemAllocAsync, &at[4], (size_t)(8 * MIB), NULL));
    say("used", attribute(pool, 7));
    must(cuMemGetInfo_v2, &after, &total);
    say("taken", before - after);
    for (int i = 0; i < 4; i++)
        must(cuMemFreeAsync, at[i], NULL);
    say("used_after", attribute(pool, 7));
    say("used_high", attribute(pool, 8));
    must(cuMemPoolSetAttribute, pool, 8, &zero);
    say("used_high_reset", attribute(pool, 8));
    must(cuMemPoolSetAttribute, pool, 4, &keep);
    must(cuCtxSynchronize);
    say("kept", attribute(pool, 5));
    must(cuMemPoolTrimTo, pool, (size_t)0);
    say("trimmed", attribute(pool, 5));
    must(cuMemGetInfo_v2, &after, &total);
    say("all_back", before == after);
    say("access", cu(cuMemPoolSetAccess, pool, &access, (size_t)1));
    access.flags = 0;
    say("no_access", cu(cuMemPoolSetAccess, pool, &access, (size_t)1));
    flag = 0;
    must(cuMemPoolGetAccess, &flag, pool, &access.location);
    say("get_access", flag);
    must(cuMemAllocAsync, &at[0], (size_t)(2 * MIB), NULL);
    must(cuMemPoolDestroy, pool);
    must(cuDeviceGetMemPool, &current, 0);
    say("default_again", current == usual);
    say("from_destroyed", cu(cuMemAllocFromPoolAsync, &at[1], (size_t)64, pool, NULL));
    say("outlives_pool", cu(cuMemsetD8_v2, at[0], (unsigned char)1, (size_t)(2 * MIB)));
    must(cuMemFreeAsync, at[0], NULL);
    must(cuCtxSynchronize);
    must(cuMemGetInfo_v2, &after, &total);
    say("all_back_again", before == after);
    say("destroy_default", cu(cuMemPoolDestroy, usual));
    say("nothing", cu(cuMemAllocAsync, &at[0], (size_t)0, NULL));
    say("free_null", cu(cuMemFreeAsync, (CUdeviceptr)0, NULL));
    must(cuMemAllocAsync, &at[0], (size_t)1000, NULL);
    say("plain_free", cu(cuMemFree_v2, at[0]));
    say("freed_twice", cu(cuMemFree_v2, at[0]));
    must(cuMemAlloc_v2, &at[0], (size_t)1000);
    say("free_of_alloc", cu(cuMemFreeAsync, at[0], NULL));
    say("synchronise", cu(cuCtxSynchronize));
}

/* LOOPS times had, used and freed: how often the wire was waited for, the test asks of the shim. */
static void case_loop(void)
{
    int loops = atoi(getenv("LOOPS"));
    CUstream stream;
    CUdeviceptr at;

    must(cuStreamCreate, &stream, 1u);
    must(cuMemAllocAsync, &at, (size_t)100000, stream);
    must(cuMemFreeAsync, at, stream);
    for (int i = 0; i < loops; i++) {
        must(cuMemAllocAsync, &at, (size_t)(90000 + i), stream);
        must(cuMemsetD8Async, at, (unsigned char)i, (size_t)90000, stream);
        must(cuMemFreeAsync, at, stream);
    }
    must(cuStreamSynchronize, stream);
}

/* Reserve, create, map, use, map elsewhere, and all that is refused. */
static void case_vmm(void)
{
    CUmemAllocationProp prop = {.type = 1, .location = {.type = 1}}, got = {0};
    CUmemAccessDesc access = {.location = {.type = 1}, .flags = 3};
    CUmemGenericAllocationHandle one, two, same;
    CUdeviceptr space, other;
    size_t unit = 0, before, after, total, large = 4 * 2 * MIB;
    unsigned long long flags = 9;

    must(cuMemGetAllocationGranularity, &unit, &prop, 0);
    say("unit", unit);
    must(cuMemGetInfo_v2, &before, &total);
    must(cuMemAddressReserve, &space, large, (size_t)(8 * MIB), (CUdeviceptr)0, 0ull);
    say("aligned", space % (8 * MIB) == 0);
    must(cuMemAddressReserve, &other, unit, (size_t)0, (CUdeviceptr)0, 0ull);
    must(cuMemGetInfo_v2, &after, &total);
    say("space_is_free", before == after);
    must(cuMemCreate, &one, unit, &prop, 0ull);
    must(cuMemCreate, &two, unit, &prop, 0ull);
    must(cuMemGetInfo_v2, &after, &total);
    say("memory_is_not", before - after);
    say("unmapped_copy", cu(cuMemsetD32_v2, space, 1u, (size_t)1) != 0);
    must(cuMemMap, space, unit, (size_t)0, one, 0ull);
    must(cuMemMap, space + unit, unit, (size_t)0, two, 0ull);
    say("mapped_twice", cu(cuMemMap, space, unit, (size_t)0, two, 0ull));
    say("no_access_yet", cu(cuMemsetD32_v2, space, 1u, (size_t)1) != 0);
    must(cuMemSetAccess, space, 2 * unit, &access, (size_t)1);
    must(cuMemGetAccess, &flags, &access.location, space + 5);
    say("access", flags);
    say("across", cu(cuMemsetD32_v2, space, 6u, (size_t)WORDS));
    must(cuMemcpyDtoH_v2, back, space, (size_t)BYTES);
    say("different", different(6));
    say("beyond", cu(cuMemsetD8_v2, space + 2 * unit - 1, (unsigned char)1, (size_t)2));
    must(cuMemRetainAllocationHandle, &same, (void *)(uintptr_t)(space + unit));
    say("retained", same == two);
    must(cuMemGetAllocationPropertiesFromHandle, &got, same);
    say("properties", got.type == 1 && got.location.type == 1 && got.location.id == 0);
    must(cuMemRelease, two);
    must(cuMemRelease, two);
    say("released_thrice", cu(cuMemRelease, two));
    must(cuMemMap, other, unit, (size_t)0, one, 0ull);
    must(cuMemSetAccess, other, unit, &access, (size_t)1);
    must(cuMemsetD32_v2, other, 8u, (size_t)(WORDS / 2));
    must(cuMemcpyDtoH_v2, back, space, (size_t)BYTES);
    say("seen_in_both", back[0] + 100 * back[WORDS - 1]);
    say("free_of_mapped", cu(cuMemFree_v2, space));
    say("space_in_use", cu(cuMemAddressFree, space, large));
    say("part_of_mapping", cu(cuMemUnmap, space, unit / 2) != 0);
    must(cuMemUnmap, space, 2 * unit);
    must(cuMemGetInfo_v2, &after, &total);
    say("one_is_left", before - after);
    must(cuMemUnmap, other, unit);
    must(cuMemRelease, one);
    must(cuMemAddressFree, space, large);
    say("freed_twice", cu(cuMemAddressFree, space, large));
    must(cuMemAddressFree, other, unit);
    must(cuMemGetInfo_v2, &after, &total);
    say("all_back", before == after);
    say("odd_size", cu(cuMemCreate, &one, unit + 1, &prop, 0ull));
    prop.type = 0;
    say("no_type", cu(cuMemCreate, &one, unit, &prop, 0ull));
    say("synchronise", cu(cuCtxSynchronize));
}

static void read_kernels(const char *name)
{
    FILE *file = fopen(name, "rb");

    kernels = calloc(1, 1 << 20);
    if (file == NULL || kernels == NULL || fread(kernels, 1, (1 << 20) - 1, file) == 0)
        exit(9);
    fclose(file);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {
        {"order", case_order}, {"streams", case_streams}, {"pools", case_pools}, {"loop", case_loop}, {"vmm", case_vmm},
    };

    if (argc < 3 || (library = dlopen("libcuda.so.1", RTLD_NOW)) == NULL)
        return 2;
    read_kernels(argv[1]);
    start();
    for (unsigned i = 0; i < sizeof cases / sizeof cases[0]; i++)
        if (strcmp(cases[i].name, argv[2]) == 0) {
            cases[i].run();
            return 0;
        }
    return 2;
}

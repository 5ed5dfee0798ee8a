/* Cases of tests/dataplane/test_host_functions.py: functions of the program that a stream runs in its turn.
 *
 * usage: host_cases KERNELS.ptx CASE
 */
#define _GNU_SOURCE
#include <semaphore.h>
#include <stdatomic.h>

#include "guest.h"

enum { BYTES = 1 << 20 };

void *library;
static char *kernels;
static atomic_int turn;
static sem_t gate;
static pthread_t main_thread;

static CUfunction named(const char *name)
{
    CUmodule module;
    CUfunction f;

    must(cuModuleLoadData, &module, kernels);
    must(cuModuleGetFunction, &f, module, name);
    return f;
}

struct seen {
    int *memory, value, turn, other_thread;
};

static void look(void *data)
{
    struct seen *seen = data;

    seen->value = *seen->memory;
    *seen->memory += 1000;
    seen->turn = ++turn;
    seen->other_thread = !pthread_equal(pthread_self(), main_thread);
}

static void look_back(CUstream stream, CUresult status, void *data)
{
    look(data);
    printf("callback_stream=%d status=%d\n", stream != NULL, status);
}

/* A function sees what came before it, and what comes behind it sees what it did. */
static void case_order(void)
{
    CUfunction late = named("late");
    CUdeviceptr at;
    CUstream stream;
    long rounds = 5000000;
    int value = 77, *pinned;
    void *params[] = {&at, &value, &rounds};
    struct seen seen[3] = {{0}};

    must(cuStreamCreate, &stream, 1u);
    must(cuMemAlloc_v2, &at, (size_t)64);
    must(cuMemAllocHost_v2, (void **)&pinned, (size_t)64);
    for (int i = 0; i < 3; i++)
        seen[i].memory = pinned;
    must(cuLaunchKernel, late, 1u, 1u, 1u, 1u, 1u, 1u, 0u, stream, params, NULL);
    must(cuMemcpyDtoHAsync_v2, pinned, at, (size_t)4, stream);
    must(cuLaunchHostFunc, stream, look, &seen[0]);
    must(cuMemcpyHtoDAsync_v2, at, pinned, (size_t)4, stream);
    must(cuLaunchHostFunc, stream, look, &seen[1]);
    must(cuStreamAddCallback, stream, look_back, &seen[2], 0u);
    must(cuStreamSynchronize, stream);
    for (int i = 0; i < 3; i++)
        printf("seen=%d turn=%d elsewhere=%d\n", seen[i].value, seen[i].turn, seen[i].other_thread);
    must(cuMemcpyDtoH_v2, &value, at, (size_t)4);
    say("behind_the_first", value);
    say("no_function", cu(cuLaunchHostFunc, stream, NULL, NULL));
    say("flags", cu(cuStreamAddCallback, stream, look_back, NULL, 1u));
    say("no_stream", cu(cuLaunchHostFunc, (CUstream)(uintptr_t)0x123456, look, &seen[0]) == 400);
    say("synchronise", cu(cuCtxSynchronize));
}

static void wait_at_gate(void *data)
{
    sem_wait(&gate);
    ++*(int *)data;
}

/* While a function runs the stream waits, the program goes on: launches, copies from plain memory, another stream's results. */
static void case_meanwhile(void)
{
    CUfunction set = named("set");
    CUdeviceptr at, other;
    CUstream held, free_one;
    unsigned char *bytes = malloc(BYTES), *back = malloc(BYTES);
    int value = 5, n = 16, called = 0, got[16];
    void *params[] = {&at, &value, &n};

    sem_init(&gate, 0, 0);
    must(cuStreamCreate, &held, 1u);
    must(cuStreamCreate, &free_one, 1u);
    must(cuMemAlloc_v2, &at, (size_t)64);
    must(cuMemAlloc_v2, &other, (size_t)BYTES);
    must(cuLaunchHostFunc, held, wait_at_gate, &called);
    must(cuLaunchKernel, set, 1u, 1u, 1u, 16u, 1u, 1u, 0u, held, params, NULL);
    say("held", cu(cuStreamQuery, held));
    memset(bytes, 3, BYTES);
    must(cuMemcpyHtoDAsync_v2, other, bytes, (size_t)BYTES, free_one);
    must(cuMemcpyDtoHAsync_v2, back, other, (size_t)BYTES, free_one);
    must(cuStreamSynchronize, free_one);
    say("others_go_on", memcmp(bytes, back, BYTES) == 0);
    for (int i = 0; i < 12; i++) /* more than the session has places to stage them in */
        must(cuMemcpyHtoDAsync_v2, other, bytes, (size_t)BYTES, held);
    say("still", called);
    sem_post(&gate);
    must(cuStreamSynchronize, held);
    say("called", called);
    must(cuMemcpyDtoH_v2, got, at, sizeof got);
    say("set", got[15]);
}

static void add_one(void *data)
{
    ++*(int *)data;
}

/* 2,000 of them in two streams, none lost and none twice. */
static void case_many(void)
{
    CUstream streams[2];
    int counts[2] = {0, 0}, more = 0;

    for (int i = 0; i < 2; i++)
        must(cuStreamCreate, &streams[i], 1u);
    for (int i = 0; i < 2000; i++)
        must(cuLaunchHostFunc, streams[i % 2], add_one, &counts[i % 2]);
    must(cuCtxSynchronize);
    printf("counts=%d %d\n", counts[0], counts[1]);
    for (int i = 0; i < 50; i++)
        must(cuLaunchHostFunc, streams[0], add_one, &more);
    must(cuStreamSynchronize, streams[0]);
    say("more", more);
}

static void told(CUstream stream, CUresult status, void *data)
{
    (void)stream;
    *(int *)data = status;
}

/* After a fault only callbacks are called, with its code; a function that waits then is not. */
static void case_trap(void)
{
    CUfunction trap = named("trap");
    CUstream stream;
    int status = -1, called = 0;

    must(cuStreamCreate, &stream, 1u);
    must(cuLaunchKernel, trap, 1u, 1u, 1u, 1u, 1u, 1u, 0u, stream, NULL, NULL);
    cu(cuLaunchHostFunc, stream, add_one, &called); /* told of the fault already, or not yet */
    if (cu(cuStreamAddCallback, stream, told, &status, 0u) != 0)
        status = 719;
    say("synchronise", cu(cuStreamSynchronize, stream));
    for (int i = 0; i < 500 && status == -1; i++)
        usleep(10000);
    printf("status=%d called=%d\n", status, called);
}

/* Both contexts are of the one card. */
static void case_peer(void)
{
    CUcontext first, second, popped;
    CUdeviceptr from, to;
    unsigned char *bytes = malloc(BYTES), *back = malloc(BYTES);

    must(cuCtxGetCurrent, &first);
    for (int i = 0; i < BYTES; i++)
        bytes[i] = (unsigned char)(i * 7);
    must(cuMemAlloc_v2, &from, (size_t)BYTES);
    must(cuMemcpyHtoD_v2, from, bytes, (size_t)BYTES);
    must(cuCtxCreate_v2, &second, 0u, 0);
    must(cuMemAlloc_v2, &to, (size_t)BYTES);
    say("peer", cu(cuMemcpyPeer, to, second, from, first, (size_t)BYTES));
    must(cuMemcpyDtoH_v2, back, to, (size_t)BYTES);
    say("same", memcmp(bytes, back, BYTES) == 0);
    must(cuMemsetD8_v2, to, (unsigned char)0, (size_t)BYTES);
    say("async", cu(cuMemcpyPeerAsync, to, second, from, first, (size_t)(BYTES / 2), NULL));
    must(cuMemcpyDtoH_v2, back, to, (size_t)BYTES);
    say("half", memcmp(bytes, back, BYTES / 2) == 0 && back[BYTES - 1] == 0);
    CUDA_MEMCPY3D box = {.srcMemoryType = 2, .srcDevice = from, .reserved0 = first, .srcPitch = 1000, .srcHeight = 10, .dstMemoryType = 2,
                         .dstDevice = to, .reserved1 = second, .dstPitch = 1024, .dstHeight = 20, .WidthInBytes = 900, .Height = 9, .Depth = 5};
    say("box", cu(cuMemcpy3DPeer, &box));
    must(cuMemcpyDtoH_v2, back, to, (size_t)BYTES);
    say("row", memcmp(back + 2 * 20 * 1024 + 3 * 1024, bytes + 2 * 10 * 1000 + 3 * 1000, 900) == 0);
    say("beyond", cu(cuMemcpyPeer, to, second, from, first, (size_t)BYTES + 1));
    say("prefetch", cu(cuMemPrefetchAsync, to, (size_t)BYTES, 0, NULL));
    say("advise", cu(cuMemAdvise, to, (size_t)BYTES, 1, 0));
    must(cuCtxPopCurrent_v2, &popped);
    must(cuCtxDestroy_v2, second);
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
        {"order", case_order}, {"meanwhile", case_meanwhile}, {"many", case_many}, {"fault", case_trap}, {"peer", case_peer},
    };

    setvbuf(stdout, NULL, _IOLBF, 0);
    main_thread = pthread_self();
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

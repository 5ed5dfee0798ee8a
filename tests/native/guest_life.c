/* Cases of test_shim_life.py: threads, processes, and connections that end. */
#define _GNU_SOURCE
#include "guest.h"

void case_batch(int launches, int synchronises)
{
    start();
    CUfunction none = kernel("none");

    for (int i = 0; i < launches; i++)
        if (launch(none, NULL, NULL, NULL) != 0)
            exit(7);
    for (int i = 0; i < synchronises; i++)
        must(cuCtxSynchronize);
}

/* One launch and then nothing: the flusher alone must bring it to the card. */
void case_unflushed(void)
{
    CUstream stream;

    start();
    must(cuStreamCreate, &stream, 0u);
    puts("waiting=1");
    fflush(stdout);
    getchar();
}

void case_fork(void)
{
    int status, count;
    CUdeviceptr at;
    pid_t child;
    CUstream stream;

    start();
    must(cuMemAlloc_v2, &at, (size_t)100);
    must(cuStreamCreate, &stream, 0u);
    puts("waiting=1");
    fflush(stdout);
    getchar();
    if ((child = fork()) == 0) {
        say("child_alloc", cu(cuMemAlloc_v2, &at, (size_t)100));
        say("child_init", cu(cuInit, 0u));
        say("child_count", cu(cuDeviceGetCount, &count));
        exit(0); /* runs the child's destructors: they must not end the parent's session */
    }
    waitpid(child, &status, 0);
    say("child_exit", WIFEXITED(status) ? WEXITSTATUS(status) : 255);
    say("parent", cu(cuMemAlloc_v2, &at, (size_t)100));
    say("parent_synchronise", cu(cuCtxSynchronize));
}

static CUcontext shared_context;
static CUstream shared_stream;

static void *synchronise(void *unused)
{
    (void)unused;
    must(cuCtxSetCurrent, shared_context);
    return (void *)(intptr_t)cu(cuStreamSynchronize, shared_stream);
}

/* A thread waits for a kernel that does not end; the others work, then the gate is opened. */
void case_threads(const char *gate)
{
    pthread_t waiting[3];
    struct timespec begin, end;
    CUdeviceptr at, more;
    size_t room, total;
    int64_t worst = 0;
    void *result;

    shared_context = start();
    must(cuStreamCreate, &shared_stream, 1u);
    must(cuMemAlloc_v2, &at, (size_t)100);
    CUfunction block = kernel("block");
    must(cuCtxSynchronize);
    launch(block, shared_stream, NULL, NULL);
    for (int i = 0; i < 3; i++)
        pthread_create(&waiting[i], NULL, synchronise, NULL);
    usleep(100000);
    for (int i = 0; i < 10; i++) {
        clock_gettime(CLOCK_MONOTONIC, &begin);
        must(cuMemGetInfo_v2, &room, &total);
        must(cuMemcpyHtoD_v2, at, "x", (size_t)1);
        must(cuMemAlloc_v2, &more, (size_t)(3 * MIB));
        must(cuMemFree_v2, more);
        clock_gettime(CLOCK_MONOTONIC, &end);
        int64_t ns = (end.tv_sec - begin.tv_sec) * 1000000000 + end.tv_nsec - begin.tv_nsec;
        worst = ns > worst ? ns : worst;
    }
    say("worst_us", worst / 1000);
    say("free_meanwhile", room);
    say("still_running", cu(cuStreamQuery, shared_stream));
    fclose(fopen(gate, "w"));
    for (int i = 0; i < 3; i++) {
        pthread_join(waiting[i], &result);
        say("waited", (intptr_t)result);
    }
}

/* The test ends the worker's session at "ready", and lets the program go on by a line on its input. */
void case_lost(void)
{
    CUcontext context = start();
    CUdeviceptr at;
    int count;

    must(cuMemAlloc_v2, &at, (size_t)100);
    puts("ready=1");
    fflush(stdout);
    getchar();
    say("synchronise", cu(cuCtxSynchronize));
    say("alloc", cu(cuMemAlloc_v2, &at, (size_t)100));
    say("memset", cu(cuMemsetD8Async, at, (unsigned char)1, (size_t)1, NULL));
    say("count", cu(cuDeviceGetCount, &count));
    say("destroy", cu(cuCtxDestroy_v2, context));
    say("create", cu(cuCtxCreate_v2, &context, 0u, 0));
    say("alloc_in_new", cu(cuMemAlloc_v2, &at, (size_t)100));
    say("memset_in_new", cu(cuMemsetD8Async, at, (unsigned char)1, (size_t)1, NULL));
    say("synchronise_new", cu(cuCtxSynchronize));
}

static void *own_stream(void *unused)
{
    (void)unused;
    must(cuCtxSetCurrent, shared_context);
    must(cuStreamQuery_ptsz, (CUstream)NULL);
    must(cuStreamSynchronize, CU_STREAM_PER_THREAD);
    return NULL;
}

void case_per_thread(void)
{
    pthread_t thread;

    shared_context = start();
    must(cuStreamSynchronize, (CUstream)NULL);
    for (int i = 0; i < 2; i++) {
        pthread_create(&thread, NULL, own_stream, NULL);
        pthread_join(thread, NULL);
    }
}

void case_init(void)
{
    int count;

    say("init", cu(cuInit, 0u));
    say("count", cu(cuDeviceGetCount, &count));
}

static int stress_failed;

/* Allocates, copies, computes and frees, in the shared context and with the thread's own stream and memory. */
static void *stress(void *seed)
{
    unsigned host[256], back[256], n = 256, value = (unsigned)(uintptr_t)seed;
    CUdeviceptr at;
    CUstream stream;
    void *params[] = {&at, &n, &value};

    must(cuCtxSetCurrent, shared_context);
    must(cuStreamCreate, &stream, 1u);
    CUfunction fill = kernel("fill");
    for (int round = 0; round < 100; round++, value++) {
        must(cuMemAlloc_v2, &at, (size_t)(round % 3 == 0 ? 3 * MIB : sizeof host));
        memset(host, round, sizeof host);
        must(cuMemcpyHtoDAsync_v2, at, host, sizeof host, stream);
        must(cuMemcpyDtoHAsync_v2, back, at, sizeof back, stream);
        if (memcmp(host, back, sizeof host) != 0)
            __atomic_store_n(&stress_failed, 1, __ATOMIC_SEQ_CST);
        must(cuLaunchKernel, fill, 1u, 1u, 1u, 1u, 1u, 1u, 0u, stream, params, NULL);
        must(cuMemcpyDtoHAsync_v2, back, at, sizeof back, stream);
        if (back[0] != value || back[255] != value + 255)
            __atomic_store_n(&stress_failed, 1, __ATOMIC_SEQ_CST);
        must(cuMemFree_v2, at);
        must(cuStreamQuery_ptsz, (CUstream)NULL);
    }
    must(cuStreamDestroy_v2, stream);
    return NULL;
}

void case_stress(int threads)
{
    pthread_t running[16];
    size_t room, total;

    shared_context = start();
    for (int i = 0; i < threads && i < 16; i++)
        pthread_create(&running[i], NULL, stress, (void *)(uintptr_t)(i * 1000));
    for (int i = 0; i < threads && i < 16; i++)
        pthread_join(running[i], NULL);
    say("failed", stress_failed);
    must(cuMemGetInfo_v2, &room, &total);
    say("all_free", room == total);
}

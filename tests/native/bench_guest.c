/* What calls over the shim cost, beside the bare socket in the same run: `name=value` lines, nanoseconds or bytes a second. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cuda_abi.h"

#define CALLS 2000
#define BURST 10000
#define BURSTS 11
#define BULK (64u << 20)
#define CHUNK (1u << 20)
#define COPIES 7
#define MESSAGE 40 /* bytes of a small call and of its reply, about */

static void *library;

#define cu(name, ...) (((CUresult(*)())dlsym(library, #name))(__VA_ARGS__))
#define must(name, ...)                                                                                                  \
    do {                                                                                                                 \
        CUresult must_result = cu(name, ##__VA_ARGS__);                                                                  \
        if (must_result != 0) {                                                                                          \
            printf("failed=%s: %d\n", #name, must_result);                                                               \
            exit(1);                                                                                                     \
        }                                                                                                                \
    } while (0)

static int64_t now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
}

static int compare(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

    return (x > y) - (x < y);
}

static void say_median(const char *name, int64_t *samples, int n)
{
    qsort(samples, (size_t)n, sizeof *samples, compare);
    printf("%s=%lld\n", name, (long long)samples[n / 2]);
}

static void move(int fd, char *memory, size_t bytes, int out)
{
    while (bytes > 0) {
        size_t part = bytes < CHUNK ? bytes : CHUNK;
        ssize_t n = out ? write(fd, memory, part) : read(fd, memory, part);
        if (n <= 0)
            exit(2);
        memory += n;
        bytes -= (size_t)n;
    }
}

/* Where BENCH_PIN is set: one side a processor. */
static void pin(int processor)
{
    cpu_set_t set;

    CPU_ZERO(&set);
    CPU_SET(processor, &set);
    if (getenv("BENCH_PIN") != NULL && sched_setaffinity(0, sizeof set, &set) != 0)
        exit(3);
}

/* The other end of the bare socket: echoes CALLS messages, then takes COPIES streams and says so after each. */
static void echo(int fd, char *memory)
{
    for (int i = 0; i < CALLS; i++) {
        move(fd, memory, MESSAGE, 0);
        move(fd, memory, MESSAGE, 1);
    }
    for (int i = 0; i < COPIES; i++) {
        move(fd, memory, BULK, 0);
        move(fd, memory, 1, 1);
    }
    _exit(0);
}

static void bench_socket(char *memory)
{
    static int64_t samples[CALLS];
    int pair[2];

    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0)
        exit(2);
    if (fork() == 0) {
        pin(1);
        echo(pair[1], memory);
    }
    for (int i = 0; i < CALLS; i++) {
        int64_t begin = now();
        move(pair[0], memory, MESSAGE, 1);
        move(pair[0], memory, MESSAGE, 0);
        samples[i] = now() - begin;
    }
    say_median("socket_call", samples, CALLS);
    for (int i = 0; i < COPIES; i++) {
        int64_t begin = now();
        move(pair[0], memory, BULK, 1);
        move(pair[0], memory, 1, 0);
        samples[i] = now() - begin;
    }
    say_median("socket_bulk", samples, COPIES);
    wait(NULL);
}

/* A word that one side waits for with a futex, as a ring does at the least. */
struct bell {
    _Alignas(64) uint32_t turn;
    char message[MESSAGE];
};

static void await_turn(uint32_t *turn, uint32_t wanted)
{
    uint32_t seen;

    while ((seen = __atomic_load_n(turn, __ATOMIC_SEQ_CST)) != wanted)
        syscall(SYS_futex, turn, FUTEX_WAIT, seen, NULL, NULL, 0);
}

static void give_turn(uint32_t *turn, uint32_t value)
{
    __atomic_store_n(turn, value, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, turn, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static void bench_futex(char *memory)
{
    static int64_t samples[CALLS];
    struct bell *bell = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (fork() == 0) {
        pin(1);
        for (uint32_t i = 0; i < CALLS; i++) {
            await_turn(&bell[0].turn, i + 1);
            memcpy(memory, bell[0].message, MESSAGE);
            memcpy(bell[1].message, memory, MESSAGE);
            give_turn(&bell[1].turn, i + 1);
        }
        _exit(0);
    }
    for (uint32_t i = 0; i < CALLS; i++) {
        int64_t begin = now();
        memcpy(bell[0].message, memory, MESSAGE);
        give_turn(&bell[0].turn, i + 1);
        await_turn(&bell[1].turn, i + 1);
        memcpy(memory, bell[1].message, MESSAGE);
        samples[i] = now() - begin;
    }
    say_median("futex_call", samples, CALLS);
    wait(NULL);
}

static void bench_memcpy(char *memory)
{
    static int64_t samples[COPIES];
    char *to = malloc(BULK);

    memset(to, 2, BULK);
    for (int i = 0; i < COPIES; i++) {
        int64_t begin = now();
        memcpy(to, memory, BULK);
        samples[i] = now() - begin;
        memory[i]++;
    }
    say_median("memcpy", samples, COPIES);
    printf("sum=%d\n", to[BULK / 2]);
    free(to);
}

static void bench_calls(CUfunction none)
{
    static int64_t samples[CALLS];
    size_t room, total;
    CUdeviceptr at;
    CUresult (*info)(size_t *, size_t *);

    *(void **)&info = dlsym(library, "cuMemGetInfo_v2");
    for (int i = 0; i < CALLS; i++) {
        int64_t begin = now();
        if (info(&room, &total) != 0)
            exit(1);
        samples[i] = now() - begin;
    }
    say_median("call", samples, CALLS);
    CUresult (*launch)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **);
    *(void **)&launch = dlsym(library, "cuLaunchKernel");
    for (int i = 0; i < BURSTS; i++) {
        int64_t begin = now();
        for (int n = 0; n < BURST; n++)
            launch(none, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL);
        samples[i] = (now() - begin) / BURST;
        must(cuCtxSynchronize);
    }
    say_median("launch", samples, BURSTS);
    for (int i = 0; i < CALLS / 10; i++) {
        int64_t begin = now();
        must(cuMemAlloc_v2, &at, (size_t)4096);
        must(cuMemFree_v2, at);
        samples[i] = now() - begin;
    }
    say_median("alloc_free", samples, CALLS / 10);
}

static void bench_copies(char *memory)
{
    int64_t in[COPIES], out[COPIES];
    CUdeviceptr at;

    must(cuMemAlloc_v2, &at, (size_t)BULK);
    for (int i = 0; i < COPIES; i++) {
        int64_t begin = now();
        must(cuMemcpyHtoD_v2, at, memory, (size_t)BULK);
        must(cuCtxSynchronize);
        in[i] = now() - begin;
        begin = now();
        must(cuMemcpyDtoH_v2, memory, at, (size_t)BULK);
        out[i] = now() - begin;
    }
    say_median("bulk_in", in, COPIES);
    say_median("bulk_out", out, COPIES);
}

int main(void)
{
    char *memory = malloc(BULK);
    CUcontext context;
    CUmodule module;
    CUfunction none;

    if (memory == NULL || (library = dlopen("libcuda.so.1", RTLD_NOW)) == NULL)
        return 2;
    memset(memory, 1, BULK);
    setvbuf(stdout, NULL, _IOLBF, 0);
    pin(0);
    bench_socket(memory);
    bench_futex(memory);
    bench_memcpy(memory);
    must(cuInit, 0u);
    must(cuCtxCreate_v2, &context, 0u, 0);
    must(cuModuleLoadData, &module, "ptx");
    must(cuModuleGetFunction, &none, module, "none");
    bench_calls(none);
    bench_copies(memory);
    return 0;
}

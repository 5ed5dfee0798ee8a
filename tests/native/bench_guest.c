/* What calls over the shim cost, beside the bare thing in the same run and in turn with it: `name=value` lines, nanoseconds.
 *
 * The bare things: a message and back over a unix socket, TCP and a futex; a stream over the two; memcpy. BENCH_PIN puts the
 * other side of them on the second processor and this side on the first.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <linux/futex.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "cuda_abi.h"

#define BLOCKS 10 /* of calls, each of every kind in turn */
#define CALLS 200 /* in a block */
#define BURST 10000
#define BURSTS 11
#define BULK (256u << 20)
#define CHUNK (1u << 20)
#define COPIES 5
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

/* A bare side: a socket, or a word for each direction that a futex waits for, as a ring does at the least. */
struct bell {
    _Alignas(64) uint32_t turn;
    char message[MESSAGE];
};
static int unix_side, tcp_side;
static struct bell *bells;
static uint32_t turn;

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

static void pin(int processor)
{
    if (processor != 0)
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* the other side does not outlive this one */
    cpu_set_t set;

    CPU_ZERO(&set);
    CPU_SET(processor, &set);
    if (getenv("BENCH_PIN") != NULL && sched_setaffinity(0, sizeof set, &set) != 0)
        exit(3);
}

static void move(int fd, char *memory, size_t bytes, int out)
{
    while (bytes > 0) {
        size_t part = bytes < CHUNK ? bytes : CHUNK;
        ssize_t n = out ? write(fd, memory, part) : read(fd, memory, part);
        if (n <= 0)
            _exit(0); /* the end of the other side */
        memory += n;
        bytes -= (size_t)n;
    }
}

/* The other end of a bare socket: gives a message back; after one that begins with 'b', takes BULK and says so. */
static void echo(int fd, char *memory)
{
    pin(1);
    for (;;) {
        move(fd, memory, MESSAGE, 0);
        if (memory[0] == 'b') {
            move(fd, memory, BULK, 0);
            move(fd, memory, 1, 1);
        } else {
            move(fd, memory, MESSAGE, 1);
        }
    }
}

static void await_turn(uint32_t *word, uint32_t wanted)
{
    uint32_t seen;

    while ((seen = __atomic_load_n(word, __ATOMIC_SEQ_CST)) != wanted)
        syscall(SYS_futex, word, FUTEX_WAIT, seen, NULL, NULL, 0);
}

static void give_turn(uint32_t *word, uint32_t value)
{
    __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static void answer_bells(char *memory)
{
    pin(1);
    for (uint32_t i = 1; i <= BLOCKS * CALLS; i++) {
        await_turn(&bells[0].turn, i);
        memcpy(memory, bells[0].message, MESSAGE);
        memcpy(bells[1].message, memory, MESSAGE);
        give_turn(&bells[1].turn, i);
    }
    _exit(0);
}

static void tcp_pair(int pair[2])
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;

    if (bind(listener, (struct sockaddr *)&address, length) != 0 || listen(listener, 1) != 0)
        exit(2);
    getsockname(listener, (struct sockaddr *)&address, &length);
    pair[0] = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(pair[0], (struct sockaddr *)&address, length) != 0 || (pair[1] = accept(listener, NULL, NULL)) < 0)
        exit(2);
    for (int i = 0; i < 2; i++)
        setsockopt(pair[i], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    close(listener);
}

static int start_echo(int pair[2], char *memory)
{
    if (fork() == 0) {
        close(pair[0]);
        echo(pair[1], memory);
    }
    close(pair[1]);
    return pair[0];
}

static void start_bare(char *memory)
{
    int pair[2];

    bells = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (bells == MAP_FAILED || socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0)
        exit(2);
    unix_side = start_echo(pair, memory);
    tcp_pair(pair);
    tcp_side = start_echo(pair, memory);
    if (fork() == 0)
        answer_bells(memory); /* for ever, where no call is measured: it dies with us */
}

static void socket_call(int fd, char *memory)
{
    memory[0] = 'c';
    move(fd, memory, MESSAGE, 1);
    move(fd, memory, MESSAGE, 0);
}

static void socket_bulk(int fd, char *memory)
{
    memory[0] = 'b';
    move(fd, memory, MESSAGE, 1);
    move(fd, memory, BULK, 1);
    move(fd, memory, 1, 0);
}

static void futex_call(char *memory)
{
    turn++;
    memcpy(bells[0].message, memory, MESSAGE);
    give_turn(&bells[0].turn, turn);
    await_turn(&bells[1].turn, turn);
    memcpy(memory, bells[1].message, MESSAGE);
}

static void bench_calls(char *memory)
{
    enum { UNIX, TCP, FUTEX, OURS, KINDS };
    static const char *const names[] = {"unix_call", "tcp_call", "futex_call", "call"};
    static int64_t samples[KINDS][BLOCKS * CALLS];
    CUresult (*info)(size_t *, size_t *);
    size_t room, total;

    *(void **)&info = dlsym(library, "cuMemGetInfo_v2");
    for (int block = 0; block < BLOCKS; block++)
        for (int kind = 0; kind < KINDS; kind++)
            for (int i = 0; i < CALLS; i++) {
                int64_t begin = now();
                switch (kind) {
                case UNIX: socket_call(unix_side, memory); break;
                case TCP: socket_call(tcp_side, memory); break;
                case FUTEX: futex_call(memory); break;
                default:
                    if (info(&room, &total) != 0)
                        exit(1);
                }
                samples[kind][block * CALLS + i] = now() - begin;
            }
    for (int kind = 0; kind < KINDS; kind++)
        say_median(names[kind], samples[kind], BLOCKS * CALLS);
}

static void bench_launches(CUfunction none)
{
    static int64_t samples[BLOCKS * CALLS];
    CUresult (*launch)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **);
    CUdeviceptr at;

    *(void **)&launch = dlsym(library, "cuLaunchKernel");
    for (int i = 0; i < BURSTS; i++) {
        int64_t begin = now();
        for (int n = 0; n < BURST; n++)
            launch(none, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL);
        samples[i] = (now() - begin) / BURST;
        must(cuCtxSynchronize);
    }
    say_median("launch", samples, BURSTS);
    for (int i = 0; i < CALLS; i++) {
        int64_t begin = now();
        must(cuMemAlloc_v2, &at, (size_t)4096);
        must(cuMemFree_v2, at);
        samples[i] = now() - begin;
    }
    say_median("alloc_free", samples, CALLS);
}

static void bench_copies(char *memory, char *other)
{
    enum { UNIX, TCP, MEMCPY, IN, OUT, PLAIN_IN, PLAIN_OUT, KINDS };
    static const char *const names[] = {"unix_bulk", "tcp_bulk", "memcpy", "bulk_in", "bulk_out", "plain_in", "plain_out"};
    int64_t samples[KINDS][COPIES];
    CUdeviceptr at;
    void *pinned;

    must(cuMemAlloc_v2, &at, (size_t)BULK);
    must(cuMemAllocHost_v2, &pinned, (size_t)BULK);
    memset(pinned, 3, BULK);
    for (int i = 0; i < COPIES; i++)
        for (int kind = 0; kind < KINDS; kind++) {
            int64_t begin = now();
            switch (kind) {
            case UNIX: socket_bulk(unix_side, memory); break;
            case TCP: socket_bulk(tcp_side, memory); break;
            case MEMCPY: memcpy(other, memory, BULK); break;
            case IN: must(cuMemcpyHtoD_v2, at, pinned, (size_t)BULK); break;
            case PLAIN_IN: must(cuMemcpyHtoD_v2, at, memory, (size_t)BULK); break;
            case OUT: must(cuMemcpyDtoH_v2, pinned, at, (size_t)BULK); break;
            default: must(cuMemcpyDtoH_v2, memory, at, (size_t)BULK);
            }
            must(cuCtxSynchronize);
            samples[kind][i] = now() - begin;
        }
    for (int kind = 0; kind < KINDS; kind++)
        say_median(names[kind], samples[kind], COPIES);
    printf("sum=%d\n", other[BULK / 2]); /* what was copied is used */
}

int main(int argc, char **argv)
{
    char *memory = malloc(BULK), *other = malloc(BULK);
    CUcontext context;
    CUmodule module;
    CUfunction none;

    if (memory == NULL || other == NULL || (library = dlopen("libcuda.so.1", RTLD_NOW)) == NULL)
        return 2;
    memset(memory, 1, BULK);
    memset(other, 2, BULK);
    (void)argv; /* with an argument: copies only */
    setvbuf(stdout, NULL, _IOLBF, 0);
    pin(0);
    start_bare(memory);
    must(cuInit, 0u);
    must(cuCtxCreate_v2, &context, 0u, 0);
    must(cuModuleLoadData, &module, "ptx");
    must(cuModuleGetFunction, &none, module, "none");
    if (argc == 1) {
        bench_calls(memory);
        bench_launches(none);
    }
    bench_copies(memory, other);
    return 0;
}

/* Copies page-locked memory to the card and back, in pieces that fit nothing, and says what a copy and a waiting call take.
 * Arguments: bytes; "hold" to go on until standard input ends. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int cuInit(unsigned flags);
int cuCtxCreate_v2(void **context, unsigned flags, int device);
int cuMemAlloc_v2(unsigned long long *pointer, size_t bytes);
int cuMemAllocHost_v2(void **pointer, size_t bytes);
int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t bytes);
int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t bytes);
int cuMemGetInfo_v2(size_t *room, size_t *total);

#define PIECE 1000003 /* a prime: no boundary of any buffer is met */
#define ROUNDS 15

#define must(call)                                                                                                       \
    do {                                                                                                                 \
        int code = (call);                                                                                               \
        if (code) {                                                                                                      \
            printf("FAIL %s: %d\n", #call, code);                                                                        \
            exit(1);                                                                                                     \
        }                                                                                                                \
    } while (0)

static long long now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
}

static int compare(const void *a, const void *b)
{
    long long x = *(const long long *)a, y = *(const long long *)b;

    return (x > y) - (x < y);
}

static void say_median(const char *name, long long samples[ROUNDS])
{
    qsort(samples, ROUNDS, sizeof *samples, compare);
    printf("%s=%lld\n", name, samples[ROUNDS / 2]);
}

int main(int argc, char **argv)
{
    size_t bytes = argc > 1 ? strtoul(argv[1], NULL, 10) : 1 << 20, room, total;
    long long call[ROUNDS], in[ROUNDS], out[ROUNDS];
    unsigned long long memory;
    unsigned char *from, *to;
    uint32_t state = (uint32_t)getpid();
    void *context;

    must(cuInit(0));
    must(cuCtxCreate_v2(&context, 0, 0));
    must(cuMemAlloc_v2(&memory, bytes));
    must(cuMemAllocHost_v2((void **)&from, bytes));
    must(cuMemAllocHost_v2((void **)&to, bytes));
    for (int round = 0; round < ROUNDS; round++) {
        for (size_t i = 0; i < bytes; i++)
            from[i] = (unsigned char)((state = state * 1664525u + 1013904223u) >> 24);
        memset(to, 0, bytes);
        long long begin = now();
        must(cuMemGetInfo_v2(&room, &total));
        call[round] = now() - begin;
        begin = now();
        for (size_t at = 0; at < bytes; at += PIECE)
            must(cuMemcpyHtoD_v2(memory + at, from + at, bytes - at < PIECE ? bytes - at : PIECE));
        in[round] = now() - begin;
        begin = now();
        must(cuMemcpyDtoH_v2(to, memory, bytes));
        out[round] = now() - begin;
        if (memcmp(from, to, bytes)) {
            printf("FAIL round %d: other bytes came back\n", round);
            return 1;
        }
    }
    printf("PASS\n");
    say_median("call_ns", call);
    say_median("in_ns", in);
    say_median("out_ns", out);
    fflush(stdout);
    while (argc > 2 && getchar() != EOF)
        ;
    return 0;
}

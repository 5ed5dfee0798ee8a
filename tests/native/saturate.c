/* saturate.c: a guest program that always has work on the card. Prints "launches=N wrong=M".
 *
 * usage: saturate SECONDS ROUNDS [AHEAD [graph]]: launches a kernel of ROUNDS rounds, at most AHEAD not yet over, for SECONDS; each
 * writes what it computed, which is compared with the same computed here. "graph": what is launched is a graph of GRAPH_KERNELS of
 * them. "hang" for SECONDS: launches once and waits; prints its result.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef void *handle;
int cuInit(unsigned);
int cuDeviceGet(int *, int);
int cuCtxCreate_v2(handle *, unsigned, int);
int cuCtxSynchronize(void);
int cuModuleLoadData(handle *, const void *);
int cuModuleGetFunction(handle *, handle, const char *);
int cuMemAlloc_v2(unsigned long long *, size_t);
int cuMemcpyDtoH_v2(void *, unsigned long long, size_t);
int cuEventCreate(handle *, unsigned);
int cuEventRecord(handle, handle);
int cuEventSynchronize(handle);
int cuStreamCreate(handle *, unsigned);
int cuStreamBeginCapture_v2(handle, int);
int cuStreamEndCapture(handle, handle *);
int cuGraphInstantiateWithFlags(handle *, handle, unsigned long long);
int cuGraphLaunch(handle, handle);
int cuLaunchKernel(handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle, void **, void **);

static const char ptx[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry spin(.param .u64 out, .param .u32 rounds)\n{\n"
    ".reg .b64 %rd<3>;\n.reg .b32 %r<6>;\n.reg .pred %p<2>;\n"
    "ld.param.u64 %rd1, [out];\nld.param.u32 %r1, [rounds];\nmov.u32 %r2, 1;\nmov.u32 %r3, 0;\n"
    "LOOP:\nmad.lo.s32 %r2, %r2, 1664525, 1013904223;\nshr.u32 %r4, %r2, 7;\nxor.b32 %r2, %r2, %r4;\nadd.s32 %r3, %r3, 1;\n"
    "setp.lt.u32 %p1, %r3, %r1;\n@%p1 bra LOOP;\nst.global.u32 [%rd1], %r2;\nret;\n}\n";

#define CHECK(call) do { int rc_ = (call); if (rc_) { printf("%s=%d\n", #call, rc_); return 1; } } while (0)

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static uint32_t expected(uint32_t rounds)
{
    uint32_t x = 1;

    for (uint32_t i = 0; i < rounds; i++) {
        x = x * 1664525u + 1013904223u;
        x ^= x >> 7;
    }
    return x;
}

#define GRAPH_KERNELS 3
static handle function, graph;
static unsigned long long out;
static uint32_t rounds;

static int launch_in(handle stream)
{
    void *params[] = { &out, &rounds };

    return cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, params, NULL);
}

static int launch(void)
{
    return graph != NULL ? cuGraphLaunch(graph, NULL) : launch_in(NULL);
}

static int make_graph(void)
{
    handle stream, captured;

    CHECK(cuStreamCreate(&stream, 1));
    CHECK(cuStreamBeginCapture_v2(stream, 0));
    for (int i = 0; i < GRAPH_KERNELS; i++)
        CHECK(launch_in(stream));
    CHECK(cuStreamEndCapture(stream, &captured));
    CHECK(cuGraphInstantiateWithFlags(&graph, captured, 0));
    return 0;
}

static int hang(void)
{
    int first, then;

    CHECK(launch());
    first = cuCtxSynchronize();
    then = cuCtxSynchronize();
    printf("first=%d then=%d\n", first, then);
    return 0;
}

static int saturate(double seconds, unsigned ahead)
{
    handle events[64];
    unsigned long launches = 0, wrong = 0;
    uint32_t right = expected(rounds), got = 0;
    double end = now() + seconds;

    for (unsigned i = 0; i < ahead; i++)
        CHECK(cuEventCreate(&events[i], 2));
    for (; now() < end; launches++) {
        if (launches >= ahead)
            CHECK(cuEventSynchronize(events[launches % ahead]));
        CHECK(launch());
        CHECK(cuEventRecord(events[launches % ahead], NULL));
        if (launches % 32 == 31) {
            CHECK(cuMemcpyDtoH_v2(&got, out, sizeof got));
            wrong += got != right;
        }
    }
    CHECK(cuCtxSynchronize());
    printf("launches=%lu wrong=%lu\n", launches, wrong);
    return wrong != 0;
}

int main(int argc, char **argv)
{
    handle context, module;
    int device;

    if (argc < 3)
        return 2;
    rounds = (uint32_t)strtoul(argv[2], NULL, 0);
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuCtxCreate_v2(&context, 0, device));
    CHECK(cuModuleLoadData(&module, ptx));
    CHECK(cuModuleGetFunction(&function, module, "spin"));
    CHECK(cuMemAlloc_v2(&out, 4));
    if (!strcmp(argv[1], "hang"))
        return hang();
    if (argc > 4 && !strcmp(argv[4], "graph") && make_graph())
        return 1;
    CHECK(launch());
    CHECK(cuCtxSynchronize());
    printf("ready\n");
    fflush(stdout);
    if (getchar() == EOF)
        return 2;
    return saturate(atof(argv[1]), argc > 3 ? (unsigned)atoi(argv[3]) : 8);
}

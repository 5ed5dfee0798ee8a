/* Many threads, each with streams, events, modules and memory of its own, in one context: every result is compared.
 *
 * What threads share here is the shim and the session: their checkers (ThreadSanitizer) tell what the results do not.
 */
#define _GNU_SOURCE
#include "guest.h"

#define COUNT 256u
#define ROUNDS 12

static const char image[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry fill(.param .u64 at, .param .u32 n, .param .u32 value)\n{\n"
    ".reg .b64 %rd<4>;\n.reg .b32 %r<4>;\n.reg .pred %p<2>;\n"
    "ld.param.u64 %rd1, [at];\nld.param.u32 %r1, [n];\nld.param.u32 %r2, [value];\nmov.u32 %r3, 0;\n"
    "LOOP:\nsetp.ge.u32 %p1, %r3, %r1;\n@%p1 bra DONE;\nst.global.u32 [%rd1], %r2;\n"
    "add.s64 %rd1, %rd1, 4;\nadd.s32 %r2, %r2, 1;\nadd.s32 %r3, %r3, 1;\nbra LOOP;\nDONE:\nret;\n}\n";

static CUcontext context;
static CUmodule common;
static int wrong;

struct member {
    unsigned value;
    bool own_default; /* its stream is the thread's default stream, not one it made */
    CUstream stream, second;
    CUevent event;
    CUdeviceptr at, copy;
    unsigned *pinned, plain[COUNT];
};

static void compare(const unsigned *got, unsigned first)
{
    for (unsigned i = 0; i < COUNT; i++)
        if (got[i] != first + i)
            __atomic_store_n(&wrong, 1, __ATOMIC_SEQ_CST);
}

/* The kernel in one stream; the other waits for its event, copies on the card and brings the copy home. */
static void compute(struct member *m, CUfunction fill)
{
    unsigned count = COUNT;
    void *params[] = {&m->at, &count, &m->value};

    must(cuMemsetD32Async, m->at, 7u, (size_t)COUNT, m->stream);
    must(cuLaunchKernel, fill, 1u, 1u, 1u, 1u, 1u, 1u, 0u, m->stream, params, NULL);
    must(cuEventRecord, m->event, m->stream);
    must(cuStreamWaitEvent, m->second, m->event, 0u);
    must(cuMemcpyDtoDAsync_v2, m->copy, m->at, sizeof m->plain, m->second);
    must(cuMemcpyDtoHAsync_v2, (void *)m->pinned, m->copy, sizeof m->plain, m->second);
    must(cuMemcpyDtoHAsync_v2, (void *)m->plain, m->copy, sizeof m->plain, m->second);
    must(cuStreamSynchronize, m->second);
    compare(m->pinned, m->value);
    compare(m->plain, m->value);
}

static void there_and_back(struct member *m)
{
    for (unsigned i = 0; i < COUNT; i++)
        m->pinned[i] = m->plain[i] = m->value + i;
    must(cuMemcpyAsync, (CUdeviceptr)(uintptr_t)m->pinned, (CUdeviceptr)(uintptr_t)m->pinned, (size_t)64, m->stream);
    must(cuMemcpyHtoDAsync_v2, m->at, (const void *)m->pinned, sizeof m->plain, m->stream);
    must(cuMemcpyHtoDAsync_v2, m->copy, (const void *)m->plain, sizeof m->plain, m->stream);
    must(cuStreamSynchronize, m->stream);
    memset(m->pinned, 0, sizeof m->plain);
    memset(m->plain, 0, sizeof m->plain);
    must(cuMemcpyDtoH_v2, (void *)m->plain, m->at, sizeof m->plain);
    must(cuMemcpyDtoH_v2, (void *)m->pinned, m->copy, sizeof m->plain);
    compare(m->pinned, m->value);
    compare(m->plain, m->value);
}

static void ask_around(struct member *m)
{
    size_t room, total, bytes;
    CUdeviceptr base;
    CUuuid uuid;
    unsigned flags;
    int active;
    CUresult rc;

    must(cuMemGetInfo_v2, &room, &total);
    must(cuMemGetAddressRange_v2, &base, &bytes, m->at);
    must(cuDeviceGetUuid_v2, &uuid, 0);
    must(cuDeviceTotalMem_v2, &total, 0);
    must(cuDevicePrimaryCtxGetState, 0, &flags, &active);
    must(cuMemHostGetFlags, &flags, (void *)m->pinned);
    rc = cu(cuEventQuery, m->event);
    if (rc != 0 && rc != 600)
        exit(8);
}

static void one_round(struct member *m, int round)
{
    CUmodule module = common;
    CUfunction fill;
    CUcontext primary;

    must(cuMemAlloc_v2, &m->at, (size_t)(round % 4 == 0 ? 3 * MIB : sizeof m->plain));
    must(cuMemAlloc_v2, &m->copy, sizeof m->plain);
    must(cuMemHostAlloc, (void **)&m->pinned, sizeof m->plain, 0u);
    if (round % 3 == 0)
        must(cuModuleLoadData, &module, image);
    must(cuModuleGetFunction, &fill, module, "fill");
    compute(m, fill);
    there_and_back(m);
    ask_around(m);
    if (round % 3 == 0)
        must(cuModuleUnload, module);
    if (round == ROUNDS / 2) {
        must(cuDevicePrimaryCtxRetain, &primary, 0);
        must(cuDevicePrimaryCtxRelease_v2, 0);
    }
    must(cuMemFreeHost, (void *)m->pinned);
    must(cuMemFree_v2, m->at);
    must(cuMemFree_v2, m->copy);
}

static void *live(void *argument)
{
    struct member *m = argument;

    must(cuCtxSetCurrent, context);
    m->stream = CU_STREAM_PER_THREAD;
    if (!m->own_default)
        must(cuStreamCreate, &m->stream, 1u);
    must(cuStreamCreate, &m->second, 1u);
    must(cuEventCreate, &m->event, 0u);
    for (int round = 0; round < ROUNDS; round++, m->value += 1000)
        one_round(m, round);
    must(cuEventDestroy_v2, m->event);
    must(cuStreamDestroy_v2, m->second);
    if (!m->own_default)
        must(cuStreamDestroy_v2, m->stream);
    return NULL;
}

/* Half of the threads work in their default stream. */
void case_crowd(int threads)
{
    static struct member members[64];
    pthread_t running[64];
    size_t room, total, at_first;

    context = start();
    must(cuMemGetInfo_v2, &at_first, &total);
    must(cuModuleLoadData, &common, image);
    threads = threads > 64 ? 64 : threads;
    for (int i = 0; i < threads; i++) {
        members[i] = (struct member){.value = (unsigned)i * 100000u, .own_default = i % 2 == 1};
        if (pthread_create(&running[i], NULL, live, &members[i]) != 0)
            exit(7);
    }
    for (int i = 0; i < threads; i++)
        pthread_join(running[i], NULL);
    must(cuModuleUnload, common);
    must(cuCtxSynchronize);
    say("wrong", wrong);
    must(cuMemGetInfo_v2, &room, &total);
    say("all_free", room == at_first);
}

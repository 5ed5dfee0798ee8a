/* A guest program that ends, in every state and in every way. Prints "ready" once it is in its state, and what it does then.
 *
 * usage: exits STATE WAY. KVMPOOL_SHM and the endpoint are the shim's.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/resource.h>

#include "guest.h"

#define CHUNK (4 * MIB)

void *library;

static const char image[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry spin(.param .u64 out, .param .u32 rounds)\n{\n"
    ".reg .b64 %rd<3>;\n.reg .b32 %r<6>;\n.reg .pred %p<2>;\n"
    "ld.param.u64 %rd1, [out];\nld.param.u32 %r1, [rounds];\nmov.u32 %r2, 1;\nmov.u32 %r3, 0;\n"
    "LOOP:\nmad.lo.s32 %r2, %r2, 1664525, 1013904223;\nshr.u32 %r4, %r2, 7;\nxor.b32 %r2, %r2, %r4;\nadd.s32 %r3, %r3, 1;\n"
    "setp.lt.u32 %p1, %r3, %r1;\n@%p1 bra LOOP;\nst.global.u32 [%rd1], %r2;\nret;\n}\n";

static CUcontext context;
static CUfunction spin_kernel;
static CUstream stream;
static CUdeviceptr at;
static char *host, *pinned;
static volatile int begun;

static void spin(unsigned rounds)
{
    void *params[] = {&at, &rounds};

    cu(cuLaunchKernel, spin_kernel, 1u, 1u, 1u, 1u, 1u, 1u, 0u, stream, params, NULL);
}

/* What a thread does until the process ends; its calls may fail once that has begun. */
static void *launch_for_ever(void *unused)
{
    cu(cuCtxSetCurrent, context);
    for (;; begun = 1)
        spin(1000);
    return unused;
}

static void *copy_for_ever(void *unused)
{
    cu(cuCtxSetCurrent, context);
    for (;; begun = 1) {
        cu(cuMemcpyHtoDAsync_v2, at, host, (size_t)CHUNK, stream);
        cu(cuMemcpyDtoH_v2, host, at, (size_t)CHUNK);
    }
    return unused;
}

static void *synchronise(void *unused)
{
    cu(cuCtxSetCurrent, context);
    begun = 1;
    cu(cuCtxSynchronize);
    for (;;)
        pause();
    return unused;
}

/* More than the session stages: it waits for the kernel, and does not read its guest meanwhile. */
static void *copy_behind_kernel(void *unused)
{
    cu(cuCtxSetCurrent, context);
    begun = 1;
    for (;;)
        cu(cuMemcpyHtoDAsync_v2, at, host, (size_t)CHUNK, stream);
    return unused;
}

static void in_background(void *(*work)(void *))
{
    pthread_t thread;

    if (pthread_create(&thread, NULL, work, NULL) != 0)
        exit(7);
    while (!begun)
        usleep(1000);
    usleep(20000);
}

static void enter(const char *state)
{
    CUmodule module;
    CUevent event;

    must(cuInit, 0u);
    must(cuCtxCreate_v2, &context, 0u, 0);
    must(cuModuleLoadData, &module, image);
    must(cuModuleGetFunction, &spin_kernel, module, "spin");
    must(cuStreamCreate, &stream, 1u);
    must(cuMemAlloc_v2, &at, (size_t)(16 * CHUNK));
    must(cuMemHostAlloc, (void **)&pinned, (size_t)CHUNK, 0u);
    host = malloc(CHUNK);
    memset(host, 1, CHUNK);
    spin(1); /* compiled */
    must(cuCtxSynchronize);
    if (strcmp(state, "batch") == 0)
        return in_background(launch_for_ever);
    if (strcmp(state, "copy") == 0)
        return in_background(copy_for_ever);
    if (strcmp(state, "idle") == 0)
        return;
    spin(4000000000u); /* some ten seconds of a card */
    if (strcmp(state, "synchronise") == 0)
        return in_background(synchronise);
    if (strcmp(state, "stuck") == 0)
        return in_background(copy_behind_kernel);
    must(cuEventCreate, &event, 0u); /* queue */
    must(cuEventRecord, event, stream);
    must(cuMemcpyDtoHAsync_v2, pinned, at, (size_t)CHUNK, stream);
    must(cuStreamWaitEvent, stream, event, 0u);
}

static void *leave_by_thread(void *unused)
{
    exit(0);
    return unused;
}

static void leave_by_handler(void)
{
    CUdeviceptr more;

    cu(cuMemAlloc_v2, &more, (size_t)100);
    cu(cuMemFree_v2, more);
    exit(0); /* the handlers that are left run all the same */
}

static int leave(const char *way)
{
    pthread_t thread;

    if (strcmp(way, "thread") == 0 && pthread_create(&thread, NULL, leave_by_thread, NULL) == 0)
        pthread_join(thread, NULL);
    if (strcmp(way, "at_once") == 0)
        _exit(0);
    if (strcmp(way, "handler") == 0)
        atexit(leave_by_handler);
    if (strcmp(way, "abort") == 0) {
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        abort();
    }
    if (strcmp(way, "dlclose") == 0)
        dlclose(library);
    if (strcmp(way, "exec") == 0)
        execl("/bin/sleep", "sleep", "60", NULL);
    if (strcmp(way, "spawn") == 0 && fork() == 0) /* the child lives on */
        execl("/bin/sleep", "sleep", "60", NULL);
    if (strcmp(way, "daemon") == 0 && fork() == 0) {
        setsid();
        sleep(60);
    }
    while (strcmp(way, "kill") == 0)
        pause();
    return 0;
}

int main(int argc, char **argv)
{
    if (argc < 3 || (library = dlopen("libcuda.so.1", RTLD_NOW)) == NULL)
        return 9;
    enter(argv[1]);
    puts("ready");
    fflush(stdout);
    if (getchar() == EOF)
        return 9;
    return leave(argv[2]);
}

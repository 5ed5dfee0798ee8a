/* Cases of tests/dataplane/test_printing.py: kernels print, and this program too. usage: print_cases KERNELS.ptx CASE */
#define _GNU_SOURCE
#include "guest.h"

void *library;
static CUmodule module;
static const char *kernels;

static CUfunction named(const char *name)
{
    CUfunction f;

    must(cuModuleGetFunction, &f, module, name);
    return f;
}

static void launch_with(CUfunction f, int n, CUstream stream)
{
    void *params[] = {&n};

    must(cuLaunchKernel, f, 1u, 1u, 1u, 1u, 1u, 1u, 0u, stream, params, NULL);
}

/* Each call behind which CUDA has printed; what the program itself says stands between. */
static void case_places(CUcontext context)
{
    CUdeviceptr at;
    CUstream stream;
    CUevent event;
    CUfunction tell = named("tell");
    char byte = 1;

    must(cuMemAlloc_v2, &at, (size_t)1);
    must(cuStreamCreate, &stream, 0u);
    must(cuEventCreate, &event, 0u);
    launch_with(tell, 1, NULL);
    must(cuCtxSynchronize);
    say("context", 1);
    launch_with(tell, 2, stream);
    must(cuStreamSynchronize, stream);
    say("stream", 1);
    launch_with(tell, 3, stream);
    must(cuEventRecord, event, stream);
    must(cuEventSynchronize, event);
    say("event", 1);
    launch_with(tell, 4, NULL);
    must(cuMemcpyDtoH_v2, &byte, at, (size_t)1);
    say("copy", 1);
    launch_with(tell, 5, NULL);
    while (cu(cuStreamQuery, NULL) == CUDA_ERROR_NOT_READY) /* which prints nothing; the end of a context does */
        usleep(1000);
    must(cuCtxDestroy_v2, context);
    say("destroyed", 1);
}

/* More than is kept for one reply, in lines that have numbers, and that many launches again behind it. */
static void case_flood(CUcontext context)
{
    CUfunction flood = named("flood");

    (void)context;
    launch_with(flood, 12000, NULL);
    must(cuCtxSynchronize);
    for (int i = 0; i < 50; i++)
        launch_with(flood, 20, NULL);
    must(cuCtxSynchronize);
    say("flooded", 1);
}

static void *tell_and_wait(void *argument)
{
    CUfunction line;
    CUstream stream;

    must(cuCtxSetCurrent, argument);
    line = named("line");
    must(cuStreamCreate, &stream, 1u);
    for (int i = 0; i < 20; i++) {
        launch_with(line, i, stream);
        must(cuStreamSynchronize, stream);
    }
    return NULL;
}

static void case_many(CUcontext context)
{
    pthread_t threads[4];

    for (int i = 0; i < 4; i++)
        if (pthread_create(&threads[i], NULL, tell_and_wait, context) != 0)
            exit(7);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
}

/* Nobody waits for it: CUDA does not promise it. The program ends all the same. */
static void case_left(CUcontext context)
{
    CUfunction flood = named("flood");

    (void)context;
    launch_with(flood, 12000, NULL);
    say("left", 1);
}

/* The text comes with the error, whichever call tells it: here one that otherwise fetches none, and one that does. */
static void case_asserts(CUcontext context)
{
    CUresult told;
    CUfunction claim = named("claim");

    launch_with(claim, 0, NULL);
    must(cuCtxSynchronize);
    say("held", 1);
    launch_with(claim, 3, NULL);
    while ((told = cu(cuStreamQuery, NULL)) == CUDA_ERROR_NOT_READY)
        usleep(1000);
    say("query", told);
    cu(cuCtxDestroy_v2, context);
    context = start();
    must(cuModuleLoad, &module, kernels);
    launch_with(named("claim"), 5, NULL);
    say("context", cu(cuCtxSynchronize));
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(CUcontext context);
    } cases[] = {{"places", case_places}, {"flood", case_flood}, {"threads", case_many}, {"left", case_left},
                {"asserts", case_asserts}};
    CUcontext context;

    if (argc != 3 || (library = dlopen("libcuda.so.1", RTLD_NOW)) == NULL)
        return 2;
    context = start();
    kernels = argv[1];
    must(cuModuleLoad, &module, kernels);
    for (unsigned i = 0; i < sizeof cases / sizeof cases[0]; i++)
        if (strcmp(cases[i].name, argv[2]) == 0) {
            cases[i].run(context);
            return 0;
        }
    return 2;
}

/* What the guest programs of the shim's tests share: calls without prototypes, and results as `name=value` lines. */
#ifndef KVMPOOL_TEST_GUEST_H
#define KVMPOOL_TEST_GUEST_H

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cuda_abi.h"

#define MIB (1ull << 20)

extern void *library;

static inline void *find(const char *name)
{
    void *function = dlsym(library, name);

    if (function == NULL) {
        printf("missing=%s\n", name);
        exit(9);
    }
    return function;
}

/* Arguments must have their exact types: there is no prototype. */
#define cu(name, ...) (((CUresult(*)())find(#name))(__VA_ARGS__))
#define must(name, ...)                                                                                                  \
    do {                                                                                                                 \
        CUresult must_result = cu(name, ##__VA_ARGS__);                                                                  \
        if (must_result != 0) {                                                                                          \
            printf("failed=%s at line %d: %d\n", #name, __LINE__, must_result);                                          \
            exit(8);                                                                                                     \
        }                                                                                                                \
    } while (0)
#define say(name, value) printf("%s=%lld\n", name, (long long)(value))

static inline CUcontext start(void)
{
    CUcontext context;

    must(cuInit, 0u);
    must(cuCtxCreate_v2, &context, 0u, 0);
    return context;
}

static inline CUfunction kernel(const char *name)
{
    CUmodule module;
    CUfunction function;

    must(cuModuleLoadData, &module, "ptx");
    must(cuModuleGetFunction, &function, module, name);
    return function;
}

static inline CUresult launch(CUfunction f, CUstream stream, void **params, void **extra)
{
    return cu(cuLaunchKernel, f, 1u, 1u, 1u, 32u, 1u, 1u, 0u, stream, params, extra);
}

void case_memory(void);
void case_bulk(size_t bytes);
void case_batch(int launches, int synchronises);
void case_unflushed(void);
void case_fill(void);
void case_checks(void);
void case_fault(void);
void case_deferred(void);
void case_fork(void);
void case_threads(const char *gate);
void case_lost(void);
void case_quota(void);
void case_lookup(void);
void case_contexts(void);
void case_per_thread(void);
void case_modules(void);
void case_events(void);
void case_pinned(size_t bytes);
void case_pinned_lost(void);
void case_init(void);
void case_stress(int threads);
void case_crowd(int threads);
void case_async(const char *op, const char *armed, bool destroy);

#endif

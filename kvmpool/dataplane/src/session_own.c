/* Memory of the card that the driver takes for itself: for contexts, for modules with their variables, for what limits ask.
 *
 * Nobody says how much that is, so it is measured: NVML tells what this process holds on the card; what goes beyond the
 * session's own mappings is the driver's, and the claim is charged for it. What a limit has asked for (a heap, a stack of each
 * thread) is charged when it is asked, because the driver takes it only with a later launch. A call that makes the claim too
 * small is undone by its caller; what is found later is charged although it does not fit: then nothing more is to be had.
 */
#define _GNU_SOURCE
#include "session_state.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define LOOK_NS 100000000u    /* between two looks nobody asked for: one costs tens of microseconds */
#define PROCESSES_MAX 1024u   /* of one card */
#define NOT_KNOWN (~0ull)     /* NVML_VALUE_NOT_AVAILABLE */
#define STACK_LIMIT 0         /* of a thread; all the threads that fit on the card have one */
#define LIMITS_COUNTED 3u     /* the stack, the printf buffer and the malloc heap, in cuda.h's order */
#define ATTRIBUTE_MULTIPROCESSORS 16
#define ATTRIBUTE_THREADS 39 /* of a multiprocessor */

struct process { /* nvmlProcessInfo_t of version 2 and 3 */
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
};

static const char *const lists[] = {"nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v3"};

/* The host's NVML, asked once. Without it only what limits ask for is charged, which the log says. */
static void find_nvml(struct kp_own *own)
{
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    int (*init)(void) = library != NULL ? (int (*)(void))dlsym(library, "nvmlInit_v2") : NULL;
    int (*by_uuid)(const char *, void **) = library != NULL ? (int (*)(const char *, void **))dlsym(library, "nvmlDeviceGetHandleByUUID") : NULL;
    const char *card = getenv("CUDA_VISIBLE_DEVICES"); /* the worker has set it: one card, by its uuid */

    if (init == NULL || by_uuid == NULL || card == NULL || init() != 0 || by_uuid(card, &own->nvml_card) != 0) {
        own->nvml_card = NULL;
        return;
    }
    for (unsigned i = 0; i < KP_NVML_LISTS; i++)
        own->list[i] = (int (*)(void *, unsigned *, void *))dlsym(library, lists[i]);
}

/* What this process holds on the card, by NVML; false where that is not known. */
static bool measure(struct kp_own *own, uint64_t *bytes)
{
    struct process found[PROCESSES_MAX];
    bool told = false;

    if (!own->looked_for_nvml) {
        own->looked_for_nvml = true;
        find_nvml(own);
    }
    for (unsigned i = 0; own->nvml_card != NULL && i < KP_NVML_LISTS; i++) {
        unsigned count = PROCESSES_MAX;
        if (own->list[i] == NULL || own->list[i](own->nvml_card, &count, found) != 0)
            continue;
        told = true;
        for (unsigned k = 0; k < count && k < PROCESSES_MAX; k++)
            if (found[k].pid == (unsigned)getpid() && found[k].bytes != NOT_KNOWN) {
                *bytes = found[k].bytes;
                return true;
            }
    }
    *bytes = 0;
    return told && own->contexts == 0;
}

/* With memory_lock held. */
static uint64_t owed(struct kp_server *s)
{
    uint64_t held = 0, beyond = 0;

    if (measure(&s->own, &held))
        beyond = held > s->mapped ? held - s->mapped : 0;
    else if (!s->own.said_unknown) {
        s->own.said_unknown = true;
        kp_session_log(s, "NVML does not tell what this process holds on the card: what the driver takes for itself is not charged");
    }
    return beyond > s->own.known ? beyond : s->own.known;
}

static void now_owes(struct kp_server *s, uint64_t bytes)
{
    if (bytes > s->own.charged)
        kp_account_admit(s->session->account, s->session->slot, bytes - s->own.charged);
    else
        kp_account_release(s->session->account, s->session->slot, s->own.charged - bytes);
    s->own.charged = bytes;
}

/* With memory_lock held. */
static CUresult charge(struct kp_server *s)
{
    uint64_t bytes = owed(s);

    if (bytes > s->own.charged && kp_memory_charge(s, bytes - s->own.charged) != 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (bytes > s->own.charged)
        s->own.charged = bytes;
    else
        now_owes(s, bytes);
    return CUDA_SUCCESS;
}

CUresult kp_own_charge(struct kp_server *s)
{
    CUresult rc;

    pthread_mutex_lock(&s->memory_lock);
    rc = charge(s);
    pthread_mutex_unlock(&s->memory_lock);
    return rc;
}

void kp_own_look(struct kp_server *s)
{
    now_owes(s, owed(s));
}

void kp_own_look_sometimes(struct kp_server *s)
{
    struct timespec now;
    uint64_t now_ns;

    clock_gettime(CLOCK_MONOTONIC, &now);
    now_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    if (now_ns - s->own.looked_ns < LOOK_NS)
        return;
    s->own.looked_ns = now_ns;
    kp_own_look(s);
}

CUresult kp_own_context(struct kp_server *s, struct kp_home *home)
{
    CUresult rc;

    pthread_mutex_lock(&s->memory_lock);
    uint64_t before = s->own.charged;
    s->own.contexts++;
    if ((rc = charge(s)) == CUDA_SUCCESS && s->own.charged > before) {
        home->own = s->own.charged - before;
        s->own.known += home->own;
    }
    pthread_mutex_unlock(&s->memory_lock);
    return rc;
}

void kp_own_leave(struct kp_server *s, struct kp_home *home)
{
    pthread_mutex_lock(&s->memory_lock);
    s->own.contexts--;
    s->own.known -= home->own;
    home->own = 0;
    kp_own_look(s);
    pthread_mutex_unlock(&s->memory_lock);
}

/* What the card needs for that value of a limit; false where that is more than there can be. */
static bool bytes_of_limit(struct kp_server *s, int limit, uint64_t value, uint64_t *bytes)
{
    int processors = 0, threads = 0;

    *bytes = value;
    if (limit != STACK_LIMIT)
        return true;
    if (s->driver.cuDeviceGetAttribute(&processors, ATTRIBUTE_MULTIPROCESSORS, s->device) != CUDA_SUCCESS ||
        s->driver.cuDeviceGetAttribute(&threads, ATTRIBUTE_THREADS, s->device) != CUDA_SUCCESS)
        return true;
    return !__builtin_mul_overflow(value, (uint64_t)processors * (uint64_t)threads, bytes);
}

/* Replaces what the context's limits of this sort were charged by what `value` needs beyond `usual`. */
static CUresult charge_limit(struct kp_server *s, struct kp_home *home, int limit, uint64_t usual, uint64_t value)
{
    uint64_t least = 0, bytes, before = home->limit[limit];
    CUresult rc = CUDA_ERROR_OUT_OF_MEMORY;

    if (!bytes_of_limit(s, limit, usual, &least) || !bytes_of_limit(s, limit, value, &bytes) || bytes > 1ull << 56)
        return rc;
    bytes = bytes > least ? bytes - least : 0;
    pthread_mutex_lock(&s->memory_lock);
    s->own.known += bytes - before;
    if ((rc = charge(s)) != CUDA_SUCCESS) {
        s->own.known -= bytes - before;
    } else {
        home->own += bytes - before;
        home->limit[limit] = bytes;
    }
    pthread_mutex_unlock(&s->memory_lock);
    return rc;
}

int kp_do_cuCtxSetLimit(struct kp_server *s, struct kp_work *w)
{
    int limit = (int)w->in[0];
    uint64_t value = w->in[1];
    size_t before = 0;
    CUresult rc;

    if (limit < 0 || (unsigned)limit >= LIMITS_COUNTED)
        return s->driver.cuCtxSetLimit(limit, value);
    if ((rc = s->driver.cuCtxGetLimit(&before, limit)) != CUDA_SUCCESS)
        return rc;
    if (!w->home->usual_known[limit])
        w->home->usual[limit] = before;
    w->home->usual_known[limit] = true;
    if ((rc = charge_limit(s, w->home, limit, w->home->usual[limit], value)) != CUDA_SUCCESS)
        return rc;
    if ((rc = s->driver.cuCtxSetLimit(limit, value)) == CUDA_SUCCESS && (rc = kp_own_charge(s)) != CUDA_SUCCESS)
        s->driver.cuCtxSetLimit(limit, before);
    if (rc != CUDA_SUCCESS)
        charge_limit(s, w->home, limit, w->home->usual[limit], before);
    return rc;
}

/* A bit for each of the first contexts says that it has the library; in later ones it is looked at each time. */
int kp_have_library(struct kp_server *s, const struct kp_home *home, uint64_t number)
{
    uint64_t bit = home->ordinal < 64 ? 1ull << home->ordinal : 0;
    CUmodule module = NULL;
    struct kp_handle *entry;
    void *library;
    bool had;
    int rc = kp_resolve(s, number, KP_LIBRARY, &library);

    if (rc != CUDA_SUCCESS)
        return rc;
    pthread_mutex_lock(&s->handles_lock);
    entry = kp_handles_get(&s->handles, number, KP_LIBRARY);
    had = entry != NULL && (entry->note & bit) != 0;
    pthread_mutex_unlock(&s->handles_lock);
    if (had || s->driver.cuLibraryGetModule(&module, library) != CUDA_SUCCESS) /* the call itself will say what is wrong */
        return CUDA_SUCCESS;
    if ((rc = kp_own_charge(s)) != CUDA_SUCCESS) {
        pthread_mutex_lock(&s->memory_lock);
        kp_own_look(s); /* only the library's end gives it back */
        pthread_mutex_unlock(&s->memory_lock);
        return rc;
    }
    pthread_mutex_lock(&s->handles_lock);
    if ((entry = kp_handles_get(&s->handles, number, KP_LIBRARY)) != NULL)
        entry->note |= bit;
    pthread_mutex_unlock(&s->handles_lock);
    return CUDA_SUCCESS;
}

int kp_do_cuLibraryGetGlobal(struct kp_server *s, struct kp_work *w)
{
    CUdeviceptr at = 0;
    size_t bytes = 0;
    void *library;
    int rc = kp_have_library(s, w->home, w->in[0]);

    if (rc == CUDA_SUCCESS)
        rc = kp_resolve(s, w->in[0], KP_LIBRARY, &library);
    if (rc == CUDA_SUCCESS)
        rc = s->driver.cuLibraryGetGlobal(&at, &bytes, library, (const char *)w->tail);
    w->out[0] = at;
    w->out[1] = bytes;
    return rc;
}

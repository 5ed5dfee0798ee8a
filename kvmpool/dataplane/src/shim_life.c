/* The shim's life in its process: cuInit, fork, exit. */
#define _GNU_SOURCE
#include "shim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define LEAVE_WAIT_SECONDS 1 /* for a thread that holds the connection while the process ends, or forks */
#define NAMES_LOGGED 1024

CUresult kp_unsupported(const char *name)
{
    static _Atomic(const char *) seen[NAMES_LOGGED]; /* names are literals: equal means the same pointer */

    if (getenv("KVMPOOL_LOG") == NULL)
        return CUDA_ERROR_NOT_SUPPORTED;
    for (unsigned i = 0; i < NAMES_LOGGED; i++) {
        const char *empty = NULL;
        if (atomic_compare_exchange_strong(&seen[i], &empty, name)) {
            kp_log("%s is not supported", name);
            break;
        }
        if (empty == name)
            break;
    }
    return CUDA_ERROR_NOT_SUPPORTED;
}

static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;

/* False where a thread keeps it: one that sends more than a busy card takes holds `tx` until it has. */
static bool lock_soon(pthread_mutex_t *mutex)
{
    struct timespec limit;

    clock_gettime(CLOCK_REALTIME, &limit);
    limit.tv_sec += LEAVE_WAIT_SECONDS;
    return pthread_mutex_timedlock(mutex, &limit) == 0;
}

static __thread bool held_tx __attribute__((tls_model("initial-exec"))), held_rx __attribute__((tls_model("initial-exec"))); /* by the thread that forks */

/* So that no other thread is at a dial, whose socket the child would keep. All else that it holds the child never looks at. */
static void before_fork(void)
{
    held_tx = lock_soon(&kp_shim.tx);
    held_rx = lock_soon(&kp_shim.link.rx);
}

static void after_fork_in_parent(void)
{
    if (held_rx)
        pthread_mutex_unlock(&kp_shim.link.rx);
    if (held_tx)
        pthread_mutex_unlock(&kp_shim.tx);
}

/* The parent's other threads are not here: neither what they held nor what they waited for. */
static void after_fork_in_child(void)
{
    pthread_mutex_init(&starting, NULL);
    pthread_mutex_init(&kp_shim.link.rx, NULL);
    pthread_mutex_init(&kp_shim.tx, NULL);
    kp_shim.link.waiters = NULL;
    kp_shim.link.reading = false;
    kp_shim.flusher = kp_shim.flushing = false;
    if (kp_shim.link.fd >= 0)
        close(kp_shim.link.fd); /* without shutdown: the connection is the parent's */
    kp_shim.link.fd = -1;
    kp_shim.link.window.base = NULL; /* its rings are not mapped here */
    kp_shim.link.filled = 0;
    if (atomic_load(&kp_shim.ready))
        atomic_store(&kp_shim.forked, true);
}

/* One trip for all that is then answered locally; what the guest cannot have is taken out. */
static CUresult fetch_device(void)
{
    static const uint8_t absent[] = {
        19 /* map host memory */, 83 /* managed memory */, 85 /* multi-GPU board */, 88 /* pageable access */, 89,
        91 /* host pointer of registered memory */, 92, 93, 94 /* stream memory operations */, 96 /* multi-device launch */,
        100, 101, 102 /* virtual memory management */, 103, 104, 105, 108, 109, 115 /* memory pools */, 116, 117, 118, 119,
        121, 122, 123, 124, 127, 129, 132 /* multicast */, 141, 142, 143, 144, 145, 146,
    };
    struct kp_answer answer = {.bytes = &kp_shim.device, .room = sizeof kp_shim.device};
    unsigned domain = 0, bus = 0, device = 0;
    CUresult rc;

    pthread_mutex_lock(&kp_shim.tx);
    rc = kp_ask(KP_OP_device_info, NULL, 0, NULL, 0, &answer);
    if (rc == CUDA_SUCCESS && answer.got != sizeof kp_shim.device)
        rc = CUDA_ERROR_UNKNOWN;
    if (rc != CUDA_SUCCESS)
        return rc;
    kp_shim.device.name[sizeof kp_shim.device.name - 1] = 0;
    for (size_t i = 0; i < sizeof absent; i++)
        kp_shim.device.value[absent[i]] = 0;
    if (sscanf(kp_shim.welcome.pci, "%x:%x:%x", &domain, &bus, &device) == 3) {
        kp_shim.device.value[50] = (int32_t)domain;
        kp_shim.device.value[33] = (int32_t)bus;
        kp_shim.device.value[34] = (int32_t)device;
    }
    return CUDA_SUCCESS;
}

static CUresult start_once(void)
{
    static bool hooked;
    CUresult rc;

    if (atomic_load(&kp_shim.ready))
        return CUDA_SUCCESS;
    pthread_mutex_lock(&kp_shim.tx);
    const char *sync = getenv("KVMPOOL_SYNC");
    kp_shim.synchronous = sync != NULL && strcmp(sync, "1") == 0;
    if (!hooked)
        hooked = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) == 0;
    rc = kp_link_open();
    kp_leave(rc);
    if (rc == CUDA_SUCCESS)
        rc = fetch_device();
    if (rc == CUDA_SUCCESS)
        atomic_store(&kp_shim.ready, 1);
    return rc;
}

CUresult kp_start(void)
{
    CUresult rc;

    if (atomic_load(&kp_shim.forked))
        return CUDA_ERROR_NOT_INITIALIZED;
    if (atomic_load(&kp_shim.ready))
        return CUDA_SUCCESS;
    pthread_mutex_lock(&starting);
    rc = start_once();
    pthread_mutex_unlock(&starting);
    return rc;
}

/* What the process did, as JSON: tests and `kvmpool compat` read it. */
static void write_stats(void)
{
    const char *path = getenv("KVMPOOL_STATS");
    const struct kp_stats *stats = &kp_shim.stats;
    FILE *file = path != NULL ? fopen(path, "we") : NULL;

    if (file == NULL)
        return;
    fprintf(file,
            "{\"round_trips\": %llu, \"frames\": %llu, \"writes\": %llu, \"bytes_out\": %llu, \"bytes_in\": %llu, "
            "\"dials\": %llu}\n",
            (unsigned long long)stats->round_trips, (unsigned long long)stats->frames, (unsigned long long)stats->writes,
            (unsigned long long)stats->bytes_out, atomic_load(&stats->bytes_in), (unsigned long long)stats->dials);
    fclose(file);
}

__attribute__((destructor)) static void at_exit(void)
{
    if (atomic_load(&kp_shim.forked) || !lock_soon(&kp_shim.tx))
        return;
    if (kp_shim.link.fd >= 0 && !atomic_load(&kp_shim.link.lost)) {
        kp_link_put(KP_OP_BYE, 0, kp_shim.link.seq++, NULL, 0, NULL, 0);
        kp_link_flush();
    }
    if (kp_shim.link.fd >= 0)
        write_stats();
    pthread_mutex_unlock(&kp_shim.tx);
}

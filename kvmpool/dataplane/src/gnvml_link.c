/* The connection to the claim's worker, and what it said last.
 *
 * One connection a process, under one lock. A worker that is gone is looked for again, at most once a second and with little
 * patience: until the claim is bound anew the card is lost, afterwards it is there again, under the same uuid.
 */
#define _GNU_SOURCE
#include "gnvml.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "shim_dial.h"

#define FIRST_SECONDS 30 /* as for the shim: a worker that starts its driver takes a few */
#define AGAIN_SECONDS 2  /* a tool that draws a screen should not hang for longer */
#define ANSWER_SECONDS 5
#define AGAIN_AFTER_NS 1000000000u
#define SAMPLE_NS 100000000u

static struct {
    pthread_mutex_t lock;
    unsigned users;
    int fd; /* -1: none */
    uint32_t seq;
    struct gn_card card;
    uint64_t asked_ns, tried_ns; /* when the worker answered, and when it was last looked for in vain; 0: never */
    uint64_t sample_ns, sample_busy_ns; /* the worker's clock; 0: none of this worker */
    unsigned percent;
    bool sampled;
} gn = {.lock = PTHREAD_MUTEX_INITIALIZER, .fd = -1};

uint64_t gn_now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void hang_up(void)
{
    if (gn.fd >= 0)
        close(gn.fd);
    gn.fd = -1;
    gn.sample_ns = 0;
    gn.sampled = false;
    gn.percent = 0;
}

static void before_fork(void)
{
    pthread_mutex_lock(&gn.lock);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&gn.lock);
}

/* The connection is the parent's; the child makes its own when it asks. */
static void after_fork_in_child(void)
{
    pthread_mutex_init(&gn.lock, NULL);
    hang_up();
    gn.asked_ns = gn.tried_ns = 0;
}

/* With the lock held, as all that follows: asks once. 0 or a negative errno. */
static int ask(void)
{
    unsigned char body[sizeof(struct kp_figures)];
    struct kp_frame frame;
    uint32_t seq = ++gn.seq;
    int rc = kp_frame_write(gn.fd, KP_OP_FIGURES, 0, seq, NULL, 0);

    if (rc == 0)
        rc = kp_frame_read(gn.fd, &frame, body, sizeof body);
    if (rc == 0 && (frame.op != KP_OP_FIGURES || frame.seq != seq))
        rc = -EPROTO;
    if (rc == 0)
        rc = kp_figures_check(body, frame.length, &gn.card.now);
    if (rc != 0)
        return rc;
    gn.asked_ns = gn_now_ns();
    if (gn.sample_ns == 0) {
        gn.sample_ns = gn.card.now.now_ns;
        gn.sample_busy_ns = gn.card.now.busy_ns;
    }
    return 0;
}

static nvmlReturn_t dial(int seconds)
{
    struct timeval limit = {.tv_sec = ANSWER_SECONDS};
    CUresult why = CUDA_SUCCESS;

    gn.fd = kp_dial_observer(seconds, &gn.card.about, &why);
    if (gn.fd >= 0) {
        setsockopt(gn.fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        setsockopt(gn.fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
        if (ask() == 0)
            return NVML_SUCCESS;
        hang_up();
    }
    gn.tried_ns = gn_now_ns();
    return why == CUDA_ERROR_SYSTEM_DRIVER_MISMATCH ? NVML_ERROR_LIB_RM_VERSION_MISMATCH : NVML_ERROR_DRIVER_NOT_LOADED;
}

nvmlReturn_t gn_open(void)
{
    static bool hooked;
    nvmlReturn_t rc = NVML_SUCCESS;

    pthread_mutex_lock(&gn.lock);
    if (!hooked)
        hooked = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) == 0;
    if (!hooked)
        rc = NVML_ERROR_MEMORY;
    else if (gn.users == 0)
        rc = dial(FIRST_SECONDS);
    if (rc == NVML_SUCCESS)
        gn.users++;
    pthread_mutex_unlock(&gn.lock);
    return rc;
}

nvmlReturn_t gn_close(void)
{
    nvmlReturn_t rc = NVML_ERROR_UNINITIALIZED;

    pthread_mutex_lock(&gn.lock);
    if (gn.users > 0) {
        rc = NVML_SUCCESS;
        if (--gn.users == 0)
            hang_up();
    }
    pthread_mutex_unlock(&gn.lock);
    return rc;
}

nvmlReturn_t gn_ready(void)
{
    pthread_mutex_lock(&gn.lock);
    bool ready = gn.users > 0;
    pthread_mutex_unlock(&gn.lock);
    return ready ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

static nvmlReturn_t refresh(uint64_t max_age_ns)
{
    if (gn.users == 0)
        return NVML_ERROR_UNINITIALIZED;
    if (gn.fd >= 0 && gn_now_ns() - gn.asked_ns < max_age_ns)
        return NVML_SUCCESS;
    if (gn.fd >= 0) {
        if (ask() == 0)
            return NVML_SUCCESS;
        hang_up(); /* the claim may be bound to another card by now */
    } else if (gn.tried_ns != 0 && gn_now_ns() - gn.tried_ns < AGAIN_AFTER_NS) {
        return NVML_ERROR_GPU_IS_LOST;
    }
    return dial(AGAIN_SECONDS) == NVML_SUCCESS ? NVML_SUCCESS : NVML_ERROR_GPU_IS_LOST;
}

nvmlReturn_t gn_look(struct gn_card *card, uint64_t max_age_ns)
{
    pthread_mutex_lock(&gn.lock);
    nvmlReturn_t rc = refresh(max_age_ns);
    *card = gn.card;
    pthread_mutex_unlock(&gn.lock);
    return rc;
}

/* Takes a sample where the last is old enough; otherwise says for how long to wait, unless there is a result to repeat. */
static uint64_t sample(void)
{
    uint64_t span_ns = gn.card.now.now_ns - gn.sample_ns, busy_ns = gn.card.now.busy_ns - gn.sample_busy_ns;

    if (gn.card.now.now_ns < gn.sample_ns || gn.card.now.busy_ns < gn.sample_busy_ns)
        span_ns = busy_ns = 0; /* no clock that we trust */
    if (span_ns < SAMPLE_NS)
        return gn.sampled ? 0 : SAMPLE_NS - span_ns;
    gn.percent = busy_ns >= span_ns ? 100 : (unsigned)(busy_ns / (span_ns / 100));
    gn.percent = gn.percent > 100 ? 100 : gn.percent;
    gn.sample_ns = gn.card.now.now_ns;
    gn.sample_busy_ns = gn.card.now.busy_ns;
    gn.sampled = true;
    return 0;
}

nvmlReturn_t gn_utilization(unsigned *percent)
{
    for (bool again = false;; again = true) {
        pthread_mutex_lock(&gn.lock);
        nvmlReturn_t rc = refresh(0);
        uint64_t wait_ns = rc == NVML_SUCCESS ? sample() : 0;
        *percent = gn.percent;
        pthread_mutex_unlock(&gn.lock);
        if (rc != NVML_SUCCESS || wait_ns == 0 || again)
            return rc;
        nanosleep(&(struct timespec){.tv_nsec = (long)wait_ns + 1000000}, NULL); /* the process's first question, right after its start */
    }
}

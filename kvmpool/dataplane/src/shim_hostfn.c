/* Functions of the program that a stream runs in its turn. They run here, on one thread of the shim, as the driver has one too;
 * the stream goes on when the worker hears that the function has returned.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <signal.h>
#include <stdlib.h>

struct call {
    uint64_t token;
    CUhostFn function;
    CUstreamCallback callback; /* one of the two */
    CUstream stream;
    void *data;
    struct call *next;
};

static struct call *calls; /* in the order of their making; guarded by `tx`, as all of this */
static uint64_t tokens;
static pthread_cond_t wanted = PTHREAD_COND_INITIALIZER;
static bool running; /* the thread */

static struct call *take(uint64_t token)
{
    struct call **at = &calls, *call;

    while (*at != NULL && (*at)->token != token)
        at = &(*at)->next;
    if ((call = *at) != NULL)
        *at = call->next;
    return call;
}

/* After an error only callbacks are called, and told. */
static void run(struct call *call, CUresult status)
{
    if (call->callback != NULL)
        call->callback(call->stream, status, call->data);
    else if (status == CUDA_SUCCESS)
        call->function(call->data);
    free(call);
}

/* With `tx` held, before it is given back: one function less is awaited. */
static void is_over(void)
{
    if (--kp_shim.host_pending == 0) {
        kp_shim.host_bulk = 0;
        pthread_cond_broadcast(&kp_shim.host_idle);
    }
}

/* The worker is lost: no stream will ever come to these. */
static void run_lost(void)
{
    struct call *call;

    while ((call = calls) != NULL) {
        calls = call->next;
        pthread_mutex_unlock(&kp_shim.tx);
        run(call, CUDA_ERROR_DEVICE_UNAVAILABLE);
        pthread_mutex_lock(&kp_shim.tx);
        is_over();
    }
}

/* With `tx` held: says that `done` is over, waits for the next and runs it. Returns its token, 0: there is none to wait for. */
static uint64_t run_next(uint64_t done)
{
    struct kp_host_due due = {0};
    struct kp_answer answer = {.bytes = &due, .room = sizeof due};
    struct call *call = NULL;
    CUresult rc;

    if (atomic_load(&kp_shim.link.lost)) {
        run_lost();
        return 0;
    }
    if (kp_shim.host_pending == 0) {
        kp_link_put(KP_OP_host_next, 0, kp_shim.link.seq++, &done, KP_HOST_NEXT_IN, NULL, 0);
        kp_link_flush();
        return 0;
    }
    rc = kp_ask(KP_OP_host_next, &done, KP_HOST_NEXT_IN, NULL, 0, &answer);
    pthread_mutex_lock(&kp_shim.tx);
    if (rc == CUDA_SUCCESS && answer.got == sizeof due)
        call = take(due.token);
    if (call == NULL)
        return 0; /* the connection is lost, or says nonsense */
    pthread_mutex_unlock(&kp_shim.tx);
    run(call, due.status);
    pthread_mutex_lock(&kp_shim.tx);
    is_over();
    return due.token;
}

static void *run_for_ever(void *unused)
{
    uint64_t done = 0;

    (void)unused;
    pthread_mutex_lock(&kp_shim.tx);
    for (;;) {
        while (done == 0 && kp_shim.host_pending == 0)
            pthread_cond_wait(&wanted, &kp_shim.tx);
        done = run_next(done);
    }
    return NULL;
}

static bool have_thread(void)
{
    pthread_attr_t attr;
    pthread_t thread;
    sigset_t all, old;

    if (running || kp_program_is_static() || pthread_attr_init(&attr) != 0)
        return running;
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); /* the program's signals are for the program's threads */
    running = pthread_create(&thread, &attr, run_for_ever, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
    return running;
}

static CUresult launch(CUstream stream, CUhostFn function, CUstreamCallback callback, void *data)
{
    uint64_t in[KP_HOST_FUNC_IN];
    struct call *call, **at = &calls;
    CUresult rc = kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (function == NULL && callback == NULL)
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    if ((rc = kp_stream_number(stream, &in[KP_HOST_FUNC_STREAM])) != CUDA_SUCCESS)
        return kp_leave(rc);
    if (!have_thread()) {
        kp_leave(rc);
        return kp_unsupported("a function of the program in a stream, without a thread for it");
    }
    if ((call = malloc(sizeof *call)) == NULL)
        return kp_leave(CUDA_ERROR_OUT_OF_MEMORY);
    *call = (struct call){++tokens, function, callback, stream, data, NULL};
    while (*at != NULL)
        at = &(*at)->next;
    *at = call;
    in[KP_HOST_FUNC_TOKEN] = call->token;
    kp_shim.host_pending++;
    pthread_cond_signal(&wanted);
    rc = kp_send(KP_OP_host_func, in, KP_HOST_FUNC_IN, NULL, 0);
    return rc;
}

CUresult kp_cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void *userData)
{
    return launch(hStream, fn, NULL, userData);
}

CUresult kp_cuStreamAddCallback(CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags)
{
    return flags != 0 ? CUDA_ERROR_INVALID_VALUE : launch(hStream, NULL, callback, userData);
}

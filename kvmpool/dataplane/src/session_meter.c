/* Measures what the session's launches cost the card, and makes them wait for the claim's turn (turns.h).
 *
 * Launches that follow each other in one stream are a batch: an event before, an event behind. A batch is closed when the guest has
 * sent no more, when it does anything else than launch, or when it is long; so the time between its events is the card's, not the
 * guest's. A thread takes the closed ones in order, charges the claim and gives the turn back when nothing is left; the reader makes
 * no launch without the turn, and little ahead of it where others wait. The same thread finds a batch that does not end.
 */
#define _GNU_SOURCE
#include "session_state.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "turns.h"

#define MARKS 256u
#define BATCH_LAUNCHES 128u     /* of one batch: a card that lives shows it */
#define FIRST_NS 2500000u       /* of a launch, until one was measured: four of them are a turn */
#define POLL_NS 500000          /* between two looks at a batch, where its age is watched */
#define SHARED_NS 1000000u
#define STACK_BYTES (256 * 1024)
#define EVENT_BLOCKING_SYNC 1u

struct mark {
    CUevent from, to;
    struct kp_home *home; /* whose events they are; NULL: none yet */
    void *stream;
    unsigned launches;
    struct mark *next;
};

struct kp_meter {
    struct kp_server *server;
    struct kp_turns turns;
    uint64_t timeout_ns; /* of a batch; 0: none */
    pthread_mutex_t lock;
    pthread_cond_t closed, settled; /* a batch for the thread; something for the reader */
    struct mark marks[MARKS], *spare, *open, *first, *last;
    struct mark *before; /* measured last: where the next begins to count */
    bool wanting;        /* the reader is about to launch */
    bool holding;        /* the turn is ours */
    bool locked;         /* ... by the lock, not because nobody gave it */
    bool shared;         /* with others that want the card; looked at every SHARED_NS */
    uint64_t since_ns, shared_ns, launch_ns;
    unsigned in_flight;
};

static uint64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ---- the reader's half; with the lock held ---- */

static void close_batch(struct kp_meter *m)
{
    struct mark *mark = m->open;

    if (mark == NULL)
        return;
    m->open = NULL;
    kp_note(m->server, mark->home, m->server->driver.cuEventRecord(mark->to, mark->stream));
    mark->next = NULL;
    if (m->first == NULL)
        m->first = mark;
    else
        m->last->next = mark;
    m->last = mark;
    pthread_cond_signal(&m->closed);
}

static CUresult have_events(struct kp_meter *m, struct mark *mark, struct kp_home *home)
{
    const struct kp_driver *d = &m->server->driver;
    CUresult rc;

    if (mark->home == home)
        return CUDA_SUCCESS;
    if (mark->home != NULL) { /* of another context; it lives, or kp_meter_forget had taken them */
        d->cuEventDestroy_v2(mark->from);
        d->cuEventDestroy_v2(mark->to);
    }
    mark->home = NULL;
    if ((rc = d->cuEventCreate(&mark->from, EVENT_BLOCKING_SYNC)) != CUDA_SUCCESS)
        return rc;
    if ((rc = d->cuEventCreate(&mark->to, EVENT_BLOCKING_SYNC)) != CUDA_SUCCESS) {
        d->cuEventDestroy_v2(mark->from);
        return rc;
    }
    mark->home = home;
    return CUDA_SUCCESS;
}

/* A batch that cannot be measured (no events to be had, a sticky error) is made all the same: its error is its own. */
static void open_batch(struct kp_meter *m, struct kp_home *home, void *stream)
{
    struct mark *mark = m->spare;

    if (mark == NULL)
        return;
    if (have_events(m, mark, home) != CUDA_SUCCESS || m->server->driver.cuEventRecord(mark->from, stream) != CUDA_SUCCESS)
        return;
    m->spare = mark->next;
    mark->stream = stream;
    mark->launches = 0;
    m->open = mark;
}

static void take_turn(struct kp_meter *m)
{
    int rc;

    pthread_mutex_unlock(&m->lock);
    rc = kp_turns_take(&m->turns);
    pthread_mutex_lock(&m->lock);
    m->holding = true;
    m->locked = rc == 0;
    m->since_ns = now_ns();
}

static void give_turn(struct kp_meter *m)
{
    if (m->holding && m->locked) {
        if (m->wanting)
            kp_turns_wish(&m->turns);
        kp_turns_leave(&m->turns);
    }
    m->holding = false;
}

/* Waits until all that was submitted is over. */
static void end_turn(struct kp_meter *m)
{
    close_batch(m);
    while (m->first != NULL)
        pthread_cond_wait(&m->settled, &m->lock);
    give_turn(m);
}

static bool is_shared(struct kp_meter *m)
{
    uint64_t now = now_ns();

    if (now - m->shared_ns >= SHARED_NS) {
        m->shared = kp_turns_shared(&m->turns);
        m->shared_ns = now;
    }
    return m->shared;
}

/* Where others wait, about one turn's work is ahead, so that it can be given back in time. */
static void wait_for_room(struct kp_meter *m, unsigned launches)
{
    if ((m->in_flight + launches) * m->launch_ns <= KP_TURN_NS || m->in_flight == 0 || !is_shared(m))
        return;
    close_batch(m);
    while (m->first != NULL && m->in_flight * m->launch_ns > KP_TURN_NS / 2)
        pthread_cond_wait(&m->settled, &m->lock);
}

/* `launches`: as how many it counts; a graph has many kernels. */
static void before_launch(struct kp_meter *m, struct kp_home *home, void *stream, unsigned launches)
{
    m->wanting = true;
    wait_for_room(m, launches);
    if (m->holding && now_ns() - m->since_ns >= KP_TURN_NS) {
        if (!kp_turns_due(&m->turns))
            m->since_ns = now_ns();
        else
            end_turn(m);
    }
    if (!m->holding)
        take_turn(m);
    m->wanting = false;
    if (m->open != NULL && (m->open->stream != stream || m->open->home != home || m->open->launches >= BATCH_LAUNCHES))
        close_batch(m);
    if (m->open == NULL)
        open_batch(m, home, stream);
    if (m->open != NULL) {
        m->open->launches += launches;
        m->in_flight += launches;
    } else if (m->first == NULL) {
        give_turn(m); /* nothing will be measured at whose end it could be given */
    }
}

/* ---- the thread's half ---- */

static uint64_t elapsed_ns(struct kp_meter *m, struct mark *mark)
{
    const struct kp_driver *d = &m->server->driver;
    float own = 0, gap = 0;

    if (d->cuEventElapsedTime(&own, mark->from, mark->to) != CUDA_SUCCESS || own <= 0)
        return 0;
    /* Beside an earlier batch in another stream: only what goes beyond that one. */
    if (m->before != NULL && m->before->home == mark->home &&
        d->cuEventElapsedTime(&gap, m->before->to, mark->from) == CUDA_SUCCESS && gap < 0)
        own += gap;
    return own > 0 ? (uint64_t)((double)own * 1e6) : 0;
}

/* The batch did not end in its time: those who wait are told, and the process goes, and with it what runs on the card. */
static _Noreturn void end_session(struct kp_meter *m, const struct mark *mark)
{
    kp_session_log(m->server, "ends: a batch of %u launches did not end in %llu ms", mark->launches,
                   (unsigned long long)(m->timeout_ns / 1000000));
    kp_tell_waiters(m->server, 702 /* LAUNCH_TIMEOUT */);
    _exit(3);
}

static CUresult wait_for_mark(struct kp_meter *m, struct mark *mark)
{
    const struct kp_driver *d = &m->server->driver;
    const struct timespec pause = {.tv_nsec = POLL_NS};
    uint64_t begun_ns = 0;
    CUresult rc;

    if (m->timeout_ns == 0)
        return d->cuEventSynchronize(mark->to);
    while ((rc = d->cuEventQuery(mark->to)) == CUDA_ERROR_NOT_READY) {
        if (begun_ns == 0 && d->cuEventQuery(mark->from) == CUDA_SUCCESS)
            begun_ns = now_ns();
        if (begun_ns != 0 && now_ns() - begun_ns > m->timeout_ns)
            end_session(m, mark);
        nanosleep(&pause, NULL);
    }
    return rc;
}

/* With the lock held: the first closed batch is over. */
static void settle(struct kp_meter *m, struct mark *mark, uint64_t ns)
{
    if (ns > 0) {
        kp_turns_charge(&m->turns, ns);
        m->launch_ns = (3 * m->launch_ns + ns / mark->launches) / 4;
    }
    m->in_flight -= mark->launches;
    m->first = mark->next;
    if (m->before != NULL) {
        m->before->next = m->spare;
        m->spare = m->before;
    }
    m->before = mark;
    if (m->first == NULL && m->open == NULL)
        give_turn(m);
    pthread_cond_broadcast(&m->settled);
}

static void *measure_for_ever(void *argument)
{
    struct kp_meter *m = argument;
    CUcontext current = NULL;

    pthread_mutex_lock(&m->lock);
    for (;;) {
        struct mark *mark;
        uint64_t ns = 0;

        while ((mark = m->first) == NULL)
            pthread_cond_wait(&m->closed, &m->lock);
        pthread_mutex_unlock(&m->lock);
        if (mark->home->context != current && m->server->driver.cuCtxSetCurrent(mark->home->context) == CUDA_SUCCESS)
            current = mark->home->context;
        if (wait_for_mark(m, mark) == CUDA_SUCCESS)
            ns = elapsed_ns(m, mark);
        pthread_mutex_lock(&m->lock);
        settle(m, mark, ns);
    }
    return NULL;
}

static bool start_thread(struct kp_meter *m)
{
    pthread_attr_t attr;
    pthread_t thread;
    bool made;

    if (pthread_attr_init(&attr) != 0)
        return false;
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attr, STACK_BYTES);
    made = pthread_create(&thread, &attr, measure_for_ever, m) == 0;
    pthread_attr_destroy(&attr);
    return made;
}

/* ---- for the session's other files ---- */

int kp_meter_start(struct kp_server *s)
{
    const struct kp_session *session = s->session;
    struct kp_meter *m;

    if (session->turns.page == NULL)
        return 0;
    if ((m = calloc(1, sizeof *m)) == NULL)
        return -ENOMEM;
    *m = (struct kp_meter){.server = s, .turns = session->turns, .timeout_ns = session->launch_timeout_ms * 1000000};
    m->launch_ns = FIRST_NS;
    pthread_mutex_init(&m->lock, NULL);
    pthread_cond_init(&m->closed, NULL);
    pthread_cond_init(&m->settled, NULL);
    for (unsigned i = 0; i < MARKS; i++) {
        m->marks[i].next = m->spare;
        m->spare = &m->marks[i];
    }
    if (!start_thread(m)) {
        free(m);
        return -ENOMEM;
    }
    s->meter = m;
    return 0;
}

/* 0: it computes nothing on the card. */
static unsigned launches_of(struct kp_server *s, const struct kp_work *w)
{
    if (w->op == KP_OP_launch)
        return 1;
    return w->op == KP_OP_cuGraphLaunch ? kp_exec_launches(s, w->in[0]) : 0;
}

void kp_meter_call(struct kp_server *s, const struct kp_work *w)
{
    struct kp_meter *m = s->meter;
    unsigned launches = launches_of(s, w);
    void *stream;

    if (m == NULL)
        return;
    pthread_mutex_lock(&m->lock);
    if (launches == 0)
        close_batch(m);
    else if (kp_resolve(s, w->op == KP_OP_launch ? w->in[KP_LAUNCH_STREAM] : w->in[1], KP_STREAM, &stream) == CUDA_SUCCESS &&
             !kp_capturing(s, stream)) /* else nothing runs now */
        before_launch(m, w->home, stream, launches);
    pthread_mutex_unlock(&m->lock);
}

void kp_meter_idle(struct kp_server *s)
{
    struct kp_meter *m = s->meter;

    if (m == NULL || m->open == NULL) /* only the reader opens and closes */
        return;
    pthread_mutex_lock(&m->lock);
    if (m->spare != NULL) /* else the card is far behind, and nothing idle is counted */
        close_batch(m);
    pthread_mutex_unlock(&m->lock);
}

void kp_meter_leave(struct kp_server *s)
{
    struct kp_meter *m = s->meter;

    if (m == NULL || m->open == NULL)
        return;
    pthread_mutex_lock(&m->lock);
    close_batch(m); /* its default stream is the current context's */
    pthread_mutex_unlock(&m->lock);
}

void kp_meter_forget(struct kp_server *s, const struct kp_home *home)
{
    struct kp_meter *m = s->meter;

    if (m == NULL)
        return;
    pthread_mutex_lock(&m->lock);
    close_batch(m);
    while (m->first != NULL)
        pthread_cond_wait(&m->settled, &m->lock);
    for (unsigned i = 0; i < MARKS; i++)
        if (m->marks[i].home == home)
            m->marks[i].home = NULL; /* its events go with the context */
    pthread_mutex_unlock(&m->lock);
}

/* Functions of the guest's program that a stream runs in its turn: the driver calls back here, and waits here until the guest's
 * thread says that its function has returned.
 *
 * The reader may be waiting for that very stream, so that word must not come through it. With the first such function another
 * thread, the ear, takes over the connection: it hears the guest's thread itself and hands all else on to the reader.
 */
#define _GNU_SOURCE
#include "session_state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define STACK_BYTES (256 * 1024)
#define PIECE_BYTES 65536u
#define KEPT_BYTES (64u << 20) /* heard ahead of the reader; more waits in the connection */

struct due {
    struct kp_server *server;
    uint64_t token;
    CUresult status;
    bool over;
    struct due *next;
};

struct piece {
    struct piece *next;
    size_t at, end;
    unsigned char bytes[PIECE_BYTES];
};

struct kp_host {
    pthread_mutex_t lock;
    pthread_cond_t word; /* a function is over, or the guest is gone */
    bool gone;
    bool asked; /* the guest's thread waits for the next one, as call asked_seq */
    uint32_t asked_seq;
    struct due *due, **due_end, *running; /* waiting for their turn in the guest's thread; handed to it */

    pthread_cond_t heard, taken;
    struct piece *pieces, **pieces_end;
    size_t kept;
    int end; /* 1: nothing more comes, or a negative errno */
    unsigned char header[KP_HEADER_BYTES + sizeof(uint64_t)];
};

/* With the lock held: the guest's thread gets the next function where it waits for one. */
static int hand_out(struct kp_server *s)
{
    struct kp_host *host = s->host;
    struct due *due = host->due;
    struct kp_host_due *give;
    struct kp_work answer = {.op = KP_OP_host_next, .seq = host->asked_seq};

    if (!host->asked || due == NULL)
        return 0;
    if ((give = malloc(sizeof *give)) == NULL)
        return -ENOMEM;
    *give = (struct kp_host_due){.token = due->token, .status = due->status};
    answer.give = give;
    answer.give_bytes = sizeof *give;
    host->asked = false;
    if ((host->due = due->next) == NULL)
        host->due_end = &host->due;
    due->next = host->running;
    host->running = due;
    return kp_reply(s, &answer, CUDA_SUCCESS);
}

static void put_due(struct kp_host *host, struct due *due)
{
    *host->due_end = due;
    host->due_end = &due->next;
}

/* On a thread of the driver's: the stream goes on when this returns. */
static void at_turn(CUstream stream, CUresult status, void *data)
{
    struct due *due = data, **at;
    struct kp_host *host = due->server->host;

    (void)stream;
    pthread_mutex_lock(&host->lock);
    due->status = status;
    put_due(host, due);
    if (hand_out(due->server) != 0)
        shutdown(due->server->fd, SHUT_RDWR);
    while (!due->over && !host->gone)
        pthread_cond_wait(&host->word, &host->lock);
    for (at = &host->running; *at != NULL && *at != due; at = &(*at)->next)
        ;
    if (*at == due)
        *at = due->next;
    if (due->over)
        free(due); /* else it may be in a list still, and the process ends */
    pthread_mutex_unlock(&host->lock);
}

/* The guest's thread: `done` is over (0: it begins); where it waits for an answer, that is the next function. */
static int next(struct kp_server *s, uint64_t done, bool wanted, uint32_t seq)
{
    struct kp_host *host = s->host;
    int rc = 0;

    pthread_mutex_lock(&host->lock);
    for (struct due *due = host->running; due != NULL; due = due->next)
        if (due->token == done)
            due->over = true;
    pthread_cond_broadcast(&host->word);
    if (wanted && host->asked)
        rc = -EPROTO; /* there is one such thread */
    if (wanted && rc == 0) {
        host->asked = true;
        host->asked_seq = seq;
        rc = hand_out(s);
    }
    pthread_mutex_unlock(&host->lock);
    return rc;
}

/* ---- the ear ---- */

static void keep(struct kp_host *host, const unsigned char *bytes, size_t length)
{
    pthread_mutex_lock(&host->lock);
    while (host->kept > KEPT_BYTES)
        pthread_cond_wait(&host->taken, &host->lock);
    while (length > 0) {
        struct piece *last = host->pieces == NULL ? NULL : (struct piece *)(void *)((char *)host->pieces_end - offsetof(struct piece, next));
        if (last == NULL || last->end == PIECE_BYTES) {
            if ((last = malloc(sizeof *last)) == NULL) {
                host->end = -ENOMEM;
                break;
            }
            last->next = NULL;
            last->at = last->end = 0;
            *host->pieces_end = last;
            host->pieces_end = &last->next;
        }
        size_t n = PIECE_BYTES - last->end < length ? PIECE_BYTES - last->end : length;
        memcpy(last->bytes + last->end, bytes, n);
        last->end += n;
        host->kept += n;
        bytes += n;
        length -= n;
    }
    pthread_cond_signal(&host->heard);
    pthread_mutex_unlock(&host->lock);
}

ssize_t kp_host_read(struct kp_server *s, void *to, size_t room)
{
    struct kp_host *host = s->host;
    struct piece *piece;
    ssize_t got;

    pthread_mutex_lock(&host->lock);
    while (host->kept == 0 && host->end == 0)
        pthread_cond_wait(&host->heard, &host->lock);
    if (host->kept == 0) {
        got = host->end < 0 ? host->end : 0;
    } else {
        piece = host->pieces;
        got = (ssize_t)(piece->end - piece->at < room ? piece->end - piece->at : room);
        memcpy(to, piece->bytes + piece->at, (size_t)got);
        piece->at += (size_t)got;
        host->kept -= (size_t)got;
        if (piece->at == piece->end) {
            if ((host->pieces = piece->next) == NULL)
                host->pieces_end = &host->pieces;
            free(piece);
        }
        pthread_cond_signal(&host->taken);
    }
    pthread_mutex_unlock(&host->lock);
    return got;
}

struct ear {
    struct kp_server *server;
    size_t at, end; /* what the reader had read ahead */
    unsigned char bytes[PIECE_BYTES];
};

static int hear(struct ear *ear, unsigned char *to, size_t bytes)
{
    while (bytes > 0) {
        if (ear->at == ear->end) {
            ssize_t n = kp_read_more(ear->server, ear->bytes, sizeof ear->bytes);
            if (n <= 0)
                return n == 0 ? 1 : (int)n;
            ear->at = 0;
            ear->end = (size_t)n;
        }
        size_t n = ear->end - ear->at < bytes ? ear->end - ear->at : bytes;
        memcpy(to, ear->bytes + ear->at, n);
        ear->at += n;
        to += n;
        bytes -= n;
    }
    return 0;
}

/* One frame: 0, 1 at the end, or a negative errno. */
static int hear_frame(struct ear *ear)
{
    static unsigned char body[PIECE_BYTES]; /* there is one ear */
    unsigned char header[KP_HEADER_BYTES];
    struct kp_frame frame;
    uint64_t done;
    int rc = hear(ear, header, sizeof header);

    if (rc == 0)
        rc = kp_frame_check(header, &frame);
    if (rc != 0)
        return rc;
    if (frame.op == KP_OP_host_next) {
        if (frame.length != sizeof done)
            return -EPROTO;
        rc = hear(ear, (unsigned char *)&done, sizeof done);
        return rc == 0 ? next(ear->server, done, (frame.flags & KP_FLAG_REPLY) != 0, frame.seq) : rc;
    }
    keep(ear->server->host, header, sizeof header);
    for (uint32_t left = frame.length, n; left > 0 && rc == 0; left -= n) {
        n = left < sizeof body ? left : (uint32_t)sizeof body;
        if ((rc = hear(ear, body, n)) == 0)
            keep(ear->server->host, body, n);
    }
    return rc;
}

static void *hear_for_ever(void *argument)
{
    struct ear *ear = argument;
    struct kp_host *host = ear->server->host;
    int rc;

    while ((rc = hear_frame(ear)) == 0)
        ;
    pthread_mutex_lock(&host->lock);
    host->gone = true; /* nobody runs the functions any more: the streams go on */
    host->end = rc;
    pthread_cond_broadcast(&host->word);
    pthread_cond_signal(&host->heard);
    pthread_mutex_unlock(&host->lock);
    free(ear);
    return NULL;
}

/* By the reader, between two frames. */
static CUresult start(struct kp_server *s)
{
    struct kp_host *host = calloc(1, sizeof *host);
    struct ear *ear = malloc(sizeof *ear);
    pthread_attr_t attr;
    pthread_t thread;
    int rc = host == NULL || ear == NULL ? -ENOMEM : pthread_attr_init(&attr);

    if (rc == 0) {
        *ear = (struct ear){.server = s, .end = s->in_end - s->in_at};
        memcpy(ear->bytes, s->in + s->in_at, ear->end);
        host->due_end = &host->due;
        host->pieces_end = &host->pieces;
        pthread_mutex_init(&host->lock, NULL);
        pthread_cond_init(&host->word, NULL);
        pthread_cond_init(&host->heard, NULL);
        pthread_cond_init(&host->taken, NULL);
        s->host = host;
        pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
        pthread_attr_setstacksize(&attr, STACK_BYTES);
        rc = pthread_create(&thread, &attr, hear_for_ever, ear);
        pthread_attr_destroy(&attr);
    }
    if (rc != 0) {
        s->host = NULL;
        free(host);
        free(ear);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    s->in_at = s->in_end; /* the ear has it */
    return CUDA_SUCCESS;
}
_Static_assert(KP_READ_BYTES <= PIECE_BYTES, "the ear takes what the reader had");

/* A function that will not be called is told to the guest, which waits for each. */
int kp_do_host_func(struct kp_server *s, struct kp_work *w)
{
    struct due *due = calloc(1, sizeof *due);
    void *stream;
    int rc = due != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;

    if (rc == CUDA_SUCCESS && s->host == NULL)
        rc = start(s);
    if (rc != CUDA_SUCCESS) {
        free(due);
        return rc == CUDA_ERROR_OUT_OF_MEMORY && s->host == NULL ? -ENOMEM : rc;
    }
    *due = (struct due){.server = s, .token = w->in[KP_HOST_FUNC_TOKEN]};
    if ((rc = kp_resolve(s, w->in[KP_HOST_FUNC_STREAM], KP_STREAM, &stream)) == CUDA_SUCCESS)
        rc = s->driver.cuStreamAddCallback(stream, at_turn, due, 0);
    if (rc == CUDA_SUCCESS)
        return rc;
    pthread_mutex_lock(&s->host->lock);
    due->status = rc;
    due->over = true;
    put_due(s->host, due);
    if (hand_out(s) != 0)
        rc = -EPIPE;
    pthread_mutex_unlock(&s->host->lock);
    return rc;
}

/* Only the ear hears it; before the first function no shim says it. */
int kp_do_host_next(struct kp_server *s, struct kp_work *w)
{
    (void)s;
    (void)w;
    return -EPROTO;
}

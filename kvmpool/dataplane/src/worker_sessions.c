/* worker_sessions.c: one child a guest process; started, killed, reaped, its memory given back. */
#define _GNU_SOURCE
#include "worker.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "refuse.h"

/* Leaves open: the standard three, the guest's socket, its descriptor of the card's turns, and the lock, which so stays held until
 * the last session is gone, even when the parent was killed: a free lock proves that nobody uses the claim's memory. */
static void close_all_but(int kept[], unsigned count)
{
    unsigned from = 3;

    for (unsigned i = 1; i < count; i++) /* in order */
        for (unsigned k = i; k > 0 && kept[k - 1] > kept[k]; k--) {
            int swap = kept[k];
            kept[k] = kept[k - 1];
            kept[k - 1] = swap;
        }
    for (unsigned i = 0; i < count; i++) {
        if ((unsigned)kept[i] > from)
            close_range(from, (unsigned)kept[i] - 1, 0);
        from = (unsigned)kept[i] + 1;
    }
    close_range(from, ~0U, 0);
}

/* In the child: dies with the parent; -ESRCH where that has ended before. */
static int die_with(pid_t parent)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    return getppid() == parent ? 0 : -ESRCH;
}

static _Noreturn void serve(struct worker *worker, pid_t parent, unsigned slot, int guest_fd, const struct kp_hello *hello,
                            const struct kp_place *place)
{
    struct kp_session session = worker->shared;
    sigset_t none;
    int rc;

    if (die_with(parent))
        _exit(1);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    session.slot = slot;
    kp_socket_widen(guest_fd); /* while it is root */
    session.place = *place;
    rc = kp_turns_join(&session.turns, slot);
    close_all_but((int[]){ guest_fd, worker->lock_fd, session.turns.fd, place->fd }, place->bytes > 0 ? 4 : 3);
    if (!rc)
        rc = kp_confine_enter(&worker->options.confine, (int)slot);
    if (rc) {
        kp_log(KP_ERROR, "session refused: it cannot be confined: %s", strerror(-rc));
        kp_refuse(guest_fd, -EPERM, "%s: the host cannot confine its process", worker->label);
        _exit(1);
    }
    if (die_with(parent)) /* another user is another parent's death signal: it was cleared */
        _exit(1);
    rc = kp_session_run(&session, guest_fd, hello);
    _exit(rc ? 1 : 0);
}

static int free_slot(const struct worker *worker)
{
    for (unsigned i = 0; i < KP_ACCOUNT_SLOTS; i++)
        if (!worker->sessions[i].pid)
            return (int)i;
    return -1;
}

static const char *transport_of(int guest_fd)
{
    int domain = 0;
    socklen_t length = sizeof(domain);

    if (getsockopt(guest_fd, SOL_SOCKET, SO_DOMAIN, &domain, &length))
        return "unknown";
    return domain == AF_UNIX ? "unix" : domain == AF_VSOCK ? "vsock" : "tcp";
}

/* Once: its reader finds out too, unless it waits for the card. */
static void on_guest_gone(struct kp_watch *watch, uint32_t events)
{
    struct worker_session *session = (struct worker_session *)watch;

    (void)events;
    if (session->pid && !session->gone_ms)
        session->gone_ms = kp_now_ms();
}

uint64_t worker_sessions_next_ms(const struct worker *worker)
{
    uint64_t next = UINT64_MAX;

    for (unsigned i = 0; i < KP_ACCOUNT_SLOTS; i++)
        if (worker->sessions[i].pid && worker->sessions[i].gone_ms && worker->sessions[i].gone_ms + WORKER_GONE_MS < next)
            next = worker->sessions[i].gone_ms + WORKER_GONE_MS;
    return next;
}

void worker_sessions_expire(struct worker *worker, uint64_t now_ms)
{
    for (unsigned i = 0; i < KP_ACCOUNT_SLOTS; i++) {
        struct worker_session *session = &worker->sessions[i];

        if (!session->pid || !session->gone_ms || session->gone_ms + WORKER_GONE_MS > now_ms)
            continue;
        kp_log_rated(&worker->rate, KP_INFO, "session %u (pid %d): its guest went while it waited for the card; it is killed", i,
                     (int)session->pid);
        kill(session->pid, SIGKILL);
        session->gone_ms = 0;
    }
}

void worker_session_start(struct worker *worker, int guest_fd, const struct kp_hello *hello, const struct kp_place *place)
{
    int slot = free_slot(worker);
    struct worker_session *session;
    pid_t parent = getpid(), pid;

    if (slot < 0 || worker->ending_since_ms) {
        worker->refused_full++;
        kp_log_rated(&worker->rate, KP_WARNING, "session refused: %s",
                     slot < 0 ? "every slot is taken" : "the worker is ending");
        kp_refuse(guest_fd, -EBUSY, "%s: %s", worker->label,
                  slot < 0 ? "no more processes at once" : "this binding is ending");
        close(guest_fd);
        return;
    }
    pid = fork();
    if (pid == 0)
        serve(worker, parent, (unsigned)slot, guest_fd, hello, place);
    if (pid < 0) {
        kp_log(KP_ERROR, "session refused: no process: %s", strerror(errno));
        kp_refuse(guest_fd, -ENOMEM, "%s: the host has no process for it", worker->label);
        close(guest_fd);
        return;
    }
    session = &worker->sessions[slot];
    *session = (struct worker_session){ .guest = { .on_event = on_guest_gone, .fd = guest_fd }, .pid = pid, .started_ms = kp_now_ms(),
                                        .guest_pid = hello->pid, .transport = transport_of(guest_fd) };
    if (kp_loop_watch(&worker->loop, &session->guest, EPOLLRDHUP | EPOLLET))
        kp_log_rated(&worker->rate, KP_WARNING, "session %d: the end of its guest cannot be watched", slot);
    memcpy(session->program, hello->program, sizeof(session->program));
    worker->served++;
    kp_log_rated(&worker->rate, KP_INFO, "session %d (pid %d) serves %s (guest pid %u)", slot, (int)pid, session->program,
                 session->guest_pid);
}

static void end_of_session(struct worker *worker, unsigned slot, int status)
{
    struct worker_session *session = &worker->sessions[slot];
    uint64_t bytes = kp_account_clear(worker->account, slot);
    int crashed = WIFSIGNALED(status);

    shutdown(session->guest.fd, SHUT_RDWR);
    kp_loop_drop(&worker->loop, &session->guest);
    kp_log_rated(&worker->rate, crashed && !worker->ending_since_ms ? KP_WARNING : KP_INFO,
                 "session %u (pid %d) ended: %s %d; %llu bytes given back", slot, (int)session->pid,
                 crashed ? "signal" : "exit", crashed ? WTERMSIG(status) : WEXITSTATUS(status), (unsigned long long)bytes);
    kp_turns_forget(&worker->shared.turns, slot);
    kp_confine_clear(&worker->options.confine, slot);
    *session = (struct worker_session){ .guest.fd = -1 };
}

void worker_sessions_reap(struct worker *worker)
{
    int status;
    pid_t pid;

    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        for (unsigned i = 0; i < KP_ACCOUNT_SLOTS; i++)
            if (worker->sessions[i].pid == pid)
                end_of_session(worker, i, status);
}

void worker_sessions_kill(struct worker *worker)
{
    for (unsigned i = 0; i < KP_ACCOUNT_SLOTS; i++) {
        if (!worker->sessions[i].pid)
            continue;
        kill(worker->sessions[i].pid, SIGKILL);
        shutdown(worker->sessions[i].guest.fd, SHUT_RDWR);
    }
}

unsigned worker_sessions_count(const struct worker *worker)
{
    unsigned count = 0;

    for (unsigned i = 0; i < KP_ACCOUNT_SLOTS; i++)
        count += worker->sessions[i].pid != 0;
    return count;
}

void worker_sessions_report(const struct worker *worker, struct kp_json *json)
{
    kp_json_array(json, "processes");
    for (unsigned i = 0; i < KP_ACCOUNT_SLOTS; i++) {
        const struct worker_session *session = &worker->sessions[i];

        if (!session->pid)
            continue;
        kp_json_object(json, NULL);
        kp_json_number(json, "slot", i);
        kp_json_number(json, "pid", (uint64_t)session->pid);
        kp_json_number(json, "guest_pid", session->guest_pid);
        kp_json_text(json, "program", session->program);
        kp_json_text(json, "transport", atomic_load(&worker->account->shared[i]) ? "shm" : session->transport);
        kp_json_number(json, "age_ms", kp_now_ms() - session->started_ms);
        kp_json_number(json, "memory_used", atomic_load(&worker->account->slot[i]));
        kp_json_number(json, "pinned_used", atomic_load(&worker->account->pinned[i]));
        kp_json_object_end(json);
    }
    kp_json_array_end(json);
}

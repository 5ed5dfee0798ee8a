/* worker.c: kvmpool-worker: serves one binding until told to stop or its relay is gone. Its exit proves all its sessions gone. */
#define _GNU_SOURCE
#include "worker.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "card.h"

static struct worker worker;

void worker_end(struct worker *self, const char *reason)
{
    if (self->ending_since_ms)
        return;
    self->ending_since_ms = kp_now_ms();
    kp_log(KP_INFO, "ends: %s (%u sessions)", reason, worker_sessions_count(self));
    worker_sessions_kill(self);
}

static void on_signal(struct kp_watch *watch, uint32_t events)
{
    struct signalfd_siginfo signal;

    (void)events;
    if (read(watch->fd, &signal, sizeof(signal)) != (ssize_t)sizeof(signal))
        return;
    if (signal.ssi_signo == SIGCHLD)
        worker_sessions_reap(&worker);
    else
        worker_end(&worker, "terminated by a signal");
}

static int watch_signals(void)
{
    sigset_t set;

    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    if (sigprocmask(SIG_BLOCK, &set, NULL))
        return -errno;
    worker.signals = (struct kp_watch){ .on_event = on_signal, .fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK) };
    return worker.signals.fd < 0 ? -errno : kp_loop_watch(&worker.loop, &worker.signals, EPOLLIN);
}

/* Once, to the starter that waits for it; a starter that is gone is no matter. */
static void tell_starter(const char *word, const char *why)
{
    if (worker.options.ready_fd < 0)
        return;
    dprintf(worker.options.ready_fd, "%s%s%s\n", word, why[0] ? " " : "", why);
    close(worker.options.ready_fd);
    worker.options.ready_fd = -1;
}

static int fail(const char *what, int error)
{
    kp_log(KP_ERROR, "%s: %s", what, strerror(-error));
    tell_starter("failed", what);
    return 1;
}

static int check_card(void)
{
    char word[KP_CARD_WORD_MAX] = "";

    if (!kp_card_check(&worker.options.confine, worker.options.card, (unsigned)worker.options.card_deadline_ms, word))
        return 0;
    kp_log(KP_ERROR, "card %s does not open: %s", worker.options.card, word);
    tell_starter("card", word);
    return WORKER_EXIT_CARD;
}

static int open_account(void)
{
    struct kp_session *shared = &worker.shared;

    worker.account = kp_account_new(worker.options.memory_mib << 20);
    if (!worker.account)
        return -errno;
    if (worker.options.pinned_mib)
        worker.account->pinned_limit = worker.options.pinned_mib << 20;
    shared->account = worker.account;
    shared->cache = kp_cache_new();
    shared->memory_bytes = worker.account->limit;
    shared->log_fd = STDERR_FILENO;
    shared->launch_timeout_ms = worker.options.launch_timeout_ms;
    memcpy(shared->pci, worker.options.virtual_pci, sizeof(shared->pci));
    return worker_uuid_parse(worker.options.virtual_uuid, shared->uuid);
}

/* A page a card, beside the domains' folders. */
static int open_turns(void)
{
    const struct worker_options *options = &worker.options;
    struct kp_turns *turns = &worker.shared.turns;
    char path[KP_PATH_MAX + sizeof(options->card) + 16];
    int rc;

    snprintf(path, sizeof(path), "%s/turns", options->directory);
    if (mkdir(path, 0700) && errno != EEXIST)
        return -errno;
    snprintf(path, sizeof(path), "%s/turns/%s", options->directory, options->card);
    rc = kp_turns_open(turns, path, (uint32_t)options->compute_percent, (uint32_t)options->compute_limit_percent);
    turns->free = options->confine.mps;
    return rc;
}

/* With MPS the hard limit is the card's own (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is read when a context is made). */
static void choose_card(void)
{
    const struct worker_options *options = &worker.options;
    char percent[24];

    setenv("CUDA_VISIBLE_DEVICES", options->card, 1);
    snprintf(percent, sizeof(percent), "%llu", (unsigned long long)options->compute_limit_percent);
    if (options->confine.mps && options->compute_limit_percent < 100)
        setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percent, 1);
}

/* Milliseconds until something must be looked at without an event; -1: never. */
static int next_look(void)
{
    uint64_t now = kp_now_ms(), heard = worker_relay_heard_ms(&worker), next = worker_sessions_next_ms(&worker);

    if (worker.ending_since_ms)
        return 100;
    if (heard && heard + WORKER_SILENCE_MS < next)
        next = heard + WORKER_SILENCE_MS;
    if (next == UINT64_MAX)
        return -1;
    return next <= now ? 0 : (int)(next - now);
}

static void look(void)
{
    uint64_t now = kp_now_ms(), heard = worker_relay_heard_ms(&worker);

    if (heard && now - heard >= WORKER_SILENCE_MS)
        worker_end(&worker, "its relay was silent for 10 s");
    worker_sessions_expire(&worker, now);
    if (!worker.ending_since_ms)
        return;
    worker_sessions_reap(&worker);
    if (!worker_sessions_count(&worker)) {
        worker.loop.ended = 1;
    } else if (now - worker.ending_since_ms >= WORKER_STUCK_MS && now - worker.stuck_logged_ms >= KP_RATE_WINDOW_MS) {
        worker.stuck_logged_ms = now;
        for (unsigned i = 0; i < KP_ACCOUNT_SLOTS; i++)
            if (worker.sessions[i].pid)
                kp_log(KP_ERROR, "session %u (pid %d) was killed and does not go: it is stuck in the driver", i,
                       (int)worker.sessions[i].pid);
    }
}

static int serve(const char *socket_path)
{
    int rc = worker_peers_listen(&worker, socket_path);

    if (rc)
        return fail("the control socket", rc);
    kp_log(KP_INFO, "ready: card %s, %llu MiB, pid %d", worker.options.card, (unsigned long long)worker.options.memory_mib,
           (int)getpid());
    tell_starter("ready", "");
    while (!worker.loop.ended && !rc) {
        rc = kp_loop_turn(&worker.loop, next_look());
        look();
    }
    unlink(socket_path);
    kp_log(KP_INFO, "ended");
    return rc ? 1 : 0;
}

/* mkdir -p of the last two parts: the workers' directory and the domain's in it. */
static int make_directory(char *path, size_t size)
{
    const struct worker_options *options = &worker.options;

    if (mkdir(options->directory, 0755) && errno != EEXIST)
        return -errno;
    if ((size_t)snprintf(path, size, "%s/%s", options->directory, options->uuid) >= size)
        return -ENAMETOOLONG;
    return mkdir(path, 0750) && errno != EEXIST ? -errno : 0;
}

int main(int argc, char **argv)
{
    char directory[KP_PATH_MAX + KP_UUID_MAX], name[KP_CONTROL_NAME_MAX], path[sizeof(directory) + sizeof(name) + 1];
    const struct worker_options *options = &worker.options;
    int rc;

    if (worker_options_read(&worker.options, argc, argv))
        return 2;
    if (options->detach && (rc = kp_detach()))
        return fail("detaching", rc);
    snprintf(worker.label, sizeof(worker.label), "%s/%s#%llu", options->domain, options->claim,
             (unsigned long long)options->generation);
    kp_log_name(worker.label);
    rc = make_directory(directory, sizeof(directory));
    if (rc)
        return fail("the run directory", rc);
    snprintf(name, sizeof(name), "%s#%llu.lock", options->claim, (unsigned long long)options->generation);
    worker.lock_fd = kp_lock_take(directory, name);
    if (worker.lock_fd == -EWOULDBLOCK) {
        tell_starter("busy", "");
        return WORKER_EXIT_BUSY;
    }
    if (worker.lock_fd < 0)
        return fail("the lock", worker.lock_fd);
    choose_card();
    rc = kp_confine_prepare(&worker.options.confine);
    if (rc)
        return fail("the user of its sessions", rc);
    rc = check_card();
    if (rc)
        return rc;
    rc = kp_loop_open(&worker.loop);
    if (!rc)
        rc = watch_signals();
    if (!rc)
        rc = open_account();
    if (!rc)
        rc = open_turns();
    if (rc)
        return fail("starting", rc);
    snprintf(path, sizeof(path), "%s/%s#%llu.sock", directory, options->claim, (unsigned long long)options->generation);
    return serve(path);
}

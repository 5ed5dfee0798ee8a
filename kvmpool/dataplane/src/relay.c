/* relay.c: kvmpool-relay: one domain's door. Lives as long as its domain; kvmpoold may come and go. */
#define _GNU_SOURCE
#include "relay.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <unistd.h>

struct relay the_relay;

void relay_end(struct relay *relay, const char *reason)
{
    if (relay->loop.ended)
        return;
    kp_log(KP_INFO, "ends: %s (%u sessions)", reason, relay_guests_count(relay, GUEST_SERVED, NULL));
    relay->loop.ended = 1;
}

static void on_signal(struct kp_watch *watch, uint32_t events)
{
    struct signalfd_siginfo signal;

    (void)events;
    if (read(watch->fd, &signal, sizeof(signal)) == (ssize_t)sizeof(signal))
        relay_end(&the_relay, "terminated by a signal");
}

static int watch_signals(struct relay *relay)
{
    sigset_t set;

    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    if (sigprocmask(SIG_BLOCK, &set, NULL))
        return -errno;
    relay->signals = (struct kp_watch){ .on_event = on_signal, .fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK) };
    return relay->signals.fd < 0 ? -errno : kp_loop_watch(&relay->loop, &relay->signals, EPOLLIN);
}

static void on_followed(struct kp_watch *watch, uint32_t events)
{
    (void)events;
    kp_loop_drop(&the_relay.loop, watch);
    kp_log(KP_INFO, "its domain's process %llu ended", (unsigned long long)the_relay.followed_pid);
    the_relay.orphaned = 1;
    relay_guests_cut(&the_relay, NULL);
    if (!the_relay.watcher)
        relay_unwatched(&the_relay);
}

/* A kvmpoold that lives withdraws the domain first, and then closes its relay: otherwise its workers seem to have broken. */
void relay_unwatched(struct relay *relay)
{
    relay->watcher = NULL;
    if (relay->orphaned)
        relay_end(relay, "its domain's process ended");
}

int relay_follow(struct relay *relay, uint64_t pid, uint64_t start_time)
{
    int rc, fd = pidfd_open((pid_t)pid, 0);

    if (fd < 0)
        return -errno;
    /* The number is checked after the descriptor is held: from here on it cannot become somebody else's. */
    if (kp_start_time((pid_t)pid) != start_time) {
        close(fd);
        return -ESRCH;
    }
    kp_loop_drop(&relay->loop, &relay->followed);
    relay->followed = (struct kp_watch){ .on_event = on_followed, .fd = fd };
    rc = kp_loop_watch(&relay->loop, &relay->followed, EPOLLIN);
    if (rc)
        kp_loop_drop(&relay->loop, &relay->followed);
    relay->followed_pid = rc ? 0 : pid;
    relay->orphaned = 0; /* the domain has started again already */
    return rc;
}

static int wait_ms(const struct relay *relay)
{
    uint64_t now = kp_now_ms(), guests = relay_guests_next_ms(relay), claims = relay_claims_next_ms(relay);
    uint64_t next = guests < claims ? guests : claims;

    if (next == UINT64_MAX)
        return -1;
    return next <= now ? 0 : (int)(next - now);
}

static void allow_descriptors(void)
{
    struct rlimit limit;
    const rlim_t want = RELAY_GUESTS + RELAY_CLAIMS + RELAY_CONTROLS + 64;

    if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur >= want)
        return;
    limit.rlim_cur = limit.rlim_max < want ? limit.rlim_max : want;
    setrlimit(RLIMIT_NOFILE, &limit);
}

static void tell_starter(struct relay *relay, const char *word, const char *rest)
{
    if (relay->options.ready_fd < 0)
        return;
    dprintf(relay->options.ready_fd, "%s %s\n", word, rest);
    close(relay->options.ready_fd);
    relay->options.ready_fd = -1;
}

static int fail(struct relay *relay, const char *what, int error)
{
    char text[KP_PATH_MAX];

    snprintf(text, sizeof(text), "%s: %s", what, strerror(-error));
    kp_log(KP_ERROR, "%s", text);
    tell_starter(relay, "failed", text);
    return 1;
}

static int serve(struct relay *relay)
{
    int rc = 0;

    kp_log(KP_INFO, "ready at %s, pid %d", relay->endpoint, (int)getpid());
    tell_starter(relay, "ready", relay->endpoint);
    while (!relay->loop.ended && !rc) {
        uint64_t now;

        rc = kp_loop_turn(&relay->loop, wait_ms(relay));
        now = kp_now_ms();
        relay_guests_expire(relay, now);
        relay_claims_tick(relay, now);
    }
    relay_guests_cut(relay, NULL);
    return rc;
}

/* The lock, the token, the loop, the endpoint, the control socket, in this order: each needs the ones before. The name of the
 * one that failed is left in `what`. */
static int open_all(struct relay *relay, const char *directory, const char *path, const char **what)
{
    const struct relay_options *options = &relay->options;
    int rc = kp_lock_take(directory, "relay.lock"); /* held until the process ends */

    *what = "the lock";
    if (rc < 0)
        return rc;
    *what = relay->options.token_file;
    rc = relay_token_read(relay);
    if (rc)
        return rc;
    *what = "starting";
    rc = kp_loop_open(&relay->loop);
    if (!rc)
        rc = watch_signals(relay);
    if (rc)
        return rc;
    *what = relay->options.endpoint;
    rc = relay_listen(relay);
    if (rc)
        return rc;
    *what = options->window;
    rc = relay_window_open(relay);
    if (rc) { /* its guests go without, by their sockets */
        kp_log(KP_WARNING, "shared memory: %s: %s", options->window, strerror(-rc));
        relay->window.fd = -1;
    }
    *what = path;
    return relay_control_listen(relay, path);
}

int main(int argc, char **argv)
{
    struct relay *relay = &the_relay;
    char directory[KP_PATH_MAX + KP_UUID_MAX], path[sizeof(directory) + KP_CONTROL_NAME_MAX];
    const struct relay_options *options = &relay->options;
    const char *what = "";
    int rc;

    relay->followed.fd = -1;
    relay_guests_init(relay);
    relay_claims_init(relay);
    if (relay_options_read(relay, argc, argv))
        return 2;
    if (options->detach && (rc = kp_detach()))
        return fail(relay, "detaching", rc);
    kp_log_name(options->domain);
    allow_descriptors();
    if ((size_t)snprintf(directory, sizeof(directory), "%s/%s", options->directory, options->uuid) >= sizeof(directory))
        return fail(relay, "the run directory", -ENAMETOOLONG);
    if ((mkdir(options->directory, 0755) && errno != EEXIST) || (mkdir(directory, 0750) && errno != EEXIST))
        return fail(relay, directory, -errno);
    snprintf(path, sizeof(path), "%s/relay.ctl", directory);
    rc = open_all(relay, directory, path, &what);
    if (rc == -EWOULDBLOCK) {
        tell_starter(relay, "busy", "");
        return RELAY_EXIT_BUSY;
    }
    if (rc)
        return fail(relay, what, rc);
    rc = serve(relay);
    unlink(path);
    if (relay->unix_path[0])
        unlink(relay->unix_path);
    if (relay->window.fd >= 0)
        unlink(options->window);
    kp_log(KP_INFO, "ended");
    return rc ? 1 : 0;
}

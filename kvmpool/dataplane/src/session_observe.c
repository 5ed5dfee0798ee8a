/* An observer's session: what the guest's NVML shows of the claim. See session_observe.h.
 *
 * It asks the driver who it is, and the pages that all sessions of the claim share for everything that changes. It makes no
 * context, so it costs the card nothing.
 */
#define _GNU_SOURCE
#include "session_observe.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "session_state.h"

enum { ATTRIBUTE_MULTIPROCESSORS = 16, ATTRIBUTE_MAJOR = 75, ATTRIBUTE_MINOR = 76 };

/* A wire's text of the driver's: printable, or a question mark. */
static void put(char *to, size_t room, const char *text)
{
    for (size_t i = 0; i < room - 1 && text[i] != 0; i++)
        to[i] = text[i] >= 0x20 && text[i] <= 0x7e ? text[i] : '?';
}

/* The version of the driver, which CUDA does not tell; without the host's NVML it is not known. */
static void ask_nvml(struct kp_figures *figures)
{
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    int (*init)(void) = library != NULL ? (int (*)(void))dlsym(library, "nvmlInit_v2") : NULL;
    int (*version)(char *, unsigned) = library != NULL ? (int (*)(char *, unsigned))dlsym(library, "nvmlSystemGetDriverVersion") : NULL;
    char text[sizeof figures->driver] = "";

    if (init != NULL && version != NULL && init() == 0 && version(text, sizeof text) == 0)
        put(figures->driver, sizeof figures->driver, text);
}

static int ask_driver(const struct kp_session *session, struct kp_figures *figures, char *why, size_t room)
{
    static struct kp_server server; /* the only session of this process */
    char name[sizeof figures->name] = "";
    int rc;

    server.session = session;
    if ((rc = kp_driver_load(&server, why, room)) != 0)
        return rc;
    if (server.driver.cuDeviceGetName(name, (int)sizeof name, server.device) != CUDA_SUCCESS ||
        server.driver.cuDriverGetVersion(&figures->cuda_version) != CUDA_SUCCESS ||
        server.driver.cuDeviceGetAttribute(&figures->major, ATTRIBUTE_MAJOR, server.device) != CUDA_SUCCESS ||
        server.driver.cuDeviceGetAttribute(&figures->minor, ATTRIBUTE_MINOR, server.device) != CUDA_SUCCESS ||
        server.driver.cuDeviceGetAttribute(&figures->multiprocessors, ATTRIBUTE_MULTIPROCESSORS, server.device) != CUDA_SUCCESS) {
        snprintf(why, room, "the card does not answer. Next: kvmpool card list");
        return -ENODEV;
    }
    put(figures->name, sizeof figures->name, name);
    ask_nvml(figures);
    return 0;
}

/* What changes. */
static void look(const struct kp_session *session, struct kp_figures *figures)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    figures->now_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    figures->memory_used = kp_account_used(session->account);
    figures->busy_known = session->turns.page != NULL;
    figures->busy_ns = kp_turns_used(&session->turns);
    figures->processes = 0;
    memset(figures->process, 0, sizeof figures->process);
    for (unsigned slot = 0; slot < KP_ACCOUNT_SLOTS; slot++) {
        uint32_t pid = atomic_load(&session->account->pid[slot]);
        if (pid != 0)
            figures->process[figures->processes++] =
                (struct kp_figure_process){.pid = pid, .memory_bytes = atomic_load(&session->account->slot[slot])};
    }
}

_Static_assert(KP_ACCOUNT_SLOTS <= KP_FIGURE_PROCESSES, "every session has its line");

static int answer(const struct kp_session *session, int fd, struct kp_figures *figures)
{
    struct kp_frame frame;
    int rc = kp_frame_read(fd, &frame, NULL, 0);

    if (rc != 0)
        return rc;
    if (frame.op == KP_OP_BYE)
        return 1;
    if (frame.op != KP_OP_FIGURES)
        return -EPROTO;
    look(session, figures);
    return kp_frame_write(fd, KP_OP_FIGURES, 0, frame.seq, figures, sizeof *figures);
}

int kp_observe(const struct kp_session *session, int fd, const struct kp_hello *hello)
{
    struct kp_welcome welcome = {.memory_bytes = session->memory_bytes};
    struct kp_figures figures = {0};
    int rc;

    (void)hello;
    memcpy(welcome.uuid, session->uuid, sizeof welcome.uuid);
    snprintf(welcome.pci, sizeof welcome.pci, "%s", session->pci);
    welcome.status = ask_driver(session, &figures, welcome.text, sizeof welcome.text);
    if ((rc = kp_welcome_write(fd, &welcome)) != 0 || welcome.status != 0)
        return rc == 0 ? welcome.status : rc == -EPIPE ? 0 : rc;
    while ((rc = answer(session, fd, &figures)) == 0)
        ;
    return rc == 1 || rc == -ECONNRESET || rc == -EPIPE ? 0 : rc;
}

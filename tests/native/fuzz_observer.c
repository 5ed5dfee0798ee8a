/* Both ends of an observer's connection: any bytes to the session that answers it, and any to the guest's NVML that asks. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "../../kvmpool/dataplane/src/session_observe.c"

static int no_sleep(const struct timespec *wait, struct timespec *left);
#define nanosleep no_sleep
#include "../../kvmpool/dataplane/src/gnvml_link.c"
#undef nanosleep

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* What NVML's callers get at. */
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, void *out);
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, void *out);
nvmlReturn_t nvmlDeviceGetName(void *handle, char *name, unsigned length);

static const uint8_t *script;
static size_t left;

static int no_sleep(const struct timespec *wait, struct timespec *rest)
{
    (void)wait;
    (void)rest;
    return 0;
}

int kp_driver_load(struct kp_server *s, char *text, size_t room)
{
    (void)s;
    (void)text;
    (void)room;
    return -ENODEV;
}

static void be_asked(const uint8_t *data, size_t size)
{
    static struct kp_account *account;
    static struct kp_session session = {.log_fd = -1};
    struct kp_figures figures = {0};
    int pair[2];

    if (account == NULL)
        session.account = account = kp_account_new(1 << 20);
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0)
        abort();
    if (size > 1000 || send(pair[0], data, size, MSG_DONTWAIT) != (ssize_t)size)
        size = 0;
    shutdown(pair[0], SHUT_WR);
    for (unsigned answers = 0; answers < 20 && answer(&session, pair[1], &figures) == 0; answers++)
        if (kp_figures_check(&figures, sizeof figures, &figures) != 0)
            abort(); /* what it sends passes the other side's check */
    close(pair[0]);
    close(pair[1]);
}

/* A worker that has sent the rest of the script: frames made for it, numbered as the answers will be, or its bytes. */
int kp_dial_observer(int seconds, struct kp_welcome *welcome, CUresult *why)
{
    unsigned char body[sizeof(struct kp_figures)] = {0};
    int pair[2];

    (void)seconds;
    *why = CUDA_ERROR_DEVICE_UNAVAILABLE;
    memset(welcome, 0, sizeof *welcome);
    if (left < 2 || socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0)
        return -1;
    for (uint32_t seq = gn.seq + 1; left >= 2 && seq < gn.seq + 4; seq++) {
        size_t length = script[1] * 5u < left - 2 ? script[1] * 5u : left - 2;
        bool whole = script[0] & 1;
        script += 2;
        left -= 2;
        memcpy(body, script, length < sizeof body ? length : sizeof body);
        if (whole)
            kp_frame_write(pair[0], KP_OP_FIGURES, 0, seq, body, sizeof body);
        else
            kp_write_full(pair[0], script, length);
        script += length;
        left -= length;
    }
    shutdown(pair[0], SHUT_WR);
    if (dup2(pair[0], 900) < 0) /* stays open, so that a question can be sent */
        abort();
    close(pair[0]);
    return pair[1];
}

static void ask_worker(void)
{
    unsigned count = 70, percent;
    struct gn_card card;
    char name[96];
    void *out = malloc(70 * sizeof(struct nvml_process));

    gn.seq = 0;
    gn.tried_ns = 0;
    if (gn_open() == NVML_SUCCESS) {
        gn_look(&card, 0);
        nvmlDeviceGetComputeRunningProcesses_v3(gn_handle(), &count, out);
        count = 3;
        nvmlDeviceGetComputeRunningProcesses(gn_handle(), &count, out);
        if (count > KP_FIGURE_PROCESSES)
            abort();
        if (gn_utilization(&percent) == NVML_SUCCESS && percent > 100)
            abort();
        nvmlDeviceGetName(gn_handle(), name, sizeof name);
        gn_close();
    }
    free(out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    script = data + 1;
    left = size - 1;
    if (data[0] & 1)
        be_asked(script, left);
    else
        ask_worker();
    return 0;
}

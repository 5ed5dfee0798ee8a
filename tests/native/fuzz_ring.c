/* A ring whose other side does what it likes with everything that both can write, also while this side waits.
 *
 * The input is a script: what this side does, and what it finds in the words whenever it asks the kernel to wait. The ring's
 * bytes are an allocation of exactly their size, so that AddressSanitizer sees an access beside them.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define syscall other_side_moves
#define recv other_side_rings
#define poll other_side_left
#define clock_gettime time_passes
#define nanosleep other_side_acts
#include "../../kvmpool/dataplane/src/ring.c"
#undef syscall

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const uint8_t *script;
static size_t left;
static struct kp_ring_words words;

static uint32_t number(unsigned bytes)
{
    uint32_t value = 0;

    for (; bytes > 0 && left > 0; bytes--, left--)
        value = value << 8 | *script++;
    return value;
}

static void move(void)
{
    uint32_t what = number(1), value = what & 0x80 ? number(4) : number(1);
    _Atomic uint32_t *all[] = {&words.written, &words.writer, &words.taken, &words.reader};
    _Atomic uint32_t *word = all[what & 3];

    atomic_store(word, what & 0x40 ? atomic_load(word) + value : value);
}

int time_passes(clockid_t clock, struct timespec *now)
{
    static time_t seconds;

    (void)clock;
    *now = (struct timespec){.tv_sec = ++seconds};
    return 0;
}

long other_side_moves(long number_of_call, ...)
{
    (void)number_of_call;
    move();
    errno = left % 2 ? ETIMEDOUT : EAGAIN;
    return -1;
}

ssize_t other_side_rings(int fd, void *to, size_t room, int flags)
{
    (void)fd;
    (void)flags;
    memset(to, 0, room);
    move();
    return left == 0 ? 0 : 1;
}

int other_side_acts(const struct timespec *wanted, struct timespec *rest)
{
    (void)wanted;
    (void)rest;
    move();
    return 0;
}

int other_side_left(struct pollfd *line, nfds_t lines, int timeout)
{
    (void)lines;
    (void)timeout;
    line->revents = left == 0 ? POLLHUP : 0;
    return left == 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static unsigned char *bytes, *mine;
    struct kp_ring in, out;
    bool far;

    if (bytes == NULL) {
        bytes = malloc(KP_RING_BYTES);
        mine = calloc(1, 3u << 20);
    }
    script = data;
    left = size;
    memset(&words, 0, sizeof words);
    far = number(1) & 1;
    kp_ring_init(&in, &words, bytes, -1, far);
    kp_ring_init(&out, &words, bytes, -1, far);
    in.vain = out.vain = VAIN_MAX;
    in.at = number(4);
    out.at = number(4);
    atomic_store(&words.written, in.at);
    atomic_store(&words.taken, out.at);
    while (left > 0) {
        uint32_t what = number(1);
        size_t n = number(3) % (3u << 20) + 1;
        struct iovec part[2] = {{mine, n / 2}, {mine + n / 2, n - n / 2}};
        ssize_t rc = what % 3 == 0 ? kp_ring_read(&in, mine, n) : what % 3 == 1 ? kp_ring_write(&out, part, 2) : 0;
        if (rc > (ssize_t)n)
            abort(); /* more than there was room for */
        if (what % 3 == 2)
            move();
    }
    return 0;
}

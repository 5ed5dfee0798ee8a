/* Any bytes as frames: what passes kp_frame_check is in range, and reading them from a socket ends. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <unistd.h>

#include "../../kvmpool/dataplane/src/frame.c"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    unsigned char body[512];
    struct kp_frame frame;
    int pair[2];

    if (size >= KP_HEADER_BYTES && kp_frame_check(data, &frame) == 0) {
        if (frame.magic != KP_MAGIC || frame.zero != 0 || frame.op == 0 || frame.op >= KP_OP_MAX)
            abort();
        if (frame.length > KP_BODY_MAX || (frame.flags & ~KP_FLAGS_KNOWN) != 0)
            abort();
    }
    if (size > 60000 || socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0)
        return 0;
    if (kp_write_full(pair[0], data, size) != 0)
        abort();
    shutdown(pair[0], SHUT_WR);
    while (kp_frame_read(pair[1], &frame, body, sizeof body) == 0)
        if (frame.length > sizeof body)
            abort();
    close(pair[0]);
    close(pair[1]);
    return 0;
}

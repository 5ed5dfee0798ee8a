/* Any bytes as an image from a guest. What the session lets through, the software GPU's driver reads without a length: it stays
 * within what was sent, which ends where the allocation ends. And the shim prunes any fatbin within its bytes. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "../../kvmpool/dataplane/src/session_container.c"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Of softgpu's module.h, which has names that the session has too. */
struct kp_log;
int kp_find_ptx(const void *image, size_t len, char **ptx, size_t *ptx_len, struct kp_log *log);
void kp_log(struct kp_log *log, const char *format, ...);

void kp_log(struct kp_log *log, const char *format, ...)
{
    (void)log;
    (void)format;
}

static void as_driver(const uint8_t *image, size_t believed)
{
    char *ptx = NULL;
    size_t length = 0;

    if (kp_find_ptx(image, believed, &ptx, &length, NULL) != 0)
        return;
    if (strlen(ptx) > length)
        abort();
    free(ptx);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t *image;

    if (size == 0)
        return 0;
    image = calloc(1, size + 1); /* as kp_image_take */
    memcpy(image, data, size);
    if (kp_container_check(image, size) == CUDA_SUCCESS)
        as_driver(image, 0);
    if (size < 4 || memcmp(image, "\xb1\x43\x62\x46", 4) != 0) /* a wrapper's pointer is its caller's to vouch for */
        as_driver(image, size);
    free(image);
    return 0;
}

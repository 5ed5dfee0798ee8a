/* The linker: the driver writes its logs while it lives, so the buffers are the session's. */
#include "session_state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct linker {
    CUlinkState state;
    struct kp_compiler compiler;
    void *image; /* the driver's; its until it is destroyed */
    size_t bytes;
};

int kp_do_link_create(struct kp_server *s, struct kp_work *w)
{
    struct linker *linker = calloc(1, sizeof *linker);
    int rc;

    if (linker == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    rc = kp_compiler_read(w, &linker->compiler);
    if (rc == 0)
        rc = s->driver.cuLinkCreate_v2(linker->compiler.count, linker->compiler.options, linker->compiler.values, &linker->state);
    if (rc == CUDA_SUCCESS && (rc = kp_adopt(s, w, w->in[KP_LINK_CREATE_HANDLE], KP_LINK, linker)) != CUDA_SUCCESS)
        s->driver.cuLinkDestroy(linker->state);
    if (rc != CUDA_SUCCESS)
        free(linker);
    return rc;
}

int kp_do_link_add(struct kp_server *s, struct kp_work *w)
{
    unsigned char *image;
    struct linker *linker;
    void *object = NULL;
    int rc = kp_image_take(s, w, w->in[KP_LINK_ADD_BYTES], &image), known;

    if (rc != 0)
        return rc;
    known = kp_resolve(s, w->in[KP_LINK_ADD_LINK], KP_LINK, &object);
    linker = object;
    rc = known == CUDA_SUCCESS ? (int)kp_container_check(image, w->in[KP_LINK_ADD_BYTES]) : known;
    if (rc == CUDA_SUCCESS) {
        rc = s->driver.cuLinkAddData_v2(linker->state, (int)w->in[KP_LINK_ADD_TYPE], image, w->in[KP_LINK_ADD_BYTES],
                                        (const char *)w->tail, 0, NULL, NULL);
        kp_compiler_give(w, &linker->compiler, NULL);
    }
    free(image);
    return rc;
}

int kp_do_link_complete(struct kp_server *s, struct kp_work *w)
{
    struct linker *linker;
    void *object;
    uint64_t bytes;
    int rc = kp_resolve(s, w->in[KP_LINK_COMPLETE_LINK], KP_LINK, &object);

    if (rc != CUDA_SUCCESS)
        return rc;
    linker = object;
    linker->bytes = 0;
    rc = s->driver.cuLinkComplete(linker->state, &linker->image, &linker->bytes);
    if (rc != CUDA_SUCCESS || linker->image == NULL)
        linker->bytes = 0;
    bytes = linker->bytes;
    kp_compiler_give(w, &linker->compiler, &bytes);
    return rc;
}

int kp_do_link_image(struct kp_server *s, struct kp_work *w)
{
    uint64_t bytes = w->in[KP_LINK_IMAGE_BYTES];
    const struct linker *linker;
    void *object;
    int rc = kp_resolve(s, w->in[KP_LINK_IMAGE_LINK], KP_LINK, &object);

    if (rc != CUDA_SUCCESS)
        return rc;
    linker = object;
    if (bytes == 0 || bytes != linker->bytes)
        return CUDA_ERROR_INVALID_VALUE;
    for (uint64_t at = 0; rc == 0 && at < bytes; at += KP_BODY_MAX)
        rc = kp_send_data(s, w->seq, (const char *)linker->image + at, (uint32_t)(bytes - at < KP_BODY_MAX ? bytes - at : KP_BODY_MAX));
    return rc;
}

void kp_linker_free(void *linker)
{
    free(linker);
}

int kp_do_cuLinkDestroy(struct kp_server *s, struct kp_work *w)
{
    struct linker *linker;
    void *object;
    int rc = kp_resolve(s, w->in[0], KP_LINK, &object);

    if (rc != CUDA_SUCCESS)
        return rc;
    linker = object;
    rc = s->driver.cuLinkDestroy(linker->state);
    kp_forget(s, w->in[0]);
    return rc;
}

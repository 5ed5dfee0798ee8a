/* The linker: its inputs go to the worker's driver; the image it makes comes home, because programs keep and load it. */
#include "shim.h"

#include <stdlib.h>
#include <string.h>

struct linker {
    struct kp_jit jit;
    void *image; /* of cuLinkComplete, until the linker is destroyed */
};

CUresult kp_cuLinkCreate_v2(unsigned int count, CUjit_option *options, void **values, CUlinkState *state)
{
    struct linker *linker = calloc(1, sizeof *linker);
    struct kp_answer answer = {0};
    struct kp_handle *entry;
    uint64_t handle;
    CUresult rc;

    if (linker == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    rc = state == NULL ? CUDA_ERROR_INVALID_VALUE : kp_jit_read(&linker->jit, count, options, values);
    if (rc != CUDA_SUCCESS || (rc = kp_enter()) != CUDA_SUCCESS)
        goto out;
    if ((handle = kp_object_new(KP_LINK)) == 0) {
        rc = kp_leave(CUDA_ERROR_OUT_OF_MEMORY);
        goto out;
    }
    rc = kp_ask(KP_OP_link_create, &handle, KP_LINK_CREATE_IN, linker->jit.options,
                linker->jit.count * (uint32_t)sizeof linker->jit.options[0], &answer);
    pthread_mutex_lock(&kp_shim.tx);
    entry = kp_handles_get(&kp_shim.handles, handle, KP_LINK);
    if (rc == CUDA_SUCCESS && entry != NULL) {
        entry->value = linker;
        *state = (CUlinkState)(uintptr_t)handle;
        linker = NULL;
    } else {
        kp_object_drop(handle);
    }
    kp_leave(rc);
out:
    free(linker);
    return rc;
}

static struct linker *linker_of(uint64_t number)
{
    struct kp_handle *entry = kp_handles_get(&kp_shim.handles, number, KP_LINK);

    return entry != NULL ? entry->value : NULL;
}

/* Where the linker's logs are wanted; the program's words for it stay valid while it lives. */
static void give_logs(uint64_t number, const char *reply, size_t got)
{
    struct linker *linker;

    pthread_mutex_lock(&kp_shim.tx);
    if ((linker = linker_of(number)) != NULL)
        kp_jit_give(&linker->jit, reply, got);
    kp_leave(CUDA_SUCCESS);
}

static CUresult add(CUlinkState state, CUjitInputType type, const void *data, size_t size, const char *name)
{
    char reply[sizeof(struct kp_logs) + 2 * KP_LOG_MAX];
    struct kp_answer answer = {.bytes = reply, .room = sizeof reply};
    uint64_t in[KP_LINK_ADD_IN] = {[KP_LINK_ADD_BYTES] = size, [KP_LINK_ADD_TYPE] = (uint64_t)(int64_t)type};
    size_t name_bytes = name != NULL ? strnlen(name, KP_TEXT_MAX) + 1 : 1;
    CUresult rc;

    if (data == NULL || size == 0 || size > KP_IMAGE_MAX || name_bytes > KP_TEXT_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    if ((rc = kp_enter()) != CUDA_SUCCESS)
        return rc;
    if ((rc = kp_object_number(KP_LINK, state, &in[KP_LINK_ADD_LINK])) != CUDA_SUCCESS)
        return kp_leave(rc);
    rc = kp_send_bulk(KP_OP_link_add, in, KP_LINK_ADD_IN, name != NULL ? name : "", (uint32_t)name_bytes, data, size, &answer);
    give_logs(in[KP_LINK_ADD_LINK], reply, answer.got);
    return rc;
}

/* Options of one input are seldom used and never change what is linked here: the linker's own hold. */
CUresult kp_cuLinkAddData_v2(CUlinkState state, CUjitInputType type, void *data, size_t size, const char *name, unsigned int count,
                             CUjit_option *options, void **values)
{
    (void)count;
    (void)options;
    (void)values;
    return add(state, type, data, size, name);
}

CUresult kp_cuLinkAddFile_v2(CUlinkState state, CUjitInputType type, const char *path, unsigned int count, CUjit_option *options,
                             void **values)
{
    struct kp_image image;
    CUresult rc = kp_image_read(&image, path);

    (void)count;
    (void)options;
    (void)values;
    if (rc != CUDA_SUCCESS)
        return rc;
    rc = add(state, type, image.data, image.bytes - 1, path); /* as it is in the file; the worker puts an end behind it */
    kp_image_drop(&image);
    return rc;
}

static CUresult bring_image(uint64_t number, size_t bytes, void **image)
{
    uint64_t in[KP_LINK_IMAGE_IN] = {[KP_LINK_IMAGE_LINK] = number, [KP_LINK_IMAGE_BYTES] = bytes};
    struct kp_answer answer = {.bulk_bytes = bytes};
    struct linker *linker;
    CUresult rc = bytes == 0 || bytes > KP_IMAGE_MAX ? CUDA_ERROR_UNKNOWN : kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((answer.bulk = malloc(bytes)) == NULL)
        return kp_leave(CUDA_ERROR_OUT_OF_MEMORY);
    rc = kp_ask(KP_OP_link_image, in, KP_LINK_IMAGE_IN, NULL, 0, &answer);
    pthread_mutex_lock(&kp_shim.tx);
    if ((linker = linker_of(number)) == NULL && rc == CUDA_SUCCESS)
        rc = CUDA_ERROR_INVALID_HANDLE;
    if (rc == CUDA_SUCCESS) {
        free(linker->image);
        *image = linker->image = answer.bulk;
    } else {
        free(answer.bulk);
    }
    return kp_leave(rc);
}

CUresult kp_cuLinkComplete(CUlinkState state, void **cubinOut, size_t *sizeOut)
{
    char reply[sizeof(uint64_t) + sizeof(struct kp_logs) + 2 * KP_LOG_MAX];
    struct kp_answer answer = {.bytes = reply, .room = sizeof reply};
    uint64_t number, bytes = 0;
    CUresult rc = cubinOut == NULL ? CUDA_ERROR_INVALID_VALUE : kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((rc = kp_object_number(KP_LINK, state, &number)) != CUDA_SUCCESS)
        return kp_leave(rc);
    rc = kp_ask(KP_OP_link_complete, &number, KP_LINK_COMPLETE_IN, NULL, 0, &answer);
    if (answer.got >= sizeof bytes) {
        memcpy(&bytes, reply, sizeof bytes);
        give_logs(number, reply + sizeof bytes, answer.got - sizeof bytes);
    }
    if (rc == CUDA_SUCCESS)
        rc = bring_image(number, bytes, cubinOut);
    if (rc == CUDA_SUCCESS && sizeOut != NULL)
        *sizeOut = bytes;
    return rc;
}

void kp_linker_free(void *value)
{
    struct linker *linker = value;

    if (linker != NULL)
        free(linker->image);
    free(linker);
}

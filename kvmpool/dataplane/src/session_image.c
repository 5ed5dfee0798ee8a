/* Images that are compiled or linked: taken off the connection, with the compiler's options, and its logs given back. */
#include "session_state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static int take_image(struct kp_server *s, struct kp_work *w, unsigned char *image, uint64_t bytes)
{
    uint64_t got = 0;
    uint32_t length;
    int rc = 0;

    while (rc == 0 && got < bytes) {
        if ((rc = kp_take_bulk_frame(s, w->seq, bytes - got, &length)) == 0)
            rc = kp_take(s, image + got, length);
        got += rc == 0 ? length : 0;
    }
    return rc;
}

int kp_image_take(struct kp_server *s, struct kp_work *w, uint64_t bytes, unsigned char **image)
{
    int rc;

    *image = NULL;
    if (bytes == 0 || bytes > KP_IMAGE_MAX)
        return -EPROTO;
    if ((*image = calloc(1, bytes + 1)) == NULL) { /* text gets an end, whatever the guest sent */
        rc = kp_drain_bulk(s, w->seq, bytes);
        return rc != 0 ? rc : CUDA_ERROR_OUT_OF_MEMORY;
    }
    if ((rc = take_image(s, w, *image, bytes)) != 0) {
        free(*image);
        *image = NULL;
    }
    return rc;
}

/* Only options whose value is a number: the guest has no pointers into this process. */
static bool is_number(int32_t option)
{
    return option == 0 || option == 1 || (option >= 7 && option <= 15) || (option >= 20 && option <= 24) ||
           (option >= 29 && option <= 35);
}

int kp_compiler_read(const struct kp_work *w, struct kp_compiler *compiler)
{
    struct kp_jit_option option;
    const int ours[KP_JIT_OURS] = {CU_JIT_INFO_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, CU_JIT_ERROR_LOG_BUFFER,
                                   CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};

    memset(compiler, 0, sizeof *compiler);
    if (w->tail_bytes % sizeof option != 0 || w->tail_bytes / sizeof option > KP_JIT_OPTIONS_MAX)
        return -EPROTO;
    memcpy(compiler->options, ours, sizeof ours);
    compiler->values[0] = compiler->info;
    compiler->values[1] = compiler->values[3] = (void *)(uintptr_t)KP_LOG_MAX;
    compiler->values[2] = compiler->error;
    compiler->count = KP_JIT_OURS;
    for (uint32_t at = 0; at < w->tail_bytes; at += (uint32_t)sizeof option) {
        memcpy(&option, w->tail + at, sizeof option);
        if (!is_number(option.option))
            return -EPROTO;
        compiler->options[compiler->count] = option.option;
        compiler->values[compiler->count++] = (void *)(uintptr_t)option.value;
    }
    return 0;
}

CUresult kp_compiler_give(struct kp_work *w, const struct kp_compiler *compiler, uint64_t *image_bytes)
{
    struct kp_logs logs = {(uint32_t)strnlen(compiler->info, KP_LOG_MAX), (uint32_t)strnlen(compiler->error, KP_LOG_MAX)};
    size_t before = image_bytes != NULL ? sizeof *image_bytes : 0;
    char *give = malloc(before + sizeof logs + logs.info_bytes + logs.error_bytes);

    if (give == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (image_bytes != NULL)
        memcpy(give, image_bytes, before);
    memcpy(give + before, &logs, sizeof logs);
    memcpy(give + before + sizeof logs, compiler->info, logs.info_bytes);
    memcpy(give + before + sizeof logs + logs.info_bytes, compiler->error, logs.error_bytes);
    w->give = give;
    w->give_bytes = (uint32_t)(before + sizeof logs) + logs.info_bytes + logs.error_bytes;
    return CUDA_SUCCESS;
}

static void unload(struct kp_server *s, void *object, enum kp_kind kind)
{
    if (kind == KP_MODULE)
        s->driver.cuModuleUnload(object);
    else
        s->driver.cuLibraryUnload(object);
}

typedef CUresult (*load_function)(struct kp_server *s, void **object, const void *image, struct kp_compiler *compiler);

/* The image in memory, with an end behind it. */
static int make(struct kp_server *s, struct kp_work *w, load_function load, enum kp_kind kind, const void *image, struct kp_compiler *compiler)
{
    uint64_t parent = kind == KP_MODULE ? w->home_number : 0;
    void *object = NULL;
    int rc = kp_may_adopt(s, w->in[KP_MODULE_LOAD_HANDLE], kind);

    if (rc == CUDA_SUCCESS)
        rc = load(s, &object, image, compiler);
    if (rc == CUDA_SUCCESS && (rc = kp_own_charge(s)) != CUDA_SUCCESS)
        unload(s, object, kind);
    if (rc == CUDA_SUCCESS)
        rc = kp_adopt_under(s, w->in[KP_MODULE_LOAD_HANDLE], kind, object, parent, 0);
    if (rc >= 0)
        kp_compiler_give(w, compiler, NULL);
    return rc;
}

static int load_image(struct kp_server *s, struct kp_work *w, load_function load, enum kp_kind kind)
{
    uint64_t bytes = w->in[KP_MODULE_LOAD_BYTES];
    struct kp_compiler *compiler = malloc(sizeof *compiler);
    uint8_t hash[KP_HASH_BYTES];
    unsigned char *image = NULL;
    int rc;

    if (compiler == NULL) {
        rc = kp_drain_bulk(s, w->seq, bytes);
        return rc != 0 ? rc : CUDA_ERROR_OUT_OF_MEMORY;
    }
    if ((rc = kp_compiler_read(w, compiler)) != 0 || (rc = kp_image_take(s, w, bytes, &image)) != 0)
        goto out;
    if ((rc = kp_container_check(image, bytes)) == CUDA_SUCCESS) /* what is cached was checked */
        rc = make(s, w, load, kind, image, compiler);
    if (rc == CUDA_SUCCESS && bytes >= KP_CACHE_MIN && s->session->cache != NULL) {
        kp_hash(image, bytes, hash);
        kp_cache_put(s->session->cache, hash, image, bytes);
    }
out:
    free(image);
    free(compiler);
    return rc;
}

static int find_image(struct kp_server *s, struct kp_work *w, load_function load, enum kp_kind kind)
{
    struct kp_compiler *compiler = malloc(sizeof *compiler);
    unsigned char *image = NULL;
    int rc;

    if (compiler == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if ((rc = kp_compiler_read(w, compiler)) == 0) {
        image = kp_cache_get(s->session->cache, (const uint8_t *)&w->in[KP_MODULE_FIND_HASH0], w->in[KP_MODULE_FIND_BYTES]);
        rc = image != NULL ? make(s, w, load, kind, image, compiler) : KP_NOT_CACHED;
    }
    free(image);
    free(compiler);
    return rc;
}
_Static_assert((int)KP_MODULE_LOAD_HANDLE == (int)KP_LIBRARY_LOAD_HANDLE && (int)KP_MODULE_LOAD_BYTES == (int)KP_LIBRARY_LOAD_BYTES,
               "load_image");
_Static_assert((int)KP_MODULE_FIND_HANDLE == (int)KP_MODULE_LOAD_HANDLE && (int)KP_LIBRARY_FIND_HASH0 == (int)KP_MODULE_FIND_HASH0,
               "find_image");

static CUresult load_module(struct kp_server *s, void **object, const void *image, struct kp_compiler *compiler)
{
    return s->driver.cuModuleLoadDataEx((CUmodule *)object, image, compiler->count, compiler->options, compiler->values);
}

static CUresult load_library(struct kp_server *s, void **object, const void *image, struct kp_compiler *compiler)
{
    return s->driver.cuLibraryLoadData((CUlibrary *)object, image, compiler->options, compiler->values, compiler->count, NULL, NULL, 0);
}

int kp_do_module_load(struct kp_server *s, struct kp_work *w)
{
    return load_image(s, w, load_module, KP_MODULE);
}

int kp_do_library_load(struct kp_server *s, struct kp_work *w)
{
    return load_image(s, w, load_library, KP_LIBRARY);
}

int kp_do_module_find(struct kp_server *s, struct kp_work *w)
{
    return find_image(s, w, load_module, KP_MODULE);
}

int kp_do_library_find(struct kp_server *s, struct kp_work *w)
{
    return find_image(s, w, load_library, KP_LIBRARY);
}

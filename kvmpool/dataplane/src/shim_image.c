/* Images on their way to the worker: how long one is, and what the compiler's options and logs are. */
#define _GNU_SOURCE
#include "shim.h"

#include <elf.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FATBIN_WRAPPER 0x466243b1u
#define FATBIN 0xba55ed50u

struct fatbin_wrapper {
    uint32_t magic, version;
    const void *data;
    const void *unused;
};

struct fatbin_header {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes; /* behind the header */
};

/* Bytes of an ELF image: the end of its last header table or section. */
static size_t elf_bytes(const unsigned char *image)
{
    Elf64_Ehdr elf;
    Elf64_Shdr section;
    size_t end;

    memcpy(&elf, image, sizeof elf);
    if (elf.e_ident[EI_CLASS] != ELFCLASS64 || elf.e_shentsize != sizeof section)
        return 0;
    end = elf.e_shoff + (size_t)elf.e_shnum * sizeof section;
    if (elf.e_phoff + (size_t)elf.e_phnum * elf.e_phentsize > end)
        end = elf.e_phoff + (size_t)elf.e_phnum * elf.e_phentsize;
    for (unsigned i = 0; i < elf.e_shnum; i++) {
        memcpy(&section, image + elf.e_shoff + i * sizeof section, sizeof section);
        if (section.sh_type != SHT_NOBITS && section.sh_offset + section.sh_size > end)
            end = section.sh_offset + section.sh_size;
    }
    return end;
}

/* Start and bytes of what `image` is: a fatbin (wrapped or not), ELF, or PTX text with its end. 0: none of them. */
static size_t image_bytes(const void **image)
{
    struct fatbin_wrapper wrapper;
    struct fatbin_header header;
    char magic[4];
    uint32_t number;

    memcpy(magic, *image, strnlen(*image, sizeof magic)); /* a text may be shorter */
    memcpy(&number, magic, sizeof number);
    if (number == FATBIN_WRAPPER) {
        memcpy(&wrapper, *image, sizeof wrapper);
        *image = wrapper.data;
        memcpy(&number, *image, sizeof number);
    }
    if (number == FATBIN) {
        memcpy(&header, *image, sizeof header);
        return header.header_bytes + header.bytes;
    }
    if (number == FATBIN_WRAPPER)
        return 0;
    if (memcmp(magic, ELFMAG, SELFMAG) == 0)
        return elf_bytes(*image);
    return strlen(*image) + 1;
}

static void name_image(struct kp_image *image)
{
    if (image->bytes >= KP_CACHE_MIN)
        kp_hash(image->data, image->bytes, (uint8_t *)image->hash);
}

static CUresult find_image(struct kp_image *image, const void *data)
{
    const uint32_t fatbin = FATBIN;

    *image = (struct kp_image){.data = data};
    if (data == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    image->bytes = image_bytes(&image->data);
    if (image->bytes > sizeof(struct fatbin_header) && image->bytes <= KP_FATBIN_MAX && memcmp(image->data, &fatbin, sizeof fatbin) == 0)
        kp_fatbin_prune(image);
    if (image->bytes > 0 && image->bytes <= KP_IMAGE_MAX) {
        name_image(image);
        return CUDA_SUCCESS;
    }
    kp_image_drop(image);
    return CUDA_ERROR_INVALID_IMAGE;
}

CUresult kp_image_read(struct kp_image *image, const char *path)
{
    struct stat status;
    CUresult rc = CUDA_ERROR_FILE_NOT_FOUND;
    int fd;

    *image = (struct kp_image){0};
    if (path == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if ((fd = open(path, O_RDONLY | O_CLOEXEC)) < 0)
        return rc;
    if (fstat(fd, &status) == 0 && status.st_size > 0 && (uint64_t)status.st_size < KP_IMAGE_MAX &&
        (image->owned = calloc(1, (size_t)status.st_size + sizeof(uint64_t))) != NULL && /* PTX needs an end behind it */
        kp_read_full(fd, image->owned, (size_t)status.st_size) == 0) {
        image->data = image->owned;
        image->bytes = (size_t)status.st_size + 1;
        name_image(image);
        rc = CUDA_SUCCESS;
    }
    close(fd);
    if (rc != CUDA_SUCCESS)
        kp_image_drop(image);
    return rc;
}

void kp_image_drop(struct kp_image *image)
{
    free(image->owned);
    image->owned = NULL;
}

/* Options whose value is a number; others carry pointers, which mean nothing in another machine. */
static bool is_number(CUjit_option option)
{
    return option == 0 || option == 1 || (option >= 7 && option <= 15) || (option >= 20 && option <= 24) ||
           (option >= 29 && option <= 35);
}

CUresult kp_jit_read(struct kp_jit *jit, unsigned count, const CUjit_option *options, void **values)
{
    *jit = (struct kp_jit){.values = values};
    if (count > 0 && (options == NULL || values == NULL))
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++) {
        uint32_t number = (uint32_t)(uintptr_t)values[i];
        switch (options[i]) {
        case CU_JIT_INFO_LOG_BUFFER: jit->info.text = values[i]; break;
        case CU_JIT_ERROR_LOG_BUFFER: jit->error.text = values[i]; break;
        case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES:
            jit->info.room = number;
            jit->info.size = i + 1;
            break;
        case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES:
            jit->error.room = number;
            jit->error.size = i + 1;
            break;
        default:
            if (is_number(options[i]) && jit->count < KP_JIT_OPTIONS_MAX)
                jit->options[jit->count++] = (struct kp_jit_option){options[i], number};
        }
    }
    return CUDA_SUCCESS;
}

static void give_log(const struct kp_jit *jit, const struct kp_log_buffer *log, const char *text, size_t bytes)
{
    if (log->text == NULL || log->room == 0)
        bytes = 0;
    else if (bytes > log->room - 1)
        bytes = log->room - 1;
    if (log->text != NULL && log->room > 0) {
        memcpy(log->text, text, bytes);
        log->text[bytes] = 0;
    }
    if (log->size > 0) /* the sizes come back filled */
        jit->values[log->size - 1] = (void *)(uintptr_t)bytes;
}

void kp_jit_give(const struct kp_jit *jit, const void *bytes, size_t got)
{
    struct kp_logs logs = {0, 0};
    const char *text = (const char *)bytes + sizeof logs;

    if (got >= sizeof logs)
        memcpy(&logs, bytes, sizeof logs);
    got -= got < sizeof logs ? got : sizeof logs;
    if (logs.info_bytes > got || logs.error_bytes > got - logs.info_bytes)
        logs = (struct kp_logs){0, 0};
    give_log(jit, &jit->info, text, logs.info_bytes);
    give_log(jit, &jit->error, text + logs.info_bytes, logs.error_bytes);
}

/* Asks whether the worker has it. Holds `tx` again where it has not. */
static CUresult ask_for(uint16_t op, uint64_t handle, const struct kp_image *image, const struct kp_jit *jit, struct kp_answer *answer)
{
    uint64_t in[KP_MODULE_FIND_IN] = {[KP_MODULE_FIND_HANDLE] = handle, [KP_MODULE_FIND_BYTES] = image->bytes};
    CUresult rc;

    memcpy(&in[KP_MODULE_FIND_HASH0], image->hash, sizeof image->hash);
    rc = kp_ask(op, in, KP_MODULE_FIND_IN, jit->options, jit->count * (uint32_t)sizeof jit->options[0], answer);
    if (rc != KP_NOT_CACHED)
        return rc;
    rc = op == KP_OP_module_find ? kp_enter() : kp_enter_any();
    return rc == CUDA_SUCCESS ? KP_NOT_CACHED : rc;
}

static CUresult send_image(uint16_t op, uint64_t handle, const struct kp_image *image, const struct kp_jit *jit)
{
    char reply[sizeof(struct kp_logs) + 2 * KP_LOG_MAX];
    struct kp_answer answer = {.bytes = reply, .room = sizeof reply};
    uint64_t in[KP_MODULE_LOAD_IN] = {[KP_MODULE_LOAD_HANDLE] = handle, [KP_MODULE_LOAD_BYTES] = image->bytes};
    CUresult rc = KP_NOT_CACHED;

    if (image->bytes >= KP_CACHE_MIN)
        rc = ask_for(op == KP_OP_library_load ? KP_OP_library_find : KP_OP_module_find, handle, image, jit, &answer);
    if (rc == KP_NOT_CACHED)
        rc = kp_send_bulk(op, in, KP_MODULE_LOAD_IN, jit->options, jit->count * (uint32_t)sizeof jit->options[0], image->data,
                          image->bytes, &answer);
    kp_jit_give(jit, reply, answer.got);
    return rc;
}

CUresult kp_image_load(uint16_t op, uint64_t handle, const struct kp_image *image, const struct kp_jit *jit, void **out)
{
    CUresult rc = handle == 0 ? kp_leave(CUDA_ERROR_OUT_OF_MEMORY) : send_image(op, handle, image, jit);

    if (rc == CUDA_SUCCESS)
        *out = (void *)(uintptr_t)handle;
    else
        kp_object_lose(handle);
    return rc;
}

CUresult kp_image_open(struct kp_image *image, const void *data, const char *path, struct kp_jit *jit, unsigned count,
                       const CUjit_option *options, void **values)
{
    CUresult rc = kp_jit_read(jit, count, options, values);

    if (rc == CUDA_SUCCESS)
        rc = path != NULL ? kp_image_read(image, path) : find_image(image, data);
    return rc;
}

/* Modules and functions: an image's length is found from its own headers; a function's attributes and parameter layout
 * come with its handle, so that launches and questions about it need no trip.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
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
    uint32_t magic;

    memcpy(&magic, *image, sizeof magic);
    if (magic == FATBIN_WRAPPER) {
        memcpy(&wrapper, *image, sizeof wrapper);
        *image = wrapper.data;
        memcpy(&magic, *image, sizeof magic);
    }
    if (magic == FATBIN) {
        memcpy(&header, *image, sizeof header);
        return header.header_bytes + header.bytes;
    }
    if (memcmp(&magic, ELFMAG, SELFMAG) == 0)
        return elf_bytes(*image);
    return strlen(*image) + 1;
}

/* Loads; the compiler's words go to `log` (may be NULL), terminated. */
static CUresult load(CUmodule *module, const void *image, char *log, size_t log_room)
{
    struct kp_answer answer = {.bytes = log, .room = log_room > 0 ? log_room - 1 : 0};
    uint64_t in[KP_MODULE_LOAD_IN];
    CUresult rc;

    if (module == NULL || image == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    in[KP_MODULE_LOAD_BYTES] = image_bytes(&image);
    if (in[KP_MODULE_LOAD_BYTES] == 0 || in[KP_MODULE_LOAD_BYTES] > KP_IMAGE_MAX)
        return CUDA_ERROR_INVALID_IMAGE;
    if ((rc = kp_enter()) != CUDA_SUCCESS)
        return rc;
    if ((in[KP_MODULE_LOAD_HANDLE] = kp_object_new(KP_MODULE)) == 0)
        return kp_leave(CUDA_ERROR_OUT_OF_MEMORY);
    rc = kp_send_bulk(KP_OP_module_load, in, KP_MODULE_LOAD_IN, image, in[KP_MODULE_LOAD_BYTES], &answer);
    if (log_room > 0)
        log[answer.got] = 0;
    if (rc == CUDA_SUCCESS) {
        *module = (CUmodule)(uintptr_t)in[KP_MODULE_LOAD_HANDLE];
    } else {
        pthread_mutex_lock(&kp_shim.tx);
        kp_object_drop(in[KP_MODULE_LOAD_HANDLE]);
        kp_leave(rc);
    }
    return rc;
}

CUresult kp_cuModuleLoadData(CUmodule *module, const void *image)
{
    return load(module, image, NULL, 0);
}

CUresult kp_cuModuleLoadFatBinary(CUmodule *module, const void *fatCubin)
{
    return load(module, fatCubin, NULL, 0);
}

/* Options that tune the compiler are the worker's driver's business; the logs are brought home. */
CUresult kp_cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, CUjit_option *options, void **values)
{
    char *info = NULL, *error = NULL;
    size_t info_room = 0, error_room = 0;
    CUresult rc;

    if (count > 0 && (options == NULL || values == NULL))
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++) {
        switch (options[i]) {
        case CU_JIT_INFO_LOG_BUFFER: info = values[i]; break;
        case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES: info_room = (uintptr_t)values[i] & UINT32_MAX; break;
        case CU_JIT_ERROR_LOG_BUFFER: error = values[i]; break;
        case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: error_room = (uintptr_t)values[i] & UINT32_MAX; break;
        default: break;
        }
    }
    if (info != NULL && info_room > 0)
        info[0] = 0;
    rc = load(module, image, error, error != NULL ? error_room : 0);
    for (unsigned i = 0; i < count; i++) { /* the sizes come back filled */
        if (options[i] == CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES)
            values[i] = (void *)(uintptr_t)0;
        if (options[i] == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES)
            values[i] = (void *)(uintptr_t)(error != NULL && error_room > 0 ? strlen(error) : 0);
    }
    return rc;
}

CUresult kp_cuModuleLoad(CUmodule *module, const char *fname)
{
    struct stat status;
    char *image;
    CUresult rc = CUDA_ERROR_FILE_NOT_FOUND;
    int fd = fname != NULL ? open(fname, O_RDONLY | O_CLOEXEC) : -1;

    if (fname == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (fd < 0)
        return rc;
    if (fstat(fd, &status) == 0 && status.st_size > 0 && (uint64_t)status.st_size < KP_IMAGE_MAX &&
        (image = calloc(1, (size_t)status.st_size + sizeof(uint64_t))) != NULL) { /* PTX needs an end behind it */
        rc = kp_read_full(fd, image, (size_t)status.st_size) == 0 ? load(module, image, NULL, 0) : rc;
        free(image);
    }
    close(fd);
    return rc;
}

static uint32_t param_bytes(const struct kp_function_info *info)
{
    uint32_t end = 0;

    for (uint32_t i = 0; i < info->params; i++)
        if (info->param[i].offset + info->param[i].size > end)
            end = info->param[i].offset + info->param[i].size;
    return end;
}

/* Trusts the worker no further than it must: a layout that does not fit is refused. */
static bool info_fits(const struct kp_function_info *info, size_t got)
{
    if (got < offsetof(struct kp_function_info, param) || info->params > KP_PARAMS_MAX ||
        got < offsetof(struct kp_function_info, param) + info->params * sizeof info->param[0])
        return false;
    for (uint32_t i = 0; i < info->params; i++)
        if (info->param[i].offset > KP_PARAM_BYTES_MAX || info->param[i].size > KP_PARAM_BYTES_MAX - info->param[i].offset)
            return false;
    return true;
}

CUresult kp_cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name)
{
    struct kp_function *function;
    struct kp_answer answer = {0};
    uint64_t in[KP_FUNCTION_GET_IN];
    size_t name_bytes = name != NULL ? strnlen(name, KP_TEXT_MAX) + 1 : KP_TEXT_MAX + 1;
    CUresult rc;

    if (hfunc == NULL || name_bytes > KP_TEXT_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    if ((function = calloc(1, sizeof *function + name_bytes)) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(function->name, name, name_bytes);
    answer.bytes = &function->info;
    answer.room = sizeof function->info;
    if ((rc = kp_enter()) != CUDA_SUCCESS)
        goto out;
    if ((rc = kp_object_number(KP_MODULE, hmod, &in[KP_FUNCTION_GET_MODULE])) != CUDA_SUCCESS) {
        kp_leave(rc);
        goto out;
    }
    function->module = in[KP_FUNCTION_GET_MODULE];
    in[KP_FUNCTION_GET_HANDLE] = kp_handles_new(&kp_shim.handles, KP_FUNCTION, NULL, function->module);
    if (in[KP_FUNCTION_GET_HANDLE] == 0) {
        rc = kp_leave(CUDA_ERROR_OUT_OF_MEMORY);
        goto out;
    }
    rc = kp_ask(KP_OP_function_get, in, KP_FUNCTION_GET_IN, name, (uint32_t)name_bytes, &answer);
    pthread_mutex_lock(&kp_shim.tx);
    struct kp_handle *entry = kp_handles_get(&kp_shim.handles, in[KP_FUNCTION_GET_HANDLE], KP_FUNCTION);
    if (rc == CUDA_SUCCESS && (entry == NULL || !info_fits(&function->info, answer.got)))
        rc = CUDA_ERROR_UNKNOWN;
    if (rc == CUDA_SUCCESS) {
        function->param_bytes = param_bytes(&function->info);
        entry->value = function;
        *hfunc = (CUfunction)(uintptr_t)in[KP_FUNCTION_GET_HANDLE];
        function = NULL;
    } else {
        kp_object_drop(in[KP_FUNCTION_GET_HANDLE]);
    }
    kp_leave(rc);
out:
    free(function);
    return rc;
}

struct kp_function *kp_function_of(CUfunction f)
{
    struct kp_handle *entry = kp_handles_get(&kp_shim.handles, (uint64_t)(uintptr_t)f, KP_FUNCTION);

    return entry != NULL ? entry->value : NULL;
}

CUresult kp_cuFuncGetAttribute(int *pi, CUfunction_attribute attrib, CUfunction hfunc)
{
    struct kp_function *function;
    CUresult rc = kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((function = kp_function_of(hfunc)) == NULL)
        return kp_leave(CUDA_ERROR_INVALID_HANDLE);
    if (pi == NULL || attrib < 0 || attrib >= KP_FUNCTION_ATTRIBUTES || !function->info.known[attrib])
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    *pi = function->info.value[attrib];
    return kp_leave(CUDA_SUCCESS);
}

CUresult kp_cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute attrib, int value)
{
    struct kp_function_info info;
    struct kp_function *function;
    struct kp_answer answer = {.bytes = &info, .room = sizeof info};
    uint64_t in[KP_FUNCTION_SET_IN] = {(uint64_t)(uintptr_t)hfunc, (uint64_t)(int64_t)attrib, (uint64_t)(int64_t)value};
    CUresult rc = kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (kp_function_of(hfunc) == NULL)
        return kp_leave(CUDA_ERROR_INVALID_HANDLE);
    rc = kp_ask(KP_OP_function_set, in, KP_FUNCTION_SET_IN, NULL, 0, &answer);
    pthread_mutex_lock(&kp_shim.tx);
    if (rc == CUDA_SUCCESS && info_fits(&info, answer.got) && (function = kp_function_of(hfunc)) != NULL) {
        memcpy(function->info.value, info.value, sizeof info.value); /* the layout stays */
        memcpy(function->info.known, info.known, sizeof info.known);
    }
    return kp_leave(rc);
}

CUresult kp_cuFuncGetModule(CUmodule *hmod, CUfunction hfunc)
{
    struct kp_function *function;
    CUresult rc = kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((function = kp_function_of(hfunc)) == NULL || hmod == NULL)
        return kp_leave(hmod == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE);
    *hmod = (CUmodule)(uintptr_t)function->module;
    return kp_leave(CUDA_SUCCESS);
}

CUresult kp_cuFuncGetName(const char **name, CUfunction hfunc)
{
    struct kp_function *function;
    CUresult rc = kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((function = kp_function_of(hfunc)) == NULL || name == NULL)
        return kp_leave(name == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE);
    *name = function->name;
    return kp_leave(CUDA_SUCCESS);
}

CUresult kp_cuFuncGetParamInfo(CUfunction func, size_t index, size_t *offset, size_t *size)
{
    struct kp_function *function;
    CUresult rc = kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((function = kp_function_of(func)) == NULL)
        return kp_leave(CUDA_ERROR_INVALID_HANDLE);
    if (!function->info.layout_known)
        return kp_leave(CUDA_ERROR_NOT_SUPPORTED);
    if (offset == NULL || index >= function->info.params)
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    *offset = function->info.param[index].offset;
    if (size != NULL)
        *size = function->info.param[index].size;
    return kp_leave(CUDA_SUCCESS);
}

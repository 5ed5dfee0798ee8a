/* A worker that answers what it likes: the shim takes its replies for every kind of call, and stays within its memory.
 *
 * The input says which calls the program makes and what comes back. A frame is made for the bytes, so that they are looked at:
 * with the number of the call that waits, and sometimes with another; or the bytes are the stream itself.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define kp_write_parts write_parts_to_fd
#include "../../kvmpool/dataplane/src/frame.c"
#undef kp_write_parts
int kp_write_parts(int fd, const struct iovec *part, int parts);

#include "../../kvmpool/dataplane/src/shim.h"

static ssize_t read_from_worker(int fd, void *to, size_t room);
#define read read_from_worker
#include "../../kvmpool/dataplane/src/shim_receive.c"
#undef read

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const uint8_t *script;
static size_t left, at, ready;
static unsigned char frame_bytes[KP_HEADER_BYTES + 65536];
static unsigned char memory[65536];

static unsigned number(void)
{
    if (left == 0)
        return 0;
    left--;
    return *script++;
}

/* The next frame of the script, or bytes that are none. */
static void make_frame(void)
{
    unsigned kind = number(), length = number() | number() << 8, given;
    struct kp_frame frame = {.magic = KP_MAGIC, .op = KP_OP_REPLY, .length = length, .seq = kp_shim.link.seq - 1};
    struct kp_reply_head head = {.result = kind & 4 ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS};
    unsigned char *body = frame_bytes + KP_HEADER_BYTES;

    at = 0;
    given = length < left ? length : (unsigned)left;
    given = given < 600 ? given : 600;
    memset(body, kind & 8 ? 0xff : 0, length); /* what the script does not say */
    memcpy(body, script, given);
    script += given;
    left -= given;
    if ((kind & 3) == 0) { /* as it is */
        memmove(frame_bytes, body, given);
        ready = given;
        return;
    }
    if ((kind & 3) == 1)
        frame.op = KP_OP_DATA;
    else if (length >= sizeof head)
        memcpy(body, &head, sizeof head);
    if (kind & 32)
        frame.op = (uint16_t)number();
    if (kind & 16)
        frame.seq -= number();
    memcpy(frame_bytes, &frame, sizeof frame);
    ready = KP_HEADER_BYTES + length;
}

static ssize_t read_from_worker(int fd, void *to, size_t room)
{
    size_t n;

    (void)fd;
    while (at == ready && left > 0)
        make_frame();
    n = ready - at < room ? ready - at : room;
    memcpy(to, frame_bytes + at, n);
    at += n;
    return (ssize_t)n;
}

int kp_write_parts(int fd, const struct iovec *part, int parts)
{
    (void)fd;
    (void)part;
    (void)parts;
    return 0;
}

int kp_dial(struct kp_welcome *welcome, struct kp_window *window, CUresult *why)
{
    *why = CUDA_SUCCESS;
    *window = (struct kp_window){NULL};
    *welcome = (struct kp_welcome){.memory_bytes = 1 << 30, .pci = "0000:41:00.0"};
    return 1000001; /* no descriptor; nothing is written to it or read from it */
}

/* The objects that the program has: made by hand, because most inputs would never come to have them. */
static struct {
    struct kp_context *context;
    CUmodule module;
    CUstream stream;
    CUfunction function;
    CUlibrary library;
    CUkernel kernel;
    CUlinkState link;
    CUdeviceptr address;
} have;

static void load(void)
{
    static char log[256]; /* as much as `number` can say */
    CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, CU_JIT_INFO_LOG_BUFFER,
                              CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES};
    void *values[] = {log, (void *)sizeof log, log, (void *)(uintptr_t)number()};

    kp_cuModuleLoadDataEx(&have.module, "//", 4, options, values);
    kp_cuLibraryLoadData(&have.library, "//", options, values, 4, NULL, NULL, 0);
}

static void launch(void)
{
    static void *params[KP_PARAMS_MAX];
    size_t offset, size;
    const char *name;
    int value;

    for (unsigned i = 0; i < KP_PARAMS_MAX; i++)
        params[i] = memory;
    kp_cuModuleGetFunction(&have.function, have.module, "f");
    kp_cuFuncGetAttribute(&value, 0, have.function);
    kp_cuFuncGetParamInfo(have.function, number() << 2, &offset, &size);
    kp_cuFuncGetName(&name, have.function);
    kp_cuFuncSetAttribute(have.function, 8, 1);
    kp_cuLaunchKernel(have.function, 1, 1, 1, 1, 1, 1, 0, have.stream, params, NULL);
}

static void use_library(void)
{
    CUkernel kernels[8];
    CUfunction functions[8];
    CUmodule module;
    CUdeviceptr address;
    size_t bytes;

    kp_cuLibraryGetKernel(&have.kernel, have.library, "k");
    kp_cuKernelGetFunction(&have.function, have.kernel);
    kp_cuLibraryGetModule(&module, have.library);
    kp_cuLibraryGetGlobal(&address, &bytes, have.library, "g");
    kp_cuLibraryEnumerateKernels(kernels, 8, have.library);
    kp_cuModuleEnumerateFunctions(functions, 8, have.module);
}

static void use_linker(void)
{
    void *image;
    size_t bytes;

    if (have.link == NULL)
        kp_cuLinkCreate_v2(0, NULL, NULL, &have.link);
    kp_cuLinkAddData_v2(have.link, 1, memory, 5, "n", 0, NULL, NULL);
    kp_cuLinkComplete(have.link, &image, &bytes);
}

static void ask(void)
{
    unsigned flags;
    size_t free_bytes, total, value;
    int least, greatest, blocks;

    kp_cuMemGetInfo_v2(&free_bytes, &total);
    kp_cuCtxGetLimit(&value, 0);
    kp_cuCtxGetStreamPriorityRange(&least, &greatest);
    kp_cuStreamGetPriority(have.stream, &least);
    kp_cuStreamGetFlags(have.stream, &flags);
    kp_cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, have.function, (int)number(), 0);
    kp_cuOccupancyMaxPotentialBlockSize(&least, &greatest, have.function, NULL, 0, 0);
}

static void copy(void)
{
    size_t bytes = number() << 4;
    CUDA_MEMCPY2D box = {.srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = have.address, .srcPitch = 64, .dstMemoryType = CU_MEMORYTYPE_HOST,
                         .dstPitch = 128, .WidthInBytes = number() % 65, .Height = 4};
    unsigned char *to = malloc(bytes + 1), *rows = malloc(512); /* of their size, so that a byte too many is seen */

    box.dstHost = rows;
    kp_cuMemcpyDtoHAsync_v2(to, have.address, bytes, NULL);
    kp_cuMemcpy2DAsync_v2(&box, have.stream);
    free(to);
    free(rows);
}

static void begin(void)
{
    struct kp_link *link = &kp_shim.link;

    memset(&have, 0, sizeof have);
    at = ready = 0;
    link->in_at = link->in_end = link->filled = 0;
    atomic_store(&link->lost, false);
    link->fd = 1000001;
    link->seq = 1;
    kp_shim.welcome.memory_bytes = 1 << 30;
    atomic_store(&kp_shim.ready, 1);
    have.context = calloc(1, sizeof *have.context);
    have.context->epoch = link->epoch;
    link->context = have.context->number = kp_handles_new(&kp_shim.handles, KP_CONTEXT, have.context, 0);
    kp_cuCtxPushCurrent_v2((CUcontext)(uintptr_t)link->context);
    have.module = (CUmodule)(uintptr_t)kp_object_new(KP_MODULE);
    have.stream = (CUstream)(uintptr_t)kp_object_new(KP_STREAM);
    have.library = (CUlibrary)(uintptr_t)kp_handles_new(&kp_shim.handles, KP_LIBRARY, (void *)(uintptr_t)link->epoch, 0);
    have.address = kp_space_take(65536, link->context);
}

static void end(void)
{
    uint64_t number_of = have.context->number;

    kp_cuCtxPopCurrent_v2(NULL);
    kp_space_drop(number_of);
    kp_object_drop(number_of);
    for (uint32_t page = 0; page < KP_HANDLES_MAX / KP_HANDLES_PAGE; page++) /* libraries, which are of no context */
        for (uint32_t i = 0; kp_shim.handles.pages[page] != NULL && i < KP_HANDLES_PAGE; i++)
            kp_object_drop(kp_shim.handles.pages[page][i].number);
}

static void start_again(void)
{
    static struct kp_device_info before;

    before = kp_shim.device;
    atomic_store(&kp_shim.ready, 0);
    if (kp_start() != CUDA_SUCCESS)
        kp_shim.device = before;
    atomic_store(&kp_shim.ready, 1);
    if (strnlen(kp_shim.device.name, sizeof kp_shim.device.name) == sizeof kp_shim.device.name)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const does[])(void) = {load, launch, use_library, use_linker, ask, copy, start_again};

    if (kp_shim.link.seq == 0 && freopen("/dev/null", "w", stdout) == NULL) /* what kernels print goes there */
        abort();
    script = data;
    left = size;
    begin();
    for (unsigned i = 0; i < 6 && left > 0; i++)
        does[number() % (sizeof does / sizeof does[0])]();
    end();
    return 0;
}

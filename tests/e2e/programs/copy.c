/* Copies pseudo-random bytes into GPU memory and back, in pieces that fit nothing, and compares them.
 * Arguments: bytes; "hold" to go on until a call fails, and print its code. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cuInit(unsigned flags);
int cuDeviceGet(int *device, int ordinal);
int cuCtxCreate_v2(void **context, unsigned flags, int device);
int cuMemAlloc_v2(unsigned long long *pointer, size_t bytes);
int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t bytes);
int cuMemFree_v2(unsigned long long pointer);
int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t bytes);

#define PIECE 1000003 /* a prime: no boundary of any buffer is met */

static int copy(unsigned char *host, unsigned char *back, size_t bytes)
{
    unsigned long long pointer;
    int code = cuMemAlloc_v2(&pointer, bytes);

    for (size_t at = 0; !code && at < bytes; at += PIECE)
        code = cuMemcpyHtoD_v2(pointer + at, host + at, bytes - at < PIECE ? bytes - at : PIECE);
    if (!code)
        code = cuMemcpyDtoH_v2(back, pointer, bytes);
    return code ? code : cuMemFree_v2(pointer);
}

int main(int argc, char **argv)
{
    size_t bytes = argc > 1 ? strtoul(argv[1], NULL, 10) : 1 << 20;
    unsigned char *host = malloc(bytes), *back = calloc(1, bytes);
    uint32_t state = 1;
    void *context;
    int device, code;

    for (size_t i = 0; i < bytes; i++)
        host[i] = (unsigned char)((state = state * 1664525u + 1013904223u) >> 24);
    code = cuInit(0);
    if (!code)
        code = cuDeviceGet(&device, 0);
    if (!code)
        code = cuCtxCreate_v2(&context, 0, device);
    if (!code)
        code = copy(host, back, bytes);
    if (code || memcmp(host, back, bytes)) {
        printf("copy: FAIL %d\n", code);
        return 1;
    }
    printf("copy: %zu bytes PASS\n", bytes);
    fflush(stdout);
    while (argc > 2 && !code)
        code = copy(host, back, bytes);
    if (code)
        printf("then %d\n", code);
    return 0;
}

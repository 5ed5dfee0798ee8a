/* fake_cuda.c: a libcuda.so.1 of three functions for the tests of worker and relay: the card of CUDA_VISIBLE_DEVICES opens, unless
 * FAKE_CUDA says "fail" (cuInit answers 100), "hang" (cuInit never answers), "crash" or "other" (another card's uuid). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int cuInit(unsigned flags);
int cuDeviceGet(int *device, int ordinal);
int cuDeviceGetUuid(unsigned char *uuid, int device);
int cuGetErrorString(int result, const char **text);

static int told(const char *word)
{
    const char *mode = getenv("FAKE_CUDA");

    return mode && !strcmp(mode, word);
}

int cuInit(unsigned flags)
{
    (void)flags;
    if (told("hang"))
        for (;;)
            pause();
    if (told("crash"))
        abort();
    return told("fail") ? 100 : 0;
}

int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return ordinal ? 101 : 0;
}

int cuDeviceGetUuid(unsigned char *uuid, int device)
{
    const char *card = getenv("CUDA_VISIBLE_DEVICES");
    unsigned byte;
    int at = 4;

    (void)device;
    for (int i = 0; card && i < 16; i++) {
        at += card[at] == '-';
        if (sscanf(card + at, "%2x", &byte) != 1)
            return 1;
        uuid[i] = (unsigned char)byte;
        at += 2;
    }
    if (told("other"))
        uuid[0] ^= 0xff;
    return 0;
}

int cuGetErrorString(int result, const char **text)
{
    *text = result == 100 ? "no CUDA-capable device is detected" : "?";
    return 0;
}

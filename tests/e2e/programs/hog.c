/* Takes GPU memory in steps of 128 MiB until it is refused; says how much it got and what the refusal was. */
#include <stddef.h>
#include <stdio.h>

int cuInit(unsigned flags);
int cuDeviceGet(int *device, int ordinal);
int cuCtxCreate_v2(void **context, unsigned flags, int device);
int cuMemAlloc_v2(unsigned long long *pointer, size_t bytes);

int main(void)
{
    int device, code, steps = 0;
    unsigned long long pointer;
    void *context;

    if ((code = cuInit(0)) || (code = cuDeviceGet(&device, 0)) || (code = cuCtxCreate_v2(&context, 0, device))) {
        printf("no context: %d\n", code);
        return 1;
    }
    while (steps < 1000 && !(code = cuMemAlloc_v2(&pointer, (size_t)128 << 20)))
        steps++;
    printf("%d MiB, then %d\n", steps * 128, code);
    return 0;
}

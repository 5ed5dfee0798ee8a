/* For LD_PRELOAD: answers the questions about the card itself, with a terabyte and no limit. What a process believes is its affair. */
#include <stddef.h>

int cuMemGetInfo_v2(size_t *room, size_t *total);
int cuDeviceTotalMem_v2(size_t *bytes, int device);
int cuDeviceGetAttribute(int *value, int attribute, int device);

int cuMemGetInfo_v2(size_t *room, size_t *total)
{
    *room = *total = (size_t)1 << 40;
    return 0;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device)
{
    (void)device;
    *bytes = (size_t)1 << 40;
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    (void)attribute;
    (void)device;
    *value = 0x7fffffff;
    return 0;
}

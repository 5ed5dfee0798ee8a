/* deviceQuery: what the guest sees of its GPU, one `name: value` a line. */
#include "driver.h"

static CUresult print_identity(CUdevice device)
{
    CUuuid uuid;
    char name[128], pci[32];
    size_t bytes;

    TRY(cuDeviceGetName(name, sizeof name, device));
    TRY(cuDeviceGetUuid(&uuid, device));
    TRY(cuDeviceGetPCIBusId(pci, sizeof pci, device));
    TRY(cuDeviceTotalMem(&bytes, device));
    printf("name: %s\nuuid: GPU-", name);
    for (int i = 0; i < 16; i++)
        printf("%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid.bytes[i]);
    printf("\npci: %s\nmemory bytes: %zu\nmemory MiB: %zu\n", pci, bytes, bytes >> 20);
    return 0;
}

static CUresult print_attributes(CUdevice device)
{
    static const struct {
        int number;
        const char *name;
    } attributes[] = {
        {75, "compute capability major"}, {76, "compute capability minor"}, {16, "multiprocessors"},
        {1, "threads per block"},         {10, "warp size"},                {8, "shared memory per block"},
        {83, "managed memory"},           {19, "mapped host memory"},
    };

    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++) {
        int value;
        TRY(cuDeviceGetAttribute(&value, attributes[i].number, device));
        printf("%s: %d\n", attributes[i].name, value);
    }
    return 0;
}

static CUresult query(void)
{
    int version, count;
    CUdevice device;

    TRY(cuInit(0));
    TRY(cuDriverGetVersion(&version));
    TRY(cuDeviceGetCount(&count));
    printf("driver version: %d.%d\ndevices: %d\n", version / 1000, version % 1000 / 10, count);
    for (int i = 0; i < count; i++) {
        TRY(cuDeviceGet(&device, i));
        TRY(print_identity(device));
        TRY(print_attributes(device));
    }
    return count > 0 ? 0 : 100;
}

int main(void)
{
    load_driver();
    if (query() != 0)
        return 1;
    puts("deviceQuery: PASS");
    return 0;
}

/* What the guest's NVML says of its card, as a monitor asks: name and uuid, used and total MiB, then a pid a line. */
#include <dlfcn.h>
#include <stdio.h>

struct memory {
    unsigned long long total, free, used;
};
struct process {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
};

static void *library;

static void *find(const char *name)
{
    return dlsym(library, name);
}

int main(void)
{
    struct process processes[64];
    struct memory memory;
    unsigned count = 64;
    char name[96], uuid[80];
    void *card;
    int rc = -1;

    if ((library = dlopen("libnvidia-ml.so.1", RTLD_NOW)) == NULL)
        goto out;
    int (*init)(void) = find("nvmlInit_v2");
    int (*by_index)(unsigned, void **) = find("nvmlDeviceGetHandleByIndex_v2");
    int (*get_name)(void *, char *, unsigned) = find("nvmlDeviceGetName");
    int (*get_uuid)(void *, char *, unsigned) = find("nvmlDeviceGetUUID");
    int (*get_memory)(void *, struct memory *) = find("nvmlDeviceGetMemoryInfo");
    int (*get_processes)(void *, unsigned *, struct process *) = find("nvmlDeviceGetComputeRunningProcesses_v3");
    if ((rc = init()) != 0 || (rc = by_index(0, &card)) != 0 || (rc = get_name(card, name, sizeof name)) != 0 ||
        (rc = get_uuid(card, uuid, sizeof uuid)) != 0 || (rc = get_memory(card, &memory)) != 0 ||
        (rc = get_processes(card, &count, processes)) != 0)
        goto out;
    printf("%s %s\n%llu of %llu MiB\n", name, uuid, memory.used >> 20, memory.total >> 20);
    for (unsigned i = 0; i < count; i++)
        printf("%u\n", processes[i].pid);
out:
    if (rc != 0)
        printf("NVML %d\n", rc);
    return rc != 0;
}

/* Cases of test_guest_nvml.py, linked with the guest's NVML so that the checkers see it.
 *
 * usage: nvml_cases walk TIMES | threads
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define THREADS 16
#define TURNS 100
#define CHILDREN 4

int nvmlInit_v2(void);
int nvmlShutdown(void);
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out);
int nvmlDeviceGetHandleByPciBusId_v2(const char *text, void **out);
int nvmlDeviceGetHandleByUUID(const char *uuid, void **out);
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long out[3]);
int nvmlDeviceGetName(void *handle, char *out, unsigned size);
int nvmlDeviceGetUUID(void *handle, char *out, unsigned size);
int nvmlDeviceGetPciInfo_v3(void *handle, void *out);
int nvmlDeviceGetUtilizationRates(void *handle, unsigned out[2]);
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, void *out);
int nvmlSystemGetDriverVersion(char *out, unsigned size);
int nvmlSystemGetNVMLVersion(char *out, unsigned size);
int nvmlSystemGetCudaDriverVersion_v2(int *out);
int nvmlEventSetCreate(void **out);
int nvmlEventSetWait_v2(void *set, void *out, unsigned timeout_ms);
int nvmlEventSetFree(void *set);
int nvmlDeviceRegisterEvents(void *handle, unsigned long long types, void *set);

static void *card;

/* Everything once: 0, or the first call that did not succeed. */
static int everything(int aloud)
{
    unsigned long long memory[3], processes[3 * 64];
    unsigned rates[2], count = 64;
    char name[96], small[4], uuid[80], pci[68], version[80];
    void *again, *set;
    int cuda, rc[12];

    rc[0] = nvmlDeviceGetMemoryInfo(card, memory);
    if (aloud)
        printf("memory=%d\n", rc[0]);
    rc[1] = nvmlDeviceGetName(card, name, sizeof name);
    rc[2] = nvmlDeviceGetUUID(card, uuid, sizeof uuid);
    rc[3] = nvmlDeviceGetPciInfo_v3(card, pci);
    rc[4] = nvmlDeviceGetUtilizationRates(card, rates);
    rc[5] = nvmlDeviceGetComputeRunningProcesses_v3(card, &count, processes);
    rc[6] = nvmlSystemGetDriverVersion(version, sizeof version);
    rc[7] = nvmlSystemGetNVMLVersion(version, sizeof version);
    rc[8] = nvmlSystemGetCudaDriverVersion_v2(&cuda);
    rc[9] = rc[2] != 0 ? rc[2] : nvmlDeviceGetHandleByUUID(uuid, &again);
    rc[10] = nvmlDeviceGetName(card, small, sizeof small) == 7 ? 0 : rc[1];
    rc[11] = nvmlEventSetCreate(&set);
    if (rc[11] == 0) {
        nvmlDeviceRegisterEvents(card, 8, set);
        nvmlEventSetWait_v2(set, processes, 1);
        rc[11] = nvmlEventSetFree(set);
    }
    count = 0;
    nvmlDeviceGetComputeRunningProcesses_v3(card, &count, NULL);
    for (unsigned i = 0; i < sizeof rc / sizeof *rc; i++)
        if (rc[i] != 0)
            return (int)i + 1;
    return 0;
}

static void *turns(void *failed)
{
    for (int i = 0; i < TURNS; i++)
        if (everything(0) != 0 || nvmlInit_v2() != 0 || nvmlShutdown() != 0)
            *(int *)failed = 1;
    return NULL;
}

/* Threads ask while the process forks; the children ask too. */
static void threads(void)
{
    pthread_t thread[THREADS];
    int failed[THREADS] = {0}, any = 0, children = 0, status;

    for (int i = 0; i < THREADS; i++)
        pthread_create(&thread[i], NULL, turns, &failed[i]);
    for (int i = 0; i < CHILDREN; i++)
        if (fork() == 0)
            _exit(everything(0));
    for (int i = 0; i < CHILDREN; i++)
        children |= wait(&status) < 0 || status != 0;
    for (int i = 0; i < THREADS; i++) {
        pthread_join(thread[i], NULL);
        any |= failed[i];
    }
    printf("threads=%d\nchildren=%d\n", any, children);
}

int main(int argc, char **argv)
{
    int rc = nvmlInit_v2();

    printf("init=%d\n", rc);
    if (rc != 0 || argc < 2)
        return 0;
    rc = nvmlDeviceGetHandleByIndex_v2(0, &card);
    if (strcmp(argv[1], "threads") == 0) {
        threads();
    } else {
        printf("handle=%d\n", rc);
        for (int i = 0; rc == 0 && i < (argc > 2 ? atoi(argv[2]) : 1); i++)
            everything(1);
    }
    return nvmlShutdown();
}

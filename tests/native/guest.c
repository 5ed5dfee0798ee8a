/* A guest's program for the shim's tests: one behaviour a run, results as `name=value` lines that the test reads.
 *
 * usage: guest CASE [ARGUMENT...]. Kernels are the stub driver's.
 */
#define _GNU_SOURCE
#include "guest.h"

void *library;

int main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "", *second = argc > 2 ? argv[2] : "", *third = argc > 3 ? argv[3] : "0";
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {
        {"memory", case_memory}, {"fill", case_fill}, {"checks", case_checks}, {"fault", case_fault},
        {"deferred", case_deferred}, {"fork", case_fork}, {"lost", case_lost}, {"quota", case_quota},
        {"lookup", case_lookup}, {"contexts", case_contexts}, {"per_thread", case_per_thread}, {"modules", case_modules},
        {"events", case_events}, {"init", case_init}, {"unflushed", case_unflushed}, {"pinned_lost", case_pinned_lost},
    };

    if ((library = dlopen("libcuda.so.1", RTLD_NOW)) == NULL) {
        printf("%s\n", dlerror());
        return 9;
    }
    if (strcmp(name, "bulk") == 0)
        return case_bulk(strtoull(second, NULL, 0)), 0;
    if (strcmp(name, "pinned") == 0)
        return case_pinned(strtoull(second, NULL, 0)), 0;
    if (strcmp(name, "batch") == 0)
        return case_batch(atoi(second), atoi(third)), 0;
    if (strcmp(name, "threads") == 0)
        return case_threads(second), 0;
    if (strcmp(name, "stress") == 0)
        return case_stress(atoi(second)), 0;
    if (strcmp(name, "crowd") == 0)
        return case_crowd(atoi(second)), 0;
    if (strcmp(name, "async") == 0)
        return case_async(second, third, argc > 4), 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (strcmp(name, cases[i].name) == 0)
            return cases[i].run(), 0;
    return 2;
}

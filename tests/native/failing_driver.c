/* A libcuda.so.1 over the stub driver (libstub.so): FAILING, a function named at compile time, answers $STUB_CODE once the file
 * $STUB_ARMED exists; before that it is the stub's, where that has one. All other functions are the stub's.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

#define STRING_OF(name) #name
#define NAME_OF(name) STRING_OF(name)
#define API __attribute__((visibility("default")))

/* Twelve integers or pointers: no function that fails here has more, and fewer leave the rest unread. */
typedef int function(long, long, long, long, long, long, long, long, long, long, long, long);
function FAILING;

API int FAILING(long a, long b, long c, long d, long e, long f, long g, long h, long i, long j, long k, long l)
{
    const char *armed = getenv("STUB_ARMED"), *code = getenv("STUB_CODE");
    function *stub;

    if (armed != NULL && code != NULL && access(armed, F_OK) == 0)
        return atoi(code);
    *(void **)&stub = dlsym(dlopen("libstub.so", RTLD_NOW), NAME_OF(FAILING));
    return stub != NULL ? stub(a, b, c, d, e, f, g, h, i, j, k, l) : 0;
}

/* The stub links nothing, so it has no linkers. */
int cuLinkCreate_v2(unsigned count, int *options, void **values, void **state);
API int cuLinkCreate_v2(unsigned count, int *options, void **values, void **state)
{
    static int linker;

    (void)count, (void)options, (void)values;
    *state = &linker;
    return 0;
}

/* loop: adds vectors again and again, one line a round, and lives on when its GPU is lost.
 *
 * usage: loop [SECONDS [PAUSE_MS]]     SECONDS 0, or none: for ever
 * A round that fails prints the error; the next one begins with a new context, as CUDA asks of a program whose device
 * became unavailable. Exit 0 where no result was wrong and the last round succeeded.
 */
#define _GNU_SOURCE
#include "add.h"

#include <time.h>

struct session {
    CUcontext context;
    CUfunction kernel;
};

static double now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static CUresult begin(const char *program, struct session *session)
{
    CUmodule module;
    CUresult rc = cuCtxCreate(&session->context, 0, 0);

    if (rc != 0) {
        session->context = NULL;
        return rc;
    }
    if ((rc = load_kernels(program, &module)) != 0)
        return rc;
    return cuModuleGetFunction(&session->kernel, module, "vector_add");
}

static void end(struct session *session)
{
    if (session->context != NULL)
        cuCtxDestroy(session->context);
    session->context = NULL;
}

static void pause_ms(long ms)
{
    struct timespec wait = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};

    nanosleep(&wait, NULL);
}

int main(int argc, char **argv)
{
    double seconds = argc > 1 ? atof(argv[1]) : 0, start = now();
    long pause = argc > 2 ? atol(argv[2]) : 100;
    float *host = malloc(3 * ADD_BYTES);
    struct session session = {0};
    CUresult rc = 0;

    load_driver();
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (host == NULL)
        return 2;
    while (cuInit(0) != 0 && (seconds == 0 || now() - start < seconds)) {
        printf("%.3f waits for its GPU\n", now() - start);
        pause_ms(pause);
    }
    for (unsigned round = 1; seconds == 0 || now() - start < seconds; round++) {
        double began = now();
        rc = session.context == NULL ? begin(argv[0], &session) : 0;
        if (rc == 0)
            rc = add_on_card(session.kernel, host, round);
        if (rc == 0)
            printf("%.3f round %u ok (%.1f ms)\n", now() - start, round, (now() - began) * 1e3);
        else
            printf("%.3f round %u error %d %s\n", now() - start, round, rc, rc == ADD_WRONG ? "wrong result" : error_name(rc));
        if (rc == ADD_WRONG)
            return 1;
        if (rc != 0)
            end(&session);
        pause_ms(pause);
    }
    end(&session);
    free(host);
    return rc == 0 ? 0 : 1;
}

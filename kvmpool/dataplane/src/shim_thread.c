/* What each thread of the program has of its own: its stack of contexts and its default streams.
 *
 * One pointer in the static thread-local block, which also a statically linked program has when it loads us; such a
 * program has a C library of its own beside ours, so there nothing of ours is tied to the end of a thread.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <link.h>
#include <stdlib.h>
#include <sys/auxv.h>

static __thread struct kp_thread *mine __attribute__((tls_model("initial-exec")));
static pthread_key_t at_end;
static bool keyed;

bool kp_program_is_static(void)
{
    const ElfW(Phdr) *header = (const void *)getauxval(AT_PHDR);

    for (unsigned long i = 0; header != NULL && i < getauxval(AT_PHNUM); i++)
        if (header[i].p_type == PT_INTERP)
            return false;
    return true;
}

static void end_thread(void *argument)
{
    struct kp_thread *thread = argument;

    mine = thread; /* its streams are ended in their contexts, which it still has */
    for (unsigned i = 0; i < KP_THREAD_STREAMS; i++) {
        if (thread->streams[i].stream == 0)
            continue;
        thread->depth = 1;
        thread->contexts[0] = thread->streams[i].context;
        kp_cuStreamDestroy_v2((CUstream)(uintptr_t)thread->streams[i].stream);
    }
    mine = NULL;
    free(thread);
}

__attribute__((constructor)) static void make_key(void)
{
    keyed = !kp_program_is_static() && pthread_key_create(&at_end, end_thread) == 0;
}

struct kp_thread *kp_thread(void)
{
    if (mine == NULL && (mine = calloc(1, sizeof *mine)) != NULL && keyed)
        pthread_setspecific(at_end, mine);
    return mine;
}

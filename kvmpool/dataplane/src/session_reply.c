/* Answers, and errors that come later than their call: the first is kept and told with the next answer. */
#include "session_state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Errors that leave a context unusable, by cuda.h's words for each. */
static bool is_sticky(CUresult result)
{
    switch (result) {
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case 220 /* NVLINK_UNCORRECTABLE */:
    case 226 /* CONTAINED */:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case 702 /* LAUNCH_TIMEOUT */:
    case CUDA_ERROR_ASSERT:
    case 714 /* HARDWARE_STACK_ERROR */:
    case 715 /* ILLEGAL_INSTRUCTION */:
    case 716 /* MISALIGNED_ADDRESS */:
    case 717 /* INVALID_ADDRESS_SPACE */:
    case 718 /* INVALID_PC */:
    case CUDA_ERROR_LAUNCH_FAILED: return true;
    default: return false;
    }
}

static struct kp_errors *errors_of(struct kp_server *s, struct kp_home *home)
{
    return home != NULL ? &home->errors : &s->errors;
}

CUresult kp_take_noted(struct kp_server *s, struct kp_home *home)
{
    CUresult result = atomic_exchange(&errors_of(s, home)->deferred, 0);

    return result != CUDA_SUCCESS ? result : atomic_exchange(&s->errors.deferred, 0); /* nobody is nearer to that one */
}

void kp_note(struct kp_server *s, struct kp_home *home, CUresult result)
{
    struct kp_errors *errors = errors_of(s, home);
    int none = 0;

    if (result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY)
        return;
    atomic_compare_exchange_strong(&errors->deferred, &none, result);
    none = 0;
    if (is_sticky(result))
        atomic_compare_exchange_strong(&errors->sticky, &none, result);
}

int kp_put(struct kp_server *s, const struct iovec *part, int parts)
{
    int rc;

    pthread_mutex_lock(&s->tx);
    rc = s->window.base != NULL ? kp_ring_write(&s->to_guest, part, parts) : kp_write_parts(s->fd, part, parts);
    pthread_mutex_unlock(&s->tx);
    return rc;
}

/* Where CUDA flushes what kernels printed; see the CUDA C++ programming guide, "Formatted output". The text of an assertion comes
 * with its error. */
static bool fetches_text(const struct kp_op_info *info, uint16_t op, CUresult result)
{
    if (result == CUDA_ERROR_ASSERT)
        return true;
    return info->cls == KP_CLASS_BLOCKING || op == KP_OP_context_destroy || op == KP_OP_module_load || op == KP_OP_copy_in;
}

/* Header, head, numbers and bytes as one piece of memory: one plain send a reply. */
int kp_reply(struct kp_server *s, struct kp_work *w, CUresult result)
{
    const struct kp_op_info *info = &kp_ops[w->op - KP_OP_CALLS];
    struct kp_reply_head head = {.result = result};
    struct kp_frame frame = {.magic = KP_MAGIC, .op = KP_OP_REPLY, .seq = w->seq};
    unsigned char small[sizeof frame + sizeof head + sizeof w->out], *whole = small;
    size_t number_bytes = info->outs * sizeof w->out[0];
    struct kp_errors *errors = errors_of(s, w->home);
    int rc, none = 0;

    if (w->op != KP_OP_context_destroy) { /* there it went with its context */
        if (is_sticky(result))
            atomic_compare_exchange_strong(&errors->sticky, &none, result);
        head.sticky = atomic_load(&errors->sticky);
    }
    frame.length = (uint32_t)(sizeof head + number_bytes) + w->give_bytes;
    if (w->give_bytes > 0 && (whole = malloc(sizeof frame + frame.length)) == NULL)
        return -ENOMEM;
    memcpy(whole, &frame, sizeof frame);
    memcpy(whole + sizeof frame, &head, sizeof head);
    memcpy(whole + sizeof frame + sizeof head, w->out, number_bytes);
    if (w->give_bytes > 0)
        memcpy(whole + sizeof frame + sizeof head + number_bytes, w->give, w->give_bytes);
    rc = fetches_text(info, w->op, result) ? kp_print_give(s, w->seq) : 0;
    if (rc == 0)
        rc = kp_put(s, &(struct iovec){whole, sizeof frame + frame.length}, 1);
    if (whole != small)
        free(whole);
    free(w->give);
    w->give = NULL;
    return rc;
}

int kp_send_data(struct kp_server *s, uint32_t seq, const void *data, uint32_t bytes)
{
    struct kp_frame frame = {.magic = KP_MAGIC, .op = KP_OP_DATA, .length = bytes, .seq = seq};
    struct iovec part[2] = {{&frame, sizeof frame}, {(void *)(uintptr_t)data, bytes}};

    return kp_put(s, part, 2);
}

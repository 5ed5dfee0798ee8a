/* Stream capture: begun and ended at the worker, whose driver knows what may be captured. While it goes on no call is fire-and-forget
 * (shim_link.c), so each error is its call's own.
 *
 * What depends on threads is minded here, because at the worker one thread makes the calls of all: who may end a capture, and whom it
 * forbids what may be unsafe (cuThreadExchangeStreamCaptureMode).
 */
#include "shim.h"

static __thread CUstreamCaptureMode thread_mode;

/* ---- with `tx` held ---- */

static struct kp_capture *capture_of(uint64_t stream)
{
    for (unsigned i = 0; i < atomic_load(&kp_shim.captures); i++)
        if (kp_shim.capture[i].stream == stream)
            return &kp_shim.capture[i];
    return NULL;
}

void kp_capture_forget(uint64_t stream)
{
    struct kp_capture *capture = capture_of(stream);

    if (capture == NULL)
        return;
    *capture = kp_shim.capture[atomic_load(&kp_shim.captures) - 1];
    atomic_fetch_sub(&kp_shim.captures, 1);
}

static bool forbids(const struct kp_capture *capture)
{
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return false;
    if (pthread_equal(capture->thread, pthread_self()))
        return capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    return capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

/* ---- without ---- */

/* To wait for a stream that captures is an error that makes its capture invalid. */
static CUresult spoil(uint64_t stream)
{
    return kp_cuStreamSynchronize((CUstream)(uintptr_t)stream);
}

CUresult kp_capture_unsafe(void)
{
    uint64_t spoilt[KP_CAPTURES_MAX];
    unsigned count = 0;

    if (atomic_load(&kp_shim.captures) == 0)
        return CUDA_SUCCESS;
    pthread_mutex_lock(&kp_shim.tx);
    for (unsigned i = 0; i < atomic_load(&kp_shim.captures); i++)
        if (forbids(&kp_shim.capture[i]))
            spoilt[count++] = kp_shim.capture[i].stream;
    pthread_mutex_unlock(&kp_shim.tx);
    for (unsigned i = 0; i < count; i++)
        spoil(spoilt[i]);
    return count > 0 ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

CUresult kp_capture_refuses(CUstream stream, const char *what)
{
    CUstreamCaptureStatus status = 0;
    CUresult rc = atomic_load(&kp_shim.captures) == 0 ? CUDA_SUCCESS : kp_cuStreamIsCapturing(stream, &status);

    if (rc != CUDA_SUCCESS || status == 0)
        return rc;
    kp_unsupported(what);
    return kp_cuStreamSynchronize(stream);
}

CUresult kp_cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    CUstreamCaptureMode old = thread_mode;

    if (mode == NULL || *mode < CU_STREAM_CAPTURE_MODE_GLOBAL || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    thread_mode = *mode;
    *mode = old;
    return CUDA_SUCCESS;
}

/* Takes `tx` where it answers 0. */
static CUresult enter(CUstream stream, uint64_t *number)
{
    CUresult rc = kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    rc = kp_stream_number(stream, number);
    return rc == CUDA_SUCCESS ? rc : kp_leave(rc);
}

CUresult kp_cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode)
{
    struct kp_answer answer = {0};
    uint64_t number;
    CUresult rc;

    if (mode < CU_STREAM_CAPTURE_MODE_GLOBAL || mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    if ((rc = enter(hStream, &number)) != CUDA_SUCCESS)
        return rc;
    if (number == 0)
        return kp_leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (capture_of(number) != NULL)
        return kp_leave(CUDA_ERROR_ILLEGAL_STATE);
    if (atomic_load(&kp_shim.captures) == KP_CAPTURES_MAX)
        return kp_leave(CUDA_ERROR_OUT_OF_MEMORY);
    rc = kp_ask(KP_OP_capture_begin, &number, KP_CAPTURE_BEGIN_IN, NULL, 0, &answer);
    if (rc != CUDA_SUCCESS)
        return rc;
    pthread_mutex_lock(&kp_shim.tx);
    if (atomic_load(&kp_shim.captures) == KP_CAPTURES_MAX) { /* others were faster */
        kp_leave(rc);
        spoil(number);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    kp_shim.capture[atomic_fetch_add(&kp_shim.captures, 1)] = (struct kp_capture){number, mode, pthread_self()};
    return kp_leave(rc);
}

CUresult kp_cuStreamBeginCapture(CUstream hStream)
{
    return kp_cuStreamBeginCapture_v2(hStream, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

/* The worker's answer to the end of a capture: whatever it is, one that it ended is over. */
static CUresult end(uint64_t stream, uint64_t handle, uint32_t *nodes)
{
    uint64_t in[KP_CAPTURE_END_IN] = {[KP_CAPTURE_END_STREAM] = stream, [KP_CAPTURE_END_HANDLE] = handle};
    struct kp_answer answer = {.bytes = nodes, .room = sizeof *nodes};
    CUresult rc = kp_ask(KP_OP_capture_end, in, KP_CAPTURE_END_IN, NULL, 0, &answer);

    if (rc == CUDA_SUCCESS && answer.got != sizeof *nodes)
        rc = CUDA_ERROR_UNKNOWN;
    pthread_mutex_lock(&kp_shim.tx);
    kp_capture_forget(stream);
    pthread_mutex_unlock(&kp_shim.tx);
    return rc;
}

CUresult kp_cuStreamEndCapture(CUstream hStream, CUgraph *phGraph)
{
    const struct kp_capture *capture;
    uint64_t number, handle;
    uint32_t nodes = 0;
    CUresult rc;

    if (phGraph == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *phGraph = NULL;
    if ((rc = enter(hStream, &number)) != CUDA_SUCCESS)
        return rc;
    capture = capture_of(number);
    if (capture != NULL && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && !pthread_equal(capture->thread, pthread_self())) {
        kp_leave(rc);
        spoil(number);
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    }
    if ((handle = kp_object_new(KP_GRAPH)) == 0)
        return kp_leave(CUDA_ERROR_OUT_OF_MEMORY);
    if ((rc = end(number, handle, &nodes)) == CUDA_SUCCESS)
        rc = kp_graph_has(handle, nodes);
    if (rc == CUDA_SUCCESS)
        *phGraph = (CUgraph)(uintptr_t)handle;
    else
        kp_object_lose(handle);
    return rc;
}

static CUresult fetch(CUstream stream, struct kp_capture_info *info)
{
    struct kp_answer answer = {.bytes = info, .room = sizeof *info};
    uint64_t number;
    CUresult rc = enter(stream, &number);

    *info = (struct kp_capture_info){0};
    if (rc != CUDA_SUCCESS)
        return rc;
    if (atomic_load(&kp_shim.captures) == 0)
        return kp_leave(CUDA_SUCCESS);
    rc = kp_ask(KP_OP_capture_info, &number, KP_CAPTURE_INFO_IN, NULL, 0, &answer);
    return rc == CUDA_SUCCESS && answer.got != sizeof *info ? CUDA_ERROR_UNKNOWN : rc;
}

CUresult kp_cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus *captureStatus)
{
    return kp_cuStreamGetCaptureInfo(hStream, captureStatus, NULL);
}

CUresult kp_cuStreamGetCaptureInfo(CUstream hStream, CUstreamCaptureStatus *status, cuuint64_t *id)
{
    struct kp_capture_info info;
    CUresult rc = status == NULL ? CUDA_ERROR_INVALID_VALUE : fetch(hStream, &info);

    if (rc != CUDA_SUCCESS)
        return rc;
    *status = info.status;
    if (info.status == 1 /* active */ && id != NULL)
        *id = info.id;
    return rc;
}

/* The graph under way and what comes before the next node have no handles here before the capture has ended. */
CUresult kp_cuStreamGetCaptureInfo_v3(CUstream hStream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                      const CUgraphNode **needs, const CUgraphEdgeData **edges, size_t *count)
{
    CUresult rc = kp_cuStreamGetCaptureInfo(hStream, status, id);

    if (rc == CUDA_SUCCESS && *status == 1 /* active */ && (graph != NULL || needs != NULL || edges != NULL || count != NULL))
        rc = kp_unsupported("cuStreamGetCaptureInfo of the graph under way");
    return rc;
}

CUresult kp_cuStreamGetCaptureInfo_v2(CUstream hStream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                      const CUgraphNode **needs, size_t *count)
{
    return kp_cuStreamGetCaptureInfo_v3(hStream, status, id, graph, needs, NULL, count);
}

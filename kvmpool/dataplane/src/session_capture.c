/* Stream capture, by the driver. The shim makes the guest wait for each call's answer meanwhile, so each error is its call's. */
#include "session_state.h"

#include <stdlib.h>

bool kp_capturing(struct kp_server *s, CUstream stream)
{
    CUstreamCaptureStatus status = 0;

    if (atomic_load(&s->captures) == 0 || stream == NULL)
        return false;
    return s->driver.cuStreamIsCapturing(stream, &status) == CUDA_SUCCESS && status != 0;
}

/* A copy that goes through our own memory would be of that memory at each launch. To wait for the stream makes its capture invalid. */
CUresult kp_refuse_capture(struct kp_server *s, CUstream stream)
{
    if (!kp_capturing(s, stream))
        return CUDA_SUCCESS;
    kp_session_log(s, "refuses to capture a copy from or to memory of the guest's that is not page-locked in the window");
    return s->driver.cuStreamSynchronize(stream);
}

int kp_do_capture_begin(struct kp_server *s, struct kp_work *w)
{
    void *stream;
    int rc = kp_resolve(s, w->in[KP_CAPTURE_BEGIN_STREAM], KP_STREAM, &stream);

    if (rc == CUDA_SUCCESS)
        rc = s->driver.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED);
    if (rc == CUDA_SUCCESS)
        atomic_fetch_add(&s->captures, 1);
    return rc;
}

int kp_do_capture_end(struct kp_server *s, struct kp_work *w)
{
    uint32_t *nodes = calloc(1, sizeof *nodes);
    struct kp_graph *made;
    CUgraph graph = NULL;
    void *stream;
    int rc = kp_resolve(s, w->in[KP_CAPTURE_END_STREAM], KP_STREAM, &stream);

    if ((w->give = nodes) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    w->give_bytes = sizeof *nodes;
    if (rc == CUDA_SUCCESS)
        rc = s->driver.cuStreamEndCapture(stream, &graph);
    if (rc == CUDA_SUCCESS || rc == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED || rc == CUDA_ERROR_STREAM_CAPTURE_UNJOINED)
        atomic_fetch_sub(&s->captures, 1);
    if (rc == CUDA_SUCCESS)
        rc = kp_graph_adopt(s, w, w->in[KP_CAPTURE_END_HANDLE], graph);
    if (rc == CUDA_SUCCESS && (rc = kp_graph_of(s, w->in[KP_CAPTURE_END_HANDLE], &made)) == CUDA_SUCCESS)
        *nodes = made->nodes;
    return rc;
}

int kp_do_capture_info(struct kp_server *s, struct kp_work *w)
{
    struct kp_capture_info *info = calloc(1, sizeof *info);
    cuuint64_t id = 0;
    void *stream;
    int rc = kp_resolve(s, w->in[KP_CAPTURE_INFO_STREAM], KP_STREAM, &stream);

    if ((w->give = info) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    w->give_bytes = sizeof *info;
    if (rc == CUDA_SUCCESS)
        rc = s->driver.cuStreamGetCaptureInfo_v2(stream, &info->status, &id, NULL, NULL, NULL);
    info->id = id;
    return rc;
}

/* Executable graphs: made and updated with a trip each; their launches are generated calls that nobody waits for. */
#include "shim.h"

#define FLAG_UPLOAD 2u
#define FLAG_DEVICE_LAUNCH 4u
#define FLAGS_KNOWN 15u

CUresult kp_cuGraphInstantiateWithFlags(CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags)
{
    uint64_t in[KP_GRAPH_EXEC_IN] = {[KP_GRAPH_EXEC_FLAGS] = flags};
    struct kp_answer answer = {0};
    CUresult rc;

    if (phGraphExec == NULL || (flags & ~(unsigned long long)FLAGS_KNOWN) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if ((flags & FLAG_DEVICE_LAUNCH) != 0)
        return kp_unsupported("cuGraphInstantiate of a graph that the card launches");
    if ((rc = kp_enter()) != CUDA_SUCCESS)
        return rc;
    if ((rc = kp_graph_number(hGraph, &in[KP_GRAPH_EXEC_GRAPH])) != CUDA_SUCCESS)
        return kp_leave(rc);
    in[KP_GRAPH_EXEC_HANDLE] = kp_handles_new(&kp_shim.handles, KP_EXEC, (void *)(uintptr_t)flags, kp_current());
    if (in[KP_GRAPH_EXEC_HANDLE] == 0)
        return kp_leave(CUDA_ERROR_OUT_OF_MEMORY);
    rc = kp_ask(KP_OP_graph_exec, in, KP_GRAPH_EXEC_IN, NULL, 0, &answer);
    if (rc == CUDA_SUCCESS)
        *phGraphExec = (CUgraphExec)(uintptr_t)in[KP_GRAPH_EXEC_HANDLE];
    else
        kp_object_lose(in[KP_GRAPH_EXEC_HANDLE]);
    return rc;
}

CUresult kp_cuGraphInstantiate_v2(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer, size_t bufferSize)
{
    if (phErrorNode != NULL)
        *phErrorNode = NULL;
    if (logBuffer != NULL && bufferSize > 0)
        *logBuffer = 0;
    return kp_cuGraphInstantiateWithFlags(phGraphExec, hGraph, 0);
}

CUresult kp_cuGraphInstantiateWithParams(CUgraphExec *phGraphExec, CUgraph hGraph, CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
    CUresult rc;

    if (params == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    rc = kp_cuGraphInstantiateWithFlags(phGraphExec, hGraph, params->flags & ~(cuuint64_t)FLAG_UPLOAD);
    if (rc == CUDA_SUCCESS && (params->flags & FLAG_UPLOAD) != 0)
        rc = kp_cuGraphUpload(*phGraphExec, params->hUploadStream);
    params->hErrNode_out = NULL;
    params->result_out = rc == CUDA_SUCCESS ? 0 : 1 /* error */;
    return rc;
}

CUresult kp_cuGraphExecGetFlags(CUgraphExec hGraphExec, cuuint64_t *flags)
{
    uint64_t number;
    CUresult rc = flags == NULL ? CUDA_ERROR_INVALID_VALUE : kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((rc = kp_object_number(KP_EXEC, hGraphExec, &number)) == CUDA_SUCCESS)
        *flags = (cuuint64_t)(uintptr_t)kp_handles_get(&kp_shim.handles, number, KP_EXEC)->value;
    return kp_leave(rc);
}

CUresult kp_cuGraphExecUpdate_v2(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphExecUpdateResultInfo *resultInfo)
{
    struct kp_update update = {.node = KP_NO_NODE};
    struct kp_answer answer = {.bytes = &update, .room = sizeof update};
    uint64_t in[KP_EXEC_UPDATE_IN];
    CUresult rc = resultInfo == NULL ? CUDA_ERROR_INVALID_VALUE : kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((rc = kp_object_number(KP_EXEC, hGraphExec, &in[KP_EXEC_UPDATE_EXEC])) == CUDA_SUCCESS)
        rc = kp_graph_number(hGraph, &in[KP_EXEC_UPDATE_GRAPH]);
    if (rc != CUDA_SUCCESS)
        return kp_leave(rc);
    rc = kp_ask(KP_OP_exec_update, in, KP_EXEC_UPDATE_IN, NULL, 0, &answer);
    pthread_mutex_lock(&kp_shim.tx);
    *resultInfo = (CUgraphExecUpdateResultInfo){update.result, kp_node_of(in[KP_EXEC_UPDATE_GRAPH], update.node), NULL};
    return kp_leave(rc);
}

CUresult kp_cuGraphExecUpdate(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode *hErrorNode_out, CUgraphExecUpdateResult *updateResult_out)
{
    CUgraphExecUpdateResultInfo info = {0};
    CUresult rc;

    if (hErrorNode_out == NULL || updateResult_out == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    rc = kp_cuGraphExecUpdate_v2(hGraphExec, hGraph, &info);
    *hErrorNode_out = info.errorNode;
    *updateResult_out = info.result;
    return rc;
}

/* What the worker tells the shim about a device and a function: bodies of replies, fixed layout. */
#ifndef KVMPOOL_INFO_H
#define KVMPOOL_INFO_H

#include <stdint.h>

#define KP_ATTRIBUTES 192 /* device attributes asked for: 1..191; CUDA 13.5 has 162 */
#define KP_FUNCTION_ATTRIBUTES 16
#define KP_PARAMS_MAX 1024 /* parameters of one kernel */
#define KP_PARAM_BYTES_MAX 32764 /* of one launch; CUDA's own limit since 12.1 */
#define KP_IMAGE_MAX (1ull << 28) /* bytes of one module image */
#define KP_FATBIN_MAX (1ull << 32) /* bytes of a container, before it is pruned */
#define KP_CACHE_MIN 4096u /* bytes of an image for which it is worth to ask whether the worker has it */
#define KP_NOT_CACHED 0x6b70 /* result of module_find and library_find: send it. No CUresult, and never the program's */
#define KP_LOG_MAX 8192 /* bytes of a compiler's log */
#define KP_JIT_OPTIONS_MAX 32 /* of one compilation */
#define KP_BLOCK_SIZES_MAX 1024 /* for which an occupancy callback is asked */
#define KP_PINNED_PLAIN UINT64_MAX /* page-locked memory that is not in the window's arena, instead of an offset */
#define KP_TEXT_MAX 4096 /* bytes of a name, with its end */

struct kp_device_info {
    int32_t driver_version;
    char name[124];
    int32_t value[KP_ATTRIBUTES];
    uint8_t known[KP_ATTRIBUTES]; /* 1 where the driver knows the attribute */
};

/* Reply bytes of what compiles or links: both texts follow, without their ends. */
struct kp_logs {
    uint32_t info_bytes, error_bytes;
};

/* Tail of a call that compiles or links: one for each option whose value is a number. */
struct kp_jit_option {
    int32_t option;
    uint32_t value;
};

/* The next function of the program that a stream has come to. */
struct kp_host_due {
    uint64_t token;
    int32_t status; /* a CUresult: it is called only where that is 0, a callback always */
    uint32_t zero;
};

#define KP_NODES_MAX 65536u /* of one graph */
#define KP_NEEDS_MAX 4096u /* of a node at its making */
#define KP_LIST_MAX 131072u /* u32 of one reply */

/* What op graph_list tells: u32 each, edges as pairs. */
enum kp_list { KP_LIST_NODES, KP_LIST_ROOTS, KP_LIST_EDGES, KP_LIST_NEEDS, KP_LIST_NEEDED_BY, KP_LIST_TYPE };

struct kp_capture_info {
    int32_t status;
    uint32_t zero;
    uint64_t id;
};

struct kp_update {
    int32_t result; /* a CUgraphExecUpdateResult */
    uint32_t node;  /* at fault, KP_NO_NODE: none named */
};
#define KP_NO_NODE UINT32_MAX

struct kp_stream_info {
    int32_t priority;
    uint32_t flags;
};

struct kp_param {
    uint32_t offset, size;
};

struct kp_function_info {
    int32_t value[KP_FUNCTION_ATTRIBUTES];
    uint8_t known[KP_FUNCTION_ATTRIBUTES];
    uint32_t params;
    uint32_t layout_known; /* 0: the driver is too old to tell */
    struct kp_param param[KP_PARAMS_MAX];
};

#endif

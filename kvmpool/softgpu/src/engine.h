/*
 * The engine of the software GPU: takes a module image (PTX or a fatbin that holds PTX), has it turned
 * into machine code (PTX -> C -> gcc -> dlopen, kept in a cache on disk) and runs its kernels on the CPU.
 *
 * It does not know about contexts, streams, device memory, NVML or faults of a card: that is the driver's
 * side (cuda_*.c), which calls in here. Device addresses are plain host addresses; whoever allocates device
 * memory puts guard pages around it, and a kernel that touches one ends with 700.
 *
 * Every function that returns int returns 0 or a CUDA driver error number (CUresult). All functions may be
 * called from any thread at the same time; a module must not be unloaded while one of its kernels runs.
 */
#ifndef KVMPOOL_SOFTGPU_ENGINE_H
#define KVMPOOL_SOFTGPU_ENGINE_H

#include <stddef.h>
#include <stdint.h>

#define KP_MAX_PARAMS 512            /* of one kernel */
#define KP_MAX_PARAM_BYTES 32764     /* CUDA's own limit since 12.1 */
#define KP_MAX_THREADS_PER_BLOCK 1024
#define KP_MAX_SHARED_BYTES (227 * 1024) /* static + dynamic, as compute capability 9.0 */
#define KP_MAX_IMAGE_BYTES (64u << 20)   /* PTX text after unpacking */

/* The CUresult values the engine answers with. */
enum kp_result {
	KP_OK = 0,
	KP_INVALID_VALUE = 1,
	KP_OUT_OF_MEMORY = 2,
	KP_INVALID_IMAGE = 200,        /* neither PTX nor fatbin nor ELF */
	KP_NO_BINARY_FOR_GPU = 209,    /* SASS only, or every PTX in it is for a newer card than 9.0 */
	KP_INVALID_PTX = 218,          /* does not parse, or uses an op that is not supported: the log names op and line */
	KP_JIT_COMPILER_NOT_FOUND = 221, /* no python3 or no gcc, or the translator's file is missing: the log says which */
	KP_NOT_FOUND = 500,
	KP_ILLEGAL_ADDRESS = 700,      /* sticky */
	KP_LAUNCH_OUT_OF_RESOURCES = 701,
	KP_LAUNCH_TIMEOUT = 702,
	KP_ASSERT = 710,               /* sticky */
	KP_MISALIGNED_ADDRESS = 716,   /* sticky */
	KP_LAUNCH_FAILED = 719,        /* sticky */
};

struct kp_module;   /* a loaded module, with its own instance of its __device__/__constant__ variables */
struct kp_function; /* one kernel of it; lives as long as its module */

/* ---- modules --------------------------------------------------------------------------------------- */

/*
 * Loads `image`: PTX text (with or without an ending NUL), a fatbin or its 0x466243b1 wrapper, told apart by
 * their first bytes. `len` is the number of bytes known to be readable, or 0 where the caller has only a pointer
 * (cuModuleLoadData): then the length is taken from the headers or the NUL. `log` (may be NULL) gets
 * a NUL-ended text of one or a few lines, at most log_len bytes, empty on success. First loads take ~0.3 s, cached ones ~1 ms.
 */
int kp_module_load(const void *image, size_t len, struct kp_module **out, char *log, size_t log_len);
/*
 * The same for several PTX or fatbin images linked into one module (cuLink*): functions and variables that one
 * declares .extern are taken from the one that defines them .visible.
 */
int kp_module_link(const void *const *images, const size_t *lens, size_t count, struct kp_module **out, char *log,
		   size_t log_len);
void kp_module_unload(struct kp_module *module);

/*
 * The PTX text inside an image, NUL-ended, in malloc memory that the caller frees: for cuLinkComplete, whose
 * "cubin" may simply be this text. Same errors as kp_module_load.
 */
int kp_image_to_ptx(const void *image, size_t len, char **ptx, size_t *ptx_len, char *log, size_t log_len);

/* The kernel `name` (mangled, as in the PTX). KP_NOT_FOUND. */
int kp_module_function(struct kp_module *module, const char *name, struct kp_function **out);
/* Kernels by number, in the order of the text (cuModuleGetFunctionCount, cuModuleEnumerateFunctions). */
size_t kp_module_function_count(const struct kp_module *module);
struct kp_function *kp_module_function_at(struct kp_module *module, size_t index);

/* A __device__, __constant__ or __managed__ variable. Its memory belongs to the module. KP_NOT_FOUND. */
int kp_module_global(struct kp_module *module, const char *name, void **address, size_t *size);
/* Where all the module's variables lie: one block (for cuPointerGetAttribute, bounds checks, accounting). May be 0 bytes. */
void kp_module_memory(const struct kp_module *module, void **address, size_t *size);

/* ---- functions ------------------------------------------------------------------------------------- */

struct kp_function_attributes {
	const char *name;
	uint32_t max_threads_per_block; /* 1024 unless .maxntid/.reqntid say less */
	uint32_t shared_bytes;          /* static */
	uint32_t const_bytes;           /* of the whole module */
	uint32_t local_bytes;           /* a thread */
	uint32_t num_regs;              /* an honest-looking guess: the PTX registers, at most 255 */
	uint32_t ptx_version;           /* 10 * major + minor of the .target's sm, e.g. 75 */
	uint32_t binary_version;        /* 90 */
	uint32_t param_count;
	uint32_t param_bytes;           /* of the whole parameter buffer */
	int uses_barriers;              /* run on fibers */
};

void kp_function_attributes(const struct kp_function *function, struct kp_function_attributes *out);
struct kp_module *kp_function_module(const struct kp_function *function);

/* Parameter `index` of the kernel: where it lies in the buffer. KP_INVALID_VALUE past the last one (cuFuncGetParamInfo). */
int kp_function_param(const struct kp_function *function, size_t index, size_t *offset, size_t *size);

/* ---- launches -------------------------------------------------------------------------------------- */

/*
 * What the caller and a running launch tell each other. Zero it, set what you need, keep it alive until kp_launch returns.
 */
struct kp_launch_ctl {
	/*
	 * In: 0 lets it run. Another thread stores a CUDA error number (702 watchdog, 719/999 card lost) at any moment
	 * with __atomic_store_n: the launch ends within about a millisecond and kp_launch returns that number.
	 */
	int stop;
	/* In: where device printf goes; NULL writes to stdout. Called on the launching thread. */
	void (*print)(void *arg, const char *text, size_t len);
	void *print_arg;
	/* In: run all blocks at once, so that they may wait for each other (cooperative launch). */
	int cooperative;

	/* Out: wall time spent inside the kernel, in ns; also while it runs (read with __atomic_load_n): start of the run. */
	uint64_t busy_ns;
	uint64_t started_ns; /* CLOCK_MONOTONIC when the run began; 0 before */
	/* Out, where kp_launch returned an error that is the kernel's own doing: the XID a real card would have logged
	 * (31 MMU fault, 13 engine exception, 43 stopped processing), else 0; the faulting address; one line for people. */
	int xid;
	uint64_t fault_address;
	char message[192];
};

/*
 * Runs the kernel to its end on the calling thread. `params` is the packed parameter buffer (offsets by
 * kp_function_param), `params_len` at least param_bytes. Errors: KP_INVALID_VALUE (zero or too large grid or
 * block, short buffer), 701 (too many threads or shared bytes for this kernel), and what the kernel did:
 * 700, 710, 716, 719, or the number stored in ctl->stop; 702 where all its threads wait for each other.
 */
int kp_launch(const struct kp_function *function, const uint32_t grid[3], const uint32_t block[3], uint32_t dynamic_shared_bytes,
	      const void *params, size_t params_len, struct kp_launch_ctl *ctl);

#endif

/* Libraries and their kernels, as cuda_library.c and cuda_kernel.c share them. */
#ifndef KVMPOOL_SOFTGPU_CUDA_LIBRARY_H
#define KVMPOOL_SOFTGPU_CUDA_LIBRARY_H

#include "cuda_core.h"

struct sg_kernel {
	struct sg_library *library;
	char *name;
	int max_dynamic_shared; /* set through cuKernelSetAttribute; -1: not */
	struct sg_kernel *next;
};

struct sg_library {
	char *ptx; /* or a linked image */
	size_t size;
	struct sg_module *probe; /* any instance: the one in the context that was current at load, while that lives */
	struct sg_kernel *kernels;
	struct sg_library *next;
};

/* What a kernel says of itself in whichever context: its function in the current one or in the probe's. */
CUresult sg_kernel_function(CUkernel kernel, struct sg_function **out);

#endif

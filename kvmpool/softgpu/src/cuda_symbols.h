/* The table of names that generate_stubs.py writes. Kept apart: the generated file declares every API name in its own way. */
#ifndef KVMPOOL_SOFTGPU_CUDA_SYMBOLS_H
#define KVMPOOL_SOFTGPU_CUDA_SYMBOLS_H

struct sg_symbol {
	const char *name; /* as asked of cuGetProcAddress */
	int version;      /* the CUDA version this form came with */
	int per_thread;   /* the _ptds or _ptsz form */
	void *address;
};

extern const struct sg_symbol sg_symbols[]; /* sorted by name, then version */
extern const unsigned sg_symbol_count;

#endif

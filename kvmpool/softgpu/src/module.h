/* What module.c, build.c, fatbin.c and launch.c share; the driver's side sees engine.h only. */
#ifndef KVMPOOL_SOFTGPU_MODULE_H
#define KVMPOOL_SOFTGPU_MODULE_H

#include "engine.h"
#include "rt.h"

struct kp_function {
	struct kp_module *module;
	const struct kp_kernel_info *info;
};

struct kp_module {
	void *library;
	const struct kp_unit *unit;
	struct kp_function *functions;
	uint8_t *memory; /* its variables, between two guard pages */
	size_t memory_bytes, mapped_bytes;
};

/* A place for one or a few lines of text; keeps what fits. */
struct kp_log {
	char *text;
	size_t size, used;
};
void kp_log(struct kp_log *log, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* build.c: `count` PTX texts to a shared library, from the cache or by translator and compiler. `path` >= KP_PATH. */
#define KP_PATH 4096
int kp_build(const char *const *ptx, const size_t *lens, size_t count, char path[KP_PATH], struct kp_log *log);

/* tools.c */
int kp_path_join(char out[KP_PATH], const char *folder, const char *name);
int kp_tools_folder(char out[KP_PATH], struct kp_log *log); /* with translate.py and src/rt.h */
int kp_cache_folder(char out[KP_PATH], struct kp_log *log);
const char *kp_cpu_flags(void);
void kp_build_key(const char *tools, const char *const *ptx, const size_t *lens, size_t count, char hex[65]);

/* fatbin.c: the PTX in an image, malloc'd and NUL-ended. */
int kp_find_ptx(const void *image, size_t len, char **ptx, size_t *ptx_len, struct kp_log *log);

/* lz4.c: one block. Returns the bytes written, or -1 where the input is not LZ4 or does not fit. */
long kp_lz4_block(const uint8_t *in, size_t in_len, uint8_t *out, size_t out_len);

/* sha256.c */
struct kp_sha256 {
	uint32_t state[8];
	uint64_t length;
	uint8_t block[64];
};
void kp_sha256_start(struct kp_sha256 *hash);
void kp_sha256_add(struct kp_sha256 *hash, const void *data, size_t len);
void kp_sha256_hex(struct kp_sha256 *hash, char hex[65]);

#endif

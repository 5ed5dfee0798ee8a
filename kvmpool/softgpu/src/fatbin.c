/*
 * Finds the PTX in a module image: plain text, or the best PTX entry of a fatbin (cuda_fatbin; the layout is not
 * documented by NVIDIA, and was read from what nvcc's fatbinary writes). Everything in it is checked before use; only where the
 * caller gave no length is the image's own believed.
 */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "module.h"

#define WRAPPER_MAGIC 0x466243b1u
#define FATBIN_MAGIC 0xba55ed50u
#define ELF_MAGIC 0x464c457fu
#define KIND_PTX 1
#define FLAG_LZ4 0x2000u
#define FLAG_ZSTD 0x8000u
#define MAX_ENTRIES 256
#define BEST_TARGET 90 /* what the software GPU says it is */

struct wrapper {
	uint32_t magic, version;
	const void *fatbin;
	const void *more;
};

struct fatbin {
	uint32_t magic;
	uint16_t version, header_bytes;
	uint64_t bytes; /* of all entries */
};

struct entry {
	uint16_t kind, version;
	uint32_t header_bytes;
	uint64_t bytes;      /* of the payload with its padding */
	uint32_t compressed; /* bytes, 0 where it is not */
	uint32_t options;
	uint16_t minor, major;
	uint32_t target;
	uint32_t name_offset, name_bytes;
	uint64_t flags, reserved;
	uint64_t plain_bytes; /* once decompressed */
};

static int copy_text(const void *text, size_t len, char **ptx, size_t *ptx_len)
{
	len = strnlen(text, len);
	char *out = malloc(len + 1);

	if (!out)
		return KP_OUT_OF_MEMORY;
	memcpy(out, text, len);
	out[len] = 0;
	*ptx = out;
	*ptx_len = len;
	return 0;
}

static long zstd(uint8_t *out, size_t out_len, const uint8_t *in, size_t in_len, struct kp_log *log)
{
	void *library = dlopen("libzstd.so.1", RTLD_NOW | RTLD_LOCAL);
	size_t (*decompress)(void *, size_t, const void *, size_t) = NULL;

	if (library)
		*(void **)&decompress = dlsym(library, "ZSTD_decompress");
	if (!decompress) {
		kp_log(log, "this fatbin is compressed with zstd and libzstd.so.1 is not installed. Next: apt-get install libzstd1");
		return -2;
	}
	const size_t n = decompress(out, out_len, in, in_len);

	return n > out_len ? -1 : (long)n;
}

static int unpack(const struct entry *entry, const uint8_t *payload, char **ptx, size_t *ptx_len, struct kp_log *log)
{
	if (!(entry->flags & (FLAG_LZ4 | FLAG_ZSTD)))
		return copy_text(payload, entry->bytes, ptx, ptx_len);
	if (!entry->plain_bytes || entry->plain_bytes > KP_MAX_IMAGE_BYTES || entry->compressed > entry->bytes) {
		kp_log(log, "this fatbin is damaged: a PTX entry says it has %llu bytes", (unsigned long long)entry->plain_bytes);
		return KP_INVALID_IMAGE;
	}
	uint8_t *out = malloc(entry->plain_bytes + 1);

	if (!out)
		return KP_OUT_OF_MEMORY;
	const size_t in_len = entry->compressed ? entry->compressed : entry->bytes;
	const long n = entry->flags & FLAG_ZSTD ? zstd(out, entry->plain_bytes, payload, in_len, log)
						: kp_lz4_block(payload, in_len, out, entry->plain_bytes);
	int error = 0;

	if (n < 0) {
		if (n == -1)
			kp_log(log, "this fatbin is damaged: its PTX does not unpack");
		error = n == -1 ? KP_INVALID_IMAGE : KP_NO_BINARY_FOR_GPU;
	} else {
		error = copy_text(out, (size_t)n, ptx, ptx_len);
	}
	free(out);
	return error;
}

/* The PTX entry for the newest target that is not newer than ours. */
static int best_entry(const uint8_t *at, size_t len, struct entry *best, const uint8_t **payload, uint32_t *newest)
{
	int found = 0;

	for (int i = 0; i < MAX_ENTRIES && len >= sizeof(struct entry); i++) {
		struct entry entry;

		memcpy(&entry, at, sizeof(entry));
		if (entry.header_bytes < sizeof(entry) || entry.header_bytes > len || entry.bytes > len - entry.header_bytes)
			return KP_INVALID_IMAGE;
		if (entry.kind == KIND_PTX && entry.target > *newest)
			*newest = entry.target;
		if (entry.kind == KIND_PTX && entry.target <= BEST_TARGET && (!found || entry.target > best->target)) {
			*best = entry;
			*payload = at + entry.header_bytes;
			found = 1;
		}
		at += entry.header_bytes + entry.bytes;
		len -= entry.header_bytes + entry.bytes;
	}
	return found ? 0 : KP_NO_BINARY_FOR_GPU;
}

static int from_fatbin(const uint8_t *image, size_t len, char **ptx, size_t *ptx_len, struct kp_log *log)
{
	struct fatbin header;
	struct entry best = {0};
	const uint8_t *payload = NULL;
	uint32_t newest = 0;

	if (len && len < sizeof(header))
		return KP_INVALID_IMAGE;
	memcpy(&header, image, sizeof(header));
	if (header.header_bytes < sizeof(header) || header.bytes > KP_MAX_IMAGE_BYTES * 4ull ||
	    (len && header.header_bytes + header.bytes > len)) {
		kp_log(log, "this fatbin is damaged: its header says %llu bytes", (unsigned long long)header.bytes);
		return KP_INVALID_IMAGE;
	}
	const int error = best_entry(image + header.header_bytes, header.bytes, &best, &payload, &newest);

	if (error == KP_NO_BINARY_FOR_GPU && newest)
		kp_log(log, "every PTX in this fatbin is for sm_%u or newer; the software GPU is sm_90", newest);
	else if (error == KP_NO_BINARY_FOR_GPU)
		kp_log(log, "this fatbin holds machine code only; the software GPU needs PTX. Next: build with -gencode arch=compute_75,code=compute_75");
	else if (error)
		kp_log(log, "this fatbin is damaged: an entry reaches past its end");
	return error ? error : unpack(&best, payload, ptx, ptx_len, log);
}

/* PTX begins with white space, comments or a directive. */
static int looks_like_text(const uint8_t *image, size_t len)
{
	for (size_t i = 0; i < len; i++) {
		if (image[i] >= 127 || (image[i] < 32 && image[i] != '\n' && image[i] != '\r' && image[i] != '\t'))
			return image[i] == 0 && i > 0;
		if (i == 64)
			break;
	}
	return 1;
}

/* Looks at no byte behind the first that differs: without a length, the NUL of "" may be the last readable one. */
static int begins(const uint8_t *image, uint32_t magic)
{
	for (int i = 0; i < 4; i++)
		if (image[i] != (magic >> 8 * i & 255))
			return 0;
	return 1;
}

int kp_find_ptx(const void *image, size_t len, char **ptx, size_t *ptx_len, struct kp_log *log)
{
	if (!image || (len && len < 8))
		return KP_INVALID_IMAGE;
	if (begins(image, WRAPPER_MAGIC)) {
		struct wrapper wrapper;

		if (len && len < sizeof(wrapper))
			return KP_INVALID_IMAGE;
		memcpy(&wrapper, image, sizeof(wrapper));
		return wrapper.fatbin ? from_fatbin(wrapper.fatbin, 0, ptx, ptx_len, log) : KP_INVALID_IMAGE;
	}
	if (begins(image, FATBIN_MAGIC))
		return from_fatbin(image, len, ptx, ptx_len, log);
	if (begins(image, ELF_MAGIC)) {
		kp_log(log, "this is a cubin (machine code); the software GPU needs PTX. Next: build with -ptx or code=compute_75");
		return KP_NO_BINARY_FOR_GPU;
	}
	if (!looks_like_text(image, len ? len : strnlen(image, 64))) {
		kp_log(log, "this image is neither PTX nor a fatbin");
		return KP_INVALID_IMAGE;
	}
	const size_t limit = len ? len : KP_MAX_IMAGE_BYTES;

	if (strnlen(image, limit) >= KP_MAX_IMAGE_BYTES) {
		kp_log(log, "this PTX is longer than %u MiB", KP_MAX_IMAGE_BYTES >> 20);
		return KP_INVALID_IMAGE;
	}
	return copy_text(image, limit, ptx, ptx_len);
}

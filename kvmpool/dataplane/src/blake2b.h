/* BLAKE2b with 32 bytes of result (RFC 7693): names an image by its content, at about the speed of a copy. */
#ifndef KVMPOOL_BLAKE2B_H
#define KVMPOOL_BLAKE2B_H

#include <stddef.h>
#include <stdint.h>

#define KP_HASH_BYTES 32

void kp_hash(const void *data, size_t bytes, uint8_t out[KP_HASH_BYTES]);

#endif

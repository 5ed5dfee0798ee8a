/* LZ4 blocks (the lz4 block format description): literals, then copies from what was already written. */
#include "module.h"

#include <string.h>

#define KP_LZ4_MIN_MATCH 4

/* A length of 15 in the token goes on in bytes of 255 and a last smaller one. -1: the input ends. */
static long length(const uint8_t **in, const uint8_t *end, unsigned first)
{
	long total = (long)first;

	if (first != 15)
		return total;
	for (;;) {
		if (*in >= end)
			return -1;
		const uint8_t more = *(*in)++;

		total += more;
		if (more != 255)
			return total;
	}
}

long kp_lz4_block(const uint8_t *in, size_t in_len, uint8_t *out, size_t out_len)
{
	const uint8_t *end = in + in_len;
	size_t at = 0;

	while (in < end) {
		const uint8_t token = *in++;
		const long literals = length(&in, end, token >> 4);

		if (literals < 0 || literals > end - in || (size_t)literals > out_len - at)
			return -1;
		memcpy(out + at, in, (size_t)literals);
		at += (size_t)literals;
		in += literals;
		if (in == end)
			return (long)at; /* the last sequence has no copy */
		if (end - in < 2)
			return -1;
		const size_t back = (size_t)in[0] | (size_t)in[1] << 8;

		in += 2;
		const long copy = length(&in, end, token & 15);

		if (copy < 0 || !back || back > at || (size_t)copy + KP_LZ4_MIN_MATCH > out_len - at)
			return -1;
		for (long i = 0; i < copy + KP_LZ4_MIN_MATCH; i++, at++)
			out[at] = out[at - back]; /* byte by byte: it may overlap itself */
	}
	return (long)at;
}

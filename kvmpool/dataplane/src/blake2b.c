/* BLAKE2b, written after RFC 7693. See blake2b.h. */
#include "blake2b.h"

#include <string.h>

#define BLOCK 128u

static const uint64_t start[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

static const uint8_t order[12][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
};

static uint64_t turn(uint64_t x, unsigned by)
{
    return x >> by | x << (64 - by);
}

static void mix(uint64_t v[16], unsigned a, unsigned b, unsigned c, unsigned d, uint64_t x, uint64_t y)
{
    v[a] += v[b] + x;
    v[d] = turn(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = turn(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = turn(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = turn(v[b] ^ v[c], 63);
}

static void compress(uint64_t h[8], const uint8_t *block, uint64_t done, int last)
{
    uint64_t v[16], m[16];

    memcpy(m, block, sizeof m); /* little-endian, as frame.h demands */
    memcpy(v, h, 8 * sizeof *h);
    memcpy(v + 8, start, sizeof start);
    v[12] ^= done;
    v[14] = last ? ~v[14] : v[14];
    for (unsigned round = 0; round < 12; round++) {
        const uint8_t *o = order[round];
        mix(v, 0, 4, 8, 12, m[o[0]], m[o[1]]);
        mix(v, 1, 5, 9, 13, m[o[2]], m[o[3]]);
        mix(v, 2, 6, 10, 14, m[o[4]], m[o[5]]);
        mix(v, 3, 7, 11, 15, m[o[6]], m[o[7]]);
        mix(v, 0, 5, 10, 15, m[o[8]], m[o[9]]);
        mix(v, 1, 6, 11, 12, m[o[10]], m[o[11]]);
        mix(v, 2, 7, 8, 13, m[o[12]], m[o[13]]);
        mix(v, 3, 4, 9, 14, m[o[14]], m[o[15]]);
    }
    for (unsigned i = 0; i < 8; i++)
        h[i] ^= v[i] ^ v[i + 8];
}

void kp_hash(const void *data, size_t bytes, uint8_t out[KP_HASH_BYTES])
{
    const uint8_t *at = data;
    uint8_t last[BLOCK] = {0};
    uint64_t h[8], done = 0;

    memcpy(h, start, sizeof h);
    h[0] ^= 0x01010000u ^ KP_HASH_BYTES;
    for (; bytes > BLOCK; bytes -= BLOCK, at += BLOCK) {
        done += BLOCK;
        compress(h, at, done, 0);
    }
    if (bytes > 0)
        memcpy(last, at, bytes);
    compress(h, last, done + bytes, 1);
    memcpy(out, h, KP_HASH_BYTES);
}

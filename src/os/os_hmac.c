/* SPDX-License-Identifier: MIT
 *
 * SHA-256 and HMAC-SHA256, written for size and clarity: a handshake hashes a few hundred bytes.
 * Pure functions, any thread.
 */
#include "os/os_hmac.h"

#include <string.h>

#define BLOCK_BYTES 64

struct hash {
    uint32_t state[8];
    uint64_t n_bytes;
    uint8_t block[BLOCK_BYTES]; /* the first n_bytes % 64 wait for the rest */
};

/* The first 32 bits of the fractional parts of the cube roots of the first 64 primes. */
static const uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotate(uint32_t word, int by)
{
    return word >> by | word << (32 - by);
}

static uint32_t load_be32(const uint8_t *bytes)
{
    return (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 | bytes[3];
}

static void store_be32(uint8_t *bytes, uint32_t word)
{
    for (int i = 0; i < 4; i++)
        bytes[i] = (uint8_t)(word >> (24 - 8 * i));
}

/* FIPS 180-4, 6.2.2, with its letters. */
static void compress(uint32_t state[8], const uint8_t block[BLOCK_BYTES])
{
    uint32_t w[64], a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];

    for (int t = 0; t < 16; t++)
        w[t] = load_be32(block + 4 * t);
    for (int t = 16; t < 64; t++) {
        const uint32_t s0 = rotate(w[t - 15], 7) ^ rotate(w[t - 15], 18) ^ w[t - 15] >> 3;
        const uint32_t s1 = rotate(w[t - 2], 17) ^ rotate(w[t - 2], 19) ^ w[t - 2] >> 10;
        w[t] = w[t - 16] + s0 + w[t - 7] + s1;
    }
    for (int t = 0; t < 64; t++) {
        const uint32_t s1 = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25);
        const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + round_constants[t] + w[t];
        const uint32_t s0 = rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22);
        const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
        h = g;
        g = f;
        f = e;
        e = d + t1;
        d = c;
        c = b;
        b = a;
        a = t1 + t2;
    }
    const uint32_t sums[8] = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; i++)
        state[i] += sums[i];
}

static void hash_init(struct hash *hash)
{
    static const uint32_t initial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

    memcpy(hash->state, initial, sizeof(initial));
    hash->n_bytes = 0;
}

static void hash_add(struct hash *hash, const void *data, size_t size)
{
    const uint8_t *next = data;

    while (size > 0) {
        const size_t filled = (size_t)(hash->n_bytes % BLOCK_BYTES);
        const size_t n = size < BLOCK_BYTES - filled ? size : BLOCK_BYTES - filled;

        memcpy(hash->block + filled, next, n);
        hash->n_bytes += n;
        next += n;
        size -= n;
        if (filled + n == BLOCK_BYTES)
            compress(hash->state, hash->block);
    }
}

/* Pads with a one bit, zeros, and the message's length in bits. */
static void hash_finish(struct hash *hash, uint8_t digest[HMAC_BYTES])
{
    static const uint8_t padding[BLOCK_BYTES] = {0x80};
    const uint64_t n_bits = hash->n_bytes * 8;
    const size_t filled = (size_t)(hash->n_bytes % BLOCK_BYTES);
    uint8_t length[8];

    store_be32(length, (uint32_t)(n_bits >> 32));
    store_be32(length + 4, (uint32_t)n_bits);
    hash_add(hash, padding, (filled < 56 ? 56 : 56 + BLOCK_BYTES) - filled);
    hash_add(hash, length, sizeof(length));
    for (int i = 0; i < 8; i++)
        store_be32(digest + 4 * i, hash->state[i]);
}

void sha256(const void *data, size_t size, uint8_t digest[HMAC_BYTES])
{
    struct hash hash;

    hash_init(&hash);
    hash_add(&hash, data, size);
    hash_finish(&hash, digest);
}

/* One of the two passes of HMAC: the hash of (key ^ pad) followed by the data. */
static void keyed_pass(const uint8_t key[BLOCK_BYTES], uint8_t pad, const void *data, size_t size,
                       uint8_t digest[HMAC_BYTES])
{
    uint8_t block[BLOCK_BYTES];
    struct hash hash;

    for (int i = 0; i < BLOCK_BYTES; i++)
        block[i] = key[i] ^ pad;
    hash_init(&hash);
    hash_add(&hash, block, sizeof(block));
    hash_add(&hash, data, size);
    hash_finish(&hash, digest);
}

void hmac_sha256(const void *key, size_t key_size, const void *data, size_t size,
                 uint8_t mac[HMAC_BYTES])
{
    uint8_t block_key[BLOCK_BYTES] = {0};
    uint8_t inner[HMAC_BYTES];

    if (key_size > BLOCK_BYTES)
        sha256(key, key_size, block_key);
    else if (key_size > 0)
        memcpy(block_key, key, key_size);
    keyed_pass(block_key, 0x36, data, size, inner);
    keyed_pass(block_key, 0x5c, inner, sizeof(inner), mac);
}

bool hmac_equal(const uint8_t a[HMAC_BYTES], const uint8_t b[HMAC_BYTES])
{
    volatile uint8_t difference = 0; /* volatile: no early exit for the compiler to find */

    for (int i = 0; i < HMAC_BYTES; i++)
        difference |= (uint8_t)(a[i] ^ b[i]);
    return difference == 0;
}

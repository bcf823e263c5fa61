/* SPDX-License-Identifier: MIT
 *
 * SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104): the one piece of cryptography in MCCL, used to
 * prove that both ends of a connection hold the job's secret. Pure functions, no state, any thread.
 */
#ifndef MCCL_OS_HMAC_H
#define MCCL_OS_HMAC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HMAC_BYTES 32

void sha256(const void *data, size_t size, uint8_t digest[HMAC_BYTES]);
void hmac_sha256(const void *key, size_t key_size, const void *data, size_t size,
                 uint8_t mac[HMAC_BYTES]);
/* Compares in time that does not depend on the contents. */
bool hmac_equal(const uint8_t a[HMAC_BYTES], const uint8_t b[HMAC_BYTES]);

#endif

/* SPDX-License-Identifier: MIT
 *
 * The mutual proof that both ends of a fresh connection hold the group's key (docs/protocol.md
 * section 2). Pure functions on the structs of wire.h: no sockets, no memory, any thread.
 */
#ifndef MCCL_COMM_HANDSHAKE_H
#define MCCL_COMM_HANDSHAKE_H

#include "net/wire.h"

#include <stdbool.h>

#define HANDSHAKE_KEY_BYTES 32

/* key = HMAC(job secret, "mccl key" | comm id | user's key). `user_key` may be "". */
void handshake_derive_key(const uint8_t secret[32], const uint8_t comm_id[16], const char *user_key,
                          uint8_t key[HANDSHAKE_KEY_BYTES]);

/* Acceptor: is this a hello that we can answer? Fills everything of *challenge but nonce and mac;
 * `status` is STATUS_VERSION when no version is common. False: not MCCL at all, close without a
 * word. */
bool handshake_read_hello(const struct wire_hello *hello, uint32_t own_rank,
                          struct wire_challenge *challenge);
/* Acceptor: signs the challenge, nonce included. */
void handshake_sign_challenge(const uint8_t *key, const struct wire_hello *hello,
                              struct wire_challenge *challenge);
/* Dialler: true if the acceptor holds the key. */
bool handshake_check_challenge(const uint8_t *key, const struct wire_hello *hello,
                               const struct wire_challenge *challenge);
/* Dialler's proof, and the acceptor's check of it. */
void handshake_make_proof(const uint8_t *key, const struct wire_hello *hello,
                          const struct wire_challenge *challenge, struct wire_proof *proof);
bool handshake_check_proof(const uint8_t *key, const struct wire_hello *hello,
                           const struct wire_challenge *challenge, const struct wire_proof *proof);

#endif

/* SPDX-License-Identifier: MIT
 *
 * See handshake.h. The two roles sign different labels, so that neither side's message can be
 * played back as the other's, and both sign both nonces, so that an old exchange proves nothing.
 */
#include "comm/handshake.h"

#include "os/os_hmac.h"

#include <stddef.h>
#include <string.h>

#define LABEL_BYTES 16

struct signed_text {
    char label[LABEL_BYTES];
    struct wire_hello hello;
    struct wire_challenge challenge;
};

void handshake_derive_key(const uint8_t secret[32], const uint8_t comm_id[16], const char *user_key,
                          uint8_t key[HANDSHAKE_KEY_BYTES])
{
    struct {
        char label[LABEL_BYTES];
        uint8_t comm_id[16];
        uint8_t user_key[32];
    } text = {.label = "mccl key"};
    memcpy(text.comm_id, comm_id, sizeof text.comm_id);
    sha256(user_key, strlen(user_key), text.user_key);
    hmac_sha256(secret, 32, &text, sizeof text, key);
}

bool handshake_read_hello(const struct wire_hello *hello, uint32_t own_rank,
                          struct wire_challenge *challenge)
{
    if (hello->magic != WIRE_HELLO_MAGIC || hello->purpose < PURPOSE_BOOTSTRAP ||
        hello->purpose > PURPOSE_P2P)
        return false;
    *challenge = (struct wire_challenge){
        .magic = WIRE_HELLO_MAGIC, .version = WIRE_VERSION, .status = STATUS_OK, .rank = own_rank};
    if (hello->version_min > WIRE_VERSION || hello->version_max < WIRE_VERSION)
        challenge->status = STATUS_VERSION;
    return true;
}

static void mac_of(const uint8_t *key, const char *label, const struct wire_hello *hello,
                   const struct wire_challenge *challenge, size_t challenge_bytes,
                   uint8_t mac[HMAC_BYTES])
{
    struct signed_text text = {.hello = *hello};
    memcpy(text.label, label, strlen(label));
    memcpy(&text.challenge, challenge, challenge_bytes);
    hmac_sha256(key, HANDSHAKE_KEY_BYTES, &text, sizeof text, mac);
}

void handshake_sign_challenge(const uint8_t *key, const struct wire_hello *hello,
                              struct wire_challenge *challenge)
{
    mac_of(key, "mccl acceptor", hello, challenge, offsetof(struct wire_challenge, mac),
           challenge->mac);
}

bool handshake_check_challenge(const uint8_t *key, const struct wire_hello *hello,
                               const struct wire_challenge *challenge)
{
    uint8_t mac[HMAC_BYTES];
    mac_of(key, "mccl acceptor", hello, challenge, offsetof(struct wire_challenge, mac), mac);
    return hmac_equal(mac, challenge->mac);
}

void handshake_make_proof(const uint8_t *key, const struct wire_hello *hello,
                          const struct wire_challenge *challenge, struct wire_proof *proof)
{
    mac_of(key, "mccl dialler", hello, challenge, sizeof *challenge, proof->mac);
}

bool handshake_check_proof(const uint8_t *key, const struct wire_hello *hello,
                           const struct wire_challenge *challenge, const struct wire_proof *proof)
{
    struct wire_proof expected;
    handshake_make_proof(key, hello, challenge, &expected);
    return hmac_equal(expected.mac, proof->mac);
}

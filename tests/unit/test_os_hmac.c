/* SPDX-License-Identifier: MIT
 *
 * SHA-256 against the vectors of NIST (FIPS 180 examples, and every length around the block's edges
 * against a digest of digests), HMAC-SHA256 against all vectors of RFC 4231.
 */
#include "os/os_hmac.h"
#include "os_test.h"

static void check_hex(const char *what, const uint8_t *digest, int n_bytes, const char *expected)
{
    char text[2 * HMAC_BYTES + 1] = "";

    for (int i = 0; i < n_bytes; i++)
        snprintf(text + 2 * i, 3, "%02x", digest[i]);
    if (strcmp(text, expected) != 0) {
        printf("%s: expected %s, got %s\n", what, expected, text);
        exit(1);
    }
}

static void check_sha256(const char *text, const char *expected)
{
    uint8_t digest[HMAC_BYTES];

    sha256(text, strlen(text), digest);
    check_hex(text, digest, HMAC_BYTES, expected);
}

static void test_sha256(void)
{
    uint8_t digest[HMAC_BYTES], digests[200 * HMAC_BYTES], message[200];
    char *million = malloc(1000000);

    check_sha256("", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    check_sha256("abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    check_sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
                 "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    check_sha256("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmn"
                 "hijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu",
                 "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
    CHECK(million != NULL);
    memset(million, 'a', 1000000);
    sha256(million, 1000000, digest);
    check_hex("a million times a", digest, HMAC_BYTES,
              "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    free(million);

    /* Lengths 0..199 of bytes 7 * i + 3; the digest of all digests is from another implementation.
     */
    for (size_t i = 0; i < sizeof(message); i++)
        message[i] = (uint8_t)(7 * i + 3);
    for (size_t length = 0; length < sizeof(message); length++)
        sha256(message, length, digests + length * HMAC_BYTES);
    sha256(digests, sizeof(digests), digest);
    check_hex("lengths 0..199", digest, HMAC_BYTES,
              "615d67a99b8c846e1f0582dfe127019e93c33a66e89ced6a4f81f932c82ece87");
}

struct vector {
    int key_byte;    /* repeated, or -1: key_text */
    size_t key_size; /* of the repeated byte */
    const char *key_text;
    int data_byte;
    size_t data_size;
    const char *data_text;
    int mac_bytes;
    const char *mac;
};

/* RFC 4231, 4.2 to 4.8. */
static const struct vector vectors[] = {
    {0x0b, 20, NULL, -1, 0, "Hi There", 32,
     "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
    {-1, 0, "Jefe", -1, 0, "what do ya want for nothing?", 32,
     "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
    {0xaa, 20, NULL, 0xdd, 50, NULL, 32,
     "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
    {-1, 0,
     "\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f\x10\x11\x12\x13\x14\x15\x16\x17"
     "\x18\x19",
     0xcd, 50, NULL, 32, "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"},
    {0x0c, 20, NULL, -1, 0, "Test With Truncation", 16, "a3b6167473100ee06e0c796c2955552b"},
    {0xaa, 131, NULL, -1, 0, "Test Using Larger Than Block-Size Key - Hash Key First", 32,
     "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
    {0xaa, 131, NULL, -1, 0,
     "This is a test using a larger than block-size key and a larger than block-size data. "
     "The key needs to be hashed before being used by the HMAC algorithm.",
     32, "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"},
};

/* Writes a repeated byte or a text; returns its length. */
static size_t expand(int byte, size_t size, const char *text, uint8_t out[256])
{
    if (byte >= 0)
        memset(out, byte, size);
    else
        memcpy(out, text, size = strlen(text));
    return size;
}

static void test_hmac(void)
{
    uint8_t key[256], data[256], mac[HMAC_BYTES], other[HMAC_BYTES];

    for (size_t i = 0; i < sizeof(vectors) / sizeof(vectors[0]); i++) {
        const struct vector *v = &vectors[i];
        const size_t key_size = expand(v->key_byte, v->key_size, v->key_text, key);
        const size_t data_size = expand(v->data_byte, v->data_size, v->data_text, data);
        hmac_sha256(key, key_size, data, data_size, mac);
        check_hex("RFC 4231", mac, v->mac_bytes, v->mac);
    }
    hmac_sha256(NULL, 0, NULL, 0, mac);
    check_hex("no key, no data", mac, HMAC_BYTES,
              "b613679a0814d9ec772f95d778c35fc5ff1697c493715653c6c712144292c5ad");

    for (int i = 0; i < HMAC_BYTES * 8; i++) { /* each single bit counts */
        memcpy(other, mac, sizeof(mac));
        CHECK(hmac_equal(mac, other));
        other[i / 8] ^= (uint8_t)(1 << (i % 8));
        CHECK(!hmac_equal(mac, other));
    }
}

int main(void)
{
    test_sha256();
    test_hmac();
    return 0;
}

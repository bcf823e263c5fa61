/* SPDX-License-Identifier: MIT
 *
 * Every struct that travels. Little-endian, fixed width, no padding, no pointers; docs/protocol.md
 * is the prose. Nothing here is trusted before the handshake is through, and every length is
 * checked against what the local operation expects even after it.
 */
#ifndef MCCL_NET_WIRE_H
#define MCCL_NET_WIRE_H

#include <assert.h>
#include <stdint.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the wire format is little-endian, and so are all machines that MCCL runs on"
#endif

#define WIRE_VERSION 1 /* of frames and handshake; spoken versions are negotiated as a range */
#define WIRE_HELLO_MAGIC 0x4c43434du /* "MCCL" */
#define WIRE_FRAME_MAGIC 0x434d      /* "MC" */
#define WIRE_CONTROL_MAX \
    1024                    /* most payload bytes of a control frame; longer ones close the link */
#define WIRE_CHANNELS_MAX 8 /* connections of a data link */
#define WIRE_PART_MIN 32768 /* least bytes of a part: PART_MIN */

enum wire_purpose { PURPOSE_BOOTSTRAP = 1, PURPOSE_CONTROL = 2, PURPOSE_DATA = 3, PURPOSE_P2P = 4 };

#define HELLO_SHM 1u

/* Dialler's first message, in clear. comm_id selects the key on the other side. */
struct wire_hello {
    uint32_t magic;
    uint16_t version_min, version_max;
    uint8_t purpose; /* enum wire_purpose */
    uint8_t channel; /* PURPOSE_DATA: which of the parallel connections; else 0 */
    uint16_t flags;  /* HELLO_SHM: an offer of shared memory follows the handshake */
    uint32_t rank, target_rank, n_ranks;
    uint64_t generation;
    uint8_t comm_id[16];
    uint8_t nonce[32];
};
static_assert(sizeof(struct wire_hello) == 80, "layout");

enum wire_status {
    STATUS_OK = 0,
    STATUS_UNKNOWN =
        1, /* no such communicator or rank here (yet): try again, or the next address */
    STATUS_VERSION =
        2, /* no common protocol version; `version` and `rank` carry the acceptor's range */
    STATUS_BUSY = 3, /* link already there */
    STATUS_AUTH = 4  /* proof is wrong */
};

/* Acceptor's answer. mac = HMAC(key, "mccl acceptor" | hello | this message up to mac). */
struct wire_challenge {
    uint32_t magic;
    uint16_t version; /* the one to speak */
    uint8_t
        status; /* enum wire_status; if not OK the rest is meaningless and the connection ends */
    uint8_t reserved;
    uint32_t rank;
    uint32_t reserved2;
    uint8_t nonce[32];
    uint8_t mac[32];
};
static_assert(sizeof(struct wire_challenge) == 80, "layout");

/* Dialler's proof: HMAC(key, "mccl dialler" | hello | challenge). */
struct wire_proof {
    uint8_t mac[32];
};

/* Acceptor's last word; the connection then belongs to its purpose. */
struct wire_accept {
    uint32_t magic;
    uint32_t status;
};
static_assert(sizeof(struct wire_accept) == 8, "layout");

enum wire_type {
    FRAME_DATA = 1,        /* collective payload */
    FRAME_HEARTBEAT = 2,   /* control links from here */
    FRAME_ABORT = 3,       /* kind: mccl_result; aux: rank at fault + 1, or 0; count: 1 if the
                            * sender had become ready; payload: cause as text */
    FRAME_GOODBYE = 4,     /* clean exit follows */
    FRAME_PROBE = 5,       /* "I am waiting in this operation": seq and signature */
    FRAME_READY = 7,       /* "I am connected with every rank" */
    FRAME_DIAL = 6,        /* "please dial a point-to-point link to me" */
    FRAME_P2P_EAGER = 8,   /* point-to-point links from here: seq: message number, aux: tag */
    FRAME_P2P_READY = 9,   /* a large message is ready to be fetched; count: elements, length: 0 */
    FRAME_P2P_FETCH = 10,  /* seq: message number to start sending */
    FRAME_P2P_DATA = 11,   /* count: byte offset of this piece */
    FRAME_P2P_CREDIT = 12, /* count: eager bytes the receiver has matched since the last one */
    FRAME_CHECK_IN = 16,   /* bootstrap links from here: payload struct wire_member */
    FRAME_STATUS = 17,     /* payload: text, who is missing and who is there */
    FRAME_TABLE = 18,      /* payload: n_ranks x struct wire_member */
    FRAME_REFUSE = 19      /* kind: mccl_result; payload: text */
};

/* One header before every payload, zero-byte payloads included. */
struct wire_frame {
    uint16_t magic;
    uint8_t version;
    uint8_t type;      /* enum wire_type */
    uint8_t kind;      /* enum op_kind */
    uint8_t dtype;     /* mccl_dtype */
    uint8_t reduce_op; /* mccl_op or SIGNATURE_NO_OP */
    uint8_t reserved;
    uint32_t seq;    /* of the operation; collectives and point-to-point count apart */
    uint32_t aux;    /* collectives: root; point-to-point: tag */
    uint64_t count;  /* elements of the operation (signature), or offset where the type says so */
    uint64_t length; /* payload bytes that follow */
};
static_assert(sizeof(struct wire_frame) == 32, "layout");

/* A data link of several channels cuts a message of `length` bytes into one part for each, in
 * order. Returns the bytes of every part but the last, which has the rest; `length` if the message
 * is too short to be cut, and channel 0 carries all of it. */
static inline uint64_t wire_part(uint64_t length, unsigned n_channels)
{
    if (n_channels == 1 || length < (uint64_t)n_channels * WIRE_PART_MIN)
        return length;
    return length / n_channels / 64 * 64; /* parts begin where cache lines do, if the buffer does */
}

#define WIRE_MEMBER_ADDRESSES 16
#define WIRE_AGREED 5

struct wire_address {
    uint8_t family, kind; /* see struct os_address */
    uint16_t port;
    uint32_t speed_mbps;
    uint8_t ip[16];
};
static_assert(sizeof(struct wire_address) == 24, "layout");

/* What a rank tells about itself when it checks in. */
struct wire_member {
    uint32_t rank, n_ranks;
    uint8_t host_id[16];
    uint32_t pid;
    uint32_t n_addresses;
    char host_name[32];
    uint32_t heartbeat_ms; /* how often it sends heartbeats; 0: never */
    uint32_t shares;       /* 1: it asks for shared memory with the ranks of its host */
    /* Settings that must agree, in the order of `agreed_settings` in bootstrap.c. */
    int64_t agreed[WIRE_AGREED];
    struct wire_address addresses[WIRE_MEMBER_ADDRESSES];
};
static_assert(sizeof(struct wire_member) == 496, "layout");

#endif

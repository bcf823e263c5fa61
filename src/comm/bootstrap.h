/* SPDX-License-Identifier: MIT
 *
 * Unique ids and the meeting they stand for. The process that made an id keeps a session for it:
 * every rank checks in there with its addresses, and once all have, each gets the table of all.
 * Under the endpoint's lock, but for bootstrap_make_id.
 */
#ifndef MCCL_COMM_BOOTSTRAP_H
#define MCCL_COMM_BOOTSTRAP_H

#include "base/config.h"
#include "comm/conn.h"

#define UNIQUE_ID_VERSION 1

/* What the 512 opaque bytes hold. */
struct unique_id {
    uint32_t magic; /* WIRE_HELLO_MAGIC */
    uint16_t version, n_addresses;
    uint8_t host_id[16];
    uint8_t comm_id[16]; /* the job id: names the group that all ranks form */
    uint64_t generation; /* grows with every id that a process makes */
    uint8_t secret[32];
    struct wire_address addresses[WIRE_MEMBER_ADDRESSES];
    uint8_t reserved[512 - 80 - 24 * WIRE_MEMBER_ADDRESSES];
};
static_assert(sizeof(struct unique_id) == 512, "layout");

/* Fills a new id and opens its session. Takes the endpoint's lock; the session is one of the
 * endpoint's users. */
mccl_result bootstrap_make_id(struct endpoint *endpoint, const char *auth_key,
                              struct unique_id *id);
/* MCCL_ERR_INVALID_ARGUMENT if these are not the bytes of an id that this version understands. */
mccl_result bootstrap_check_id(const struct unique_id *id);

/* ---- server ---- */
struct session *bootstrap_find(struct endpoint *endpoint, const uint8_t comm_id[16]);
const uint8_t *bootstrap_key(const struct session *session);
void bootstrap_on_client(struct session *session, struct conn *conn);
void bootstrap_on_client_frame(struct session *session, struct conn *conn,
                               const struct wire_frame *frame, const void *payload);
void bootstrap_on_client_end(struct session *session, struct conn *conn);
struct session *bootstrap_next(const struct session *session);
/* Status lines, end of life. Returns when it wants to be called again. */
int64_t bootstrap_on_time(struct session *session, int64_t now_ns);
/* A communicator of this process has this id: its key, with the user's MCCL_AUTH_KEY in it, is the
 * session's. */
void bootstrap_adopt_key(struct endpoint *endpoint, const struct mccl_comm *comm);
/* The communicator with this id leaves this process before it was ready: its session ends with the
 * same cause. */
void bootstrap_forget(struct endpoint *endpoint, const struct mccl_comm *comm);
/* Frees what bootstrap_on_time and others have finished; all of them at the endpoint's end. */
void bootstrap_sweep(struct endpoint *endpoint, bool all);

/* ---- client ---- */
/* The connection to the maker is through: check in. */
void bootstrap_check_in(struct mccl_comm *comm, struct conn *conn);
void bootstrap_on_server_frame(struct mccl_comm *comm, struct conn *conn,
                               const struct wire_frame *frame, const void *payload);
void bootstrap_on_server_end(struct mccl_comm *comm, struct conn *conn, const char *why);
/* Fills the settings that all ranks must share. */
void bootstrap_agree_on(const struct settings *settings, struct wire_member *member);
/* This rank's own entry. */
void bootstrap_member(const struct mccl_comm *comm, struct wire_member *member);
/* First setting in which two members differ but must not: its text for the error, or NULL. */
bool bootstrap_disagree(const struct wire_member *a, const struct wire_member *b, char *text,
                        size_t size);

#endif

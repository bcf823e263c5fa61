/* SPDX-License-Identifier: MIT
 *
 * What ranks say beside the data: heartbeats, aborts, goodbyes, probes, requests to dial. Under the
 * endpoint's lock; the functions that the data plane calls take it themselves.
 */
#include "base/log.h"
#include "comm/comm.h"
#include "comm/conn.h"
#include "comm/dial.h"

#include <stdio.h>
#include <string.h>

static void send_to_all(struct mccl_comm *comm, const struct wire_frame *frame, const void *payload)
{
    for (int peer = 0; peer < comm->n_ranks; peer++)
        if (comm->peers[peer].control)
            conn_send_frame(comm->peers[peer].control, frame, payload);
}

void control_send_heartbeats(struct mccl_comm *comm)
{
    const struct wire_frame frame = {.type = FRAME_HEARTBEAT};
    for (int peer = 0; peer < comm->n_ranks; peer++)
        if (comm->peers[peer].control && conn_send_frame(comm->peers[peer].control, &frame, NULL))
            comm->heartbeats_sent++;
}

void control_send_ready(struct mccl_comm *comm)
{
    const struct wire_frame frame = {.type = FRAME_READY};
    send_to_all(comm, &frame, NULL);
}

void control_send_goodbyes(struct mccl_comm *comm)
{
    const struct wire_frame frame = {.type = FRAME_GOODBYE};
    send_to_all(comm, &frame, NULL);
}

void control_send_aborts(struct mccl_comm *comm)
{
    const struct cause *cause = &comm->cause;
    const struct wire_frame frame = {.type = FRAME_ABORT,
                                     .kind = (uint8_t)cause->result,
                                     .aux = (uint32_t)(cause->rank + 1),
                                     .count = atomic_load(&comm->was_ready),
                                     .length = strlen(cause->text)};
    send_to_all(comm, &frame, cause->text);
}

static struct wire_frame probe_frame(uint32_t seq, const struct signature *signature)
{
    return (struct wire_frame){.type = FRAME_PROBE,
                               .kind = signature->kind,
                               .dtype = signature->dtype,
                               .reduce_op = signature->reduce_op,
                               .seq = seq,
                               .aux = signature->root,
                               .count = signature->count};
}

void control_probe(struct mccl_comm *comm, int peer, uint32_t seq,
                   const struct signature *signature)
{
    const struct wire_frame frame = probe_frame(seq, signature);
    endpoint_lock(comm->endpoint);
    if (comm->peers[peer].control)
        conn_send_frame(comm->peers[peer].control, &frame, NULL);
    endpoint_unlock(comm->endpoint);
}

static void mismatch_locked(struct mccl_comm *comm, int peer, uint32_t seq,
                            const struct signature *own, const struct signature *theirs)
{
    char here[160], there[160];
    signature_format(own, here, sizeof here);
    signature_format(theirs, there, sizeof there);
    comm_fail_locked(comm, true, MCCL_ERR_MISMATCH, peer,
                     "ranks disagree in operation seq %u: rank %d calls %s, rank %d calls %s; "
                     "every rank must make the "
                     "same calls in the same order",
                     seq, comm->rank, here, peer, there);
}

/* A peer waits in an operation: do we do the same one? */
static void on_probe(struct mccl_comm *comm, int peer, const struct wire_frame *frame)
{
    const struct signature theirs = {frame->kind, frame->dtype, frame->reduce_op,
                                     (uint16_t)frame->aux, frame->count};
    struct signature own;
    struct peer *from = &comm->peers[peer];
    if (!from->probed)
        atomic_fetch_add(&comm->engine.n_probes_pending, 1);
    from->probed = from->has_probed = true;
    from->probe_seq = frame->seq;
    from->probe_signature = theirs;
    /* Looked up after it was noted: a submission in between has seen the note. */
    bool submitted;
    const bool known = engine_signature(comm, frame->seq, &own, &submitted);
    if (!submitted)
        return;
    from->probed = false;
    atomic_fetch_sub(&comm->engine.n_probes_pending, 1);
    if (known && !signature_equal(&own, &theirs))
        mismatch_locked(comm, peer, frame->seq, &own, &theirs);
}

bool control_has_probed(struct mccl_comm *comm, int peer, uint32_t seq)
{
    endpoint_lock(comm->endpoint);
    const struct peer *from = &comm->peers[peer];
    const bool has = from->has_probed && (int32_t)(from->probe_seq - seq) >= 0;
    endpoint_unlock(comm->endpoint);
    return has;
}

void control_check_probes(struct mccl_comm *comm, uint32_t seq, const struct signature *signature)
{
    endpoint_lock(comm->endpoint);
    for (int peer = 0; peer < comm->n_ranks; peer++) {
        struct peer *from = &comm->peers[peer];
        if (!from->probed || (int32_t)(from->probe_seq - seq) > 0)
            continue;
        from->probed = false;
        atomic_fetch_sub(&comm->engine.n_probes_pending, 1);
        if (from->probe_seq != seq)
            continue;
        if (!signature_equal(signature, &from->probe_signature)) {
            mismatch_locked(comm, peer, seq, signature, &from->probe_signature);
        } else if (from->control) { /* who has waited for us is not to name us when its time is up
                                     */
            const struct wire_frame frame = probe_frame(seq, signature);
            conn_send_frame(from->control, &frame, NULL);
        }
    }
    endpoint_unlock(comm->endpoint);
}

static void on_abort(struct mccl_comm *comm, int peer, const struct wire_frame *frame,
                     const void *payload)
{
    char text[WIRE_CONTROL_MAX + 1];
    const size_t length =
        frame->length < WIRE_CONTROL_MAX ? (size_t)frame->length : WIRE_CONTROL_MAX;
    memcpy(text, payload, length);
    text[length] = '\0';
    const int culprit = (int)frame->aux - 1;
    const mccl_result result = frame->kind > MCCL_IN_PROGRESS && frame->kind <= MCCL_ERR_INTERNAL
                                   ? (mccl_result)frame->kind
                                   : MCCL_ERR_ABORTED;
    /* Passed on before this rank may close its links: else its end, not the culprit's, would be
     * what others see. */
    const int rank = culprit >= 0 && culprit < comm->n_ranks ? culprit : peer;
    /* It may overtake other ranks' READY. An operation failed then, not the making of the group. */
    if (frame->count)
        comm_on_all_ready(comm);
    if (strstr(text, "(reported by rank"))
        comm_fail_locked(comm, true, result, rank, "%.440s", text);
    else
        comm_fail_locked(comm, true, result, rank, "%.440s (reported by rank %d)", text, peer);
}

static mccl_result dial_p2p(struct mccl_comm *comm, int peer)
{
    struct peer *to = &comm->peers[peer];
    return dial_start(comm, peer, PURPOSE_P2P, 0, to->member.addresses, (int)to->member.n_addresses,
                      to->same_host, os_now_ns() + comm->settings.connect_timeout_ms * OS_MS);
}

static void want_p2p_locked(struct mccl_comm *comm, int peer)
{
    struct peer *to = &comm->peers[peer];
    if (to->p2p_wanted || comm->closing)
        return;
    to->p2p_wanted = true;
    if (peer < comm->rank) { /* the higher rank dials, so that there is one link, not two */
        if (dial_p2p(comm, peer) != MCCL_OK)
            comm_fail_locked(comm, true, MCCL_ERR_CONNECT, peer, "rank %d cannot dial rank %d: %s",
                             comm->rank, peer, error_text());
    } else if (to->control) {
        const struct wire_frame frame = {.type = FRAME_DIAL};
        conn_send_frame(to->control, &frame, NULL);
    }
}

void control_want_p2p(struct mccl_comm *comm, int peer)
{
    endpoint_lock(comm->endpoint);
    want_p2p_locked(comm, peer);
    endpoint_unlock(comm->endpoint);
}

void control_on_frame(struct mccl_comm *comm, int peer, const struct wire_frame *frame,
                      const void *payload)
{
    comm->peers[peer].heard_ns = os_now_ns();
    switch (frame->type) {
    case FRAME_HEARTBEAT:
        comm->heartbeats_received++;
        break;
    case FRAME_ABORT:
        on_abort(comm, peer, frame, payload);
        break;
    case FRAME_GOODBYE:
        comm->peers[peer].goodbye = true;
        break;
    case FRAME_PROBE:
        on_probe(comm, peer, frame);
        break;
    case FRAME_READY:
        comm_on_peer_ready(comm, peer);
        break;
    case FRAME_DIAL:
        if (peer < comm->rank)
            want_p2p_locked(comm, peer);
        break;
    default:
        comm_fail_locked(comm, true, MCCL_ERR_PEER_LOST, peer,
                         "rank %d sent a control frame of unknown type %u", peer, frame->type);
        break;
    }
}

void control_on_end(struct mccl_comm *comm, int peer, const char *why)
{
    struct peer *from = &comm->peers[peer];
    from->control = NULL;
    if (comm->closing)
        return;
    if (from->goodbye) {
        atomic_store(&from->left, true);
        atomic_fetch_add(&comm->n_left, 1);
        engine_wake(comm);
        return;
    }
    comm_fail_locked(comm, true, MCCL_ERR_PEER_LOST, peer,
                     "rank %d (%s:%u) is lost: %s without a goodbye, so it was killed or crashed; "
                     "see its log, then restart the group",
                     peer, from->member.host_name, from->member.pid, why);
}

void control_link_lost(struct mccl_comm *comm, int peer, const char *why)
{
    endpoint_lock(comm->endpoint);
    struct peer *from = &comm->peers[peer];
    if (from->control)
        conn_on_event(from->control, OS_POLL_READ);
    if (!atomic_load(&comm->failed) && !comm->closing) {
        if (from->goodbye)
            comm_fail_locked(
                comm, true, MCCL_ERR_PEER_LOST, peer,
                "rank %d has left the group (it destroyed its communicator) before this operation",
                peer);
        else
            comm_fail_locked(comm, true, MCCL_ERR_PEER_LOST, peer,
                             "rank %d (%s:%u) is lost: %s; see its log, then restart the group",
                             peer, from->member.host_name, from->member.pid, why);
    }
    endpoint_unlock(comm->endpoint);
}

/* SPDX-License-Identifier: MIT
 *
 * Where settings come from and what is refused: precedence of the sources; bad values, an error at
 * init that names variable, value and range; values that must agree between ranks but do not; a
 * user's key that differs.
 */
/* limit: 60 s */
#include "support/check.h"
#include "support/harness.h"

static void set_variable(const char *name, const char *value)
{
    CHECK(setenv(name, value, 1) == 0);
}

static void check_setting(const mccl_comm *comm, const char *name, const char *value,
                          const char *source)
{
    char got[256], from[32];
    CHECK_OK(mccl_setting_get(comm, name, got, sizeof got, from, sizeof from));
    CHECK_EQ_STR(got, value);
    CHECK_EQ_STR(from, source);
}

/* A group of one with these settings fails with MCCL_ERR_CONFIG, and the text has all words. */
static void check_refused(const char *settings, const char *word, const char *another)
{
    mccl_unique_id id;
    mccl_comm *comm = NULL;
    mccl_config config = MCCL_CONFIG_INIT;
    config.settings = settings;
    CHECK_OK(mccl_get_unique_id(&id));
    CHECK_RESULT(mccl_comm_init_rank(&comm, 1, &id, 0, &config), MCCL_ERR_CONFIG);
    CHECK(comm == NULL);
    CHECK_HAS(mccl_last_error(), word);
    CHECK_HAS(mccl_last_error(), another);
}

static void precedence(struct rank *self)
{
    set_variable("MCCL_CHUNK_BYTES", "1M");
    set_variable("MCCL_SMALL_MSG_THRESHOLD", "2M");
    CHECK_OK(mccl_set_defaults("chunk_bytes=3M; tcp_lowat=0"));
    mccl_comm *comm = rank_connect_with(self, "tcp_lowat=65536", 0);
    check_setting(comm, "tcp_lowat", "65536", "config");
    check_setting(comm, "chunk_bytes", "3145728", "init");
    check_setting(comm, "MCCL_SMALL_MSG_THRESHOLD", "2097152", "environment");
    check_setting(comm, "heartbeat_interval_ms", "5000", "default");
    check_setting(NULL, "tcp_lowat", "0", "init"); /* of the next communicator */
    CHECK_RESULT(mccl_set_defaults("chunk_bytes=1"), MCCL_ERR_CONFIG);
    check_setting(NULL, "chunk_bytes", "3145728", "init"); /* as it was */
    CHECK_OK(mccl_set_defaults(NULL));
    check_setting(NULL, "chunk_bytes", "1048576", "environment");
    CHECK_OK(mccl_comm_destroy(comm));
}

static void bad_values(struct rank *self)
{
    (void)self;
    check_refused("chunk_bytes=12", "12", "4096 .. 1073741824");
    check_refused("chunk_bytes=many", "chunk_bytes", "many");
    check_refused("transport=rdma", "rdma", "tcp");
    check_refused("transport=pigeon", "pigeon", "auto | tcp");
    check_refused("small_msg_threshold=-1", "small_msg_threshold", "-1");
    check_refused("connect_timeout_ms=0", "connect_timeout_ms", "1 .. 86400000");
    check_refused("heartbeat_interval_ms=5", "heartbeat_interval_ms", "10 .. 3600000");
    check_refused("max_queue_depth=0", "max_queue_depth", "1 .. 1048576");
    check_refused("allreduce_algo=fastest", "fastest", "two_shot");
    check_refused("ring_algo=square", "square", "basic");
    check_refused("log_level=LOUD", "LOUD", "DEBUG");
    check_refused("port_base=70000", "70000", "65535");
    check_refused("link_profile=infiniband", "infiniband", "thunderbolt");
    check_refused("compression=fp16", "compression", "none");
    check_refused("chunk_bites=1M", "chunk_bites", "chunk_bytes");
    mccl_comm *comm = NULL;
    mccl_unique_id id;
    CHECK_OK(mccl_get_unique_id(&id));
    set_variable("MCCL_TCP_LOWAT", "lots");
    CHECK_RESULT(mccl_comm_init_rank(&comm, 1, &id, 0, NULL), MCCL_ERR_CONFIG);
    CHECK_HAS(mccl_last_error(), "MCCL_TCP_LOWAT");
    CHECK_HAS(mccl_last_error(), "lots");
    CHECK_HAS(mccl_last_error(), "0 .. 1073741824");
}

/* Settings on which the choice of algorithm depends must be equal on all ranks. */
static void settings_disagree(struct rank *self)
{
    static const struct {
        const char *usual, *other, *word_usual, *word_other;
    } cases[] = {
        {"chunk_bytes=1M", "chunk_bytes=2M", "1048576", "2097152"},
        {"small_msg_threshold=1000", "small_msg_threshold=1001", "1000", "1001"},
        {"channels=1", "channels=2", "MCCL_CHANNELS=1", "2 on rank"},
        {"allreduce_algo=ring", "allreduce_algo=two_shot", "ring", "two_shot"},
        {"ring_algo=basic", "ring_algo=fast", "basic", "fast"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const bool odd = self->rank == self->n - 1;
        mccl_unique_id id;
        mccl_comm *comm = NULL;
        mccl_config config = MCCL_CONFIG_INIT;
        char word[32];
        config.timeout_ms = 5000;
        config.settings = odd ? cases[i].other : cases[i].usual;
        rank_next_id(self, &id);
        const int64_t start_ms = now_ms();
        const mccl_result result = mccl_comm_init_rank(&comm, self->n, &id, self->rank, &config);
        CHECK(result == MCCL_ERR_MISMATCH || result == MCCL_ERR_CONFIG);
        CHECK_LE_I64(now_ms() - start_ms, 3000);
        CHECK_HAS(mccl_last_error(), cases[i].word_usual);
        CHECK_HAS(mccl_last_error(), cases[i].word_other);
        snprintf(word, sizeof word, "rank %d", self->n - 1);
        CHECK_HAS(mccl_last_error(), word);
    }
}

/* With the user's key as well as the id, a group forms; with the id alone it does not. */
static void auth_key(struct rank *self)
{
    mccl_comm *comm = rank_connect_with(self, "auth_key=open sesame", 5000);
    CHECK_OK(mccl_barrier(comm, NULL, NULL));
    CHECK_OK(mccl_comm_destroy(comm));
    mccl_unique_id id;
    mccl_config config = MCCL_CONFIG_INIT;
    config.timeout_ms = 1500;
    config.settings = self->rank == 0 ? "auth_key=open sesame" : "auth_key=open barley";
    comm = NULL;
    rank_next_id(self, &id);
    CHECK(mccl_comm_init_rank(&comm, self->n, &id, self->rank, &config) != MCCL_OK);
    CHECK(strstr(mccl_last_error(), "sesame") == NULL);
    CHECK(strstr(mccl_last_error(), "barley") == NULL);
}

int main(void)
{
    team_run(1, 20, precedence, NULL);
    team_run(1, 20, bad_values, NULL);
    team_run(2, 30, settings_disagree, NULL);
    team_run(3, 30, settings_disagree, NULL);
    team_run(2, 20, auth_key, NULL);
    return 0;
}

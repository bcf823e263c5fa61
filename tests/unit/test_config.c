/* SPDX-License-Identifier: MIT
 *
 * The settings table: every row through every source, precedence, and the texts people get for what
 * is wrong.
 */
#include "base/config.h"
#include "base/error.h"
#include "base/log.h"
#include "support/check.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#define N_OF(array) (sizeof(array) / sizeof((array)[0]))

static struct settings settings;

static void load_ok(const char *overrides)
{
    const mccl_result result = config_load(overrides, &settings);
    if (result != MCCL_OK)
        CHECK_FAIL("config_load(%s): %s", overrides ? overrides : "NULL", error_text());
}

static void load_fails(const char *overrides, const char *text)
{
    if (config_load(overrides, &settings) != MCCL_ERR_CONFIG)
        CHECK_FAIL("config_load(\"%s\") is not MCCL_ERR_CONFIG; expected: %s",
                   overrides ? overrides : "", text);
    CHECK_EQ_STR(error_text(), text);
}

static const char *value_of(const char *name)
{
    static char text[300];
    size_t index;
    CHECK_EQ_I64(config_find(name, &index), MCCL_OK);
    config_format(&settings, index, text, sizeof(text));
    return text;
}

static const char *source_of(const char *name)
{
    size_t index;
    CHECK_EQ_I64(config_find(name, &index), MCCL_OK);
    return config_source_name(settings.source[index]);
}

static void set(const char *variable, const char *value)
{
    CHECK(setenv(variable, value, 1) == 0);
}

/* Takes away whatever the environment of this test says. */
static void clear_environment(void)
{
    for (size_t i = 0; config_row(i); i++)
        unsetenv(config_row(i)->variable);
    CHECK_EQ_I64(config_set_defaults(NULL), MCCL_OK);
}

/* ---- the rows ---- */

#ifdef __APPLE__
#define SOCK_BUFSIZE "8388608"
#else
#define SOCK_BUFSIZE "0"
#endif

struct example {
    const char *name, *variable, *type, *by_default;
    const char *text, *shown; /* a value as people write it, and as it is printed */
};

static const struct example examples[] = {
    {"transport", "MCCL_TRANSPORT", "enum", "auto", "TCP", "tcp"},
    {"listen_addr", "MCCL_LISTEN_ADDR", "string", "auto", "127.0.0.1, [fd00::2]",
     "127.0.0.1,[fd00::2]"},
    {"port_base", "MCCL_PORT_BASE", "ports", "29600", "41000-41010", "41000-41010"},
    {"ifname", "MCCL_IFNAME", "string", "", "en5", "en5"},
    {"chunk_bytes", "MCCL_CHUNK_BYTES", "bytes", "4194304", "16 MB", "16777216"},
    {"small_msg_threshold", "MCCL_SMALL_MSG_THRESHOLD", "bytes", "262144", "64KiB", "65536"},
    {"channels", "MCCL_CHANNELS", "int", "1", "8", "8"},
    {"connect_timeout_ms", "MCCL_CONNECT_TIMEOUT_MS", "ms", "30000", "1", "1"},
    {"sock_bufsize", "MCCL_SOCK_BUFSIZE", "bytes", SOCK_BUFSIZE, "1g", "1073741824"},
    {"tcp_lowat", "MCCL_TCP_LOWAT", "bytes", "131072", "0", "0"},
    {"link_profile", "MCCL_LINK_PROFILE", "enum", "unset", "none", "unset"},
    {"transport_crc", "MCCL_TRANSPORT_CRC", "bool", "off", "no", "off"},
    {"allreduce_algo", "MCCL_ALLREDUCE_ALGO", "enum", "auto", "ring_chunked", "ring_chunked"},
    {"ring_algo", "MCCL_RING_ALGO", "enum", "auto", "ring_chunked", "chunked"},
    {"ddp_bucket_mb", "DDP_BUCKET_MB", "int", "25", "200", "200"},
    {"sync_mode", "MCCL_SYNC_MODE", "enum", "full", "FULL", "full"},
    {"event_sync", "MCCL_EVENT_SYNC", "bool", "on", "0", "off"},
    {"overlap_comm", "MCCL_OVERLAP_COMM", "bool", "on", "False", "off"},
    {"fast_math", "MCCL_FAST_MATH", "bool", "on", "off", "off"},
    {"gpu_threshold", "MCCL_GPU_THRESHOLD", "int", "4096", "0", "0"},
    {"fp32_cpu_reduce", "MCCL_FP32_CPU_REDUCE", "bool", "off", "1", "on"},
    {"shader_path", "MCCL_SHADER_PATH", "string", "auto", "/a b/c", "/a b/c"},
    {"compression", "MCCL_COMPRESSION", "enum", "none", "None", "none"},
    {"topk_ratio", "MCCL_TOPK_RATIO", "float", "0.01", "2.5e-03", "0.0025"},
    {"log_level", "MCCL_LOG_LEVEL", "enum", "WARN", "4", "INFO"},
    {"watchdog_timeout_ms", "MCCL_WATCHDOG_TIMEOUT_MS", "ms", "300000", "86400000", "86400000"},
    {"heartbeat_interval_ms", "MCCL_HEARTBEAT_INTERVAL_MS", "ms", "5000", "0", "0"},
    {"max_queue_depth", "MCCL_MAX_QUEUE_DEPTH", "int", "1024", "4", "4"},
    {"auth_key", "MCCL_AUTH_KEY", "string", "", "hunter2", "set"},
    {"auth_key_file", "MCCL_AUTH_KEY_FILE", "string", "", "", ""},
};

static void test_rows(void)
{
    load_ok(NULL);
    for (size_t i = 0; i < N_OF(examples); i++) {
        const struct example *const example = &examples[i];
        const mccl_setting_info *const info = config_row(i);
        CHECK(info != NULL);
        CHECK_EQ_STR(info->name, example->name);
        CHECK_EQ_STR(info->variable, example->variable);
        CHECK_EQ_STR(info->type, example->type);
        CHECK_EQ_STR(info->default_value, example->by_default);
        CHECK(info->range[0] && info->help[0] && info->available);
        CHECK_EQ_STR(value_of(example->name), example->by_default);
        CHECK_EQ_STR(source_of(example->variable), "default");
        CHECK(!config_is_explicit(&settings, example->name));
    }
    CHECK(config_row(N_OF(examples)) == NULL);
}

/* Each row by environment, by mccl_set_defaults and by override, one at a time. */
static void test_every_source(void)
{
    for (size_t i = 0; i < N_OF(examples); i++) {
        const struct example *const example = &examples[i];
        char item[200];
        snprintf(item, sizeof(item), "%s=%s", example->name, example->text);
        for (int source = SOURCE_ENVIRONMENT; source <= SOURCE_CONFIG; source++) {
            clear_environment();
            if (source == SOURCE_ENVIRONMENT)
                set(example->variable, example->text);
            if (source == SOURCE_INIT)
                CHECK_EQ_I64(config_set_defaults(item), MCCL_OK);
            load_ok(source == SOURCE_CONFIG ? item : NULL);
            CHECK_EQ_STR(value_of(example->name), example->shown);
            if (source == SOURCE_ENVIRONMENT && !example->text[0])
                continue; /* an empty variable counts as not set */
            CHECK_EQ_STR(source_of(example->name), config_source_name((enum setting_source)source));
            CHECK(config_is_explicit(&settings, example->name));
        }
    }
    clear_environment();
}

/* What is printed is what the members hold. */
static void test_members(void)
{
    load_ok("port_base=65000; chunk_bytes=8192; ring_algo=fast; topk_ratio=.5; fast_math=no; "
            "auth_key=k; log_level=off");
    CHECK_EQ_I64(settings.port_first, 65000);
    CHECK_EQ_I64(settings.port_last, 65535);
    CHECK_EQ_I64(settings.chunk_bytes, 8192);
    CHECK_EQ_I64(settings.ring_algo, RING_FAST);
    CHECK_EQ_F64(settings.topk_ratio, 0.5);
    CHECK(!settings.fast_math);
    CHECK_EQ_STR(settings.auth_key, "k");
    CHECK_EQ_I64(settings.log_level, LOG_OFF);
    load_ok("port_base=29600");
    CHECK_EQ_I64(settings.port_last, 30623);
    load_ok("port_base=0");
    CHECK_EQ_I64(settings.port_first, 0);
    CHECK_EQ_I64(settings.port_last, 0);
    load_ok("port_base=7-7; topk_ratio=0.1");
    CHECK_EQ_STR(value_of("port_base"), "7-7");
    CHECK(settings.topk_ratio == 0.1);
    load_ok("listen_addr=localhost");
    CHECK_EQ_STR(settings.listen_addr, "loopback");
}

/* ---- what is wrong ---- */

static const struct {
    const char *variable, *value, *text;
} bad_values[] = {
    {"MCCL_CHUNK_BYTES", "12",
     "MCCL_CHUNK_BYTES=12 (environment): must be 4096 .. 1073741824 bytes"},
    {"MCCL_CHUNK_BYTES", "2G",
     "MCCL_CHUNK_BYTES=2G (environment): must be 4096 .. 1073741824 bytes"},
    {"MCCL_CHUNK_BYTES", "4x",
     "MCCL_CHUNK_BYTES=4x (environment): must be 4096 .. 1073741824 bytes"},
    {"MCCL_CHUNK_BYTES", "-4096",
     "MCCL_CHUNK_BYTES=-4096 (environment): must be 4096 .. 1073741824 bytes"},
    {"MCCL_CHUNK_BYTES", "18446744073709555712",
     "MCCL_CHUNK_BYTES=18446744073709555712 (environment): must be 4096 .. 1073741824 bytes"},
    {"MCCL_CHUNK_BYTES", "18014398509481992K",
     "MCCL_CHUNK_BYTES=18014398509481992K (environment): must be 4096 .. 1073741824 bytes"},
    {"MCCL_CONNECT_TIMEOUT_MS", "0",
     "MCCL_CONNECT_TIMEOUT_MS=0 (environment): must be 1 .. 86400000 ms"},
    {"MCCL_HEARTBEAT_INTERVAL_MS", "9",
     "MCCL_HEARTBEAT_INTERVAL_MS=9 (environment): must be 0 or 10 .. 3600000 ms"},
    {"MCCL_MAX_QUEUE_DEPTH", "4K", "MCCL_MAX_QUEUE_DEPTH=4K (environment): must be 1 .. 1048576"},
    {"MCCL_TRANSPORT", "udp", "MCCL_TRANSPORT=udp (environment): must be auto | tcp | shm | rdma"},
    {"MCCL_LOG_LEVEL", "7",
     "MCCL_LOG_LEVEL=7 (environment): must be OFF | FATAL | ERROR | WARN | INFO | DEBUG | "
     "TRACE, or 0 .. 6"},
    {"MCCL_FAST_MATH", "2", "MCCL_FAST_MATH=2 (environment): must be on | off"},
    {"MCCL_TOPK_RATIO", "0", "MCCL_TOPK_RATIO=0 (environment): must be above 0, at most 1"},
    {"MCCL_TOPK_RATIO", "1.5", "MCCL_TOPK_RATIO=1.5 (environment): must be above 0, at most 1"},
    {"MCCL_TOPK_RATIO", "nan", "MCCL_TOPK_RATIO=nan (environment): must be above 0, at most 1"},
    {"MCCL_PORT_BASE", "65536",
     "MCCL_PORT_BASE=65536 (environment): must be 0 .. 65535, or FIRST-LAST"},
    {"MCCL_PORT_BASE", "0-9",
     "MCCL_PORT_BASE=0-9 (environment): must be 0 .. 65535, or FIRST-LAST"},
    {"MCCL_PORT_BASE", "9-8",
     "MCCL_PORT_BASE=9-8 (environment): must be 0 .. 65535, or FIRST-LAST"},
    {"MCCL_LISTEN_ADDR", "0.0.0.0",
     "MCCL_LISTEN_ADDR=0.0.0.0 (environment): must be auto | loopback | address literals with "
     "commas between"},
    {"MCCL_LISTEN_ADDR", "127.0.0.1,::",
     "MCCL_LISTEN_ADDR=127.0.0.1,:: (environment): must be auto | loopback | address literals "
     "with commas between"},
    {"MCCL_LISTEN_ADDR", "example.org",
     "MCCL_LISTEN_ADDR=example.org (environment): must be auto | loopback | address literals "
     "with commas between"},
    /* asked for, but not there yet */
    {"MCCL_TRANSPORT", "rdma",
     "MCCL_TRANSPORT=rdma (environment): there are no RDMA links in this version; use auto, "
     "tcp or shm"},
    {"MCCL_TRANSPORT_CRC", "on",
     "MCCL_TRANSPORT_CRC=on (environment): there are no checksums in this version; use off"},
    {"MCCL_COMPRESSION", "fp16",
     "MCCL_COMPRESSION=fp16 (environment): there is no compression in this version; use none"},
    {"MCCL_COMPRESSION", "topk",
     "MCCL_COMPRESSION=topk (environment): there is no compression in this version; use none"},
    {"MCCL_SYNC_MODE", "coalesced",
     "MCCL_SYNC_MODE=coalesced (environment): there is no coalesced synchronisation in this "
     "version; use full"},
};

static void test_bad_values(void)
{
    for (size_t i = 0; i < N_OF(bad_values); i++) {
        set(bad_values[i].variable, bad_values[i].value);
        load_fails(NULL, bad_values[i].text);
        unsetenv(bad_values[i].variable);
    }
    load_fails("chunk_bytes=12", "chunk_bytes=12 (config): must be 4096 .. 1073741824 bytes");
    CHECK_EQ_I64(config_set_defaults("chunk_bytes = 12"), MCCL_ERR_CONFIG);
    CHECK_EQ_STR(error_text(), "chunk_bytes=12 (init): must be 4096 .. 1073741824 bytes");
}

static void test_too_long(void)
{
    char text[1200] = "ifname=";
    memset(text + 7, 'x', 256);
    CHECK_EQ_I64(config_load(text, &settings), MCCL_ERR_CONFIG);
    CHECK_HAS(error_text(), "(config): must be at most 255 characters");
    text[7 + 255] = '\0';
    load_ok(text);
    CHECK_EQ_U64(strlen(settings.ifname), 255);
    memset(text + 7, 'x', 1000);
    text[7 + 1000] = '\0';
    load_fails(text, "ifname (config): the value is too long; must be at most 255 characters");
    set("MCCL_IFNAME", text);
    load_fails(NULL,
               "MCCL_IFNAME (environment): the value is too long; must be at most 255 characters");
    clear_environment();
}

static void test_strings(void)
{
    load_ok(" ; MCCL_Chunk_Bytes = 8 KiB "
            ";\n\tRING_ALGO=basic\r\n;max_queue_depth=1;max_queue_depth=2; ifname=; ");
    CHECK_EQ_STR(value_of("chunk_bytes"), "8192");
    CHECK_EQ_STR(value_of("ring_algo"), "basic");
    CHECK_EQ_STR(value_of("max_queue_depth"), "2");
    CHECK_EQ_STR(source_of("ifname"), "config");
    load_ok("");
    load_ok("mccl_ddp_bucket_mb=7");
    CHECK_EQ_I64(settings.ddp_bucket_mb, 7);

    load_fails("chunk_bites=1", "unknown setting chunk_bites (config); did you mean chunk_bytes?");
    load_fails("mccl_ringalgo=1",
               "unknown setting mccl_ringalgo (config); did you mean ring_algo?");
    load_fails("colour=1", "unknown setting colour (config); `mccl env` lists them all");
    load_fails("=1", "unknown setting  (config); `mccl env` lists them all");
    load_fails("chunk_bytes",
               "settings (config): an item has no '='; write \"name=value; name=value\"");
    size_t index = 99;
    CHECK_EQ_I64(config_find("chunk_byte", &index), MCCL_ERR_CONFIG);
    CHECK_EQ_STR(error_text(), "unknown setting chunk_byte; did you mean chunk_bytes?");
    CHECK_EQ_U64(index, 99);
}

/* A failed load leaves the caller's settings alone. */
static void test_untouched(void)
{
    struct settings before;
    load_ok("chunk_bytes=8192");
    before = settings;
    CHECK_EQ_I64(config_load("chunk_bytes=16384; ring_algo=none", &settings), MCCL_ERR_CONFIG);
    CHECK_EQ_I64(settings.chunk_bytes, before.chunk_bytes);
    CHECK_EQ_MEM(settings.source, before.source, sizeof(before.source));
}

/* ---- who wins ---- */

static void test_precedence(void)
{
    load_ok("link_profile=thunderbolt");
    CHECK_EQ_STR(value_of("chunk_bytes"), "16777216");
    CHECK_EQ_STR(source_of("chunk_bytes"), "profile");
    CHECK_EQ_STR(value_of("sock_bufsize"), "33554432");
    CHECK_EQ_STR(source_of("sock_bufsize"), "profile");
    CHECK_EQ_STR(source_of("tcp_lowat"), "default");
    CHECK(!config_is_explicit(&settings, "chunk_bytes"));
    CHECK(config_is_explicit(&settings, "link_profile"));

    set("MCCL_CHUNK_BYTES", "8192");
    load_ok("link_profile=thunderbolt");
    CHECK_EQ_STR(value_of("chunk_bytes"), "8192");
    CHECK_EQ_STR(source_of("chunk_bytes"), "environment");

    CHECK_EQ_I64(config_set_defaults("chunk_bytes=16384;link_profile=thunderbolt"), MCCL_OK);
    load_ok(NULL);
    CHECK_EQ_STR(value_of("chunk_bytes"), "16384");
    CHECK_EQ_STR(source_of("chunk_bytes"), "init");
    CHECK_EQ_STR(source_of("sock_bufsize"), "profile");

    load_ok("chunk_bytes=32768; link_profile=unset");
    CHECK_EQ_STR(value_of("chunk_bytes"), "32768");
    CHECK_EQ_STR(source_of("chunk_bytes"), "config");
    CHECK_EQ_STR(source_of("sock_bufsize"), "default");

    CHECK_EQ_I64(config_set_defaults("chunk_bytes=1"),
                 MCCL_ERR_CONFIG); /* refused: the old text stays */
    load_ok(NULL);
    CHECK_EQ_STR(value_of("chunk_bytes"), "16384");
    CHECK_EQ_I64(config_set_defaults(""), MCCL_OK);
    load_ok(NULL);
    CHECK_EQ_STR(value_of("chunk_bytes"), "8192");
    set("MCCL_CHUNK_BYTES", "");
    load_ok(NULL);
    CHECK_EQ_STR(value_of("chunk_bytes"), "4194304");
    CHECK_EQ_STR(source_of("chunk_bytes"), "default");
    clear_environment();
}

/* ---- secrets ---- */

static void write_file(const char *path, const void *content, size_t size)
{
    FILE *const file = fopen(path, "wb");
    CHECK(file != NULL);
    CHECK_EQ_U64(fwrite(content, 1, size, file), size);
    CHECK(fclose(file) == 0);
}

static void expect_no_secret(void)
{
    if (strstr(error_text(), "hunter"))
        CHECK_FAIL("the secret is in an error text: %s", error_text());
}

static void test_key(void)
{
    char path[] = "/tmp/mccl-test-key-XXXXXX";
    char overrides[200], both[220], long_key[129];
    const int fd = mkstemp(path);
    CHECK(fd >= 0);
    close(fd);
    snprintf(overrides, sizeof(overrides), "auth_key_file=%s", path);

    write_file(path, "hunter3\r\n", 9);
    load_ok(overrides);
    CHECK_EQ_STR(settings.auth_key, "hunter3");
    CHECK_EQ_STR(value_of("auth_key"), "set");
    CHECK_EQ_STR(source_of("auth_key"), "config");
    set("MCCL_AUTH_KEY", "hunter4"); /* weaker than the file of the override */
    load_ok(overrides);
    CHECK_EQ_STR(settings.auth_key, "hunter3");
    snprintf(both, sizeof(both), "%s;auth_key=hunter5", overrides);
    CHECK_EQ_I64(config_load(both, &settings), MCCL_ERR_CONFIG);
    CHECK_EQ_STR(error_text(), "auth_key and auth_key_file (config) are both set; keep one");
    unsetenv("MCCL_AUTH_KEY");
    set("MCCL_AUTH_KEY_FILE", path); /* weaker than the key of the override */
    load_ok("auth_key=hunter6");
    CHECK_EQ_STR(settings.auth_key, "hunter6");
    unsetenv("MCCL_AUTH_KEY_FILE");

    memset(long_key, 'h', sizeof(long_key));
    write_file(path, long_key, 127);
    load_ok(overrides);
    CHECK_EQ_U64(strlen(settings.auth_key), 127);
    static const struct {
        const char *content;
        size_t size;
    } bad[] = {{"", 0}, {"\n", 1}, {"hunter\0two", 10}};
    for (size_t i = 0; i < N_OF(bad); i++) {
        write_file(path, bad[i].content, bad[i].size);
        CHECK_EQ_I64(config_load(overrides, &settings), MCCL_ERR_CONFIG);
        CHECK_HAS(error_text(), "(config): must hold 1 .. 127 characters and no zero byte");
        CHECK_HAS(error_text(), path);
        expect_no_secret();
    }
    write_file(path, long_key, 128);
    CHECK_EQ_I64(config_load(overrides, &settings), MCCL_ERR_CONFIG);
    CHECK_HAS(error_text(), "must hold 1 .. 127 characters");
    CHECK(unlink(path) == 0);
    set("MCCL_AUTH_KEY_FILE", path);
    CHECK_EQ_I64(config_load(NULL, &settings), MCCL_ERR_CONFIG);
    CHECK_HAS(error_text(), "MCCL_AUTH_KEY_FILE=/tmp/mccl-test-key-");
    CHECK_HAS(error_text(), "(environment): cannot be read: No such file or directory");
    clear_environment();
}

static void test_secret_in_errors(void)
{
    char text[400] = "auth_key=hunter2";
    memset(text + strlen(text), 'x', 200);
    load_fails(text, "auth_key (config): must be at most 127 characters");
    CHECK_EQ_I64(config_load("auth_key=a;hunter2", &settings), MCCL_ERR_CONFIG);
    expect_no_secret();
}

/* ---- warnings ---- */

/* Runs config_load with stderr caught. */
static void load_caught(char *text, size_t size)
{
    int ends[2];
    CHECK(pipe(ends) == 0);
    const int saved = dup(STDERR_FILENO);
    CHECK(saved >= 0 && dup2(ends[1], STDERR_FILENO) >= 0);
    const mccl_result result = config_load(NULL, &settings);
    CHECK(dup2(saved, STDERR_FILENO) >= 0);
    close(saved);
    close(ends[1]);
    CHECK_EQ_I64(result, MCCL_OK);
    const ssize_t n = read(ends[0], text, size - 1);
    CHECK(n >= 0);
    text[n] = '\0';
    close(ends[0]);
}

/* Comes first: the warning is given once per process. */
static void test_unknown_variables(void)
{
    char text[4096];
    set("MCCL_CHUNK_BITES", "hunter2");
    set("MCCL_DDP_BUCKET_MB", "1");
    set("MCCL_NOTHING_LIKE_IT", "1");
    set("mccl_chunk_bites", "1");
    set("MCCL_LOG_LEVEL", "ERROR");
    load_caught(text, sizeof(text));
    CHECK_EQ_STR(text, "");
    unsetenv("MCCL_LOG_LEVEL");
    load_caught(text, sizeof(text));
    CHECK_HAS(text, "mccl WARN [");
    CHECK_HAS(text, "unknown variable MCCL_CHUNK_BITES; did you mean MCCL_CHUNK_BYTES?\n");
    CHECK_HAS(text, "unknown variable MCCL_DDP_BUCKET_MB; did you mean DDP_BUCKET_MB?\n");
    CHECK_HAS(text, "unknown variable MCCL_NOTHING_LIKE_IT; `mccl env` lists them all\n");
    CHECK(!strstr(text, "hunter2") && !strstr(text, "mccl_chunk"));
    load_caught(text, sizeof(text));
    CHECK_EQ_STR(text, "");
    unsetenv("MCCL_CHUNK_BITES");
    unsetenv("MCCL_DDP_BUCKET_MB");
    unsetenv("MCCL_NOTHING_LIKE_IT");
    unsetenv("mccl_chunk_bites");
}

/* ---- launchers ---- */

static void test_launcher(void)
{
    static const char *const variables[] = {
        "LOCAL_WORLD_SIZE", "WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE",
        "MPI_LOCALNRANKS",  "PMI_SIZE",   "SLURM_STEP_NUM_NODES",       "MASTER_ADDR"};
    static const struct {
        const char *values[N_OF(variables)];
        bool single;
    } cases[] = {
        {{NULL}, false},
        {{"2", "2"}, true},
        {{"2", "4"}, false},
        {{NULL, "2"}, false},
        {{NULL, NULL, "3", "3"}, true},
        {{NULL, NULL, "3", "6"}, false},
        {{NULL, NULL, NULL, NULL, "2", "2"}, true},
        {{NULL, NULL, NULL, NULL, NULL, NULL, "1"}, true},
        {{NULL, NULL, NULL, NULL, NULL, NULL, "2"}, false},
        {{NULL, NULL, NULL, NULL, NULL, NULL, NULL, "127.0.0.1"}, true},
        {{NULL, NULL, NULL, NULL, NULL, NULL, NULL, "::1"}, true},
        {{NULL, NULL, NULL, NULL, NULL, NULL, NULL, "localhost"}, true},
        {{NULL, NULL, NULL, NULL, NULL, NULL, NULL, "169.254.1.2"}, false},
        {{"1", "2", NULL, NULL, NULL, NULL, "1", "127.0.0.1"}, false}, /* torchrun decides */
    };
    for (size_t i = 0; i < N_OF(cases); i++) {
        for (size_t v = 0; v < N_OF(variables); v++) {
            unsetenv(variables[v]);
            if (cases[i].values[v])
                set(variables[v], cases[i].values[v]);
        }
        if (config_launcher_is_single_host() != cases[i].single)
            CHECK_FAIL("launcher case %zu: expected %d", i, cases[i].single);
    }
    unsetenv("MASTER_ADDR");
}

/* ---- threads ---- */

static void *change_defaults(void *arg)
{
    for (int i = 0; i < 500; i++)
        CHECK_EQ_I64(config_set_defaults(arg), MCCL_OK);
    return NULL;
}

static void *read_defaults(void *arg)
{
    (void)arg;
    for (int i = 0; i < 500; i++) {
        struct settings mine;
        CHECK_EQ_I64(config_load(NULL, &mine), MCCL_OK);
        CHECK(mine.chunk_bytes == 8192 || mine.chunk_bytes == 16384 || mine.chunk_bytes == 4194304);
        CHECK_EQ_I64(mine.max_queue_depth, mine.chunk_bytes == 8192    ? 8
                                           : mine.chunk_bytes == 16384 ? 16
                                                                       : 1024);
    }
    return NULL;
}

static void test_threads(void)
{
    static char small[] = "chunk_bytes=8192; max_queue_depth=8";
    static char large[] = "chunk_bytes=16384; max_queue_depth=16";
    pthread_t threads[4];
    CHECK(pthread_create(&threads[0], NULL, change_defaults, small) == 0);
    CHECK(pthread_create(&threads[1], NULL, change_defaults, large) == 0);
    CHECK(pthread_create(&threads[2], NULL, read_defaults, NULL) == 0);
    CHECK(pthread_create(&threads[3], NULL, read_defaults, NULL) == 0);
    for (size_t i = 0; i < N_OF(threads); i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK_EQ_I64(config_set_defaults(NULL), MCCL_OK);
}

int main(void)
{
    clear_environment();
    test_unknown_variables();
    test_rows();
    test_every_source();
    test_members();
    test_bad_values();
    test_too_long();
    test_strings();
    test_untouched();
    test_precedence();
    test_key();
    test_secret_in_errors();
    test_launcher();
    test_threads();
    return 0;
}

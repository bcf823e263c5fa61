/* SPDX-License-Identifier: MIT
 *
 * The one table of settings. A row added here is read from the environment, from settings strings,
 * shown by `mccl env` and documented in docs/settings.md without more code. Constant data.
 */
#include "base/config_table.h"

#include "base/log.h"

/* SO_SNDBUF and SO_RCVBUF. Linux grows both by itself as far as a link needs; an explicit value
 * switches that off and is clamped to net.core.[rw]mem_max, so 0 leaves the kernel alone. macOS
 * stops growing at 4 MiB, which a fast cable can fill, and grants 8 MiB when asked. */
#ifdef __APPLE__
#define SOCK_BUFSIZE_DEFAULT "8388608"
#else
#define SOCK_BUFSIZE_DEFAULT "0"
#endif

#define METAL "Takes effect with Metal streams."
/* Of the rows that make the process's endpoint (endpoint.c compares them). */
#define SHARED "All groups of a process share one: a later group that asks for another is refused."

static const struct word transports[] = {{"auto", TRANSPORT_AUTO, false},
                                         {"tcp", TRANSPORT_TCP, false},
                                         {"shm", TRANSPORT_SHM, false},
                                         {"rdma", TRANSPORT_RDMA, true},
                                         {0}};

static const struct word profiles[] = {{"unset", PROFILE_NONE, false},
                                       {"none", PROFILE_NONE, false},
                                       {"thunderbolt", PROFILE_THUNDERBOLT, false},
                                       {0}};

static const struct word allreduce_algos[] = {
    {"auto", ALLREDUCE_AUTO, false},
    {"unset", ALLREDUCE_AUTO, false},
    {"direct", ALLREDUCE_DIRECT, false},
    {"two_shot", ALLREDUCE_TWO_SHOT, false},
    {"ring", ALLREDUCE_RING, false},
    {"ring_chunked", ALLREDUCE_RING_CHUNKED, false},
    {"recursive_doubling", ALLREDUCE_RECURSIVE_DOUBLING, false},
    {"rabenseifner", ALLREDUCE_RABENSEIFNER, false},
    {"two_level", ALLREDUCE_TWO_LEVEL, false},
    {0}};

static const struct word ring_algos[] = {{"auto", RING_AUTO, false},
                                         {"unset", RING_AUTO, false},
                                         {"basic", RING_BASIC, false},
                                         {"chunked", RING_CHUNKED, false},
                                         {"ring_chunked", RING_CHUNKED, false},
                                         {"fast", RING_FAST, false},
                                         {0}};

static const struct word log_levels[] = {
    {"OFF", LOG_OFF, false},     {"FATAL", LOG_FATAL, false}, {"ERROR", LOG_ERROR, false},
    {"WARN", LOG_WARN, false},   {"INFO", LOG_INFO, false},   {"DEBUG", LOG_DEBUG, false},
    {"TRACE", LOG_TRACE, false}, {"0", LOG_OFF, false},       {"1", LOG_FATAL, false},
    {"2", LOG_ERROR, false},     {"3", LOG_WARN, false},      {"4", LOG_INFO, false},
    {"5", LOG_DEBUG, false},     {"6", LOG_TRACE, false},     {0}};

static const struct word compressions[] = {
    {"none", 0, false}, {"fp16", 1, true}, {"topk", 2, true}, {0}};

static const struct word sync_modes[] = {{"full", 0, false}, {"coalesced", 1, true}, {0}};

#define TYPE_VALUE_BYTES "bytes"
#define TYPE_VALUE_INT "int"
#define TYPE_VALUE_MS "ms"
#define TYPE_VALUE_RATIO "float"
#define TYPE_VALUE_BOOL "bool"
#define TYPE_VALUE_ENUM "enum"
#define TYPE_VALUE_WORD "enum"
#define TYPE_VALUE_TEXT "string"
#define TYPE_VALUE_ADDRESSES "string"
#define TYPE_VALUE_PORTS "ports"

/* Initialisers of a row. NUMBER keeps limits and the text that shows them from drifting apart. */
#define MEMBER(kind, member)                                                             \
    .type = kind, .info.type = TYPE_##kind, .offset = offsetof(struct settings, member), \
    .size = sizeof(((struct settings *)0)->member)
#define NUMBER(low, high) .min = low, .max = high, .info.range = #low " .. " #high
#define OFF_OR_NUMBER(low, high) \
    .zero_is_off = true, .min = low, .max = high, .info.range = "0 or " #low " .. " #high
#define WORDS(list, text) .words = list, .info.range = text
#define ON_OFF .info.range = "on | off"
#define LIVE .info.available = ""

const struct setting_row config_rows[] = {
    {.info.name = "transport",
     .info.variable = "MCCL_TRANSPORT",
     MEMBER(VALUE_ENUM, transport),
     .info.default_value = "auto",
     WORDS(transports, "auto | tcp | shm | rdma"),
     .info.help =
         "Kind of link between ranks. auto, shm: shared memory between ranks of one host (Linux), "
         "tcp to all others and to a rank that cannot share. tcp: tcp between all.",
     .info.available = "there are no RDMA links in this version; use auto, tcp or shm"},
    {.info.name = "listen_addr",
     .info.variable = "MCCL_LISTEN_ADDR",
     MEMBER(VALUE_ADDRESSES, listen_addr),
     .info.default_value = "auto",
     .info.range = "auto | loopback | address literals with commas between",
     LIVE,
     .info.help =
         "Addresses to listen on, one socket each. auto: loopback if the launcher says "
         "that all ranks are on this host, else the addresses of the usable interfaces. " SHARED},
    {.info.name = "port_base",
     .info.variable = "MCCL_PORT_BASE",
     MEMBER(VALUE_PORTS, port_first),
     .info.default_value = "29600",
     .info.range = "0 .. 65535, or FIRST-LAST",
     LIVE,
     .info.help = "First port to try; the next free one of up to 1024 is taken. FIRST-LAST keeps "
                  "to that range, 0 takes any free port. " SHARED},
    {.info.name = "ifname",
     .info.variable = "MCCL_IFNAME",
     MEMBER(VALUE_TEXT, ifname),
     .info.default_value = "",
     .info.range = "at most 255 characters",
     LIVE,
     .info.help = "Interface to use, such as en5. Empty: the one that routes to the peer. " SHARED},
    {.info.name = "chunk_bytes",
     .info.variable = "MCCL_CHUNK_BYTES",
     MEMBER(VALUE_BYTES, chunk_bytes),
     .info.default_value = "4194304",
     NUMBER(4096, 1073741824),
     LIVE,
     .thunderbolt = "16777216",
     .info.help =
         "Most bytes in one message; larger ones are cut. 16 MiB under the thunderbolt profile."},
    {.info.name = "small_msg_threshold",
     .info.variable = "MCCL_SMALL_MSG_THRESHOLD",
     MEMBER(VALUE_BYTES, small_msg_threshold),
     .info.default_value = "262144",
     NUMBER(0, 1073741824),
     LIVE,
     .info.help = "Up to this size algorithms with few steps are taken, above it those that move "
                  "few bytes."},
    {.info.name = "channels",
     .info.variable = "MCCL_CHANNELS",
     MEMBER(VALUE_INT, channels),
     .info.default_value = "1",
     NUMBER(1, 8),
     LIVE,
     .info.help = "TCP connections between two ranks for collectives, one for each cable, say: "
                  "messages of at least 32 KiB times their number are cut over all of them. They "
                  "take turns among interfaces of one kind and speed, or all of MCCL_IFNAME, that "
                  "have a subnet each in common with the other rank."},
    {.info.name = "connect_timeout_ms",
     .info.variable = "MCCL_CONNECT_TIMEOUT_MS",
     MEMBER(VALUE_MS, connect_timeout_ms),
     .info.default_value = "30000",
     NUMBER(1, 86400000),
     LIVE,
     .info.help = "Time to connect all ranks with each other, counted from when the last one has "
                  "checked in."},
    {.info.name = "sock_bufsize",
     .info.variable = "MCCL_SOCK_BUFSIZE",
     MEMBER(VALUE_BYTES, sock_bufsize),
     .info.default_value = SOCK_BUFSIZE_DEFAULT,
     NUMBER(0, 1073741824),
     LIVE,
     .thunderbolt = "33554432",
     .info.help = "Socket buffers asked for; systems may grant less. 0: the kernel's own tuning, "
                  "the default on Linux (8 MiB on macOS, whose tuning stops at 4 MiB). 32 MiB "
                  "under the thunderbolt profile."},
    {.info.name = "tcp_lowat",
     .info.variable = "MCCL_TCP_LOWAT",
     MEMBER(VALUE_BYTES, tcp_lowat),
     .info.default_value = "131072",
     NUMBER(0, 1073741824),
     LIVE,
     .info.help = "TCP_NOTSENT_LOWAT: a socket takes more data when less than this is unsent. 0: "
                  "the kernel's own."},
    {.info.name = "link_profile",
     .info.variable = "MCCL_LINK_PROFILE",
     MEMBER(VALUE_ENUM, link_profile),
     .info.default_value = "unset",
     WORDS(profiles, "unset | thunderbolt"),
     LIVE,
     .info.help =
         "Set of defaults for a kind of cable; it changes only what is not set otherwise."},
    {.info.name = "transport_crc",
     .info.variable = "MCCL_TRANSPORT_CRC",
     MEMBER(VALUE_BOOL, transport_crc),
     .info.default_value = "off",
     ON_OFF,
     .info.help = "Checksum over everything that is sent.",
     .info.available = "there are no checksums in this version; use off"},

    {.info.name = "allreduce_algo",
     .info.variable = "MCCL_ALLREDUCE_ALGO",
     MEMBER(VALUE_ENUM, allreduce_algo),
     .info.default_value = "auto",
     WORDS(allreduce_algos, "auto | direct | two_shot | ring | ring_chunked | recursive_doubling | "
                            "rabenseifner | two_level"),
     LIVE,
     .info.help =
         "All-reduce algorithm. ring_chunked: ring for large messages, direct for small ones."},
    {.info.name = "ring_algo",
     .info.variable = "MCCL_RING_ALGO",
     MEMBER(VALUE_ENUM, ring_algo),
     .info.default_value = "auto",
     WORDS(ring_algos, "auto | basic | chunked | ring_chunked | fast"),
     LIVE,
     .info.help = "How a ring cuts its data. basic: one piece a segment; chunked (or "
                  "ring_chunked): pieces that overlap; fast: two rings in opposite directions."},
    {.info.name = "ddp_bucket_mb",
     .info.variable = "DDP_BUCKET_MB",
     MEMBER(VALUE_INT, ddp_bucket_mb),
     .info.default_value = "25",
     NUMBER(1, 65536),
     LIVE,
     .info.help = "Bucket size for DistributedDataParallel in MiB, read by training scripts: "
                  "larger buckets mean fewer all-reduces in a step."},

    {.info.name = "sync_mode",
     .info.variable = "MCCL_SYNC_MODE",
     MEMBER(VALUE_WORD, sync_mode),
     .info.default_value = "full",
     WORDS(sync_modes, "full | coalesced"),
     .info.help = "When device work is waited for: full before every operation. " METAL,
     .info.available = "there is no coalesced synchronisation in this version; use full"},
    {.info.name = "event_sync",
     .info.variable = "MCCL_EVENT_SYNC",
     MEMBER(VALUE_BOOL, event_sync),
     .info.default_value = "on",
     ON_OFF,
     LIVE,
     .info.help = "Order device work by shared events; off waits for the stream instead. " METAL},
    {.info.name = "overlap_comm",
     .info.variable = "MCCL_OVERLAP_COMM",
     MEMBER(VALUE_BOOL, overlap_comm),
     .info.default_value = "on",
     ON_OFF,
     LIVE,
     .info.help = "Communicate while the device computes; needs event_sync. " METAL},
    {.info.name = "fast_math",
     .info.variable = "MCCL_FAST_MATH",
     MEMBER(VALUE_BOOL, fast_math),
     .info.default_value = "on",
     ON_OFF,
     LIVE,
     .info.help = "Fast arithmetic in device kernels that scale or compress; reductions are always "
                  "exact to the rule. " METAL},
    {.info.name = "gpu_threshold",
     .info.variable = "MCCL_GPU_THRESHOLD",
     MEMBER(VALUE_INT, gpu_threshold),
     .info.default_value = "4096",
     NUMBER(0, 1073741824),
     LIVE,
     .info.help = "Elements from which on the device may reduce, if it is faster too. " METAL},
    {.info.name = "fp32_cpu_reduce",
     .info.variable = "MCCL_FP32_CPU_REDUCE",
     MEMBER(VALUE_BOOL, fp32_cpu_reduce),
     .info.default_value = "off",
     ON_OFF,
     LIVE,
     .info.help =
         "Reduce float32 on the CPU even where the device could. Host memory always is. " METAL},
    {.info.name = "shader_path",
     .info.variable = "MCCL_SHADER_PATH",
     MEMBER(VALUE_TEXT, shader_path),
     .info.default_value = "auto",
     .info.range = "at most 255 characters",
     LIVE,
     .info.help = "Source of the device kernels; auto takes the built-in one. " METAL},

    {.info.name = "compression",
     .info.variable = "MCCL_COMPRESSION",
     MEMBER(VALUE_WORD, compression),
     .info.default_value = "none",
     WORDS(compressions, "none | fp16 | topk"),
     .info.help = "Send fewer bytes at the price of precision.",
     .info.available = "there is no compression in this version; use none"},
    {.info.name = "topk_ratio",
     .info.variable = "MCCL_TOPK_RATIO",
     MEMBER(VALUE_RATIO, topk_ratio),
     .info.default_value = "0.01",
     .info.range = "above 0, at most 1",
     LIVE,
     .info.help = "Share of elements kept by compression=topk; unused without it."},

    {.info.name = "log_level",
     .info.variable = "MCCL_LOG_LEVEL",
     MEMBER(VALUE_ENUM, log_level),
     .info.default_value = "WARN",
     WORDS(log_levels, "OFF | FATAL | ERROR | WARN | INFO | DEBUG | TRACE, or 0 .. 6"),
     LIVE,
     .info.help = "Least severe kind of line that is written to stderr."},
    {.info.name = "watchdog_timeout_ms",
     .info.variable = "MCCL_WATCHDOG_TIMEOUT_MS",
     MEMBER(VALUE_MS, watchdog_timeout_ms),
     .info.default_value = "300000",
     NUMBER(1, 86400000),
     LIVE,
     .info.help = "An operation that takes longer is reported with the ranks that are missing; if "
                  "the value was set by the user and the operation has no time-out of its own, it "
                  "is aborted as well."},
    {.info.name = "heartbeat_interval_ms",
     .info.variable = "MCCL_HEARTBEAT_INTERVAL_MS",
     MEMBER(VALUE_MS, heartbeat_interval_ms),
     .info.default_value = "5000",
     OFF_OR_NUMBER(10, 3600000),
     LIVE,
     .info.help = "How often this rank proves to the others that it lives; one that is silent for "
                  "six of its own intervals is lost. 0: never, and nobody waits for it."},
    {.info.name = "max_queue_depth",
     .info.variable = "MCCL_MAX_QUEUE_DEPTH",
     MEMBER(VALUE_INT, max_queue_depth),
     .info.default_value = "1024",
     NUMBER(1, 1048576),
     LIVE,
     .info.help = "Operations in flight on one communicator, a group of calls counting once; "
                  "submitting another one waits."},

    {.info.name = "auth_key",
     .info.variable = "MCCL_AUTH_KEY",
     MEMBER(VALUE_TEXT, auth_key),
     .secret = true,
     .info.default_value = "",
     .info.range = "at most 127 characters",
     LIVE,
     .info.help = "Secret shared by all ranks, mixed into the job's own. Never shown. Prefer "
                  "auth_key_file: other users of a host may see an environment."},
    {.info.name = "auth_key_file",
     .info.variable = "MCCL_AUTH_KEY_FILE",
     MEMBER(VALUE_TEXT, auth_key_file),
     .info.default_value = "",
     .info.range = "path of a file of 1 .. 127 characters",
     LIVE,
     .info.help = "File that holds auth_key; a newline at its end does not count."},
};

const size_t config_n_rows = sizeof(config_rows) / sizeof(config_rows[0]);

_Static_assert(sizeof(config_rows) / sizeof(config_rows[0]) <=
                   sizeof(((struct settings *)0)->source),
               "struct settings keeps one source per row");

/* SPDX-License-Identifier: MIT
 *
 * The one table of settings (design decision D14). Environment, mccl_set_defaults,
 * mccl_config.settings, `mccl env` and docs/settings.md all come from it; getenv appears in
 * config.c and nowhere else. A `struct settings` is filled once when a communicator is made and is
 * read-only afterwards.
 */
#ifndef MCCL_BASE_CONFIG_H
#define MCCL_BASE_CONFIG_H

#include "mccl.h"

#include <stdbool.h>

enum setting_transport {
    TRANSPORT_AUTO,
    TRANSPORT_TCP,
    TRANSPORT_SHM,
    TRANSPORT_RDMA /* refused until it exists */
};
enum setting_link_profile { PROFILE_NONE, PROFILE_THUNDERBOLT };
enum setting_allreduce_algo {
    ALLREDUCE_AUTO,
    ALLREDUCE_DIRECT,
    ALLREDUCE_TWO_SHOT,
    ALLREDUCE_RING,
    ALLREDUCE_RING_CHUNKED,
    ALLREDUCE_RECURSIVE_DOUBLING,
    ALLREDUCE_RABENSEIFNER,
    ALLREDUCE_TWO_LEVEL
};
/* BASIC: one piece per segment. CHUNKED = RING_CHUNKED: segments cut into chunks that overlap.
 * FAST: two rings in opposite directions, half the data each. */
enum setting_ring_algo { RING_AUTO, RING_BASIC, RING_CHUNKED, RING_FAST };
enum setting_source {
    SOURCE_DEFAULT,
    SOURCE_PROFILE,
    SOURCE_ENVIRONMENT,
    SOURCE_INIT,
    SOURCE_CONFIG
};

struct settings {
    int transport;               /* TRANSPORT: auto */
    char listen_addr[256];       /* LISTEN_ADDR: auto | loopback | comma list of address literals */
    int port_first, port_last;   /* PORT_BASE: 29600, or a range 41000-41010; a single port P means
                                    P..min(P+1023, 65535); 0: any free port */
    char ifname[256];            /* IFNAME: "" */
    int64_t chunk_bytes;         /* CHUNK_BYTES: 4 MiB; 4096 .. 1 GiB; thunderbolt profile 16 MiB */
    int64_t small_msg_threshold; /* SMALL_MSG_THRESHOLD: 256 KiB; 0 .. 1 GiB */
    int64_t channels;            /* CHANNELS: 1; 1 .. 8 */
    int64_t connect_timeout_ms;  /* CONNECT_TIMEOUT_MS: 30000; 1 .. 86400000 */
    int64_t sock_bufsize; /* SOCK_BUFSIZE: see config.c; 0: the kernel's own tuning; up to 1 GiB */
    int64_t tcp_lowat;    /* TCP_LOWAT: 131072; 0 off .. 1 GiB */
    int link_profile;     /* LINK_PROFILE: unset | thunderbolt */
    int allreduce_algo;   /* ALLREDUCE_ALGO: auto, or one of the names in config_table.c */
    int ring_algo;        /* RING_ALGO: auto | basic | chunked | ring_chunked | fast */
    int log_level;        /* LOG_LEVEL: OFF FATAL ERROR WARN INFO DEBUG TRACE or 0..6; WARN */
    int64_t watchdog_timeout_ms;   /* WATCHDOG_TIMEOUT_MS: 300000; 1 .. 86400000 */
    int64_t heartbeat_interval_ms; /* HEARTBEAT_INTERVAL_MS: 5000; 0 off, 10 .. 3600000 */
    int64_t max_queue_depth;       /* MAX_QUEUE_DEPTH: 1024; 1 .. 1048576 */
    char auth_key[128];            /* AUTH_KEY: "" ; mixed into the job's secret; never printed */
    char auth_key_file[256]; /* AUTH_KEY_FILE: "" ; its content (trailing newline cut) is the key */

    /* Not live yet: any value that asks for something is MCCL_ERR_CONFIG; the default and "off" are
     * accepted. */
    bool transport_crc;    /* TRANSPORT_CRC: off */
    char compression[16];  /* COMPRESSION: none | fp16 | topk */
    double topk_ratio;     /* TOPK_RATIO: 0.01; accepted, unused while compression is none */
    int64_t ddp_bucket_mb; /* DDP_BUCKET_MB (variable name without prefix): 25; read by examples and
                              users' scripts */
    /* GPU rows of the guide: accepted with any valid value, take effect with a Metal stream (help
     * says so). */
    char sync_mode[16]; /* SYNC_MODE: full | coalesced (coalesced is refused by name: not there yet)
                         */
    bool event_sync, overlap_comm, fast_math; /* on */
    int64_t gpu_threshold;                    /* 4096 */
    bool fp32_cpu_reduce;                     /* off */
    char shader_path[256];                    /* "" */

    unsigned char source[40]; /* enum setting_source of each row, by row index */
};

/* Fills `settings` from all sources; `overrides` is mccl_config.settings or NULL. On
 * MCCL_ERR_CONFIG the error text names variable (or setting), value and accepted range, and
 * *settings is untouched. Unknown MCCL_* variables warn once per process and suggest the nearest
 * name; unknown names in a string are errors. */
mccl_result config_load(const char *overrides, struct settings *settings);

/* Replaces the process-wide string behind mccl_set_defaults after checking it. Thread-safe. */
mccl_result config_set_defaults(const char *text);
/* Registers, once, what keeps the lock behind it usable in a forked child. */
void config_fork_init(void);

/* Rows, for mccl_setting_get_info; NULL past the end. `format` writes the current value of row
 * `index`. */
const mccl_setting_info *config_row(size_t index);
mccl_result config_find(const char *name,
                        size_t *index); /* "chunk_bytes" or "MCCL_CHUNK_BYTES", any case */
void config_format(const struct settings *settings, size_t index, char *text, size_t size);
const char *config_source_name(enum setting_source source);
/* True if the row behind this member name was set by anything but the default and the profile. */
bool config_is_explicit(const struct settings *settings, const char *name);

/* What the launcher said: true if LOCAL_WORLD_SIZE == WORLD_SIZE (torchrun), the Open MPI or Slurm
 * equivalents, or MASTER_ADDR is a loopback literal: then "auto" listens on loopback only. */
bool config_launcher_is_single_host(void);

#endif

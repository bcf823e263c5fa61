/* SPDX-License-Identifier: MIT
 *
 * Where settings come from and which source wins. The only file that reads the environment. Any
 * thread: the text behind mccl_set_defaults is under a lock, everything else is the caller's own.
 */
#include "base/config.h"

#include "base/config_table.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "os/os.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef __APPLE__
#include <crt_externs.h>
#define environment() (*_NSGetEnviron()) /* a dylib cannot name `environ` */
#else
extern char **environ;
#define environment() environ
#endif

#define PREFIX "MCCL_"
#define NAME_BYTES 64
#define VALUE_TEXT_BYTES 512 /* longer than any member of struct settings */

static pthread_mutex_t defaults_lock = PTHREAD_MUTEX_INITIALIZER;
static char *defaults_text; /* under defaults_lock; owned; NULL for none */
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

/* ---- fork ---- */

/* A child that is forked while another thread holds the lock would find it held for ever. */
static void before_fork(void)
{
    pthread_mutex_lock(&defaults_lock);
}

static void after_fork(void)
{
    pthread_mutex_unlock(&defaults_lock);
}

static void register_handlers(void)
{
    os_fork_init();
    pthread_atfork(before_fork, after_fork, after_fork);
}

void config_fork_init(void)
{
    pthread_once(&fork_once, register_handlers);
}

/* ---- names ---- */

static const char *without_prefix(const char *name)
{
    return text_has_prefix(name, PREFIX) ? name + strlen(PREFIX) : name;
}

static const struct setting_row *find_row(const char *name)
{
    for (size_t i = 0; i < config_n_rows; i++)
        if (text_equal(config_rows[i].info.name, without_prefix(name)))
            return &config_rows[i];
    return NULL;
}

/* The row a misspelt name probably means, or NULL: two letters may be wrong, or a third of them. */
static const struct setting_row *nearest_row(const char *name)
{
    name = without_prefix(name);
    const size_t tolerated = strlen(name) / 3 > 2 ? strlen(name) / 3 : 2;
    const struct setting_row *nearest = NULL;
    size_t least = tolerated + 1;
    for (size_t i = 0; i < config_n_rows; i++) {
        const size_t distance = text_distance(config_rows[i].info.name, name);
        if (distance < least) {
            least = distance;
            nearest = &config_rows[i];
        }
    }
    return nearest;
}

static mccl_result unknown_name(const char *name, const char *where)
{
    const struct setting_row *const near = nearest_row(name);
    if (near)
        return error_set(MCCL_ERR_CONFIG, "unknown setting %.*s%s; did you mean %s?", NAME_BYTES,
                         name, where, near->info.name);
    return error_set(MCCL_ERR_CONFIG, "unknown setting %.*s%s; `mccl env` lists them all",
                     NAME_BYTES, name, where);
}

mccl_result config_find(const char *name, size_t *index)
{
    const struct setting_row *const row = find_row(name);
    if (!row)
        return unknown_name(name, "");
    *index = (size_t)(row - config_rows);
    return MCCL_OK;
}

const mccl_setting_info *config_row(size_t index)
{
    return index < config_n_rows ? &config_rows[index].info : NULL;
}

void config_format(const struct settings *settings, size_t index, char *text, size_t size)
{
    MCCL_ASSERT(index < config_n_rows);
    config_value_format(&config_rows[index], settings, text, size);
}

const char *config_source_name(enum setting_source source)
{
    static const char *const names[] = {"default", "profile", "environment", "init", "config"};
    return names[source];
}

bool config_is_explicit(const struct settings *settings, const char *name)
{
    const struct setting_row *const row = find_row(name);
    MCCL_ASSERT(row != NULL);
    return settings->source[row - config_rows] >= SOURCE_ENVIRONMENT;
}

/* ---- sources, from weakest to strongest ---- */

static mccl_result apply(const struct setting_row *row, const char *text,
                         enum setting_source source, struct settings *settings)
{
    TRY(config_value_parse(row, text, source, settings));
    settings->source[row - config_rows] = (unsigned char)source;
    return MCCL_OK;
}

static mccl_result apply_table(struct settings *settings)
{
    memset(settings, 0, sizeof(*settings));
    for (size_t i = 0; i < config_n_rows; i++)
        TRY(apply(&config_rows[i], config_rows[i].info.default_value, SOURCE_DEFAULT, settings));
    return MCCL_OK;
}

/* A variable that is set but empty counts as not set: shells make it hard to take one away. */
static mccl_result apply_environment(struct settings *settings)
{
    for (size_t i = 0; i < config_n_rows; i++) {
        const char *const raw = getenv(config_rows[i].info.variable);
        char text[VALUE_TEXT_BYTES];
        if (!raw)
            continue;
        if (!text_copy_trimmed(raw, strlen(raw), text, sizeof(text)))
            return config_value_too_long(&config_rows[i], SOURCE_ENVIRONMENT);
        if (text[0])
            TRY(apply(&config_rows[i], text, SOURCE_ENVIRONMENT, settings));
    }
    return MCCL_OK;
}

/* One "name=value" of `length` bytes; blank ones are skipped. The text of an item without '=' is
 * not repeated in the error: it may be the rest of a secret that contains a separator. */
static mccl_result apply_item(const char *item, size_t length, enum setting_source source,
                              struct settings *settings)
{
    const char *const equals = memchr(item, '=', length);
    char name[NAME_BYTES], value[VALUE_TEXT_BYTES];
    if (!equals) {
        if (text_copy_trimmed(item, length, value, sizeof(value)) && value[0] == '\0')
            return MCCL_OK;
        return error_set(MCCL_ERR_CONFIG,
                         "settings (%s): an item has no '='; write \"name=value; name=value\"",
                         config_source_name(source));
    }
    const size_t name_length = (size_t)(equals - item);
    char where[32];
    snprintf(where, sizeof(where), " (%s)", config_source_name(source));
    if (!text_copy_trimmed(item, name_length, name, sizeof(name)))
        return error_set(MCCL_ERR_CONFIG, "settings%s: no setting has a name of %zu characters",
                         where, name_length);
    const struct setting_row *const row = find_row(name);
    if (!row)
        return unknown_name(name, where);
    if (!text_copy_trimmed(equals + 1, length - name_length - 1, value, sizeof(value)))
        return config_value_too_long(row, source);
    return apply(row, value, source, settings);
}

/* "name=value; name=value", newlines separate too; the last one of a name counts. NULL is empty. */
static mccl_result apply_string(const char *text, enum setting_source source,
                                struct settings *settings)
{
    while (text && *text) {
        const size_t length = strcspn(text, ";\n");
        TRY(apply_item(text, length, source, settings));
        text += length + (text[length] != '\0');
    }
    return MCCL_OK;
}

static mccl_result apply_defaults_text(struct settings *settings)
{
    config_fork_init();
    pthread_mutex_lock(&defaults_lock);
    const mccl_result result = apply_string(defaults_text, SOURCE_INIT, settings);
    pthread_mutex_unlock(&defaults_lock);
    return result;
}

/* Last, because every source may choose the profile; it fills in only what none of them has set. */
static mccl_result apply_profile(struct settings *settings)
{
    if (settings->link_profile != PROFILE_THUNDERBOLT)
        return MCCL_OK;
    for (size_t i = 0; i < config_n_rows; i++)
        if (config_rows[i].thunderbolt && settings->source[i] == SOURCE_DEFAULT)
            TRY(apply(&config_rows[i], config_rows[i].thunderbolt, SOURCE_PROFILE, settings));
    return MCCL_OK;
}

mccl_result config_set_defaults(const char *text)
{
    struct settings scratch;
    TRY(apply_table(&scratch));
    TRY(apply_string(text, SOURCE_INIT, &scratch));
    char *copy = NULL;
    if (text && *text) {
        copy = malloc(strlen(text) + 1);
        if (!copy)
            return error_set(MCCL_ERR_NO_MEMORY, "no memory to keep %zu bytes of settings",
                             strlen(text));
        memcpy(copy, text, strlen(text) + 1);
    }
    config_fork_init();
    pthread_mutex_lock(&defaults_lock);
    char *const old = defaults_text;
    defaults_text = copy;
    pthread_mutex_unlock(&defaults_lock);
    free(old);
    return MCCL_OK;
}

/* ---- the key's file ---- */

/* Reads up to `size` bytes; -1 and errno. */
static ssize_t read_start(const char *path, char *buffer, size_t size)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    size_t used = 0;
    ssize_t n = 1;
    while (used < size && n != 0) {
        n = read(fd, buffer + used, size - used);
        if (n > 0)
            used += (size_t)n;
        else if (n < 0 && errno != EINTR)
            break;
    }
    const int saved_errno = errno;
    close(fd);
    errno = saved_errno;
    return n < 0 ? -1 : (ssize_t)used;
}

/* Makes the content of auth_key_file the auth_key, unless a stronger source has set that. */
static mccl_result load_key_file(struct settings *settings)
{
    const struct setting_row *const key = find_row("auth_key");
    const struct setting_row *const file = find_row("auth_key_file");
    unsigned char *const key_source = &settings->source[key - config_rows];
    const enum setting_source file_source = settings->source[file - config_rows];
    const char *const name = config_shown_name(file, file_source);
    const char *const source_text = config_source_name(file_source);
    if (!settings->auth_key_file[0] || (settings->auth_key[0] && *key_source > file_source))
        return MCCL_OK;
    if (settings->auth_key[0] && *key_source == file_source)
        return error_set(MCCL_ERR_CONFIG, "%s and %s (%s) are both set; keep one",
                         config_shown_name(key, file_source), name, source_text);

    char content[sizeof(settings->auth_key) +
                 2]; /* room for "\r\n" and for seeing that there is more */
    const ssize_t n = read_start(settings->auth_key_file, content, sizeof(content));
    if (n < 0)
        return error_set(MCCL_ERR_CONFIG, "%s=%s (%s): cannot be read: %s", name,
                         settings->auth_key_file, source_text, strerror(errno));
    size_t length = (size_t)n;
    if (length > 0 && content[length - 1] == '\n')
        length--;
    if (length > 0 && content[length - 1] == '\r')
        length--;
    if (length == 0 || length >= sizeof(settings->auth_key) || memchr(content, '\0', length))
        return error_set(MCCL_ERR_CONFIG,
                         "%s=%s (%s): must hold 1 .. %zu characters and no zero byte; "
                         "`openssl rand -hex 32` makes a good one",
                         name, settings->auth_key_file, source_text,
                         sizeof(settings->auth_key) - 1);
    memcpy(settings->auth_key, content, length);
    settings->auth_key[length] = '\0';
    *key_source = (unsigned char)file_source;
    return MCCL_OK;
}

/* ---- all together ---- */

static bool is_known_variable(const char *name)
{
    for (size_t i = 0; i < config_n_rows; i++)
        if (strcmp(config_rows[i].info.variable, name) == 0)
            return true;
    return false;
}

/* Once per process. A misspelt variable is no error: it may belong to another version or program.
 */
static void warn_unknown_variables(int level)
{
    static atomic_flag done = ATOMIC_FLAG_INIT;
    if (level < LOG_WARN || atomic_flag_test_and_set_explicit(&done, memory_order_relaxed))
        return;
    for (char **entry = environment(); entry && *entry; entry++) {
        char name[NAME_BYTES];
        const size_t length = strcspn(*entry, "=");
        if (strncmp(*entry, PREFIX, strlen(PREFIX)) != 0 ||
            !text_copy_trimmed(*entry, length, name, sizeof(name)) || is_known_variable(name))
            continue;
        const struct setting_row *const near = nearest_row(name);
        if (near)
            log_write(LOG_WARN, "unknown variable %s; did you mean %s?", name, near->info.variable);
        else
            log_write(LOG_WARN, "unknown variable %s; `mccl env` lists them all", name);
    }
}

mccl_result config_load(const char *overrides, struct settings *settings)
{
    struct settings loaded;
    TRY(apply_table(&loaded));
    TRY(apply_environment(&loaded));
    TRY(apply_defaults_text(&loaded));
    TRY(apply_string(overrides, SOURCE_CONFIG, &loaded));
    TRY(apply_profile(&loaded));
    TRY(load_key_file(&loaded));
    warn_unknown_variables(loaded.log_level);
    *settings = loaded;
    return MCCL_OK;
}

/* ---- launchers ---- */

static bool both_set(const char *a, const char *b)
{
    return getenv(a) && getenv(b);
}

/* True if MASTER_ADDR can only mean this host. */
static bool master_is_loopback(void)
{
    const char *const master = getenv("MASTER_ADDR");
    struct os_address address;
    if (!master)
        return false;
    return text_equal(master, "localhost") ||
           (os_address_parse(master, &address) && os_address_is_loopback(&address));
}

bool config_launcher_is_single_host(void)
{
    /* Ranks on this host and ranks in all, by launcher. The first pair that is there decides: a
     * torchrun inside a batch job knows better than the job. */
    static const char *const pairs[][2] = {
        {"LOCAL_WORLD_SIZE", "WORLD_SIZE"},                     /* torchrun */
        {"OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"}, /* Open MPI */
        {"MPI_LOCALNRANKS", "PMI_SIZE"},                        /* MPICH, Hydra */
    };
    for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++)
        if (both_set(pairs[i][0], pairs[i][1]))
            return strcmp(getenv(pairs[i][0]), getenv(pairs[i][1])) == 0;
    const char *const slurm_hosts = getenv("SLURM_STEP_NUM_NODES");
    if (slurm_hosts)
        return strcmp(slurm_hosts, "1") == 0;
    return master_is_loopback();
}

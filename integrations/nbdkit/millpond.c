/*
 * nbdkit plugin: serves a file over NBD from a page cache in the server process, with libmillpond.
 *
 * All connections share one engine and one cached file (N1). Consequences:
 *
 * - can_multi_conn: a flush syncs the file and not a handle, so it covers all earlier completed writes of all connections.
 *   Each connection reads the writes of the others, as there is one cache.
 * - The cache outlives connections.
 *
 * FUA: a write uses `durable`, the same file opened with O_DSYNC; a sync follows zeroing and trimming.
 *
 * The file is opened for reading. It is opened for writing when the first client connects that may write (N2). With -r,
 * nbdkit marks each connection as read-only, so the file is never opened for writing.
 *
 * The engine is created after nbdkit has daemonized (after_fork), as the library's handles are invalid in a child process.
 * Before that, a trial run reports errors on the terminal instead of in the system's log.
 */
#define NBDKIT_API_VERSION 2
#define THREAD_MODEL NBDKIT_THREAD_MODEL_PARALLEL

#include <errno.h>
#include <fcntl.h>
#include <millpond.h>
#include <nbdkit-plugin.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAGE_BYTES_MIN 4096
#define PAGE_BYTES_MAX 65536

/* Parameters of the command line. */
static char *path;
static int64_t cache_bytes; /* 0: the library's default */
static int64_t page_bytes = PAGE_BYTES_MIN;
static int64_t untorn_bytes = 0;
static uint32_t write_mode = MILLPOND_WRITE_THROUGH;
static bool is_direct;
static bool has_keeper;

/* State of the server, from after_fork to cleanup. */
static struct millpond_engine engine;
static struct millpond_file file;
/* Set at the first connection that may write, both together (N2). 0: the file is not writable. */
static struct millpond_file writer, durable;
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

/* Reports a failed call to nbdkit, and so to the client. Returns -1. */
static int fail(const char *what, int64_t result) {
    char text[512] = "";
    millpond_error_text(text, sizeof text);
    nbdkit_error("%s: %s: %s", what, path, text);
    nbdkit_set_error((int)-result);
    return -1;
}

static void plugin_unload(void) {
    free(path);
}

static int config_bool(const char *value, bool *to) {
    int is_on = nbdkit_parse_bool(value); /* reports errors itself */
    *to = is_on == 1;
    return is_on == -1 ? -1 : 0;
}

static int plugin_config(const char *key, const char *value) {
    if (strcmp(key, "file") == 0) {
        free(path);
        path = nbdkit_absolute_path(value);
        return path ? 0 : -1;
    }
    if (strcmp(key, "cache") == 0) {
        cache_bytes = nbdkit_parse_size(value);
        if (cache_bytes <= 0)
            nbdkit_error("cache=%s: must be a size of at least 16K, such as 512M or 4G", value);
        return cache_bytes > 0 ? 0 : -1;
    }
    if (strcmp(key, "page") == 0) {
        page_bytes = nbdkit_parse_size(value);
        if (page_bytes < PAGE_BYTES_MIN || page_bytes > PAGE_BYTES_MAX ||
            (page_bytes & (page_bytes - 1)) != 0) {
            nbdkit_error("page=%s: must be a power of two from 4K to 64K", value);
            return -1;
        }
        return 0;
    }
    if (strcmp(key, "untorn") == 0) {
        untorn_bytes = nbdkit_parse_size(value);
        if (untorn_bytes < PAGE_BYTES_MIN || untorn_bytes > PAGE_BYTES_MAX ||
            (untorn_bytes & (untorn_bytes - 1)) != 0) {
            nbdkit_error("untorn=%s: must be a power of two from 4K to 64K", value);
            return -1;
        }
        return 0;
    }
    if (strcmp(key, "mode") == 0) {
        bool is_back = strcmp(value, "back") == 0;
        if (!is_back && strcmp(value, "through") != 0) {
            nbdkit_error("mode=%s: must be through or back", value);
            return -1;
        }
        write_mode = is_back ? MILLPOND_WRITE_BACK : MILLPOND_WRITE_THROUGH;
        return 0;
    }
    if (strcmp(key, "direct") == 0)
        return config_bool(value, &is_direct);
    if (strcmp(key, "keeper") == 0)
        return config_bool(value, &has_keeper);
    nbdkit_error("unknown parameter '%s'; the parameters are file, cache, mode, direct, keeper, page and untorn", key);
    return -1;
}

#define plugin_config_help                                                                            \
    "[file=]<FILE>       (required) The file to serve.\n"                                              \
    "cache=<SIZE>        Hard limit of the page cache (default: a quarter of the memory).\n"          \
    "mode=through|back   When a write reaches the kernel: before its reply (default), or later.\n"    \
    "direct=<BOOL>       Read and write the file with O_DIRECT, without the kernel's cache (default: no).\n" \
    "keeper=<BOOL>       With mode=back: dirty pages survive a kill of the server (default: no).\n"   \
    "page=<SIZE>         Page size, 4K to 64K (default: 4K).\n"                                        \
    "untorn=<SIZE>       With direct=true: a power cut tears no aligned block of this size, 4K to 64K."

static int plugin_config_complete(void) {
    if (!path) {
        nbdkit_error("the parameter file=<FILE> is missing");
        return -1;
    }
    if (has_keeper && write_mode != MILLPOND_WRITE_BACK) {
        nbdkit_error("keeper=true needs mode=back: in mode through there are no dirty pages");
        return -1;
    }
    if (untorn_bytes != 0 && (!is_direct || has_keeper)) {
        nbdkit_error("untorn=<SIZE> needs direct=true, and no keeper");
        return -1;
    }
    if (page_bytes < untorn_bytes)
        page_bytes = untorn_bytes;
    return 0;
}

static int open_as(int flags, struct millpond_file *to) {
    struct millpond_open_options options = {0};
    options.size = sizeof options;
    options.flags = (uint32_t)flags;
    options.page_bytes = (uint32_t)page_bytes;
    options.write_mode = write_mode;
    options.untorn_bytes = (uint32_t)untorn_bytes;
    options.backing = is_direct ? MILLPOND_BACKING_DIRECT : MILLPOND_BACKING_BUFFERED;
    return millpond_open(engine, path, &options, to);
}

static int shut_one(struct millpond_file *which) {
    int error = which->id ? millpond_close(*which) : 0;
    memset(which, 0, sizeof *which);
    return error ? fail("closing", error) : 0;
}

/* Writes dirty pages back, and closes everything. */
static int shut(void) {
    int result = shut_one(&durable);
    result |= shut_one(&writer);
    result |= shut_one(&file);
    millpond_engine_destroy(engine);
    return result;
}

/* Opens the file for writing, if this is permitted and not yet done (N2). */
static int open_to_write(void) {
    pthread_mutex_lock(&opening);
    int error = durable.id ? 0 : open_as(O_RDWR, &writer);
    if (!error && !durable.id) {
        error = open_as(O_RDWR | O_DSYNC, &durable);
        if (error)
            shut_one(&writer);
    }
    pthread_mutex_unlock(&opening);
    bool is_refused = error == -EACCES || error == -EPERM || error == -EROFS || error == -ETXTBSY;
    return error && !is_refused ? fail("opening to write", error) : 0;
}

/* Creates the engine, and opens the file. */
static int start(const char *keeper) {
    struct millpond_engine_options options = {0};
    options.size = sizeof options;
    options.cache_bytes = (uint64_t)cache_bytes;
    options.keeper = keeper;
    int error = millpond_engine_create(&options, &engine);
    if (error)
        return fail("creating the cache", error);
    error = open_as(O_RDONLY, &file);
    if (error) {
        fail("opening", error);
        shut();
        return -1;
    }
    return 0;
}

static int plugin_get_ready(void) {
    return start(NULL) || shut() ? -1 : 0;
}

static int plugin_after_fork(void) {
    char keeper[MILLPOND_KEEPER_ADDRESS_BYTES];
    if (has_keeper) {
        int error = millpond_keeper_spawn(keeper, sizeof keeper);
        if (error)
            return fail("starting a keeper", error);
    }
    return start(has_keeper ? keeper : NULL);
}

static void plugin_cleanup(void) {
    shut();
}

static void plugin_dump(void) {
    char text[256];
    printf("millpond_version=%s\n", millpond_version());
    if (millpond_engine_create(NULL, &engine) == 0) {
        if (millpond_engine_back_end(engine, text, sizeof text) > 0)
            printf("millpond_back_end=%s\n", text);
        millpond_engine_destroy(engine);
    }
}

static void *plugin_open(int readonly) {
    /* nbdkit itself refuses writes of a read-only client. */
    return !readonly && open_to_write() ? NULL : NBDKIT_HANDLE_NOT_NEEDED;
}

static int64_t plugin_get_size(void *handle) {
    (void)handle;
    int64_t len = millpond_len(file);
    return len < 0 ? fail("length", len) : len;
}

static int plugin_block_size(void *handle, uint32_t *minimum, uint32_t *preferred, uint32_t *maximum) {
    (void)handle;
    *minimum = 1;
    *preferred = (uint32_t)page_bytes;
    *maximum = UINT32_MAX;
    return 0;
}

static int can_write(void *handle) {
    (void)handle;
    return durable.id != 0;
}

static int yes(void *handle) {
    (void)handle;
    return 1;
}

static int can_fua(void *handle) {
    (void)handle;
    return NBDKIT_FUA_NATIVE;
}

static int can_cache(void *handle) {
    (void)handle;
    return NBDKIT_CACHE_NATIVE;
}

static int plugin_pread(void *handle, void *buffer, uint32_t count, uint64_t offset, uint32_t flags) {
    (void)handle;
    (void)flags;
    while (count > 0) {
        int64_t len = millpond_read(file, buffer, count, offset);
        if (len < 0)
            return fail("reading", len);
        if (len == 0) {
            nbdkit_error("reading: %s: the file was truncated", path);
            nbdkit_set_error(EIO);
            return -1;
        }
        buffer = (char *)buffer + len;
        offset += (uint64_t)len;
        count -= (uint32_t)len;
    }
    return 0;
}

static int plugin_pwrite(void *handle, const void *buffer, uint32_t count, uint64_t offset, uint32_t flags) {
    (void)handle;
    struct millpond_file to = flags & NBDKIT_FLAG_FUA ? durable : writer;
    while (count > 0) {
        int64_t len = millpond_write(to, buffer, count, offset);
        if (len < 0)
            return fail("writing", len);
        buffer = (const char *)buffer + len;
        offset += (uint64_t)len;
        count -= (uint32_t)len;
    }
    return 0;
}

/* Syncs the writes of all connections to the device (N1). */
static int plugin_flush(void *handle, uint32_t flags) {
    (void)handle;
    (void)flags;
    int error = millpond_sync_data(writer);
    return error ? fail("flushing", error) : 0;
}

/* Result of trimming or zeroing: its error, or the result of a flush if the client requested FUA. */
static int changed(const char *what, int error, uint32_t flags) {
    if (error)
        return fail(what, error);
    return flags & NBDKIT_FLAG_FUA ? plugin_flush(NULL, 0) : 0;
}

/* Trimming is a hint: without support of the file system, it does nothing. */
static int plugin_trim(void *handle, uint32_t count, uint64_t offset, uint32_t flags) {
    (void)handle;
    int error = millpond_punch_hole(writer, offset, count);
    if (error == -EOPNOTSUPP)
        error = 0;
    return changed("trimming", error, flags);
}

static int plugin_zero(void *handle, uint32_t count, uint64_t offset, uint32_t flags) {
    (void)handle;
    int error = -EOPNOTSUPP;
    if (flags & NBDKIT_FLAG_MAY_TRIM)
        error = millpond_punch_hole(writer, offset, count);
    if (error == -EOPNOTSUPP) {
        /* This may write zeros, which is not allowed for a fast zero. */
        if (flags & NBDKIT_FLAG_FAST_ZERO) {
            nbdkit_set_error(EOPNOTSUPP);
            return -1;
        }
        error = millpond_zero_range(writer, offset, count);
    }
    return changed("zeroing", error, flags);
}

/* A seek writes back the dirty pages after its offset, so it finds the holes of the file with all writes. */
static int plugin_extents(void *handle, uint32_t count, uint64_t offset, uint32_t flags,
                          struct nbdkit_extents *extents) {
    (void)handle;
    uint64_t end = offset + count;
    while (offset < end) {
        uint32_t type = NBDKIT_EXTENT_HOLE | NBDKIT_EXTENT_ZERO;
        int64_t next = millpond_seek_data(file, offset);
        if (next == (int64_t)offset) {
            type = 0;
            next = millpond_seek_hole(file, offset);
        }
        if (next == -ENXIO) /* nothing of that kind */
            next = (int64_t)end;
        if (next < 0)
            return fail("looking for holes", next);
        /* Adds no extent if a hole was punched between the two seeks: the next iteration finds it. */
        if (next > (int64_t)offset) {
            if (nbdkit_add_extent(extents, offset, (uint64_t)next - offset, type) == -1)
                return -1;
            if (flags & NBDKIT_FLAG_REQ_ONE)
                return 0;
        }
        offset = (uint64_t)next;
    }
    return 0;
}

static int plugin_cache(void *handle, uint32_t count, uint64_t offset, uint32_t flags) {
    (void)handle;
    (void)flags;
    int error = millpond_advise(file, offset, count, MILLPOND_ADVICE_WILL_NEED);
    return error ? fail("caching", error) : 0;
}

static struct nbdkit_plugin plugin = {
    .name = "millpond",
    .version = MILLPOND_VERSION,
    .longname = "nbdkit Millpond plugin",
    .description = "A file, from a page cache in the server",
    .unload = plugin_unload,
    .dump_plugin = plugin_dump,
    .config = plugin_config,
    .config_complete = plugin_config_complete,
    .config_help = plugin_config_help,
    .magic_config_key = "file",
    .get_ready = plugin_get_ready,
    .after_fork = plugin_after_fork,
    .cleanup = plugin_cleanup,
    .open = plugin_open,
    .get_size = plugin_get_size,
    .block_size = plugin_block_size,
    .can_write = can_write,
    .can_flush = can_write,
    .can_trim = can_write,
    .can_zero = can_write,
    .can_fast_zero = can_write,
    .can_fua = can_fua,
    .can_multi_conn = yes,
    .can_extents = yes,
    .can_cache = can_cache,
    .pread = plugin_pread,
    .pwrite = plugin_pwrite,
    .flush = plugin_flush,
    .trim = plugin_trim,
    .zero = plugin_zero,
    .extents = plugin_extents,
    .cache = plugin_cache,
};

NBDKIT_REGISTER_PLUGIN(plugin)

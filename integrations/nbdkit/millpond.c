/*
 * nbdkit plugin: serves a file over NBD from a page cache in the server itself, by libmillpond.
 *
 * One engine, and one cached file, for all connections (N1). That is why:
 *
 * - can_multi_conn: a flush is a sync of the file, not of a handle, and covers all writes that were answered
 *   before it, whichever connection they came by. What one connection has written the others read: there is
 *   one cache.
 * - The cache outlives connections.
 *
 * FUA: a write by `durable`, the same file opened with O_DSYNC; zeroing and trimming are followed by a sync.
 *
 * The file is opened for reading, and for writing when the first client comes that may write (N2): with -r
 * nbdkit says so of each, and of that only, so nothing is opened for writing then.
 *
 * The engine is made after nbdkit has become a server (after_fork): handles of the library are nothing in a
 * child. Before that the same is tried out, so that an error is seen at once and not in the system's log.
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

/* What the command line says. */
static char *path;
static int64_t cache_bytes; /* 0: the library's default */
static int64_t page_bytes = PAGE_BYTES_MIN;
static uint32_t write_mode = MILLPOND_WRITE_THROUGH;
static bool is_direct;
static bool has_keeper;

/* Of the server, from after_fork to cleanup. */
static struct millpond_engine engine;
static struct millpond_file file;
/* From the first connection that may write, and both or none (N2). 0: the file can't be written. */
static struct millpond_file writer, durable;
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

/* Says why a call failed, to nbdkit and through it to the client. Always -1. */
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
    int is_on = nbdkit_parse_bool(value); /* which says what is wrong */
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
            nbdkit_error("cache=%s: a size of 16K or more is wanted, as 512M or 4G", value);
        return cache_bytes > 0 ? 0 : -1;
    }
    if (strcmp(key, "page") == 0) {
        page_bytes = nbdkit_parse_size(value);
        if (page_bytes < PAGE_BYTES_MIN || page_bytes > PAGE_BYTES_MAX ||
            (page_bytes & (page_bytes - 1)) != 0) {
            nbdkit_error("page=%s: a power of two from 4K to 64K is wanted", value);
            return -1;
        }
        return 0;
    }
    if (strcmp(key, "mode") == 0) {
        bool is_back = strcmp(value, "back") == 0;
        if (!is_back && strcmp(value, "through") != 0) {
            nbdkit_error("mode=%s: through or back is wanted", value);
            return -1;
        }
        write_mode = is_back ? MILLPOND_WRITE_BACK : MILLPOND_WRITE_THROUGH;
        return 0;
    }
    if (strcmp(key, "direct") == 0)
        return config_bool(value, &is_direct);
    if (strcmp(key, "keeper") == 0)
        return config_bool(value, &has_keeper);
    nbdkit_error("unknown parameter '%s'; there are file, cache, mode, direct, keeper and page", key);
    return -1;
}

#define plugin_config_help                                                                            \
    "[file=]<FILE>       (required) The file to serve.\n"                                              \
    "cache=<SIZE>        Memory for cached pages, a hard limit (default: a quarter of what there is).\n" \
    "mode=through|back   When a write reaches the kernel: before it is answered (default), or later.\n" \
    "direct=<BOOL>       Read and write the file with O_DIRECT: nothing is cached twice (default: no).\n" \
    "keeper=<BOOL>       With mode=back: what waits survives a kill of the server (default: no).\n"    \
    "page=<SIZE>         What is read and cached as one piece, 4K to 64K (default: 4K)."

static int plugin_config_complete(void) {
    if (!path) {
        nbdkit_error("which file is to be served? file=<FILE>");
        return -1;
    }
    if (has_keeper && write_mode != MILLPOND_WRITE_BACK) {
        nbdkit_error("keeper=true is for mode=back: else nothing waits to be written");
        return -1;
    }
    return 0;
}

static int open_as(int flags, struct millpond_file *to) {
    struct millpond_open_options options = {0};
    options.size = sizeof options;
    options.flags = (uint32_t)flags;
    options.page_bytes = (uint32_t)page_bytes;
    options.write_mode = write_mode;
    options.backing = is_direct ? MILLPOND_BACKING_DIRECT : MILLPOND_BACKING_BUFFERED;
    return millpond_open(engine, path, &options, to);
}

static int shut_one(struct millpond_file *which) {
    int error = which->id ? millpond_close(*which) : 0;
    memset(which, 0, sizeof *which);
    return error ? fail("closing", error) : 0;
}

/* Writes back what waits, and gives everything up. */
static int shut(void) {
    int result = shut_one(&durable);
    result |= shut_one(&writer);
    result |= shut_one(&file);
    millpond_engine_destroy(engine);
    return result;
}

/* Opens the file for writing, if that is permitted and was not done before (N2). */
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

/* Makes the engine, and opens the file. */
static int start(const char *keeper) {
    struct millpond_engine_options options = {0};
    options.size = sizeof options;
    options.cache_bytes = (uint64_t)cache_bytes;
    options.keeper = keeper;
    int error = millpond_engine_create(&options, &engine);
    if (error)
        return fail("making a cache", error);
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
    /* nbdkit itself refuses writes of a client that may only read. */
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
            nbdkit_error("reading: %s: it has become shorter", path);
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

/* To the device: of any connection's writes (N1). */
static int plugin_flush(void *handle, uint32_t flags) {
    (void)handle;
    (void)flags;
    int error = millpond_sync_data(writer);
    return error ? fail("flushing", error) : 0;
}

/* What a change of space returns: an error, or that of a flush if the client wants it durable. */
static int changed(const char *what, int error, uint32_t flags) {
    if (error)
        return fail(what, error);
    return flags & NBDKIT_FLAG_FUA ? plugin_flush(NULL, 0) : 0;
}

/* A hint: where the file system has no holes, nothing is to be done. */
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
        /* Which may have to write zeros: not what a fast zero is. */
        if (flags & NBDKIT_FLAG_FAST_ZERO) {
            nbdkit_set_error(EOPNOTSUPP);
            return -1;
        }
        error = millpond_zero_range(writer, offset, count);
    }
    return changed("zeroing", error, flags);
}

/* A seek writes back what waits behind it, so holes are those of what was written, cached or not. */
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
        /* Nothing is added where a hole was made between the two seeks: the next turn finds it. */
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

/* Opens and closes database files, and the engine of the process. Rules cited here are in pages.h. */
#define _GNU_SOURCE
#include "database.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Descriptors that wait to be closed (P2). */
struct parked {
    struct parked *next;
    int descriptor;
    struct millpond_file file;
};

static struct {
    pthread_mutex_t lock;
    struct database *databases;
    struct parked *parked;
    struct millpond_engine engine;
} registry = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* A child of fork() must not use inherited connections (as SQLite requires), so it starts with empty state. */
static void forget(void) {
    pthread_mutex_init(&registry.lock, NULL);
    registry.databases = NULL;
    registry.parked = NULL;
    registry.engine.id = 0;
}

static void expect_forks(void) {
    pthread_atfork(NULL, NULL, forget);
}

/* P2. `registry.lock` is held. */
static void close_parked(void) {
    struct parked **at = &registry.parked;
    while (*at != NULL) {
        struct parked *parked = *at;
        struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
        /* Without F_OFD_GETLK there is no way to find other locks. */
        bool is_locked = fcntl(parked->descriptor, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
        if (is_locked) {
            at = &parked->next;
            continue;
        }
        *at = parked->next;
        if (parked->file.id != 0)
            millpond_close(parked->file);
        close(parked->descriptor);
        free(parked);
    }
}

/* Closes descriptors, now or later. Without memory for the list, they stay open. */
static void park(int descriptor, struct millpond_file file) {
    struct parked *parked = calloc(1, sizeof *parked);
    if (parked == NULL)
        return;
    *parked = (struct parked){registry.parked, descriptor, file};
    registry.parked = parked;
}

/* Opens a descriptor above the standard ones, which some programs write to by mistake. */
static int open_above(const char *path, int flags) {
    int low = open(path, flags | O_CLOEXEC);
    if (low < 0 || low > 2)
        return low;
    /* The low descriptor stays open, so that no other file gets its number, as in SQLite. */
    return fcntl(low, F_DUPFD_CLOEXEC, 3);
}

static uint64_t size_of_suffix(char suffix) {
    switch (suffix) {
    case 'k': case 'K': return 1 << 10;
    case 'm': case 'M': return 1 << 20;
    case 'g': case 'G': return 1 << 30;
    default: return 0;
    }
}

uint64_t pages_parse_size(const char *text) {
    char *end;
    unsigned long long number;
    uint64_t unit = 1;
    if (*text < '0' || *text > '9')
        return 0;
    errno = 0;
    number = strtoull(text, &end, 10);
    if (*end != 0)
        unit = size_of_suffix(*end++);
    return errno != 0 || *end != 0 || unit == 0 || number > INT64_MAX / unit ? 0 : number * unit;
}

/* No read-ahead, which would read without a lock (R2). Threads wait for each call anyway, so plain calls suffice. */
static int make_engine(uint64_t cache_bytes, struct millpond_engine *engine) {
    struct millpond_engine_options options = {0};
    options.size = sizeof options;
    options.cache_bytes = cache_bytes;
    options.backend = MILLPOND_BACKEND_THREADS;
    options.flags = MILLPOND_ENGINE_NO_READAHEAD;
    return millpond_engine_create(&options, engine);
}

static int make_registrys_engine(void) {
    const char *text = getenv("MILLPOND_SQLITE_CACHE");
    uint64_t bytes = 0;
    if (registry.engine.id != 0)
        return 0;
    if (text != NULL && (bytes = pages_parse_size(text)) == 0)
        return -EINVAL;
    return make_engine(bytes, &registry.engine);
}

/* Opens the file for the engine; false: it can't be cached, or with untorn blocks, for the reason in `error`. */
static bool attach(struct database *database, const char *path, bool to_write, int *error) {
    struct millpond_open_options options = {0};
    struct millpond_file file = {0};
    struct stat stat;
    int descriptor = open_above(path, to_write ? O_RDWR : O_RDONLY), opened = -EBUSY;
    if (descriptor < 0)
        return false;
    options.size = sizeof options;
    options.flags = to_write ? O_RDWR : O_RDONLY;
    options.untorn_bytes = database->untorn_bytes;
    options.backing = database->untorn_bytes != 0 ? MILLPOND_BACKING_DIRECT : MILLPOND_BACKING_BUFFERED;
    if (fstat(descriptor, &stat) != 0 || stat.st_dev != database->device ||
        stat.st_ino != database->inode ||
        (opened = millpond_open_descriptor(database->engine, descriptor, &options, &file)) != 0) {
        if (database->untorn_bytes != 0)
            *error = opened;
        park(descriptor, file);
        return false;
    }
    /* SQLite's locks already order reads and writes. */
    millpond_advise(file, 0, 0, MILLPOND_ADVICE_TORN_READS);
    database->descriptors[to_write] = descriptor;
    database->files[to_write] = file;
    return true;
}

static struct database *find(const struct stat *stat) {
    struct database *at = registry.databases;
    while (at != NULL && (at->device != stat->st_dev || at->inode != stat->st_ino))
        at = at->next;
    return at;
}

/* Call after the last connection is closed. */
static void forget_database(struct database *database) {
    for (int i = 0; i < 2; i++)
        if (database->descriptors[i] >= 0)
            park(database->descriptors[i], database->files[i]);
    if (database->has_own_engine)
        millpond_engine_destroy(database->engine); /* goes with its files */
    pthread_mutex_destroy(&database->lock);
    free(database);
}

static struct database *make_database(
    const struct stat *stat, uint64_t cache_bytes, uint32_t untorn_bytes, int *error) {
    struct database *database = calloc(1, sizeof *database);
    if (database == NULL)
        return NULL;
    *error = cache_bytes != 0 ? make_engine(cache_bytes, &database->engine) : make_registrys_engine();
    if (*error != 0) {
        free(database);
        return NULL;
    }
    database->has_own_engine = cache_bytes != 0;
    database->untorn_bytes = untorn_bytes;
    if (!database->has_own_engine)
        database->engine = registry.engine;
    database->device = stat->st_dev;
    database->inode = stat->st_ino;
    database->descriptors[0] = database->descriptors[1] = -1;
    pthread_mutex_init(&database->lock, NULL);
    set_seen(database, 0, UNKNOWN);
    return database;
}

static bool is_still(const char *path, const struct stat *before) {
    struct stat now;
    return stat(path, &now) == 0 && now.st_dev == before->st_dev && now.st_ino == before->st_ino;
}

int pages_open(struct holder *holder, const char *path, bool to_write, uint64_t cache_bytes, uint32_t untorn_bytes,
    bool (*is_same)(void *file), void *file) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct database *database, *made = NULL;
    struct stat before;
    int error = 0;
    memset(holder, 0, sizeof *holder);
    pthread_once(&once, expect_forks);
    /* Both SQLite's descriptor and the new one refer to the file of that name. */
    if (stat(path, &before) != 0 || !S_ISREG(before.st_mode) || !is_same(file))
        return 0;
    pthread_mutex_lock(&registry.lock);
    database = find(&before);
    if (database == NULL)
        database = made = make_database(&before, cache_bytes, untorn_bytes, &error);
    if (database != NULL && untorn_bytes != 0 && database->untorn_bytes != untorn_bytes) {
        error = -EINVAL; /* open already, without */
    } else if (database != NULL) {
        bool is_there = database->files[1].id != 0 || (!to_write && database->files[0].id != 0);
        bool can = (is_there || attach(database, path, to_write, &error)) && is_still(path, &before) && is_same(file);
        if (can) {
            database->users++;
            holder->untorn_bytes = database->untorn_bytes;
            holder->database = database;
            holder->to_write = to_write ? database->files[1] : (struct millpond_file){0};
            holder->to_read = database->files[database->files[0].id == 0];
        } else if (made != NULL) {
            forget_database(made);
            made = NULL;
        }
        if (made != NULL) {
            made->next = registry.databases;
            registry.databases = made;
        }
    }
    close_parked();
    pthread_mutex_unlock(&registry.lock);
    return error;
}

void pages_close(struct holder *holder) {
    struct database *database = holder->database, **at;
    if (database == NULL)
        return;
    pages_index_unmapping(holder);
    pages_unlocking(holder, PAGES_NONE);
    pthread_mutex_lock(&registry.lock);
    if (--database->users == 0) {
        for (at = &registry.databases; *at != NULL; at = &(*at)->next)
            if (*at == database) {
                *at = database->next;
                break;
            }
        forget_database(database);
    }
    close_parked();
    pthread_mutex_unlock(&registry.lock);
    holder->database = NULL;
}

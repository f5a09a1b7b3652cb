/* See pages.h, whose rules are cited here. */
#define _GNU_SOURCE
#include "pages.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    HEADER_BYTES = 100, /* of a database */
    VERSIONS_AT = 18, /* two bytes of it: 1 is rollback journal, 2 WAL */
};

/* Words of the wal-index: its header, twice, and what is known of checkpoints. */
enum { INDEX_VERSION = 0, INDEX_FRAMES = 4, INDEX_SALTS = 8, INDEX_COPY = 12, INDEX_BACKFILLED = 24 };
#define INDEX_VERSION_KNOWN 3007000u
/* nBackfill is the number of a frame, which is less. */
#define UNKNOWN UINT32_MAX

/* The file, as the kernel tells of it. */
struct moment {
    off_t len;
    struct timespec changed;
};

/* R3. */
struct stamp {
    bool is_known;
    struct moment moment;
    unsigned char header[HEADER_BYTES];
};

/* Of the wal-index; belongs together (W2). */
struct wal {
    uint64_t salts;
    uint32_t frames, backfilled;
};

struct database {
    struct database *next;
    dev_t device;
    ino_t inode;
    unsigned users;
    struct millpond_engine engine;
    bool has_own_engine;
    /* For reading, and for both. */
    int descriptors[2];
    struct millpond_file files[2];

    pthread_mutex_t lock; /* of what follows */
    unsigned shared; /* connections that hold SHARED or more */
    unsigned sole; /* CKPT and EXCLUSIVE that connections hold (W3) */
    atomic_uint mappers; /* connections that have mapped the wal-index */
    const volatile uint32_t *index; /* while there are any */
    struct stamp stamp;
    uint64_t restart_from; /* W4: the salts */
    bool may_restart;
    struct moment empty; /* W5 */
    bool empty_is_old;
    unsigned long drops;
    /* Looked at without the lock. */
    atomic_bool is_usable; /* false: pages could not be dropped */
    atomic_bool has_written, is_uncommitted, is_wal;
    /* `seen` (W1). Written in this order and read in the other, so who reads new salts reads what came with
     * them, or later. With old salts and a new number of frames, what is cached is as new as the number. */
    _Atomic uint32_t seen_backfilled;
    _Atomic uint64_t seen_salts;
};

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

/* A child of fork() has no use for what it inherits (nor may it, says SQLite), and can begin anew. */
static void forget(void) {
    pthread_mutex_init(&registry.lock, NULL);
    registry.databases = NULL;
    registry.parked = NULL;
    registry.engine.id = 0;
}

static void expect_forks(void) {
    pthread_atfork(NULL, NULL, forget);
}

/* What the file is. */

static bool get_moment(const struct database *database, struct moment *moment) {
    struct stat stat;
    int fd = database->descriptors[database->descriptors[0] < 0];
    memset(moment, 0, sizeof *moment);
    if (fstat(fd, &stat) != 0)
        return false;
    moment->len = stat.st_size;
    moment->changed = stat.st_mtim;
    return true;
}

static bool same_moment(const struct moment *a, const struct moment *b) {
    return a->len == b->len && a->changed.tv_sec == b->changed.tv_sec &&
        a->changed.tv_nsec == b->changed.tv_nsec;
}

/* The header as the kernel has it (R3, R5). */
static struct stamp get_stamp(struct database *database) {
    struct stamp now = {0};
    int fd = database->descriptors[database->descriptors[0] < 0];
    ssize_t len = pread(fd, now.header, HEADER_BYTES, 0);
    const unsigned char *versions = now.header + VERSIONS_AT;
    bool is_whole = len == HEADER_BYTES && get_moment(database, &now.moment);
    atomic_store(&database->is_wal, is_whole && (versions[0] == 2 || versions[1] == 2));
    now.is_known = is_whole && versions[0] == 1 && versions[1] == 1;
    return now;
}

static void set_seen(struct database *database, uint64_t salts, uint32_t backfilled) {
    atomic_store_explicit(&database->seen_backfilled, backfilled, memory_order_release);
    atomic_store_explicit(&database->seen_salts, salts, memory_order_release);
}

/* Drops the pages from `from` on, and adopts the file's length. */
static bool adopt(struct database *database, int64_t from) {
    struct millpond_file file = database->files[database->files[0].id == 0];
    if (millpond_invalidate(file, (uint64_t)from, (uint64_t)(INT64_MAX - from)) == 0)
        return true;
    atomic_store(&database->is_usable, false);
    set_seen(database, 0, UNKNOWN);
    return false;
}

/* Drops all pages. `database->lock` is held. */
static void drop(struct database *database) {
    database->drops++;
    if (adopt(database, 0))
        atomic_store(&database->is_usable, true);
}

/* The wal-index. */

static uint32_t load(const volatile uint32_t *word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static uint64_t load_salts(const volatile uint32_t *index) {
    return (uint64_t)load(index + INDEX_SALTS) << 32 | load(index + INDEX_SALTS + 1);
}

/* Reads values that belong together; false: now there are none (W2). */
static bool get_wal(const volatile uint32_t *index, struct wal *wal) {
    uint32_t header[INDEX_COPY];
    for (int i = 0; i < INDEX_COPY; i++) {
        header[i] = load(index + i);
        if (header[i] != load(index + INDEX_COPY + i))
            return false;
    }
    wal->backfilled = load(index + INDEX_BACKFILLED);
    for (int i = 0; i < INDEX_COPY; i++)
        if (header[i] != load(index + i))
            return false;
    wal->frames = header[INDEX_FRAMES];
    wal->salts = (uint64_t)header[INDEX_SALTS] << 32 | header[INDEX_SALTS + 1];
    return header[INDEX_VERSION] == INDEX_VERSION_KNOWN && wal->backfilled <= wal->frames;
}

static bool is_seen(const struct database *database, const struct wal *wal) {
    return atomic_load(&database->seen_salts) == wal->salts &&
        atomic_load(&database->seen_backfilled) == wal->backfilled;
}

/* Notes values of which the pages are current. */
static void note(struct database *database, const struct wal *wal) {
    if (atomic_load(&database->is_usable))
        set_seen(database, wal->salts, wal->backfilled);
    else
        set_seen(database, 0, UNKNOWN);
}

/* W5. To be called before pages are dropped. */
static void note_empty(struct database *database) {
    struct timespec now;
    database->empty_is_old = get_moment(database, &database->empty) &&
        clock_gettime(CLOCK_REALTIME, &now) == 0 &&
        now.tv_sec - database->empty.changed.tv_sec > 1;
}

/* Whether pages may be used, by the wal-index; makes it so where that is possible. `database->lock` is
 * held, and `database->index` is there. */
static bool look(struct database *database) {
    struct wal now;
    if (database->sole > 0)
        return atomic_load(&database->is_usable);
    if (!get_wal(database->index, &now))
        return false;
    if (is_seen(database, &now))
        return atomic_load(&database->is_usable);
    if (database->may_restart && atomic_load(&database->seen_salts) == database->restart_from &&
        now.salts != database->restart_from && now.salts != 0) {
        set_seen(database, now.salts, 0);
        if (now.backfilled == 0)
            return atomic_load(&database->is_usable);
    }
    if (now.salts == 0)
        note_empty(database);
    drop(database);
    note(database, &now);
    return atomic_load(&database->is_usable);
}

/* Whether pages may be used for this connection. */
static bool may_use(struct holder *holder) {
    struct database *database = holder->database;
    const volatile uint32_t *index = holder->index;
    bool may;
    if (holder->level == PAGES_NONE) /* R1 */
        return false;
    if (index != NULL) {
        uint64_t salts = atomic_load_explicit(&database->seen_salts, memory_order_acquire);
        uint32_t backfilled = atomic_load_explicit(&database->seen_backfilled, memory_order_acquire);
        if (load_salts(index) == salts && load(index + INDEX_BACKFILLED) == backfilled)
            return true;
    } else if (atomic_load_explicit(&database->mappers, memory_order_acquire) == 0) {
        return atomic_load_explicit(&database->is_usable, memory_order_acquire); /* R2 */
    }
    pthread_mutex_lock(&database->lock);
    may = database->index != NULL ? look(database) : atomic_load(&database->is_usable);
    pthread_mutex_unlock(&database->lock);
    return may;
}

bool pages_read(struct holder *holder, void *memory, int len, int64_t offset) {
    if (holder->database == NULL || !may_use(holder))
        return false;
    /* Less: the file may be longer than the engine knows, if another process has checkpointed. */
    return millpond_read(holder->to_read, memory, (size_t)len, (uint64_t)offset) == len;
}

int pages_write(struct holder *holder, const void *memory, int len, int64_t offset) {
    struct database *database = holder->database;
    const unsigned char *bytes = memory;
    if (database == NULL || holder->to_write.id == 0)
        return -1;
    pages_resizing(holder);
    if (offset <= VERSIONS_AT && offset + len >= VERSIONS_AT + 2) {
        const unsigned char *versions = bytes + (VERSIONS_AT - offset);
        atomic_store(&database->is_wal, versions[0] == 2 || versions[1] == 2);
    }
    while (len > 0) {
        int64_t moved = millpond_write(holder->to_write, bytes, (size_t)len, (uint64_t)offset);
        if (moved <= 0)
            return moved == 0 ? ENOSPC : (int)-moved;
        bytes += moved;
        offset += moved;
        len -= (int)moved;
    }
    return 0;
}

void pages_resizing(struct holder *holder) {
    if (holder->database == NULL)
        return;
    atomic_store(&holder->database->has_written, true);
    atomic_store(&holder->database->is_uncommitted, true);
}

void pages_resized(struct holder *holder, int64_t from) {
    if (holder->database != NULL)
        adopt(holder->database, from);
}

/* Locks. */

/* The connection has got CKPT or EXCLUSIVE, or is about to give it up. */
static void begin_sole(struct database *database) {
    if (database->sole > 0) {
        database->sole++;
        return;
    }
    /* Without a look (W2) nothing is known. */
    if (database->index == NULL ? atomic_load(&database->is_wal) : !look(database))
        drop(database);
    else if (database->index != NULL) /* a checkpoint that died may have changed the length */
        adopt(database, INT64_MAX);
    database->sole++;
}

static void end_sole(struct database *database) {
    struct wal now;
    if (--database->sole > 0 || database->index == NULL)
        return;
    if (get_wal(database->index, &now)) {
        if (now.salts == 0)
            note_empty(database);
        note(database, &now);
    } else {
        set_seen(database, 0, UNKNOWN);
    }
}

void pages_locked(struct holder *holder, enum pages_level level) {
    struct database *database = holder->database;
    if (level <= holder->level || database == NULL)
        return;
    pthread_mutex_lock(&database->lock);
    if (holder->level == PAGES_NONE && database->shared++ == 0) {
        struct stamp now = get_stamp(database), *then = &database->stamp;
        if (!now.is_known || !then->is_known || !atomic_load(&database->is_usable) ||
            !same_moment(&now.moment, &then->moment) ||
            memcmp(now.header, then->header, HEADER_BYTES) != 0)
            drop(database);
        *then = now;
    }
    if (level == PAGES_EXCLUSIVE)
        begin_sole(database);
    holder->level = level;
    pthread_mutex_unlock(&database->lock);
}

void pages_unlocking(struct holder *holder, enum pages_level level) {
    struct database *database = holder->database;
    if (level >= holder->level || database == NULL)
        return;
    pthread_mutex_lock(&database->lock);
    if (holder->level == PAGES_EXCLUSIVE)
        end_sole(database);
    if (level == PAGES_NONE && --database->shared == 0) {
        if (atomic_load(&database->is_uncommitted)) /* R4 */
            database->stamp.is_known = false;
        else if (atomic_load(&database->has_written))
            database->stamp = get_stamp(database);
        atomic_store(&database->is_uncommitted, false);
        atomic_store(&database->has_written, false);
    }
    holder->level = level;
    pthread_mutex_unlock(&database->lock);
}

void pages_committed(struct holder *holder) {
    if (holder->database != NULL)
        atomic_store(&holder->database->is_uncommitted, false);
}

void pages_index_mapped(struct holder *holder, const volatile void *index) {
    struct database *database = holder->database;
    if (database == NULL || holder->index != NULL)
        return;
    pthread_mutex_lock(&database->lock);
    if (atomic_load(&database->mappers) == 0) { /* W6 */
        database->index = index;
        set_seen(database, 0, UNKNOWN);
    }
    atomic_fetch_add(&database->mappers, 1);
    pthread_mutex_unlock(&database->lock);
    holder->index = index;
}

void pages_index_unmapping(struct holder *holder) {
    struct database *database = holder->database;
    if (database == NULL || holder->index == NULL)
        return;
    pages_index_unlocking(holder, PAGES_WRITE | PAGES_CHECKPOINT);
    holder->index = NULL;
    pthread_mutex_lock(&database->lock);
    if (atomic_load(&database->mappers) == 1) { /* W6 */
        database->index = NULL;
        drop(database);
    }
    atomic_fetch_sub(&database->mappers, 1);
    pthread_mutex_unlock(&database->lock);
}

void pages_index_locked(struct holder *holder, unsigned locks) {
    struct database *database = holder->database;
    struct wal now;
    if (database == NULL)
        return;
    if (locks == PAGES_READ && atomic_load(&database->seen_salts) != 0)
        return; /* W5 is of others */
    pthread_mutex_lock(&database->lock);
    if ((locks & PAGES_CHECKPOINT) && !holder->has_checkpoint) {
        holder->has_checkpoint = true;
        begin_sole(database);
    }
    if ((locks & PAGES_WRITE) && database->index != NULL && get_wal(database->index, &now)) {
        database->may_restart = is_seen(database, &now) && now.backfilled == now.frames;
        database->restart_from = now.salts;
    }
    if ((locks & PAGES_READ) && database->sole == 0) {
        struct moment moment;
        bool is_same = get_moment(database, &moment) && same_moment(&moment, &database->empty);
        if (!is_same || !database->empty_is_old)
            set_seen(database, 0, UNKNOWN);
    }
    pthread_mutex_unlock(&database->lock);
}

void pages_index_unlocking(struct holder *holder, unsigned locks) {
    struct database *database = holder->database;
    if (database == NULL || !(locks & (PAGES_WRITE | PAGES_CHECKPOINT)))
        return;
    pthread_mutex_lock(&database->lock);
    if ((locks & PAGES_WRITE) && database->may_restart) {
        if (database->index != NULL)
            look(database);
        database->may_restart = false;
    }
    if ((locks & PAGES_CHECKPOINT) && holder->has_checkpoint) {
        holder->has_checkpoint = false;
        end_sole(database);
    }
    pthread_mutex_unlock(&database->lock);
}

/* Files. */

/* P2. `registry.lock` is held. */
static void close_parked(void) {
    struct parked **at = &registry.parked;
    while (*at != NULL) {
        struct parked *parked = *at;
        struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
        /* Where that is not known, nobody can be asked. */
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

/* Closes them, now or later. Where there is no memory, they stay open. */
static void park(int descriptor, struct millpond_file file) {
    struct parked *parked = calloc(1, sizeof *parked);
    if (parked == NULL)
        return;
    *parked = (struct parked){registry.parked, descriptor, file};
    registry.parked = parked;
}

/* A descriptor that is not one of the standard ones, which careless programs write to. */
static int open_above(const char *path, int flags) {
    int low = open(path, flags | O_CLOEXEC);
    if (low < 0 || low > 2)
        return low;
    /* The low one stays open, so that nothing else gets its number: SQLite does that, too. */
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

/* Read-ahead would read without a lock (R2). What waits here waits for a call, so plain calls do. */
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

/* Opens the file for the engine; false: it can't be cached. */
static bool attach(struct database *database, const char *path, bool to_write) {
    struct millpond_open_options options = {0};
    struct millpond_file file = {0};
    struct stat stat;
    int descriptor = open_above(path, to_write ? O_RDWR : O_RDONLY);
    if (descriptor < 0)
        return false;
    options.size = sizeof options;
    options.flags = to_write ? O_RDWR : O_RDONLY;
    if (fstat(descriptor, &stat) != 0 || stat.st_dev != database->device ||
        stat.st_ino != database->inode ||
        millpond_open_descriptor(database->engine, descriptor, &options, &file) != 0) {
        park(descriptor, file);
        return false;
    }
    /* SQLite's locks do what is needed. */
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

/* The last connection is closed. */
static void forget_database(struct database *database) {
    for (int i = 0; i < 2; i++)
        if (database->descriptors[i] >= 0)
            park(database->descriptors[i], database->files[i]);
    if (database->has_own_engine)
        millpond_engine_destroy(database->engine); /* goes with its files */
    pthread_mutex_destroy(&database->lock);
    free(database);
}

static struct database *make_database(const struct stat *stat, uint64_t cache_bytes, int *error) {
    struct database *database = calloc(1, sizeof *database);
    if (database == NULL)
        return NULL;
    *error = cache_bytes != 0 ? make_engine(cache_bytes, &database->engine) : make_registrys_engine();
    if (*error != 0) {
        free(database);
        return NULL;
    }
    database->has_own_engine = cache_bytes != 0;
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

int pages_open(struct holder *holder, const char *path, bool to_write, uint64_t cache_bytes,
    bool (*is_same)(void *file), void *file) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct database *database, *made = NULL;
    struct stat before;
    int error = 0;
    memset(holder, 0, sizeof *holder);
    pthread_once(&once, expect_forks);
    /* What SQLite has open has that name, and so has what we open. */
    if (stat(path, &before) != 0 || !S_ISREG(before.st_mode) || !is_same(file))
        return 0;
    pthread_mutex_lock(&registry.lock);
    database = find(&before);
    if (database == NULL)
        database = made = make_database(&before, cache_bytes, &error);
    if (database != NULL) {
        bool is_there = database->files[1].id != 0 || (!to_write && database->files[0].id != 0);
        bool can = (is_there || attach(database, path, to_write)) && is_still(path, &before) && is_same(file);
        if (can) {
            database->users++;
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

void pages_tell(struct holder *holder, char *text, size_t bytes) {
    struct millpond_stats stats = {0};
    stats.size = sizeof stats;
    if (holder->database == NULL || millpond_engine_stats(holder->database->engine, &stats) != 0) {
        snprintf(text, bytes, "not cached");
        return;
    }
    snprintf(text, bytes, "hits %llu, misses %llu, dropped %lu times, memory %llu",
        (unsigned long long)stats.hits, (unsigned long long)stats.misses, holder->database->drops,
        (unsigned long long)stats.memory_bytes);
}

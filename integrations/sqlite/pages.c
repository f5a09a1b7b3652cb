/* Decides when cached pages may be used. Rules cited here are in pages.h. */
#define _GNU_SOURCE
#include "database.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Two bytes in a database's header: 1 means rollback journal, 2 means WAL. */
enum { VERSIONS_AT = 18 };

/* Words of the wal-index: its header, twice, and the checkpoint information. */
enum { INDEX_VERSION = 0, INDEX_FRAMES = 4, INDEX_SALTS = 8, INDEX_COPY = 12, INDEX_BACKFILLED = 24 };
#define INDEX_VERSION_KNOWN 3007000u

/* Values of the wal-index that belong together (W2). */
struct wal {
    uint64_t salts;
    uint32_t frames, backfilled;
};

/* Length and times of the file. */

static bool get_moment(const struct database *database, struct moment *moment) {
    struct stat stat;
    int fd = database->descriptors[database->descriptors[0] < 0];
    memset(moment, 0, sizeof *moment);
    if (fstat(fd, &stat) != 0)
        return false;
    moment->len = stat.st_size;
    moment->written = stat.st_mtim;
    moment->changed = stat.st_ctim;
    return true;
}

static bool same_time(struct timespec a, struct timespec b) {
    return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

static bool same_moment(const struct moment *a, const struct moment *b) {
    return a->len == b->len && same_time(a->written, b->written) && same_time(a->changed, b->changed);
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

/* Drops the pages from `from` on, and takes over the file's length. */
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

/* Reads values that belong together; false: at this moment there are none (W2). */
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

/* Records the values for which the pages are current. */
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
        now.tv_sec - database->empty.written.tv_sec > 1 &&
        now.tv_sec - database->empty.changed.tv_sec > 1;
}

/* Whether pages may be used, by the wal-index; drops stale pages first if necessary. `database->lock` is held, and
 * `database->index` is set. */
static bool look(struct database *database) {
    struct wal now;
    if (database->sole > 0)
        return atomic_load(&database->is_usable);
    if (!get_wal(database->index, &now))
        return false;
    if (is_seen(database, &now))
        return atomic_load(&database->is_usable);
    if (database->may_restart && atomic_load(&database->seen_backfilled) != UNKNOWN &&
        atomic_load(&database->seen_salts) == database->restart_from &&
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
        bool others_may_write = atomic_load(&database->is_wal) && holder->level != PAGES_EXCLUSIVE; /* W6 */
        return !others_may_write && atomic_load(&database->is_usable);
    }
    pthread_mutex_lock(&database->lock);
    may = database->index != NULL && look(database);
    pthread_mutex_unlock(&database->lock);
    return may;
}

bool pages_read(struct holder *holder, void *memory, int len, int64_t offset) {
    if (holder->database == NULL || !may_use(holder))
        return false;
    /* A short read: the file may be longer than the engine knows, if another process has checkpointed. */
    return millpond_read(holder->to_read, memory, (size_t)len, (uint64_t)offset) == len;
}

int64_t pages_len(struct holder *holder) {
    struct database *database = holder->database;
    /* In WAL mode another connection may checkpoint. */
    if (database == NULL || holder->level == PAGES_NONE || atomic_load(&database->mappers) != 0 ||
        atomic_load(&database->is_wal) || !atomic_load(&database->is_usable))
        return -1;
    return millpond_len(holder->to_read);
}

int pages_write(struct holder *holder, const void *memory, int len, int64_t offset) {
    struct database *database = holder->database;
    const unsigned char *bytes = memory;
    int64_t from = offset;
    if (database == NULL || holder->to_write.id == 0)
        return -1;
    pages_resizing(holder);
    if (offset <= VERSIONS_AT && offset + len >= VERSIONS_AT + 2) {
        const unsigned char *versions = bytes + (VERSIONS_AT - offset);
        atomic_store(&database->is_wal, versions[0] == 2 || versions[1] == 2);
    }
    while (len > 0) {
        int64_t moved = millpond_write(holder->to_write, bytes, (size_t)len, (uint64_t)offset);
        if (moved <= 0) {
            adopt(database, from); /* the kernel may have written a part */
            return moved == 0 ? ENOSPC : (int)-moved;
        }
        bytes += moved;
        offset += moved;
        len -= (int)moved;
    }
    return 0;
}

void pages_resizing(struct holder *holder) {
    if (holder->database != NULL)
        atomic_store(&holder->database->is_uncommitted, true);
}

void pages_resized(struct holder *holder, int64_t from) {
    if (holder->database != NULL)
        adopt(holder->database, from);
}

/* Locks. */

/* Call after the connection got CKPT or EXCLUSIVE, and before it releases the lock. */
static void begin_sole(struct database *database) {
    if (database->sole > 0) {
        database->sole++;
        return;
    }
    /* Without consistent values (W2), the state of the pages is unknown. */
    if (database->index == NULL ? atomic_load(&database->is_wal) : !look(database))
        drop(database);
    else if (database->index != NULL) /* an interrupted checkpoint may have changed the length */
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
    if (level == PAGES_NONE && --database->shared == 0 &&
        atomic_load(&database->is_uncommitted)) { /* R4 */
        database->stamp.is_known = false;
        atomic_store(&database->is_uncommitted, false);
    }
    holder->level = level;
    pthread_mutex_unlock(&database->lock);
}

void pages_committed(struct holder *holder) {
    struct database *database = holder->database;
    if (database == NULL || !atomic_load(&database->is_uncommitted))
        return;
    pthread_mutex_lock(&database->lock);
    if (atomic_load(&database->mappers) == 0)
        database->stamp = get_stamp(database);
    else
        database->stamp.is_known = false; /* R5 */
    atomic_store(&database->is_uncommitted, false);
    pthread_mutex_unlock(&database->lock);
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
        return; /* W5 concerns other connections */
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

void pages_describe_stats(struct holder *holder, char *text, size_t bytes) {
    struct millpond_stats stats = {0};
    unsigned long drops;
    stats.size = sizeof stats;
    if (holder->database == NULL || millpond_engine_stats(holder->database->engine, &stats) != 0) {
        snprintf(text, bytes, "not cached");
        return;
    }
    pthread_mutex_lock(&holder->database->lock);
    drops = holder->database->drops;
    pthread_mutex_unlock(&holder->database->lock);
    snprintf(text, bytes, "hits %llu, misses %llu, dropped %lu times, memory %llu",
        (unsigned long long)stats.hits, (unsigned long long)stats.misses, drops,
        (unsigned long long)stats.memory_bytes);
}

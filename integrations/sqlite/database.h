/* A database file of this process: shared by pages.c, which says when its pages may be used, and files.c, which
 * opens and closes it. Rules are those of pages.h. */
#ifndef MILLPONDDB_DATABASE_H
#define MILLPONDDB_DATABASE_H

#include "pages.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>
#include <time.h>

/* Of a database. */
enum { HEADER_BYTES = 100 };

/* nBackfill is the number of a frame, which is less. */
#define UNKNOWN UINT32_MAX

/* The file, as the kernel tells of it. */
struct moment {
    off_t len;
    struct timespec written, changed; /* programs can set the first one */
};

/* R3. */
struct stamp {
    bool is_known;
    struct moment moment;
    unsigned char header[HEADER_BYTES];
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
    atomic_bool is_uncommitted, is_wal;
    /* `seen` (W1). Written in this order and read in the other, so who reads new salts reads what came with
     * them, or later. With old salts and a new number of frames, what is cached is as new as the number. */
    _Atomic uint32_t seen_backfilled;
    _Atomic uint64_t seen_salts;
};

static inline void set_seen(struct database *database, uint64_t salts, uint32_t backfilled) {
    atomic_store_explicit(&database->seen_backfilled, backfilled, memory_order_release);
    atomic_store_explicit(&database->seen_salts, salts, memory_order_release);
}

#endif

/* An open database file of this process. pages.c decides when its pages may be used; files.c opens and closes it. The rules
 * are in pages.h. */
#ifndef MILLPONDDB_DATABASE_H
#define MILLPONDDB_DATABASE_H

#include "pages.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>
#include <time.h>

/* Size of a database's header. */
enum { HEADER_BYTES = 100 };

/* No valid nBackfill, which is a frame number and smaller. */
#define UNKNOWN UINT32_MAX

/* Length and times of the file, from the kernel. */
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
    uint32_t untorn_bytes; /* U1; 0: none */
    /* Opened for reading, and for reading and writing. */
    int descriptors[2];
    struct millpond_file files[2];

    pthread_mutex_t lock; /* protects the fields up to `drops` */
    unsigned shared; /* connections that hold SHARED or more */
    unsigned sole; /* number of CKPT and EXCLUSIVE locks that connections hold (W3) */
    atomic_uint mappers; /* connections that have mapped the wal-index */
    const volatile uint32_t *index; /* set while `mappers` is not 0 */
    struct stamp stamp;
    uint64_t restart_from; /* W4: the salts */
    bool may_restart;
    struct moment empty; /* W5 */
    bool empty_is_old;
    unsigned long drops;
    /* Read without the lock. */
    atomic_bool is_usable; /* false: pages could not be dropped */
    atomic_bool is_uncommitted, is_wal;
    /* `seen` (W1). Written in this order and read in the reverse order. So a reader that sees new salts sees their number of
     * frames or a later one. With old salts and a new number, the cached pages are as new as the number. */
    _Atomic uint32_t seen_backfilled;
    _Atomic uint64_t seen_salts;
};

static inline void set_seen(struct database *database, uint64_t salts, uint32_t backfilled) {
    atomic_store_explicit(&database->seen_backfilled, backfilled, memory_order_release);
    atomic_store_explicit(&database->seen_salts, salts, memory_order_release);
}

#endif

/* The cached pages of a database file, and the rules for their use.
 *
 * SQLite's unix VFS opens, locks and syncs files and shares memory. Only the bytes of a database's main file are read from
 * Millpond's cache, and written through it to the kernel before the write returns. So the kernel's file is always up to date,
 * and one property needs an argument: a cached page is not used after another program has changed the file.
 *
 * *Cache connections* are the connections of this process with this VFS. All share one `database` for each file (inode). An
 * *outsider* is any other connection: of another process with any VFS, or of this process with another VFS.
 *
 * A page is CURRENT if it has the bytes of the file, and STALE otherwise. The arguments use SQLite's file formats (database
 * header, wal-index) and its locking protocol, which all versions share.
 *
 * Rollback journal. A connection that changes the file holds EXCLUSIVE, while no other connection holds SHARED.
 *  - R1. A connection without a lock reads from the kernel. (SQLite reads the header in this way before it locks; with
 *    nolock=1 and immutable=1, all reads are such.)
 *  - R2. While a cache connection holds SHARED or more, no outsider changes the file. Pages that are CURRENT when the first
 *    cache connection gets SHARED stay CURRENT until the last one releases it. There is no read-ahead, so no read of the file
 *    runs outside of this time.
 *  - R3. When the first cache connection has got SHARED, and when a transaction of a cache connection commits, the header is
 *    recorded (`stamp`): the first 100 bytes, the length, mtime and ctime. (`cp -p` of another copy into the file copies its
 *    counter and its mtime, but not its ctime.) When a first cache connection gets SHARED again, the kernel's values are
 *    compared with the stamp, and if they differ all pages are dropped. Equal headers mean CURRENT pages: each transaction
 *    that commits increments the change counter in the header while it holds EXCLUSIVE. A transaction that does not commit is
 *    rolled back by the next connection, which finds its journal before it reads. SQLite's own page cache, which outlives
 *    locks, relies on the same.
 *  - R4. So the cache must not contain pages of a transaction that did not commit, as only the file may be rolled back. If a
 *    write of a cache connection was not followed by SQLite's notice that the transaction is committed
 *    (SQLITE_FCNTL_COMMIT_PHASETWO, after the journal is deleted), there is no stamp when the last cache connection releases
 *    SHARED. This covers a transaction that was rolled back, the journal of a process that died, and a failed rollback.
 *  - R5. A header in WAL format, or one that can't be read whole, gives no stamp, as the counter means less in WAL mode.
 *
 * WAL. Connections hold SHARED for long, several at the same time. Only the holder of CKPT, in the wal-index, changes the
 * file: it copies frames from the WAL into the file (a checkpoint). The first `nBackfill` frames are in the file when the
 * wal-index says so. A connection that restarts the WAL holds WRITE and has all frames copied; it changes the salts and then
 * sets `nBackfill` to 0. A reader reads a page from the file only if the WAL has no frame of it between the `nBackfill` that
 * the reader found at its start and the reader's mark. No checkpoint copies frames beyond the mark of a reader.
 *  - W1. Pages are used if the salts and `nBackfill` in the wal-index equal the recorded ones (`seen`). This is checked before
 *    each read, by three loads from memory. If they differ, all pages are dropped, and the values read before the drop are
 *    recorded. So cached pages were in the file when all frames up to `seen` were copied. A concurrent read of the file
 *    completes before its pages are dropped. A reader's `nBackfill` is no later than the one that the check finds. It reads
 *    pages with later frames from the WAL; the cached page may have old or partially written bytes of these. (SQLite's pages
 *    may be smaller than Millpond's, so a cached page may contain several of them.)
 *  - W2. Values are recorded only if they belong together: both copies of the wal-index's header are equal, before and after
 *    `nBackfill` was read, and it is not greater than the header's number of frames. This excludes the moment of a restart
 *    between the new salts and the new `nBackfill`; in such moments reads go to the kernel.
 *  - W3. While a cache connection holds CKPT or EXCLUSIVE, pages are used without a check, as no outsider changes the file.
 *    The pages are checked as in W1 when it gets the lock, and the values are recorded when it releases the lock.
 *  - W4. When a cache connection gets WRITE, `seen` is current, and all frames have been copied: if it then restarts the WAL
 *    (no other connection can), no frame has been copied since, and `seen` becomes the new salts and 0.
 *  - W5. Salts are 0 if nothing was written to the WAL since the wal-index was created. A process that crashes while it
 *    writes the wal-index's header, after it emptied the WAL, can restore them. So with salts of 0, the length and the times
 *    of the file are compared as well when a read starts (its lock in the wal-index is granted). Times less than a second
 *    old prove nothing, because of the granularity of file system clocks.
 *  - W6. When the first cache connection maps the wal-index, and after the last one has unmapped it, the state of the pages is
 *    unknown: they are dropped. While no cache connection has mapped it and the header says WAL, reads go to the kernel:
 *    SQLite reads the first page to learn that it should map it, and with readonly_shm=1 it may continue without. EXCLUSIVE
 *    suffices, however (locking_mode=EXCLUSIVE): pages are dropped when it is granted.
 *
 * POSIX locks belong to the process, and all are released when it closes any descriptor of the file. The unix VFS handles its
 * own descriptors. The cache's descriptors are opened once for a file, kept, and closed only if
 *  - P1. the last cache connection is closed, and so holds no lock, and
 *  - P2. no lock exists on the file (F_OFD_GETLK, which also reports locks of this process). Otherwise they are kept, and
 *    checked again when a file is opened or closed.
 * A connection of another VFS in the same process that locks between the check and the close loses its lock. So a process
 * should open a database with one VFS only.
 *
 * Untorn pages (millpond_untorn=SIZE).
 *  - U1. Every write of such a file by a cache connection goes through the cache's file, which writes whole blocks of that size
 *    with RWF_ATOMIC. A write that can't go there fails. So the VFS announces aligned writes of that size and below as
 *    atomic (SQLITE_IOCAP_ATOMIC512 to 64K). The file is not opened if it can't be so.
 *  - U2. SQLite's size hints are ignored: without fallocate, the unix VFS would write a byte itself.
 *  - U3. Outsiders write in the usual way. So a database with untorn pages has no outsiders that write.
 *
 * Locks: `registry` in files.c and `database.lock`, never both. The engine is called under them; of SQLite only
 * SQLITE_FCNTL_HAS_MOVED, which takes no lock.
 */
#ifndef MILLPONDDB_PAGES_H
#define MILLPONDDB_PAGES_H

#include <millpond.h>
#include <stdbool.h>
#include <stdint.h>

/* The cached pages of a file. */
struct database;

enum pages_level { PAGES_NONE, PAGES_SHARED, PAGES_EXCLUSIVE };

/* State of a connection. Initially all 0. */
struct holder {
    struct database *database; /* NULL: nothing is cached for this connection */
    struct millpond_file to_read, to_write;
    const volatile uint32_t *index; /* the wal-index, if it has mapped it */
    enum pages_level level; /* its lock on the file; RESERVED and PENDING are SHARED */
    bool has_checkpoint; /* it holds CKPT */
    uint32_t untorn_bytes; /* U1; 0: none */
};

/* "64m" in bytes; 0: not a size. */
uint64_t pages_parse_size(const char *text);

/* Opens the file at `path` for the cache. `is_same(file)` returns whether the name still refers to the file that SQLite has
 * opened. `cache_bytes`: size of a separate cache, unless the file is already open; 0: use the process's cache.
 * `untorn_bytes`: U1. Leaves `holder->database` NULL if the file can't be cached. Returns 0, or a negative errno if the cache
 * can't be created, or can't promise untorn blocks. */
int pages_open(struct holder *holder, const char *path, bool to_write, uint64_t cache_bytes, uint32_t untorn_bytes,
    bool (*is_same)(void *file), void *file);
void pages_close(struct holder *holder);

/* Whether all `len` bytes were read from the cache, or through it. If not, the caller reads from the kernel. */
bool pages_read(struct holder *holder, void *memory, int len, int64_t offset);
/* The file's length, without a system call (R2); -1: the caller has to ask the kernel. */
int64_t pages_len(struct holder *holder);
/* 0 or an errno; -1: nothing was written, and the caller uses SQLite's VFS. */
int pages_write(struct holder *holder, const void *memory, int len, int64_t offset);
/* Call before and after the length of the kernel's file changes. `from`: the first changed byte. */
void pages_resizing(struct holder *holder);
void pages_resized(struct holder *holder, int64_t from);

/* `level`: the lock that was granted, or the lock that will be left. */
void pages_locked(struct holder *holder, enum pages_level level);
void pages_unlocking(struct holder *holder, enum pages_level level);
void pages_committed(struct holder *holder);

/* Locks of the wal-index. PAGES_READ is a shared lock of a reader; the other locks are exclusive. */
enum pages_index_lock { PAGES_WRITE = 1, PAGES_CHECKPOINT = 2, PAGES_READ = 4 };

void pages_index_mapped(struct holder *holder, const volatile void *index);
void pages_index_unmapping(struct holder *holder);
void pages_index_locked(struct holder *holder, unsigned locks);
void pages_index_unlocking(struct holder *holder, unsigned locks);

/* Writes the statistics as text. */
void pages_describe_stats(struct holder *holder, char *text, size_t bytes);

#endif

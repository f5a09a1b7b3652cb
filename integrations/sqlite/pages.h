/* The cached pages of a database file, and when they may be used.
 *
 * SQLite's unix VFS opens, locks, syncs and shares memory; it is asked for everything. Only the bytes of a
 * database's main file are read from Millpond's cache, and written through it to the kernel before the
 * write returns. So the kernel's file is always the whole truth, and what there is to be right about is one
 * thing: that a cached page is not used when others have changed the file since.
 *
 * Others are all that do not go through this cache: other processes with whatever VFS, and connections of this
 * process with another one. There is one `database` for each file (inode) of the process, shared by its
 * connections, so they are not others to each other.
 *
 * CURRENT is a page that has the bytes that the file has; STALE one that has not. What follows is argued from
 * SQLite's file formats (database header, wal-index) and its locking protocol, which all versions share.
 *
 * Rollback journal. Who changes the file holds EXCLUSIVE, beside which nobody holds SHARED.
 *  - R1. A connection that holds no lock reads from the kernel. (SQLite reads the header so, before it locks
 *    anything; with nolock=1 and immutable=1 all reads are such.)
 *  - R2. As long as one connection of ours holds SHARED or more, nobody else changes the file: pages that are
 *    CURRENT when the first one gets SHARED stay so until the last one gives it up. Nothing is read ahead,
 *    so no read of the file is under way outside of that time.
 *  - R3. When the first one has got SHARED, and when a transaction of ours is committed, the header is noted
 *    (`stamp`): the first 100 bytes, the length and the times of writing and of change (`cp -p` of
 *    another copy into the file brings its counter and its time of writing, but not its time of change). When
 *    the next first one has got it, what the kernel has is compared with that, and if they differ all pages
 *    are dropped. Equal headers mean CURRENT pages: each transaction that commits adds one to the change
 *    counter in the header while it holds EXCLUSIVE, and one that does not is undone before anybody reads,
 *    by whoever finds its journal. It is what SQLite's own page cache, which outlives locks, relies on.
 *  - R4. So there must be no page in the cache of a transaction that did not commit, as it may be undone in the
 *    file alone. When the last one gives up SHARED, and a write of ours was not followed by SQLite's word
 *    that the transaction is committed (SQLITE_FCNTL_COMMIT_PHASETWO, after the journal is gone), there is
 *    no stamp. A transaction that was rolled back, a journal of somebody who died, and a rollback that
 *    failed all end so.
 *  - R5. A header that says WAL, or that can't be read whole, is no stamp: in WAL mode the counter counts less.
 *
 * WAL. SHARED is held for long, beside others that do so, too. Only who holds CKPT, in the wal-index,
 * changes the file, by moving frames from the WAL into it (a checkpoint), the first `nBackfill` of which
 * are there when it says so in the wal-index. Who restarts the WAL has WRITE, all frames moved, and changes its
 * salts and then sets `nBackfill` to 0. Readers look into the file only for pages that have no frame in the WAL
 * beyond the `nBackfill` that they found when they began, and up to their mark, and nobody moves frames
 * beyond the mark of a reader.
 *  - W1. Pages are used if salts and `nBackfill` in the wal-index are those that are noted (`seen`), which is
 *    looked at before each read: three loads from memory. Otherwise all pages are dropped, and the values
 *    noted that were there before. So what is cached was in the file when all was moved that `seen` says.
 *    A read of the file that is under way meanwhile ends before its pages are dropped.
 *    A reader's `nBackfill` is no later than that which the look finds; pages whose frames are beyond it, of
 *    which a cached page may have old or half-written bytes, it takes from the WAL.
 *    (Pages of SQLite may be smaller than ours, so that a cached page has several of them.)
 *  - W2. Values are noted if they belong together: both copies of the wal-index's header are equal, before and
 *    after `nBackfill` was read, and it is not more than the header's frames. That leaves out the moment
 *    of a restart between new salts and the new `nBackfill`; in such moments reads go to the kernel.
 *  - W3. While a connection of ours holds CKPT, or EXCLUSIVE, pages are used without a look: nobody else changes
 *    the file. When it got it, pages were looked at as in W1; when it gives it up, the values are noted.
 *  - W4. When a connection of ours gets WRITE, `seen` is current, and all frames have been moved: if it then
 *    restarts the WAL (only it can), nothing has been moved since, and `seen` becomes the new salts and 0.
 *  - W5. Salts of 0 are those of a WAL that nothing was written to since the wal-index was made. A crash of a
 *    process in the middle of writing the wal-index's header, after it emptied the WAL, can bring them
 *    back. So with such salts, the length and the times of the file are compared, too, when
 *    a read begins (its lock in the wal-index is got); times that are less than a second old
 *    prove nothing, as clocks of file systems tick.
 *  - W6. When the first connection maps the wal-index, and when the last one has let go of it, nothing is known
 *    of the pages: they are dropped. While none has mapped it and the header says WAL, reads go to the
 *    kernel: SQLite reads the first page to learn that it should, and with readonly_shm=1 it may go on
 *    without. But EXCLUSIVE is enough (locking_mode=EXCLUSIVE): pages are dropped when it is got.
 *
 * Locks of POSIX are the process's, and all gone when it closes any descriptor of the file. The unix VFS takes
 * care of its own descriptors; ours are opened once for a file, kept, and closed
 *  - P1. when the last connection of ours is closed, and so holds no lock, and
 *  - P2. no lock of anybody is on the file (F_OFD_GETLK, for which this process's are others, too). Else
 *    they are kept, and looked at again when a file is opened or closed.
 * A connection of another VFS in the same process that locks between the look and the close loses its lock:
 * one process should have a database open by one VFS.
 *
 * Locks: `registry` in files.c, and `database.lock`, never both. The engine is called under them; of SQLite only
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

/* What a connection has of it. All 0 to begin with. */
struct holder {
    struct database *database; /* NULL: nothing is cached for this connection */
    struct millpond_file to_read, to_write;
    const volatile uint32_t *index; /* the wal-index, if it has mapped it */
    enum pages_level level; /* its lock on the file; RESERVED and PENDING are SHARED */
    bool has_checkpoint; /* it holds CKPT */
};

/* "64m" in bytes; 0: not a size. */
uint64_t pages_parse_size(const char *text);

/* The file at `path`, as it is open: `is_same(file)` tells whether the name still leads to the file that
 * SQLite has opened. `cache_bytes`: a cache of its own, of that size, unless the file is open already;
 * 0: the process's. Leaves `holder->database` NULL where the file can't be cached. Returns 0, or a negative
 * errno where there can't be such a cache. */
int pages_open(struct holder *holder, const char *path, bool to_write, uint64_t cache_bytes,
    bool (*is_same)(void *file), void *file);
void pages_close(struct holder *holder);

/* Whether all `len` bytes were read from the cache, or through it. If not: ask the kernel. */
bool pages_read(struct holder *holder, void *memory, int len, int64_t offset);
/* The file's length, without asking the kernel (R2); -1: ask. */
int64_t pages_len(struct holder *holder);
/* 0 or an errno; -1: nothing was done, ask SQLite's VFS. */
int pages_write(struct holder *holder, const void *memory, int len, int64_t offset);
/* Before the kernel's file gets another length, and after. What was changed begins at `from`. */
void pages_resizing(struct holder *holder);
void pages_resized(struct holder *holder, int64_t from);

/* The lock that was granted, or is about to be what is left. */
void pages_locked(struct holder *holder, enum pages_level level);
void pages_unlocking(struct holder *holder, enum pages_level level);
void pages_committed(struct holder *holder);

/* Locks of the wal-index. PAGES_READ is one of the readers', shared; the others are exclusive. */
enum pages_index_lock { PAGES_WRITE = 1, PAGES_CHECKPOINT = 2, PAGES_READ = 4 };

void pages_index_mapped(struct holder *holder, const volatile void *index);
void pages_index_unmapping(struct holder *holder);
void pages_index_locked(struct holder *holder, unsigned locks);
void pages_index_unlocking(struct holder *holder, unsigned locks);

/* What was served, in words. */
void pages_tell(struct holder *holder, char *text, size_t bytes);

#endif

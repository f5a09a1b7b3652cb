/* The VFS "millpond": SQLite's "unix", with the pages of database files in Millpond's cache.
 *
 * Journals, WALs and temporary files belong to the unix VFS alone: it gets the memory of its file and sets its methods
 * there. A database's main file is this file's struct, followed by the unix VFS's file, which opens, locks, syncs and maps.
 * pages.h defines which pages are cached and when they are used.
 *
 * URI parameters: millpond=off disables caching; millpond_cache=SIZE gives the database a separate cache;
 * millpond_untorn=SIZE keeps a power cut from tearing pages. */
#include "millponddb.h"
#include "pages.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#ifdef SQLITE_CORE
#include "sqlite3.h"
#else
#include <sqlite3ext.h>
SQLITE_EXTENSION_INIT1
#endif

struct file {
    sqlite3_file methods;
    struct holder holder;
    int last_errno; /* of a write that failed here, else 0 */
};

/* The file of the unix VFS. */
#define BELOW_AT ((sizeof(struct file) + 15) & ~(size_t)15)
static sqlite3_file *below(sqlite3_file *file) {
    return (sqlite3_file *)((char *)file + BELOW_AT);
}

static struct holder *holder_of(sqlite3_file *file) {
    return &((struct file *)file)->holder;
}

/* The VFS below. */
#define BASE(vfs) ((sqlite3_vfs *)(vfs)->pAppData)

/* A database's main file. */

static int file_close(sqlite3_file *file) {
    int rc;
    pages_index_unmapping(holder_of(file));
    pages_unlocking(holder_of(file), PAGES_NONE);
    /* The unix VFS closes next and releases its locks; the cache's descriptors close last. */
    rc = below(file)->pMethods->xClose(below(file));
    pages_close(holder_of(file));
    return rc;
}

static int file_read(sqlite3_file *file, void *memory, int len, sqlite3_int64 offset) {
    if (pages_read(holder_of(file), memory, len, offset))
        return SQLITE_OK;
    return below(file)->pMethods->xRead(below(file), memory, len, offset);
}

static int file_write(sqlite3_file *file, const void *memory, int len, sqlite3_int64 offset) {
    struct file *own = (struct file *)file;
    int rc, error = pages_write(&own->holder, memory, len, offset);
    own->last_errno = error > 0 ? error : 0;
    if (error < 0 && own->holder.untorn_bytes != 0) {
        own->last_errno = errno = EIO; /* U1 */
        return SQLITE_IOERR_WRITE;
    }
    if (error < 0) {
        pages_resizing(&own->holder);
        rc = below(file)->pMethods->xWrite(below(file), memory, len, offset);
        pages_resized(&own->holder, offset);
        return rc;
    }
    if (error == 0)
        return SQLITE_OK;
    errno = error; /* sqlite3_system_errno() */
    return error == ENOSPC ? SQLITE_FULL : SQLITE_IOERR_WRITE;
}

static int file_truncate(sqlite3_file *file, sqlite3_int64 len) {
    int rc;
    pages_resizing(holder_of(file));
    rc = below(file)->pMethods->xTruncate(below(file), len);
    pages_resized(holder_of(file), len);
    return rc;
}

static int file_sync(sqlite3_file *file, int flags) {
    /* A sync covers all writes of the file, by every descriptor. */
    return below(file)->pMethods->xSync(below(file), flags);
}

static int file_size(sqlite3_file *file, sqlite3_int64 *len) {
    int64_t known = pages_len(holder_of(file));
    if (known > 0) {
        *len = known;
        return SQLITE_OK;
    }
    return below(file)->pMethods->xFileSize(below(file), len);
}

static enum pages_level level_of(int lock) {
    return lock == SQLITE_LOCK_NONE ? PAGES_NONE
        : lock == SQLITE_LOCK_EXCLUSIVE ? PAGES_EXCLUSIVE : PAGES_SHARED;
}

static int file_lock(sqlite3_file *file, int lock) {
    int rc = below(file)->pMethods->xLock(below(file), lock);
    if (rc == SQLITE_OK)
        pages_locked(holder_of(file), level_of(lock));
    return rc;
}

static int file_unlock(sqlite3_file *file, int lock) {
    pages_unlocking(holder_of(file), level_of(lock));
    return below(file)->pMethods->xUnlock(below(file), lock);
}

static int file_check_reserved_lock(sqlite3_file *file, int *is_reserved) {
    return below(file)->pMethods->xCheckReservedLock(below(file), is_reserved);
}

static int file_pragma(sqlite3_file *file, char **words) {
    char text[160];
    if (sqlite3_stricmp(words[1], "millpond_untorn") == 0) {
        words[0] = sqlite3_mprintf("%u", holder_of(file)->untorn_bytes);
        return words[0] == NULL ? SQLITE_NOMEM : SQLITE_OK;
    }
    if (sqlite3_stricmp(words[1], "millpond_stats") != 0)
        return SQLITE_NOTFOUND;
    pages_describe_stats(holder_of(file), text, sizeof text);
    words[0] = sqlite3_mprintf("%s", text);
    return words[0] == NULL ? SQLITE_NOMEM : SQLITE_OK;
}

static int file_control(sqlite3_file *file, int op, void *argument) {
    struct file *own = (struct file *)file;
    int rc;
    switch (op) {
    case SQLITE_FCNTL_COMMIT_PHASETWO:
        pages_committed(&own->holder);
        break;
    case SQLITE_FCNTL_PRAGMA:
        rc = file_pragma(file, argument);
        if (rc != SQLITE_NOTFOUND)
            return rc;
        break;
    case SQLITE_FCNTL_LAST_ERRNO:
        if (own->last_errno == 0)
            break;
        *(int *)argument = own->last_errno;
        return SQLITE_OK;
    case SQLITE_FCNTL_BEGIN_ATOMIC_WRITE:
    case SQLITE_FCNTL_COMMIT_ATOMIC_WRITE:
    case SQLITE_FCNTL_ROLLBACK_ATOMIC_WRITE:
        return SQLITE_NOTFOUND; /* atomic batches concern a descriptor, but another one writes */
    case SQLITE_FCNTL_SIZE_HINT:
        if (own->holder.untorn_bytes != 0)
            return SQLITE_OK; /* U2 */
        pages_resizing(&own->holder);
        rc = below(file)->pMethods->xFileControl(below(file), op, argument);
        pages_resized(&own->holder, INT64_MAX);
        return rc;
    default:
        break;
    }
    rc = below(file)->pMethods->xFileControl(below(file), op, argument);
    if (op == SQLITE_FCNTL_VFSNAME && rc == SQLITE_OK)
        *(char **)argument = sqlite3_mprintf("millpond/%z", *(char **)argument);
    return rc;
}

static int file_sector_size(sqlite3_file *file) {
    return below(file)->pMethods->xSectorSize(below(file));
}

/* The unix VFS's answer holds here: the same bytes are written to the same file in the same order. U1 adds to it. */
static int file_characteristics(sqlite3_file *file) {
    int flags = below(file)->pMethods->xDeviceCharacteristics(below(file)) & ~SQLITE_IOCAP_BATCH_ATOMIC;
    uint32_t bytes = 512;
    for (int flag = SQLITE_IOCAP_ATOMIC512; flag <= SQLITE_IOCAP_ATOMIC64K; flag <<= 1, bytes <<= 1)
        if (bytes <= holder_of(file)->untorn_bytes)
            flags |= flag;
    return flags;
}

static int file_index_map(sqlite3_file *file, int region, int bytes, int extend, void volatile **at) {
    int rc = below(file)->pMethods->xShmMap(below(file), region, bytes, extend, at);
    if ((rc == SQLITE_OK || rc == SQLITE_READONLY) && region == 0 && *at != NULL)
        pages_index_mapped(holder_of(file), *at);
    return rc;
}

/* The wal-index has 8 locks: WRITE, CKPT, RECOVER and 5 of readers. */
static unsigned index_locks(int first, int count, int flags) {
    unsigned locks = 0;
    if (!(flags & SQLITE_SHM_EXCLUSIVE))
        return first >= 3 ? PAGES_READ : 0;
    if (first == 0)
        locks |= PAGES_WRITE;
    if (first <= 1 && first + count > 1)
        locks |= PAGES_CHECKPOINT;
    return locks;
}

static int file_index_lock(sqlite3_file *file, int first, int count, int flags) {
    unsigned locks = index_locks(first, count, flags);
    int rc;
    if (locks != 0 && (flags & SQLITE_SHM_UNLOCK))
        pages_index_unlocking(holder_of(file), locks);
    rc = below(file)->pMethods->xShmLock(below(file), first, count, flags);
    if (locks != 0 && rc == SQLITE_OK && (flags & SQLITE_SHM_LOCK))
        pages_index_locked(holder_of(file), locks);
    return rc;
}

static void file_index_barrier(sqlite3_file *file) {
    below(file)->pMethods->xShmBarrier(below(file));
}

static int file_index_unmap(sqlite3_file *file, int to_delete) {
    pages_index_unmapping(holder_of(file));
    return below(file)->pMethods->xShmUnmap(below(file), to_delete);
}

/* With mmap_size, SQLite reads the kernel's pages instead. */
static int file_fetch(sqlite3_file *file, sqlite3_int64 offset, int len, void **at) {
    return below(file)->pMethods->xFetch(below(file), offset, len, at);
}

static int file_unfetch(sqlite3_file *file, sqlite3_int64 offset, void *at) {
    return below(file)->pMethods->xUnfetch(below(file), offset, at);
}

static const sqlite3_io_methods methods = {
    3, file_close, file_read, file_write, file_truncate, file_sync, file_size, file_lock, file_unlock,
    file_check_reserved_lock, file_control, file_sector_size, file_characteristics, file_index_map,
    file_index_lock, file_index_barrier, file_index_unmap, file_fetch, file_unfetch,
};
/* Methods without shared memory, for files where the unix VFS has none (nolock=1). */
static const sqlite3_io_methods plain_methods = {
    3, file_close, file_read, file_write, file_truncate, file_sync, file_size, file_lock, file_unlock,
    file_check_reserved_lock, file_control, file_sector_size, file_characteristics, NULL, NULL, NULL, NULL,
    file_fetch, file_unfetch,
};

/* The VFS. */

/* Whether the file still has the name that it was opened by. */
static bool is_same(void *file) {
    int has_moved = 1;
    sqlite3_file *opened = file;
    int rc = opened->pMethods->xFileControl(opened, SQLITE_FCNTL_HAS_MOVED, &has_moved);
    return rc == SQLITE_OK && !has_moved;
}

static int refuse(const char *name, const char *what) {
    sqlite3_log(SQLITE_CANTOPEN, "millpond: %s: %s", name, what);
    return SQLITE_CANTOPEN;
}

static int vfs_open(sqlite3_vfs *vfs, const char *name, sqlite3_file *file, int flags, int *out_flags) {
    struct file *own = (struct file *)file;
    const char *size;
    uint64_t cache_bytes = 0, untorn_bytes = 0;
    int rc, opened = 0, error;
    if (!(flags & SQLITE_OPEN_MAIN_DB) || name == NULL || !sqlite3_uri_boolean(name, "millpond", 1))
        return BASE(vfs)->xOpen(BASE(vfs), name, file, flags, out_flags);
    memset(own, 0, sizeof *own);
    size = sqlite3_uri_parameter(name, "millpond_cache");
    if (size != NULL && (cache_bytes = pages_parse_size(size)) == 0)
        return refuse(name, "millpond_cache is not a size such as 64m");
    size = sqlite3_uri_parameter(name, "millpond_untorn");
    if (size != NULL && ((untorn_bytes = pages_parse_size(size)) == 0 || untorn_bytes > 65536))
        return refuse(name, "millpond_untorn is not a size of 4k to 64k");
    rc = BASE(vfs)->xOpen(BASE(vfs), name, below(file), flags, &opened);
    if (out_flags != NULL)
        *out_flags = opened;
    if (rc != SQLITE_OK) {
        if (below(file)->pMethods != NULL)
            below(file)->pMethods->xClose(below(file));
        return rc;
    }
    error = pages_open(&own->holder, name, (opened & SQLITE_OPEN_READWRITE) != 0, cache_bytes,
        (uint32_t)untorn_bytes, is_same, below(file));
    if (error == 0 && own->holder.untorn_bytes != untorn_bytes && untorn_bytes != 0)
        error = -EBUSY; /* U1 */
    if (error != 0) {
        char text[200] = "";
        millpond_error_text(text, sizeof text);
        below(file)->pMethods->xClose(below(file));
        return refuse(name, text[0] != 0 ? text : "the cache or untorn pages can't be had");
    }
    file->pMethods = below(file)->pMethods->xShmMap != NULL ? &methods : &plain_methods;
    return SQLITE_OK;
}

static int vfs_delete(sqlite3_vfs *vfs, const char *name, int sync_dir) {
    return BASE(vfs)->xDelete(BASE(vfs), name, sync_dir);
}

static int vfs_access(sqlite3_vfs *vfs, const char *name, int flags, int *result) {
    return BASE(vfs)->xAccess(BASE(vfs), name, flags, result);
}

static int vfs_full_pathname(sqlite3_vfs *vfs, const char *name, int bytes, char *path) {
    return BASE(vfs)->xFullPathname(BASE(vfs), name, bytes, path);
}

static void *vfs_dl_open(sqlite3_vfs *vfs, const char *name) {
    return BASE(vfs)->xDlOpen(BASE(vfs), name);
}

static void vfs_dl_error(sqlite3_vfs *vfs, int bytes, char *text) {
    BASE(vfs)->xDlError(BASE(vfs), bytes, text);
}

static void (*vfs_dl_sym(sqlite3_vfs *vfs, void *library, const char *name))(void) {
    return BASE(vfs)->xDlSym(BASE(vfs), library, name);
}

static void vfs_dl_close(sqlite3_vfs *vfs, void *library) {
    BASE(vfs)->xDlClose(BASE(vfs), library);
}

static int vfs_randomness(sqlite3_vfs *vfs, int bytes, char *memory) {
    return BASE(vfs)->xRandomness(BASE(vfs), bytes, memory);
}

static int vfs_sleep(sqlite3_vfs *vfs, int us) {
    return BASE(vfs)->xSleep(BASE(vfs), us);
}

static int vfs_current_time(sqlite3_vfs *vfs, double *days) {
    return BASE(vfs)->xCurrentTime(BASE(vfs), days);
}

static int vfs_get_last_error(sqlite3_vfs *vfs, int bytes, char *text) {
    return BASE(vfs)->xGetLastError(BASE(vfs), bytes, text);
}

static int vfs_current_time_ms(sqlite3_vfs *vfs, sqlite3_int64 *ms) {
    return BASE(vfs)->xCurrentTimeInt64(BASE(vfs), ms);
}

static int vfs_set_call(sqlite3_vfs *vfs, const char *name, sqlite3_syscall_ptr call) {
    return BASE(vfs)->xSetSystemCall(BASE(vfs), name, call);
}

static sqlite3_syscall_ptr vfs_get_call(sqlite3_vfs *vfs, const char *name) {
    return BASE(vfs)->xGetSystemCall(BASE(vfs), name);
}

static const char *vfs_next_call(sqlite3_vfs *vfs, const char *name) {
    return BASE(vfs)->xNextSystemCall(BASE(vfs), name);
}

static sqlite3_vfs own_vfs = {
    3, 0, 0, NULL, "millpond", NULL, vfs_open, vfs_delete, vfs_access, vfs_full_pathname, vfs_dl_open,
    vfs_dl_error, vfs_dl_sym, vfs_dl_close, vfs_randomness, vfs_sleep, vfs_current_time, vfs_get_last_error,
    vfs_current_time_ms, vfs_set_call, vfs_get_call, vfs_next_call,
};

int millponddb_register(int make_default) {
    sqlite3_vfs *base = sqlite3_vfs_find("unix");
    if (base == NULL || base->iVersion < 3)
        return SQLITE_ERROR;
    own_vfs.pAppData = base;
    own_vfs.szOsFile = (int)BELOW_AT + base->szOsFile;
    own_vfs.mxPathname = base->mxPathname;
    return sqlite3_vfs_register(&own_vfs, make_default);
}

int millponddb_extra_init(const char *unused) {
    (void)unused;
    return millponddb_register(1);
}

#ifndef SQLITE_CORE
static int load(char **error, const sqlite3_api_routines *api, int make_default) {
    int rc;
    SQLITE_EXTENSION_INIT2(api);
    rc = millponddb_register(make_default);
    if (rc == SQLITE_OK)
        return SQLITE_OK_LOAD_PERMANENTLY;
    *error = sqlite3_mprintf("millpond: the VFS \"unix\" is missing");
    return rc;
}

/* Entry point for `.load ./millponddb` and load_extension(). */
__attribute__((visibility("default")))
int sqlite3_extension_init(sqlite3 *db, char **error, const sqlite3_api_routines *api) {
    (void)db;
    return load(error, api, 0);
}

/* Entry point for `.load ./millponddb millponddb_default`: makes the VFS the default of databases opened afterwards. */
__attribute__((visibility("default")))
int millponddb_default(sqlite3 *db, char **error, const sqlite3_api_routines *api) {
    (void)db;
    return load(error, api, 1);
}
#endif

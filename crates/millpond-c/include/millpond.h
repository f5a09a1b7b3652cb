/*
 * Millpond: a user-space file I/O engine for Linux. MIT or Apache-2.0.
 *
 * A page cache in the program itself: cached reads make no system call, take no lock and write no shared
 * memory; reads and writes of one file are atomic with respect to each other, at any length; memory
 * use has a hard limit. Link with -lmillpond.
 *
 *     struct millpond_engine engine;
 *     struct millpond_file file;
 *     char buffer[4096];
 *     int error = millpond_engine_create(NULL, &engine);
 *     if (error == 0)
 *         error = millpond_open(engine, "data", NULL, &file);
 *     if (error == 0)
 *         printf("%lld bytes\n", (long long)millpond_read(file, buffer, sizeof buffer, 0));
 *
 * RESULTS. A call that fails returns a negative errno (-EIO), and leaves `errno` alone. It stores no results,
 * unless its description says so. millpond_error_text() returns the reason in words. Any call may also return
 *     -EBADF              the handle names no such object: it was never returned (0 never is), was closed,
 *                         is of another kind, or belongs to a parent process
 *     -EDEADLK            called by a signal handler that interrupted another call of this thread
 *     -ENOTRECOVERABLE    an internal error (a panic), described on standard error. No panic leaves a call.
 *                         The effect of the call is unknown; close the file.
 *
 * HANDLES are numbers, passed by value; copies are the same handle. A number is used once in the life of a
 * process and its children. So the use of a closed handle gets -EBADF, in any thread, and never reaches
 * another object.
 *
 * THREADS. Any thread may call any function at any time, with the same handle, too. Closing a file does not
 * disturb other threads' calls on it: they finish, and keep the file open. No call may be made by a signal
 * handler, nor be left by longjmp() or by pthread_cancel() (no call is a cancellation point).
 *
 * OPTIONS are structs whose first member, `size`, is their sizeof. Zero-initialised members take their
 * defaults: = {0}, then .size. So programs and libraries of different versions work together; an option
 * that the library does not know is -E2BIG.
 *
 * MEMORY of a call belongs to the caller again when the call returns, memory of a queue's request when its
 * completion has been returned. An access to invalid memory is SIGSEGV or SIGBUS, as with memcpy(), unless
 * the program has a handler that calls millpond_fault_resume_address(). If the kernel makes the access, it is
 * -EFAULT. NULL with a length other than 0 is always -EFAULT.
 *
 * FORK. A child inherits no objects: all handles get -EBADF there, and the parent is not disturbed. Memory of
 * millpond_buffers_alloc() stays usable; views must not be read. The child may create engines at once.
 * Children of vfork() and posix_spawn() may only call exec(). Files are close-on-exec.
 */

#ifndef MILLPOND_H
#define MILLPOND_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* The version of this header; millpond_version() returns the version of the library. */
#define MILLPOND_VERSION "0.2.0"
#define MILLPOND_VERSION_MAJOR 0
#define MILLPOND_VERSION_MINOR 2
#define MILLPOND_VERSION_PATCH 0

/** io_uring where a ring can be set up and reads a byte (Linux 5.11), else blocking system calls and a few threads. */
#define MILLPOND_BACKEND_AUTO 0

/** io_uring (Linux 5.11). Creation of the engine fails where the system refuses it. */
#define MILLPOND_BACKEND_URING 1

/** Blocking system calls, and a few threads for background reads. */
#define MILLPOND_BACKEND_THREADS 2

/** Disables the lock-free read path: for comparison, and as an emergency switch. */
#define MILLPOND_ENGINE_NO_HIT_PATH 1

/** Disables read-ahead. */
#define MILLPOND_ENGINE_NO_READAHEAD 2

/** Size of a buffer for the address of a keeper, with its NUL. */
#define MILLPOND_KEEPER_ADDRESS_BYTES 128

/** A write reaches the kernel before it returns. */
#define MILLPOND_WRITE_THROUGH 0

/**
 * A write stays in the cache. It reaches the kernel when it is old enough, when there are too many dirty
 * bytes, with a sync, or when the last handle of the file is closed. Use MILLPOND_BACKING_DIRECT with it:
 * otherwise each byte is cached twice.
 */
#define MILLPOND_WRITE_BACK 1

/** Through the kernel's page cache, as a second level. */
#define MILLPOND_BACKING_BUFFERED 0

/**
 * O_DIRECT: the kernel caches nothing. Partial blocks at the edges of a write go through the kernel's
 * cache, coherently.
 */
#define MILLPOND_BACKING_DIRECT 1

/** O_DIRECT without a second open of the file, which would break a lease on it. */
#define MILLPOND_BACKING_DIRECT_IN_PLACE 2

/** Through the kernel's page cache, which is asked to drop the pages at once. */
#define MILLPOND_BACKING_UNCACHED 3

/**
 * The kernel's page cache is the cache: reads copy from a mapping of it, while the file is written, too, and the
 * engine holds no second copy. A write is one system call. With MILLPOND_WRITE_THROUGH only.
 *
 * A page that can't be read, or that another process cuts off, raises SIGBUS in the copy. The first such open installs
 * a handler that ends the copy and passes any other fault on to the handler of before. A handler that the program
 * installs later must call millpond_fault_resume_address. Threads that block SIGBUS read by system calls,
 * and must not begin to block it after their first read. Changes by other processes are visible at once; a read beside a write of another process
 * may be torn, as with `read(2)`. Only one process may append.
 *
 * Reads are system calls of pages that the kernel does not have; on file systems other than ext4, XFS, btrfs, F2FS, JFS
 * and ReiserFS; with a limit of the address space (RLIMIT_AS); and on AArch64.
 */
#define MILLPOND_BACKING_MAPPED 4

/** For a file that is opened with O_DIRECT: unaligned requests are served through an aligned buffer. */
#define MILLPOND_OPEN_BOUNCE 1

/** No particular pattern: read-ahead follows the detected pattern. */
#define MILLPOND_ADVICE_NORMAL 0

/** Sequential reads: read-ahead starts at once, with twice the window. */
#define MILLPOND_ADVICE_SEQUENTIAL 1

/** Random reads: this handle starts no read-ahead. */
#define MILLPOND_ADVICE_RANDOM 2

/** Will be read soon: reads the pages into the cache that need no wait for resources. */
#define MILLPOND_ADVICE_WILL_NEED 3

/** Won't be read soon: drops the cached pages that are not in use. */
#define MILLPOND_ADVICE_DONT_NEED 4

/**
 * Reads of this handle need not be atomic across pages: each page of a read is whole, and no older than
 * the call. For programs with their own locks.
 */
#define MILLPOND_ADVICE_TORN_READS 5

/** Reads of this handle are atomic, however many pages they cover (the default). */
#define MILLPOND_ADVICE_ATOMIC_READS 6

/** `millpond_persist` fails if a file has the new name. */
#define MILLPOND_PERSIST_NOCLOBBER 1

/** `millpond_read` of `len` bytes into `memory`. */
#define MILLPOND_OP_READ 1

/** `millpond_write` of `len` bytes from `memory`. */
#define MILLPOND_OP_WRITE 2

/**
 * `millpond_readv` into `len` vectors, the first of which is at `memory`. The array of vectors is read
 * before the submission returns.
 */
#define MILLPOND_OP_READV 3

/** `millpond_writev`, as MILLPOND_OP_READV. */
#define MILLPOND_OP_WRITEV 4

/** `millpond_sync`. */
#define MILLPOND_OP_SYNC 5

/** `millpond_sync_data`. */
#define MILLPOND_OP_SYNC_DATA 6

/** Options of an engine. Zero-initialised members take their defaults. */
typedef struct millpond_engine_options {
    /** `sizeof(struct millpond_engine_options)`. */
    size_t size;
    /**
     * The hard memory limit, in bytes: cached pages, the tables that find them, and the objects of open
     * files. 16 KiB to 512 GiB, with a keeper at least 256 KiB. Default: a quarter of the machine's memory
     * or of the cgroup's limit, whichever is less.
     */
    uint64_t cache_bytes;
    /**
     * The limit for dirty bytes (`MILLPOND_WRITE_BACK`). Above it, writers write back themselves. The
     * default, and the maximum, is three quarters of the cache.
     */
    uint64_t dirty_bytes_max;
    /** The maximum age of a dirty page before its write-back, in milliseconds. Default 30,000. */
    uint64_t dirty_age_max_ms;
    /** The largest read-ahead window, in bytes. Default 1 MiB; at most 1/128 of the cache. */
    uint64_t readahead_bytes_max;
    /** The maximum number of page reads in flight, 1 to 1024. Default 1024. */
    uint32_t reads_in_flight_max;
    /** `MILLPOND_BACKEND_...`. */
    uint32_t backend;
    /** `MILLPOND_ENGINE_...`, or'ed. */
    uint32_t flags;
    /** Reserved; must be 0. */
    uint32_t reserved;
    /**
     * The address of a keeper, which writes back this process's dirty pages after its death.
     * `millpond_keeper_spawn` returns one; or the argument of `millpond keeper`. Default: NULL, no
     * keeper. Read by `millpond_engine_create` only.
     */
    const char *keeper;
} millpond_engine_options;

/** A cache with a hard memory limit, and the storage backend below it. */
typedef struct millpond_engine {
    /** 0: no engine. */
    uint64_t id;
} millpond_engine;

/** Options for opening a file. Zero-initialised members take their defaults. */
typedef struct millpond_open_options {
    /** `sizeof(struct millpond_open_options)`. */
    size_t size;
    /**
     * As for `open(2)`: O_RDONLY, O_WRONLY or O_RDWR, or'ed with any of O_CREAT, O_EXCL (with O_CREAT),
     * O_TRUNC, O_APPEND, O_DSYNC, O_DIRECT, O_CLOEXEC (which is always set). `millpond_append` is the call
     * that appends: `millpond_write` writes at its offset even with O_APPEND. O_RDONLY with O_TRUNC, which
     * POSIX leaves undefined, is refused.
     *
     * O_DIRECT: reads and writes by this handle bypass the cache, between the caller's memory and the
     * device. They are coherent with cached ones of other handles. Offsets, addresses and lengths must be
     * aligned as the file system requires, mostly to 512 or 4096 bytes.
     */
    uint32_t flags;
    /** Permission bits of a new file, before the umask. Default 0666. */
    uint32_t mode;
    /**
     * The page size: the unit of reads, of caching and of atomicity. A power of two from 4096 to 65536.
     * Default 4096, or the page size of the file if it is already open; a different size is refused.
     */
    uint32_t page_bytes;
    /** `MILLPOND_WRITE_...`. If the file is already open, the first opener's choice applies. */
    uint32_t write_mode;
    /**
     * `MILLPOND_BACKING_...`: how the engine accesses the file below its cache. If the file is already
     * open, the first opener's choice applies.
     */
    uint32_t backing;
    /** `MILLPOND_OPEN_...`, or'ed. */
    uint32_t extra;
    /**
     * A power cut tears no aligned block of this many bytes: a power of two from 4096 to the page size. 0: the default, no
     * such promise. Needs MILLPOND_BACKING_DIRECT, O_RDWR, and a file system that writes such blocks as a whole:
     * `millpond_untorn_bytes_max`. The page size is at least this, and the length of the file always a multiple of it:
     * calls that would give it another length fail with -EINVAL. No other program may write to the file. If it
     * is already open, the first opener's choice applies; a different size is refused.
     */
    uint32_t untorn_bytes;
    /** Reserved; must be 0. */
    uint32_t reserved;
} millpond_open_options;

/** An open file. */
typedef struct millpond_file {
    /** 0: no file. */
    uint64_t id;
} millpond_file;

/** Borrowed bytes of the cache: a snapshot, which later changes of the file do not affect. */
typedef struct millpond_view {
    /** The bytes, read-only. Valid until the view is released. */
    const void *data;
    /** The number of bytes. */
    size_t len;
    /** The view's handle; 0: no view. */
    uint64_t id;
} millpond_view;

/** A completion queue. */
typedef struct millpond_queue {
    /** 0: no queue. */
    uint64_t id;
} millpond_queue;

/** A request for a queue. */
typedef struct millpond_request {
    /** The file, which stays open until the request has completed. */
    struct millpond_file file;
    /** A number that the completion repeats. */
    uint64_t user_data;
    /** The offset in the file of the first byte. For a sync 0. */
    uint64_t offset;
    /** The memory to read into or to write from, or the vectors. For a sync NULL. */
    void *memory;
    /** The number of bytes, or of vectors. For a sync 0. */
    size_t len;
    /** `MILLPOND_OP_...`. */
    uint32_t op;
    /** Must be 0. */
    uint32_t flags;
    /** Reserved; must be 0. */
    uint64_t reserved[2];
} millpond_request;

/** The completion of a request. */
typedef struct millpond_completion {
    /** The request's `user_data`. */
    uint64_t user_data;
    /** The result of the corresponding call: bytes, or a negative errno. -ECANCELED: cancelled. */
    int64_t result;
} millpond_completion;

/** A slot of a pipeline, between two requests. */
typedef struct millpond_lane {
    /** The lane's number, from 0 on. */
    size_t number;
    /** The result of the request: bytes, or a negative errno. 0 at first. */
    int64_t result;
    /** The completed request, to be changed into the next one. All 0 at first, `op` included. */
    struct millpond_request request;
} millpond_lane;

/**
 * The callback of a pipeline, called for each lane with the `context` of `millpond_pipeline_run`. Returns
 * 0 if the lane has no more requests; otherwise `lane->request` is the next one.
 */
typedef int (*millpond_step)(void *context, struct millpond_lane *lane);

/**
 * Statistics of an engine since its creation. The counters are read one after another while operations
 * run, so they need not match each other exactly.
 */
typedef struct millpond_stats {
    /** `sizeof(struct millpond_stats)`, set by the caller. */
    size_t size;
    /** Pages that were read without a lock. */
    uint64_t hits;
    /** Pages that a read did not find in the cache. */
    uint64_t misses;
    /** Pages read into the cache, read-ahead included. */
    uint64_t fills;
    /** Reads that bypassed the cache because no page could be evicted. */
    uint64_t uncached_reads;
    /** Pages of read-ahead that were read. */
    uint64_t readahead_used;
    /** Pages of read-ahead that were evicted unread. */
    uint64_t readahead_wasted;
    /** Pages evicted to make room. */
    uint64_t evictions;
    /** Retries of lock-free reads whose page changed during the copy. */
    uint64_t hit_retries;
    /** Bytes that reads and writes moved for their callers. */
    uint64_t bytes_served;
    /** Bytes of these that bypassed the cache. */
    uint64_t bytes_passed;
    /** Direct reads and writes that were not aligned, and were served through an aligned buffer. */
    uint64_t bounced;
    /** Reads passed to the kernel with O_DIRECT. */
    uint64_t direct_reads;
    /** Writes passed to the kernel with O_DIRECT. */
    uint64_t direct_writes;
    /** Reads passed to the kernel without O_DIRECT. */
    uint64_t plain_reads;
    /** Writes passed to the kernel without O_DIRECT. */
    uint64_t plain_writes;
    /** Memory in use, in bytes; counts against the limit. */
    uint64_t memory_bytes;
} millpond_stats;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Creates an engine and stores its handle at `engine`. Starts no thread, opens no file.
 *
 * `options` may be NULL for all defaults. Files that are opened through several engines of one process
 * share one cached file, which belongs to the engine that opened it first.
 *
 * Returns 0, or
 * -EINVAL      an option is out of its range, or its struct's size is wrong
 * -E2BIG       an option that this version of the library does not know is not 0
 * -EFAULT      `engine` is NULL
 * -ENOMEM      the memory can't be reserved
 * -EMFILE      there are 1,048,576 engines
 * or the error of the requested backend, or of the connection to the keeper.
 */
int millpond_engine_create(const struct millpond_engine_options *options,
                           struct millpond_engine *engine);

/**
 * Destroys the handle of an engine. The engine and its memory are released with the last of its open files
 * and queues.
 *
 * Blocks only for the time that it takes to free memory.
 *
 * Returns 0, or
 * -EBADF       there is no such engine
 */
int millpond_engine_destroy(struct millpond_engine engine);

/**
 * The engine's memory limit, in bytes.
 *
 * Returns it, or
 * -EBADF       there is no such engine
 */
int64_t millpond_engine_cache_bytes(struct millpond_engine engine);

/**
 * Enables (`on` is not 0) or disables the lock-free read path for the files of this engine.
 *
 * Returns 0, or
 * -EBADF       there is no such engine
 */
int millpond_engine_set_hit_path(struct millpond_engine engine, int on);

/**
 * Detaches from the keeper, if there is one: writes back the dirty pages, and has the keeper close the
 * engine's memory and files. Later writes are written through. Blocks for writes in flight. For a program
 * that is about to call exec().
 *
 * Returns 0, or
 * -EBADF       there is no such engine
 */
int millpond_engine_leave_keeper(struct millpond_engine engine);

/**
 * Whether the keeper died before the engine detached from it. If so, writes are written through, and dirty
 * pages of the cache would not survive a kill of this process. Costs one load from memory.
 *
 * Returns 0 or 1, or
 * -EBADF       there is no such engine
 */
int millpond_engine_has_lost_keeper(struct millpond_engine engine);

/**
 * Starts a keeper in a separate process. It writes back this process's dirty pages after its death, and
 * exits when nothing is left to do. Writes its address, for `millpond_engine_options.keeper`, to
 * `address`, a buffer of `bytes` bytes, at least MILLPOND_KEEPER_ADDRESS_BYTES.
 *
 * Call it before the program has threads: it forks. The caller does not have to wait for the keeper as a
 * child.
 *
 * Returns 0, or
 * -EFAULT      `address` is NULL
 * -ERANGE      `bytes` is too small; no process was started
 * or the error of `fork(2)` or `bind(2)`.
 */
int millpond_keeper_spawn(char *address,
                          size_t bytes);

/**
 * Opens or creates the file at `path` with `options` (NULL: for reading), and stores its handle at `file`.
 * Only regular files can be opened.
 *
 * Blocks as `open(2)` does, and while a keeper writes back dirty pages of the file from a dead process.
 *
 * Returns 0, or the error of `open(2)` (-ENOENT, -EACCES, ...), or
 * -EBADF       there is no such engine
 * -EINVAL      the options contradict each other, or the file as already open; or direct I/O is unsupported
 * -E2BIG       an option that this version of the library does not know is not 0
 * -EFAULT      `path` or `file` is NULL
 * -EISDIR      it is a directory
 * -ENOTSUP     it is not a regular file; or `untorn_bytes` is set, and the file system, the device, the backing or the
 *              engine's keeper can't do that: millpond_error_text() gives the reason
 * -ENOBUFS     the memory limit has no room for another file
 * -EMFILE      there are 1,048,576 files, or the system has no descriptor
 */
int millpond_open(struct millpond_engine engine,
                  const char *path,
                  const struct millpond_open_options *options,
                  struct millpond_file *file);

/**
 * `millpond_open` of an open descriptor, which must permit the access that `options` ask for. The options
 * that concern the cache apply, and O_TRUNC. The call duplicates the descriptor, so the caller may close
 * it. Its file offset is never used.
 *
 * The kernel drops the POSIX locks (`F_SETLK`) of a process on a file when the process closes any
 * descriptor of that file. So `millpond_close` drops them, too. A call of this function that fails does
 * not, unless it fails to truncate (O_TRUNC) or to open the file again for direct I/O.
 *
 * Returns as for `millpond_open`, and
 * -EBADF       also: `descriptor` is not open
 * -EINVAL      also: the descriptor does not permit the access that the options ask for
 */
int millpond_open_descriptor(struct millpond_engine engine,
                             int descriptor,
                             const struct millpond_open_options *options,
                             struct millpond_file *file);

/**
 * Closes a file. The handle is invalid afterwards, even on an error.
 *
 * Writes back the file's dirty pages, without making them durable, and blocks for that. Calls of other
 * threads on the file, requests in queues and views continue, and keep the file open. A call that begins
 * after this one has begun gets -EBADF.
 *
 * Returns 0, or
 * -EBADF       there is no such file
 * -EDEADLK     called by a signal handler that interrupted another call of this thread; still open
 * or an error of a write that no sync has repaired yet, or of the write-back: the last report of it.
 */
int millpond_close(struct millpond_file file);

/**
 * The largest `untorn_bytes` that the file system offers for the file.
 *
 * Returns it, 0 if it offers none, or
 * -EBADF       there is no such file
 */
int64_t millpond_untorn_bytes_max(struct millpond_file file);

/**
 * The file's length, in bytes. Does not block, except with MILLPOND_BACKING_MAPPED: there the kernel is asked,
 * and a length that another process has changed waits for operations of this process.
 *
 * Returns it, or
 * -EBADF       there is no such file
 * or, with MILLPOND_BACKING_MAPPED, the error of the kernel.
 */
int64_t millpond_len(struct millpond_file file);

/**
 * Reads `len` bytes at byte `offset` into `memory`. Atomic with respect to all other operations on the
 * file, at any length. No alignment is required (except with O_DIRECT).
 *
 * Cached bytes are read without a lock, a system call or a wait. Otherwise the call blocks until the pages
 * have been read, or until a writer of the same pages is done. Signals do not interrupt it.
 *
 * Returns the bytes read: fewer than `len` only at the end of the file, or before bytes that can't be
 * read; a read of those returns the error. The rest of `memory` is unchanged, or zero. Or
 * -EBADF       there is no such file, it is not open for reading, or belongs to a parent process
 * -EINVAL      the range ends beyond INT64_MAX; with O_DIRECT, something is not aligned
 * -EFAULT      `memory` is NULL; or as the introduction says
 * -EIO, ...    the first byte could not be read; the content of `memory` is unspecified
 */
int64_t millpond_read(struct millpond_file file,
                      void *memory,
                      size_t len,
                      uint64_t offset);

/**
 * `millpond_read` into `count` vectors in turn, as one atomic read.
 *
 * Returns as for `millpond_read`, and
 * -EINVAL      also: `count` is negative
 */
int64_t millpond_readv(struct millpond_file file,
                       const struct iovec *vectors,
                       int count,
                       uint64_t offset);

/**
 * `millpond_read` of cached bytes, as `preadv2(2)` with RWF_NOWAIT: never waits, and starts no read of the
 * missing pages.
 *
 * Returns as for `millpond_read`, and
 * -EAGAIN      a page is not cached, or being changed, or the bytes are more than 64 pages; the content of
 *              `memory` is unspecified
 * -EINVAL      also: the file was opened with O_DIRECT
 */
int64_t millpond_try_read(struct millpond_file file,
                          void *memory,
                          size_t len,
                          uint64_t offset);

/**
 * Announces how a range of the file will be used (`len` 0: to the end). NORMAL, SEQUENTIAL, RANDOM,
 * TORN_READS and ATOMIC_READS apply to all later reads by this handle, of any range. Never blocks.
 *
 * `advice` is one of `MILLPOND_ADVICE_...`.
 *
 * Returns 0, or
 * -EBADF       there is no such file
 * -EINVAL      unknown advice, or the range ends beyond INT64_MAX
 */
int millpond_advise(struct millpond_file file, uint64_t offset, uint64_t len, uint32_t advice);

/**
 * Writes `len` bytes from `memory` at byte `offset`. A reader sees the whole write or none of it. The
 * caller may reuse the memory when this returns.
 *
 * With MILLPOND_WRITE_THROUGH the bytes are in the kernel on return; with MILLPOND_WRITE_BACK they are in
 * the cache; with O_DSYNC they are durable. Blocks for operations on the same pages, for the kernel, and
 * for free pages of the cache. Signals do not interrupt it.
 *
 * Returns the bytes written: fewer than `len` if the file system accepted only a part; or
 * -EBADF       there is no such file, it is not open for writing, or belongs to a parent process
 * -EINVAL      the range ends beyond INT64_MAX; with O_DIRECT, something is not aligned
 * -EFAULT      `memory` is NULL; or as the introduction says; nothing was written
 * -EIO, -ENOSPC, -EFBIG, ...   nothing was written
 */
int64_t millpond_write(struct millpond_file file,
                       const void *memory,
                       size_t len,
                       uint64_t offset);

/**
 * `millpond_write` from `count` vectors in turn, as one atomic write.
 *
 * Returns as for `millpond_write`, and
 * -EINVAL      also: `count` is negative
 */
int64_t millpond_writev(struct millpond_file file,
                        const struct iovec *vectors,
                        int count,
                        uint64_t offset);

/**
 * Writes `len` bytes from `memory` at the end of the file. Appends never interleave, and leave no gaps.
 * Otherwise as `millpond_write`. Stores the offset of the first byte at `offset`, which may be NULL.
 *
 * Returns as for `millpond_write`.
 */
int64_t millpond_append(struct millpond_file file,
                        const void *memory,
                        size_t len,
                        uint64_t *offset);

/**
 * `millpond_append` from `count` vectors in turn, as one atomic write.
 *
 * Returns as for `millpond_writev`.
 */
int64_t millpond_appendv(struct millpond_file file,
                         const struct iovec *vectors,
                         int count,
                         uint64_t *offset);

/**
 * Sets the file's length, in bytes: truncates the file, or extends it with zeros. Blocks for operations
 * beyond the smaller of both lengths.
 *
 * Returns 0, or
 * -EBADF       there is no such file, or it is not open for writing
 * -EINVAL      `len` is more than INT64_MAX
 * or the error of the file system; nothing has changed.
 */
int millpond_truncate(struct millpond_file file,
                      uint64_t len);

/**
 * Makes `len` bytes at `offset` read as zeros, and frees their space. The file's length stays; the part of
 * the range beyond it is ignored. A reader sees the whole change or none of it. Blocks for operations on
 * pages of the range, and until the file system is done.
 *
 * Returns 0, or
 * -EBADF       there is no such file, or it is not open for writing
 * -EINVAL      `len` is 0, or the range ends beyond INT64_MAX
 * -EOPNOTSUPP  the file system does not support it; nothing has changed
 * or the error of the file system; each byte of the range may be as it was, or zero.
 */
int millpond_punch_hole(struct millpond_file file,
                        uint64_t offset,
                        uint64_t len);

/**
 * Makes `len` bytes at `offset` read as zeros, and keeps their space. The file's length stays, and the
 * range is clipped to it. Writes zeros where the file system does not support the operation. Blocks as
 * `millpond_punch_hole` does.
 *
 * Returns as for `millpond_punch_hole`.
 */
int millpond_zero_range(struct millpond_file file,
                        uint64_t offset,
                        uint64_t len);

/**
 * Reserves space for `len` bytes at `offset`, so that writes to them do not fail for lack of space. A
 * shorter file is extended with zeros. Blocks while the range is being changed.
 *
 * Returns 0, or
 * -EBADF       there is no such file, or it is not open for writing
 * -EINVAL      `len` is 0, or the range ends beyond INT64_MAX
 * -EOPNOTSUPP  the file system does not support it
 * -ENOSPC, -EDQUOT, -EFBIG     a part may be reserved, and the file may have been extended by a part
 */
int millpond_allocate(struct millpond_file file,
                      uint64_t offset,
                      uint64_t len);

/**
 * Finds the first byte from `offset` on that is not in a hole, as `lseek(2)` with SEEK_DATA; no file
 * offset changes. May wait for the file system, and writes back dirty pages from `offset` on.
 *
 * Returns its offset, or
 * -ENXIO       only a hole follows, or the file ends before `offset`
 * -EBADF       there is no such file
 * -EINVAL      `offset` is more than INT64_MAX
 * or the error of the file system.
 */
int64_t millpond_seek_data(struct millpond_file file,
                           uint64_t offset);

/**
 * Finds the first byte from `offset` on that is in a hole; the end of the file counts as one.
 *
 * Returns as for `millpond_seek_data`; -ENXIO: `offset` is at or beyond the end.
 */
int64_t millpond_seek_hole(struct millpond_file file, uint64_t offset);

/**
 * Invalidates cached bytes after another program changed the file: drops the cached bytes of the range
 * (`len` 0: none) and loads the file's current length. Blocks for operations on the range.
 *
 * Returns 0, or
 * -EBADF       there is no such file
 * -EINVAL      the range ends beyond INT64_MAX
 * or the error of the system when the length was read.
 */
int millpond_invalidate(struct millpond_file file,
                        uint64_t offset,
                        uint64_t len);

/**
 * Makes the writes of all handles, and the file's metadata, durable: `fsync(2)`. Blocks until the device
 * has completed.
 *
 * Drops nothing on failure: pages that could not be written stay cached, and the next sync tries again.
 *
 * Returns 0, or
 * -EBADF       there is no such file
 * or the error of the file system (-EIO, -ENOSPC, ...), until a sync has succeeded.
 */
int millpond_sync(struct millpond_file file);

/**
 * `millpond_sync` of the data, and of the metadata that is needed to read it: `fdatasync(2)`.
 *
 * Returns as for `millpond_sync`.
 */
int millpond_sync_data(struct millpond_file file);

/**
 * `millpond_sync_data` of the writes to `len` bytes at `offset` (`len` 0: to the end). Other bytes may
 * become durable, too.
 *
 * Returns as for `millpond_sync`, and
 * -EINVAL      the range ends beyond INT64_MAX
 */
int millpond_sync_range(struct millpond_file file,
                        uint64_t offset,
                        uint64_t len);

/**
 * Writes the file's dirty pages (MILLPOND_WRITE_BACK) to the kernel, so that other programs can see them;
 * does not make them durable. Blocks until the kernel has them.
 *
 * Returns as for `millpond_sync`.
 */
int millpond_write_back(struct millpond_file file);

/**
 * Makes the file durable, renames it from `from` to `to`, replacing a file of that name, and makes the
 * name durable. After a power cut `to` is either the old file or this one. `from` must be a name of this
 * file; if it equals `to`, nothing is renamed. Blocks until the device has completed all steps.
 *
 * `flags` is 0, or MILLPOND_PERSIST_NOCLOBBER.
 *
 * Returns 0, or the error of the step that failed; `millpond_error_text` names the step, and so which
 * steps are done and durable. Also
 * -EBADF       there is no such file
 * -EFAULT      a path is NULL
 * -EINVAL      `from` is not a name of this file, or an unknown flag
 * -EEXIST      a file has the name `to`, and MILLPOND_PERSIST_NOCLOBBER was set
 */
int millpond_persist(struct millpond_file file,
                     const char *from,
                     const char *to,
                     uint32_t flags);

/**
 * Borrows cached bytes: at most `len` bytes from byte `offset`, up to the end of the page or of the file;
 * 0 bytes at and beyond the end. Stores the view at `view`. The view pins a page of the cache until it is
 * released. Blocks while the page is read.
 *
 * The memory belongs to the cache. A program must not write to it: no check catches that. The file may be
 * closed before the view is released.
 *
 * Returns 0, or
 * -EBADF       there is no such file, it is not open for reading, or belongs to a parent process
 * -EINVAL      the range ends beyond INT64_MAX
 * -EFAULT      `view` is NULL
 * -ENOBUFS     views pin half of the cache already
 * -EMFILE      there are 1,048,576 views
 * -EIO, ...    the page could not be read
 */
int millpond_view_take(struct millpond_file file,
                       uint64_t offset,
                       size_t len,
                       struct millpond_view *view);

/**
 * Releases a view; its memory must not be used any more. Sets all members of `view` to 0. Release one copy
 * of the struct only.
 *
 * Returns 0, or
 * -EBADF       there is no such view, or it was released before
 * -EFAULT      `view` is NULL
 */
int millpond_view_release(struct millpond_view *view);

/**
 * Creates a completion queue and stores its handle at `queue`. `capacity`, 1 to 1,048,576, is the maximum
 * number of requests that are in flight, or completed and not yet returned. The requests may be for files
 * of any engine. Any number of threads may submit and wait.
 *
 * Returns 0, or
 * -EBADF       there is no such engine
 * -EFAULT      `queue` is NULL
 * -EINVAL      `capacity` is out of its range
 * -EAGAIN      the system can't start a thread
 * -EMFILE      there are 1,048,576 queues
 */
int millpond_queue_create(struct millpond_engine engine,
                          size_t capacity,
                          struct millpond_queue *queue);

/**
 * Destroys a queue. Blocks until all its requests have completed. Their completions are lost, and their
 * memory belongs to the caller again on return.
 *
 * Returns 0, or
 * -EBADF       there is no such queue
 * -EBUSY       a thread waits for it; nothing has changed
 */
int millpond_queue_destroy(struct millpond_queue queue);

/**
 * Submits requests in array order, as many of `count` as the queue has room for. Requests in flight run
 * concurrently and complete in any order: submit a request that must follow another one when that has
 * completed.
 *
 * Does not wait for I/O. Reads of cached bytes complete at once. The array of requests may be reused on
 * return. The memory that the requests name is lent to the queue until their completions have been
 * returned, or the queue is destroyed, even if the submitting thread ends. Until then the memory must stay
 * valid, memory to read into must not be used, and memory to write from must not change.
 *
 * Returns the number of requests submitted. It is less than `count` if the queue is full, or if the next
 * request is malformed; if that is the first one,
 * -EAGAIN      the queue is full: wait first
 * -EBADF       there is no such queue, or no such file
 * -EINVAL      no such operation; flags, reserved members, or members of a sync are not 0
 * -EFAULT      `requests`, a request's memory or that of a vector is NULL
 * -ENOMEM      there is no memory for a list of them
 * Other errors of a request are reported by its completion.
 */
int64_t millpond_queue_submit(struct millpond_queue queue,
                              const struct millpond_request *requests,
                              size_t count);

/**
 * Waits until `min` requests have completed, and stores `min` to `max` completions at `completions`, an
 * array of `max`. After `timeout_ns` nanoseconds (negative: no limit) it returns the completions that are
 * there, maybe none. With `min` 0 it never blocks. Among several waiters, the smallest `min` is served
 * first, and each waiter gets exactly its `min`. A waiter is not starved while enough requests for its
 * `min` are in flight.
 *
 * Blocks without spinning, and is woken once. Signals do not interrupt it.
 *
 * Returns the number of completions, or
 * -EBADF       there is no such queue
 * -EFAULT      `completions` is NULL
 * -EINVAL      `min` is more than the queue's capacity or than `max`, or `max` is 0
 */
int64_t millpond_queue_wait(struct millpond_queue queue,
                            struct millpond_completion *completions,
                            size_t min,
                            size_t max,
                            int64_t timeout_ns);

/**
 * `millpond_queue_wait` that waits for `min` completions for at most `min_wait_ns` nanoseconds, and then
 * for one (as with io_uring's `min_wait`).
 *
 * Returns as for `millpond_queue_wait`.
 */
int64_t millpond_queue_wait_at_least(struct millpond_queue queue,
                                     struct millpond_completion *completions,
                                     size_t min,
                                     size_t max,
                                     uint64_t min_wait_ns,
                                     int64_t timeout_ns);

/**
 * Cancels one request that was submitted with `user_data` and has not completed. It completes with
 * -ECANCELED, and has no effect.
 *
 * Returns 0, or
 * -EBADF       there is no such queue
 * -ENOENT      there is no such request, or it can't be cancelled any more
 */
int millpond_queue_cancel(struct millpond_queue queue, uint64_t user_data);

/**
 * Returns an eventfd for event loops (`poll(2)`): readable when there are completions that no waiter has
 * taken. Its count is the number of completions since its last read; another thread may take them first.
 * Non-blocking and close-on-exec. The queue owns it: read it only, and do not close it.
 *
 * Returns the descriptor, or
 * -EBADF       there is no such queue
 * -EMFILE, -ENFILE     no descriptor is free
 */
int millpond_queue_eventfd(struct millpond_queue queue);

/**
 * Stores the number of completed requests that have not been returned at `ready`, and of requests in
 * flight at `in_flight`. Each may be NULL.
 *
 * Returns 0, or
 * -EBADF       there is no such queue
 */
int millpond_queue_counts(struct millpond_queue queue,
                          size_t *ready,
                          size_t *in_flight);

/**
 * Runs up to `depth` direct requests concurrently, 1 to 4096, from the calling thread. Returns when all
 * have completed. `step` is called once for each of the `depth` lanes, and again whenever the lane's
 * request has completed, until it returns 0. The requests are reads and writes as for queues, of files
 * that were opened with O_DIRECT. They complete in any order. Each is atomic with respect to all other
 * operations on its file, and coherent with the cache. Overlapping requests take effect in the order in
 * which they were submitted.
 *
 * With io_uring the requests go through a private ring with registered files. A buffer of
 * `millpond_buffers_alloc` is registered, too, if a request begins at the buffer's start and fits in it.
 * Registration costs time, so long runs benefit most. With another backend the requests run one after the
 * other.
 *
 * The memory that a request names is lent to it until its lane's next step. Until then it must stay valid,
 * memory to read into must not be used, and memory to write from must not change. `step` runs on this
 * thread, within this call. It may close files: a file of which no lane has a request any more gives its
 * descriptors back when the last of these lanes gets its next request, or none. With io_uring the kernel may hold up to
 * 32 closed files until then or until this call returns. It must not otherwise use files that have requests in
 * flight, nor wait for a thread that does, and must not be left by longjmp() or a C++ exception.
 *
 * Returns 0, also if requests failed, or
 * -EBADF       there is no such engine
 * -EINVAL      `depth` is out of its range
 * -EFAULT      `step` is NULL
 * or the error of the system when the ring was created. The result of a request is that of `millpond_read` or
 * `millpond_write` with O_DIRECT. -EBADF also: there is no such file; -EINVAL also: no such operation, flags
 * or reserved members are not 0, or the file was not opened with O_DIRECT.
 */
int millpond_pipeline_run(struct millpond_engine engine,
                          size_t depth,
                          millpond_step step,
                          void *context);

/**
 * Allocates `count` zeroed buffers of `bytes` bytes each, aligned to 4096 bytes, which suffices for
 * O_DIRECT on all file systems known to us. Stores their addresses at `memory`, an array of `count`. They
 * do not count against the engine's memory limit, may be used with any engine, and may outlive this one.
 *
 * Returns 0, or
 * -EBADF       there is no such engine
 * -EFAULT      `memory` is NULL
 * -EINVAL      `bytes` is 0, or the product is too large
 * -ENOMEM      there is no memory
 */
int millpond_buffers_alloc(struct millpond_engine engine,
                           size_t count,
                           size_t bytes,
                           void **memory);

/**
 * Frees `count` buffers of one or several calls of `millpond_buffers_alloc`. None may be in use by a
 * request that has not completed.
 *
 * Returns 0, or
 * -EFAULT      `memory` is NULL
 * -EINVAL      one of them is not an allocated buffer; none has been freed
 * -ENOMEM      there is no memory for a list of them; none has been freed
 */
int millpond_buffers_free(void *const *memory,
                          size_t count);

/**
 * Stores the engine's statistics at `stats`. The caller sets `stats->size`; that many bytes are stored,
 * and members that this version of the library does not know are 0. Takes a lock briefly.
 *
 * Returns 0, or
 * -EBADF       there is no such engine
 * -EFAULT      `stats` is NULL
 * -EINVAL      `size` is not the size of the struct
 */
int millpond_engine_stats(struct millpond_engine engine,
                          struct millpond_stats *stats);

/**
 * Writes the name of the engine's backend and the reason for that choice to `text`, as
 * `millpond_error_text` does: "uring: ..." or "threads: ...".
 *
 * Returns the length of the text, or
 * -EBADF       there is no such engine
 * -EFAULT      `text` is NULL and `bytes` is not 0
 */
int millpond_engine_back_end(struct millpond_engine engine, char *text, size_t bytes);

/**
 * Writes the operations that wait in the engine now to `text`, as `millpond_error_text` does: a line with
 * the memory in use, then a line for each operation with its reason and start time, the longest wait
 * first. For the diagnosis of hangs. Any thread may call it. Takes locks briefly, and waits for no
 * operation.
 *
 * Returns the length of the text, or
 * -EBADF       there is no such engine
 * -EFAULT      `text` is NULL and `bytes` is not 0
 */
int millpond_engine_dump(struct millpond_engine engine,
                         char *text,
                         size_t bytes);

/** The version of the library; MILLPOND_VERSION is the header's. A static string. */
const char *millpond_version(void);

/**
 * Writes the reason of the last failed call of this thread to `text`: the operation, and how much of it is
 * done. Writes at most `bytes` bytes with the terminating NUL, as `snprintf(3)` does. The text is for
 * people; for a program the returned errno suffices (see `strerror(3)`).
 *
 * Returns the length of the text, 0 where no call has failed, or
 * -EFAULT      `text` is NULL and `bytes` is not 0
 */
int millpond_error_text(char *text,
                        size_t bytes);

/**
 * Gives the resume address for a program that wants -EFAULT for inaccessible memory instead of SIGSEGV or
 * SIGBUS. The program's handler of both signals calls this with the interrupted program counter; if the
 * result is not 0, it sets the program counter to it and returns. The interrupted call then returns
 * -EFAULT.
 *
 * Async-signal-safe.
 *
 * Returns the address to resume at, or 0: the fault was not the library's access to the caller's memory.
 */
size_t millpond_fault_resume_address(size_t program_counter);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* MILLPOND_H */

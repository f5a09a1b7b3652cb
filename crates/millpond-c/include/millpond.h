/*
 * Millpond: a user-space file I/O engine for Linux. MIT or Apache-2.0.
 *
 * A page cache in the program itself: cached reads make no system call, take no lock and write no shared
 * memory; reads and writes of one file are atomic with respect to each other however long they are; the
 * memory in use has a hard limit. Link with -lmillpond.
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
 * RESULTS. What can fail returns a negative errno (-EIO), and leaves `errno` alone; nothing is stored at
 * addresses for results then, unless it says so. millpond_error_text() has the reason in words. Any
 * call may also return
 *     -EBADF              the handle is of no such object: never given out (0 never is), closed, of another
 *                         kind, or that of a parent process
 *     -EDEADLK            called by a signal handler that interrupted another call of this thread
 *     -ENOTRECOVERABLE    a fault in Millpond itself, told of on standard error: a panic, which leaves
 *                         no call. What the call did is unknown; close the file.
 *
 * HANDLES are numbers, passed by value; copies are the same handle. A number is given out once in the life
 * of a process and its children, so one that is used after its object was closed, or closed twice, gets
 * -EBADF and meets no other object, in whatever thread.
 *
 * THREADS. Any thread may call anything at any time, with one handle, too. Who closes a file that
 * another thread is in a call on does not disturb that call: it goes on, and the file with it. No call may
 * be made by a signal handler, nor be left by longjmp() or by pthread_cancel() (no call is a cancellation
 * point).
 *
 * OPTIONS are structs whose first member, `size`, is their sizeof, and of which all that is 0 is as if not
 * said: = {0}, then .size. So programs and libraries of different versions understand each other, or get
 * -E2BIG for what is not known.
 *
 * MEMORY of a call is the caller's again when it returns, that of a queue's request when its completion
 * has been returned. What can't be accessed is met by SIGSEGV or SIGBUS, as by memcpy(), unless the program
 * has a handler that asks millpond_fault_resume_address(); where it is the kernel that meets it, by -EFAULT.
 * NULL for memory of a length is -EFAULT, always.
 *
 * FORK. A child has nothing of its parent's: all handles get -EBADF there, memory of
 * millpond_buffers_alloc() excepted, and nothing of the parent is disturbed; views must not be looked
 * at. It may make engines of its own at once. Children of vfork() and posix_spawn() may only become
 * other programs; files are close-on-exec.
 */

#ifndef MILLPOND_H
#define MILLPOND_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* The version of this header; millpond_version() is that of the library. */
#define MILLPOND_VERSION "0.1.0"
#define MILLPOND_VERSION_MAJOR 0
#define MILLPOND_VERSION_MINOR 1
#define MILLPOND_VERSION_PATCH 0

/** io_uring where a ring can be set up and reads a byte, else plain calls and a few threads. */
#define MILLPOND_BACKEND_AUTO 0

/** io_uring; creating the engine fails where the system refuses it. */
#define MILLPOND_BACKEND_URING 1

/** Plain calls, and a few threads for reads that nobody waits for. */
#define MILLPOND_BACKEND_THREADS 2

/** Every read takes the slow path: for comparison, and as an emergency stop. */
#define MILLPOND_ENGINE_NO_HIT_PATH 1

/** Nothing is read ahead. */
#define MILLPOND_ENGINE_NO_READAHEAD 2

/** Room for the address of a keeper, its NUL included. */
#define MILLPOND_KEEPER_ADDRESS_BYTES 128

/** A write reaches the kernel before it returns. */
#define MILLPOND_WRITE_THROUGH 0

/**
 * A write stays in the cache, and reaches the kernel by age, by amount, with a sync, or when the last
 * handle of the file is closed. Goes best with MILLPOND_BACKING_DIRECT: else each byte is cached twice.
 */
#define MILLPOND_WRITE_BACK 1

/** Through the kernel's page cache, which is then a second level. */
#define MILLPOND_BACKING_BUFFERED 0

/**
 * O_DIRECT: the kernel caches nothing. What is not a whole block at an edge of a write goes through the
 * kernel's cache, coherently.
 */
#define MILLPOND_BACKING_DIRECT 1

/** O_DIRECT without opening the file a second time, which would break a lease on it. */
#define MILLPOND_BACKING_DIRECT_IN_PLACE 2

/** Through the kernel's page cache, which is asked to forget at once what it took or gave. */
#define MILLPOND_BACKING_UNCACHED 3

/** Of a file that is opened with O_DIRECT: what is not aligned is served, too, by way of a buffer that is. */
#define MILLPOND_OPEN_BOUNCE 1

/** No particular pattern: read-ahead as detected. */
#define MILLPOND_ADVICE_NORMAL 0

/** Read in order: read-ahead starts at once, and with twice the window. */
#define MILLPOND_ADVICE_SEQUENTIAL 1

/** Read in no order: this handle starts no read-ahead. */
#define MILLPOND_ADVICE_RANDOM 2

/** Will be read soon: what can be brought without waiting is. */
#define MILLPOND_ADVICE_WILL_NEED 3

/** Won't be read soon: what is cached and not in use is dropped. */
#define MILLPOND_ADVICE_DONT_NEED 4

/**
 * Reads of this handle need not be of one moment: of one that covers several pages, each page is whole,
 * and no older than the call. For programs with locks of their own.
 */
#define MILLPOND_ADVICE_TORN_READS 5

/** Reads of this handle are atomic, however many pages they cover (the default). */
#define MILLPOND_ADVICE_ATOMIC_READS 6

/** `millpond_persist` replaces nothing. */
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

/** Options of an engine. All that is 0 is as if not said. */
typedef struct millpond_engine_options {
    /** `sizeof(struct millpond_engine_options)`. */
    size_t size;
    /**
     * The hard memory limit, in bytes: cached pages, the tables that find them, and the objects of open
     * files. 16 KiB to 512 GiB. Default: a quarter of the machine's memory or of the cgroup's limit,
     * whichever is less.
     */
    uint64_t cache_bytes;
    /**
     * How much may wait to be written back, in bytes (`MILLPOND_WRITE_BACK`); beyond it, writers write
     * back themselves. Default, and at most: three quarters of it.
     */
    uint64_t dirty_bytes_max;
    /** How long a written page may wait to be written back, in milliseconds. Default 30,000. */
    uint64_t dirty_age_max_ms;
    /** The largest read-ahead window, in bytes. Default 1 MiB, and never more than 1/128 of the cache. */
    uint64_t readahead_bytes_max;
    /** How many reads of pages are under way at a time, 1 to 1024. Default 1024. */
    uint32_t reads_in_flight_max;
    /** `MILLPOND_BACKEND_...`. */
    uint32_t backend;
    /** `MILLPOND_ENGINE_...`, or'ed. */
    uint32_t flags;
    /** 0. */
    uint32_t reserved;
    /**
     * Where the keeper listens that writes back what this process leaves dirty when it dies, as
     * `millpond_keeper_spawn` or `millpond keeper` tells. Default, NULL: there is none. Read by
     * `millpond_engine_create` alone.
     */
    const char *keeper;
} millpond_engine_options;

/** A cache with a hard memory limit, and the back end below it. */
typedef struct millpond_engine {
    /** 0 is no engine. */
    uint64_t id;
} millpond_engine;

/** How a file is opened. All that is 0 is as if not said. */
typedef struct millpond_open_options {
    /** `sizeof(struct millpond_open_options)`. */
    size_t size;
    /**
     * As for `open(2)`: O_RDONLY, O_WRONLY or O_RDWR, or'ed with any of O_CREAT, O_EXCL (with O_CREAT),
     * O_TRUNC, O_APPEND, O_DSYNC, O_DIRECT, O_CLOEXEC (which is always set). `millpond_append` is the
     * call that appends: with O_APPEND `millpond_write` keeps writing where it was told to.
     *
     * O_DIRECT: reads and writes by this handle go past the cache, between the caller's memory and the
     * device, and see, and are seen by, everyone's cached ones. Offsets, addresses and lengths must be
     * aligned as the file system wants it, mostly to 512 or 4096 bytes.
     */
    uint32_t flags;
    /** Permission bits of a file that is created, before the umask. Default 0666. */
    uint32_t mode;
    /**
     * What of the file is read, cached and seen as one piece: a power of two from 4096 to 65536. Default
     * 4096, or that of the file where it is open already; another one than that is refused.
     */
    uint32_t page_bytes;
    /** `MILLPOND_WRITE_...`. Where the file is open already, the first opener's choice stands. */
    uint32_t write_mode;
    /**
     * `MILLPOND_BACKING_...`: how the engine reaches the file below its cache. Where the file is open
     * already, the first opener's choice stands.
     */
    uint32_t backing;
    /** `MILLPOND_OPEN_...`, or'ed. */
    uint32_t extra;
} millpond_open_options;

/** An open file. */
typedef struct millpond_file {
    /** 0 is no file. */
    uint64_t id;
} millpond_file;

/** Cached bytes of a file, borrowed: a snapshot, which does not change however the file does. */
typedef struct millpond_view {
    /** The bytes, to be read. They are there until the view is released. */
    const void *data;
    /** How many they are. */
    size_t len;
    /** What the library knows it by; 0 is no view. */
    uint64_t id;
} millpond_view;

/** A completion queue. */
typedef struct millpond_queue {
    /** 0 is no queue. */
    uint64_t id;
} millpond_queue;

/** Something for a queue to do. */
typedef struct millpond_request {
    /** The file, which stays open until the request has completed. */
    struct millpond_file file;
    /** A number that comes back with the completion. */
    uint64_t user_data;
    /** The first byte of the file that is concerned. Of syncs 0. */
    uint64_t offset;
    /** What is read into or written from. Of syncs NULL. */
    void *memory;
    /** How many bytes, or vectors. Of syncs 0. */
    size_t len;
    /** `MILLPOND_OP_...`. */
    uint32_t op;
    /** 0. */
    uint32_t flags;
    /** 0. */
    uint64_t reserved[2];
} millpond_request;

/** How a request ended. */
typedef struct millpond_completion {
    /** The number that the request was given. */
    uint64_t user_data;
    /** What the call would have returned: bytes, or a negative errno. -ECANCELED: cancelled. */
    int64_t result;
} millpond_completion;

/** One of the places of a pipeline, between two requests. */
typedef struct millpond_lane {
    /** Which place it is, from 0 on. */
    size_t number;
    /** What became of the request: bytes, or a negative errno. 0 at first. */
    int64_t result;
    /** The request that has ended, to be changed into the next one. All 0 at first, so also `op`. */
    struct millpond_request request;
} millpond_lane;

/**
 * What a pipeline calls for each lane, with the `context` that `millpond_pipeline_run` was given: returns
 * 0 if there is nothing more for the lane to do, else the lane's request is the next one.
 */
typedef int (*millpond_step)(void *context, struct millpond_lane *lane);

/**
 * What an engine has done since it was created. Counts are those of single moments: read while others
 * work, they need not fit each other exactly.
 */
typedef struct millpond_stats {
    /** `sizeof(struct millpond_stats)`, set by the caller. */
    size_t size;
    /** Pages that were read without a lock. */
    uint64_t hits;
    /** Pages that a read did not find cached. */
    uint64_t misses;
    /** Pages brought into the cache, read-ahead included. */
    uint64_t fills;
    /** Reads that were taken past the cache, as no page could be evicted. */
    uint64_t uncached_reads;
    /** Pages that read-ahead brought and that were read. */
    uint64_t readahead_used;
    /** Pages that read-ahead brought and that were not. */
    uint64_t readahead_wasted;
    /** Pages evicted to make room. */
    uint64_t evictions;
    /** Times a read without a lock started over, as a page had changed under its copy. */
    uint64_t hit_retries;
    /** Bytes that reads and writes moved for their callers. */
    uint64_t bytes_served;
    /** Bytes of those that were not cached on the way. */
    uint64_t bytes_passed;
    /** Direct reads and writes that were not aligned, and were served all the same. */
    uint64_t bounced;
    /** Reads that were handed to the kernel with O_DIRECT. */
    uint64_t direct_reads;
    /** Writes that were handed to the kernel with O_DIRECT. */
    uint64_t direct_writes;
    /** Reads that were handed to the kernel without. */
    uint64_t plain_reads;
    /** Writes that were handed to the kernel without. */
    uint64_t plain_writes;
    /** Memory in use, of the limit, in bytes. */
    uint64_t memory_bytes;
} millpond_stats;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Makes an engine, and stores its handle at `engine`. Starts no thread, opens no file.
 *
 * `options` may be NULL: all defaults. Files that are opened through several engines of one process share
 * one cached file, which belongs to the engine that opened it first.
 *
 * Returns 0, or
 * -EINVAL      an option is out of its range, or its struct's size is wrong
 * -E2BIG       an option that this version of the library does not know is not 0
 * -EFAULT      `engine` is NULL
 * -ENOMEM      the memory can't be reserved
 * -EMFILE      there are 1,048,576 engines
 * or what the system said to the back end that was asked for, or to the connection to the keeper.
 */
int millpond_engine_create(const struct millpond_engine_options *options,
                           struct millpond_engine *engine);

/**
 * Gives an engine up: its handle is of nothing from then on. The engine itself, with its memory, goes with
 * the last of its open files and queues.
 *
 * Blocks for no longer than it takes to free memory.
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
 * Turns the path of cached reads that takes no lock on (`on` is not 0) or off, for the files of this
 * engine.
 *
 * Returns 0, or
 * -EBADF       there is no such engine
 */
int millpond_engine_set_hit_path(struct millpond_engine engine,
                                 int on);

/**
 * Parts from the keeper, if there is one: writes back what is dirty, and has the keeper let go of the
 * engine's memory and files. Later writes go through. Blocks for writes that are under way. To be called
 * before the process becomes another program (exec).
 *
 * Returns 0, or
 * -EBADF       there is no such engine
 */
int millpond_engine_leave_keeper(struct millpond_engine engine);

/**
 * Whether the keeper died before the engine parted from it: then writes go through, and what waits in the
 * cache would not survive a kill of this process. Costs no more than a look at memory.
 *
 * Returns 0 or 1, or
 * -EBADF       there is no such engine
 */
int millpond_engine_has_lost_keeper(struct millpond_engine engine);

/**
 * Starts a keeper in a process of its own, which writes back what this process leaves dirty when it dies,
 * and ends when nothing is left to do. Writes where it listens, for `millpond_engine_options.keeper`, to
 * `address`, which has room for `bytes` bytes, at least MILLPOND_KEEPER_ADDRESS_BYTES.
 *
 * Call it before the program has threads: it forks. The keeper is no child that has to be waited for.
 *
 * Returns 0, or
 * -EFAULT      `address` is NULL
 * -ERANGE      `bytes` is too small; nothing was started
 * or what `fork(2)` or `bind(2)` said.
 */
int millpond_keeper_spawn(char *address,
                          size_t bytes);

/**
 * Opens the file at `path`, or creates it, as `options` say (NULL: for reading), and stores its handle at
 * `file`. Only regular files can be opened.
 *
 * Blocks as `open(2)` does, and while a keeper writes what a dead process left of the file.
 *
 * Returns 0, or what `open(2)` said (-ENOENT, -EACCES, ...), or
 * -EBADF       there is no such engine
 * -EINVAL      options that contradict each other, or the file as it is open already; no direct I/O here
 * -E2BIG       an option that this version of the library does not know is not 0
 * -EFAULT      `path` or `file` is NULL
 * -EISDIR      a directory
 * -ENOTSUP     no regular file
 * -ENOBUFS     the memory limit has no room for another file
 * -EMFILE      there are 1,048,576 files, or the system has no descriptor
 */
int millpond_open(struct millpond_engine engine,
                  const char *path,
                  const struct millpond_open_options *options,
                  struct millpond_file *file);

/**
 * `millpond_open` of a descriptor, which must permit what `options` ask for; of these those about the
 * cache count, and O_TRUNC. The descriptor stays the caller's, who may close it: it is duplicated. Its
 * offset is never used.
 *
 * POSIX locks that the process has on the file (`F_SETLK`) are dropped when any descriptor of it is closed:
 * by `millpond_close`, too, but not by a call of this one that fails, unless it fails to truncate (O_TRUNC) or
 * to open the file once more for direct I/O.
 *
 * Returns as for `millpond_open`, and
 * -EBADF       also: `descriptor` is not open
 * -EINVAL      also: the descriptor does not permit what the options ask for
 */
int millpond_open_descriptor(struct millpond_engine engine,
                             int descriptor,
                             const struct millpond_open_options *options,
                             struct millpond_file *file);

/**
 * Closes a file: its handle is of nothing from then on, whatever is returned.
 *
 * Writes back what waits in the cache, without making it durable, and blocks for that. Calls on the file
 * that other threads are in, requests of queues and views go on, and the file stays open for them. A call
 * that begins after this one has begun gets -EBADF.
 *
 * Returns 0, or
 * -EBADF       there is no such file
 * -EDEADLK     called by a signal handler that interrupted another call of this thread; still open
 * or an error of a write that no sync has mended yet, or of writing back: it is the last chance to hear
 * of it.
 */
int millpond_close(struct millpond_file file);

/**
 * The file's length, in bytes. Never blocks.
 *
 * Returns it, or
 * -EBADF       there is no such file
 */
int64_t millpond_len(struct millpond_file file);

/**
 * Reads `len` bytes at byte `offset` into `memory`. Atomic with respect to all other operations on the
 * file, however long it is. Nothing needs to be aligned (with O_DIRECT, all).
 *
 * Cached bytes are read without a lock, a system call or waiting. Else blocks until the pages were read,
 * or until a writer of the same pages is done. Not interrupted by signals.
 *
 * Returns the bytes read, fewer than `len` only at the end of the file, or where bytes follow that can't
 * be read: a read of those says why. Beyond them `memory` is as it was, or zero. Or
 * -EBADF       there is no such file, it is not open for reading, or is that of a parent process
 * -EINVAL      the range ends beyond INT64_MAX; with O_DIRECT, something is not aligned
 * -EFAULT      `memory` is NULL; or as the introduction says
 * -EIO, ...    the first byte could not be read; what is in `memory` is unspecified
 */
int64_t millpond_read(struct millpond_file file,
                      void *memory,
                      size_t len,
                      uint64_t offset);

/**
 * `millpond_read` into `count` pieces of memory in turn, as one atomic read.
 *
 * Returns as for `millpond_read`, and
 * -EINVAL      also: `count` is negative
 */
int64_t millpond_readv(struct millpond_file file,
                       const struct iovec *vectors,
                       int count,
                       uint64_t offset);

/**
 * `millpond_read` of what is cached, as `preadv2(2)` with RWF_NOWAIT: never waits, and starts nothing
 * that would bring the bytes.
 *
 * Returns as for `millpond_read`, and
 * -EAGAIN      a page is not cached, or being changed, or the bytes are more than 64 pages; what is in
 *              `memory` is unspecified
 * -EINVAL      also: the file was opened with O_DIRECT
 */
int64_t millpond_try_read(struct millpond_file file,
                          void *memory,
                          size_t len,
                          uint64_t offset);

/**
 * Tells how a range of the file will be used (`len` 0: to the end). NORMAL, SEQUENTIAL, RANDOM, TORN_READS
 * and ATOMIC_READS concern all later reads by this handle, whatever the range. Never blocks.
 *
 * `advice` is one of `MILLPOND_ADVICE_...`.
 *
 * Returns 0, or
 * -EBADF       there is no such file
 * -EINVAL      an advice that there is not, or the range ends beyond INT64_MAX
 */
int millpond_advise(struct millpond_file file,
                    uint64_t offset,
                    uint64_t len,
                    uint32_t advice);

/**
 * Writes `len` bytes from `memory` at byte `offset`. Readers see all of it, or nothing. The memory is the
 * caller's again when this returns.
 *
 * With MILLPOND_WRITE_THROUGH the kernel has the bytes then; with MILLPOND_WRITE_BACK they are in the
 * cache. With O_DSYNC they are durable. Blocks while operations on the same pages are under way, for the
 * kernel, and for room in the cache. Not interrupted by signals.
 *
 * Returns the bytes written, fewer than `len` where the file system took only a part; or
 * -EBADF       there is no such file, it is not open for writing, or is that of a parent process
 * -EINVAL      the range ends beyond INT64_MAX; with O_DIRECT, something is not aligned
 * -EFAULT      `memory` is NULL; or as the introduction says: nothing was written
 * -EIO, -ENOSPC, -EFBIG, ...   nothing was written
 */
int64_t millpond_write(struct millpond_file file,
                       const void *memory,
                       size_t len,
                       uint64_t offset);

/**
 * `millpond_write` from `count` pieces of memory in turn, as one atomic write.
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
 * Otherwise as `millpond_write`. Stores where they begin at `offset`, which may be NULL.
 *
 * Returns as for `millpond_write`.
 */
int64_t millpond_append(struct millpond_file file,
                        const void *memory,
                        size_t len,
                        uint64_t *offset);

/**
 * `millpond_append` from `count` pieces of memory in turn, as one atomic write.
 *
 * Returns as for `millpond_writev`.
 */
int64_t millpond_appendv(struct millpond_file file,
                         const struct iovec *vectors,
                         int count,
                         uint64_t *offset);

/**
 * Sets the file's length, in bytes: cuts it, or extends it with zeros. Blocks while operations beyond the
 * smaller of both lengths are under way.
 *
 * Returns 0, or
 * -EBADF       there is no such file, or it is not open for writing
 * -EINVAL      `len` is more than INT64_MAX
 * or what the file system said; nothing has changed then.
 */
int millpond_truncate(struct millpond_file file,
                      uint64_t len);

/**
 * Makes `len` bytes at `offset` read as zeros, and gives their space back. The file's length stays; what
 * lies beyond it is ignored. Readers see all of it, or nothing. Blocks while operations on pages of the
 * range are under way, and until the file system is done.
 *
 * Returns 0, or
 * -EBADF       there is no such file, or it is not open for writing
 * -EINVAL      `len` is 0, or the range ends beyond INT64_MAX
 * -EOPNOTSUPP  the file system can't; nothing has changed
 * or what the file system said; each byte of the range may be as it was, or zero.
 */
int millpond_punch_hole(struct millpond_file file,
                        uint64_t offset,
                        uint64_t len);

/**
 * Makes `len` bytes at `offset` read as zeros and keeps their space. The file's length stays, and the
 * range is clipped to it. Where the file system can't, zeros are written. Blocks as
 * `millpond_punch_hole` does.
 *
 * Returns as for `millpond_punch_hole`.
 */
int millpond_zero_range(struct millpond_file file,
                        uint64_t offset,
                        uint64_t len);

/**
 * Reserves space for `len` bytes at `offset`, so that writes to them do not fail for lack of it; a file
 * that ends before is extended, with zeros. Blocks while the range is being changed.
 *
 * Returns 0, or
 * -EBADF       there is no such file, or it is not open for writing
 * -EINVAL      `len` is 0, or the range ends beyond INT64_MAX
 * -EOPNOTSUPP  the file system can't
 * -ENOSPC, -EDQUOT, -EFBIG     a part may be reserved, and the file may have been extended by a part
 */
int millpond_allocate(struct millpond_file file,
                      uint64_t offset,
                      uint64_t len);

/**
 * The first byte from `offset` on that is not in a hole, as `lseek(2)` with SEEK_DATA; the offset of no
 * file changes. May wait for the file system, and writes back what waits from `offset` on.
 *
 * Returns its offset, or
 * -ENXIO       only a hole follows, or the file ends before `offset`
 * -EBADF       there is no such file
 * -EINVAL      `offset` is more than INT64_MAX
 * or what the file system said.
 */
int64_t millpond_seek_data(struct millpond_file file,
                           uint64_t offset);

/**
 * The first byte from `offset` on that is in a hole; the end of the file counts as one.
 *
 * Returns as for `millpond_seek_data`; -ENXIO: `offset` is at or beyond the end.
 */
int64_t millpond_seek_hole(struct millpond_file file, uint64_t offset);

/**
 * Tells the cache that something else changed the file: drops the cached bytes of the range (`len` 0:
 * none) and adopts the length that the file has now. Blocks while operations on the range are under way.
 *
 * Returns 0, or
 * -EBADF       there is no such file
 * -EINVAL      the range ends beyond INT64_MAX
 * or what the system said when it was asked for the length.
 */
int millpond_invalidate(struct millpond_file file,
                        uint64_t offset,
                        uint64_t len);

/**
 * Makes what was written, through whatever handle, and the file's metadata durable: `fsync(2)`. Blocks
 * until the device has it.
 *
 * Nothing is dropped on failure: what could not be written stays cached, and the next sync tries again.
 *
 * Returns 0, or
 * -EBADF       there is no such file
 * or what the file system said (-EIO, -ENOSPC, ...), until a sync has succeeded.
 */
int millpond_sync(struct millpond_file file);

/**
 * `millpond_sync` of the bytes, and of as much metadata as is needed to read them: `fdatasync(2)`.
 *
 * Returns as for `millpond_sync`.
 */
int millpond_sync_data(struct millpond_file file);

/**
 * `millpond_sync_data` of what was written to `len` bytes at `offset` (`len` 0: to the end). Other bytes
 * may become durable, too.
 *
 * Returns as for `millpond_sync`, and
 * -EINVAL      the range ends beyond INT64_MAX
 */
int millpond_sync_range(struct millpond_file file,
                        uint64_t offset,
                        uint64_t len);

/**
 * Hands what waits in the cache (MILLPOND_WRITE_BACK) to the kernel, so that others can see it there;
 * does not make it durable. Blocks until the kernel has it.
 *
 * Returns as for `millpond_sync`.
 */
int millpond_write_back(struct millpond_file file);

/**
 * Makes the file durable, renames it from `from` to `to`, in place of what had that name, and makes the
 * name durable. After a power cut `to` is what it was, or this file. `from` must be a name of this file;
 * equal to `to` it renames nothing. Blocks until the device has it all.
 *
 * `flags` is 0, or MILLPOND_PERSIST_NOCLOBBER.
 *
 * Returns 0, or what the failing step said; `millpond_error_text` says which step, and so what has changed
 * and what is durable. Also
 * -EBADF       there is no such file
 * -EFAULT      a path is NULL
 * -EINVAL      `from` is no name of this file, or a flag that there is not
 * -EEXIST      something has the name `to`, and MILLPOND_PERSIST_NOCLOBBER was set
 */
int millpond_persist(struct millpond_file file,
                     const char *from,
                     const char *to,
                     uint32_t flags);

/**
 * Borrows cached bytes: at most `len` from byte `offset` on, and no further than the end of the page or of
 * the file; 0 at and beyond the end. Stores the view at `view`. It pins a page of the cache until it is
 * released. Blocks until the page was read.
 *
 * The memory is the cache's: writing to it is a fault of the program that nothing catches. The file may be
 * closed before the view is released.
 *
 * Returns 0, or
 * -EBADF       there is no such file, it is not open for reading, or is that of a parent process
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
 * Releases a view: its memory must not be used any more. Sets all of `view` to 0. Of copies of the struct,
 * one is to be released.
 *
 * Returns 0, or
 * -EBADF       there is no such view, or it was released before
 * -EFAULT      `view` is NULL
 */
int millpond_view_release(struct millpond_view *view);

/**
 * Makes a completion queue with room for `capacity` requests that are under way, or complete and not
 * waited for, 1 to 1,048,576, and stores its handle at `queue`. Its requests may be of files of any engine.
 * Any number of threads may submit and wait.
 *
 * Returns 0, or
 * -EBADF       there is no such engine
 * -EFAULT      `queue` is NULL
 * -EINVAL      another capacity
 * -EAGAIN      the system gives no thread
 * -EMFILE      there are 1,048,576 queues
 */
int millpond_queue_create(struct millpond_engine engine,
                          size_t capacity,
                          struct millpond_queue *queue);

/**
 * Destroys a queue. Blocks until all its requests have ended; their completions are lost, and their memory
 * is the caller's again when this returns.
 *
 * Returns 0, or
 * -EBADF       there is no such queue
 * -EBUSY       a thread waits for it; nothing has changed
 */
int millpond_queue_destroy(struct millpond_queue queue);

/**
 * Submits the first of `count` requests, in turn, as many as the queue has room for. Requests that are
 * under way together are carried out in any order, at the same time: what must come after something else
 * is submitted when that has completed.
 *
 * Does not wait for I/O. Reads of what is cached complete at once. The array of requests is the caller's
 * again when this returns; the memory that they name is lent to the queue until their completions have
 * been returned, or the queue is destroyed: until then it must stay valid, what is read into must not be
 * used, and what is written must not change. Whatever becomes of the thread that submitted.
 *
 * Returns how many were submitted, fewer than `count` where the queue is full, or the next request can't
 * be submitted as it is; if that is the first one,
 * -EAGAIN      the queue is full: wait first
 * -EBADF       there is no such queue, or no such file
 * -EINVAL      no such operation; flags, reserved members, or members of a sync are not 0
 * -EFAULT      `requests`, a request's memory or that of a vector is NULL
 * What is wrong with what a request asks of its file, its completion says.
 */
int64_t millpond_queue_submit(struct millpond_queue queue,
                              const struct millpond_request *requests,
                              size_t count);

/**
 * Waits until `min` requests have completed, and stores `min` to `max` completions at `completions`, an
 * array of `max`; when `timeout_ns` nanoseconds have passed (less than 0: never), what is there, maybe
 * nothing. `min` 0 takes what is there and never blocks. Among several waiters who wants least is served first, and exactly `min` are
 * returned to each, but nobody is passed by for ever.
 *
 * Blocks without spinning, and is woken once; not interrupted by signals.
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
 * `millpond_queue_wait`, but for `min` completions for no longer than `min_wait_ns` nanoseconds: after
 * that, one is enough (as with io_uring's `min_wait`).
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
 * Cancels one request that was submitted with `user_data` and has not completed: it completes with
 * -ECANCELED, and has done nothing.
 *
 * Returns 0, or
 * -EBADF       there is no such queue
 * -ENOENT      there is no such request, or it can't be stopped any more
 */
int millpond_queue_cancel(struct millpond_queue queue, uint64_t user_data);

/**
 * An eventfd for loops of `poll(2)` and the like: readable when there are completions that no waiter was
 * given. Its count is of those that came since it was last read; somebody else may take them first.
 * Non-blocking, close-on-exec; to be read, not written nor closed: it is the queue's, and goes with it.
 *
 * Returns the descriptor, or
 * -EBADF       there is no such queue
 * -EMFILE, -ENFILE     the system has no descriptor
 */
int millpond_queue_eventfd(struct millpond_queue queue);

/**
 * How many requests have completed and were given to nobody (at `ready`), and how many are under way (at
 * `in_flight`). Each may be NULL.
 *
 * Returns 0, or
 * -EBADF       there is no such queue
 */
int millpond_queue_counts(struct millpond_queue queue,
                          size_t *ready,
                          size_t *in_flight);

/**
 * Keeps up to `depth` direct requests under way, 1 to 4096, from the calling thread, and returns when all
 * have ended. `step` is called for each lane, as many as `depth`, and again whenever its request has ended,
 * until it returns 0. Requests are those of queues, to read and to write, of files that were opened with
 * O_DIRECT. They end in any order; each is atomic with respect to all other operations on its file, and
 * coherent with the cache; those that overlap take effect in the order in which they were given.
 *
 * With io_uring they go through a ring of this call's own, with files registered, and memory, too, where a
 * request's begins where a piece of `millpond_buffers_alloc` does, and lies in it: so long runs are the ones
 * that pay. With another back end they are carried out one after the other.
 *
 * The memory that a request names is lent to it until its lane's next step: until then it must stay valid,
 * what is read into must not be used, and what is written must not change. `step` is called by this
 * thread, within this call. It may close files; it must not otherwise use files that have requests under
 * way, nor wait for a thread that does, and is not to be left by longjmp() or a C++ exception.
 *
 * Returns 0, whatever became of requests, or
 * -EBADF       there is no such engine
 * -EINVAL      another depth
 * -EFAULT      `step` is NULL
 * or what the system said when it was asked for a ring. The result of a request is that of `millpond_read` or
 * `millpond_write` with O_DIRECT; -EBADF also: there is no such file; -EINVAL also: no such
 * operation, flags or reserved members are not 0, or the file was not opened with O_DIRECT.
 */
int millpond_pipeline_run(struct millpond_engine engine,
                          size_t depth,
                          millpond_step step,
                          void *context);

/**
 * Gives out `count` pieces of memory of `bytes` bytes each, zero, and aligned to 4096 bytes, which is
 * enough for O_DIRECT on every file system known to us. Stores their addresses at `memory`, an array of
 * `count`. The engine's memory limit does not count them; they may be used with any engine, and outlive
 * this one.
 *
 * Returns 0, or
 * -EBADF       there is no such engine
 * -EFAULT      `memory` is NULL
 * -EINVAL      `bytes` is 0, or the product too large
 * -ENOMEM      there is no memory
 */
int millpond_buffers_alloc(struct millpond_engine engine,
                           size_t count,
                           size_t bytes,
                           void **memory);

/**
 * Gives `count` pieces of memory back, of one or several `millpond_buffers_alloc`. None may be in use by a
 * request that has not completed.
 *
 * Returns 0, or
 * -EFAULT      `memory` is NULL
 * -EINVAL      one of them was not given out, or has been given back; none has been given back then
 */
int millpond_buffers_free(void *const *memory,
                          size_t count);

/**
 * Stores what the engine has done at `stats`, whose `size` the caller has set: as many bytes as that,
 * those that this version of the library does not know as 0. Takes a lock for a moment.
 *
 * Returns 0, or
 * -EBADF       there is no such engine
 * -EFAULT      `stats` is NULL
 * -EINVAL      its size is not that of the struct
 */
int millpond_engine_stats(struct millpond_engine engine,
                          struct millpond_stats *stats);

/**
 * Writes which back end the engine has, and why, to `text`, as `millpond_error_text` does: "uring: ..." or
 * "threads: ...".
 *
 * Returns the length of the text, or
 * -EBADF       there is no such engine
 * -EFAULT      `text` is NULL and `bytes` is not 0
 */
int millpond_engine_back_end(struct millpond_engine engine,
                             char *text,
                             size_t bytes);

/**
 * Writes what waits in the engine now, for what and since when, to `text`, as `millpond_error_text` does: a line
 * with the memory in use, and one for each operation that waits, the longest first. For people, when
 * something hangs; any thread may ask. Takes locks for moments, and waits for no operation.
 *
 * Returns the length of the text, or
 * -EBADF       there is no such engine
 * -EFAULT      `text` is NULL and `bytes` is not 0
 */
int millpond_engine_dump(struct millpond_engine engine,
                         char *text,
                         size_t bytes);

/** The version of the library, as MILLPOND_VERSION is that of the header. A string that stays. */
const char *millpond_version(void);

/**
 * Writes why the last call of this thread that failed did so: what it was about, and what of it is done.
 * At most `bytes` bytes, the NUL that ends it included, as `snprintf(3)` does. What a call returns that
 * fails says enough to go on (see `strerror(3)`); this is for people.
 *
 * Returns the length of the text, 0 where no call has failed, or
 * -EFAULT      `text` is NULL and `bytes` is not 0
 */
int millpond_error_text(char *text,
                        size_t bytes);

/**
 * For a program that wants -EFAULT for memory that can't be accessed, instead of SIGSEGV or SIGBUS: its
 * handler of both calls this with the interrupted program counter, and if the result is not 0, sets the
 * program counter to it and returns. The call that was interrupted then returns -EFAULT.
 *
 * Async-signal-safe.
 *
 * Returns where to go on, or 0: the fault was not one of the library with the caller's memory; always 0 on
 * AArch64, where such a fault can't be turned into an error yet.
 */
size_t millpond_fault_resume_address(size_t program_counter);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* MILLPOND_H */

//! What an engine has done.

use std::ffi::{c_char, c_int};

use crate::call::{call, fault, invalid, status, write_text};
use crate::engine::millpond_engine;
use crate::objects::ENGINES;

/// What an engine has done since it was created. Counts are those of single moments: read while others
/// work, they need not fit each other exactly.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct millpond_stats {
    /// `sizeof(struct millpond_stats)`, set by the caller.
    pub size: usize,
    /// Pages that were read without a lock.
    pub hits: u64,
    /// Pages that a read did not find cached.
    pub misses: u64,
    /// Pages brought into the cache, read-ahead included.
    pub fills: u64,
    /// Reads that were taken past the cache, as no page could be evicted.
    pub uncached_reads: u64,
    /// Pages that read-ahead brought and that were read.
    pub readahead_used: u64,
    /// Pages that read-ahead brought and that were not.
    pub readahead_wasted: u64,
    /// Pages evicted to make room.
    pub evictions: u64,
    /// Times a read without a lock started over, as a page had changed under its copy.
    pub hit_retries: u64,
    /// Bytes that reads and writes moved for their callers.
    pub bytes_served: u64,
    /// Bytes of those that were not cached on the way.
    pub bytes_passed: u64,
    /// Direct reads and writes that were not aligned, and were served all the same.
    pub bounced: u64,
    /// Reads that were handed to the kernel with O_DIRECT.
    pub direct_reads: u64,
    /// Writes that were handed to the kernel with O_DIRECT.
    pub direct_writes: u64,
    /// Reads that were handed to the kernel without.
    pub plain_reads: u64,
    /// Writes that were handed to the kernel without.
    pub plain_writes: u64,
    /// Memory in use, of the limit, in bytes.
    pub memory_bytes: u64,
}

/// Stores what the engine has done at `stats`, whose `size` the caller has set: as many bytes as that,
/// those that this version of the library does not know as 0. Takes a lock for a moment.
///
/// Returns 0, or
/// -EBADF       there is no such engine
/// -EFAULT      `stats` is NULL
/// -EINVAL      its size is not that of the struct
///
/// # Safety
///
/// `stats` is NULL, or valid for writes of as many bytes as its `size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millpond_engine_stats(
    engine: millpond_engine,
    stats: *mut millpond_stats,
) -> c_int {
    status(|| {
        let engine = ENGINES.get(engine.id)?;
        if stats.is_null() {
            return Err(fault("the address for the counts is NULL"));
        }
        // SAFETY: our caller's promise.
        let size = unsafe { (*stats).size };
        if !(size_of::<millpond_stats>()..=4096).contains(&size) {
            return Err(invalid("the size member is not the size of the struct"));
        }
        let now = engine.stats();
        let known = millpond_stats {
            size,
            hits: now.hits,
            misses: now.misses,
            fills: now.fills,
            uncached_reads: now.uncached_reads,
            readahead_used: now.readahead_used,
            readahead_wasted: now.readahead_wasted,
            evictions: now.evictions,
            hit_retries: now.hit_retries,
            bytes_served: now.bytes_served,
            bytes_passed: now.bytes_passed,
            bounced: now.bounced,
            direct_reads: now.direct_reads,
            direct_writes: now.direct_writes,
            plain_reads: now.plain_reads,
            plain_writes: now.plain_writes,
            memory_bytes: now.memory_bytes,
        };
        // SAFETY: our caller's promise.
        unsafe {
            stats.cast::<u8>().write_bytes(0, size);
            stats.write(known);
        }
        Ok(())
    })
}

/// Writes which back end the engine has, and why, to `text`, as `millpond_error_text` does: "uring: ..." or
/// "threads: ...".
///
/// Returns the length of the text, or
/// -EBADF       there is no such engine
/// -EFAULT      `text` is NULL and `bytes` is not 0
///
/// # Safety
///
/// `text` is valid for writes of `bytes` bytes, or NULL and `bytes` 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millpond_engine_back_end(
    engine: millpond_engine,
    text: *mut c_char,
    bytes: usize,
) -> c_int {
    call(|| {
        let now = ENGINES.get(engine.id)?.stats();
        // SAFETY: our caller's promise.
        unsafe { write_text(&format!("{}: {}", now.back_end, now.back_end_reason), text, bytes) }
    }) as c_int
}

/// Writes what waits in the engine now, for what and since when, to `text`, as `millpond_error_text` does: a line
/// with the memory in use, and one for each operation that waits, the longest first. For people, when
/// something hangs; any thread may ask. Takes locks for moments, and waits for no operation.
///
/// Returns the length of the text, or
/// -EBADF       there is no such engine
/// -EFAULT      `text` is NULL and `bytes` is not 0
///
/// # Safety
///
/// `text` is valid for writes of `bytes` bytes, or NULL and `bytes` 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millpond_engine_dump(
    engine: millpond_engine,
    text: *mut c_char,
    bytes: usize,
) -> c_int {
    call(|| {
        let now = ENGINES.get(engine.id)?.dump();
        // SAFETY: our caller's promise.
        unsafe { write_text(&now.to_string(), text, bytes) }
    }) as c_int
}

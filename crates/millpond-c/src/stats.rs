//! Statistics of an engine.

use std::ffi::{c_char, c_int};

use crate::call::{call, fault, invalid, status, write_text};
use crate::engine::millpond_engine;
use crate::objects::ENGINES;

/// Statistics of an engine since its creation. The counters are read one after another while operations
/// run, so they need not match each other exactly.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct millpond_stats {
    /// `sizeof(struct millpond_stats)`, set by the caller.
    pub size: usize,
    /// Pages that were read without a lock.
    pub hits: u64,
    /// Pages that a read did not find in the cache.
    pub misses: u64,
    /// Pages read into the cache, read-ahead included.
    pub fills: u64,
    /// Reads that bypassed the cache because no page could be evicted.
    pub uncached_reads: u64,
    /// Pages of read-ahead that were read.
    pub readahead_used: u64,
    /// Pages of read-ahead that were evicted unread.
    pub readahead_wasted: u64,
    /// Pages evicted to make room.
    pub evictions: u64,
    /// Retries of lock-free reads whose page changed during the copy.
    pub hit_retries: u64,
    /// Bytes that reads and writes moved for their callers.
    pub bytes_served: u64,
    /// Bytes of these that bypassed the cache.
    pub bytes_passed: u64,
    /// Direct reads and writes that were not aligned, and were served through an aligned buffer.
    pub bounced: u64,
    /// Reads passed to the kernel with O_DIRECT.
    pub direct_reads: u64,
    /// Writes passed to the kernel with O_DIRECT.
    pub direct_writes: u64,
    /// Reads passed to the kernel without O_DIRECT.
    pub plain_reads: u64,
    /// Writes passed to the kernel without O_DIRECT.
    pub plain_writes: u64,
    /// Memory in use, in bytes; counts against the limit.
    pub memory_bytes: u64,
}

/// Stores the engine's statistics at `stats`. The caller sets `stats->size`; that many bytes are stored,
/// and members that this version of the library does not know are 0. Takes a lock briefly.
///
/// Returns 0, or
/// -EBADF       there is no such engine
/// -EFAULT      `stats` is NULL
/// -EINVAL      `size` is not the size of the struct
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
            return Err(fault("the address for the statistics is NULL"));
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

/// Writes the name of the engine's backend and the reason for that choice to `text`, as
/// `millpond_error_text` does: "uring: ..." or "threads: ...".
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

/// Writes the operations that wait in the engine now to `text`, as `millpond_error_text` does: a line with
/// the memory in use, then a line for each operation with its reason and start time, the longest wait
/// first. For the diagnosis of hangs. Any thread may call it. Takes locks briefly, and waits for no
/// operation.
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

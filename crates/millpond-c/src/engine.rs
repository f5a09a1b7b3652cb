//! Engines, and the recovery daemon ("keeper") that an engine may use.

use std::ffi::{CStr, c_char, c_int};
use std::time::Duration;

use millpond::keeper::Address;
use millpond::{BackendChoice, Engine};

use crate::call::{
    Failure, Outcome, call, fault, invalid, read_options, status, store, write_text,
};
use crate::objects::ENGINES;

/// io_uring where a ring can be set up and reads a byte (Linux 5.11), else blocking system calls and a few threads.
pub const MILLPOND_BACKEND_AUTO: u32 = 0;
/// io_uring (Linux 5.11). Creation of the engine fails where the system refuses it.
pub const MILLPOND_BACKEND_URING: u32 = 1;
/// Blocking system calls, and a few threads for background reads.
pub const MILLPOND_BACKEND_THREADS: u32 = 2;

/// Disables the lock-free read path: for comparison, and as an emergency switch.
pub const MILLPOND_ENGINE_NO_HIT_PATH: u32 = 1;
/// Disables read-ahead.
pub const MILLPOND_ENGINE_NO_READAHEAD: u32 = 2;

/// Size of a buffer for the address of a keeper, with its NUL.
pub const MILLPOND_KEEPER_ADDRESS_BYTES: usize = 128;

/// A cache with a hard memory limit, and the storage backend below it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct millpond_engine {
    /// 0: no engine.
    pub id: u64,
}

/// Options of an engine. Zero-initialised members take their defaults.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct millpond_engine_options {
    /// `sizeof(struct millpond_engine_options)`.
    pub size: usize,
    /// The hard memory limit, in bytes: cached pages, the tables that find them, and the objects of open
    /// files. 16 KiB to 512 GiB, with a keeper at least 256 KiB. Default: a quarter of the machine's memory
    /// or of the cgroup's limit, whichever is less.
    pub cache_bytes: u64,
    /// The limit for dirty bytes (`MILLPOND_WRITE_BACK`). Above it, writers write back themselves. The
    /// default, and the maximum, is three quarters of the cache.
    pub dirty_bytes_max: u64,
    /// The maximum age of a dirty page before its write-back, in milliseconds. Default 30,000.
    pub dirty_age_max_ms: u64,
    /// The largest read-ahead window, in bytes. Default 1 MiB; at most 1/128 of the cache.
    pub readahead_bytes_max: u64,
    /// The maximum number of page reads in flight, 1 to 1024. Default 1024.
    pub reads_in_flight_max: u32,
    /// `MILLPOND_BACKEND_...`.
    pub backend: u32,
    /// `MILLPOND_ENGINE_...`, or'ed.
    pub flags: u32,
    /// Reserved; must be 0.
    pub reserved: u32,
    /// The address of a keeper, which writes back this process's dirty pages after its death.
    /// `millpond_keeper_spawn` returns one; or the argument of `millpond keeper`. Default: NULL, no
    /// keeper. Read by `millpond_engine_create` only.
    pub keeper: *const c_char,
}

impl Default for millpond_engine_options {
    fn default() -> Self {
        millpond_engine_options {
            size: 0,
            cache_bytes: 0,
            dirty_bytes_max: 0,
            dirty_age_max_ms: 0,
            readahead_bytes_max: 0,
            reads_in_flight_max: 0,
            backend: 0,
            flags: 0,
            reserved: 0,
            keeper: std::ptr::null(),
        }
    }
}

/// Creates an engine and stores its handle at `engine`. Starts no thread, opens no file.
///
/// `options` may be NULL for all defaults. Files that are opened through several engines of one process
/// share one cached file, which belongs to the engine that opened it first.
///
/// Returns 0, or
/// -EINVAL      an option is out of its range, or its struct's size is wrong
/// -E2BIG       an option that this version of the library does not know is not 0
/// -EFAULT      `engine` is NULL
/// -ENOMEM      the memory can't be reserved
/// -EMFILE      there are 1,048,576 engines
/// or the error of the requested backend, or of the connection to the keeper.
///
/// # Safety
///
/// `options` is NULL or valid for its size, `engine` NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millpond_engine_create(
    options: *const millpond_engine_options,
    engine: *mut millpond_engine,
) -> c_int {
    status(|| {
        if engine.is_null() {
            return Err(fault("the address for the engine is NULL"));
        }
        // SAFETY: our caller's promise.
        let built = unsafe { build(options) }?;
        let id = ENGINES
            .insert(built)
            .map_err(|_| Failure::Refused(libc::EMFILE, "there are too many engines"))?;
        // SAFETY: our caller's promise.
        unsafe { store(engine, millpond_engine { id }) }
    })
}

/// # Safety
///
/// As for [`millpond_engine_create`].
unsafe fn build(options: *const millpond_engine_options) -> Outcome<Engine> {
    // SAFETY: our caller's promise; numbers and a pointer.
    let options = unsafe { read_options(options, size_of::<millpond_engine_options>()) }?;
    let mut builder = Engine::builder();
    if options.cache_bytes > 0 {
        builder = builder.cache_bytes(options.cache_bytes);
    }
    if options.dirty_bytes_max > 0 {
        builder = builder.dirty_bytes_max(options.dirty_bytes_max);
    }
    if options.dirty_age_max_ms > 0 {
        builder = builder.dirty_age_max(Duration::from_millis(options.dirty_age_max_ms));
    }
    if options.readahead_bytes_max > 0 {
        builder = builder.readahead_bytes_max(options.readahead_bytes_max);
    }
    if options.reads_in_flight_max > 0 {
        builder = builder.reads_in_flight_max(options.reads_in_flight_max as usize);
    }
    let known = MILLPOND_ENGINE_NO_HIT_PATH | MILLPOND_ENGINE_NO_READAHEAD;
    if options.flags & !known != 0 || options.reserved != 0 {
        return Err(invalid("an unknown flag"));
    }
    if options.flags & MILLPOND_ENGINE_NO_READAHEAD != 0 {
        builder = builder.readahead_bytes_max(0);
    }
    builder = builder.hit_path(options.flags & MILLPOND_ENGINE_NO_HIT_PATH == 0);
    builder = builder.backend(match options.backend {
        MILLPOND_BACKEND_AUTO => BackendChoice::Auto,
        MILLPOND_BACKEND_URING => BackendChoice::Uring,
        MILLPOND_BACKEND_THREADS => BackendChoice::Threads,
        _ => return Err(invalid("an unknown backend")),
    });
    if !options.keeper.is_null() {
        // SAFETY: our caller's promise.
        let text = unsafe { CStr::from_ptr(options.keeper) };
        let text = text.to_str().map_err(|_| invalid("the keeper's address is not UTF-8"))?;
        builder = builder.keeper(text.parse::<Address>()?);
    }
    Ok(builder.build()?)
}

/// Destroys the handle of an engine. The engine and its memory are released with the last of its open files
/// and queues.
///
/// Blocks only for the time that it takes to free memory.
///
/// Returns 0, or
/// -EBADF       there is no such engine
#[unsafe(no_mangle)]
pub extern "C" fn millpond_engine_destroy(engine: millpond_engine) -> c_int {
    status(|| {
        drop(ENGINES.take(engine.id)?);
        Ok(())
    })
}

/// The engine's memory limit, in bytes.
///
/// Returns it, or
/// -EBADF       there is no such engine
#[unsafe(no_mangle)]
pub extern "C" fn millpond_engine_cache_bytes(engine: millpond_engine) -> i64 {
    call(|| Ok(ENGINES.get(engine.id)?.cache_bytes() as i64))
}

/// Enables (`on` is not 0) or disables the lock-free read path for the files of this engine.
///
/// Returns 0, or
/// -EBADF       there is no such engine
#[unsafe(no_mangle)]
pub extern "C" fn millpond_engine_set_hit_path(engine: millpond_engine, on: c_int) -> c_int {
    status(|| {
        ENGINES.get(engine.id)?.set_hit_path(on != 0);
        Ok(())
    })
}

/// Detaches from the keeper, if there is one: writes back the dirty pages, and has the keeper close the
/// engine's memory and files. Later writes are written through. Blocks for writes in flight. For a program
/// that is about to call exec().
///
/// Returns 0, or
/// -EBADF       there is no such engine
#[unsafe(no_mangle)]
pub extern "C" fn millpond_engine_leave_keeper(engine: millpond_engine) -> c_int {
    status(|| {
        ENGINES.get(engine.id)?.detach_keeper();
        Ok(())
    })
}

/// Whether the keeper died before the engine detached from it. If so, writes are written through, and dirty
/// pages of the cache would not survive a kill of this process. Costs one load from memory.
///
/// Returns 0 or 1, or
/// -EBADF       there is no such engine
#[unsafe(no_mangle)]
pub extern "C" fn millpond_engine_has_lost_keeper(engine: millpond_engine) -> c_int {
    call(|| Ok(i64::from(ENGINES.get(engine.id)?.has_lost_keeper()))) as c_int
}

/// Starts a keeper in a separate process. It writes back this process's dirty pages after its death, and
/// exits when nothing is left to do. Writes its address, for `millpond_engine_options.keeper`, to
/// `address`, a buffer of `bytes` bytes, at least MILLPOND_KEEPER_ADDRESS_BYTES.
///
/// Call it before the program has threads: it forks. The caller does not have to wait for the keeper as a
/// child.
///
/// Returns 0, or
/// -EFAULT      `address` is NULL
/// -ERANGE      `bytes` is too small; no process was started
/// or the error of `fork(2)` or `bind(2)`.
///
/// # Safety
///
/// `address` is NULL, or valid for writes of `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millpond_keeper_spawn(address: *mut c_char, bytes: usize) -> c_int {
    status(|| {
        if address.is_null() {
            return Err(fault("the address for the keeper's address is NULL"));
        }
        if bytes < MILLPOND_KEEPER_ADDRESS_BYTES {
            return Err(Failure::Refused(
                libc::ERANGE,
                "the buffer for the keeper's address is too small",
            ));
        }
        let spawned = millpond::keeper::spawn()?.to_string();
        // SAFETY: our caller's promise.
        unsafe { write_text(&spawned, address, bytes) }?;
        Ok(())
    })
}

//! Engines and keepers.

use std::ffi::{CStr, c_char, c_int};
use std::time::Duration;

use millpond::keeper::Address;
use millpond::{BackendChoice, Engine};

use crate::call::{Failure, Outcome, call, fault, invalid, sized, status, store, write_text};
use crate::objects::ENGINES;

/// io_uring where a ring can be set up and reads a byte, else plain calls and a few threads.
pub const MILLPOND_BACKEND_AUTO: u32 = 0;
/// io_uring; creating the engine fails where the system refuses it.
pub const MILLPOND_BACKEND_URING: u32 = 1;
/// Plain calls, and a few threads for reads that nobody waits for.
pub const MILLPOND_BACKEND_THREADS: u32 = 2;

/// Every read takes the slow path: for comparison, and as an emergency stop.
pub const MILLPOND_ENGINE_NO_HIT_PATH: u32 = 1;
/// Nothing is read ahead.
pub const MILLPOND_ENGINE_NO_READAHEAD: u32 = 2;

/// Room for the address of a keeper, its NUL included.
pub const MILLPOND_KEEPER_ADDRESS_BYTES: usize = 128;

/// A cache with a hard memory limit, and the back end below it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct millpond_engine {
    /// 0 is no engine.
    pub id: u64,
}

/// Options of an engine. All that is 0 is as if not said.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct millpond_engine_options {
    /// `sizeof(struct millpond_engine_options)`.
    pub size: usize,
    /// The hard memory limit, in bytes: cached pages, the tables that find them, and the objects of open
    /// files. 16 KiB to 512 GiB. Default: a quarter of the machine's memory or of the cgroup's limit,
    /// whichever is less.
    pub cache_bytes: u64,
    /// How much may wait to be written back, in bytes (`MILLPOND_WRITE_BACK`); beyond it, writers write
    /// back themselves. Default, and at most: three quarters of it.
    pub dirty_bytes_max: u64,
    /// How long a written page may wait to be written back, in milliseconds. Default 30,000.
    pub dirty_age_max_ms: u64,
    /// The largest read-ahead window, in bytes. Default 1 MiB, and never more than 1/128 of the cache.
    pub readahead_bytes_max: u64,
    /// How many reads of pages are under way at a time, 1 to 1024. Default 1024.
    pub reads_in_flight_max: u32,
    /// `MILLPOND_BACKEND_...`.
    pub backend: u32,
    /// `MILLPOND_ENGINE_...`, or'ed.
    pub flags: u32,
    /// 0.
    pub reserved: u32,
    /// Where the keeper listens that writes back what this process leaves dirty when it dies, as
    /// `millpond_keeper_spawn` or `millpond keeper` tells. Default, NULL: there is none. Read by
    /// `millpond_engine_create` alone.
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

/// Makes an engine, and stores its handle at `engine`. Starts no thread, opens no file.
///
/// `options` may be NULL: all defaults. Files that are opened through several engines of one process share
/// one cached file, which belongs to the engine that opened it first.
///
/// Returns 0, or
/// -EINVAL      an option is out of its range, or its struct's size is wrong
/// -E2BIG       an option that this version of the library does not know is not 0
/// -EFAULT      `engine` is NULL
/// -ENOMEM      the memory can't be reserved
/// -EMFILE      there are 1,048,576 engines
/// or what the system said to the back end that was asked for, or to the connection to the keeper.
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
    let options = unsafe { sized(options, size_of::<millpond_engine_options>()) }?;
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
        return Err(invalid("a flag that there is not"));
    }
    if options.flags & MILLPOND_ENGINE_NO_READAHEAD != 0 {
        builder = builder.readahead_bytes_max(0);
    }
    builder = builder.hit_path(options.flags & MILLPOND_ENGINE_NO_HIT_PATH == 0);
    builder = builder.backend(match options.backend {
        MILLPOND_BACKEND_AUTO => BackendChoice::Auto,
        MILLPOND_BACKEND_URING => BackendChoice::Uring,
        MILLPOND_BACKEND_THREADS => BackendChoice::Threads,
        _ => return Err(invalid("a back end that there is not")),
    });
    if !options.keeper.is_null() {
        // SAFETY: our caller's promise.
        let text = unsafe { CStr::from_ptr(options.keeper) };
        let text = text.to_str().map_err(|_| invalid("the keeper's address is not UTF-8"))?;
        builder = builder.keeper(text.parse::<Address>()?);
    }
    Ok(builder.build()?)
}

/// Gives an engine up: its handle is of nothing from then on. The engine itself, with its memory, goes with
/// the last of its open files and queues.
///
/// Blocks for no longer than it takes to free memory.
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

/// Turns the path of cached reads that takes no lock on (`on` is not 0) or off, for the files of this
/// engine.
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

/// Parts from the keeper, if there is one: writes back what is dirty, and has the keeper let go of the
/// engine's memory and files. Later writes go through. Blocks for writes that are under way. To be called
/// before the process becomes another program (exec).
///
/// Returns 0, or
/// -EBADF       there is no such engine
#[unsafe(no_mangle)]
pub extern "C" fn millpond_engine_leave_keeper(engine: millpond_engine) -> c_int {
    status(|| {
        ENGINES.get(engine.id)?.leave_keeper();
        Ok(())
    })
}

/// Whether the keeper died before the engine parted from it: then writes go through, and what waits in the
/// cache would not survive a kill of this process. Costs no more than a look at memory.
///
/// Returns 0 or 1, or
/// -EBADF       there is no such engine
#[unsafe(no_mangle)]
pub extern "C" fn millpond_engine_has_lost_keeper(engine: millpond_engine) -> c_int {
    call(|| Ok(i64::from(ENGINES.get(engine.id)?.has_lost_keeper()))) as c_int
}

/// Starts a keeper in a process of its own, which writes back what this process leaves dirty when it dies,
/// and ends when nothing is left to do. Writes where it listens, for `millpond_engine_options.keeper`, to
/// `address`, which has room for `bytes` bytes, at least MILLPOND_KEEPER_ADDRESS_BYTES.
///
/// Call it before the program has threads: it forks. The keeper is no child that has to be waited for.
///
/// Returns 0, or
/// -EFAULT      `address` is NULL
/// -ERANGE      `bytes` is too small; nothing was started
/// or what `fork(2)` or `bind(2)` said.
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
            return Err(Failure::Refused(libc::ERANGE, "too little room for the keeper's address"));
        }
        let spawned = millpond::keeper::spawn()?.to_string();
        // SAFETY: our caller's promise.
        unsafe { write_text(&spawned, address, bytes) }?;
        Ok(())
    })
}

//! Retirement: the library leaves the program alone permanently. Its files become the kernel's, the library's threads
//! end, and a hook makes only the caller's call.
//!
//! This comes before calls whose outcome depends on the threads, the memory and the system calls of the whole process:
//!
//! - the program forbids itself system calls (seccomp), or ends its main thread and goes on with others;
//! - it locks its memory ([`lock_memory`]);
//! - a thread gets the asynchronous cancel type, by which it may end amid the library's work (`cancel.C4`);
//! - it enters a name space that takes no process of several threads ([`end_threads`]).
//!
//! ```text
//! dirty pages are written, files are the kernel's    Registry::release_all_files
//! counts are reported: no exit will report them      report::report_exec
//! hooks go straight to the kernel                    thread::disable_hooks
//! descriptions, engine and watcher end               Registry::end_serving, lease::end
//! the kernel has no thread of the library any more   own_threads
//! ```
//!
//! A child of fork is left alone too; a program that the process executes is not.
//!
//! Locks: none is held; the registry's is taken.

use std::ffi::{c_int, c_void};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::files::{lease, pressure, registry, table};
use crate::page_cache;
use crate::report;
use crate::runtime::sys::sys;
use crate::runtime::{own_threads, section, thread};

/// Maximum wait for the end of a thread, which may be writing to a device that hangs. Chosen.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_micros(100);

/// Its value in the main thread is not null.
static KEY: AtomicU32 = AtomicU32::new(u32::MAX);

/// Called by the main thread while the library is loaded: libc calls `end_main` when the main thread ends by
/// `pthread_exit` or a cancellation.
pub fn initialise() {
    unsafe extern "C" fn end_main(_: *mut c_void) {
        retire();
    }
    let mut key = 0;
    // SAFETY: `key` is ours to write, and `end_main` takes any value.
    if unsafe { libc::pthread_key_create(&mut key, Some(end_main)) } == 0 {
        KEY.store(key, Relaxed);
        after_fork();
    }
}

/// In a forked child: its main thread is the thread that forked.
pub fn after_fork() {
    let key = KEY.load(Relaxed);
    if key != u32::MAX {
        // SAFETY: made in `initialise`; the value is not used.
        unsafe { libc::pthread_setspecific(key, (&raw const KEY).cast()) };
    }
}

/// See the module header. Does nothing if hooks already go directly to the kernel.
pub fn retire() {
    if thread::record().is_inside() {
        return;
    }
    page_cache::retire();
    section::run(|_| registry::lock().release_all_files());
    report::report_exec(registry::before_report);
    section::run(|_| {
        let mut registry = registry::lock();
        // Under the lock, so that a fork is completely before or after it.
        thread::disable_hooks();
        registry.end_serving();
        drop(registry);
        pressure::end();
        lease::end();
        let end = Instant::now() + PATIENCE;
        while !own_threads::are_gone() && Instant::now() < end {
            std::thread::sleep(PAUSE);
            // A call in flight may have made the last use of a description.
            registry::lock().closing.end();
        }
    });
}

/// [`retire`], if the library has threads.
pub fn end_threads() {
    if !thread::record().is_inside()
        && (lease::is_watched() || section::run(|_| registry::has_engine()))
    {
        retire();
    }
}

/// `mlockall`: only a few pages of the library's memory are locked.
pub fn lock_memory(call: impl FnOnce() -> c_int) -> c_int {
    retire();
    let result = call();
    if result == 0 && thread::is_away() {
        for (start, bytes) in [table::memory(), page_cache::memory()] {
            release(start, bytes);
        }
    }
    result
}

/// Releases pages whose contents are not needed any more.
fn release(start: *const c_void, bytes: usize) {
    // SAFETY: whole pages of the library's own, which are zero from here on: hooks of a retired
    // library find no known number there.
    unsafe {
        sys!(libc::SYS_munlock, start, bytes);
        sys!(libc::SYS_madvise, start, bytes, libc::MADV_DONTNEED);
    }
}

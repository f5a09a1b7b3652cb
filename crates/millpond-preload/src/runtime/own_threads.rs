//! The threads of the library and its engine, and whether the kernel still has them.
//!
//! - **O1** A thread is counted as starting from before it is made until its id is in the table.
//! - **O2** An id stays in the table until the kernel does not know it any more.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI32, AtomicU32};

use crate::runtime::sys::sys;

/// Maximum number of threads; the engine has a few dozen at most.
const THREADS_MAX: usize = 256;

static STARTING: AtomicU32 = AtomicU32::new(0);
/// Zero: free.
static IDS: [AtomicI32; THREADS_MAX] = [const { AtomicI32::new(0) }; THREADS_MAX];

/// O1: before a thread is made.
pub fn begin_start() {
    STARTING.fetch_add(1, Relaxed);
}

/// O1: the thread could not be made.
pub fn cancel_start() {
    STARTING.fetch_sub(1, Relaxed);
}

/// O1: called by the started thread.
pub fn note_started() {
    // SAFETY: no memory involved.
    let own = unsafe { sys!(libc::SYS_gettid) } as i32;
    for id in &IDS {
        let old = id.load(Relaxed);
        if (old == 0 || is_gone(old)) && id.compare_exchange(old, own, Relaxed, Relaxed).is_ok() {
            break;
        }
    }
    // Release: pairs with the Acquire in `are_gone`, which finds the id then.
    STARTING.fetch_sub(1, Release);
}

/// Whether the kernel has none of the threads any more.
pub fn are_gone() -> bool {
    // Acquire: pairs with the Release in `note_started`.
    STARTING.load(Acquire) == 0
        && IDS.iter().map(|id| id.load(Relaxed)).all(|id| id == 0 || is_gone(id))
}

/// In a forked child, which has none.
pub fn after_fork() {
    STARTING.store(0, Relaxed);
    IDS.iter().for_each(|id| id.store(0, Relaxed));
}

fn is_gone(id: i32) -> bool {
    // SAFETY: signal 0 is none: the kernel looks for the thread, and does nothing.
    unsafe { sys!(libc::SYS_tgkill, sys!(libc::SYS_getpid), id, 0) == -libc::ESRCH as isize }
}

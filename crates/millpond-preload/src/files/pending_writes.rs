//! Writes and syncs that were asked for and have not ended: the thread that ends the process waits
//! for them.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::files::table;
use crate::runtime::lock;

static WRITES: AtomicU32 = AtomicU32::new(0);

/// One more.
pub fn begin() {
    WRITES.fetch_add(1, Relaxed);
}

/// One less.
pub fn end() {
    // Release: pairs with `wait`.
    if WRITES.fetch_sub(1, Release) == 1 {
        lock::wake(&WRITES);
    }
}

/// Before the process ends, or becomes another program: submitted writes have ended.
pub fn wait() {
    // In a child of a fork that no handler saw no thread carries them out.
    while table::is_initialised() {
        // Acquire: pairs with the end of the last write.
        match WRITES.load(Acquire) {
            0 => return,
            left => lock::wait(&WRITES, left),
        }
    }
}

/// In a forked child: they are the parent's.
pub fn after_fork() {
    WRITES.store(0, Relaxed);
}

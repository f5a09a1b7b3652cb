//! Whether a file may be served for writing, and whether any is: see `writeback_policy`.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicUsize};

use crate::report::reason::Reason;

/// Descriptions that are or were served: zero means that nothing waits.
static OPEN: AtomicUsize = AtomicUsize::new(0);
/// The process ends, or becomes another program: nothing may begin to wait.
static ENDING: AtomicBool = AtomicBool::new(false);
/// There should be a keeper, and there is none.
static UNKEPT: AtomicBool = AtomicBool::new(false);

/// Whether some file here may have bytes that wait.
#[inline]
pub fn is_any() -> bool {
    OPEN.load(Relaxed) != 0
}

pub fn opened() {
    OPEN.fetch_add(1, Relaxed);
}

pub fn closed() {
    OPEN.fetch_sub(1, Relaxed);
}

/// The keeper can't be had.
pub fn note_keeper_refusal() {
    UNKEPT.store(true, Relaxed);
}

/// Whether a process that is killed now loses nothing, as far as it should not.
pub fn is_kept() -> bool {
    !UNKEPT.load(Relaxed)
}

/// From now on nothing may begin to wait; or it may again.
pub fn set_ending(is_ending: bool) {
    ENDING.store(is_ending, SeqCst);
}

/// In a forked child.
pub fn after_fork() {
    UNKEPT.store(false, Relaxed);
    OPEN.store(0, Relaxed);
    ENDING.store(false, Relaxed);
}

/// Why the kernel has a file that was opened for writing with `flags`, if it is none for mode back.
pub fn refusal(flags: i32) -> Option<Reason> {
    // O_SYNC has this bit, too. One system call does what such a write asks for.
    if flags & libc::O_DSYNC != 0 {
        return Some(Reason::Synchronous);
    }
    (!is_kept() || ENDING.load(SeqCst) || has_size_limit()).then_some(Reason::Engine)
}

/// With a limit on the size of files it is the write that must fail, and the writer that gets a
/// signal.
fn has_size_limit() -> bool {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is ours to write.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) } == 0;
    !known || limit.rlim_cur != libc::RLIM_INFINITY
}

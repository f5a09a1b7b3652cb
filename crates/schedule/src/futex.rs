use rustix::io::{Errno, Result};
use rustix::time::Timespec;

use crate::scheduler::{block, now, point, wake as wake_key};
use crate::sync::atomic::AtomicU32;

/// Only private futexes, as another process is not part of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flags(());

impl Flags {
    /// As rustix's.
    pub const PRIVATE: Flags = Flags(());
}

/// Sleeps while `word` is `expected`, at most for `limit`.
///
/// # Errors
///
/// `EAGAIN`: `word` is not `expected`. `ETIMEDOUT`: `limit` has passed.
pub fn wait(word: &AtomicU32, _: Flags, expected: u32, limit: Option<&Timespec>) -> Result<()> {
    let until = limit.map(|limit| {
        let nanos = (limit.tv_sec as u64).saturating_mul(1_000_000_000) + limit.tv_nsec as u64;
        now().saturating_add(nanos)
    });
    point();
    // SAFETY: the reference keeps it valid, and it is accessed only by atomics of this crate, one thread at a time.
    if unsafe { word.as_ptr().read() } != expected {
        return Err(Errno::AGAIN);
    }
    match block(word.as_ptr().addr(), "a futex", until) {
        true => Ok(()),
        false => Err(Errno::TIMEDOUT),
    }
}

/// Wakes at most `count` sleepers; returns their number.
///
/// # Errors
///
/// None.
pub fn wake(word: &AtomicU32, _: Flags, count: u32) -> Result<usize> {
    point();
    Ok(wake_key(word.as_ptr().addr(), count as usize))
}

//! A list of a lock's guards in debug builds, to report self-deadlocks.
//!
//! This is a warning and not an error, as another thread may release the guard. A thread that has waited for
//! [`REPORT_AFTER`] for a range that it locked itself prints one message on standard error, with both source locations,
//! and continues to wait.

use std::cell::Cell;
use std::collections::HashMap;
use std::panic::Location;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::range::{ByteRange, Mode};

/// Time after which a wait is checked for a self-deadlock.
pub(crate) const REPORT_AFTER: Duration = Duration::from_millis(500);

#[derive(Debug)]
struct Holder {
    range: ByteRange,
    mode: Mode,
    thread: u64,
    location: &'static Location<'static>,
}

/// Number of the calling thread. Unlike `thread::current`, it is available while thread-local values are dropped, where
/// the program may lock a range.
fn current_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static NUMBER: Cell<u64> = const { Cell::new(0) };
    }
    if NUMBER.get() == 0 {
        // Relaxed: only distinctness matters.
        NUMBER.set(NEXT.fetch_add(1, Relaxed));
    }
    NUMBER.get()
}

/// The guards of one lock, by number.
#[derive(Debug, Default)]
pub(crate) struct Holders {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    next: u64,
    guards: HashMap<u64, Holder>,
}

impl Holders {
    fn inner(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[track_caller]
    pub(crate) fn add(&self, range: ByteRange, mode: Mode) -> u64 {
        let (thread, location) = (current_thread(), Location::caller());
        let mut inner = self.inner();
        inner.next += 1;
        let number = inner.next;
        inner.guards.insert(number, Holder { range, mode, thread, location });
        number
    }

    pub(crate) fn set_mode(&self, number: u64, mode: Mode) {
        if let Some(holder) = self.inner().guards.get_mut(&number) {
            holder.mode = mode;
        }
    }

    pub(crate) fn remove(&self, number: u64) {
        self.inner().guards.remove(&number);
    }

    /// The message if the current thread holds a range that conflicts with its request.
    pub(crate) fn self_deadlock_message(
        &self,
        range: ByteRange,
        mode: Mode,
        location: &Location<'_>,
    ) -> Option<String> {
        let thread = current_thread();
        let inner = self.inner();
        let own = inner.guards.values().find(|holder| {
            holder.thread == thread
                && holder.range.overlaps(range)
                && holder.mode.conflicts_with(mode)
        })?;
        Some(format!(
            "millpond-rangelock: a thread waits at {location} for {range} ({mode:?}), which \
             conflicts with {} ({:?}) that it locked itself at {}; unless another thread releases \
             that, it waits indefinitely",
            own.range, own.mode, own.location,
        ))
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn names_both_places() {
        let holders = Holders::default();
        let range = ByteRange::raw(0, 10);
        let number = holders.add(range, Mode::Shared);
        let here = Location::caller();
        assert!(holders.self_deadlock_message(range, Mode::Shared, here).is_none());
        let message =
            holders.self_deadlock_message(ByteRange::raw(5, 6), Mode::Exclusive, here).unwrap();
        assert_eq!(message.matches("holders.rs").count(), 2, "{message}");
        assert!(message.contains("0..10 (Shared)"), "{message}");
        holders.remove(number);
        assert!(holders.self_deadlock_message(range, Mode::Exclusive, here).is_none());
    }

    #[test]
    fn another_threads_guard_is_no_deadlock() {
        let holders = Holders::default();
        let range = ByteRange::raw(0, 10);
        thread::scope(|scope| {
            scope.spawn(|| holders.add(range, Mode::Exclusive));
        });
        assert!(holders.self_deadlock_message(range, Mode::Shared, Location::caller()).is_none());
    }
}

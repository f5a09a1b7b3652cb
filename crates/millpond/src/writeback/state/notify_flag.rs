//! A notification flag that coalesces wake-ups: only the first notifier since the last scan writes
//! shared memory.
//!
//! - **NF1** A notifier makes its work visible, fences, and reads the flag. The scanning thread
//!   clears the flag, fences, and then scans. So if a notifier finds the flag set and does nothing
//!   else, the next scan sees its work.
//!
//! Locks: none.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use crate::sync::{AtomicBool, fence};

pub(crate) struct NotifyFlag(AtomicBool);

impl NotifyFlag {
    pub(crate) fn new() -> NotifyFlag {
        NotifyFlag(AtomicBool::new(false))
    }

    /// Announces new work. Returns whether this is the first call since the flag was cleared.
    #[must_use]
    pub(crate) fn set(&self) -> bool {
        // NF1; pairs with the fence in `clear`.
        fence(SeqCst);
        !self.0.load(Relaxed) && !self.0.swap(true, Relaxed)
    }

    /// Called before a scan. Returns whether the flag was set.
    pub(crate) fn clear(&self) -> bool {
        let rung = self.0.swap(false, Relaxed);
        // NF1; pairs with the fence in `set`.
        fence(SeqCst);
        rung
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::sync::{Arc, AtomicU32, Condvar, Mutex};
    use loom::thread;

    struct Pair {
        flag: NotifyFlag,
        /// The work of the two writers, read without a lock.
        done: [AtomicU32; 2],
        wake_requested: Mutex<bool>,
        work: Condvar,
    }

    impl Pair {
        /// A writer, as in [`Flusher::request_scan`](crate::writeback::state::Flusher).
        fn write(&self, number: usize) {
            self.done[number].store(1, Relaxed);
            if self.flag.set() {
                *self.wake_requested.lock().unwrap() = true;
                self.work.notify_one();
            }
        }

        /// The worker of the flusher, until it has seen the work of both writers.
        fn serve(&self) {
            loop {
                let mut wake_requested = self.wake_requested.lock().unwrap();
                *wake_requested = false;
                self.flag.clear();
                drop(wake_requested);
                if self.done.iter().all(|done| done.load(Relaxed) == 1) {
                    return;
                }
                wake_requested = self.wake_requested.lock().unwrap();
                while !*wake_requested {
                    wake_requested = self.work.wait(wake_requested).unwrap();
                }
            }
        }
    }

    /// Goal: the sleeping thread notices each write, although all but one of the writers only read
    /// the flag. Method: two writers and the sleeper. Without its wake-up the sleeper sleeps
    /// forever, which loom detects.
    #[test]
    fn loom_no_notification_is_missed() {
        let mut model = loom::model::Builder::new();
        // Three threads; without a bound it takes minutes.
        model.preemption_bound = Some(2);
        model.check(|| {
            let pair = Arc::new(Pair {
                flag: NotifyFlag::new(),
                done: [AtomicU32::new(0), AtomicU32::new(0)],
                wake_requested: Mutex::new(false),
                work: Condvar::new(),
            });
            let writers = [0, 1].map(|number| {
                let pair = Arc::clone(&pair);
                thread::spawn(move || pair.write(number))
            });
            pair.serve();
            writers.into_iter().for_each(|writer| writer.join().unwrap());
        });
    }
}

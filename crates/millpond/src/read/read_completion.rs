//! Completion notification of a background read, for the task that needs its bytes.
//!
//! ```text
//!   end:   bytes, and arrived --> take the waker, under its lock --> wake
//!   call:  arrived? no --> leave a waker there, under its lock --> arrived?
//! ```
//!
//! - **AR1** A task that finds the read under way at its second look is woken, by the waker of its last call: the end
//!   of the read has not taken the waker by then.
//! - **AR2** A task that finds the read ended finds its bytes.

use std::sync::atomic::Ordering::{Acquire, Release};
use std::task::Waker;

use millpond_rangelock::callback::TaskWaker;

use crate::sync::MutexExt;
use crate::sync::{AtomicU64, Mutex};

const UNDER_WAY: u64 = u64::MAX;

pub(crate) struct ReadCompletion {
    /// The number of bytes that have arrived, or [`UNDER_WAY`].
    bytes: AtomicU64,
    waker: Mutex<Option<TaskWaker>>,
}

impl ReadCompletion {
    pub(crate) fn new(waker: TaskWaker) -> ReadCompletion {
        ReadCompletion { bytes: AtomicU64::new(UNDER_WAY), waker: Mutex::new(Some(waker)) }
    }

    /// Ends the read with that many bytes. Returns the task to wake.
    pub(crate) fn end(&self, bytes: u64) -> Option<TaskWaker> {
        // Release: AR2.
        self.bytes.store(bytes, Release);
        self.waker.acquire().take()
    }

    /// Whether the read has ended. If not, `waker` is woken at its end (AR1).
    pub(crate) fn has_ended_or_wakes(&self, waker: &Waker) -> bool {
        if self.bytes() != UNDER_WAY {
            return true;
        }
        // Cloned before the lock is taken, and dropped after it (`millpond_rangelock::callback`).
        let fresh = TaskWaker::new(waker);
        let mut told = self.waker.acquire();
        let old = if told.is_some() { told.replace(fresh) } else { Some(fresh) };
        drop(told);
        drop(old);
        self.bytes() != UNDER_WAY
    }

    /// The bytes of a read that has ended.
    pub(crate) fn bytes(&self) -> u64 {
        // Acquire: AR2.
        self.bytes.load(Acquire)
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use std::sync::Arc as Untracked;
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::Relaxed;
    use std::task::Wake;

    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    struct Woken(AtomicBool);

    impl Wake for Woken {
        fn wake(self: Untracked<Self>) {
            self.0.store(true, Relaxed);
        }
    }

    /// A read that ends beside a task that is called with another waker. `call` is the task's step.
    fn ends_beside_a_call(call: fn(&ReadCompletion, &Waker) -> bool) {
        loom::model(move || {
            let first = &Waker::from(Untracked::new(Woken(AtomicBool::new(false))));
            let shared = Arc::new((ReadCompletion::new(TaskWaker::new(first)), UnsafeCell::new(0)));
            let task = Untracked::new(Woken(AtomicBool::new(false)));
            let caller = thread::spawn({
                let (shared, task) = (Arc::clone(&shared), Untracked::clone(&task));
                move || {
                    let (arrival, byte) = &*shared;
                    let has_ended = call(arrival, &task.into());
                    if has_ended {
                        // SAFETY: loom checks this access for races.
                        assert_eq!((arrival.bytes(), byte.with(|byte| unsafe { *byte })), (1, 7));
                    }
                    has_ended
                }
            });
            let (arrival, byte) = &*shared;
            // SAFETY: as above.
            byte.with_mut(|byte| unsafe { *byte = 7 });
            if let Some(waker) = arrival.end(1) {
                waker.wake();
            }
            let has_ended = caller.join().unwrap();
            assert!(has_ended || task.0.load(Relaxed), "nobody wakes it");
        });
    }

    #[test]
    fn a_task_finds_the_bytes_or_is_woken() {
        ends_beside_a_call(ReadCompletion::has_ended_or_wakes);
    }

    #[test]
    #[should_panic(expected = "nobody wakes it")]
    fn twin_without_the_second_look() {
        ends_beside_a_call(|arrival, waker| {
            let has_ended = arrival.bytes() != UNDER_WAY;
            if !has_ended {
                arrival.has_ended_or_wakes(waker);
            }
            has_ended
        });
    }
}

//! A flag by which many tell one, who looks at everything again: all but the first that tells between
//! two looks write nothing that others read.
//!
//! - **NF1** A thread does what is to be seen, fences, and looks at the flag; the one that is told clears
//!   it, fences, and looks at what was done. So a thread that finds the flag set, and leaves it at that,
//!   is seen by the look that comes after.
//!
//! Locks: none.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use crate::sync::{AtomicBool, fence};

pub(crate) struct NotifyFlag(AtomicBool);

impl NotifyFlag {
    pub(crate) fn new() -> NotifyFlag {
        NotifyFlag(AtomicBool::new(false))
    }

    /// Something was done that is to be seen; whether this call is the first since the flag was cleared.
    #[must_use]
    pub(crate) fn set(&self) -> bool {
        // NF1; pairs with the fence in `clear`.
        fence(SeqCst);
        !self.0.load(Relaxed) && !self.0.swap(true, Relaxed)
    }

    /// Before a look at what was done; whether somebody has rung.
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
        /// What the two writers have done; looked at without a lock.
        done: [AtomicU32; 2],
        told: Mutex<bool>,
        work: Condvar,
    }

    impl Pair {
        /// As a writer: [`Flusher::tell`](crate::writeback::Flusher::tell).
        fn write(&self, number: usize) {
            self.done[number].store(1, Relaxed);
            if self.flag.set() {
                *self.told.lock().unwrap() = true;
                self.work.notify_one();
            }
        }

        /// As the thread on duty, until it has seen both.
        fn serve(&self) {
            loop {
                let mut told = self.told.lock().unwrap();
                *told = false;
                self.flag.clear();
                drop(told);
                if self.done.iter().all(|done| done.load(Relaxed) == 1) {
                    return;
                }
                told = self.told.lock().unwrap();
                while !*told {
                    told = self.work.wait(told).unwrap();
                }
            }
        }
    }

    /// Goal: the thread that sleeps learns of each write, though all but one of the writers only look.
    /// Method: two writers and the sleeper; one that is not told sleeps for ever, which loom finds.
    #[test]
    fn loom_nobody_is_missed() {
        let mut model = loom::model::Builder::new();
        // Three threads; without a bound it takes minutes.
        model.preemption_bound = Some(2);
        model.check(|| {
            let pair = Arc::new(Pair {
                flag: NotifyFlag::new(),
                done: [AtomicU32::new(0), AtomicU32::new(0)],
                told: Mutex::new(false),
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

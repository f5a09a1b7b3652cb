//! Signals: the word and futex on which one thread sleeps until its wait is granted or it becomes
//! the leader of a ring.
//!
//! ```text
//! WAITING -> sleep -> SLEEPING                       by its owner, before it enters the kernel
//! WAITING -> lead -> LEADING -> WAITING              by its owner, around a sleep in a ring (`reaper`)
//! WAITING | SLEEPING -> promote -> PROMOTED          by the thread that hands the ring over, which wakes it
//! PROMOTED -> WAITING                                by its owner, when it sees the promotion
//! any -> grant -> GRANTED                            by the thread that ends the wait, once; wakes a sleeper
//! ```
//!
//! - **SG1** A signal serves one wait. The waker has a reference to it: the wake is its last
//!   access, and the signal outlives it, independently of concurrent actions of its owner.
//! - **SG2** Either the waker's exchange finds SLEEPING, or the owner's exchange finds the new
//!   state, or the word changes before the kernel compares it. So no wake-up is lost.
//! - **SG3** All accesses are Relaxed. The word only indicates when to check: granted completions
//!   are collected under the lock of the queue, and the role's holder is known under the lock of
//!   the role.
//! - **SG4** GRANTED is final: a promotion that meets it has no effect, and its owner finds out
//!   under the lock of the role that it was given the ring.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use crate::sync::AtomicU32;

const WAITING: u32 = 0;
const SLEEPING: u32 = 1;
const GRANTED: u32 = 2;
const LEADING: u32 = 3;
const PROMOTED: u32 = 4;

/// One wait of one thread.
pub(crate) struct Signal {
    word: AtomicU32,
    #[cfg(loom)]
    futex: (crate::sync::Mutex<()>, crate::sync::Condvar),
}

/// How a sleep ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Woken {
    Granted,
    /// The thread is now the ring's reaper.
    Promoted,
    TimedOut,
}

impl Signal {
    pub(crate) fn new() -> Signal {
        Signal {
            word: AtomicU32::new(WAITING),
            #[cfg(loom)]
            futex: (crate::sync::Mutex::new(()), crate::sync::Condvar::new()),
        }
    }

    /// Ends the wait. The caller holds no lock, and does not access the signal again (SG1). Returns
    /// true if the owner sleeps in its ring; the caller then pokes the ring.
    #[must_use]
    pub(crate) fn grant(&self) -> bool {
        match self.set_granted() {
            SLEEPING => {
                self.futex_wake();
                false
            }
            before => before == LEADING,
        }
    }

    /// Returns the previous word (SG2).
    fn set_granted(&self) -> u32 {
        self.word.swap(GRANTED, Relaxed)
    }

    pub(crate) fn is_granted(&self) -> bool {
        self.word.load(Relaxed) == GRANTED
    }

    /// Makes the owner take over the ring (SG4). As for `grant`, this is the last access.
    pub(crate) fn promote(&self) {
        let promoted = self.word.fetch_update(Relaxed, Relaxed, |word| match word {
            WAITING | SLEEPING => Some(PROMOTED),
            _ => None,
        });
        if promoted == Ok(SLEEPING) {
            self.futex_wake();
        }
    }

    /// Called before the owner sleeps in the ring. False: it was granted.
    pub(crate) fn begin_lead(&self) -> bool {
        self.word
            .fetch_update(Relaxed, Relaxed, |word| (word != GRANTED).then_some(LEADING))
            .is_ok()
    }

    /// Called after the sleep in the ring. False: it was granted.
    pub(crate) fn end_lead(&self) -> bool {
        self.word.compare_exchange(LEADING, WAITING, Relaxed, Relaxed).is_ok()
    }

    /// Sleeps until granted or promoted, or until `deadline`. Does not spin.
    pub(crate) fn sleep(&self, deadline: Option<Instant>) -> Woken {
        if let Err(told) = self.word.compare_exchange(WAITING, SLEEPING, Relaxed, Relaxed) {
            return self.woken(told);
        }
        loop {
            let left = match deadline {
                None => None,
                Some(deadline) => match deadline.checked_duration_since(Instant::now()) {
                    Some(left) if !left.is_zero() => Some(left),
                    _ => {
                        let awake = self.word.compare_exchange(SLEEPING, WAITING, Relaxed, Relaxed);
                        return awake.map_or_else(|told| self.woken(told), |_| Woken::TimedOut);
                    }
                },
            };
            self.futex_wait(left);
            let word = self.word.load(Relaxed);
            if word != SLEEPING {
                return self.woken(word);
            }
        }
    }

    fn woken(&self, word: u32) -> Woken {
        match word {
            GRANTED => Woken::Granted,
            PROMOTED => match self.word.compare_exchange(PROMOTED, WAITING, Relaxed, Relaxed) {
                Ok(_) => Woken::Promoted,
                Err(_) => Woken::Granted,
            },
            _ => unreachable!("only its owner has it sleep or lead"),
        }
    }

    /// Sleeps while SLEEPING; may return early.
    #[cfg(not(loom))]
    fn futex_wait(&self, left: Option<std::time::Duration>) {
        use crate::sync::futex;
        let left = left.map(|left| rustix::fs::Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        });
        // The errors are "changed", "timed out" and "interrupted": the caller checks again.
        let _ = futex::wait(&self.word, futex::Flags::PRIVATE, SLEEPING, left.as_ref());
    }

    #[cfg(not(loom))]
    fn futex_wake(&self) {
        use crate::sync::futex;
        let _ = futex::wake(&self.word, futex::Flags::PRIVATE, 1);
    }

    /// The kernel compares the word and queues the sleeper in one step.
    #[cfg(loom)]
    fn futex_wait(&self, _left: Option<std::time::Duration>) {
        let queue = self.futex.0.lock().unwrap();
        if self.word.load(Relaxed) == SLEEPING {
            drop(self.futex.1.wait(queue).unwrap());
        }
    }

    #[cfg(loom)]
    fn futex_wake(&self) {
        let _queue = self.futex.0.lock().unwrap();
        self.futex.1.notify_one();
    }
}

/// SG2 as a model sees it, and without the swap: whether the kernel let a thread sleep, and whether
/// it was woken.
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;

    fn sleep_meets(set_granted: fn(&Signal) -> u32) {
        loom::model(move || {
            let signal = Arc::new(Signal::new());
            let waker = loom::thread::spawn({
                let signal = Arc::clone(&signal);
                move || set_granted(&signal) == SLEEPING
            });
            let exchanged = signal.word.compare_exchange(WAITING, SLEEPING, Relaxed, Relaxed);
            let sleeps = exchanged.is_ok() && signal.word.load(Relaxed) == SLEEPING;
            let woken = waker.join().unwrap();
            assert!(!sleeps || woken, "sleeps forever");
        });
    }

    #[test]
    fn loom_a_sleeper_is_woken() {
        sleep_meets(Signal::set_granted);
    }

    #[test]
    #[should_panic(expected = "sleeps forever")]
    fn loom_without_the_swap_a_sleeper_is_missed() {
        sleep_meets(|signal| {
            let before = signal.word.load(Relaxed);
            signal.word.store(GRANTED, Relaxed);
            before
        });
    }

    /// Goal: a waiter that is promoted and granted at the same time wakes up, and sees that the
    /// wait is over.
    #[test]
    fn loom_a_promotion_meets_a_grant() {
        loom::model(|| {
            let signal = Arc::new(Signal::new());
            let promoter = loom::thread::spawn({
                let signal = Arc::clone(&signal);
                move || signal.promote()
            });
            let granter = loom::thread::spawn({
                let signal = Arc::clone(&signal);
                move || assert!(!signal.grant(), "it leads nothing yet")
            });
            let woken = signal.sleep(None);
            promoter.join().unwrap();
            granter.join().unwrap();
            assert!(signal.is_granted(), "{woken:?}");
        });
    }
}

//! Where one waiter of a queue sleeps: a word, and the futex on it.
//!
//! ```text
//! WAITING -> sleep -> SLEEPING               by the waiter, before it enters the kernel
//! WAITING | SLEEPING -> grant -> GRANTED     by the waker, once, after it released the queue's lock
//! ```
//!
//! - **G1** A signal serves one wait. The queue's slot of the waiter and the waiter share it by
//!   reference counting, and the waker takes the queue's share along: the wake is its last touch, and
//!   the signal outlives that whatever the waiter does meanwhile.
//! - **G2** The waker's swap finds SLEEPING, or the waiter's exchange finds GRANTED, or the word
//!   changes before the kernel looks at it: no wake-up is lost.
//! - **G3** All is Relaxed. The word only says when to look: events are collected under the queue's
//!   lock, which orders them after who granted them.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use crate::sync::AtomicU32;

const WAITING: u32 = 0;
const SLEEPING: u32 = 1;
const GRANTED: u32 = 2;

/// One wait of one thread.
pub(crate) struct Signal {
    word: AtomicU32,
    #[cfg(loom)]
    futex: (crate::sync::Mutex<()>, crate::sync::Condvar),
}

impl Signal {
    pub(crate) fn new() -> Signal {
        Signal {
            word: AtomicU32::new(WAITING),
            #[cfg(loom)]
            futex: (crate::sync::Mutex::new(()), crate::sync::Condvar::new()),
        }
    }

    /// Ends the wait. The caller holds no lock, and does not touch the signal again (G1).
    pub(crate) fn grant(&self) {
        if self.set_granted() {
            self.futex_wake();
        }
    }

    /// Whether there is a sleeper to wake (G2).
    fn set_granted(&self) -> bool {
        self.word.swap(GRANTED, Relaxed) == SLEEPING
    }

    /// Sleeps until granted; false when `deadline` has passed first. Does not spin.
    pub(crate) fn sleep(&self, deadline: Option<Instant>) -> bool {
        if self.word.compare_exchange(WAITING, SLEEPING, Relaxed, Relaxed) == Err(GRANTED) {
            return true;
        }
        loop {
            let left = match deadline {
                None => None,
                Some(deadline) => match deadline.checked_duration_since(Instant::now()) {
                    Some(left) if !left.is_zero() => Some(left),
                    _ => return self.word.load(Relaxed) == GRANTED,
                },
            };
            self.futex_wait(left);
            if self.word.load(Relaxed) == GRANTED {
                return true;
            }
        }
    }

    /// Sleeps while SLEEPING; may return early.
    #[cfg(not(loom))]
    fn futex_wait(&self, left: Option<std::time::Duration>) {
        use rustix::thread::futex;
        let left = left.map(|left| rustix::fs::Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        });
        // An error says "changed", "timed out" or "interrupted": the caller looks again.
        let _ = futex::wait(&self.word, futex::Flags::PRIVATE, SLEEPING, left.as_ref());
    }

    #[cfg(not(loom))]
    fn futex_wake(&self) {
        use rustix::thread::futex;
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

/// G2 as a model sees it, and without the swap: did the kernel put somebody to sleep, and was he woken?
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;

    fn sleep_meets(set_granted: fn(&Signal) -> bool) {
        loom::model(move || {
            let signal = Arc::new(Signal::new());
            let waker = loom::thread::spawn({
                let signal = Arc::clone(&signal);
                move || set_granted(&signal)
            });
            let exchanged = signal.word.compare_exchange(WAITING, SLEEPING, Relaxed, Relaxed);
            let sleeps = exchanged.is_ok() && signal.word.load(Relaxed) == SLEEPING;
            let woken = waker.join().unwrap();
            assert!(!sleeps || woken, "sleeps for ever");
        });
    }

    #[test]
    fn loom_a_sleeper_is_woken() {
        sleep_meets(Signal::set_granted);
    }

    #[test]
    #[should_panic(expected = "sleeps for ever")]
    fn loom_without_the_swap_a_sleeper_is_missed() {
        sleep_meets(|signal| {
            let sleeps = signal.word.load(Relaxed) == SLEEPING;
            signal.word.store(GRANTED, Relaxed);
            sleeps
        });
    }
}

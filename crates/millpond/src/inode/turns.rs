//! A lock that is fair after a time: a waiter that has waited for [`PATIENCE`] gets the lock from its holder.
//!
//! The thread that has just unlocked a mutex of the standard library may lock it again, many times in a row, while
//! waiters are still waking up, and some of them starve. A lock that is always handed to the next waiter costs a switch of
//! threads each time. Here a thread may overtake the waiters until the first of them has waited for long. A thread that
//! finds the lock held watches it for a moment before it sleeps, as a turn is mostly one system call long.
//!
//! ```text
//!   free --take--> held --drop--> free, the first waiter is woken, and competes
//!                    |
//!                    +---drop, the first waiter has waited for long---> held, by that waiter
//! ```
//!
//! - **TN1** While the lock is free and has waiters, the first of them has been woken and has not looked since
//!   (`is_waking`). So none sleeps beside a free lock.
//!
//! Locks: the one in here is a leaf; no thread is woken under it.

use crate::sync::MutexExt;
use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// After so long a waiter is not overtaken any more. As parking_lot has it.
const PATIENCE: Duration = Duration::from_micros(500);
/// How often a thread looks for the end of a turn before it sleeps: some microseconds.
const LOOKS: u32 = 256;

/// A hit reads fields beside it in a file's object, so the lock has a line of its own.
#[repr(align(64))]
#[derive(Default)]
pub(crate) struct Turns {
    state: Mutex<TurnsState>,
    /// Turns that have ended. A hint.
    ended: AtomicU32,
}

#[derive(Default)]
struct TurnsState {
    is_held: bool,
    /// The number of the waiter that the holder has given the turn.
    given_to: Option<u32>,
    /// The first waiter was woken, and has not looked since (TN1).
    is_waking: bool,
    /// The number of the next waiter.
    next: u32,
    waiting: VecDeque<WaitingThread>,
}

struct WaitingThread {
    number: u32,
    thread: Thread,
    since: Instant,
}

/// A turn. It has one holder.
#[must_use]
pub(crate) struct Turn<'a>(&'a Turns);

impl TurnsState {
    /// The first waiter, if it must not be overtaken.
    fn is_first_late(&self) -> bool {
        self.waiting.front().is_some_and(|first| first.since.elapsed() >= PATIENCE)
    }

    fn pop_first(&mut self) -> Option<WaitingThread> {
        let first = self.waiting.pop_front();
        self.is_waking = false;
        if self.waiting.is_empty() && self.waiting.capacity() > 0 {
            // There is one for each open file.
            self.waiting = VecDeque::new();
        }
        first
    }

    /// Whether waiter `number` has the turn now. `false`: it sleeps again.
    fn try_end_wait(&mut self, number: u32) -> bool {
        if self.given_to == Some(number) {
            self.given_to = None;
            return true;
        }
        let is_first = self.waiting.front().is_some_and(|first| first.number == number);
        if is_first {
            self.is_waking = false;
            if !self.is_held {
                self.is_held = true;
                self.pop_first();
                return true;
            }
        }
        false
    }

    /// Ends a turn. Returns the waiter to wake.
    fn end_turn(&mut self) -> Option<Thread> {
        if self.is_first_late() {
            let first = self.pop_first()?;
            self.given_to = Some(first.number);
            return Some(first.thread);
        }
        self.is_held = false;
        let first = self.waiting.front().filter(|_| !self.is_waking)?.thread.clone();
        self.is_waking = true;
        Some(first)
    }
}

impl Turns {
    /// Waits for the turn.
    pub(crate) fn take(&self) -> Turn<'_> {
        let mut state = self.state.acquire();
        if state.is_held && state.waiting.is_empty() {
            let ended = self.ended.load(Relaxed);
            drop(state);
            for _ in 0..LOOKS {
                if self.ended.load(Relaxed) != ended {
                    break;
                }
                std::hint::spin_loop();
            }
            state = self.state.acquire();
        }
        if !state.is_held && !state.is_first_late() {
            state.is_held = true;
            return Turn(self);
        }
        let number = state.next;
        state.next = state.next.wrapping_add(1);
        let (thread, since) = (thread::current(), Instant::now());
        state.waiting.push_back(WaitingThread { number, thread, since });
        loop {
            drop(state);
            // May return early.
            thread::park();
            state = self.state.acquire();
            if state.try_end_wait(number) {
                return Turn(self);
            }
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let woken = self.0.state.acquire().end_turn();
        self.0.ended.fetch_add(1, Relaxed);
        if let Some(thread) = woken {
            thread.unpark();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

    #[test]
    fn turns_are_taken_one_at_a_time_and_by_waiters_in_order() {
        let turns = Arc::new(Turns::default());
        let order = Arc::new(Mutex::new(Vec::new()));
        let first = turns.take();
        let threads: Vec<_> = (0..4)
            .map(|number| {
                let (turns, order) = (Arc::clone(&turns), Arc::clone(&order));
                let thread = thread::spawn({
                    let turns = Arc::clone(&turns);
                    move || {
                        let _turn = turns.take();
                        order.lock().unwrap().push(number);
                    }
                });
                while turns.state.acquire().waiting.len() <= number {
                    thread::yield_now();
                }
                thread
            })
            .collect();
        drop(first);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(*order.lock().unwrap(), [0, 1, 2, 3]);
        let inside = Arc::new(AtomicBool::new(false));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let (turns, inside) = (Arc::clone(&turns), Arc::clone(&inside));
                thread::spawn(move || {
                    for _ in 0..2000 {
                        let _turn = turns.take();
                        assert!(!inside.swap(true, SeqCst));
                        inside.store(false, SeqCst);
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }

    /// Goal: a turn that ends is given to a waiter that has waited for long, and else to any thread; the first waiter is
    /// woken once (TN1).
    #[test]
    fn a_late_waiter_is_not_overtaken() {
        let waiter = |number, since| WaitingThread { number, thread: thread::current(), since };
        let now = Instant::now();
        let mut state = TurnsState { is_held: true, ..TurnsState::default() };
        // A monotonic clock may have started less than a second ago.
        let long_ago = now.checked_sub(Duration::from_secs(1)).unwrap_or(now);
        let soon = now + Duration::from_secs(60);
        state.waiting.extend([waiter(0, soon), waiter(1, long_ago)]);
        assert!(state.end_turn().is_some() && !state.is_held);
        // Overtaken.
        state.is_held = true;
        assert!(!state.try_end_wait(0));
        assert!(state.end_turn().is_some(), "it has looked, and is woken again");
        state.is_held = true;
        assert!(state.end_turn().is_none(), "it is on its way");
        assert!(state.try_end_wait(0) && state.is_held);
        assert!(!state.try_end_wait(1));
        thread::sleep(PATIENCE);
        assert!(state.end_turn().is_some() && state.is_held);
        assert!(state.try_end_wait(1) && state.waiting.is_empty());
        assert!(state.end_turn().is_none() && !state.is_held);
    }
}

//! A fair lock: one holder at a time, in the order of the requests.
//!
//! The thread that has just unlocked a mutex of the standard library may lock it again, many times in a row, while
//! waiters are still waking up. Here the holder hands its turn to the next waiter.
//!
//! Locks: the one in here is a leaf; no thread is woken under it.

use crate::sync::MutexExt;
use std::collections::VecDeque;
use std::sync::Mutex;
use std::thread::{self, Thread};

#[derive(Default)]
pub(crate) struct Turns {
    state: Mutex<TurnsState>,
}

#[derive(Default)]
struct TurnsState {
    /// The number of the next thread to ask.
    next: u64,
    /// The number of the holder of the turn, or of the next holder.
    served: u64,
    /// The waiters, in order.
    waiting: VecDeque<Thread>,
}

/// A turn. It has one holder.
#[must_use]
pub(crate) struct Turn<'a>(&'a Turns);

impl Turns {
    /// Waits for the earlier turns.
    pub(crate) fn take(&self) -> Turn<'_> {
        let mut state = self.state.acquire();
        let number = state.next;
        state.next += 1;
        if number != state.served {
            state.waiting.push_back(thread::current());
            while number != state.served {
                drop(state);
                // May return early.
                thread::park();
                state = self.state.acquire();
            }
        }
        Turn(self)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.acquire();
        state.served += 1;
        let next = state.waiting.pop_front();
        if state.waiting.is_empty() && state.waiting.capacity() > 0 {
            // There is one for each open file.
            state.waiting = VecDeque::new();
        }
        drop(state);
        if let Some(next) = next {
            next.unpark();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

    #[test]
    fn turns_are_taken_in_order_and_one_at_a_time() {
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
}

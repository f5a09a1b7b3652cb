//! Waiting and waking: one [`Signal`] per thread, one [`Notify`] per queued request.
//!
//! The word of a signal is `ticket << 2 | state`:
//!
//! ```text
//! WAITING(t) -> wait -> SLEEPING(t)                   by the waiter, before it enters the kernel
//! WAITING(t) | SLEEPING(t) -> grant -> GRANTED(t)     by the waker, once per ticket
//! any -> start_wait -> WAITING(t + 1)                 by the waiter, for its next wait
//! ```
//!
//! - S1. Only the signal's own thread starts a wait, so at most one ticket is awaited at a time.
//! - S2. A grant is a compare-exchange on the exact ticket. A late waker (the waiter timed out and took the grant itself)
//!   finds another ticket and changes nothing. Tickets have 30 bits: the waker would have to be late by 2^30 waits of
//!   that thread.
//! - S3. The futex wake is the waker's last access, and the signal is reference-counted, so it outlives that access
//!   independent of the waiter.
//! - S4. All accesses are Relaxed: the signal only says when to check. The waiter takes the grant under the mutex of the
//!   lock, which orders it after the last holder.

use std::cell::Cell;
use std::task::Waker;
use std::time::Instant;

use crate::callback::TaskWaker;
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::sync::{Arc, futex_wait, futex_wake_one, spin_hint, yield_now};

const WAITING: u32 = 0;
const SLEEPING: u32 = 1;
const GRANTED: u32 = 2;
const STATE: u32 = 3;

/// Polls of the word before sleeping: about 2 µs, the cost of one sleep and wake-up.
const SPIN_POLLS: u32 = if cfg!(any(loom, shuttle)) { 1 } else { 100 };

/// Pauses of growing length before a request queues: about 10 µs in total.
///
/// First it spins, as a hold may last less than a microsecond. Then it yields, as the holder may be waiting for this
/// processor.
pub(crate) struct Backoff {
    round: u32,
}

impl Backoff {
    const ROUNDS_BUSY: u32 = if cfg!(any(loom, shuttle)) { 0 } else { 5 };
    const ROUNDS: u32 = if cfg!(loom) {
        0
    } else if cfg!(shuttle) {
        1
    } else {
        12
    };

    pub(crate) fn new() -> Backoff {
        Backoff { round: 0 }
    }

    /// Pauses. Returns false at once if it is time to queue.
    pub(crate) fn pause(&mut self) -> bool {
        if self.round == Backoff::ROUNDS {
            return false;
        }
        if self.round < Backoff::ROUNDS_BUSY {
            (0..4u32 << self.round).for_each(|_| spin_hint());
        } else {
            yield_now();
        }
        self.round += 1;
        true
    }
}

/// The word on which one thread waits.
#[derive(Debug)]
pub struct Signal {
    word: AtomicU32,
}

impl Signal {
    fn new() -> Signal {
        Signal { word: AtomicU32::new(GRANTED) }
    }

    /// Starts the next wait of this thread (S1).
    fn start_wait(&self) -> u32 {
        let ticket = (self.word.load(Ordering::Relaxed) >> 2).wrapping_add(1) & (u32::MAX >> 2);
        // Relaxed: the waker learns the ticket through the lock that queues it.
        self.word.store(ticket << 2 | WAITING, Ordering::Relaxed);
        ticket
    }

    /// Ends the wait `ticket`, if it is still the current one (S2), and wakes its thread.
    fn grant(&self, ticket: u32) {
        let mut word = self.word.load(Ordering::Relaxed);
        loop {
            if word >> 2 != ticket || word & STATE == GRANTED {
                return;
            }
            let granted = ticket << 2 | GRANTED;
            let exchanged = self.word.compare_exchange_weak(
                word,
                granted,
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
            match exchanged {
                Ok(_) => break,
                Err(now) => word = now,
            }
        }
        if word & STATE == SLEEPING {
            // The last access (S3).
            futex_wake_one(&self.word);
        }
    }

    /// Waits until `ticket` is granted; false if `deadline` passes first.
    fn wait(&self, ticket: u32, deadline: Option<Instant>) -> bool {
        let granted = ticket << 2 | GRANTED;
        for _ in 0..SPIN_POLLS {
            if self.word.load(Ordering::Relaxed) == granted {
                return true;
            }
            spin_hint();
        }
        let sleeping = ticket << 2 | SLEEPING;
        if self
            .word
            .compare_exchange(ticket << 2 | WAITING, sleeping, Ordering::Relaxed, Ordering::Relaxed)
            .is_err_and(|word| word == granted)
        {
            return true;
        }
        loop {
            let left = match deadline {
                None => None,
                // The models have no clock: the deadline has passed after one check.
                Some(_) if cfg!(any(loom, shuttle)) => {
                    futex_wait(&self.word, sleeping, None);
                    return self.word.load(Ordering::Relaxed) == granted;
                }
                Some(deadline) => match deadline.checked_duration_since(Instant::now()) {
                    Some(left) if !left.is_zero() => Some(left),
                    _ => return self.word.load(Ordering::Relaxed) == granted,
                },
            };
            futex_wait(&self.word, sleeping, left);
            if self.word.load(Ordering::Relaxed) == granted {
                return true;
            }
        }
    }
}

/// The thread or task to wake at a grant. Woken at most once, as the last access to the waiter.
#[derive(Debug)]
pub struct Notify(Kind);

#[derive(Debug)]
enum Kind {
    Thread(Arc<Signal>, u32),
    Task(TaskWaker),
}

impl Notify {
    pub(crate) fn task(waker: &Waker) -> Notify {
        Notify(Kind::Task(TaskWaker::new(waker)))
    }

    /// Whether a task's executor decides when the grant is taken.
    pub(crate) fn is_task(&self) -> bool {
        matches!(self.0, Kind::Task(_))
    }

    pub(crate) fn wake(self) {
        match self.0 {
            Kind::Thread(signal, ticket) => signal.grant(ticket),
            Kind::Task(waker) => waker.wake(),
        }
    }
}

thread_local! {
    /// The idle signal of this thread; taken while it waits.
    static SIGNAL: Cell<Option<Arc<Signal>>> = const { Cell::new(None) };
}

/// One wait of the current thread.
pub(crate) struct ThreadWait {
    signal: Arc<Signal>,
    ticket: u32,
}

impl ThreadWait {
    /// Starts a wait. Allocates only the first time on each thread.
    pub(crate) fn start() -> ThreadWait {
        let idle = SIGNAL.try_with(Cell::take).ok().flatten();
        let signal = idle.unwrap_or_else(|| Arc::new(Signal::new()));
        let ticket = signal.start_wait();
        ThreadWait { signal, ticket }
    }

    pub(crate) fn notify(&self) -> Notify {
        Notify(Kind::Thread(Arc::clone(&self.signal), self.ticket))
    }

    /// Waits until woken; false if `deadline` passes first.
    pub(crate) fn wait(&self, deadline: Option<Instant>) -> bool {
        self.signal.wait(self.ticket, deadline)
    }
}

#[cfg(not(any(loom, shuttle)))] // a model has no threads that outlive it
impl Drop for ThreadWait {
    fn drop(&mut self) {
        let signal = Arc::clone(&self.signal);
        // If the thread-local is gone, this thread is ending, and the signal is dropped.
        let _ = SIGNAL.try_with(|cell| cell.set(Some(signal)));
    }
}

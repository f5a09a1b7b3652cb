//! The standard library with threads, locks, atomics and a clock of its own, so that one scheduler decides, by a
//! seed, which thread runs: what a program does is then a function of the seed.
//!
//! A crate is put under it by `extern crate millpond_schedule as std;` in its root, without another change. A test
//! calls [`run`]. What is not in a run is as ever: atomics and locks work, by one thread; no thread can be started.
//!
//! # Protocol
//!
//! ```text
//! thread:  Ready -> runs -> Ready               at a point: before each operation on an atomic or a lock
//!          runs -> Blocked(key, until) -> Ready     by a wake of the key, or as its time comes
//!          runs -> Done                         when its destructors of thread-locals have run
//! ```
//!
//! - **B1** One thread runs: the one whose number is in `RUNNING`. It alone changes that, and the state of any.
//! - **B2** So what a thread does between two points is atomic to all others: a lock looks and blocks in one step.
//! - **B3** Time passes a little with each turn, and at once to the next deadline if nobody is ready.
//! - **B4** A thread is counted as ready from its start on, before the system has started it.

mod atomics;

mod channel;

mod locks;

mod scheduler;

pub use std::*;

pub use crate::scheduler::{Report, point, run};

/// What a crate wants of the futexes of the kernel, without a kernel; as `rustix::thread::futex` has it.
pub mod futex;

/// As `std::hint`.
pub mod hint {
    pub use std::hint::*;

    /// Another thread's turn: the caller waits for it.
    pub fn spin_loop() {
        crate::scheduler::yield_now();
    }
}

/// As `std::sync`.
pub mod sync {
    pub use std::sync::*;

    pub use crate::locks::{Condvar, Mutex, MutexGuard, OnceLock, WaitTimeoutResult};

    /// As `std::sync::atomic`.
    pub mod atomic {
        pub use std::sync::atomic::Ordering;

        pub use crate::atomics::*;
    }

    /// As `std::sync::mpsc`, of which it has the unbounded channel.
    pub mod mpsc {
        pub use crate::channel::*;
    }
}

/// As `std::thread`.
pub mod thread;

/// As `std::time`, but for the time of day, which is the machine's.
pub mod time;

//! A deterministic standard library: a scheduler decides by a seed which thread runs, so that a program's behaviour is a
//! function of the seed.
//!
//! It replaces std's threads, locks, atomics and clock. A crate uses it by `extern crate millpond_schedule as std;` in its
//! root, without another change. A test calls [`run`]. Outside of a run, atomics and locks work for one thread, and no
//! thread can be started.
//!
//! # Protocol
//!
//! A *turn* is the time slice of a thread. A *point* is a place where the scheduler may switch threads.
//!
//! ```text
//! thread:  Ready -> runs -> Ready                   at a point: before each operation on an atomic or a lock
//!          runs -> Blocked(key, until) -> Ready     by a wake of the key, or at the deadline
//!          runs -> Done                             when its thread-local destructors have run
//! ```
//!
//! - **B1** One thread runs: the thread whose number is in `RUNNING`. Only this thread changes `RUNNING` and the states.
//! - **B2** So the actions of a thread between two points are atomic for all others: a lock checks and blocks in one step.
//! - **B3** Time advances a little with each turn, and jumps to the next deadline if no thread is ready.
//! - **B4** A thread counts as ready from its creation on, before the system has started it.

mod atomics;

mod channel;

mod locks;

mod scheduler;

pub use std::*;

pub use crate::scheduler::{Report, point, run};

/// The part of `rustix::thread::futex` that crates use, without the kernel.
pub mod futex;

/// As `std::hint`.
pub mod hint {
    pub use std::hint::*;

    /// Switches to another thread, as the caller waits for one.
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

    /// As `std::sync::mpsc`; only the unbounded channel.
    pub mod mpsc {
        pub use crate::channel::*;
    }
}

/// As `std::thread`.
pub mod thread;

/// As `std::time`, with virtual time. The time of day is the machine's.
pub mod time;

//! Byte-range locks: fair, exact, shared and exclusive, blocking and async.
//!
//! [`RangeLock`] lets operations on different parts of a file (or of any space with `u64` offsets) run at the same
//! time. Operations that overlap wait for each other, in FIFO order.
//!
//! ```
//! use std::thread;
//! use millpond_rangelock::{ByteRange, Mode, RangeLock};
//!
//! let lock = RangeLock::new();
//! thread::scope(|scope| {
//!     for writer in 0..4 {
//!         let lock = &lock;
//!         scope.spawn(move || {
//!             let range = ByteRange::at(writer * 4096, 4096).unwrap();
//!             let guard = lock.lock(range, Mode::Exclusive); // disjoint: no wait
//!             // .. write the range ..
//!             drop(guard);
//!         });
//!     }
//! });
//! let truncate = lock.lock(ByteRange::from_start(8192)?, Mode::Exclusive);
//! # drop(truncate);
//! # Ok::<(), millpond_rangelock::RangeError>(())
//! ```
//!
//! # Costs
//!
//! - Without conflicts, a range of up to 8 KiB that does not cross a multiple of 8 KiB: one compare-exchange to lock and
//!   one to unlock, in a cache line that disjoint ranges elsewhere in the file do not touch. A longer range pays this for
//!   each 8 KiB region that it touches, up to 10 regions.
//! - Longer ranges and conflicting requests go through a mutex and an interval tree, in O(log n) plus the number of
//!   conflicts. Whole-file shared holders are counted in one word.
//! - 512 bytes for each lock, until threads compete for it or many ranges are held at once. Then the lock allocates a
//!   table of stripes that grows from 8 KiB up to 2 MiB. The current table and the ones it replaced, 2.7 MiB at most, are
//!   freed with the lock. A [`Budget`] limits this growth. A wide range visits the whole table, so whole-file requests
//!   are expensive on a lock that has once held tens of thousands of ranges.
//! - No allocation to lock or unlock, once a lock has held its largest number of ranges. Exception: a lock with a budget
//!   keeps memory for only four queue entries while its queue is empty.
//!
//! # Deadlocks, polling and wakers
//!
//! A guard belongs to an operation and not to a thread. A thread that waits for a range that overlaps one of its own
//! guards waits indefinitely; debug builds report this on standard error. A caller that needs several ranges at once
//! should lock them in ascending order, or lock one range around all of them.
//!
//! A granted future of [`RangeLock::lock_async`] that is not polled can be overtaken after [`OFFER_GRACE`], and keeps its
//! place in the queue.
//!
//! The thread that releases a range calls the wakers, with no lock held. A waker may use this lock, but should not wait,
//! as it would delay that thread. A panic of a waker is caught: the releasing thread continues and wakes the other
//! waiters.
//!
//! # Related work
//!
//! Linux file systems that make reads atomic with respect to writes lock the whole file. Range locks were proposed as a
//! replacement, but the lock around their tree cost more than the concurrency gained. This lock spreads held ranges over
//! stripes by their offset, and only requests that have to wait meet in one place. (Kogan, Dice and Issa, "Scalable range
//! locks for scalable address spaces and beyond", EuroSys 2020, use a lock-free list, at a cost that grows with the number
//! of held ranges.)
#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks, missing_docs)]

// A deterministic scheduler in place of the kernel's, driven by a seed.
#[cfg(scheduled)]
extern crate millpond_schedule as std;

mod api;
mod budget;
#[doc(hidden)] // for Millpond's other crates
pub mod callback;
mod front;
mod future;
mod guard;
#[cfg(debug_assertions)]
mod holders;
mod lock;
mod queue;
mod range;
mod raw;
mod striped;
mod sync;
mod wait;

pub use budget::Budget;
pub use guard::{Guard, OwnedGuard};
pub use lock::RangeLock;
pub use queue::OFFER_GRACE;
pub use range::{ByteRange, Mode, RangeError};
pub use raw::{RawRangeLock, Request};
pub use striped::Striped;
pub use wait::Notify;

/// The parts of this crate's lock, for building other locks with the same API: the queue of waiting requests, and the
/// primitives that loom and shuttle replace. Feature `parts`; not covered by the version.
#[cfg(feature = "parts")]
pub mod parts {
    pub use crate::queue::{Queue, Ticket, unlock_and_wake};
    pub use crate::wait::Notify;

    /// `std`'s primitives, or loom's or shuttle's under the `cfg` of that name.
    pub mod sync {
        pub use crate::sync::{Mutex, MutexGuard, atomic, lock, relax};
    }
}

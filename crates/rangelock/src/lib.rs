//! Byte-range locks: fair, exact, shared and exclusive, blocking and async.
//!
//! [`RangeLock`] lets operations on different parts of a file (or of anything else that is numbered
//! by `u64`) run at the same time, and has those that overlap wait for each other in the order in
//! which they came.
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
//!             let guard = lock.lock(range, Mode::Exclusive); // none of them waits
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
//! # What it costs
//!
//! - Without conflicts, a range of up to 8 KiB that does not cross a multiple of 8 KiB: one
//!   compare-exchange to lock and one to unlock, in a cache line that disjoint ranges
//!   elsewhere in the file do not touch. A longer one pays that for each 8 KiB, up to 10 of them.
//! - Longer ones, and all that conflict, go through a mutex and a tree, in O(log n) plus what they
//!   conflict with; whole-file shared holders are counted in one word.
//! - 512 bytes for each lock, until threads compete for it or many ranges are held at once; then a
//!   table of stripes that grows from 8 KiB up to 2 MiB, and goes when the lock goes, as those do that
//!   it has outgrown: 2.7 MiB at most. A [`Budget`] can keep locks from growing. A wide range has to visit
//!   all of the table, so a lock that has once held tens of thousands of ranges has dear whole-file
//!   requests.
//! - No allocation for a lock or unlock, once a lock has held as many as it is going to hold; save that a
//!   lock with a budget keeps room for four waiters while nobody waits.
//!
//! # What to look out for
//!
//! A guard belongs to an operation and not to a thread: a thread that waits for a range that
//! overlaps one that it holds waits for ever. Debug builds say so on standard error. A caller
//! that needs several ranges at once should lock them in ascending order, or one range around all of them.
//!
//! A future of [`RangeLock::lock_async`] that has been granted and is not polled is passed over
//! after [`OFFER_GRACE`], and keeps its place.
//!
//! A waker is called by the thread that releases a range, with no lock held. It may come back to this lock, but should
//! not wait: that thread waits with it. A panic of a waker ends there; the thread that releases goes on, and so do the
//! others that it wakes.
//!
//! # Where it comes from
//!
//! Linux file systems that make reads atomic with respect to writes lock the whole file for it;
//! the range locks that were proposed instead lost more in the lock around their tree than they
//! won. What is different here: the ranges that are held are spread over stripes by where they are in
//! the file, and only requests that have to wait meet in one place. (Kogan, Dice and Issa, "Scalable range locks for scalable
//! address spaces and beyond", EuroSys 2020, spread theirs over a list without a lock, at a cost
//! that grows with the number held.)
#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks, missing_docs)]

// One scheduler decides who runs, by a seed.
#[cfg(scheduled)]
extern crate millpond_schedule as std;

mod api;
mod budget;
#[doc(hidden)] // for the crates that are built on this one
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

/// What this crate's lock is built from, for other locks with the same face: the queue of
/// waiting requests, and the primitives that loom and shuttle replace. Feature `parts`; not covered by the version.
#[cfg(feature = "parts")]
pub mod parts {
    pub use crate::queue::{Queue, Ticket, unlock_and_wake};
    pub use crate::wait::Notify;

    /// `std`'s primitives, or those of loom or shuttle under the `cfg` of that name.
    pub mod sync {
        pub use crate::sync::{Mutex, MutexGuard, atomic, lock, relax};
    }
}

//! Byte-range locks: fair, exact, shared and exclusive, blocking and async.
//!
//! [`RangeLock`] locks ranges of `u64` bytes, the whole file included.
#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks, missing_docs)]

#[cfg(feature = "bench")]
pub mod bench;
mod future;
mod guard;
#[cfg(debug_assertions)]
mod holders;
mod lock;
pub mod peers;
mod queue;
mod range;
mod raw;
#[cfg(all(test, shuttle))]
mod shuttle_tests;
mod striped;
mod sync;
mod wait;

pub use guard::{Guard, OwnedGuard};
pub use lock::RangeLock;
pub use range::{ByteRange, Mode, RangeError};
pub use raw::{RawRangeLock, Request};
pub use striped::Striped;
pub use wait::Notify;

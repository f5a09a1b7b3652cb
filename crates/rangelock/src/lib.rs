//! Byte-range locks: fair, exact, shared and exclusive, blocking and async.
//!
//! [`RangeLock`] locks ranges of `u64` bytes, the whole file included.
#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks, missing_docs)]

mod core;
mod future;
mod guard;
mod lock;
pub mod peers;
mod range;
mod raw;
mod striped;
mod sync;
mod wait;

pub use guard::{Guard, OwnedGuard};
pub use lock::RangeLock;
pub use range::{ByteRange, Mode, RangeError};
pub use raw::{RawRangeLock, Request};
pub use striped::Striped;
pub use wait::Notify;

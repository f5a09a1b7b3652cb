//! The range lock of a file: which implementation it is.
//!
//! It is [`Striped`](millpond_rangelock::Striped), known to the compiler. With the feature
//! `range-lock-peers` it is what the engine was built with (`any`): for comparison, at the cost of a
//! branch for each lock and unlock.

#[cfg(feature = "range-lock-peers")]
mod any;

#[cfg(feature = "range-lock-peers")]
pub use any::RangeLockKind;
#[cfg(feature = "range-lock-peers")]
pub(crate) use any::RangeLockKind as Kind;
#[cfg(feature = "range-lock-peers")]
pub(crate) use any::{Guard, GuardRequest, LOCK_BYTES, OwnedGuard, Ranges, lock_later};

#[cfg(not(feature = "range-lock-peers"))]
pub(crate) use only::{Guard, GuardRequest, Kind, LOCK_BYTES, OwnedGuard, Ranges, lock_later};

/// A direct request of 16 pages is one piece of the lock, and so is a page; of larger regions, many
/// readers of one would share a word.
const REGION_BYTES: u64 = 64 << 10;

#[cfg(not(feature = "range-lock-peers"))]
mod only {
    use std::pin::Pin;
    use std::sync::{Arc, Weak};

    use super::REGION_BYTES;

    use millpond_rangelock::{Budget, ByteRange, Mode, RangeLock};
    pub(crate) use millpond_rangelock::{Guard, OwnedGuard};

    /// A request for a guard, pending or granted and not yet taken.
    pub(crate) type GuardRequest = Pin<Box<dyn Future<Output = OwnedGuard> + Send>>;

    /// A request for a guard that no thread waits for.
    pub(crate) fn lock_later(ranges: &Ranges, range: ByteRange, mode: Mode) -> GuardRequest {
        Box::pin(ranges.lock_owned_async(range, mode))
    }

    /// The ranges of one file that are held.
    pub(crate) type Ranges = Arc<RangeLock>;

    /// The size of a lock.
    pub(crate) const LOCK_BYTES: usize = size_of::<RangeLock>();

    /// There is nothing to choose.
    #[derive(Debug, Clone, Copy)]
    pub(crate) enum Kind {
        Striped,
    }

    impl Kind {
        /// A lock for a file, which grows within `budget`.
        pub(crate) fn lock(self, budget: Weak<dyn Budget>) -> Ranges {
            Arc::new(RangeLock::with_region_bytes(REGION_BYTES).with_budget(budget))
        }
    }
}

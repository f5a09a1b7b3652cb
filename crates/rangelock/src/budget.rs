//! [`Budget`]: a memory limit that locks share.

/// A memory limit for the growth of the locks that share it; see
/// [`RangeLock::with_budget`](crate::RangeLock::with_budget).
///
/// # Examples
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
/// use std::sync::{Arc, Weak};
/// use millpond_rangelock::{Budget, RangeLock};
///
/// struct Bytes(AtomicUsize);
///
/// impl Budget for Bytes {
///     fn try_take(&self, bytes: usize) -> bool {
///         self.0.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(bytes)).is_ok()
///     }
///
///     fn give_back(&self, bytes: usize) {
///         self.0.fetch_add(bytes, Relaxed);
///     }
/// }
///
/// let budget: Arc<dyn Budget> = Arc::new(Bytes(AtomicUsize::new(1 << 20)));
/// let lock = RangeLock::new().with_budget(Arc::downgrade(&budget));
/// # drop(lock);
/// ```
pub trait Budget: Send + Sync {
    /// Takes `bytes` bytes from the budget; false if they are not available. A request for a range calls it, with none of
    /// the lock's internal locks held. The implementation must not lock a range of a lock with this budget.
    fn try_take(&self, bytes: usize) -> bool;

    /// Returns bytes that a lock has taken. Must not wait.
    fn give_back(&self, bytes: usize);
}

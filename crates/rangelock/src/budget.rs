//! Where the memory of large locks comes from.

/// What locks share that are to take no more memory than somebody allows; see
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
    /// Whether a lock may take so many bytes. Called by a request for a range, without any of the
    /// lock's own locks; it may not ask for a range of such a lock itself.
    fn try_take(&self, bytes: usize) -> bool;

    /// A lock gives back what it took. It does not wait.
    fn give_back(&self, bytes: usize);
}

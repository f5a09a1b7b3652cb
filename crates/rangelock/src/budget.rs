//! Where the memory of large locks comes from.

/// What locks share that are to take no more memory than somebody allows; see
/// [`RangeLock::with_budget`](crate::RangeLock::with_budget).
pub trait Budget: Send + Sync {
    /// Whether a lock may take so many bytes. Called by a request for a range, without any of the
    /// lock's own locks; it may not ask for a range of such a lock itself.
    fn try_take(&self, bytes: usize) -> bool;

    /// A lock gives back what it took. It does not wait.
    fn give_back(&self, bytes: usize);
}

//! State that the tier and its writer thread share.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};

use millpond::AsyncFile;

use crate::disk::directory_lock::DirectoryLock;
use crate::disk::index::Index;
use crate::disk::layout::Layout;

/// Counts of the tier.
#[derive(Debug, Default)]
pub(crate) struct DiskCounters {
    pub(crate) pages_read: AtomicU64,
    pub(crate) bytes_written: AtomicU64,
    pub(crate) pages_dropped: AtomicU64,
    pub(crate) pages_damaged: AtomicU64,
    pub(crate) errors: AtomicU64,
    pub(crate) is_off: AtomicBool,
}

impl DiskCounters {
    // Relaxed: a count publishes no other data.
    pub(crate) fn add(counter: &AtomicU64, more: u64) {
        counter.fetch_add(more, Relaxed);
    }
}

/// State that the tier and its writer thread share.
#[derive(Debug)]
pub(crate) struct TierShared {
    pub(crate) layout: Layout,
    pub(crate) index: Index,
    pub(crate) file: AsyncFile,
    pub(crate) counts: DiskCounters,
    /// Held as long as the tier is open.
    pub(crate) _lock: DirectoryLock,
}

//! The memory for the bodies of uploads, shared by all clients.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::Limits;

const UNIT: usize = 1024;

#[derive(Debug)]
pub(crate) struct UploadMemory {
    free: Arc<Semaphore>,
    total: u32,
}

/// Reserved memory; free again when it is dropped.
#[derive(Debug)]
pub(crate) struct ReservedMemory {
    _permit: Option<OwnedSemaphorePermit>,
}

impl UploadMemory {
    /// At least what one upload of several parts, and one conditional upload, takes.
    pub(crate) fn new(limits: &Limits) -> Self {
        let least = (PARTS * limits.part_bytes).max(limits.conditional_bytes_max);
        let units = limits.upload_memory_bytes.max(least).div_ceil(UNIT);
        let total = u32::try_from(units).unwrap_or(u32::MAX).min(u32::MAX >> 3);
        Self { free: Arc::new(Semaphore::new(total as usize)), total }
    }

    /// The largest part that an upload of several parts can have.
    pub(crate) fn part_bytes_max(&self) -> usize {
        self.total as usize * UNIT / PARTS
    }

    /// Waits until `bytes` are free. A task reserves once, before it reads a body, so reservations can't deadlock.
    pub(crate) async fn reserve(&self, bytes: usize) -> ReservedMemory {
        let units = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX).min(self.total);
        let reserved = Arc::clone(&self.free).acquire_many_owned(units).await;
        // The semaphore is never closed.
        ReservedMemory { _permit: reserved.ok() }
    }
}

/// Parts of one upload in memory: one is received while the others are sent to the store.
pub(crate) const PARTS: usize = 4;

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn an_upload_waits_for_memory() {
        let limits = Limits {
            upload_memory_bytes: 40 << 20,
            part_bytes: 8 << 20,
            conditional_bytes_max: 0,
            ..Limits::default()
        };
        let memory = UploadMemory::new(&limits);
        assert_eq!(memory.part_bytes_max(), 10 << 20);
        let first = memory.reserve(32 << 20).await;
        let second = memory.reserve(8 << 20).await;
        assert!(memory.reserve(1).now_or_never().is_none());
        drop(first);
        memory.reserve(1).await;
        drop(second);
        memory.reserve(usize::MAX).await;
    }
}

//! State that all connections of a server share.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use millpond_objects::CachedStore;
use tokio::sync::Semaphore;

/// State that all connections share.
pub(crate) struct ServerParts {
    pub(crate) store: CachedStore,
    pub(crate) counters: ServerCounters,
    pub(crate) places: Arc<Semaphore>,
}

#[derive(Debug, Default)]
pub(crate) struct ServerCounters {
    pub(crate) attached: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) requests: AtomicU64,
    pub(crate) clients: AtomicU64,
}

//! State that all connections of a server share.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use millpond_objects::CachedStore;
use tokio::sync::Semaphore;

use crate::stores::{ClientScope, StoreSet};

/// State that all connections share.
pub(crate) struct ServerParts {
    pub(crate) store: CachedStore,
    /// The stores behind the cache. `None`: it is a cache of one store.
    pub(crate) stores: Option<StoreSet>,
    pub(crate) counters: Arc<ServerCounters>,
    pub(crate) places: Arc<Semaphore>,
}

impl ServerParts {
    /// The store that a client names. `Err`: the names of those that the server has.
    pub(crate) fn scope(&self, name: &str) -> Result<ClientScope, String> {
        let found = match &self.stores {
            Some(stores) => stores.scope(name),
            None => (self.store.store_name() == name).then(ClientScope::whole),
        };
        found.ok_or_else(|| match &self.stores {
            Some(stores) => stores.names().join(", "),
            None => self.store.store_name(),
        })
    }
}

#[derive(Debug, Default)]
pub(crate) struct ServerCounters {
    pub(crate) attached: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) requests: AtomicU64,
    pub(crate) bypassed: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) clients: AtomicU64,
}

/// Counts of a server, which may outlive it.
#[derive(Clone, Debug)]
pub struct ServerCounts {
    pub(crate) counters: Arc<ServerCounters>,
}

impl ServerCounts {
    /// Clients that are attached now.
    #[must_use]
    pub fn clients(&self) -> u64 {
        // Relaxed, here and below: a count publishes no other data.
        self.counters.clients.load(Relaxed)
    }

    /// Clients that were attached so far.
    #[must_use]
    pub fn attached(&self) -> u64 {
        self.counters.attached.load(Relaxed)
    }

    /// Connections that were refused: of another user, of another store, or without a greeting of this version.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.counters.refused.load(Relaxed)
    }

    /// Requests of clients, of any kind.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.counters.requests.load(Relaxed)
    }

    /// Of these, reads that the server left to the client's own store.
    #[must_use]
    pub fn bypassed(&self) -> u64 {
        self.counters.bypassed.load(Relaxed)
    }

    /// Of these, requests that failed, such as reads of objects that do not exist.
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.counters.failed.load(Relaxed)
    }
}

//! State that all clones of a [`SharedStore`](crate::SharedStore) share.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::{ArcSwap, ArcSwapOption};
use millpond_objects::serving::CacheableReads;
use object_store::ObjectStore;

use crate::client::attachment::Attachment;
use crate::client::gate::Gate;
use crate::client::stats::ClientCounters;

/// State that all clones share.
pub(crate) struct ClientParts {
    pub(crate) store: Arc<dyn ObjectStore>,
    /// The name by which the server knows the store.
    pub(crate) store_name: String,
    pub(crate) socket: PathBuf,
    pub(crate) objects_max: usize,
    /// The oldest validation that the program accepts. `None`: any.
    pub(crate) max_age: Option<Duration>,
    pub(crate) cacheable_reads: CacheableReads,
    pub(crate) current: ArcSwapOption<Attachment>,
    pub(crate) gate: ArcSwap<Gate>,
    pub(crate) counters: ClientCounters,
}

impl ClientParts {
    pub(crate) fn new(
        store: Arc<dyn ObjectStore>,
        socket: PathBuf,
        objects_max: usize,
    ) -> ClientParts {
        ClientParts {
            store_name: store.to_string(),
            store,
            socket,
            objects_max,
            max_age: None,
            cacheable_reads: CacheableReads::default(),
            current: ArcSwapOption::empty(),
            gate: ArcSwap::from_pointee(Gate::new()),
            counters: ClientCounters::default(),
        }
    }
}

impl Drop for ClientParts {
    fn drop(&mut self) {
        let current = self.current.swap(None);
        if current.as_ref().is_some_and(|current| !current.is_own()) {
            // client.CL2.
            std::mem::forget(current);
        }
    }
}

impl fmt::Debug for ClientParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientParts").field("store", &self.store).finish_non_exhaustive()
    }
}

//! Decides whether callers may wait for each other's requests, by the tokio runtime they run on (fetch.F1).

use std::sync::OnceLock;

use tokio::runtime::{Handle, Id, RuntimeFlavor};

/// The single-threaded runtime whose tasks may wait for each other, once one has claimed pages.
#[derive(Debug, Default)]
pub(crate) struct HomeRuntime(OnceLock<Id>);

impl HomeRuntime {
    /// Whether a task that the caller spawns makes progress while other callers wait for it.
    pub(crate) fn may_claim_pages(&self) -> bool {
        let Ok(runtime) = Handle::try_current() else { return false };
        let is_home = || *self.0.get_or_init(|| runtime.id()) == runtime.id();
        runtime.runtime_flavor() != RuntimeFlavor::CurrentThread || is_home()
    }

    /// Whether every task that may have claimed pages makes progress while the caller waits. Tasks on a multi-threaded
    /// runtime do. Tasks on the home runtime do if the caller waits on that runtime.
    pub(crate) fn may_wait_for_claims(&self) -> bool {
        let Ok(runtime) = Handle::try_current() else { return false };
        self.0.get().is_none_or(|home| *home == runtime.id())
    }
}

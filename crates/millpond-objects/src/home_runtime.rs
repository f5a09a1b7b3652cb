//! Where requests run on their own, so that others may wait for them (fetch.F1).

use std::sync::OnceLock;

use tokio::runtime::{Handle, Id, RuntimeFlavor};

/// The runtime of one thread whose tasks wait for each other, if there is one.
#[derive(Debug, Default)]
pub(crate) struct HomeRuntime(OnceLock<Id>);

impl HomeRuntime {
    /// Whether what is spawned here runs while those run who wait for it.
    pub(crate) fn may_claim_pages(&self) -> bool {
        let Ok(runtime) = Handle::try_current() else { return false };
        let is_home = || *self.0.get_or_init(|| runtime.id()) == runtime.id();
        runtime.runtime_flavor() != RuntimeFlavor::CurrentThread || is_home()
    }

    /// Whether all who may have claimed go on while the caller waits: on a runtime of several threads they
    /// do, and in the home where the caller is there itself.
    pub(crate) fn may_wait_for_claims(&self) -> bool {
        let Ok(runtime) = Handle::try_current() else { return false };
        self.0.get().is_none_or(|home| *home == runtime.id())
    }
}

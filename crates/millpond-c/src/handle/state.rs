//! The state that one lock protects (handle.N3 [handle](crate::handle)).

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use millpond::Buffer;

use crate::handle::protect::Hazard;

/// The number of kinds.
pub(crate) const KINDS: usize = 4;

/// A table that can forget its objects, in the child of a fork.
pub(super) trait Forget: Sync {
    /// Forgets all objects without dropping them.
    fn forget_all(&self, state: &mut State);
}

/// The places of one table.
#[derive(Default)]
pub(super) struct Places {
    /// Places below it have been used.
    pub(super) next: u32,
    /// Free places, each with its next generation.
    pub(super) free: Vec<(u32, u64)>,
}

/// The hazard of a thread, in its thread-local storage. It is in the list only while that storage exists,
/// and is used only under the lock.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct HazardOf(pub(super) *const Hazard);

// SAFETY: an address. It is used as stated above, which any thread may do.
unsafe impl Send for HazardOf {}

impl State {
    /// Whether there are threads other than that of `own`.
    pub(super) fn has_others(&self, own: *const Hazard) -> bool {
        self.hazards.iter().any(|one| one.0 != own)
    }

    /// Whether another thread is using the object `id`.
    pub(super) fn is_used(&self, id: u64, own: *const Hazard) -> bool {
        // SAFETY: a hazard in the list exists while this thread holds the lock.
        self.hazards.iter().any(|one| one.0 != own && unsafe { &*one.0 }.is(id))
    }
}

pub(super) struct State {
    pub(super) places: [Places; KINDS],
    /// The hazards of threads that have used a handle.
    pub(super) hazards: Vec<HazardOf>,
    /// The tables that have had an object.
    pub(super) tables: Vec<&'static dyn Forget>,
    /// Allocated buffers, by address.
    buffers: Option<HashMap<usize, Buffer>>,
}

static STATE: Mutex<State> = Mutex::new(State {
    places: [const { Places { next: 0, free: Vec::new() } }; KINDS],
    hazards: Vec::new(),
    tables: Vec::new(),
    buffers: None,
});

pub(super) fn lock() -> MutexGuard<'static, State> {
    // No code under the lock panics half-way; and if it did, one call's failure is enough.
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work` with the map of allocated buffers.
pub(crate) fn with_buffers<R>(work: impl FnOnce(&mut HashMap<usize, Buffer>) -> R) -> R {
    work(lock().buffers.get_or_insert_default())
}

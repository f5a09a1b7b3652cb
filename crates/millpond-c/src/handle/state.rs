//! What changes under the one lock (handle.N3 [handle](crate::handle)).

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use millpond::Buffer;

use crate::handle::protect::Hazard;

/// The number of kinds.
pub(crate) const KINDS: usize = 4;

/// A table that can forget what it has: for the child of a fork.
pub(super) trait Forget: Sync {
    /// Forgets all objects without dropping them.
    fn forget_all(&self, state: &mut State);
}

/// The places of one table.
#[derive(Default)]
pub(super) struct Places {
    /// Those before it have been used.
    pub(super) next: u32,
    /// Free, each with its next generation.
    pub(super) free: Vec<(u32, u64)>,
}

/// The hazard of a thread, which is in its thread-local storage. It is in the list for no longer than that
/// is there, and used under the lock alone.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct HazardOf(pub(super) *const Hazard);

// SAFETY: says where it is; it is looked at as said above, and any thread may.
unsafe impl Send for HazardOf {}

impl State {
    /// Whether another thread than that of `own` is there.
    pub(super) fn has_others(&self, own: *const Hazard) -> bool {
        self.hazards.iter().any(|one| one.0 != own)
    }

    /// Whether another thread is using the object `id`.
    pub(super) fn is_used(&self, id: u64, own: *const Hazard) -> bool {
        // SAFETY: in the list, so there, while we have the lock.
        self.hazards.iter().any(|one| one.0 != own && unsafe { &*one.0 }.is(id))
    }
}

pub(super) struct State {
    pub(super) places: [Places; KINDS],
    /// Of the threads that have used a handle.
    pub(super) hazards: Vec<HazardOf>,
    /// Those that have had an object.
    pub(super) tables: Vec<&'static dyn Forget>,
    /// Memory that was given out, by its address.
    buffers: Option<HashMap<usize, Buffer>>,
}

static STATE: Mutex<State> = Mutex::new(State {
    places: [const { Places { next: 0, free: Vec::new() } }; KINDS],
    hazards: Vec::new(),
    tables: Vec::new(),
    buffers: None,
});

pub(super) fn lock() -> MutexGuard<'static, State> {
    // Nothing that is done under it panics half-way; and if it did, one call's failure is enough.
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Carries out `work` with the memory that was given out.
pub(crate) fn with_buffers<R>(work: impl FnOnce(&mut HashMap<usize, Buffer>) -> R) -> R {
    work(lock().buffers.get_or_insert_default())
}

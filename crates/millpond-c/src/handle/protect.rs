//! Hazard pointers: how threads use an object while another thread withdraws it from the table.
//!
//! ```text
//!   user                                    withdrawing thread
//!     1. hazard = id                          a. slot's id = 0, by a compare-exchange
//!        light fence                             list of hazards; heavy fence
//!     2. slot's id is still id?               b. wait until no hazard is id
//!     3. use the object                       c. exclusive access to the object
//!     4. hazard = 0
//! ```
//!
//! - **P1** Either the user sees at 2 that the id is gone, or the withdrawing thread waits for it at b: one
//!   of the two fences comes first, and the accesses above it are visible below the other.
//! - **P2** A user's accesses to the object happen before c: each store to a hazard is a release, each load
//!   at b an acquire.
//! - **P3** Ids are never reused, so a hazard value stands for one object.
//! - **P4** An object is used briefly: for a read of cached bytes, or to take a reference. So b waits
//!   briefly, unless the user's memory faults (a page to be read in, a debugger).
//!
//! Every cached read executes the user's fence, so it must be free: it is a compiler fence. The heavy fence
//! is `membarrier(2)`, which makes every processor that runs a thread of this process execute a full fence.
//! Where the system has no membarrier, both are full fences. If no other thread has used a handle, there
//! are no users to wait for, and no fence is needed.

use std::cell::UnsafeCell;

#[cfg(not(loom))]
use crate::handle::membarrier;
use crate::sync::{AtomicU64, Ordering, fence};

/// The id of the object that a thread is using, or 0.
#[derive(Default)]
pub(crate) struct Hazard {
    held: AtomicU64,
}

/// Why a handle can't be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// There is no such object, or no longer.
    Unknown,
    /// The thread is using an object: this is a signal handler that interrupted it.
    Nested,
}

/// The fences of the two sides.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fences {
    /// Full fences on both sides.
    Full,
    /// A compiler fence for the user, membarrier for the withdrawing thread.
    #[cfg(not(loom))]
    Asymmetric,
}

impl Fences {
    /// The fences of this process. Call under the lock of the tables.
    #[cfg(not(loom))]
    pub(crate) fn here() -> Fences {
        if membarrier::is_available() { Fences::Asymmetric } else { Fences::Full }
    }

    /// Argued: loom has no compiler fence; membarrier in `heavy` does the processor's part, even
    /// if this thread does not run then.
    #[inline(always)]
    fn light(self) {
        match self {
            Fences::Full => fence(Ordering::SeqCst),
            #[cfg(not(loom))]
            Fences::Asymmetric => std::sync::atomic::compiler_fence(Ordering::SeqCst),
        }
    }

    /// The fence before step b.
    pub(crate) fn heavy(self) {
        fence(Ordering::SeqCst);
        #[cfg(not(loom))]
        if self == Fences::Asymmetric {
            membarrier::everywhere();
        }
    }
}

/// A place for an object.
pub(crate) struct Slot<T> {
    /// The object's id; 0: none.
    id: AtomicU64,
    object: UnsafeCell<Option<T>>,
}

// SAFETY: only a thread with exclusive access to the slot writes the object: before its id is published,
// and after all users have finished (P1). Users share it, and the withdrawing thread, maybe another one,
// drops it.
unsafe impl<T: Send + Sync> Sync for Slot<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Send for Slot<T> {}

impl<T> Default for Slot<T> {
    fn default() -> Self {
        Slot { id: AtomicU64::new(0), object: UnsafeCell::new(None) }
    }
}

#[cfg(not(loom))]
impl<T> Slot<T> {
    pub(crate) const fn new() -> Slot<T> {
        Slot { id: AtomicU64::new(0), object: UnsafeCell::new(None) }
    }
}

/// An object in use.
pub(crate) struct Held<'a, T> {
    object: &'a T,
    hazard: &'a Hazard,
}

impl<T> std::ops::Deref for Held<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        self.object
    }
}

impl<T> Drop for Held<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        self.hazard.clear();
    }
}

impl Hazard {
    #[cfg(not(any(loom, target_arch = "x86_64")))]
    pub(crate) const fn new() -> Hazard {
        Hazard { held: AtomicU64::new(0) }
    }

    /// One load of step b.
    pub(crate) fn is(&self, id: u64) -> bool {
        // Acquire: P2.
        self.held.load(Ordering::Acquire) == id
    }

    /// Whether its thread is using an object.
    #[inline(always)]
    pub(crate) fn is_in_use(&self) -> bool {
        self.held.load(Ordering::Relaxed) != 0
    }

    #[inline(always)]
    fn set(&self, id: u64) {
        // Release (P2): a thread that finds this id instead of the previous one must see that use, too.
        self.held.store(id, Ordering::Release);
    }

    #[inline(always)]
    pub(crate) fn clear(&self) {
        // Release (P2).
        self.held.store(0, Ordering::Release);
    }
}

impl<T> Slot<T> {
    /// Puts an object into an empty slot. The caller excludes concurrent calls.
    pub(crate) fn publish(&self, id: u64, object: T) {
        // SAFETY: no id is published, so there are no readers (P1); no other writer, by the caller.
        unsafe { *self.object.get() = Some(object) };
        // Release: pairs with the acquire in `enter`.
        self.id.store(id, Ordering::Release);
    }

    /// Steps 1 and 2. `hazard` is the calling thread's.
    #[inline(always)]
    pub(crate) fn enter<'a>(
        &'a self,
        hazard: &'a Hazard,
        fences: Fences,
        id: u64,
    ) -> Result<Held<'a, T>, Refusal> {
        if hazard.is_in_use() {
            return Err(Refusal::Nested);
        }
        hazard.set(id);
        fences.light();
        // Acquire: pairs with the release in `publish`.
        if self.id.load(Ordering::Acquire) != id {
            hazard.clear();
            return Err(Refusal::Unknown);
        }
        // SAFETY: the id was published after the object. A withdrawing thread waits for this hazard before
        // it accesses the object (P1), until the result is dropped.
        match unsafe { &*self.object.get() } {
            Some(object) => Ok(Held { object, hazard }),
            // Never: an id is published with an object.
            None => Err(Refusal::Unknown),
        }
    }

    /// Step a: makes the object unreachable. False: it is not there, or another thread withdrew it first.
    pub(crate) fn withdraw(&self, id: u64) -> bool {
        // Relaxed: before the access to the object come the lock of the tables, under which it was
        // published, and the heavy fence.
        self.id.compare_exchange(id, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Step c.
    ///
    /// # Safety
    ///
    /// The caller withdrew the id, then made the heavy fence, and then found each hazard different from the
    /// id once: the hazards of all other threads that may have looked for the id before.
    pub(crate) unsafe fn take(&self) -> Option<T> {
        // SAFETY: withdrawn, and no user is left (P1); the caller alone withdrew it.
        unsafe { (*self.object.get()).take() }
    }

    /// Forgets the object without dropping it. Returns its id, if there is one.
    ///
    /// For the child of a fork, which has one thread.
    pub(crate) fn forget(&self) -> Option<u64> {
        let id = self.id.load(Ordering::Relaxed);
        if id == 0 {
            return None;
        }
        self.id.store(0, Ordering::Relaxed);
        // SAFETY: there is no other thread, and this one uses no object: it is inside `fork`.
        std::mem::forget(unsafe { (*self.object.get()).take() });
        Some(id)
    }
}

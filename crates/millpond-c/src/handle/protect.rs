//! How an object is used by some threads while another takes it out of the table.
//!
//! ```text
//!   user                                    who takes it out
//!     1. hazard = id                          a. slot's id = 0, by a compare-exchange
//!        light fence                             whose hazards are there? heavy fence
//!     2. slot's id is still id?               b. whose hazard is id? wait until it is not
//!     3. use the object                       c. the object is nobody's but ours
//!     4. hazard = 0
//! ```
//!
//! - **P1** Either the user sees at 2 that the id is gone, or it is waited for at b: one of the two fences
//!   comes first, and what stands above it is seen below the other.
//! - **P2** What a user did with the object happens before c: each store to a hazard is a release, each
//!   look at b an acquire.
//! - **P3** Ids are never used again, so a hazard stands for one object for ever.
//! - **P4** An object is used for moments: for a read of what is cached, or to take a reference. So b waits
//!   for moments, save where the user's memory faults (a page that has to be read, a debugger).
//!
//! The user's fence must cost nothing, as every cached read has one: it is for the compiler alone, and the
//! heavy one is `membarrier(2)`, which has every processor that runs a thread of this process make a full
//! fence. Where the system has no membarrier both are full fences. Where no other thread has
//! used a handle there is nobody to wait for, and no fence.

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
    /// Both sides'.
    Full,
    /// The user's is the compiler's, the other one membarrier.
    #[cfg(not(loom))]
    Asymmetric,
}

impl Fences {
    /// Those of this process. Under the lock of the tables.
    #[cfg(not(loom))]
    pub(crate) fn here() -> Fences {
        if membarrier::is_there() { Fences::Asymmetric } else { Fences::Full }
    }

    /// Argued: of the compiler's fence, which loom has not, the processor's part is done by membarrier in
    /// `heavy`, wherever this thread is then.
    #[inline(always)]
    fn light(self) {
        match self {
            Fences::Full => fence(Ordering::SeqCst),
            #[cfg(not(loom))]
            Fences::Asymmetric => std::sync::atomic::compiler_fence(Ordering::SeqCst),
        }
    }

    /// Above step b.
    pub(crate) fn heavy(self) {
        fence(Ordering::SeqCst);
        #[cfg(not(loom))]
        if self == Fences::Asymmetric {
            membarrier::everywhere();
        }
    }
}

/// Where an object is.
pub(crate) struct Slot<T> {
    /// The object's; 0: there is none.
    id: AtomicU64,
    object: UnsafeCell<Option<T>>,
}

// SAFETY: the object is written by who has the slot to itself: before its id is published, and after all
// users have gone (P1). Users share it, and whoever took it out drops it, perhaps another thread.
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

    /// Step b, one look.
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
        // Release (P2): who finds this id instead of the one before must see that use, too.
        self.held.store(id, Ordering::Release);
    }

    #[inline(always)]
    pub(crate) fn clear(&self) {
        // Release (P2).
        self.held.store(0, Ordering::Release);
    }
}

impl<T> Slot<T> {
    /// Puts an object into a slot that has none, and that nobody else puts one into.
    pub(crate) fn publish(&self, id: u64, object: T) {
        // SAFETY: no id is published, so nobody reads the object (P1); no other writer, by the caller.
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
        // SAFETY: the id was published after the object was, and who takes it out waits for this hazard
        // before it touches the object (P1), until the result is dropped.
        match unsafe { &*self.object.get() } {
            Some(object) => Ok(Held { object, hazard }),
            // Never: an id is published with an object.
            None => Err(Refusal::Unknown),
        }
    }

    /// Step a: nobody finds the object any more. False: it is not there, or somebody else was faster.
    pub(crate) fn withdraw(&self, id: u64) -> bool {
        // Relaxed: before the object is looked at come the lock of the tables, under which it was published,
        // and the heavy fence.
        self.id.compare_exchange(id, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Step c.
    ///
    /// # Safety
    ///
    /// The caller withdrew the id, then made the heavy fence, and then found each hazard once not to be the
    /// id: those of all other threads that may have looked for it before.
    pub(crate) unsafe fn take(&self) -> Option<T> {
        // SAFETY: withdrawn, and no user is left (P1); the caller alone withdrew it.
        unsafe { (*self.object.get()).take() }
    }

    /// Forgets the object without dropping it; its id, if there is one.
    ///
    /// For the child of a fork, which has one thread.
    pub(crate) fn forget(&self) -> Option<u64> {
        let id = self.id.load(Ordering::Relaxed);
        if id == 0 {
            return None;
        }
        self.id.store(0, Ordering::Relaxed);
        // SAFETY: there is no other thread, and this one uses no object: it is inside of `fork`.
        std::mem::forget(unsafe { (*self.object.get()).take() });
        Some(id)
    }
}

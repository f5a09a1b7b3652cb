//! Finds contexts of Linux AIO by their handles, without a lock: `aio.A4`.
//!
//! ```text
//!   find:   users += 1 -> the handle stands? -> in use -> drop: users -= 1
//!   remove: in use -> the handle is 0 -> drop
//!   free:   the handle is 0 -> users is 0 -> the place is empty
//! ```
//!
//! - **U1** A user of a context counts itself, and then checks whether the handle is still valid.
//! - **U2** The destroyer, which removes the handle, is counted until after the removal. In
//!   the modification order of `users`, a user that counts itself after the destroyer has left
//!   acquires the removal, and so finds no handle. An earlier user is seen by any thread that sees
//!   that the destroyer has left.
//! - **U3** A thread that frees a context has acquired the removal of its handle. So it sees that the
//!   destroyer is counted, or has left; and then the end of each use.
//!
//! Locks: making or destroying a context holds one, a leaf.

use std::ops::Deref;
use std::ptr::null_mut;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::runtime::sync::{AtomicPtr, AtomicU32, AtomicUsize, Lock};

/// `COUNT` places for contexts.
pub struct Places<T, const COUNT: usize> {
    places: [Place<T>; COUNT],
    /// One more than the highest place ever used.
    used: AtomicUsize,
    /// Held while a context is made or destroyed.
    making: Lock<()>,
}

/// A place for one context.
struct Place<T> {
    /// 0 if the place has no context, or its context was removed.
    handle: AtomicUsize,
    users: AtomicU32,
    context: AtomicPtr<T>,
}

/// A reference to a context, which lives as long as the reference.
pub struct InUse<'a, T> {
    place: &'a Place<T>,
}

impl<T: Send + Sync, const COUNT: usize> Places<T, COUNT> {
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        let places = [const {
            Place {
                handle: AtomicUsize::new(0),
                users: AtomicU32::new(0),
                context: AtomicPtr::new(null_mut()),
            }
        }; COUNT];
        Self { places, used: AtomicUsize::new(0), making: Lock::new(()) }
    }

    fn used(&self) -> &[Place<T>] {
        // Relaxed: the thread got the handle after it was stored here, and so sees this count.
        &self.places[..self.used.load(Relaxed)]
    }

    /// The context of a handle.
    pub fn find(&self, handle: usize) -> Option<InUse<'_, T>> {
        self.used()
            .iter()
            .filter(|place| place.handle.load(Relaxed) == handle)
            .find_map(|place| InUse::of(place, handle))
    }

    /// Registers a context and returns its handle, or `None` if there are too many.
    pub fn place(&self, handle: usize, context: T) -> Option<usize> {
        self.free_removed();
        let _making = self.making.lock();
        let at = self.places.iter().position(|place| place.context.load(Relaxed).is_null())?;
        self.used.fetch_max(at + 1, Relaxed);
        self.places[at].fill(handle, Box::into_raw(Box::new(context)));
        Some(handle)
    }

    /// Frees the contexts that were removed and have no users.
    pub fn free_removed(&self) {
        for place in self.used() {
            let making = self.making.lock();
            let context = place.take_unused();
            // Dropped outside the lock, as the context's drop may take other locks.
            drop(making);
            if !context.is_null() {
                // SAFETY: made by `Box::into_raw`; no thread finds or uses it.
                drop(unsafe { Box::from_raw(context) });
            }
        }
    }

    /// In a forked child: calls `leave` for each context, and leaves the contexts behind, as they are the parent's.
    ///
    /// # Safety
    ///
    /// No other thread exists.
    pub unsafe fn after_fork(&self, leave: impl Fn(&T)) {
        // SAFETY: the caller's duty.
        unsafe { self.making.reset(()) };
        for place in &self.places[..self.used.swap(0, Relaxed)] {
            place.handle.store(0, Relaxed);
            place.users.store(0, Relaxed);
            let context = place.context.swap(null_mut(), Relaxed);
            // SAFETY: made by `Box::into_raw`, and no other thread exists.
            if let Some(context) = unsafe { context.as_ref() } {
                leave(context);
            }
        }
    }
}

impl<T> Place<T> {
    fn fill(&self, handle: usize, context: *mut T) {
        self.context.store(context, Relaxed);
        // Release: a thread that finds the handle finds the context.
        self.handle.store(handle, Release);
    }

    /// Empties the place if its context was removed and has no users; returns null otherwise.
    fn take_unused(&self) -> *mut T {
        let context = self.context.load(Relaxed);
        // Acquire: pairs with the Release in `remove` (U3).
        if context.is_null() || self.handle.load(Acquire) != 0 {
            return null_mut();
        }
        // Acquire: pairs with the Release of each user.
        if self.users.load(Acquire) != 0 {
            return null_mut();
        }
        self.context.store(null_mut(), Relaxed);
        context
    }
}

impl<'a, T> InUse<'a, T> {
    fn of(place: &'a Place<T>, handle: usize) -> Option<Self> {
        // Acquire: pairs with the Release of the destroyer, which has gone (U2).
        place.users.fetch_add(1, Acquire);
        let in_use = Self { place };
        // Acquire: pairs with the Release in `fill`.
        (place.handle.load(Acquire) == handle).then_some(in_use)
    }

    /// Removes the handle of its context; returns whether the handle was still there. From then on no
    /// thread finds the context.
    pub fn remove(&self, handle: usize) -> bool {
        // Release: a thread that finds no handle sees that this thread is counted (U3).
        self.place.handle.compare_exchange(handle, 0, Release, Relaxed).is_ok()
    }
}

impl<T> Clone for InUse<'_, T> {
    fn clone(&self) -> Self {
        // Relaxed: this user is already counted.
        self.place.users.fetch_add(1, Relaxed);
        Self { place: self.place }
    }
}

impl<T> Deref for InUse<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // Relaxed: the handle was found.
        // SAFETY: aio.A4: counted while the handle stood.
        unsafe { &*self.place.context.load(Relaxed) }
    }
}

impl<T> Drop for InUse<'_, T> {
    fn drop(&mut self) {
        // Release: all uses of the context come before it is freed. Also pairs with the
        // Acquire in `of` (U2).
        self.place.users.fetch_sub(1, Release);
    }
}

#[cfg(all(test, loom))]
#[path = "context_table/loom_tests.rs"]
mod loom_tests;

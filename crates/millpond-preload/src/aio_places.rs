//! Where contexts of Linux AIO are found by their handles, without a lock: A4 of `aio`.
//!
//! Locks: who makes or destroys a context holds one, a leaf.

use std::ops::Deref;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize};

use crate::aio_context::Context;
use crate::lock::Lock;
use crate::{hooks_process, thread};

/// Contexts at a time; more are the kernel's alone, and what they are asked for of served files makes
/// those the kernel's, too.
const PLACES: usize = 1024;

/// Where a context can be found.
struct Place {
    /// 0 where there is none, or none any more.
    handle: AtomicUsize,
    users: AtomicU32,
    context: AtomicPtr<Context>,
}

static CONTEXTS: [Place; PLACES] = [const {
    Place {
        handle: AtomicUsize::new(0),
        users: AtomicU32::new(0),
        context: AtomicPtr::new(std::ptr::null_mut()),
    }
}; PLACES];
/// One more than the highest place ever used.
static PLACES_USED: AtomicUsize = AtomicUsize::new(0);
/// Held by who makes or destroys a context.
static MAKING: Lock<()> = Lock::new(());

/// A context that lives as long as this does.
pub struct InUse {
    place: &'static Place,
}

impl InUse {
    fn of(place: &'static Place, handle: usize) -> Option<Self> {
        // SeqCst, with the look that follows, and the two of who destroys the context (A4): he sees
        // the count, or the handle is seen to be gone.
        place.users.fetch_add(1, SeqCst);
        let in_use = Self { place };
        (place.handle.load(SeqCst) == handle).then_some(in_use)
    }
}

impl Clone for InUse {
    fn clone(&self) -> Self {
        // Relaxed: it is counted already.
        self.place.users.fetch_add(1, Relaxed);
        Self { place: self.place }
    }
}

impl Deref for InUse {
    type Target = Context;
    fn deref(&self) -> &Context {
        // SAFETY: A4: counted while the handle stood.
        unsafe { &*self.place.context.load(Acquire) }
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        // Release: all that was done with the context comes before it is freed.
        self.place.users.fetch_sub(1, Release);
    }
}

/// Frees what nobody uses any more (A4). `MAKING` is held.
fn free_destroyed() {
    for place in &CONTEXTS[..PLACES_USED.load(Relaxed)] {
        let context = place.context.load(Relaxed);
        if !context.is_null()
            && place.handle.load(SeqCst) == 0
            // SeqCst: see `InUse::of`.
            && place.users.load(SeqCst) == 0
        {
            place.context.store(std::ptr::null_mut(), Relaxed);
            // SAFETY: made by `Box::into_raw`, and nobody finds or uses it.
            drop(unsafe { Box::from_raw(context) });
        }
    }
}

/// Puts a context where it can be found; its handle. `None`: there are too many.
pub fn place(context: Context) -> Option<usize> {
    let _making = MAKING.lock();
    free_destroyed();
    let at = CONTEXTS.iter().position(|place| place.context.load(Relaxed).is_null())?;
    let handle = context.handle();
    PLACES_USED.fetch_max(at + 1, Relaxed);
    // Release: who finds the handle finds the context.
    CONTEXTS[at].context.store(Box::into_raw(Box::new(context)), Release);
    CONTEXTS[at].handle.store(handle, SeqCst);
    Some(handle)
}

/// Takes the handle away from a context; whether it had it still. From then on nobody finds it.
pub fn remove(context: &InUse, handle: usize) -> bool {
    // SeqCst: see `InUse::of`.
    context.place.handle.compare_exchange(handle, 0, SeqCst, SeqCst).is_ok()
}

/// Frees the contexts that were removed, and are not used any more (A4).
pub fn free_removed() {
    let _making = MAKING.lock();
    free_destroyed();
}

/// The context of a handle; `None` for one of the kernel's.
pub fn find(handle: usize) -> Option<InUse> {
    if handle == 0 || thread::record().is_inside() {
        return None;
    }
    hooks_process::ensure_initialised();
    CONTEXTS[..PLACES_USED.load(Relaxed)]
        .iter()
        .filter(|place| place.handle.load(Relaxed) == handle)
        .find_map(|place| InUse::of(place, handle))
}

/// In a forked child.
///
/// # Safety
///
/// No other thread exists.
pub unsafe fn after_fork() {
    // SAFETY: the caller's duty.
    unsafe { MAKING.reset(()) };
    for place in &CONTEXTS[..PLACES_USED.swap(0, Relaxed)] {
        // The parent's, and left behind.
        place.handle.store(0, Relaxed);
        place.users.store(0, Relaxed);
        place.context.store(std::ptr::null_mut(), Relaxed);
    }
}

//! What a child of fork keeps of the tables: nothing (handle.N3 [handle](crate::handle)).
//!
//! The handlers run in `fork`, not in `vfork`, `posix_spawn` or a bare `clone`. A child of the latter that
//! goes on in the program finds its parent's handles, whose objects refuse it (`Error::Forked`).

use std::cell::UnsafeCell;
use std::sync::{MutexGuard, Once};

use crate::handle::state::{self, State};
use crate::handle::thread;

/// The lock, held from before a fork until after it.
struct Across(UnsafeCell<Option<MutexGuard<'static, State>>>);

// SAFETY: used by whoever holds the lock alone.
unsafe impl Sync for Across {}

static ACROSS: Across = Across(UnsafeCell::new(None));

/// Has forks told of from now on.
pub(super) fn watch() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // SAFETY: the handlers keep to what may be done in them. Out of memory, children are refused by the
        // objects themselves.
        let _ = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
    });
}

unsafe extern "C" fn before() {
    let guard = state::lock();
    // SAFETY: we hold the lock.
    unsafe { *ACROSS.0.get() = Some(guard) };
}

unsafe extern "C" fn in_parent() {
    // SAFETY: held since `before`, by this thread.
    drop(unsafe { (*ACROSS.0.get()).take() });
}

unsafe extern "C" fn in_child() {
    // SAFETY: held since `before`, by the thread that is this one in the parent.
    let Some(mut guard) = (unsafe { (*ACROSS.0.get()).take() }) else { return };
    let state = &mut *guard;
    // Those of threads that are not here.
    let own = &raw const thread::record().hazard;
    state.hazards.retain(|one| one.0 == own);
    for table in state.tables.clone() {
        table.forget_all(state);
    }
    drop(guard);
    millpond::Engine::forget_parent();
}

//! Fork handlers that empty the tables in the child (handle.N3 [handle](crate::handle)).
//!
//! The handlers run in `fork`, not in `vfork`, `posix_spawn` or a bare `clone`. A child of a bare `clone`
//! that continues in the program finds its parent's handles, whose objects refuse it (`Error::Forked`).

use std::cell::UnsafeCell;
use std::sync::{MutexGuard, Once};

use crate::handle::state::{self, State};
use crate::handle::thread;

/// The guard of the lock, held across a fork.
struct ForkGuard(UnsafeCell<Option<MutexGuard<'static, State>>>);

// SAFETY: used only by the thread that holds the lock.
unsafe impl Sync for ForkGuard {}

static FORK_GUARD: ForkGuard = ForkGuard(UnsafeCell::new(None));

/// Installs the fork handlers.
pub(super) fn install_handlers() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // SAFETY: the handlers call only functions that a fork handler may call. If this fails for
        // lack of memory, the objects themselves refuse a child.
        let _ = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
    });
}

unsafe extern "C" fn before() {
    let guard = state::lock();
    // SAFETY: this thread holds the lock.
    unsafe { *FORK_GUARD.0.get() = Some(guard) };
}

unsafe extern "C" fn in_parent() {
    // SAFETY: this thread has held the lock since `before`.
    drop(unsafe { (*FORK_GUARD.0.get()).take() });
}

unsafe extern "C" fn in_child() {
    // SAFETY: the lock has been held since `before` by the forking thread, which is this one in the child.
    let Some(mut guard) = (unsafe { (*FORK_GUARD.0.get()).take() }) else { return };
    let state = &mut *guard;
    // The other hazards belong to threads that do not exist in the child.
    let own = &raw const thread::record().hazard;
    state.hazards.retain(|one| one.0 == own);
    for table in state.tables.clone() {
        table.forget_all(state);
    }
    drop(guard);
    millpond::Engine::forget_parent();
}

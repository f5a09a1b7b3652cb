//! The number of forks between the start of the program and this process.
//!
//! A child of fork inherits no engine: see "fork" in docs/python.md. Each object that refers to an engine has the
//! generation in which it was made, and makes a new one when the generation has changed.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

static GENERATION: AtomicU64 = AtomicU64::new(0);
static LAST_TASKS: AtomicUsize = AtomicUsize::new(0);

/// The longest wait for tasks at the end of the interpreter. Chosen.
const LAST_TASKS_TIMEOUT: Duration = Duration::from_secs(10);

/// The generation of this process. Relaxed: only the single thread of a new child changes it.
pub(crate) fn generation() -> u64 {
    GENERATION.load(Relaxed)
}

/// Counts forks from now on, by `os.fork` and by native code. Called before the first engine is made.
pub(crate) fn watch_forks() {
    extern "C" fn in_child() {
        GENERATION.fetch_add(1, Relaxed);
        // Its tasks are the parent's.
        LAST_TASKS.store(0, Relaxed);
        millpond::Engine::forget_parent();
        millpond_objects::CachedStore::forget_parent();
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler stores to atomics and calls the functions of the engine and the cache for children of fork. Python never
        // unloads an extension module, so the handler stays mapped.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

/// Locks a mutex of this crate. It is held only by a thread that is attached to the interpreter, and for no wait. So a
/// fork by Python, whose thread is attached, finds no mutex locked.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A background task that the end of the interpreter waits for, until this is dropped.
pub(crate) struct LastTask(u64);

impl LastTask {
    pub(crate) fn new() -> LastTask {
        // Relaxed, here and below: a count.
        LAST_TASKS.fetch_add(1, Relaxed);
        LastTask(generation())
    }
}

impl Drop for LastTask {
    fn drop(&mut self) {
        if self.0 == generation() {
            LAST_TASKS.fetch_sub(1, Relaxed);
        }
    }
}

/// Waits for all [`LastTask`]s, at the end of the interpreter: for `millpond._objects`.
#[pyfunction]
pub(crate) fn _wait_for_last_tasks(py: Python<'_>) -> PyResult<()> {
    let end = Instant::now() + LAST_TASKS_TIMEOUT;
    while LAST_TASKS.load(Relaxed) > 0 && Instant::now() < end {
        py.detach(|| std::thread::sleep(Duration::from_millis(2)));
        py.check_signals()?;
    }
    Ok(())
}

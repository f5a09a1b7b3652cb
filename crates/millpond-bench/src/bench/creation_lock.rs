//! A lock over the creation of named files: after a signal `interrupt` takes it and does not
//! release it, so that no file is created during the cleanup.

use std::sync::{Mutex, MutexGuard, PoisonError};

static GATE: Mutex<()> = Mutex::new(());

/// To be held while a named file is created.
pub fn creation_lock() -> MutexGuard<'static, ()> {
    GATE.lock().unwrap_or_else(PoisonError::into_inner)
}

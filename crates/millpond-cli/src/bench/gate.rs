//! What whoever makes a file with a name holds meanwhile, so that none is made once a signal has come:
//! `interrupt` shuts it for good.

use std::sync::{Mutex, MutexGuard, PoisonError};

static GATE: Mutex<()> = Mutex::new(());

/// To be held while something with a name is made.
pub fn gate() -> MutexGuard<'static, ()> {
    GATE.lock().unwrap_or_else(PoisonError::into_inner)
}

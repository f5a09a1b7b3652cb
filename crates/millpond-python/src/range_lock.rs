//! `File.lock_range`: locks of byte ranges, between all handles of a file in this process.
//!
//! The engine makes single reads and writes atomic by itself; these locks are for sequences of them. They are advisory.

use std::collections::HashMap;
use std::mem;
use std::pin::pin;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use millpond_rangelock::{ByteRange, Mode, OwnedGuard, RangeLock};
use pyo3::prelude::*;

use crate::handle::Identity;
use crate::process::{self, lock};
use crate::wait::wait_for;

/// The locks of the files that have one, by file and generation: a child of fork starts without locks.
static LOCKS: Mutex<Option<Locks>> = Mutex::new(None);

type Locks = HashMap<(u64, Identity), Weak<RangeLock>>;

fn lock_of(identity: Identity) -> Arc<RangeLock> {
    let mut locks = lock(&LOCKS);
    let locks = locks.get_or_insert_default();
    let key = (process::generation(), identity);
    if let Some(known) = locks.get(&key).and_then(Weak::upgrade) {
        return known;
    }
    locks.retain(|_, lock| lock.strong_count() > 0);
    let fresh = Arc::new(RangeLock::new());
    locks.insert(key, Arc::downgrade(&fresh));
    fresh
}

/// Waits for the range; `None`: not within `timeout`.
pub(crate) fn lock_range(
    py: Python<'_>,
    identity: Identity,
    range: ByteRange,
    exclusive: bool,
    timeout: Option<Duration>,
) -> PyResult<Option<LockedRange>> {
    let lock = lock_of(identity);
    let mode = if exclusive { Mode::Exclusive } else { Mode::Shared };
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let guard = match lock.try_lock_owned(range, mode) {
        Some(guard) => Some(guard),
        None => wait_for(py, pin!(lock.lock_owned_async(range, mode)), deadline)?,
    };
    let held =
        |guard| LockedRange { guard: Mutex::new(Some(guard)), generation: process::generation() };
    Ok(guard.map(held))
}

/// A byte range that `File.lock_range` has locked: a context manager that releases it. `release` does that earlier.
///
/// >>> import millpond
/// >>> with millpond.open("counter.bin", "w+b") as file:
/// ...     with file.lock_range(0, 8):
/// ...         count = int.from_bytes(file.pread(8, 0), "little")
/// ...         file.pwrite((count + 1).to_bytes(8, "little"), 0)
/// 8
#[pyclass(frozen, module = "millpond")]
pub(crate) struct LockedRange {
    guard: Mutex<Option<OwnedGuard>>,
    generation: u64,
}

impl LockedRange {
    fn take(&self) {
        let guard = lock(&self.guard).take();
        if self.generation == process::generation() {
            drop(guard);
        } else {
            // The lock is a copy of the parent's, in which a thread of the parent may have been at work.
            mem::forget(guard);
        }
    }
}

#[pymethods]
impl LockedRange {
    /// Releases the range; without effect if it is released already.
    fn release(&self) {
        self.take();
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_details))]
    fn __exit__(&self, _details: &Bound<'_, PyAny>) {
        self.take();
    }
}

impl Drop for LockedRange {
    fn drop(&mut self) {
        self.take();
    }
}

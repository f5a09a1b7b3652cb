//! The tokio runtime of the process, which runs requests to object stores. Made at its first use.
//!
//! - **R1** A child of fork has none of its parent's threads. It leaks the parent's runtime and objects that refer to it
//!   ([`OfProcess`]), as dropping them could wait for these threads, and makes its own.
//! - **R2** No thread of the runtime enters Python, so the interpreter may end at any time.

use std::mem::{self, ManuallyDrop};
use std::sync::Mutex;

use pyo3::prelude::*;
use tokio::runtime::{Builder, Handle, Runtime};

use crate::error;
use crate::process::{self, lock};

/// Threads that run requests. Their work is to copy bodies and to decrypt, so few are enough. Untuned.
const WORKERS: usize = 2;

static RUNTIME: Mutex<Option<(Runtime, u64)>> = Mutex::new(None);

/// The runtime of this process.
pub(crate) fn handle() -> PyResult<Handle> {
    process::watch_forks();
    let mut slot = lock(&RUNTIME);
    if let Some((runtime, generation)) = &*slot
        && *generation == process::generation()
    {
        return Ok(runtime.handle().clone());
    }
    let runtime = Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .thread_name("millpond-store")
        .enable_all()
        .build()
        .map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(libc::EAGAIN);
            error::os_error(errno, "the threads of the object store can't be started", None)
        })?;
    let handle = runtime.handle().clone();
    // R1.
    mem::forget(slot.replace((runtime, process::generation())));
    Ok(handle)
}

/// An object that refers to threads of the process that made it (R1).
pub(crate) struct OfProcess<T> {
    value: ManuallyDrop<T>,
    generation: u64,
}

impl<T> OfProcess<T> {
    pub(crate) fn new(value: T) -> OfProcess<T> {
        OfProcess { value: ManuallyDrop::new(value), generation: process::generation() }
    }

    pub(crate) fn is_of_this_process(&self) -> bool {
        self.generation == process::generation()
    }

    /// `None` in a child of fork.
    pub(crate) fn get(&self) -> Option<&T> {
        self.is_of_this_process().then_some(&*self.value)
    }

    /// The object of this process.
    pub(crate) fn into_inner(mut self) -> T {
        self.generation = u64::MAX;
        // SAFETY: the generation is that of no process, so `drop` leaves the field alone.
        unsafe { ManuallyDrop::take(&mut self.value) }
    }

    /// The object, for a future that runs on a thread of the process that made it.
    pub(crate) fn value_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for OfProcess<T> {
    fn drop(&mut self) {
        if self.is_of_this_process() {
            // SAFETY: dropped once, as this is the only place, and the field is not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

//! Threads that carry out background reads, where nothing else does so without one.
//!
//! They are apart from the engine's workers: a job of those may wait for the end of a read.

use std::io;
use std::sync::Arc;

use crate::io::batch;
use crate::io::pool::Pool;
use crate::io::transfer::{BackgroundRead, Transfer};

/// What the device has at once of reads that the kernel caches. Chosen, not measured.
const THREADS_MAX: usize = 8;
/// Background reads that wait for a thread, and that nobody waits for. As for the driver's.
const QUEUED_MAX: usize = 64;

pub(crate) fn readers() -> Arc<Pool> {
    Pool::new("millpond-read", THREADS_MAX)
}

/// [`BackingFile::start`](crate::io::backend::BackingFile::start), by one of `readers`.
pub(crate) fn start(
    readers: &Arc<Pool>,
    read: BackgroundRead,
    attempt: impl FnOnce(Transfer<'_>) -> io::Result<usize> + Send + 'static,
) -> Result<(), BackgroundRead> {
    let is_too_many = !read.wanted && readers.queued() >= QUEUED_MAX;
    if is_too_many || readers.start().is_err() {
        return Err(read);
    }
    readers.run(Box::new(move || {
        let outcome = attempt(read.transfer());
        let telling = batch::open();
        read.done.end(outcome);
        drop(telling);
    }));
    Ok(())
}

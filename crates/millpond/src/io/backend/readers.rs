//! Threads that perform background reads, if there is no asynchronous way.
//!
//! They are separate from the engine's workers: a job of a worker may wait for the end of a read.

use std::io;
use std::sync::Arc;

use crate::io::batch;
use crate::io::pool::Pool;
use crate::io::transfer::{BackgroundRead, Transfer};

/// The number of reads through the kernel's cache that the device has at once. Untuned.
const THREADS_MAX: usize = 8;
/// Background reads without a waiter that wait for a thread. As for the driver.
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
        // inode.CF1: drops the file that `attempt` has.
        let outcome = attempt(read.transfer());
        let telling = batch::open();
        read.done.end(outcome);
        drop(telling);
    }));
    Ok(())
}

//! The back end for systems that refuse io_uring: plain vectored system calls.
//!
//! Callers transfer by themselves, one call after the other; direct transfers in place all at once, by
//! Linux AIO. So are background reads that are direct and that tasks wait for (`aio_reads`); others go
//! to a small pool that is started when the first one comes and sleeps when there is none.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};

use crate::io::backend::aio::Contexts;
use crate::io::backend::aio_reads::Reads;
use crate::io::backend::descriptors::{Carrier, DescriptorFile, Descriptors};
use crate::io::backend::{BackingFile, spawn};
use crate::io::batch;
use crate::io::request::{self, BackgroundRead, Transfer};

/// What the device has at once of reads that the kernel caches.
const THREADS_MAX: usize = 8;
const QUEUED_MAX: usize = 64;

/// A file whose background reads go to a [`Pool`].
pub(crate) type ThreadsFile = DescriptorFile<Arc<Pool>>;

impl Carrier for Arc<Pool> {
    /// What is in flight of a single direct write is what the kernel makes of it.
    const TRANSFER_BYTES: u64 = 16 << 20;

    fn try_all(&self, descriptors: &Descriptors, batch: &mut [Transfer<'_>]) {
        if batch.len() == 1 || !descriptors.try_at_once(&self.aio, batch) {
            descriptors.try_each(batch);
        }
    }

    fn start(file: Arc<ThreadsFile>, read: BackgroundRead) -> Result<(), BackgroundRead> {
        let pool = Arc::clone(&file.carrier);
        if read.wanted && file.descriptors.is_direct() {
            Reads::start(pool, file, read);
            return Ok(());
        }
        pool.start(file, read)
    }
}

/// Threads that carry out background reads with [`BackingFile::try_all`].
#[derive(Default)]
pub(crate) struct Pool {
    state: Mutex<PoolState>,
    work: Condvar,
    aio: Contexts,
    pub(super) reads: Reads,
}

#[derive(Default)]
struct PoolState {
    queue: VecDeque<(Arc<dyn BackingFile>, BackgroundRead)>,
    threads: usize,
    idle: usize,
    stopped: bool,
}

impl Pool {
    pub(crate) fn start(
        self: &Arc<Self>,
        file: Arc<dyn BackingFile>,
        read: BackgroundRead,
    ) -> Result<(), BackgroundRead> {
        let mut state = self.state.lock().expect("no panic under the lock");
        if state.queue.len() >= QUEUED_MAX && !read.wanted {
            return Err(read);
        }
        if state.idle <= state.queue.len() && state.threads < THREADS_MAX {
            let pool = Arc::clone(self);
            match spawn("millpond-read", move || pool.serve()) {
                Ok(()) => state.threads += 1,
                Err(_) if state.threads == 0 => return Err(read),
                Err(_) => {}
            }
        }
        state.queue.push_back((file, read));
        self.work.notify_one();
        Ok(())
    }

    fn serve(&self) {
        let mut state = self.state.lock().expect("no panic under the lock");
        loop {
            if let Some((file, read)) = state.queue.pop_front() {
                drop(state);
                let outcome = request::try_one(&*file, read.transfer());
                let telling = batch::open();
                (read.done)(outcome);
                drop(telling);
                drop(file);
                state = self.state.lock().expect("no panic under the lock");
            } else if state.stopped {
                return;
            } else {
                state.idle += 1;
                state = self.work.wait(state).expect("no panic under the lock");
                state.idle -= 1;
            }
        }
    }

    /// Lets the threads end when the queue is empty.
    pub(crate) fn stop(&self) {
        self.state.lock().expect("no panic under the lock").stopped = true;
        self.work.notify_all();
        self.reads.stop();
    }
}

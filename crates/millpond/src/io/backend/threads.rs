//! The backend for systems that refuse io_uring: plain vectored system calls.
//!
//! Callers make transfers themselves, one call after the other; direct transfers in place are made
//! concurrently, by Linux AIO. So are direct background reads that tasks wait for (`aio_reads`).
//! Other background reads go to a few threads (`readers`).

use std::sync::Arc;

use crate::io::backend::aio::Contexts;
use crate::io::backend::aio_reads::AioReads;
use crate::io::backend::descriptor_file::{DescriptorFile, TransferDriver};
use crate::io::backend::descriptors::Descriptors;
use crate::io::backend::readers;
use crate::io::pool::Pool;
use crate::io::transfer::{BackgroundRead, Transfer};

/// Performs the transfers of an engine.
pub(crate) struct Threads {
    pub(crate) readers: Arc<Pool>,
    contexts: Contexts,
    reads: Arc<AioReads>,
}

impl Default for Threads {
    fn default() -> Self {
        let readers = readers::readers();
        Threads { contexts: Contexts::default(), reads: AioReads::new(&readers), readers }
    }
}

impl Threads {
    /// Makes the threads end when no work is left.
    pub(crate) fn stop(&self) {
        self.readers.stop();
        self.reads.stop();
    }
}

pub(crate) type ThreadsFile = DescriptorFile<Arc<Threads>>;

impl TransferDriver for Arc<Threads> {
    /// The kernel splits a single direct write itself, so all of a flush is one transfer.
    const TRANSFER_BYTES: u64 = 16 << 20;

    fn try_all(&self, descriptors: &Descriptors, batch: &mut [Transfer<'_>]) {
        if batch.len() == 1 || !descriptors.try_at_once(&self.contexts, batch) {
            descriptors.try_each(batch);
        }
    }

    fn start(file: Arc<ThreadsFile>, read: BackgroundRead) -> Result<(), BackgroundRead> {
        let descriptors = Arc::clone(&file.descriptors);
        if read.wanted && descriptors.is_direct() {
            file.carrier.reads.start(descriptors, read);
            return Ok(());
        }
        readers::start(&file.carrier.readers, read, move |read| descriptors.try_one(&read))
    }
}

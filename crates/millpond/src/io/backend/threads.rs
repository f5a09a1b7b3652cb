//! The backend for systems that refuse io_uring: plain vectored system calls.
//!
//! Callers make transfers themselves, one call after the other; direct transfers in place are made
//! concurrently, by Linux AIO. So are direct background reads that tasks wait for (`aio_reads`).
//! Other background reads go to a few threads (`readers`).

use std::sync::Arc;

use crate::io::backend::aio::Contexts;
use crate::io::backend::aio_reads::AioReads;
use crate::io::backend::descriptors::Descriptors;
use crate::io::backend::readers;
use crate::io::pool::Pool;
use crate::io::transfer::{BackgroundRead, Transfer};

/// The kernel splits a single direct write itself, so all of a flush is one transfer.
pub(crate) const TRANSFER_BYTES: u64 = 16 << 20;

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

    /// [`BackingFile::try_all`](crate::io::backend::BackingFile::try_all).
    pub(crate) fn try_all(&self, descriptors: &Descriptors, batch: &mut [Transfer<'_>]) {
        if batch.len() == 1 || !descriptors.try_at_once(&self.contexts, batch) {
            descriptors.try_each(batch);
        }
    }

    /// [`BackingFile::start`](crate::io::backend::BackingFile::start).
    pub(crate) fn start(
        &self,
        descriptors: &Arc<Descriptors>,
        read: BackgroundRead,
    ) -> Result<(), BackgroundRead> {
        let descriptors = Arc::clone(descriptors);
        if read.wanted && descriptors.is_direct() {
            self.reads.start(descriptors, read);
            return Ok(());
        }
        readers::start(&self.readers, read, move |read| descriptors.try_one(&read))
    }
}

//! The back end of an engine: its kind, and the backing files that it opens.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::file_id::FileId;
use crate::io::backend::BackingFile;
use crate::io::backend::descriptor_file::{DescriptorFile, TransferDriver};
use crate::io::backend::descriptors::{Backing, Descriptors};
use crate::io::backend::driver::Driver;
use crate::io::backend::local_ring::probe;
use crate::io::backend::threads::Threads;
use crate::io::transfer::TransferCounts;
use crate::options::BackendChoice;
#[cfg(feature = "sim")]
use crate::sim::Simulated;

/// The back end of an engine.
pub(crate) struct Backend {
    pub(crate) kind: BackendKind,
    pub(crate) reason: String,
    pub(crate) threads: Arc<Threads>,
    pub(crate) transfers: Arc<TransferCounts>,
}

pub(crate) enum BackendKind {
    Uring(Arc<Driver>),
    Threads,
    #[cfg(feature = "sim")]
    Simulated(Simulated),
}

impl Backend {
    /// # Errors
    ///
    /// The system refuses the chosen back end.
    pub(crate) fn new(choice: BackendChoice) -> io::Result<Backend> {
        let (kind, reason) = choose(choice)?;
        Ok(Backend { kind, reason, threads: Arc::default(), transfers: Arc::default() })
    }

    pub(crate) fn name(&self) -> &'static str {
        match &self.kind {
            BackendKind::Uring(_) => "uring",
            BackendKind::Threads => "threads",
            #[cfg(feature = "sim")]
            BackendKind::Simulated(simulated) => simulated.name(),
        }
    }

    /// Whether writes reach files whose bytes matter: not so for simulated back ends.
    pub(crate) fn has_files(&self) -> bool {
        matches!(self.kind, BackendKind::Uring(_) | BackendKind::Threads)
    }

    /// The rings, of a back end that has them for queues.
    pub(crate) fn driver(&self) -> Option<&Arc<Driver>> {
        match &self.kind {
            BackendKind::Uring(driver) => Some(driver),
            _ => None,
        }
    }

    pub(crate) fn open(
        &self,
        fd: BorrowedFd<'_>,
        id: FileId,
        backing: Backing,
        untorn_bytes: Option<u32>,
    ) -> io::Result<Arc<dyn BackingFile>> {
        let carrier = match &self.kind {
            // A transfer in a ring has its flags looked at when the kernel gets round to it.
            BackendKind::Uring(driver) if backing != Backing::DirectInPlace => {
                TransferDriver::Uring(Arc::clone(driver))
            }
            BackendKind::Uring(_) | BackendKind::Threads => {
                TransferDriver::Threads(Arc::clone(&self.threads))
            }
            #[cfg(feature = "sim")]
            BackendKind::Simulated(simulated) => return simulated.open(fd, &self.threads.readers),
        };
        let descriptors = Descriptors::new(fd, id, backing, untorn_bytes, &self.transfers)?;
        Ok(Arc::new(DescriptorFile::new(descriptors, carrier)))
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        if let BackendKind::Uring(driver) = &self.kind {
            driver.stop();
        }
        self.threads.stop();
    }
}

fn choose(choice: BackendChoice) -> io::Result<(BackendKind, String)> {
    let asked = || "as asked for".to_string();
    let uring = || Driver::new().map(|driver| BackendKind::Uring(Arc::new(driver)));
    Ok(match choice {
        BackendChoice::Auto => match probe() {
            Ok(()) => (uring()?, "io_uring works here".into()),
            Err(error) => (BackendKind::Threads, format!("io_uring does not work here: {error}")),
        },
        BackendChoice::Uring => {
            probe()?;
            (uring()?, asked())
        }
        BackendChoice::Threads => (BackendKind::Threads, asked()),
        #[cfg(feature = "sim")]
        BackendChoice::Memory => (BackendKind::Simulated(Simulated::Memory), asked()),
        #[cfg(feature = "sim")]
        BackendChoice::Sim(options) => (BackendKind::Simulated(Simulated::Sim(options)), asked()),
        #[cfg(feature = "sim")]
        BackendChoice::Null => (BackendKind::Simulated(Simulated::Null), asked()),
    })
}

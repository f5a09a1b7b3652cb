//! The back end of an engine: which one it is, and the file of each that is opened.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use crate::io::backend::BackingFile;
use crate::io::backend::memory::MemoryFile;
use crate::io::backend::null::NullFile;
use crate::io::backend::sim::{SimFile, SimOptions};
use crate::io::backend::threads::{Pool, ThreadsFile};
use crate::io::backend::uring::{Driver, UringFile};
use crate::options::Backing;
use crate::stats::Transfers;

/// The back end of an engine.
pub(crate) struct Backend {
    pub(crate) kind: BackendKind,
    pub(crate) reason: String,
    pub(crate) pool: Arc<Pool>,
    pub(crate) transfers: Arc<Transfers>,
}

pub(crate) enum BackendKind {
    Uring(Arc<Driver>),
    Threads,
    Memory,
    Sim(SimOptions),
    Null,
}

impl Backend {
    pub(crate) fn name(&self) -> &'static str {
        match self.kind {
            BackendKind::Uring(_) => "uring",
            BackendKind::Threads => "threads",
            BackendKind::Memory => "memory",
            BackendKind::Sim(_) => "sim",
            BackendKind::Null => "null",
        }
    }

    /// Whether what is written reaches files, and what is in them counts.
    pub(crate) fn has_files(&self) -> bool {
        matches!(self.kind, BackendKind::Uring(_) | BackendKind::Threads)
    }

    /// Who has rings for queues.
    pub(crate) fn driver(&self) -> Option<&Arc<Driver>> {
        match &self.kind {
            BackendKind::Uring(driver) => Some(driver),
            _ => None,
        }
    }

    pub(crate) fn open(&self, fd: &OwnedFd, backing: Backing) -> io::Result<Arc<dyn BackingFile>> {
        let (pool, transfers) = (&self.pool, &self.transfers);
        Ok(match &self.kind {
            // A transfer in a ring has its flags looked at when the kernel gets round to it.
            BackendKind::Uring(driver) if backing != Backing::DirectInPlace => {
                Arc::new(UringFile::new(fd.as_fd(), backing, driver, transfers)?)
            }
            BackendKind::Uring(_) | BackendKind::Threads => {
                Arc::new(ThreadsFile::new(fd.as_fd(), backing, pool, transfers)?)
            }
            BackendKind::Memory => Arc::new(MemoryFile::new(contents(fd)?, pool)),
            BackendKind::Sim(options) => Arc::new(SimFile::new(contents(fd)?, options, pool)),
            BackendKind::Null => Arc::new(NullFile::new(file_size(fd)?)),
        })
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        if let BackendKind::Uring(driver) = &self.kind {
            driver.stop();
        }
        self.pool.stop();
    }
}

pub(crate) fn file_size(fd: &OwnedFd) -> io::Result<u64> {
    Ok(rustix::fs::fstat(fd)?.st_size as u64)
}

fn contents(fd: &OwnedFd) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; file_size(fd)? as usize];
    let mut done = 0;
    while done < bytes.len() {
        match rustix::io::pread(fd, &mut bytes[done..], done as u64)? {
            0 => break,
            moved => done += moved,
        }
    }
    Ok(bytes)
}

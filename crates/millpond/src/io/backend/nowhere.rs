//! The backing of a [`Blob`](crate::blob::Blob), which has no file: its owner supplies the bytes.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::io::backend::{BackingFile, OpenedFor, Seek};
use crate::io::transfer::{BackgroundRead, Transfer};

/// Refuses all transfers.
pub(crate) struct Nowhere {
    pub(crate) len: u64,
}

fn refused() -> io::Error {
    io::Error::from_raw_os_error(libc::EOPNOTSUPP)
}

impl BackingFile for Nowhere {
    fn try_all(&self, batch: &mut [Transfer<'_>]) {
        batch.iter_mut().for_each(|transfer| transfer.set(Err(refused())));
    }

    fn start(self: Arc<Self>, read: BackgroundRead) -> Result<(), BackgroundRead> {
        Err(read)
    }

    fn attach(&self, fd: OwnedFd, _: OpenedFor) -> io::Result<Option<OwnedFd>> {
        Ok(Some(fd))
    }

    fn permits(&self, _writing: bool) -> bool {
        false
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.len)
    }

    fn set_len(&self, _: u64) -> io::Result<()> {
        Err(refused())
    }

    fn zero(&self, _: u64, _: u64, _: bool) -> io::Result<()> {
        Err(refused())
    }

    fn allocate(&self, _: u64, _: u64, _: bool) -> io::Result<()> {
        Err(refused())
    }

    fn seek(&self, _: u64, _: Seek) -> io::Result<Option<u64>> {
        Err(refused())
    }

    fn sync(&self, _: bool) -> io::Result<()> {
        Ok(())
    }
}

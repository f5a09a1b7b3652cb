//! The files that the load reads, writes and changes.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use rustix::fs::FallocateFlags;

/// A file that is open for reading and writing.
pub trait MixedTarget: Sync {
    fn read_at(&self, dst: &mut [u8], offset: u64) -> io::Result<usize>;

    fn write_at(&self, src: &[u8], offset: u64) -> io::Result<usize>;

    fn sync_data(&self) -> io::Result<()>;

    fn punch(&self, offset: u64, len: u64) -> io::Result<()>;

    fn truncate(&self, len: u64) -> io::Result<()>;

    /// Writes at the end; one thread at a time.
    fn append(&self, src: &[u8]) -> io::Result<usize>;
}

impl MixedTarget for millpond::File {
    #[inline]
    fn read_at(&self, dst: &mut [u8], offset: u64) -> io::Result<usize> {
        Ok(Self::read_at(self, dst, offset)?)
    }

    #[inline]
    fn write_at(&self, src: &[u8], offset: u64) -> io::Result<usize> {
        Ok(Self::write_at(self, src, offset)?)
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(Self::sync_data(self)?)
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        Ok(self.punch_hole(offset, len)?)
    }

    fn truncate(&self, len: u64) -> io::Result<()> {
        Ok(Self::truncate(self, len)?)
    }

    fn append(&self, src: &[u8]) -> io::Result<usize> {
        Self::append(self, src).map(|_| src.len()).map_err(io::Error::from)
    }
}

impl MixedTarget for File {
    #[inline]
    fn read_at(&self, dst: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, dst, offset)
    }

    #[inline]
    fn write_at(&self, src: &[u8], offset: u64) -> io::Result<usize> {
        FileExt::write_at(self, src, offset)
    }

    fn sync_data(&self) -> io::Result<()> {
        Self::sync_data(self)
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(self.as_fd(), flags, offset, len)?)
    }

    fn truncate(&self, len: u64) -> io::Result<()> {
        self.set_len(len)
    }

    fn append(&self, src: &[u8]) -> io::Result<usize> {
        FileExt::write_at(self, src, self.metadata()?.len())
    }
}

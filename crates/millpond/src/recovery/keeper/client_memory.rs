//! The mapping of a process, as the keeper reads it: by `pread`, never by mapping it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{SealFlags, SeekFrom};
use rustix::io::{Errno, retry_on_intr};

use crate::recovery::layout::{
    FILE_BYTES, FILE_WORDS, FileEntryWords, HEADER_BYTES, Layout, OP_BYTES, OP_WORDS, OPS, OpWords,
    RECORD_BYTES, RECORD_WORDS, RecordWords, boot_id, read_entries,
};

/// A mapping that a process handed over.
pub(super) struct Memory {
    fd: OwnedFd,
    pub(super) layout: Layout,
}

impl Memory {
    /// Accepts the memfd of an engine; returns any other descriptor, with EINVAL.
    pub(super) fn new(fd: OwnedFd) -> Result<Memory, (OwnedFd, Errno)> {
        match Self::layout(&fd) {
            Some(layout) => Ok(Memory { fd, layout }),
            None => Err((fd, Errno::INVAL)),
        }
    }

    fn layout(fd: &OwnedFd) -> Option<Layout> {
        // Only memory has seals, so no further operation on it blocks; and its length is fixed.
        let seals = rustix::fs::fcntl_get_seals(fd).ok()?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return None;
        }
        let bytes = rustix::fs::fstat(fd).ok()?.st_size as u64;
        let mut header = [0; HEADER_BYTES];
        read_exact(fd.as_fd(), &mut header, 0).ok()?;
        Layout::from_header(&header, bytes, boot_id())
    }

    pub(super) fn ops(&self) -> io::Result<Vec<OpWords>> {
        let mut bytes = vec![0; OPS as usize * OP_BYTES];
        read_exact(self.fd.as_fd(), &mut bytes, self.layout.ops_at() as u64)?;
        Ok(read_entries::<OP_WORDS>(&bytes).map(OpWords::from_words).collect())
    }

    pub(super) fn file_entry(&self, index: u32) -> io::Result<FileEntryWords> {
        let mut bytes = [0; FILE_BYTES];
        let at = self.layout.files_at() + index as usize * FILE_BYTES;
        read_exact(self.fd.as_fd(), &mut bytes, at as u64)?;
        let words = read_entries::<FILE_WORDS>(&bytes).next().expect("one entry");
        Ok(FileEntryWords::from_words(words))
    }

    /// Reads the bytes at `at` of the mapping.
    pub(super) fn read(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        read_exact(self.fd.as_fd(), bytes, at)
    }

    /// Calls `visit` for the records that were ever written, until it fails.
    pub(super) fn for_each_record(
        &self,
        mut visit: impl FnMut(u32, RecordWords) -> io::Result<()>,
    ) -> io::Result<()> {
        let start = self.layout.records_at() as u64;
        let end = start + u64::from(self.layout.units) * RECORD_BYTES as u64;
        let mut bytes = vec![0; 64 << 10];
        let mut at = start;
        while at < end {
            // Skips holes: they would read as zeros, which is FREE.
            at = match rustix::fs::seek(&self.fd, SeekFrom::Data(at)) {
                Ok(data) => data.max(at) / RECORD_BYTES as u64 * RECORD_BYTES as u64,
                Err(Errno::NXIO) => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            if at >= end {
                return Ok(());
            }
            let count = bytes.len().min((end - at) as usize);
            read_exact(self.fd.as_fd(), &mut bytes[..count], at)?;
            let first = ((at - start) / RECORD_BYTES as u64) as u32;
            let records = read_entries::<RECORD_WORDS>(&bytes[..count]);
            for (unit, words) in (first..).zip(records) {
                visit(unit, RecordWords::from_words(words))?;
            }
            at += count as u64;
        }
        Ok(())
    }
}

fn read_exact(fd: BorrowedFd<'_>, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        let at = offset + done as u64;
        match retry_on_intr(|| rustix::io::pread(fd, &mut bytes[done..], at))? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            moved => done += moved,
        }
    }
    Ok(())
}

//! A storage backend that is a vector of bytes. For tests, and below `sim`.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock};

use crate::io::backend::{BackingFile, OpenedFor, Seek, readers};
use crate::io::pool::Pool;
use crate::io::retry;
use crate::io::transfer::{BackgroundRead, Direction, Transfer};
use crate::sync::MutexExt;

pub(crate) struct MemoryFile {
    bytes: Mutex<Vec<u8>>,
    /// Keeps the inode, by which the registry identifies the file, from being reused.
    inode: OnceLock<OwnedFd>,
    readers: Arc<Pool>,
}

impl MemoryFile {
    pub(crate) fn new(bytes: Vec<u8>, readers: &Arc<Pool>) -> MemoryFile {
        MemoryFile {
            bytes: Mutex::new(bytes),
            inode: OnceLock::new(),
            readers: Arc::clone(readers),
        }
    }
}

impl BackingFile for MemoryFile {
    fn try_all(&self, batch: &mut [Transfer<'_>]) {
        for transfer in batch {
            transfer.set(move_bytes(&mut self.bytes.acquire(), transfer, usize::MAX));
        }
    }

    fn start(self: Arc<Self>, read: BackgroundRead) -> Result<(), BackgroundRead> {
        let readers = Arc::clone(&self.readers);
        readers::start(&readers, read, move |read| retry::try_one(&*self, read))
    }

    fn attach(&self, fd: OwnedFd, _: OpenedFor) -> io::Result<Option<OwnedFd>> {
        Ok(self.inode.set(fd).err())
    }

    fn descriptor(&self, writing: bool) -> Option<BorrowedFd<'_>> {
        self.inode.get().filter(|_| !writing).map(|fd| fd.as_fd())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.bytes.acquire().len() as u64)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        set_len(&mut self.bytes.acquire(), len)
    }

    fn zero(&self, offset: u64, len: u64, _: bool) -> io::Result<()> {
        clear(&mut self.bytes.acquire(), offset, len);
        Ok(())
    }

    fn allocate(&self, offset: u64, len: u64, keep_size: bool) -> io::Result<()> {
        let end = offset.saturating_add(len);
        let mut bytes = self.bytes.acquire();
        if end > bytes.len() as u64 && !keep_size { set_len(&mut bytes, end) } else { Ok(()) }
    }

    /// There are no holes.
    fn seek(&self, offset: u64, to: Seek) -> io::Result<Option<u64>> {
        Ok(seek(self.len()?, offset, to))
    }

    fn sync(&self, _data_only: bool) -> io::Result<()> {
        Ok(())
    }
}

/// Moves at most `limit` bytes between a transfer's memory and the contents of its file.
pub(crate) fn move_bytes(
    bytes: &mut Vec<u8>,
    transfer: &Transfer<'_>,
    limit: usize,
) -> io::Result<usize> {
    let mut at = transfer.offset as usize;
    let mut left = limit;
    for segment in transfer.segments {
        let mut len = segment.len().min(left);
        match transfer.direction {
            Direction::Read => {
                len = len.min(bytes.len().saturating_sub(at));
                // SAFETY: the segment is valid for writes, and `bytes` holds `at..at + len`.
                unsafe { segment.base().copy_from(bytes.as_ptr().add(at.min(bytes.len())), len) };
            }
            Direction::Write => {
                if len > 0 && bytes.len() < at + len {
                    grow(bytes, at + len)?;
                }
                if len > 0 {
                    // SAFETY: the segment is valid for reads, and `bytes` was grown to hold `at..at + len`.
                    unsafe { segment.base().copy_to(bytes.as_mut_ptr().add(at), len) };
                }
            }
        }
        at += len;
        left -= len;
    }
    Ok(at - transfer.offset as usize)
}

/// Truncates the contents of a file, or extends them with zeros.
pub(crate) fn set_len(bytes: &mut Vec<u8>, len: u64) -> io::Result<()> {
    let len = usize::try_from(len).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    if len > bytes.len() {
        return grow(bytes, len);
    }
    bytes.truncate(len);
    Ok(())
}

/// Makes the bytes of a range zero, up to the end of the file.
pub(crate) fn clear(bytes: &mut [u8], offset: u64, len: u64) {
    let size = bytes.len() as u64;
    let (from, to) = (offset.min(size), offset.saturating_add(len).min(size));
    bytes[from as usize..to as usize].fill(0);
}

/// The next data or hole in a file of `len` bytes without holes.
pub(crate) fn seek(len: u64, offset: u64, to: Seek) -> Option<u64> {
    (offset < len).then_some(match to {
        Seek::Data => offset,
        Seek::Hole => len,
    })
}

fn grow(bytes: &mut Vec<u8>, len: usize) -> io::Result<()> {
    let more = len - bytes.len();
    bytes.try_reserve(more).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    bytes.resize(len, 0);
    Ok(())
}

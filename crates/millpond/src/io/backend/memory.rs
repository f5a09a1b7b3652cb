//! A back end that is a vector of bytes. For tests, and below `sim`.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use crate::io::backend::threads::Pool;
use crate::io::backend::{Alignment, BackingFile};
use crate::io::request::{BackgroundRead, Direction, Transfer};

pub(crate) struct MemoryFile {
    bytes: Mutex<Vec<u8>>,
    pool: Arc<Pool>,
}

impl MemoryFile {
    pub(crate) fn new(bytes: Vec<u8>, pool: &Arc<Pool>) -> MemoryFile {
        MemoryFile { bytes: Mutex::new(bytes), pool: Arc::clone(pool) }
    }

    /// Moves at most `limit` bytes.
    pub(crate) fn transfer(&self, transfer: &Transfer<'_>, limit: usize) -> io::Result<usize> {
        let mut bytes = self.bytes.lock().expect("no panic under the lock");
        let mut at = transfer.offset as usize;
        let mut left = limit;
        for segment in transfer.segments {
            let mut len = segment.len().min(left);
            match transfer.direction {
                Direction::Read => {
                    len = len.min(bytes.len().saturating_sub(at));
                    // SAFETY: the segment is valid for writes, and `bytes` holds `at..at + len`.
                    unsafe {
                        segment.base().copy_from(bytes.as_ptr().add(at.min(bytes.len())), len)
                    };
                }
                Direction::Write => {
                    if len > 0 && bytes.len() < at + len {
                        grow(&mut bytes, at + len)?;
                    }
                    if len > 0 {
                        // SAFETY: the segment is valid for reads, and `bytes` was grown to hold
                        // `at..at + len`.
                        unsafe { segment.base().copy_to(bytes.as_mut_ptr().add(at), len) };
                    }
                }
            }
            at += len;
            left -= len;
        }
        Ok(at - transfer.offset as usize)
    }
}

impl BackingFile for MemoryFile {
    fn try_all(&self, batch: &mut [Transfer<'_>]) {
        for transfer in batch {
            transfer.set(self.transfer(transfer, usize::MAX));
        }
    }

    fn start(self: Arc<Self>, read: BackgroundRead) -> Result<(), BackgroundRead> {
        let pool = Arc::clone(&self.pool);
        pool.start(self, read)
    }

    fn attach(&self, fd: OwnedFd, _read: bool, _write: bool) -> io::Result<Option<OwnedFd>> {
        Ok(Some(fd))
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.bytes.lock().expect("no panic under the lock").len() as u64)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let len = usize::try_from(len).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
        let mut bytes = self.bytes.lock().expect("no panic under the lock");
        if len > bytes.len() {
            return grow(&mut bytes, len);
        }
        bytes.truncate(len);
        Ok(())
    }

    fn sync(&self, _data_only: bool) -> io::Result<()> {
        Ok(())
    }

    fn permits(&self, _writing: bool) -> bool {
        true
    }

    fn read_alignment(&self) -> Alignment {
        Alignment::NONE
    }
}

fn grow(bytes: &mut Vec<u8>, len: usize) -> io::Result<()> {
    let more = len - bytes.len();
    bytes.try_reserve(more).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    bytes.resize(len, 0);
    Ok(())
}

//! Reads of files with mapped backing (`inode::mapped_pages`).
//!
//! A read copies from the mapping without a lock. If that is refused, it takes a shared guard over its pages, and the
//! back end reads into the reader's memory: the kernel fills the pages, with its own read-ahead.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering::Relaxed;

use millpond_rangelock::Mode;

use crate::error::{Error, Op, Result};
use crate::inode::CachedFile;
use crate::inode::mapped_pages::{MappedAttempt, MappedPages};
use crate::io::segment::SegmentIter;
use crate::read::hit::wipe;
use crate::stats::ThreadCounts;

/// Reads all of `dst` from byte `offset` on without a lock, and counts. `None`: the mapping does not serve the read.
#[inline]
pub(crate) fn try_read(
    file: &CachedFile,
    pages: &MappedPages,
    slot: &ThreadCounts,
    dst: SegmentIter<'_>,
    offset: u64,
) -> Option<usize> {
    let len = dst.left();
    if !file.shared.hit_path.load(Relaxed) {
        return None;
    }
    match pages.try_read(descriptor(file)?, dst, offset) {
        MappedAttempt::Read => {
            slot.hit(len);
            Some(len as usize)
        }
        MappedAttempt::No => None,
        MappedAttempt::Failed => {
            forget_copy(slot, dst);
            None
        }
    }
}

/// The next attempt may return fewer bytes: no byte of this one may stay in the reader's memory.
#[cold]
fn forget_copy(slot: &ThreadCounts, dst: SegmentIter<'_>) {
    slot.retried();
    wipe(dst, 0, dst.left());
}

/// Reads into one piece of memory as far as the kernel has the pages (`RWF_NOWAIT`). `None`: it would wait, or a
/// writer of this process has the pages.
pub(crate) fn read_without_waiting(
    file: &CachedFile,
    dst: SegmentIter<'_>,
    offset: u64,
) -> Option<Result<usize>> {
    let len = dst.left();
    let guard = file.try_lock(offset, offset + len, Mode::Shared)?;
    let front = dst.front(1);
    let [piece] = front.as_slice() else { return None };
    let iovec = libc::iovec { iov_base: piece.base().cast(), iov_len: piece.len() };
    let fd = descriptor(file)?.as_raw_fd();
    // SAFETY: the maker of the segment vouches for its memory.
    let moved = unsafe { libc::preadv2(fd, &raw const iovec, 1, offset as i64, libc::RWF_NOWAIT) };
    let error = io::Error::last_os_error();
    if moved >= 0 {
        // Fewer bytes are an answer at the end of the file alone, which writers of this process move under a guard.
        let is_whole = moved as usize == piece.len() && piece.len() as u64 == len;
        let is_end = || file.backing.len().is_ok_and(|size| offset + moved as u64 >= size);
        return (is_whole || is_end()).then_some(Ok(moved as usize));
    }
    drop(guard);
    let would_wait = [libc::EAGAIN, libc::EOPNOTSUPP, libc::EINTR];
    match error.raw_os_error() {
        Some(errno) if would_wait.contains(&errno) => None,
        _ => Some(Err(Error::io(Op::Read, offset, len, error))),
    }
}

/// A descriptor that permits reading, of a back end whose bytes are those of the file.
#[inline]
fn descriptor(file: &CachedFile) -> Option<BorrowedFd<'_>> {
    file.backing.descriptor(false).filter(|_| file.shared.backend.has_files())
}

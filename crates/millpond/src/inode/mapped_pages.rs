//! The pages of a file with mapped backing: the kernel's page cache in place of frames.
//!
//! Reads copy from a shared mapping (`page_cache`). No page of the file has a frame, so nothing is filled, evicted or
//! dirty; each slow read and each write is one transfer of the back end's.
//!
//! ```text
//! read:   MappedPages::try_read, without a lock -> else a shared guard and the back end
//! write:  exclusive guard -> begin_change -> the back end -> end_change -> release of the guard
//! ```
//!
//! - **MB1** All page words of the file are EMPTY. `read::fill` and `write::through` are not called for it, and
//!   `read::ahead` starts nothing.
//! - **MB2** The holder of an exclusive guard counts as a writer of the guard's pages, from before its first change
//!   until its last ([`FileGuard`](crate::inode::FileGuard)). So a read without a lock that meets such a change is
//!   refused (versions.PV1, versions.PV2). A slow read has a shared guard, which excludes writers of this process.
//! - **MB3** The size belongs to the kernel: other processes may change it. `FileCore::size` is the size that this
//!   process has seen last. A read asks the kernel where the file ends, and so does `CachedFile::refresh_size` for
//!   operations that depend on the end.
//! - **MB4** The mapping begins with the [`READS_BEFORE_MAPPING`]th slow read and ends before the descriptors are
//!   closed, when no handle is left.
//! - **MB5** A copy may fault: a device error, or a file that another process cuts. The handler of SIGBUS
//!   (`fault::install_handler`) ends the copy, and the back end reads. A thread that blocks SIGBUS would be killed: its
//!   reads are the back end's.

use std::cell::Cell;
use std::os::fd::BorrowedFd;
use std::sync::Mutex;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use crate::copy::Source;
use crate::file_id::FileId;
use crate::io::backend::BackingFile;
use crate::io::segment::SegmentIter;
use crate::page_cache::{Inode, PAGE_BYTES, maps_what_it_reads};
use crate::sync::MutexExt;
use crate::{copy, fault};

/// The mapping costs as much as some reads by system call.
const READS_BEFORE_MAPPING: u32 = 8;
/// [`MappedPages::reads`] of a file that is not mapped: its file system or a limit of the process refuses it.
const REFUSED: u32 = u32::MAX;
/// A copy of so many bytes comes from memory rather than from a cache of the processor.
const FAR_BYTES: u64 = 4096;

/// See the module header. Hits read it, so it shares no cache line with its neighbours on the heap.
#[repr(align(64))]
pub(crate) struct MappedPages {
    inode: Inode,
    /// Slow reads so far, or [`REFUSED`].
    reads: AtomicU32,
    /// Held while the mapping changes.
    changing: Mutex<()>,
}

/// The outcome of a read without a lock.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum MappedAttempt {
    Read,
    /// Nothing was copied.
    No,
    /// Bytes were copied that do not count: the pages changed, or the copy faulted.
    Failed,
}

impl MappedPages {
    /// `has_file`: the bytes of the back end are those of a file that can be mapped.
    pub(crate) fn new(id: FileId, has_file: bool) -> MappedPages {
        MappedPages {
            inode: Inode::new((id.device, id.inode)),
            reads: AtomicU32::new(if has_file { 0 } else { REFUSED }),
            changing: Mutex::new(()),
        }
    }

    /// Reads `dst` from byte `offset` on, all or none, without a lock. `fd` is a readable descriptor of the file.
    #[inline]
    pub(crate) fn try_read(
        &self,
        fd: BorrowedFd<'_>,
        dst: SegmentIter<'_>,
        offset: u64,
    ) -> MappedAttempt {
        if blocks_sigbus() {
            return MappedAttempt::No;
        }
        let mut attempted = MappedAttempt::No;
        let len = dst.left();
        let source = if len >= FAR_BYTES { Source::Far } else { Source::Near };
        let is_read = self.inode.read_with(fd, len as usize, offset, |bytes| {
            attempted = MappedAttempt::Failed;
            let mut done = 0;
            for piece in dst {
                // SAFETY: the maker of the segments vouches for `dst`. The source is a mapping, which may fault (MB5).
                let left = unsafe {
                    copy::copy_from(piece.base(), bytes.wrapping_add(done), piece.len(), source)
                };
                if left > 0 {
                    return false;
                }
                done += piece.len();
            }
            true
        });
        if is_read { MappedAttempt::Read } else { attempted }
    }

    /// After a slow read that has seen bytes up to `end`: maps the file if that pays (MB4).
    pub(crate) fn note_slow_read(&self, backing: &dyn BackingFile, end: u64) {
        let reads = self.reads.load(Relaxed);
        // A part of the last page is not mapped.
        if reads == REFUSED || end <= self.inode.readable() + PAGE_BYTES {
            return;
        }
        if reads < READS_BEFORE_MAPPING {
            // Additions of other threads may be lost.
            self.reads.store(reads + 1, Relaxed);
            return;
        }
        self.map(backing);
    }

    #[cold]
    fn map(&self, backing: &dyn BackingFile) {
        let Ok(_changing) = self.changing.try_lock() else { return };
        let fd = backing.descriptor(false).filter(|_| backing.permits(false));
        let is_mapped = fd.is_some_and(|fd| {
            fault::can_resume()
                && backing.is_intact()
                && (self.inode.is_mapped() || maps_what_it_reads(fd))
                && backing.len().is_ok_and(|size| self.inode.map(fd, size))
        });
        if !is_mapped {
            self.reads.store(REFUSED, Relaxed);
        }
    }

    /// Before the kernel is asked to drop pages from its cache, which keeps those that a process maps.
    pub(crate) fn drop_pages(&self, offset: u64, len: u64) {
        // A thread that is about to map or unmap the file leaves nothing to drop.
        let _changing = self.changing.acquire();
        self.inode.drop_pages(offset, len);
    }

    /// Before the descriptors are closed (MB4).
    pub(crate) fn unmap(&self) {
        self.inode.unmap();
    }

    /// MB2. The caller has an exclusive guard from `start` to `end`.
    pub(crate) fn begin_change(&self, start: u64, end: u64) {
        self.inode.begin_change(start, end);
    }

    /// MB2. Before the guard is released.
    pub(crate) fn end_change(&self, start: u64, end: u64) {
        self.inode.end_change(start, end);
    }

    /// The caller cuts the file to `size` bytes, and has begun a change from there on.
    pub(crate) fn note_cut(&self, size: u64) {
        self.inode.note_cut(size);
    }
}

/// Whether the calling thread blocks SIGBUS (MB5), as it did at its first such read.
#[inline]
fn blocks_sigbus() -> bool {
    const UNKNOWN: u8 = 0;
    const NO: u8 = 1;
    const YES: u8 = 2;
    thread_local! {
        static BLOCKS: Cell<u8> = const { Cell::new(UNKNOWN) };
    }
    // A thread that ends may have lost its variables.
    BLOCKS
        .try_with(|blocks| {
            if blocks.get() == UNKNOWN {
                blocks.set(if fault::blocks_sigbus() { YES } else { NO });
            }
            blocks.get() == YES
        })
        .unwrap_or(true)
}

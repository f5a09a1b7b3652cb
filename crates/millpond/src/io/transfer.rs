//! Transfers of bytes between memory and a backing file.
//!
//! A [`Transfer`] is performed by the thread that requests it, which waits. A [`BackgroundRead`]
//! owns all that it needs, and no thread waits for it. Backends try each of them once. `retry`
//! completes transfers, and the starter of a background read continues it.

use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crossbeam_utils::CachePadded;
use rustix::io::Errno;
use smallvec::SmallVec;

use crate::io::segment::{Segment, SegmentIter};
use crate::thread;

/// The maximum number of segments in one system call (IOV_MAX).
pub(crate) const SEGMENTS_MAX: usize = 1024;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Direction {
    Read,
    Write,
}

/// A vectored read or write of contiguous bytes of a file.
pub(crate) struct Transfer<'a> {
    pub(crate) direction: Direction,
    pub(crate) offset: u64,
    /// Its memory.
    pub(crate) segments: SegmentIter<'a>,
    /// Bypasses the kernel's page cache. The caller ensures alignment.
    pub(crate) direct: bool,
    /// For a write: it completes when the bytes, and the metadata needed to find them, are on the
    /// device.
    pub(crate) durable: bool,
    /// For a read: the end of the file, if it is known. A read that reaches it is complete.
    pub(crate) file_end: u64,
    /// Bytes moved so far.
    pub(crate) moved: u64,
    pub(crate) error: Option<io::Error>,
}

impl<'a> Transfer<'a> {
    pub(crate) fn new(
        direction: Direction,
        offset: u64,
        segments: impl Into<SegmentIter<'a>>,
    ) -> Self {
        let segments: SegmentIter<'a> = segments.into();
        Transfer {
            direction,
            offset,
            // No file has bytes beyond this offset, and the kernel refuses the whole of a transfer
            // that ends there: that of the page with the last byte.
            segments: segments.limited((i64::MAX as u64).saturating_sub(offset)),
            direct: false,
            durable: false,
            file_end: u64::MAX,
            moved: 0,
            error: None,
        }
    }

    /// A read of whole pages of a file of `size` bytes: no system call is needed to detect an end
    /// within the last page.
    pub(crate) fn of_pages(offset: u64, segments: impl Into<SegmentIter<'a>>, size: u64) -> Self {
        Transfer { file_end: size, ..Transfer::new(Direction::Read, offset, segments) }
    }

    /// Whether fewer bytes were moved than there are.
    pub(crate) fn is_short(&self) -> bool {
        self.moved < self.segments.left().min(self.file_end.saturating_sub(self.offset))
    }

    /// The part that has not been moved.
    pub(crate) fn rest(&self) -> Transfer<'a> {
        let mut segments = self.segments;
        let missing = segments.left() - self.moved;
        if missing < self.moved {
            segments.advance(segments.left());
            segments.rewind(missing);
        } else {
            segments.advance(self.moved);
        }
        let offset = self.offset + self.moved;
        Transfer { offset, segments, moved: 0, error: None, ..*self }
    }

    /// Records the outcome of an attempt to move the first bytes.
    pub(crate) fn set(&mut self, outcome: io::Result<usize>) {
        match outcome {
            Ok(moved) => self.moved = moved as u64,
            Err(error) => self.error = Some(error),
        }
    }
}

/// Whether an attempt that moved `moved` bytes has reached the end of the file.
pub(crate) fn is_end(moved: u64, block_bytes: u64) -> bool {
    moved == 0 || !moved.is_multiple_of(block_bytes)
}

/// Whether an error is unrelated to the bytes, so that a second attempt may succeed. A server may
/// return such an error each time: [`TransientRetries`] limits the attempts.
pub(crate) fn is_transient(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::ECANCELED))
}

/// Retries of a transfer after transient errors without progress in between.
///
/// The first few retries follow immediately, the others after growing pauses. All of them take
/// about a third of a second, during which the operation holds its range; then the error is
/// returned.
#[derive(Default)]
pub(crate) struct TransientRetries(u8);

impl TransientRetries {
    /// Untuned.
    const AT_ONCE_MAX: u8 = 4;
    const ALL_MAX: u8 = 14;
    const PAUSE_MAX: Duration = Duration::from_millis(64);

    /// The transfer has moved bytes.
    pub(crate) fn reset(&mut self) {
        self.0 = 0;
    }

    /// Whether to retry, for a thread that may not sleep: it leaves further retries to a worker, or
    /// fails.
    pub(crate) fn may_try_at_once(&mut self) -> bool {
        self.0 += 1;
        self.0 <= TransientRetries::AT_ONCE_MAX
    }

    /// Whether to retry. After the first few retries, it pauses first.
    pub(crate) fn may_try(&mut self) -> bool {
        if self.may_try_at_once() {
            return true;
        }
        if self.0 > TransientRetries::ALL_MAX {
            return false;
        }
        let doublings = u32::from(self.0 - TransientRetries::AT_ONCE_MAX - 1).min(6);
        std::thread::sleep(Duration::from_millis(1 << doublings).min(TransientRetries::PAUSE_MAX));
        true
    }
}

/// Makes a system call that a signal, or a server, may interrupt.
pub(crate) fn retry_interrupted(
    mut call: impl FnMut() -> rustix::io::Result<()>,
) -> io::Result<()> {
    let mut retries = TransientRetries::default();
    loop {
        match call() {
            Err(Errno::INTR) if retries.may_try() => {}
            outcome => return Ok(outcome?),
        }
    }
}

/// Segments that a request owns. The value may move while a transfer is in progress: the kernel
/// gets no reference to a single segment ([`Front`](crate::io::segment::Front)), and several
/// segments are on the heap.
pub(crate) type Segments = SmallVec<[Segment<'static>; 1]>;

/// A read for which no thread waits. It owns its memory and its file,
/// and has a completion callback.
pub(crate) struct BackgroundRead {
    pub(crate) offset: u64,
    /// A task waits for it, so it is not refused because of too many reads (`io::read_limit` limits
    /// these).
    pub(crate) wanted: bool,
    /// As for a [`Transfer`].
    pub(crate) direct: bool,
    /// Into memory that `done` keeps valid.
    pub(crate) segments: Segments,
    pub(crate) done: Box<dyn Ending>,
}

/// The completion callback of a background read.
pub(crate) trait Ending: Send {
    fn end(self: Box<Self>, outcome: io::Result<usize>);
}

impl<F: FnOnce(io::Result<usize>) + Send> Ending for F {
    fn end(self: Box<Self>, outcome: io::Result<usize>) {
        self(outcome);
    }
}

impl BackgroundRead {
    pub(crate) fn transfer(&self) -> Transfer<'_> {
        let transfer = Transfer::new(Direction::Read, self.offset, &*self.segments);
        Transfer { direct: self.direct, ..transfer }
    }
}

/// Counts of transfers submitted to the kernel, by direction and kind. Each thread adds to one of
/// several counters: otherwise this counter would be the only shared write of a read that bypasses
/// the cache.
#[derive(Default)]
pub(crate) struct TransferCounts([CachePadded<[[AtomicU64; 2]; 2]>; 16]);

impl TransferCounts {
    // Relaxed, here and below: the counts order nothing.
    pub(crate) fn add(&self, direction: Direction, is_direct: bool) {
        let own = &self.0[thread::shard_of(self.0.len())];
        own[direction as usize][usize::from(is_direct)].fetch_add(1, Relaxed);
    }

    pub(crate) fn get(&self, direction: Direction, is_direct: bool) -> u64 {
        let counts = self.0.iter().map(|own| &own[direction as usize][usize::from(is_direct)]);
        counts.map(|count| count.load(Relaxed)).sum()
    }
}

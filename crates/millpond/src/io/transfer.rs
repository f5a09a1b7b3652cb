//! What is to be moved between memory and a backing file.
//!
//! A [`Transfer`] is carried out by the thread that asks for it, which waits; a [`BackgroundRead`] has
//! all that it needs, and nobody waits for it. Back ends attempt each of them once: `request` brings
//! transfers to their end, and the starter of a background read goes on with it.

use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crossbeam_utils::CachePadded;
use rustix::io::Errno;
use smallvec::SmallVec;

use crate::io::segment::{Segment, SegmentIter};
use crate::thread;

/// Segments that one system call takes (IOV_MAX).
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
    /// Past the kernel's cache; the caller has seen to alignment.
    pub(crate) direct: bool,
    /// Of a write: ends when the bytes, and what is needed to find them, are on the device.
    pub(crate) durable: bool,
    /// Of a read: where the file ends, if that is known. What comes up to there is all that there is.
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
            // No file has bytes beyond, and the kernel refuses all of a transfer that ends there: that
            // of the page with the last of them.
            segments: segments.limited((i64::MAX as u64).saturating_sub(offset)),
            direct: false,
            durable: false,
            file_end: u64::MAX,
            moved: 0,
            error: None,
        }
    }

    /// A read of whole pages of a file of `size` bytes: no system call is to find out that the file ends
    /// within the last one.
    pub(crate) fn of_pages(offset: u64, segments: impl Into<SegmentIter<'a>>, size: u64) -> Self {
        Transfer { file_end: size, ..Transfer::new(Direction::Read, offset, segments) }
    }

    /// Whether it has moved less than there is.
    pub(crate) fn is_short(&self) -> bool {
        self.moved < self.segments.left().min(self.file_end.saturating_sub(self.offset))
    }

    /// What has not been moved.
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

    /// Notes the outcome of an attempt to move the first bytes.
    pub(crate) fn set(&mut self, outcome: io::Result<usize>) {
        match outcome {
            Ok(moved) => self.moved = moved as u64,
            Err(error) => self.error = Some(error),
        }
    }
}

/// Whether an attempt that moved so much has met the end of the file.
pub(crate) fn is_end(moved: u64, block_bytes: u64) -> bool {
    moved == 0 || !moved.is_multiple_of(block_bytes)
}

/// Whether an error says nothing of the bytes, so that a second attempt may succeed. A server may give such an
/// answer each time: [`TransientRetries`] bounds the attempts.
pub(crate) fn is_transient(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::ECANCELED))
}

/// Attempts of a transfer that follow a transient error, without progress in between.
///
/// The first few follow at once, and the others after pauses that grow. All of them take about a third of a second, for
/// which the operation holds its range; then the error is the operation's.
#[derive(Default)]
pub(crate) struct TransientRetries(u8);

impl TransientRetries {
    /// Chosen, not measured.
    const AT_ONCE_MAX: u8 = 4;
    const ALL_MAX: u8 = 14;
    const PAUSE_MAX: Duration = Duration::from_millis(64);

    /// The transfer has moved bytes.
    pub(crate) fn reset(&mut self) {
        self.0 = 0;
    }

    /// Whether to try again, for a thread that may not sleep: it leaves further attempts to a worker, or fails.
    pub(crate) fn may_try_at_once(&mut self) -> bool {
        self.0 += 1;
        self.0 <= TransientRetries::AT_ONCE_MAX
    }

    /// Whether to try again. Pauses first, after the first few.
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

/// Carries out a system call that a signal, or a server, may interrupt.
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

/// Segments of their owner's. It may move while a transfer of them is under way: a single segment is not
/// referred to then ([`Front`](crate::io::segment::Front)), and more have a place of their own.
pub(crate) type Segments = SmallVec<[Segment<'static>; 1]>;

/// A read for which no thread waits: it owns what it needs, and tells of its end.
pub(crate) struct BackgroundRead {
    pub(crate) offset: u64,
    /// A task waits for it: it is not given back for being one too many (`io::flight` sees to that).
    pub(crate) wanted: bool,
    /// As of a [`Transfer`].
    pub(crate) direct: bool,
    /// Into memory that `done` keeps valid.
    pub(crate) segments: Segments,
    pub(crate) done: Box<dyn Ending>,
}

/// What is told of the end of a background read.
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

/// How many transfers were handed to the kernel, of each direction and kind. Each thread adds to one of
/// several: a count that all write would be the only thing that writes through the cache share.
#[derive(Default)]
pub(crate) struct TransferCounts([CachePadded<[[AtomicU64; 2]; 2]>; 16]);

impl TransferCounts {
    // Relaxed, here and below: nothing goes with the counts.
    pub(crate) fn add(&self, direction: Direction, is_direct: bool) {
        let own = &self.0[thread::shard_of(self.0.len())];
        own[direction as usize][usize::from(is_direct)].fetch_add(1, Relaxed);
    }

    pub(crate) fn get(&self, direction: Direction, is_direct: bool) -> u64 {
        let counts = self.0.iter().map(|own| &own[direction as usize][usize::from(is_direct)]);
        counts.map(|count| count.load(Relaxed)).sum()
    }
}

//! Reads: the hit, and the miss path.
//!
//! ```text
//!   hit    lock-free, of cached pages
//!   run    pages that are claimed, read by one I/O and published together
//!   fill   shared guard: claim missing pages, read them, copy           (a thread waits)
//!   bypass one transfer into the reader's memory, for pages that admission refuses, and for mapped backing
//!   plan   under the guard: fill or bypass, for all kinds of reads
//!   miss   fill and bypass without a waiting thread: a state machine, called again
//!   ahead  read-ahead
//! ```
//!
//! A read whose validation fails [`TRIES_MAX`] times takes a guard, too, so that writers can't starve it.
//!
//! Torn reads: with that advice a handle reads page by page. Each page is atomic, the read as a whole is not. Missing
//! pages are fetched together, under a guard over them alone.

pub(crate) mod hit;

#[cfg(feature = "internals")]
pub(crate) mod shared_hit;

pub(crate) mod mapped_read;

pub(crate) mod plan;

pub(crate) mod optimistic_read;
pub(crate) mod run;

pub(crate) mod fill;

pub(crate) mod background;

pub(crate) mod miss;

pub(crate) mod ahead;

use millpond_rangelock::Mode;

use crate::error::{Error, Op, Result};
use crate::inode::CachedFile;
use crate::io::segment::SegmentIter;
use crate::io::transfer::{Direction, Transfer};
use crate::read::hit::{HitPath, TRIES_MAX, may_hit, wipe};
use crate::read::plan::{BypassPolicy, ReadExtent, ReadPlan, ReadProgress, ReadStop, plan};

/// Times that a read starts over because the file below shrank under it. Chosen, not measured.
const SHRUNK_MAX: usize = 8;

/// Reads at `offset` under a shared guard, and fills the missing pages, or bypasses the cache by `policy`. Bytes that
/// can't be read are an error only if there are none before them, as in the kernel.
pub(crate) fn read_slow(
    file: &CachedFile,
    dst: SegmentIter<'_>,
    offset: u64,
    policy: BypassPolicy,
) -> Result<usize> {
    let (mut touched, mut tries) = (0, 0);
    let outcome = loop {
        let read = read_guarded(file, dst, offset, policy);
        touched = touched.max(read.touched);
        tries += 1;
        match read.stopped {
            Some(ReadStop::Failed(error)) if read.moved == 0 => break Err(error),
            Some(ReadStop::Shrunk) if tries < SHRUNK_MAX => {
                if let Err(error) = file.adopt_size() {
                    break Err(error);
                }
            }
            // Another process keeps cutting and extending the file: returns the bytes that were read.
            _ => break Ok(read.moved as usize),
        }
    };
    wipe(dst, *outcome.as_ref().unwrap_or(&0) as u64, touched);
    outcome
}

/// One attempt of [`read_slow`].
pub(crate) fn read_guarded(
    file: &CachedFile,
    dst: SegmentIter<'_>,
    offset: u64,
    policy: BypassPolicy,
) -> ReadProgress {
    let len = dst.left();
    let pages = file.mapped_pages.as_deref();
    if pages.is_none() && offset >= file.core().size.get() {
        return ReadProgress::default();
    }
    let guard = file.lock(offset, offset + len, Mode::Shared);
    let counts = file.cache().counters.local();
    let read = match plan(file, policy, (offset, len), Some(dst)) {
        ReadPlan::Empty => return ReadProgress::default(),
        ReadPlan::Bypass(extent) => {
            let read = bypass(file, dst, extent);
            counts.moved_past_cache(read.moved);
            read
        }
        ReadPlan::Fill(extent) => {
            let read = fill::read(file, dst, extent);
            counts.moved_slowly(read.moved);
            read
        }
    };
    drop(guard);
    if let Some(pages) = pages.filter(|_| read.moved > 0 || read.stopped.is_none()) {
        pages.note_slow_read(&*file.backing, offset + read.moved);
    }
    read
}

/// Reads the bytes of `extent` past the cache, into the reader's memory.
fn bypass(file: &CachedFile, dst: SegmentIter<'_>, extent: ReadExtent) -> ReadProgress {
    let ReadExtent { offset, .. } = extent;
    let dst = dst.limited(extent.len());
    let len = dst.left();
    let is_mapped = file.mapped_pages.is_some();
    if !is_mapped {
        file.cache().counters.local().missed(extent.page_count(file));
    }
    let transfer = Transfer::new(Direction::Read, offset, dst);
    let Transfer { moved, error, .. } = file.carry_out_one(transfer);
    let touched = match &error {
        _ if !is_mapped => len,
        None => moved,
        // The device may have moved more bytes, up to the end of the file.
        Some(_) => {
            let end = file.backing.len().map_or(len, |size| size.saturating_sub(offset));
            end.clamp(moved, len)
        }
    };
    let (moved, stopped) = match error {
        _ if moved == len => (len, None),
        // The end of a file with mapped backing is the back end's (mapped_pages.MB3).
        None => (moved, (!is_mapped).then_some(ReadStop::Shrunk)),
        Some(error) if error.raw_os_error() == Some(libc::EFAULT) => {
            (0, Some(ReadStop::Failed(Error::Fault { op: Op::Read, offset, len })))
        }
        Some(error) => (moved, Some(ReadStop::Failed(Error::io(Op::Read, offset, len, error)))),
    };
    ReadProgress { moved, touched, stopped }
}

/// Reads `len` bytes at `offset` page by page, each page at a moment of its own.
///
/// Cached pages are read without locks. Pages that are missing or in transition, or whose validation keeps failing,
/// are read together as far as they are contiguous, under a shared guard over them. So the read does not wait for
/// holders of other pages.
pub(crate) fn read_torn(
    file: &CachedFile,
    dst: SegmentIter<'_>,
    offset: u64,
    policy: BypassPolicy,
) -> Result<usize> {
    let len = dst.left();
    let (shared, core) = (&*file.shared, file.core());
    let slot = shared.cache.counters.local();
    let page_bytes = core.page_bytes() as u64;
    let page_end = |at: u64| ((at / page_bytes + 1) * page_bytes).min(offset + len);
    let mut at = offset;
    while at < offset + len {
        let mut end = page_end(at);
        let page = dst.slice(at - offset, end - at);
        let hit = HitPath::new(file, slot, TRIES_MAX).try_read_vectored(page, at);
        let moved = match hit {
            Some(moved) => moved,
            None => {
                while end < offset + len && !may_hit(shared, core, end) {
                    end = page_end(end);
                }
                match read_slow(file, dst.slice(at - offset, end - at), at, policy) {
                    Err(_) if at > offset => break,
                    moved => moved?,
                }
            }
        };
        at += moved as u64;
        if at < end {
            break;
        }
    }
    Ok((at - offset) as usize)
}

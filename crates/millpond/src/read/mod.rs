//! Reads: the hit, and the miss path.
//!
//! ```text
//!   hit    lock-free, of cached pages
//!   run    pages that are claimed, read by one I/O and published together
//!   fill   shared guard: claim missing pages, read them, copy           (a thread waits)
//!   bypass as fill, for pages that admission refuses: read into a private buffer, not the cache
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

pub(crate) mod optimistic_read;
pub(crate) mod run;

pub(crate) mod fill;

pub(crate) mod bypass_read;

mod read_completion;

pub(crate) mod miss;

pub(crate) mod ahead;

use millpond_rangelock::Mode;

use crate::error::Result;
use crate::inode::CachedFile;
use crate::io::segment::SegmentIter;
use crate::read::fill::{FillProgress, FillStop};
use crate::read::hit::{HitPath, TRIES_MAX, may_hit, wipe};

/// Times that a read starts over because the file below shrank under it. Chosen, not measured.
const SHRUNK_MAX: usize = 8;

/// Reads at `offset` under a shared guard, and fills the missing pages. Bytes that can't be read are an error only if
/// there are none before them, as in the kernel.
pub(crate) fn read_slow(file: &CachedFile, dst: SegmentIter<'_>, offset: u64) -> Result<usize> {
    if let Some(pages) = file.mapped_pages.as_deref() {
        return mapped_read::read_slow(file, pages, dst, offset);
    }
    let mut touched = 0;
    let outcome = read_guarded(file, dst, offset, &mut touched);
    wipe(dst, *outcome.as_ref().unwrap_or(&0) as u64, touched);
    outcome
}

/// As [`read_slow`]; `touched` returns how far `dst` may have been written to.
fn read_guarded(
    file: &CachedFile,
    dst: SegmentIter<'_>,
    offset: u64,
    touched: &mut u64,
) -> Result<usize> {
    let len = dst.left();
    let mut size = file.core().size.get();
    let mut tries = 0;
    loop {
        if offset >= size {
            return Ok(0);
        }
        let guard = file.lock(offset, offset + len, Mode::Shared);
        // Does not change any more as far as it concerns this range (write.W5).
        size = file.core().size.get();
        let end = (offset + len).min(size);
        if end <= offset {
            return Ok(0);
        }
        let counts = file.cache().counters.local();
        let came = match bypass_read::read(file, dst, offset, end, size) {
            Some(came) => {
                counts.moved_past_cache(came.moved);
                came
            }
            None => {
                let came = fill::read(file, dst, offset, end, size);
                counts.moved_slowly(came.moved);
                came
            }
        };
        let FillProgress { moved, touched: came_to, stopped } = came;
        drop(guard);
        *touched = (*touched).max(came_to);
        tries += 1;
        match stopped {
            Some(FillStop::Failed(error)) if moved == 0 => return Err(error),
            Some(FillStop::Shrunk) if tries < SHRUNK_MAX => size = file.adopt_size()?,
            // Another process keeps cutting and extending the file: returns the bytes that were read.
            _ => return Ok(moved as usize),
        }
    }
}

/// Reads `len` bytes at `offset` page by page, each page at a moment of its own.
///
/// Cached pages are read without locks. Pages that are missing or in transition, or whose validation keeps failing,
/// are read together as far as they are contiguous, under a shared guard over them. So the read does not wait for
/// holders of other pages.
pub(crate) fn read_torn(file: &CachedFile, dst: SegmentIter<'_>, offset: u64) -> Result<usize> {
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
                match read_slow(file, dst.slice(at - offset, end - at), at) {
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

//! Reads: the hit, and the way of one that is none.
//!
//! ```text
//!   hit    lock-free, of what is cached
//!   run    pages that are claimed, read and shown together
//!   fill   shared guard: claim what is missing, read it, copy            (a thread waits)
//!   around as much, of pages that are not worth a frame (`arrival`: how one that is aside tells its task)
//!   miss   the same without a thread: a state machine, called again
//!   ahead  what is read before anybody asks
//! ```
//!
//! A read whose validation fails [`TRIES_MAX`] times takes a guard, too: it has its turn, however
//! much is written.
//!
//! *Torn*: a handle that was advised so reads page by page, each as a read of its own; pages that
//! are missing are fetched together, under a guard over them alone.

pub(crate) mod hit;

pub(crate) mod mapped_read;

pub(crate) mod run;
pub(crate) mod unguarded;

pub(crate) mod fill;

pub(crate) mod around;

mod arrival;

pub(crate) mod miss;

pub(crate) mod ahead;

use millpond_rangelock::Mode;

use crate::error::Result;
use crate::inode::CachedFile;
use crate::io::segment::SegmentIter;
use crate::read::fill::{Came, Stopped};
use crate::read::hit::{HitPath, TRIES_MAX, may_hit, wipe};

/// Times that a read starts over because the file below shrank under it. Chosen, not measured.
const SHRUNK_MAX: usize = 8;

/// Reads at `offset` under a shared guard, filling what is missing. Of bytes that can't be read, tells
/// only if there are none before them, as the kernel does.
pub(crate) fn read_slow(file: &CachedFile, dst: SegmentIter<'_>, offset: u64) -> Result<usize> {
    if let Some(pages) = file.mapped_pages.as_deref() {
        return mapped_read::read_slow(file, pages, dst, offset);
    }
    let mut touched = 0;
    let outcome = read_guarded(file, dst, offset, &mut touched);
    wipe(dst, *outcome.as_ref().unwrap_or(&0) as u64, touched);
    outcome
}

/// The same; `touched` is how far `dst` may have been written to.
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
        // No longer changes as far as it concerns this range (write.W5).
        size = file.core().size.get();
        let end = (offset + len).min(size);
        if end <= offset {
            return Ok(0);
        }
        let counts = file.cache().counters.mine();
        let came = match around::read(file, dst, offset, end, size) {
            Some(came) => {
                counts.passed(came.moved);
                came
            }
            None => {
                let came = fill::read(file, dst, offset, end, size);
                counts.moved_slowly(came.moved);
                came
            }
        };
        let Came { moved, touched: came_to, stopped } = came;
        drop(guard);
        *touched = (*touched).max(came_to);
        tries += 1;
        match stopped {
            Some(Stopped::Failed(error)) if moved == 0 => return Err(error),
            Some(Stopped::Shrunk) if tries < SHRUNK_MAX => size = file.adopt_size()?,
            // Of a file that somebody else keeps cutting shorter and longer: what was there of it.
            _ => return Ok(moved as usize),
        }
    }
}

/// Reads `len` bytes at `offset` page by page, each page at a moment of its own.
///
/// What is cached is read without locks. Pages that are missing or in transition, or whose validation
/// keeps failing, are read together as far as they lie side by side, under a shared guard over
/// them: holders of other pages are not waited for.
pub(crate) fn read_torn(file: &CachedFile, dst: SegmentIter<'_>, offset: u64) -> Result<usize> {
    let len = dst.left();
    let (shared, core) = (&*file.shared, file.core());
    let slot = shared.cache.counters.mine();
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

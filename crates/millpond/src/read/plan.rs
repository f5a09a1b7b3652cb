//! The plan of a read that is no hit, made under a guard over its pages.
//!
//! ```text
//!   mapped backing ---------------------------------------> bypass
//!   the pages are EMPTY, and admission refuses them ------> bypass: one transfer, and no page is cached
//!   else -------------------------------------------------> fill
//! ```
//!
//! Under a guard, the only bytes of an EMPTY page are the back end's, and none of the pages is DIRTY (page.W3). So a
//! read whose pages are all EMPTY can be one transfer. Its destination depends on the reader:
//!
//! - A thread that waits: the reader's memory. It takes no slot, as for any memory of a caller (read_limit.L2).
//! - A request that owns its memory, or is lent it until the read has ended ([`LentRead`]): that memory.
//! - A task, which has no such memory: frames (`read::background::FrameBypass`).

use std::ptr;
use std::time::Instant;

use millpond_rangelock::{Guard, Mode};

use crate::error::Error;
use crate::inode::CachedFile;
use crate::io::segment::SegmentIter;
use crate::latency::LatencyKind;
use crate::units::PageIndex;

/// The most pages of a cached file that a read takes past the cache. Chosen, not measured.
pub(crate) const BYPASS_PAGES_MAX: u64 = 16;

/// The bytes of a read below the size of the file.
#[derive(Clone, Copy)]
pub(crate) struct ReadExtent {
    pub(crate) offset: u64,
    pub(crate) end: u64,
    /// Of the file, under the guard. With mapped backing only the back end knows it.
    pub(crate) size: u64,
}

impl ReadExtent {
    pub(crate) fn len(&self) -> u64 {
        self.end - self.offset
    }

    /// Its first and its last page.
    pub(crate) fn pages(&self, file: &CachedFile) -> (PageIndex, PageIndex) {
        (file.page_of(self.offset), file.page_of(self.end - 1))
    }

    pub(crate) fn page_count(&self, file: &CachedFile) -> u64 {
        let (first, last) = self.pages(file);
        last - first + 1
    }
}

/// How a read gets its bytes.
pub(crate) enum ReadPlan {
    /// It begins at the end of the file, or behind it.
    Empty,
    /// By one transfer, past the cache.
    Bypass(ReadExtent),
    /// From its pages, of which the missing ones are filled.
    Fill(ReadExtent),
}

/// The progress of a read whose thread waits.
#[derive(Default)]
pub(crate) struct ReadProgress {
    /// Bytes that were read, from the first on.
    pub(crate) moved: u64,
    /// The end of the memory that may have been written to.
    pub(crate) touched: u64,
    /// The reason why not all were read.
    pub(crate) stopped: Option<ReadStop>,
}

/// Why a read ended before its end.
pub(crate) enum ReadStop {
    /// The file is shorter than expected: another process cut it.
    Shrunk,
    Failed(Error),
}

/// When a read takes its bytes past the cache.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum BypassPolicy {
    /// If admission refuses its pages.
    Filtered,
    /// If admission refuses its pages, or if the back end is direct and this is the first miss of the pages: the memory is
    /// the request's (admission.AD8).
    FirstMiss,
    /// Never.
    Fills,
}

impl BypassPolicy {
    fn bypasses_first_miss(self, file: &CachedFile) -> bool {
        self == BypassPolicy::FirstMiss && file.backing.is_direct()
    }

    /// Whether any read of the file bypasses the cache.
    fn may_bypass(self, file: &CachedFile) -> bool {
        let is_bypassing = || file.cache().admission.is_bypassing();
        self != BypassPolicy::Fills && (self.bypasses_first_miss(file) || is_bypassing())
    }

    /// Whether admission refuses the pages of a read. Called once, and only if all else permits a bypass: the filter
    /// counts it as a miss of the pages. With mapped backing there is no filter.
    pub(super) fn refuses(self, file: &CachedFile, extent: ReadExtent) -> bool {
        if file.mapped_pages.is_some() {
            return true;
        }
        let (cache, (first, last)) = (file.cache(), extent.pages(file));
        let number = cache.frames.file_number(ptr::from_ref(file.core()).cast());
        if self.bypasses_first_miss(file) {
            cache.admission.bypasses_first_miss(number, first, last)
        } else {
            cache.admission.bypasses(number, first, last)
        }
    }
}

/// Plans a read of `len` bytes at `offset`, under the caller's guard over them. `memory`: their destination, whose alignment
/// must suit a bypass. `None`: frames, which always do.
pub(crate) fn plan(
    file: &CachedFile,
    policy: BypassPolicy,
    range: (u64, u64),
    memory: Option<SegmentIter<'_>>,
) -> ReadPlan {
    match plan_if_refused(file, policy, range, memory) {
        ReadPlan::Bypass(extent) if !policy.refuses(file, extent) => ReadPlan::Fill(extent),
        plan => plan,
    }
}

/// The plan of a read whose pages admission refuses.
fn plan_if_refused(
    file: &CachedFile,
    policy: BypassPolicy,
    (offset, len): (u64, u64),
    memory: Option<SegmentIter<'_>>,
) -> ReadPlan {
    if file.mapped_pages.is_some() {
        // mapped_pages.MB1, mapped_pages.MB3.
        return ReadPlan::Bypass(ReadExtent { offset, end: offset + len, size: u64::MAX });
    }
    // Stable under the guard, as far as it concerns these pages (write.W5).
    let size = file.core().size.get();
    let end = (offset + len).min(size);
    if end <= offset {
        return ReadPlan::Empty;
    }
    let extent = ReadExtent { offset, end, size };
    let is_aligned = || {
        let misalignment = memory.map(|memory| memory.limited(extent.len()).misalignment());
        misalignment
            .is_none_or(|of| file.backing.alignment(false).first_misaligned(offset, of).is_none())
    };
    if policy.may_bypass(file) && is_aligned() && can_bypass(file, extent) {
        ReadPlan::Bypass(extent)
    } else {
        ReadPlan::Fill(extent)
    }
}

/// Whether a read can go past the cache. It must consist of whole pages, since the rest of a partly read page is mostly
/// read next.
fn can_bypass(file: &CachedFile, extent: ReadExtent) -> bool {
    let (cache, core) = (file.cache(), file.core());
    let is_bound = |at: u64| at.is_multiple_of(core.page_bytes() as u64);
    let (first, last) = extent.pages(file);
    is_bound(extent.offset)
        && (extent.end == extent.size || is_bound(extent.end))
        && last.0 - first.0 < BYPASS_PAGES_MAX
        && first.to(last).all(|page| core.is_absent(&cache.frames, page))
}

/// A shared guard over a read that bypasses the cache with all its bytes, into `memory` or into frames, unless
/// admission accepts its pages. Does not wait. `None`: read it in another way.
pub(super) fn try_guard<'f>(
    file: &'f CachedFile,
    policy: BypassPolicy,
    (offset, len): (u64, u64),
    memory: Option<SegmentIter<'_>>,
) -> Option<(Guard<'f>, ReadExtent)> {
    let end = offset + len;
    let is_mapped = file.mapped_pages.is_some();
    if !is_mapped && (!policy.may_bypass(file) || end > file.core().size.get()) {
        return None;
    }
    let guard = file.ranges.try_lock(file.pages(offset, end), Mode::Shared)?;
    match plan_if_refused(file, policy, (offset, len), memory) {
        ReadPlan::Bypass(extent) if extent.end == end => Some((guard, extent)),
        _ => None,
    }
}

/// A read into memory that the request owns, or that is lent to it until the read ends. It runs under its guard, so
/// its bytes are of one moment. Its owner has a slot, too, as no thread waits for it (read_limit.L1).
pub(crate) struct LentRead<'f> {
    file: &'f CachedFile,
    guard: Guard<'f>,
    begun: Instant,
}

impl<'f> LentRead<'f> {
    /// A read of all of `dst`, which is not empty, at `offset`, if all of its bytes lie below the size. Does not wait.
    /// `None`: read it in another way.
    pub(crate) fn begin(
        file: &'f CachedFile,
        dst: SegmentIter<'_>,
        offset: u64,
    ) -> Option<LentRead<'f>> {
        let begun = Instant::now();
        let policy = BypassPolicy::FirstMiss;
        let (guard, extent) = try_guard(file, policy, (offset, dst.left()), Some(dst))?;
        if !policy.refuses(file, extent) {
            return None;
        }
        if file.mapped_pages.is_none() {
            file.cache().counters.local().missed(extent.page_count(file));
        }
        Some(LentRead { file, guard, begun })
    }

    /// Ends a read of which all `len` bytes, up to `end`, have arrived. A read that is dropped instead has not read
    /// them.
    pub(crate) fn end(self, len: u64, end: u64) {
        drop(self.guard);
        if let Some(pages) = self.file.mapped_pages.as_deref() {
            pages.note_slow_read(&*self.file.backing, end);
        }
        let slot = self.file.cache().counters.local();
        slot.moved_past_cache(len);
        slot.took(LatencyKind::ReadMiss, self.begun);
    }
}

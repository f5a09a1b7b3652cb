//! The page word: one 64-bit atomic that maps a page of a file to its frame.
//!
//! Second stop of a read: `table` finds the word, this module knows its bits, `read` copies. All
//! other modules use the transitions below and do not access the bits.
//!
//! ```text
//!          try_fill            finish_fill
//!   EMPTY ----------> FILLING -------------> READY --- try_replace ---> READY (fresh frame)
//!     ^                  |                    |  |
//!     +---- abort_fill --+                    |  +------- hide -------> HIDDEN
//!     +---------------- try_evict ------------+                          | |
//!     +----------------------------- drop_hidden ------------------------+ +- show -> READY
//!   EMPTY -- hide -> HIDDEN
//!
//!   READY, DIRTY -- try_writeback -> READY, WRITEBACK
//!   WRITEBACK -- end_writeback -> UNSTABLE (done), DIRTY (failed), neither (done for good)
//! ```
//!
//! | bits   | field                                                                  |
//! |--------|------------------------------------------------------------------------|
//! | 0..2   | state                                                                  |
//! | 2      | UNQUEUED: in no queue of the evictor, as write-back keeps it (W4)       |
//! | 3      | REFERENCED: read since the last eviction scan; any state  |
//! | 4      | WAITERS: a thread or task waits; the end of FILLING or HIDDEN wakes it |
//! | 5      | MARKER: the next reader takes the slow path, which continues read-ahead |
//! | 6      | DIRTY: newer than the bytes of the backend                                       |
//! | 7      | WRITEBACK: a write-back of the page, maybe of an older frame, is active |
//! | 8      | UNSTABLE: the backend has the bytes, but no sync has covered them yet          |
//! | 9..36  | version                                                                |
//! | 36..64 | frame, in units of 4 KiB (up to 1 TiB of frames)                       |
//!
//! - **W1** The version grows whenever a page leaves READY. If frame and version are equal before
//!   and after a copy, the content did not change in between.
//! - **W2** The bytes of a READY frame never change; a writer puts a fresh frame in place.
//! - **W3** A page is filled under at least a shared guard over it, and hidden or replaced under an
//!   exclusive one.
//! - **W4** A page that is DIRTY, WRITEBACK or UNSTABLE is not evicted. The evictor takes it out of
//!   its queues, and sets UNQUEUED. The transition that makes the page evictable clears UNQUEUED in
//!   the same step, and its thread queues the page again. So an evictable page is never UNQUEUED.
//! - **W6** Every transition is one RMW, and the one that ends FILLING or HIDDEN reports whether
//!   the old value had WAITERS: a plain store would erase the bit of a concurrent waiter.
//! - **W7** WRITEBACK belongs to the page, not the frame: hiding and fresh frames preserve it, and
//!   only the thread that set it clears it, when the device has finished. It excludes a second
//!   write-back.
//! - **W9** Single flight: one thread makes an EMPTY page FILLING, and it alone ends that.
//!
//! *Labels.* A rule is cited by the module that states it, its file or folder, and its label:
//! `page.W1` (write.W5 and frames.W8 continue this series). In the module itself the label is
//! enough. `crates/checks` verifies the citations.
//!
//! Versions wrap around: see `epoch`.
//!
//! Locks: none.

#[cfg(not(loom))]
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

use crate::cache::table::epoch::Epoch;
use crate::sync::{AtomicU64, fence};
use crate::units::{FRAME_BITS, FrameIndex};

const STATE: u64 = 0b11;
const EMPTY: u64 = 0;
const FILLING: u64 = 1;
const READY: u64 = 2;
const HIDDEN: u64 = 3;
const UNQUEUED: u64 = 1 << 2;
const REFERENCED: u64 = 1 << 3;
const WAITERS: u64 = 1 << 4;
const MARKER: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const WRITEBACK: u64 = 1 << 7;
const UNSTABLE: u64 = 1 << 8;
/// The bits that exclude eviction (W4).
const UNEVICTABLE_BITS: u64 = DIRTY | WRITEBACK | UNSTABLE;
/// The bits of write-back, which a page keeps when its frame is replaced or hidden.
const WRITEBACK_BITS: u64 = UNEVICTABLE_BITS | UNQUEUED;

const VERSION_SHIFT: u32 = 9;
/// Shrunk under loom, so that a model can wrap it.
#[cfg(not(loom))]
const VERSION_BITS: u32 = 27;
#[cfg(loom)]
const VERSION_BITS: u32 = 1;
const VERSION: u64 = ((1 << VERSION_BITS) - 1) << VERSION_SHIFT;
const FRAME_SHIFT: u32 = u64::BITS - FRAME_BITS;

/// The bits that identify a content: state, version and frame.
const CONTENT: u64 = !(REFERENCED | WAITERS | MARKER | WRITEBACK_BITS);

/// A value of a page word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Word(u64);

/// The state part of a [`Word`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PageState {
    Empty,
    Filling,
    Ready,
    Hidden,
}

impl Word {
    #[inline]
    pub(crate) fn state(self) -> PageState {
        match self.0 & STATE {
            READY => PageState::Ready,
            FILLING => PageState::Filling,
            HIDDEN => PageState::Hidden,
            _ => PageState::Empty,
        }
    }

    /// READY, without a marker that requires the slow path.
    #[inline]
    pub(crate) fn is_hit(self) -> bool {
        self.0 & (STATE | MARKER) == READY
    }

    #[inline]
    pub(crate) fn is_ready(self) -> bool {
        self.0 & STATE == READY
    }

    #[inline]
    pub(crate) fn is_referenced(self) -> bool {
        self.0 & REFERENCED != 0
    }

    pub(crate) fn has_marker(self) -> bool {
        self.0 & MARKER != 0
    }

    #[inline]
    pub(crate) fn is_dirty(self) -> bool {
        self.0 & DIRTY != 0
    }

    pub(crate) fn is_under_writeback(self) -> bool {
        self.0 & WRITEBACK != 0
    }

    pub(crate) fn is_unstable(self) -> bool {
        self.0 & UNSTABLE != 0
    }

    pub(crate) fn is_unevictable(self) -> bool {
        self.0 & UNEVICTABLE_BITS != 0
    }

    pub(crate) fn has_waiters(self) -> bool {
        self.0 & WAITERS != 0
    }

    /// The frame; meaningful unless EMPTY.
    #[inline]
    pub(crate) fn frame(self) -> FrameIndex {
        FrameIndex((self.0 >> FRAME_SHIFT) as u32)
    }

    #[cfg(not(loom))]
    pub(in crate::cache) fn low_half(self) -> u32 {
        self.0 as u32
    }

    #[inline]
    pub(crate) fn same_content(self, other: Word) -> bool {
        (self.0 ^ other.0) & CONTENT == 0
    }
}

/// Whether threads or tasks that wait on the word must be woken with [`PageWord::wake`].
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Sleepers(bool);

/// A completed transition: the word before and after it.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Change {
    pub(crate) was: Word,
    pub(crate) now: Word,
}

impl Change {
    fn new(was: u64, now: u64) -> Change {
        Change { was: Word(was), now: Word(now) }
    }

    pub(crate) fn sleepers(self) -> Sleepers {
        Sleepers(self.was.has_waiters() && !self.now.has_waiters())
    }

    /// Whether the page became evictable, and the caller queues it again (W4).
    pub(in crate::cache) fn must_requeue(self) -> bool {
        self.was.0 & !self.now.0 & UNQUEUED != 0
    }
}

impl Sleepers {
    pub(in crate::cache) fn any(self) -> bool {
        self.0
    }
}

/// How a page appears when it becomes READY.
#[derive(Clone, Copy, Default)]
pub(crate) struct PublishFlags {
    /// As if the page had been read once.
    pub(crate) referenced: bool,
    /// The next reader continues the read-ahead.
    pub(crate) marker: bool,
    /// The backend does not have the bytes yet.
    pub(crate) dirty: bool,
}

impl PublishFlags {
    fn bits(self) -> u64 {
        (u64::from(self.referenced) * REFERENCED)
            | (u64::from(self.marker) * MARKER)
            | (u64::from(self.dirty) * DIRTY)
    }
}

/// How a write-back ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WritebackEnd {
    /// The backend has accepted the bytes, and a sync has yet to cover them.
    Unstable,
    /// The bytes are durable.
    Stable,
    /// The page is as dirty as before.
    Failed,
}

/// The word of one page.
#[repr(transparent)]
pub(crate) struct PageWord(AtomicU64);

impl PageWord {
    #[cfg(any(test, loom))]
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(EMPTY))
    }

    /// Acquire: pairs with the release of the transition that made the page READY, so that the
    /// bytes of its frame are visible to the copy that follows.
    #[inline]
    pub(crate) fn load(&self) -> Word {
        Word(self.0.load(Acquire))
    }

    /// Whether the content is still that of `seen`. For [`step`](crate::cache::table::step), which
    /// puts a `fence(Acquire)` between the copy and this call, so that the loads of the copy stay
    /// above: if the frame was replaced and reused before the copy ended, a newer word is seen
    /// here.
    #[inline]
    pub(crate) fn is_unchanged(&self, seen: Word) -> bool {
        Word(self.0.load(Relaxed)).same_content(seen)
    }

    /// Sets REFERENCED if it is clear. This is the only write of a hit.
    #[inline]
    pub(crate) fn mark_referenced(&self, seen: Word) {
        if !seen.is_referenced() {
            // Relaxed: a hint for the evictor, which guards nothing.
            self.0.fetch_or(REFERENCED, Relaxed);
        }
    }

    /// Clears REFERENCED. Returns whether it was set.
    pub(crate) fn take_referenced(&self) -> bool {
        self.0.fetch_and(!REFERENCED, Relaxed) & REFERENCED != 0
    }

    /// Clears MARKER. Returns whether this call did it.
    pub(crate) fn take_marker(&self) -> bool {
        self.0.fetch_and(!MARKER, Relaxed) & MARKER != 0
    }

    /// EMPTY -> FILLING with `frame`. Caller: holds at least a shared guard over the page (W3).
    /// Fails if the page is not EMPTY (single flight, W9). The returned word is valid for a check
    /// of the state only.
    pub(crate) fn try_fill(&self, frame: FrameIndex) -> Result<(), Word> {
        let mut seen = self.0.load(Relaxed);
        loop {
            if seen & STATE != EMPTY {
                return Err(Word(seen));
            }
            let new = (seen & VERSION) | u64::from(frame.0) << FRAME_SHIFT | FILLING;
            // Acquire: pairs with the releases that made the page clean and EMPTY, so that changes
            // of the file are complete before this fill reads it. A FILLING word gives access to no
            // data, so nothing is released.
            match self.0.compare_exchange_weak(seen, new, Acquire, Relaxed) {
                Ok(_) => return Ok(()),
                Err(now) => seen = now,
            }
        }
    }

    /// FILLING -> READY. Caller: its `try_fill` succeeded, and the frame's bytes are complete.
    pub(crate) fn finish_fill(&self, frame: FrameIndex, flags: PublishFlags) -> Sleepers {
        self.end(u64::from(frame.0) << FRAME_SHIFT | READY | flags.bits()).sleepers()
    }

    /// FILLING -> EMPTY. Caller: its `try_fill` succeeded. It takes its frame back.
    pub(crate) fn abort_fill(&self) -> Sleepers {
        self.end(EMPTY).sleepers()
    }

    /// Ends FILLING or HIDDEN. Preserves the version and, unless the page becomes EMPTY, the
    /// write-back bits. Only the owner of the page calls it, so only flags can change concurrently.
    fn end(&self, new: u64) -> Change {
        let kept = if new & STATE == EMPTY { VERSION } else { VERSION | WRITEBACK_BITS };
        self.change(|seen| seen & kept | new)
    }

    /// Makes the transition from any current word.
    fn change(&self, to: impl Fn(u64) -> u64) -> Change {
        let mut seen = self.0.load(Relaxed);
        loop {
            // Release: publishes the frame's bytes to `load`, and the bytes that the backend
            // accepted. Nothing is acquired from the old word: its owner knew the frame, and the
            // rest are flags.
            match self.0.compare_exchange_weak(seen, to(seen), Release, Relaxed) {
                Ok(_) => return Change::new(seen, to(seen)),
                Err(now) => seen = now,
            }
        }
    }

    /// READY -> EMPTY if the content is still that of `seen`, and the page was not referenced and
    /// is not newer than the backend's durable bytes (W4). The caller then owns the frame, and
    /// retires it (`pin`).
    pub(crate) fn try_evict(&self, seen: Word, epoch: &Epoch) -> bool {
        debug_assert!(seen.is_ready());
        if seen.0 & UNEVICTABLE_BITS != 0 {
            return false;
        }
        let new = next_version(seen.0, epoch) | EMPTY;
        // Release: the next filler passes on that the epoch rose. `Retiring` fences before the
        // frame is used again.
        self.0.compare_exchange(seen.0, new, Release, Relaxed).is_ok()
    }

    /// READY -> EMPTY by the last user of the file: a page that stayed would keep its frame. A late
    /// reader of a leaf that belonged to another file before may set a flag of the page at any
    /// moment. Returns the word before, or `None` if the page is not READY, or is unevictable.
    pub(crate) fn evict_for_good(&self, epoch: &Epoch) -> Option<Word> {
        loop {
            let seen = self.load();
            if !seen.is_ready() || seen.is_unevictable() {
                return None;
            }
            if self.try_evict(seen, epoch) {
                return Some(seen);
            }
        }
    }

    /// READY -> READY with a fresh frame, in one step: a write of one page that does not change the
    /// size. Caller: holds an exclusive guard. Fails if the page was evicted. The caller then owns
    /// the old frame, and retires it (`pin`).
    pub(crate) fn try_replace(
        &self,
        frame: FrameIndex,
        flags: PublishFlags,
        epoch: &Epoch,
    ) -> Result<Change, Word> {
        let mut seen = self.0.load(Relaxed);
        loop {
            if seen & STATE != READY {
                return Err(Word(seen));
            }
            // WAITERS: for the end of a write-back.
            let keep = seen & (MARKER | WRITEBACK_BITS | WAITERS);
            let new = next_version(seen, epoch)
                | u64::from(frame.0) << FRAME_SHIFT
                | READY
                | keep
                | flags.bits();
            // Release: publishes the frame's bytes to `load`.
            match self.0.compare_exchange_weak(seen, new, Release, Relaxed) {
                Ok(_) => {
                    // Before this returns: otherwise two writers that then read each other's page
                    // could both see the old one. And before the old frame is used again.
                    fence(SeqCst);
                    return Ok(Change::new(seen, new));
                }
                Err(now) => seen = now,
            }
        }
    }

    /// READY or EMPTY -> HIDDEN. Caller: holds an exclusive guard over the page, so no other thread
    /// fills or hides it (W3). Returns the word before. The frame of a READY page stays in the
    /// word. For [`Hiding`](crate::cache::table::step::Hiding), which fences after the last page,
    /// before the frames are used and before the operation becomes visible. The transition that
    /// ends HIDDEN releases all earlier changes.
    pub(in crate::cache) fn hide(&self, epoch: &Epoch) -> Word {
        let mut seen = self.0.load(Relaxed);
        loop {
            debug_assert!(matches!(Word(seen).state(), PageState::Ready | PageState::Empty));
            let version =
                if seen & STATE == READY { next_version(seen, epoch) } else { seen & VERSION };
            let frame = Word(seen).frame();
            let keep = seen & (WRITEBACK_BITS | WAITERS);
            let new = version | u64::from(frame.0) << FRAME_SHIFT | HIDDEN | keep;
            match self.0.compare_exchange_weak(seen, new, Relaxed, Relaxed) {
                Ok(_) => return Word(seen),
                Err(now) => seen = now,
            }
        }
    }

    /// HIDDEN -> READY with `frame`. Caller: has hidden the page.
    pub(crate) fn publish(&self, frame: FrameIndex, flags: PublishFlags) -> Change {
        self.end(u64::from(frame.0) << FRAME_SHIFT | READY | flags.bits())
    }

    /// HIDDEN -> EMPTY. Caller: has hidden the page, has since found it not under write-back, and
    /// now owns its old frame.
    pub(crate) fn drop_hidden(&self) -> Change {
        let change = self.end(EMPTY);
        debug_assert!(!change.was.is_under_writeback());
        change
    }

    /// READY and DIRTY -> READY and WRITEBACK, if the word is still `seen`, which is not under
    /// write-back. The caller has pinned the frame before, as a viewer does, and unpins it after
    /// [`PageWord::end_writeback`].
    pub(crate) fn try_writeback(&self, seen: Word) -> Option<Change> {
        debug_assert!(seen.is_ready() && seen.is_dirty() && !seen.is_under_writeback());
        let new = seen.0 & !DIRTY | WRITEBACK;
        // Acquire: the size, which is read next, is not older than the observed DIRTY, which may be
        // another one than that of `seen`. (The pin fences before.)
        let begun = self.0.compare_exchange(seen.0, new, Acquire, Relaxed);
        begun.ok().map(|was| Change::new(was, new))
    }

    /// Ends a write-back in any state of the page. Caller: its `try_writeback` succeeded.
    pub(crate) fn end_writeback(&self, end: WritebackEnd) -> Change {
        let set = match end {
            WritebackEnd::Unstable => UNSTABLE,
            WritebackEnd::Stable => 0,
            WritebackEnd::Failed => DIRTY,
        };
        // A thread that finds the write-back ended may let the backend change the page.
        let change =
            self.change(|seen| without_stale_unqueued(seen & !(WRITEBACK | WAITERS) | set));
        debug_assert!(change.was.is_under_writeback());
        change
    }

    /// Clears UNSTABLE, after a sync has covered the page.
    pub(crate) fn clear_unstable(&self) -> Change {
        self.change(|seen| without_stale_unqueued(seen & !UNSTABLE))
    }

    /// The backend lost bytes that it had acknowledged. A READY or HIDDEN page becomes DIRTY and
    /// not UNSTABLE; a page in another state is not changed.
    pub(crate) fn redirty(&self) -> Change {
        self.change(|seen| {
            let cached = matches!(seen & STATE, READY | HIDDEN);
            if cached && Word(seen).frame() != FrameIndex::NONE {
                seen & !UNSTABLE | DIRTY
            } else {
                seen
            }
        })
    }

    /// Clears the write-back bits when the file is torn down.
    pub(crate) fn forget_writeback(&self) -> Change {
        self.change(|seen| seen & !WRITEBACK_BITS)
    }

    /// Sets UNQUEUED, if the word is still `seen`, which is unevictable (W4). Caller: the evictor,
    /// under its lock, which takes the page out of its queues.
    pub(in crate::cache) fn try_unqueue(&self, seen: Word) -> bool {
        debug_assert!(seen.is_unevictable());
        // Relaxed: the lock orders the queues. The thread that clears the bit acquires the lock
        // afterwards.
        self.0.compare_exchange(seen.0, seen.0 | UNQUEUED, Relaxed, Relaxed).is_ok()
    }

    /// Sets WAITERS on a word that is FILLING, HIDDEN or under write-back. Returns the value to
    /// sleep on, or `None` if the page has changed. The end of each of these states wakes, so a
    /// thread that waits for one state may be woken by the end of another.
    pub(crate) fn set_waiters(&self, seen: Word) -> Option<Word> {
        debug_assert!(
            matches!(seen.state(), PageState::Filling | PageState::Hidden)
                || seen.is_under_writeback()
        );
        let armed = seen.0 | WAITERS;
        if seen.0 == armed {
            return Some(seen);
        }
        // Compare-and-exchange on the seen word: the RMW that ends FILLING or HIDDEN either comes
        // first and makes this fail, or finds WAITERS and wakes. Relaxed: the order is established
        // by the kernel's own check of the word, or by the fences of `wait_queue`.
        self.0.compare_exchange(seen.0, armed, Relaxed, Relaxed).ok().map(|_| Word(armed))
    }

    /// The half of the word with the flags, for the kernel to compare.
    #[cfg(not(loom))]
    pub(in crate::cache) fn low_half(&self) -> &AtomicU32 {
        const LOW_HALF: usize = if cfg!(target_endian = "little") { 0 } else { 1 };
        // SAFETY: the half lies within the word, is aligned for u32, lives as long as `self`, and
        // is passed only to the kernel, which reads it atomically.
        unsafe { AtomicU32::from_ptr(self.0.as_ptr().cast::<u32>().add(LOW_HALF)) }
    }
}

/// Clears UNQUEUED in `word` if it is evictable (W4).
fn without_stale_unqueued(word: u64) -> u64 {
    if word & UNEVICTABLE_BITS == 0 { word & !UNQUEUED } else { word }
}

/// The version after that of `seen`, without state or frame. Raises the epoch before a wrapped
/// version is used, and halfway to it.
fn next_version(seen: u64, epoch: &Epoch) -> u64 {
    const HALF: u64 = 1 << (VERSION_SHIFT + VERSION_BITS - 1);
    let next = (seen & VERSION).wrapping_add(1 << VERSION_SHIFT) & VERSION;
    if next == 0 || next == HALF {
        epoch.raise();
    }
    next
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::units::FRAMES_MAX;

    const F1: FrameIndex = FrameIndex(1);
    const F2: FrameIndex = FrameIndex((FRAMES_MAX - 1) as u32);

    fn ready(word: &PageWord, frame: FrameIndex) -> Word {
        word.try_fill(frame).unwrap();
        let _ = word.finish_fill(frame, PublishFlags::default());
        word.load()
    }

    #[test]
    fn fill_is_single_flight() {
        let word = PageWord::new();
        word.try_fill(F1).unwrap();
        assert_eq!(word.try_fill(F2).unwrap_err().state(), PageState::Filling);
        assert_eq!(word.finish_fill(F2, PublishFlags::default()), Sleepers(false));
        assert_eq!(word.load().frame(), F2);
        assert!(word.load().is_hit());
    }

    #[test]
    fn leaving_ready_changes_the_content_even_with_the_same_frame() {
        let (word, epoch) = (PageWord::new(), Epoch::new());
        let first = ready(&word, F1);
        assert!(word.try_evict(first, &epoch));
        let second = ready(&word, F1);
        assert!(!first.same_content(second));
        word.hide(&epoch);
        let _ = word.publish(F1, PublishFlags::default());
        assert!(!second.same_content(word.load()));
    }

    #[test]
    fn flags_do_not_change_the_content() {
        let word = PageWord::new();
        let seen = ready(&word, F1);
        word.mark_referenced(seen);
        assert!(word.load().is_referenced());
        assert!(word.is_unchanged(seen));
        assert!(word.take_referenced() && !word.take_referenced());
    }

    #[test]
    fn a_referenced_page_is_not_evicted() {
        let (word, epoch) = (PageWord::new(), Epoch::new());
        let seen = ready(&word, F1);
        word.mark_referenced(seen);
        assert!(!word.try_evict(seen, &epoch));
    }

    #[test]
    fn a_marker_sends_the_reader_to_the_slow_path_once() {
        let word = PageWord::new();
        word.try_fill(F1).unwrap();
        let _ = word.finish_fill(F1, PublishFlags { marker: true, ..PublishFlags::default() });
        assert!(word.load().is_ready() && !word.load().is_hit());
        assert!(word.take_marker() && !word.take_marker());
        assert!(word.load().is_hit());
    }

    #[test]
    fn the_end_of_hidden_reports_waiters() {
        let (word, epoch) = (PageWord::new(), Epoch::new());
        ready(&word, F1);
        word.hide(&epoch);
        let armed = word.set_waiters(word.load()).unwrap();
        assert_eq!(word.set_waiters(armed), Some(armed));
        assert_eq!(word.drop_hidden().sleepers(), Sleepers(true));
        assert_eq!(word.load().state(), PageState::Empty);
    }

    #[test]
    fn fresh_frames_and_hiding_keep_what_write_back_has_noted() {
        const DIRTY: PublishFlags = PublishFlags { referenced: false, marker: false, dirty: true };
        let (word, epoch) = (PageWord::new(), Epoch::new());
        word.hide(&epoch);
        let _ = word.publish(F1, DIRTY);
        assert!(!word.try_evict(word.load(), &epoch));
        assert!(word.try_unqueue(word.load()));
        let _ = word.try_writeback(word.load()).unwrap();
        let _ = word.try_replace(F2, PublishFlags::default(), &epoch).unwrap();
        assert!(word.load().is_under_writeback(), "a fresh frame");
        word.hide(&epoch);
        assert!(word.load().is_under_writeback(), "hidden");
        let _ = word.publish(F1, PublishFlags::default());
        assert!(word.load().is_under_writeback(), "published again");
        assert!(!word.end_writeback(WritebackEnd::Unstable).must_requeue());
        assert!(word.load().is_unstable() && !word.try_evict(word.load(), &epoch));
        assert!(word.clear_unstable().must_requeue(), "it becomes evictable");
        assert!(word.try_evict(word.load(), &epoch));
    }

    #[test]
    fn a_wrapping_version_raises_the_epoch() {
        let (word, epoch) = (PageWord(AtomicU64::new(VERSION | READY)), Epoch::new());
        let begun = epoch.begin();
        assert!(word.try_evict(word.load(), &epoch));
        assert_eq!(word.0.load(Relaxed), EMPTY);
        assert!(!epoch.is_unchanged(begun));
    }
}

//! Which page leaves when memory is needed: S3-FIFO behind a filter for correlated reads.
//!
//! S3-FIFO (Yang et al., SOSP 2023) keeps new pages in a small queue, a tenth of the cache. At its
//! head a page that was read again moves to the main queue, any other leaves, and the ghost
//! doorkeeper_has it for a while: a page that comes back while remembered goes to main at once. Main is
//! a FIFO with a second chance. So a scan passes through the small queue without touching main,
//! and a hit writes nothing but a REFERENCED bit that is clear.
//!
//! A program that reads a file in pieces smaller than a page hits each page several times at once,
//! and read-ahead brings pages before their first read. Neither is a second use, as 2Q's
//! "correlated reference period" has it (Johnson and Shasha, VLDB 1994). So pages spend their first
//! time in the *window* queue, 1/64 of the frames, and REFERENCED is cleared as they leave it. A
//! page that read-ahead brought so early that it left the window queue unread goes through the small
//! queue once more after its first reads.
//!
//! ```text
//!   fill --> window --> small --- referenced ---> main <--+ referenced: once more around
//!     |                  |                        | |____|
//!     |                  +--> evicted, ghost      +--> evicted
//!     +--- remembered by the ghost ------------> main
//! ```
//!
//! The queues link *nodes*, which pages keep when they are overwritten: see `node`.
//!
//! - **E1** A node is in a queue only while its owner (a file core) and page are valid: the
//!   teardown of a file first removes its nodes here, under the lock, and takes the lock once more
//!   before the core goes: work on a frame's owner is done under the lock from end to end.
//! - **E2** A page that is in transition, or pinned, goes around. One that write-back keeps (page.W4) is
//!   put on the unevictable until that lets it go: see `unevictable`.
//! - **E3** An evictor that finds none scanned again, until the queues went around once: so it finds
//!   a page that can go, wherever that lies. The lock is released after each go; what was looked at
//!   is behind the rest, so the next go on there.
//! - **E4** One go scanned at [`SCAN_MAX`] pages of a queue at most, whatever they are: all that is
//!   cached may have been read again since the last eviction, and would be victim through under the
//!   lock, which every miss and every overwrite takes. What was looked at has had its second
//!   chance, and the next go on behind it: a backlog of pages that were read again is worked off by
//!   as many evictions as it takes. Each of these has to choose among pages of which it knows only
//!   that they were read again, and some nodes: the oldest newcomer goes, and is remembered by
//!   the ghost, so that it returns to main if that was wrong. Taking one of the others instead
//!   would cost a sixtieth of a hot set, each time that a scan begins. Where there is no newcomer,
//!   it is the oldest that was looked at.
//! - **E5** Leaves are not held while their words are looked at, but the word is of a leaf, as no node was
//!   recycled on the way to it. One that is READY with the frame that has a queued node (queue_node.QN2) is that of
//!   the node's page: the frame is in no other word. So what empties it has found it in its leaf, which it
//!   kept alive (table.T1), and has the hold that goes with it. A look alone may be at a leaf that was
//!   recycled since; it clears a REFERENCED, no more.
//!
//! Locks: the queues' mutex is held while a page word is looked up and evicted (table holds,
//! then class locks for nodes that become free, are taken under it). No I/O, no waiting.

use std::io;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::cache::frames::class::Class;
use crate::cache::frames::{FrameMeta, Frames};
use crate::cache::policy::admission::{AdmissionFilter, ReuseCounts};
use crate::cache::policy::fifo::{
    BATCHED, Fifo, MISSED, PREFETCHED, QUEUE, QueueName, UNEVICTABLE, class_of, queue_of,
};
use crate::cache::policy::ghost::Ghost;
use crate::cache::policy::unevictable::{self, RescanFlag, UnevictableList};
use crate::cache::table::page::{PageWord, Word};
use crate::cache::table::{FileCore, Held};
use crate::copy;
use crate::units::{FrameIndex, PageIndex};

/// Pages of one queue that are looked at in one hold of the lock (E4): some microseconds, as their
/// words and metadata come from memory.
const SCAN_MAX: u64 = 64;
/// Of one go: each queue, the window one for once more or the unevictable, and the page that goes then; and pages
/// before, as long as there were few scanned.
#[cfg(test)]
pub(crate) const SCANNED_PER_PASS_MAX: u64 = 5 * SCAN_MAX + 1;

/// The shares of the window and the small queue in the limit.
const WINDOW_PART: u64 = 64;
const SMALL_PART: u64 = 10;

/// The queues of an engine.
pub(crate) struct Queues {
    window: Fifo,
    small: Fifo,
    main: Fifo,
    ghost: Ghost,
    window_bytes_max: u64,
    small_bytes_max: u64,
    readahead: ReadaheadUse,
    admission: Arc<AdmissionFilter>,
    reuse: ReuseCounts,
    unevictable: UnevictableList,
    /// The most pages that one hold of the lock looked at (E4).
    #[cfg(test)]
    pub(crate) scanned_max: u64,
}

/// What became of the pages that read-ahead brought.
#[derive(Default, Clone, Copy)]
pub(crate) struct ReadaheadUse {
    pub(crate) used: u64,
    pub(crate) wasted: u64,
}

/// What one go at the queues came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum EvictPass {
    /// Some pages, out of their words: their frames are for the caller to retire.
    Evicted,
    /// There is more behind the pages that it showed.
    More,
    /// Nothing can go.
    Nothing,
}

/// A page that went: its frame, and that one's class.
type Victim = (FrameIndex, Class);

enum Decision {
    /// Out of this frame.
    Evicted(FrameIndex),
    /// By write-back, until it lets it go to this queue.
    Unevictable(QueueName),
    Used(QueueName),
    /// Pinned, or in transition.
    Busy,
}

/// The scanned for one page, by the name of the queue.
#[derive(Default)]
struct Scanned {
    all: [u64; 4],
    /// The node of the first page that stayed for having been read again, and nothing else.
    first_used: Option<FrameIndex>,
}

impl Queues {
    /// The ghost stays as large as for this limit.
    pub(crate) fn new(limit_bytes: u64, admission: Arc<AdmissionFilter>) -> io::Result<Queues> {
        Ok(Queues {
            window: Fifo::default(),
            small: Fifo::default(),
            main: Fifo::default(),
            ghost: Ghost::new(limit_bytes)?,
            window_bytes_max: limit_bytes / WINDOW_PART,
            small_bytes_max: limit_bytes / SMALL_PART,
            readahead: ReadaheadUse::default(),
            admission,
            reuse: ReuseCounts::default(),
            unevictable: UnevictableList::default(),
            #[cfg(test)]
            scanned_max: 0,
        })
    }

    pub(crate) fn set_limit(&mut self, limit_bytes: u64) {
        self.window_bytes_max = limit_bytes / WINDOW_PART;
        self.small_bytes_max = limit_bytes / SMALL_PART;
    }

    /// So many goes show each queue's frames once, and those on the unevictable where that is victim through.
    pub(crate) fn passes_per_sweep(&self) -> u64 {
        let longest = self.window.frames.max(self.small.frames).max(self.main.frames);
        longest / SCAN_MAX + 1 + self.unevictable.frames_to_rescan() / SCAN_MAX
    }

    /// The bytes of all pages that are queued.
    pub(crate) fn bytes(&self) -> u64 {
        self.window.bytes + self.small.bytes + self.main.bytes + self.unevictable.queue.bytes
    }

    #[cfg(test)]
    pub(crate) fn unevictable_frames(&self) -> u64 {
        self.unevictable.queue.frames
    }

    pub(crate) fn ghost_bytes(&self) -> u64 {
        self.ghost.bytes()
    }

    /// Puts those of `nodes` into queues that are nodes still (insert_batch.IB1).
    pub(crate) fn insert_batch(&mut self, frames: &Frames, nodes: &[FrameIndex]) {
        for &node in nodes {
            let meta = frames.meta(node);
            let tags = meta.published_tags();
            if tags & BATCHED != 0 {
                meta.set_tags(tags & !BATCHED);
                self.insert(frames, node);
            }
        }
    }

    /// Puts a page into the queue that it begins in.
    fn insert(&mut self, frames: &Frames, node: FrameIndex) {
        let meta = frames.meta(node);
        let file = frames.file_number(meta.owner.load(Relaxed));
        let remembered = self.ghost.remove(file, meta.page())
            || meta.tags() & MISSED != 0 && self.admission.doorkeeper_has(file, meta.page());
        let queue = if remembered { QueueName::Main } else { QueueName::Window };
        self.push(frames, queue, node);
        self.trim_window(frames);
    }

    /// Takes out the frame of a page that is leaving by another way than eviction. `used`: it was
    /// read since it was last looked at.
    pub(crate) fn remove(&mut self, frames: &Frames, frame: FrameIndex, used: bool) {
        let node = frames.queue_node_of(frame);
        let meta = frames.meta(node);
        match meta.tags() {
            tags if tags & BATCHED != 0 => meta.set_tags(tags & !BATCHED),
            _ => self.unlink(frames, node),
        }
        count_prefetched(&mut self.readahead, meta, used);
    }

    /// Whether it is in a queue, or is to be put into one.
    pub(crate) fn is_queued(&self, frames: &Frames, frame: FrameIndex) -> bool {
        frames.queue_node(frame).tags() & (QUEUE | BATCHED) != 0
    }

    /// Evicts up to `most` pages, if it meets some that can go (E2, E4), and adds them to `victims`.
    pub(crate) fn evict(
        &mut self,
        frames: &Frames,
        rescan: &RescanFlag,
        most: usize,
        victims: &mut impl Extend<Victim>,
    ) -> EvictPass {
        let mut evicted = 0;
        let mut all_scanned = 0;
        let end = loop {
            let (end, scanned) = self.evict_one(frames, rescan, victims);
            all_scanned += scanned;
            evicted += usize::from(end == EvictPass::Evicted);
            if end != EvictPass::Evicted || evicted == most || all_scanned >= SCAN_MAX {
                break end;
            }
        };
        #[cfg(test)]
        {
            self.scanned_max = self.scanned_max.max(all_scanned);
        }
        if evicted > 0 { EvictPass::Evicted } else { end }
    }

    /// One of them, and how many were looked at for it.
    fn evict_one(
        &mut self,
        frames: &Frames,
        rescan: &RescanFlag,
        victims: &mut impl Extend<Victim>,
    ) -> (EvictPass, u64) {
        let mut scanned = Scanned::default();
        let mut victim = None;
        while victim.is_none()
            && let Some(name) = self.next_queue(&scanned)
        {
            victim = self.scan_head(frames, name, false, &mut scanned);
        }
        if victim.is_none()
            && let Some(first_used) = scanned.first_used
        {
            victim = self.evict_referenced(frames, first_used, &mut scanned);
        }
        let rescanned = if victim.is_none() { self.rescan_unevictable(frames, rescan) } else { 0 };
        let go = if victim.is_some() {
            EvictPass::Evicted
        } else if rescanned > 0 || scanned.all.iter().any(|&scanned| scanned >= SCAN_MAX) {
            EvictPass::More
        } else {
            EvictPass::Nothing
        };
        victims.extend(victim);
        (go, scanned.all.iter().sum::<u64>() + rescanned)
    }

    /// The oldest newcomer, or else `first_used` (E4).
    fn evict_referenced(
        &mut self,
        frames: &Frames,
        first_used: FrameIndex,
        scanned: &mut Scanned,
    ) -> Option<Victim> {
        for _ in 0..self.window.frames.min(SCAN_MAX) {
            let victim = self.scan_head(frames, QueueName::Window, true, scanned);
            if victim.is_some() {
                return victim;
            }
        }
        // Queued all the time: nobody else had the lock.
        self.scan_page(frames, first_used, true, scanned)
    }

    /// The queue to evict from: small while it is over its share, else main; where all of a queue
    /// is pinned, kept or in transition, the next one. None where pages were passed over
    /// that were read again, if what is left is to be looked at in another way (E4).
    fn next_queue(&self, scanned: &Scanned) -> Option<QueueName> {
        use QueueName::{Main, Small, Window};
        let nothing_used = scanned.first_used.is_none();
        let small_bytes_max = self.admission.small_bytes_max(self.small_bytes_max);
        let can = |name: QueueName, queue: &Fifo| {
            let left = scanned.all[name as usize] < SCAN_MAX.min(2 * queue.frames + 1);
            (left && queue.frames > 0).then_some(name)
        };
        let (window, small, main) =
            (can(Window, &self.window), can(Small, &self.small), can(Main, &self.main));
        let window = window.filter(|_| nothing_used);
        // What is on the unevictable has its part of the share.
        if self.small.bytes + self.unevictable.bytes_of(Small) > small_bytes_max {
            small.or(main.filter(|_| nothing_used)).or(window)
        } else {
            main.or(small).or(window)
        }
    }

    /// Scanned at the head of queue `name`.
    fn scan_head(
        &mut self,
        frames: &Frames,
        name: QueueName,
        force: bool,
        scanned: &mut Scanned,
    ) -> Option<Victim> {
        let head = FrameIndex(self.queue(name).head);
        let victim = self.scan_page(frames, head, force, scanned);
        if victim.is_some() {
            self.prefetch_head(frames, name);
        }
        victim
    }

    /// Scanned at a queued page: it goes, or it moves to the end of its queue or the next one, or to the unevictable.
    fn scan_page(
        &mut self,
        frames: &Frames,
        node: FrameIndex,
        force: bool,
        scanned: &mut Scanned,
    ) -> Option<Victim> {
        let name = queue_of(frames.meta(node));
        let decision = self.decide(frames, name, node, force);
        self.unlink(frames, node);
        scanned.all[name as usize] += 1;
        let stays = match decision {
            Decision::Evicted(frame) => return Some((frame, class_of(frames.meta(node)))),
            Decision::Unevictable(to) => {
                self.move_to_unevictable(frames, to, node);
                return None;
            }
            Decision::Used(to) => {
                scanned.first_used.get_or_insert(node);
                to
            }
            Decision::Busy => name,
        };
        self.push(frames, stays, node);
        None
    }

    /// Puts a page on the unevictable that goes back to `home`, if write-back keeps it still (unevictable.UN2).
    fn move_to_unevictable(&mut self, frames: &Frames, home: QueueName, node: FrameIndex) {
        self.unevictable.insert(frames, home, node);
        if !unevictable::is_still_unevictable(|| {
            QueuedPage::of(frames, node).map(|place| place.seen)
        }) {
            self.requeue(frames, node);
        }
    }

    /// Puts those of `nodes` that are on the unevictable back into their queues (unevictable.UN4).
    pub(crate) fn requeue_evictable(&mut self, frames: &Frames, nodes: &[FrameIndex]) {
        for &node in nodes {
            if frames.meta(node).tags() & UNEVICTABLE != 0 {
                self.requeue(frames, node);
            }
        }
    }

    fn requeue(&mut self, frames: &Frames, node: FrameIndex) {
        let home = self.unevictable.remove(frames, node);
        self.push(frames, home, node);
    }

    /// Goes on through the unevictable, if there are rescan (unevictable.UN3): what may not stay there goes back to its
    /// queue. How many pages were looked at.
    fn rescan_unevictable(&mut self, frames: &Frames, rescan: &RescanFlag) -> u64 {
        let mut scanned = 0;
        while scanned < SCAN_MAX
            && let Some(node) = self.unevictable.next_to_rescan(rescan)
        {
            scanned += 1;
            let home = self.unevictable.remove(frames, node);
            self.move_to_unevictable(frames, home, node);
        }
        scanned
    }

    /// Decides about a page of queue `name`, and makes it EMPTY if it goes. `force`: also if it was
    /// read again.
    fn decide(
        &mut self,
        frames: &Frames,
        name: QueueName,
        node: FrameIndex,
        force: bool,
    ) -> Decision {
        let meta = frames.meta(node);
        let Some(QueuedPage { core, leaf, page, word, seen }) = QueuedPage::of(frames, node) else {
            return Decision::Busy;
        };
        if frames.meta(seen.frame()).pins.is_pinned() {
            return Decision::Busy;
        }
        let referenced = seen.is_referenced();
        let prefetched = count_prefetched(&mut self.readahead, meta, referenced);
        if referenced && !force {
            word.take_referenced();
            // The first reads of a page that read-ahead brought too early for the window queue.
            let first_use = prefetched || name == QueueName::Window;
            let to = if first_use { QueueName::Small } else { QueueName::Main };
            if name == QueueName::Small && !first_use {
                self.record_reuse(meta, true);
            }
            return if seen.is_unevictable() {
                Decision::Unevictable(to)
            } else {
                Decision::Used(to)
            };
        }
        if !word.try_evict(seen, &core.epoch) {
            return if seen.is_unevictable() {
                Decision::Unevictable(name)
            } else {
                Decision::Busy
            };
        }
        // E5
        drop(Held::of_emptied(frames, core, leaf, page));
        if name != QueueName::Main {
            self.record_reuse(meta, false);
            self.ghost.remember(frames.file_number(ptr::from_ref(core).cast()), page);
        }
        Decision::Evicted(seen.frame())
    }

    /// A page leaves the queues of nodes.
    fn record_reuse(&mut self, meta: &FrameMeta, read_again: bool) {
        let tags = meta.tags();
        if tags & MISSED != 0 {
            meta.set_tags(tags & !MISSED);
            self.admission.record_reuse(&mut self.reuse, read_again);
        }
    }

    /// Moves pages whose first time is over to the small queue, and forgets their first reads.
    fn trim_window(&mut self, frames: &Frames) {
        while self.window.bytes > self.window_bytes_max {
            let node = FrameIndex(self.window.head);
            if let Some(QueuedPage { word, seen, .. }) = QueuedPage::of(frames, node)
                && seen.is_referenced()
            {
                word.take_referenced();
                count_prefetched(&mut self.readahead, frames.meta(node), true);
            }
            self.unlink(frames, node);
            self.push(frames, QueueName::Small, node);
            self.prefetch_head(frames, QueueName::Window);
        }
    }

    /// Has the processor fetch what the next look at the head of a queue will want.
    fn prefetch_head(&mut self, frames: &Frames, name: QueueName) {
        let node = FrameIndex(self.queue(name).head);
        if node == FrameIndex::NONE {
            return;
        }
        let meta = frames.meta(node);
        // SAFETY: as in `with_word`.
        let core = unsafe { &*meta.owner.load(Relaxed).cast::<FileCore>() };
        core.prefetch(frames, meta.page());
        let next = FrameIndex(meta.next.load(Relaxed));
        if next != FrameIndex::NONE {
            copy::prefetch_line(frames.meta(next));
        }
    }

    /// The use of read-ahead, as far as it is settled.
    pub(crate) fn readahead_use(&self) -> ReadaheadUse {
        self.readahead
    }

    fn push(&mut self, frames: &Frames, name: QueueName, node: FrameIndex) {
        self.queue(name).push(frames, name, node);
    }

    fn unlink(&mut self, frames: &Frames, node: FrameIndex) {
        let meta = frames.meta(node);
        if meta.tags() & UNEVICTABLE != 0 {
            self.unevictable.remove(frames, node);
        } else {
            self.queue(queue_of(meta)).unlink(frames, node);
        }
    }

    fn queue(&mut self, name: QueueName) -> &mut Fifo {
        match name {
            QueueName::Window => &mut self.window,
            QueueName::Small => &mut self.small,
            QueueName::Main => &mut self.main,
        }
    }
}

/// Settles whether a page that read-ahead brought was of use; whether it is such a page, and was not
/// settled before.
fn count_prefetched(readahead: &mut ReadaheadUse, meta: &FrameMeta, used: bool) -> bool {
    let tags = meta.tags();
    if tags & PREFETCHED == 0 {
        return false;
    }
    meta.set_tags(tags & !PREFETCHED);
    if used {
        readahead.used += 1;
    } else {
        readahead.wasted += 1;
    }
    true
}

/// Where the page is that has a queued node.
struct QueuedPage<'f> {
    core: &'f FileCore,
    leaf: FrameIndex,
    page: PageIndex,
    word: &'f PageWord,
    /// READY, with the frame that has the node.
    seen: Word,
}

impl<'f> QueuedPage<'f> {
    /// `None`: the page is in transition (queue_node.QN2).
    fn of(frames: &'f Frames, node: FrameIndex) -> Option<QueuedPage<'f>> {
        let meta = frames.meta(node);
        // SAFETY: E1: the owner of a queued node is a live core, and we are under the lock that its
        // teardown takes first.
        let core = unsafe { &*meta.owner.load(Relaxed).cast::<FileCore>() };
        let page = meta.page();
        let (leaf, word, seen) = core.lookup_leaf(frames, page)?;
        let place = QueuedPage { core, leaf, page, word, seen };
        (seen.is_ready() && frames.queue_node_of(seen.frame()) == node).then_some(place)
    }
}

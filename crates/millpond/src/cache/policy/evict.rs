//! Eviction: S3-FIFO behind a window queue that filters correlated reads.
//!
//! S3-FIFO (Yang et al., SOSP 2023) keeps new pages in a small queue, a tenth of the cache. At its
//! head, a page that was read again moves to the main queue. Any other page is evicted, and the
//! ghost remembers it for a while: a page that is filled again while remembered goes to main at
//! once. Main is a FIFO with a second chance. So a scan passes through the small queue without
//! touching main, and a hit writes nothing but a clear REFERENCED bit.
//!
//! A program that reads a file in pieces smaller than a page hits each page several times in a row,
//! and read-ahead fills pages before their first read. Neither is a second use (2Q calls this the
//! "correlated reference period"; Johnson and Shasha, VLDB 1994). So pages begin in the *window*
//! queue, 1/64 of the frames, and REFERENCED is cleared when they leave it. A page that read-ahead
//! filled so early that it left the window queue unread passes through the small queue again after
//! its first reads.
//!
//! ```text
//!   fill --> window --> small --- referenced ---> main <--+ referenced: to the tail again
//!     |                  |                        | |____|
//!     |                  +--> evicted, ghost      +--> evicted
//!     +--- remembered by the ghost ------------> main
//! ```
//!
//! The queues link *queue nodes*, which pages keep when they are overwritten: see `queue_node`.
//!
//! - **E1** A queue node is queued only while its owner (a file core) and page are valid. The
//!   teardown of a file first removes its queue nodes, under the lock, and acquires the lock again
//!   before the core is freed: the owner of a frame is only accessed under the lock.
//! - **E2** A page that is hidden, pinned, or changes during the scan moves to the tail. A page that
//!   write-back keeps (page.W4) leaves its queue: such pages may be most of the cached pages, and
//!   would be scanned again and again. (Compare Linux's LRU_UNEVICTABLE. The measurement is in
//!   `docs/benchmarks.md`.) The evictor sets UNQUEUED in its word, and then in the tags of its queue
//!   node, which also name the queue to which it returns. The thread that makes the page evictable
//!   clears the first, and acquires the lock afterwards. If it finds the tag, it queues the page
//!   again. The queue node may belong to another page by then. If that page is UNQUEUED, it is queued,
//!   and the evictor takes it out again.
//! - **E3** An evictor that finds no victim repeats its pass until the queues were swept once. So
//!   it finds an evictable page at any position. The lock is released after each pass. Scanned
//!   pages are at the tail then, so the next pass continues behind them.
//! - **E4** A pass scans at most [`SCAN_MAX`] pages of a queue. Otherwise, if all cached pages were
//!   read again since the last eviction, it would go through all of them under the lock, which
//!   every miss and every overwrite acquires. Scanned pages have had their second chance, and the
//!   next pass continues behind them: a backlog of pages that were read again is processed by
//!   several evictions. Each of them has to choose among pages that were all read again, and some
//!   in the window queue. It evicts the oldest page of the window queue. The ghost remembers this
//!   page, so it returns to main if that was wrong. Evicting one of the other pages instead would
//!   cost a sixtieth of a hot set at the beginning of each scan. If the window queue has no
//!   candidate, the oldest scanned page is evicted.
//! - **E5** Leaves are not held while their words are read. The lookup shows that the word was in the
//!   leaf of the page. The leaf is not recycled under the lock: the page of a queued node is cached, so
//!   the word keeps its leaf alive (table.T1). Or a thread has just made the word EMPTY, and has not
//!   removed the queue node, for which it needs the lock. It still holds the leaf. The thread that
//!   evicts the page takes over the hold of the word.
//!
//! Locks: the queues' mutex is held while a page word is looked up and evicted (table holds, then
//! class locks for nodes that become free, are acquired under it). No I/O, no waiting.

use std::io;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::cache::frames::class::Class;
use crate::cache::frames::{FrameMeta, Frames};
use crate::cache::policy::admission::{AdmissionFilter, ReuseCounts};
use crate::cache::policy::fifo::{
    BATCHED, Fifo, MISSED, PREFETCHED, QUEUE, QueueName, UNQUEUED, class_of, queue_of,
};
use crate::cache::policy::ghost::Ghost;
use crate::cache::table::page::{PageWord, Word};
use crate::cache::table::{FileCore, HeldLeaf};
use crate::copy;
use crate::units::{FrameIndex, PageIndex};

/// The maximum number of pages of one queue that are scanned in one hold of the lock (E4): some
/// microseconds, as their words and metadata come from memory.
const SCAN_MAX: u64 = 64;
/// The maximum for one pass: each queue, again the window queue, and the page that is evicted then;
/// and pages before it, while few were scanned.
#[cfg(test)]
pub(crate) const SCANNED_PER_PASS_MAX: u64 = 5 * SCAN_MAX + 1;

/// The sizes of the window and the small queue as parts of the limit.
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
    /// The maximum number of pages that were scanned in one hold of the lock (E4).
    #[cfg(test)]
    pub(crate) scanned_max: u64,
}

/// The use of pages that read-ahead filled.
#[derive(Default, Clone, Copy)]
pub(crate) struct ReadaheadUse {
    pub(crate) used: u64,
    pub(crate) wasted: u64,
}

/// The result of one eviction pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum EvictPass {
    /// Some pages were removed from their words. The caller retires their frames.
    Evicted,
    /// More pages follow behind the scanned ones.
    More,
    /// Nothing is evictable.
    Nothing,
}

/// The frame of an evicted page, and its class.
type Victim = (FrameIndex, Class);

enum Decision {
    /// Evicted from this frame.
    Evicted(FrameIndex),
    /// Kept by write-back, and UNQUEUED. It returns to this queue when it becomes evictable (E2).
    Unqueued(QueueName),
    Used(QueueName),
    /// Hidden, pinned, or changed during the scan.
    Busy,
}

/// The number of scanned pages in one pass, by queue.
#[derive(Default)]
struct Scanned {
    all: [u64; 4],
    /// The number of those that left their queues (E2).
    unqueued: u64,
    /// The queue node of the first page that stayed only because it was read again.
    first_used: Option<FrameIndex>,
}

impl Queues {
    /// The ghost keeps the size for this limit.
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
            #[cfg(test)]
            scanned_max: 0,
        })
    }

    pub(crate) fn set_limit(&mut self, limit_bytes: u64) {
        self.window_bytes_max = limit_bytes / WINDOW_PART;
        self.small_bytes_max = limit_bytes / SMALL_PART;
    }

    /// The number of passes in which each queue's frames are scanned once.
    pub(crate) fn passes_per_sweep(&self) -> u64 {
        self.window.frames.max(self.small.frames).max(self.main.frames) / SCAN_MAX + 1
    }

    /// The bytes of pages in the queues, and of those that return to them (E2).
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> (u64, u64) {
        let queues = [&self.window, &self.small, &self.main];
        let sum = |bytes: fn(&Fifo) -> u64| queues.iter().map(|queue| bytes(queue)).sum();
        (sum(|queue| queue.bytes), sum(|queue| queue.unqueued_bytes))
    }

    pub(crate) fn ghost_bytes(&self) -> u64 {
        self.ghost.bytes()
    }

    /// Inserts those of `nodes` into queues that are still tagged as batched (insert_batch.IB1).
    pub(crate) fn insert_batch(&mut self, frames: &Frames, nodes: &[FrameIndex]) {
        // Before pages leave the window queue, where the bit is cleared.
        mark_touched(frames);
        for &node in nodes {
            let meta = frames.meta(node);
            let tags = meta.published_tags();
            if tags & BATCHED != 0 {
                meta.set_tags(tags & !BATCHED);
                self.insert(frames, node);
            }
        }
    }

    /// Inserts a page into its first queue.
    fn insert(&mut self, frames: &Frames, node: FrameIndex) {
        let meta = frames.meta(node);
        let file = frames.file_number(meta.owner.load(Relaxed));
        let remembered = self.ghost.remove(file, meta.page())
            || meta.tags() & MISSED != 0 && self.admission.doorkeeper_has(file, meta.page());
        let queue = if remembered { QueueName::Main } else { QueueName::Window };
        self.push(frames, queue, node);
        self.trim_window(frames);
    }

    /// Removes the queue node of a page that leaves its word in another way than by eviction.
    /// `used`: it was read since its last scan.
    pub(crate) fn remove(&mut self, frames: &Frames, frame: FrameIndex, used: bool) {
        let node = frames.queue_node_of(frame);
        let meta = frames.meta(node);
        match meta.tags() {
            tags if tags & BATCHED != 0 => meta.set_tags(tags & !BATCHED),
            _ => self.unlink(frames, node),
        }
        count_prefetched(&mut self.readahead, meta, used);
    }

    /// Whether the page is queued, or in an insert batch.
    pub(crate) fn is_queued(&self, frames: &Frames, frame: FrameIndex) -> bool {
        frames.queue_node(frame).tags() & (QUEUE | BATCHED) != 0
    }

    /// Evicts up to `most` pages, if it finds evictable ones (E2, E4), and adds them to `victims`.
    pub(crate) fn evict(
        &mut self,
        frames: &Frames,
        most: usize,
        victims: &mut impl Extend<Victim>,
    ) -> EvictPass {
        mark_touched(frames);
        let mut evicted = 0;
        let mut all_scanned = 0;
        let end = loop {
            let (end, scanned) = self.evict_one(frames, victims);
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

    /// Evicts one page. Also returns the number of pages that were scanned.
    fn evict_one(
        &mut self,
        frames: &Frames,
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
        let go = if victim.is_some() {
            EvictPass::Evicted
        } else if scanned.first_used.is_some() || scanned.all.iter().any(|&all| all >= SCAN_MAX) {
            // `first_used` was pinned or changed since it was scanned, and other queues were not
            // scanned for its sake.
            EvictPass::More
        } else {
            EvictPass::Nothing
        };
        victims.extend(victim);
        (go, scanned.all.iter().sum())
    }

    /// Evicts the oldest page of the window queue, or else `first_used` (E4).
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
        // It is still queued: the lock was held all the time.
        self.scan_page(frames, first_used, true, scanned)
    }

    /// The queue to evict from: small while it is larger than its part, otherwise main. If all
    /// pages of a queue are pinned, unevictable or hidden, the next queue. None if only
    /// pages that were read again were found, and the rest is scanned in another way (E4).
    fn next_queue(&self, scanned: &Scanned) -> Option<QueueName> {
        use QueueName::{Main, Small, Window};
        let nothing_used = scanned.first_used.is_none();
        let small_bytes_max = self.admission.small_bytes_max(self.small_bytes_max);
        let can = |name: QueueName, queue: &Fifo| {
            let most = SCAN_MAX.min(2 * queue.frames + scanned.unqueued + 1);
            let left = scanned.all[name as usize] < most;
            (left && queue.frames > 0).then_some(name)
        };
        let (window, small, main) =
            (can(Window, &self.window), can(Small, &self.small), can(Main, &self.main));
        let window = window.filter(|_| nothing_used);
        // Pages that return to the small queue count towards its size.
        if self.small.bytes + self.small.unqueued_bytes > small_bytes_max {
            small.or(main.filter(|_| nothing_used)).or(window)
        } else {
            main.or(small).or(window)
        }
    }

    /// Scans the head of queue `name`.
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

    /// Scans a queued page: it is evicted, leaves its queue (E2), or moves to the tail of its queue
    /// or the next one.
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
            Decision::Unqueued(to) => {
                scanned.unqueued += 1;
                self.queue(to).add_unqueued(to, frames.meta(node));
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

    /// Queues those of `nodes` again that had left their queues (E2).
    pub(crate) fn requeue_evictable(&mut self, frames: &Frames, nodes: &[FrameIndex]) {
        for &node in nodes {
            let meta = frames.meta(node);
            if meta.tags() & UNQUEUED != 0 {
                let to = queue_of(meta);
                self.unlink(frames, node);
                self.push(frames, to, node);
            }
        }
    }

    /// Decides about a page of queue `name`, and makes it EMPTY if it is evicted. `force`: even if
    /// it was read again.
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
        // Before any tag changes, as a busy page is scanned again. The pin of a page under write-back
        // does not keep the page in its queue.
        let is_busy = if seen.is_unevictable() {
            !word.try_unqueue(seen)
        } else {
            frames.meta(seen.frame()).pins.is_pinned()
        };
        if is_busy {
            return Decision::Busy;
        }
        let referenced = seen.is_referenced();
        let prefetched = count_prefetched(&mut self.readahead, meta, referenced);
        if referenced && !force {
            word.take_referenced();
            // The first reads of a page that read-ahead filled too early for the window queue.
            let first_use = prefetched || name == QueueName::Window;
            let to = if first_use { QueueName::Small } else { QueueName::Main };
            if name == QueueName::Small && !first_use {
                self.record_reuse(meta, true);
            }
            return if seen.is_unevictable() { Decision::Unqueued(to) } else { Decision::Used(to) };
        }
        if seen.is_unevictable() {
            return Decision::Unqueued(name);
        }
        if !word.try_evict(seen, &core.epoch) {
            return Decision::Busy;
        }
        // E5
        drop(HeldLeaf::of_emptied(frames, core, leaf, page));
        if name != QueueName::Main {
            self.record_reuse(meta, false);
            self.ghost.remember(frames.file_number(ptr::from_ref(core).cast()), page);
        }
        Decision::Evicted(seen.frame())
    }

    /// Records the reuse of a page that leaves the window and small queues.
    fn record_reuse(&mut self, meta: &FrameMeta, read_again: bool) {
        let tags = meta.tags();
        if tags & MISSED != 0 {
            meta.set_tags(tags & !MISSED);
            self.admission.record_reuse(&mut self.reuse, read_again);
        }
    }

    /// Moves the oldest pages of the window queue to the small queue, and clears their REFERENCED
    /// bits.
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

    /// Prefetches the memory that the next scan of the head of a queue reads.
    fn prefetch_head(&mut self, frames: &Frames, name: QueueName) {
        let node = FrameIndex(self.queue(name).head);
        if node == FrameIndex::NONE {
            return;
        }
        let meta = frames.meta(node);
        // SAFETY: as in `QueuedPage::of`.
        let core = unsafe { &*meta.owner.load(Relaxed).cast::<FileCore>() };
        core.prefetch(frames, meta.page());
        let next = FrameIndex(meta.next.load(Relaxed));
        if next != FrameIndex::NONE {
            copy::prefetch_line(frames.meta(next));
        }
    }

    /// The use of read-ahead, as far as it is known.
    pub(crate) fn readahead_use(&self) -> ReadaheadUse {
        self.readahead
    }

    fn push(&mut self, frames: &Frames, name: QueueName, node: FrameIndex) {
        self.queue(name).push(frames, name, node);
    }

    fn unlink(&mut self, frames: &Frames, node: FrameIndex) {
        self.queue(queue_of(frames.meta(node))).remove(frames, node);
    }

    fn queue(&mut self, name: QueueName) -> &mut Fifo {
        match name {
            QueueName::Window => &mut self.window,
            QueueName::Small => &mut self.small,
            QueueName::Main => &mut self.main,
        }
    }
}

/// Sets REFERENCED of the queued pages that clients have read (shared.SH3). Caller: holds the queues' lock.
fn mark_touched(frames: &Frames) {
    let Some(shared) = frames.shared() else { return };
    shared.clients.drain_touched(|frame| {
        if frame == FrameIndex::NONE || frames.address(frame).is_none() {
            return;
        }
        let node = frames.queue_node_of(frame);
        if frames.meta(node).tags() & QUEUE == 0 {
            return;
        }
        if let Some(QueuedPage { word, seen, .. }) = QueuedPage::of(frames, node)
            && seen.frame() == frame
        {
            word.mark_referenced(seen);
        }
    });
}

/// Counts whether a page that read-ahead filled was used. Returns whether it is such a page, and
/// was not counted before.
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

/// The page of a queued node.
struct QueuedPage<'f> {
    core: &'f FileCore,
    leaf: FrameIndex,
    page: PageIndex,
    word: &'f PageWord,
    /// READY.
    seen: Word,
}

impl<'f> QueuedPage<'f> {
    /// `None`: the page is hidden.
    fn of(frames: &'f Frames, node: FrameIndex) -> Option<QueuedPage<'f>> {
        let meta = frames.meta(node);
        // SAFETY: E1: the owner of a queued node is a live core, and we hold the lock that its
        // teardown acquires first.
        let core = unsafe { &*meta.owner.load(Relaxed).cast::<FileCore>() };
        let page = meta.page();
        let (leaf, word, seen) = core.lookup_leaf(frames, page)?;
        seen.is_ready().then_some(QueuedPage { core, leaf, page, word, seen })
    }
}

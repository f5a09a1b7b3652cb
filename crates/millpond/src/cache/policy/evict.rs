//! Which page leaves when memory is needed: S3-FIFO behind a filter for correlated reads.
//!
//! S3-FIFO (Yang et al., SOSP 2023) keeps new pages in a small queue, a tenth of the cache. At its
//! head a page that was read again moves to the main queue, any other leaves, and the ghost
//! remembers it for a while: a page that comes back while remembered goes to main at once. Main is
//! a FIFO with a second chance. So a scan passes through the small queue without touching main,
//! and a hit writes nothing but a REFERENCED bit that is clear.
//!
//! A program that reads a file in pieces smaller than a page hits each page several times at once,
//! and read-ahead brings pages before their first read. Neither is a second use, as 2Q's
//! "correlated reference period" has it (Johnson and Shasha, VLDB 1994). So pages spend their first
//! time in the *young* queue, 1/64 of the frames, and REFERENCED is cleared as they leave it. A
//! page that read-ahead brought so early that it left the young queue unread goes through the small
//! queue once more after its first reads.
//!
//! ```text
//!   fill --> young --> small --- referenced ---> main <--+ referenced: once more around
//!     |                  |                        | |____|
//!     |                  +--> evicted, ghost      +--> evicted
//!     +--- remembered by the ghost ------------> main
//! ```
//!
//! The queues link *seats*, which pages keep when they are overwritten: see `seat`.
//!
//! - **E1** A seat is in a queue only while its owner (a file core) and page are valid: the
//!   teardown of a file first removes its seats here, under the lock, and takes the lock once more
//!   before the core goes: work on a frame's owner is done under the lock from end to end.
//! - **E2** A page that is in transition, or pinned, goes around. One that write-back keeps (page.W4) is
//!   put on the shelf until that lets it go: see `shelf`.
//! - **E3** An evictor that finds none looks again, until the queues went around once: so it finds
//!   a page that can go, wherever that lies. The lock is released after each go; what was looked at
//!   is behind the rest, so the next go on there.
//! - **E4** One go looks at [`LOOKS_MAX`] pages of a queue at most, whatever they are: all that is
//!   cached may have been read again since the last eviction, and would be gone through under the
//!   lock, which every miss and every overwrite takes. What was looked at has had its second
//!   chance, and the next go on behind it: a backlog of pages that were read again is worked off by
//!   as many evictions as it takes. Each of these has to choose among pages of which it knows only
//!   that they were read again, and some newcomers: the oldest newcomer goes, and is remembered by
//!   the ghost, so that it returns to main if that was wrong. Taking one of the others instead
//!   would cost a sixtieth of a hot set, each time that a scan begins. Where there is no newcomer,
//!   it is the oldest that was looked at.
//! - **E5** Leaves are not held while their words are looked at, but the word is of a leaf, as no node was
//!   recycled on the way to it. One that is READY with the frame that has a queued seat (queue_node.QN2) is that of
//!   the seat's page: the frame is in no other word. So what empties it has found it in its leaf, which it
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
use crate::cache::policy::admission::{Fates, Gate};
use crate::cache::policy::fifo::{
    MISSED, NEWCOMER, PREFETCHED, QUEUE, Queue, QueueName, SHELVED, class_of, queue_of,
};
use crate::cache::policy::ghost::Ghost;
use crate::cache::policy::unevictable::{self, Shelf, Strays};
use crate::cache::table::page::{PageWord, Word};
use crate::cache::table::{FileCore, Held};
use crate::copy;
use crate::units::{FrameIndex, PageIndex};

/// Pages of one queue that are looked at in one hold of the lock (E4): some microseconds, as their
/// words and metadata come from memory.
const LOOKS_MAX: u64 = 64;
/// Of one go: each queue, the young one for once more or the shelf, and the page that goes then; and pages
/// before, as long as there were few looks.
#[cfg(test)]
pub(crate) const LOOKS_OF_A_GO_MAX: u64 = 5 * LOOKS_MAX + 1;

/// The shares of the young and the small queue in the limit.
const YOUNG_PART: u64 = 64;
const SMALL_PART: u64 = 10;

/// The queues of an engine.
pub(crate) struct Queues {
    young: Queue,
    small: Queue,
    main: Queue,
    ghost: Ghost,
    young_bytes_max: u64,
    small_bytes_max: u64,
    readahead: ReadaheadUse,
    gate: Arc<Gate>,
    fates: Fates,
    shelf: Shelf,
    /// The most pages that one hold of the lock looked at (E4).
    #[cfg(test)]
    pub(crate) most_looks: u64,
}

/// What became of the pages that read-ahead brought.
#[derive(Default, Clone, Copy)]
pub(crate) struct ReadaheadUse {
    pub(crate) used: u64,
    pub(crate) wasted: u64,
}

/// What one go at the queues came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Go {
    /// Some pages, out of their words: their frames are for the caller to retire.
    Evicted,
    /// There is more behind the pages that it showed.
    More,
    /// Nothing can go.
    Nothing,
}

/// A page that went: its frame, and that one's class.
type Victim = (FrameIndex, Class);

enum Verdict {
    /// Out of this frame.
    Evicted(FrameIndex),
    /// By write-back, until it lets it go to this queue.
    Kept(QueueName),
    Used(QueueName),
    /// Pinned, or in transition.
    Busy,
}

/// The looks for one page, by the name of the queue.
#[derive(Default)]
struct Looks {
    all: [u64; 4],
    /// The seat of the first page that stayed for having been read again, and nothing else.
    first_used: Option<FrameIndex>,
}

impl Queues {
    /// The ghost stays as large as for this limit.
    pub(crate) fn new(limit_bytes: u64, gate: Arc<Gate>) -> io::Result<Queues> {
        Ok(Queues {
            young: Queue::default(),
            small: Queue::default(),
            main: Queue::default(),
            ghost: Ghost::new(limit_bytes)?,
            young_bytes_max: limit_bytes / YOUNG_PART,
            small_bytes_max: limit_bytes / SMALL_PART,
            readahead: ReadaheadUse::default(),
            gate,
            fates: Fates::default(),
            shelf: Shelf::default(),
            #[cfg(test)]
            most_looks: 0,
        })
    }

    pub(crate) fn set_limit(&mut self, limit_bytes: u64) {
        self.young_bytes_max = limit_bytes / YOUNG_PART;
        self.small_bytes_max = limit_bytes / SMALL_PART;
    }

    /// So many goes show each queue's frames once, and those on the shelf where that is gone through.
    pub(crate) fn goes_of_a_turn(&self) -> u64 {
        let longest = self.young.frames.max(self.small.frames).max(self.main.frames);
        longest / LOOKS_MAX + 1 + self.shelf.turn_frames() / LOOKS_MAX
    }

    /// The bytes of all pages that are queued.
    pub(crate) fn bytes(&self) -> u64 {
        self.young.bytes + self.small.bytes + self.main.bytes + self.shelf.queue.bytes
    }

    #[cfg(test)]
    pub(crate) fn shelved(&self) -> u64 {
        self.shelf.queue.frames
    }

    pub(crate) fn ghost_bytes(&self) -> u64 {
        self.ghost.bytes()
    }

    /// Puts those of `newcomers` into queues that are newcomers still (insert_batch.IB1).
    pub(crate) fn admit(&mut self, frames: &Frames, newcomers: &[FrameIndex]) {
        for &seat in newcomers {
            let meta = frames.meta(seat);
            let tags = meta.published_tags();
            if tags & NEWCOMER != 0 {
                meta.set_tags(tags & !NEWCOMER);
                self.insert(frames, seat);
            }
        }
    }

    /// Puts a page into the queue that it begins in.
    fn insert(&mut self, frames: &Frames, seat: FrameIndex) {
        let meta = frames.meta(seat);
        let file = frames.file_number(meta.owner.load(Relaxed));
        let remembered = self.ghost.take(file, meta.page())
            || meta.tags() & MISSED != 0 && self.gate.remembers(file, meta.page());
        let queue = if remembered { QueueName::Main } else { QueueName::Young };
        self.push(frames, queue, seat);
        self.trim_young(frames);
    }

    /// Takes out the frame of a page that is leaving by another way than eviction. `used`: it was
    /// read since it was last looked at.
    pub(crate) fn remove(&mut self, frames: &Frames, frame: FrameIndex, used: bool) {
        let seat = frames.seat_of(frame);
        let meta = frames.meta(seat);
        match meta.tags() {
            tags if tags & NEWCOMER != 0 => meta.set_tags(tags & !NEWCOMER),
            _ => self.unlink(frames, seat),
        }
        count_prefetched(&mut self.readahead, meta, used);
    }

    /// Whether it is in a queue, or is to be put into one.
    pub(crate) fn is_queued(&self, frames: &Frames, frame: FrameIndex) -> bool {
        frames.seat(frame).tags() & (QUEUE | NEWCOMER) != 0
    }

    /// Evicts up to `most` pages, if it meets some that can go (E2, E4), and adds them to `victims`.
    pub(crate) fn evict(
        &mut self,
        frames: &Frames,
        strays: &Strays,
        most: usize,
        victims: &mut impl Extend<Victim>,
    ) -> Go {
        let mut evicted = 0;
        let mut all_looks = 0;
        let end = loop {
            let (end, looks) = self.evict_one(frames, strays, victims);
            all_looks += looks;
            evicted += usize::from(end == Go::Evicted);
            if end != Go::Evicted || evicted == most || all_looks >= LOOKS_MAX {
                break end;
            }
        };
        #[cfg(test)]
        {
            self.most_looks = self.most_looks.max(all_looks);
        }
        if evicted > 0 { Go::Evicted } else { end }
    }

    /// One of them, and how many were looked at for it.
    fn evict_one(
        &mut self,
        frames: &Frames,
        strays: &Strays,
        victims: &mut impl Extend<Victim>,
    ) -> (Go, u64) {
        let mut looks = Looks::default();
        let mut gone = None;
        while gone.is_none()
            && let Some(name) = self.next_queue(&looks)
        {
            gone = self.look(frames, name, false, &mut looks);
        }
        if gone.is_none()
            && let Some(first_used) = looks.first_used
        {
            gone = self.evict_anyway(frames, first_used, &mut looks);
        }
        let strays_looks = if gone.is_none() { self.fetch_strays(frames, strays) } else { 0 };
        let go = if gone.is_some() {
            Go::Evicted
        } else if strays_looks > 0 || looks.all.iter().any(|&looks| looks >= LOOKS_MAX) {
            Go::More
        } else {
            Go::Nothing
        };
        victims.extend(gone);
        (go, looks.all.iter().sum::<u64>() + strays_looks)
    }

    /// The oldest newcomer, or else `first_used` (E4).
    fn evict_anyway(
        &mut self,
        frames: &Frames,
        first_used: FrameIndex,
        looks: &mut Looks,
    ) -> Option<Victim> {
        for _ in 0..self.young.frames.min(LOOKS_MAX) {
            let gone = self.look(frames, QueueName::Young, true, looks);
            if gone.is_some() {
                return gone;
            }
        }
        // Queued all the time: nobody else had the lock.
        self.look_at(frames, first_used, true, looks)
    }

    /// The queue to evict from: small while it is over its share, else main; where all of a queue
    /// is pinned, kept or in transition, the next one. None where pages were passed over
    /// that were read again, if what is left is to be looked at in another way (E4).
    fn next_queue(&self, looks: &Looks) -> Option<QueueName> {
        use QueueName::{Main, Small, Young};
        let nothing_used = looks.first_used.is_none();
        let small_bytes_max = self.gate.small_bytes_max(self.small_bytes_max);
        let can = |name: QueueName, queue: &Queue| {
            let left = looks.all[name as usize] < LOOKS_MAX.min(2 * queue.frames + 1);
            (left && queue.frames > 0).then_some(name)
        };
        let (young, small, main) =
            (can(Young, &self.young), can(Small, &self.small), can(Main, &self.main));
        let young = young.filter(|_| nothing_used);
        // What is on the shelf has its part of the share.
        if self.small.bytes + self.shelf.bytes_of(Small) > small_bytes_max {
            small.or(main.filter(|_| nothing_used)).or(young)
        } else {
            main.or(small).or(young)
        }
    }

    /// Looks at the head of queue `name`.
    fn look(
        &mut self,
        frames: &Frames,
        name: QueueName,
        force: bool,
        looks: &mut Looks,
    ) -> Option<Victim> {
        let head = FrameIndex(self.queue(name).head);
        let gone = self.look_at(frames, head, force, looks);
        if gone.is_some() {
            self.ask_for_head(frames, name);
        }
        gone
    }

    /// Looks at a queued page: it goes, or it moves to the end of its queue or the next one, or to the shelf.
    fn look_at(
        &mut self,
        frames: &Frames,
        seat: FrameIndex,
        force: bool,
        looks: &mut Looks,
    ) -> Option<Victim> {
        let name = queue_of(frames.meta(seat));
        let verdict = self.judge(frames, name, seat, force);
        self.unlink(frames, seat);
        looks.all[name as usize] += 1;
        let stays = match verdict {
            Verdict::Evicted(frame) => return Some((frame, class_of(frames.meta(seat)))),
            Verdict::Kept(to) => {
                self.shelve(frames, to, seat);
                return None;
            }
            Verdict::Used(to) => {
                looks.first_used.get_or_insert(seat);
                to
            }
            Verdict::Busy => name,
        };
        self.push(frames, stays, seat);
        None
    }

    /// Puts a page on the shelf that goes back to `home`, if write-back keeps it still (unevictable.UN2).
    fn shelve(&mut self, frames: &Frames, home: QueueName, seat: FrameIndex) {
        self.shelf.put(frames, home, seat);
        if !unevictable::may_stay(|| Place::of(frames, seat).map(|place| place.seen)) {
            self.take_off(frames, seat);
        }
    }

    /// Puts those of `seats` that are on the shelf back into their queues (unevictable.UN4).
    pub(crate) fn unshelve(&mut self, frames: &Frames, seats: &[FrameIndex]) {
        for &seat in seats {
            if frames.meta(seat).tags() & SHELVED != 0 {
                self.take_off(frames, seat);
            }
        }
    }

    fn take_off(&mut self, frames: &Frames, seat: FrameIndex) {
        let home = self.shelf.take(frames, seat);
        self.push(frames, home, seat);
    }

    /// Goes on through the shelf, if there are strays (unevictable.UN3): what may not stay there goes back to its
    /// queue. How many pages were looked at.
    fn fetch_strays(&mut self, frames: &Frames, strays: &Strays) -> u64 {
        let mut looks = 0;
        while looks < LOOKS_MAX
            && let Some(seat) = self.shelf.next_unseen(strays)
        {
            looks += 1;
            let home = self.shelf.take(frames, seat);
            self.shelve(frames, home, seat);
        }
        looks
    }

    /// Decides about a page of queue `name`, and makes it EMPTY if it goes. `force`: also if it was
    /// read again.
    fn judge(
        &mut self,
        frames: &Frames,
        name: QueueName,
        seat: FrameIndex,
        force: bool,
    ) -> Verdict {
        let meta = frames.meta(seat);
        let Some(Place { core, leaf, page, word, seen }) = Place::of(frames, seat) else {
            return Verdict::Busy;
        };
        if frames.meta(seen.frame()).pins.is_pinned() {
            return Verdict::Busy;
        }
        let referenced = seen.is_referenced();
        let prefetched = count_prefetched(&mut self.readahead, meta, referenced);
        if referenced && !force {
            word.take_referenced();
            // The first reads of a page that read-ahead brought too early for the young queue.
            let first_use = prefetched || name == QueueName::Young;
            let to = if first_use { QueueName::Small } else { QueueName::Main };
            if name == QueueName::Small && !first_use {
                self.note_fate(meta, true);
            }
            return if seen.is_kept() { Verdict::Kept(to) } else { Verdict::Used(to) };
        }
        if !word.try_evict(seen, &core.epoch) {
            return if seen.is_kept() { Verdict::Kept(name) } else { Verdict::Busy };
        }
        // E5
        drop(Held::of_emptied(frames, core, leaf, page));
        if name != QueueName::Main {
            self.note_fate(meta, false);
            self.ghost.remember(frames.file_number(ptr::from_ref(core).cast()), page);
        }
        Verdict::Evicted(seen.frame())
    }

    /// A page leaves the queues of newcomers.
    fn note_fate(&mut self, meta: &FrameMeta, read_again: bool) {
        let tags = meta.tags();
        if tags & MISSED != 0 {
            meta.set_tags(tags & !MISSED);
            self.gate.note_fate(&mut self.fates, read_again);
        }
    }

    /// Moves pages whose first time is over to the small queue, and forgets their first reads.
    fn trim_young(&mut self, frames: &Frames) {
        while self.young.bytes > self.young_bytes_max {
            let seat = FrameIndex(self.young.head);
            if let Some(Place { word, seen, .. }) = Place::of(frames, seat)
                && seen.is_referenced()
            {
                word.take_referenced();
                count_prefetched(&mut self.readahead, frames.meta(seat), true);
            }
            self.unlink(frames, seat);
            self.push(frames, QueueName::Small, seat);
            self.ask_for_head(frames, QueueName::Young);
        }
    }

    /// Has the processor fetch what the next look at the head of a queue will want.
    fn ask_for_head(&mut self, frames: &Frames, name: QueueName) {
        let seat = FrameIndex(self.queue(name).head);
        if seat == FrameIndex::NONE {
            return;
        }
        let meta = frames.meta(seat);
        // SAFETY: as in `with_word`.
        let core = unsafe { &*meta.owner.load(Relaxed).cast::<FileCore>() };
        core.ask_for(frames, meta.page());
        let next = FrameIndex(meta.next.load(Relaxed));
        if next != FrameIndex::NONE {
            copy::ask_for_line(frames.meta(next));
        }
    }

    /// The use of read-ahead, as far as it is settled.
    pub(crate) fn readahead_use(&self) -> ReadaheadUse {
        self.readahead
    }

    fn push(&mut self, frames: &Frames, name: QueueName, seat: FrameIndex) {
        self.queue(name).push(frames, name, seat);
    }

    fn unlink(&mut self, frames: &Frames, seat: FrameIndex) {
        let meta = frames.meta(seat);
        if meta.tags() & SHELVED != 0 {
            self.shelf.take(frames, seat);
        } else {
            self.queue(queue_of(meta)).unlink(frames, seat);
        }
    }

    fn queue(&mut self, name: QueueName) -> &mut Queue {
        match name {
            QueueName::Young => &mut self.young,
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

/// Where the page is that has a queued seat.
struct Place<'f> {
    core: &'f FileCore,
    leaf: FrameIndex,
    page: PageIndex,
    word: &'f PageWord,
    /// READY, with the frame that has the seat.
    seen: Word,
}

impl<'f> Place<'f> {
    /// `None`: the page is in transition (queue_node.QN2).
    fn of(frames: &'f Frames, seat: FrameIndex) -> Option<Place<'f>> {
        let meta = frames.meta(seat);
        // SAFETY: E1: the owner of a queued seat is a live core, and we are under the lock that its
        // teardown takes first.
        let core = unsafe { &*meta.owner.load(Relaxed).cast::<FileCore>() };
        let page = meta.page();
        let (leaf, word, seen) = core.lookup_leaf(frames, page)?;
        let place = Place { core, leaf, page, word, seen };
        (seen.is_ready() && frames.seat_of(seen.frame()) == seat).then_some(place)
    }
}

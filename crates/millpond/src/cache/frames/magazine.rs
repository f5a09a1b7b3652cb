//! Magazines: free frames at hand, so that threads do not meet at the free lists (Bonwick and Adams,
//! "Magazines and Vmem", USENIX 2001).
//!
//! Each thread takes frames of pages from the magazine of its number, and frees them there; as many
//! magazines as processors, so that mostly nobody else wants its lock. A batch at a time goes between
//! it and the free list of the class. The evictor frees a batch of victims there, too: of a batch of
//! misses one takes the locks that all share.
//!
//! ```text
//!   evictor, free ----> magazine ----> try_alloc
//!                        ^   |
//!           empty: batch |   | full: batch; all: `empty_magazines`
//!                        |   v
//!                      free list of the class
//! ```
//!
//! - **MG1** A frame in a magazine is free and committed, as on the free list: it counts against the
//!   limit, its record says FREE, nothing relies on its bytes. So where a process dies, or forks, nothing
//!   is to be done about it.
//! - **MG2** A magazine takes no frame that would have to be committed for it: only for a thread that
//!   wants one now is the limit used.
//! - **MG3** All magazines together hold at most a 64th of the limit of each class; of a limit that has no room for a
//!   batch of two, none is used. What they hold is given to the free lists before anybody is refused
//!   memory for want of it, and before the limit sinks.
//! - **MG4** Frames come out in the order in which the free list gave them: pages that are filled one
//!   after the other have frames in a row (see `table`, "Guesses").
//!
//! Locks: one for each magazine; that of the class's free list is taken under it.

use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard};

use crossbeam_utils::CachePadded;

use crate::cache::frames::class::Class;
use crate::thread;
use crate::units::FrameIndex;

/// Frames that go at once between a magazine and the lists, at most. Chosen, not measured: the looks for so
/// many victims are what one hold of the queues' lock may have.
pub(crate) const BATCH_MAX: usize = 16;
/// The part of the limit that half-full magazines may hold (MG3).
const PART: u64 = 128;

/// The free frames of one class that some threads have at hand; the next one last.
pub(in crate::cache) struct Magazine {
    frames: [FrameIndex; 2 * BATCH_MAX],
    len: usize,
}

impl Default for Magazine {
    fn default() -> Magazine {
        Magazine { frames: [FrameIndex::NONE; 2 * BATCH_MAX], len: 0 }
    }
}

impl Magazine {
    /// Gives each place of `frames` a frame, in order; returns how many there are.
    pub(in crate::cache) fn take(&mut self, frames: &mut [FrameIndex]) -> usize {
        let taken = frames.len().min(self.len);
        self.len -= taken;
        let next = &self.frames[self.len..self.len + taken];
        for (place, frame) in frames.iter_mut().zip(next.iter().rev()) {
            *place = *frame;
        }
        taken
    }

    /// Of an empty one: the frames that come out next, in that order.
    pub(in crate::cache) fn load(
        &mut self,
        batch: usize,
        frames: impl Iterator<Item = FrameIndex>,
    ) {
        debug_assert!(self.len == 0 && batch <= BATCH_MAX);
        for frame in frames.take(batch) {
            self.frames[self.len] = frame;
            self.len += 1;
        }
        self.frames[..self.len].reverse();
    }

    /// Adds a frame; where there are two batches, `rest` is given all but one first.
    pub(in crate::cache) fn put(
        &mut self,
        frame: FrameIndex,
        batch: usize,
        rest: impl FnOnce(&[FrameIndex]),
    ) {
        if self.len >= 2 * batch {
            let oldest = self.len - batch;
            rest(&self.frames[..oldest]);
            self.frames.copy_within(oldest..self.len, 0);
            self.len = batch;
        }
        self.frames[self.len] = frame;
        self.len += 1;
    }

    /// All that it holds, which it does not any more.
    pub(in crate::cache) fn empty(&mut self) -> &[FrameIndex] {
        &self.frames[..std::mem::take(&mut self.len)]
    }
}

/// The magazines of one shard, by the class's place among those of pages.
pub(in crate::cache) type Shard = CachePadded<Mutex<[Magazine; Class::PAGES]>>;

pub(in crate::cache) struct Magazines {
    shards: Box<[Shard]>,
    /// Of each class of pages; 0: its frames are on the free list alone.
    batches: [AtomicU8; Class::PAGES],
}

impl Magazines {
    pub(in crate::cache) fn new(limit_bytes: u64) -> Magazines {
        let shards = (0..thread::shards()).map(|_| Shard::default()).collect();
        let magazines = Magazines { shards, batches: Default::default() };
        magazines.set_limit(limit_bytes);
        magazines
    }

    pub(in crate::cache) fn set_limit(&self, limit_bytes: u64) {
        for class in Class::all().filter(|class| class.is_page()) {
            let fit = limit_bytes / PART / self.shards.len() as u64 / class.bytes() as u64;
            let batch = if fit < 2 { 0 } else { fit.min(BATCH_MAX as u64) };
            // Relaxed: a bound that may be used late; what is over it goes as it would.
            self.batches[class.page_number()].store(batch as u8, Relaxed);
        }
    }

    /// How many frames of `class` go at once to a magazine and from it; 0: it has none.
    pub(in crate::cache) fn batch(&self, class: Class) -> usize {
        if !class.is_page() {
            return 0;
        }
        usize::from(self.batches[class.page_number()].load(Relaxed))
    }

    /// Those that the calling thread has at hand.
    pub(in crate::cache) fn mine(&self) -> MutexGuard<'_, [Magazine; Class::PAGES]> {
        Self::lock(&self.shards[thread::shard_of(self.shards.len())])
    }

    /// Calls `each` with each magazine and its class.
    pub(in crate::cache) fn for_each(&self, mut each: impl FnMut(&mut Magazine, Class)) {
        for shard in &self.shards {
            let mut shard = Self::lock(shard);
            for class in Class::all().filter(|class| class.is_page()) {
                each(&mut shard[class.page_number()], class);
            }
        }
    }

    fn lock(shard: &Shard) -> MutexGuard<'_, [Magazine; Class::PAGES]> {
        shard.lock().expect("no panic under the lock")
    }
}

//! Magazines: per-thread caches of free frames, so that threads do not contend for the free lists
//! (Bonwick and Adams, "Magazines and Vmem", USENIX 2001).
//!
//! A thread takes and frees page frames at the magazine of its number. There are as many magazines
//! as processors, so their locks are rarely contended. Frames move between a magazine and the free
//! list of the class in batches. The evictor also frees a batch of victims there, so of a batch of
//! misses one acquires the shared locks.
//!
//! ```text
//!   evictor, free ----> magazine ----> try_alloc
//!                        ^   |
//!           empty: batch |   | full: batch; all: `empty_magazines`
//!                        |   v
//!                      free list of the class
//! ```
//!
//! - **MG1** A frame in a magazine is free and committed, as on the free list: it counts against
//!   the limit, its record says FREE, and its bytes are not in use. So nothing has to be done about
//!   it when a process dies, or forks.
//! - **MG2** No memory is committed to fill a magazine: the limit is only used for a thread that
//!   needs a frame now.
//! - **MG3** All magazines together hold at most a 64th of the limit for each class. If the limit
//!   has no room for batches of two, none is used. Their frames are moved to the free lists before
//!   an allocation fails for lack of memory, and before the limit is lowered.
//! - **MG4** Frames leave a magazine in the order of the free list: pages that are filled one after
//!   the other get adjacent frames (see `table`, "Predicted frames").
//!
//! Locks: one for each magazine; the lock of the class's free list is acquired under it.

use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard};

use crossbeam_utils::CachePadded;

use crate::cache::frames::class::Class;
use crate::sync::MutexExt;
use crate::thread;
use crate::units::FrameIndex;

/// The maximum number of frames that move between a magazine and the lists at once. Untuned. The
/// scans for as many victims fit into one hold of the queues' lock.
pub(crate) const BATCH_MAX: usize = 16;
/// The part of the limit that half-full magazines may hold (MG3).
const PART: u64 = 128;

/// Free frames of one class for some threads. The next one is the last.
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
    /// Fills `frames` in order. Returns the number of frames.
    pub(in crate::cache) fn take(&mut self, frames: &mut [FrameIndex]) -> usize {
        let taken = frames.len().min(self.len);
        self.len -= taken;
        let next = &self.frames[self.len..self.len + taken];
        for (place, frame) in frames.iter_mut().zip(next.iter().rev()) {
            *place = *frame;
        }
        taken
    }

    /// Loads an empty magazine with the frames that leave it next, in that order.
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

    /// Adds a frame. If there are two batches already, all but one are passed to `rest` first.
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

    /// Empties the magazine.
    pub(in crate::cache) fn empty(&mut self) -> &[FrameIndex] {
        &self.frames[..std::mem::take(&mut self.len)]
    }
}

/// The magazines of one shard, by the index of the class among those for pages.
pub(in crate::cache) type MagazineShard = CachePadded<Mutex<[Magazine; Class::PAGES]>>;

pub(in crate::cache) struct Magazines {
    shards: Box<[MagazineShard]>,
    /// The batch size for each class of pages. 0: its frames are only on the free list.
    batches: [AtomicU8; Class::PAGES],
}

impl Magazines {
    pub(in crate::cache) fn new(limit_bytes: u64) -> Magazines {
        let shards = (0..thread::shards()).map(|_| MagazineShard::default()).collect();
        let magazines = Magazines { shards, batches: Default::default() };
        magazines.set_limit(limit_bytes);
        magazines
    }

    pub(in crate::cache) fn set_limit(&self, limit_bytes: u64) {
        for class in Class::all().filter(|class| class.is_page()) {
            let fit = limit_bytes / PART / self.shards.len() as u64 / class.bytes() as u64;
            let batch = if fit < 2 { 0 } else { fit.min(BATCH_MAX as u64) };
            // Relaxed: a bound that may take effect late; frames beyond it leave as usual.
            self.batches[class.page_number()].store(batch as u8, Relaxed);
        }
    }

    /// How many frames of `class` move to or from a magazine at once. 0: it has none.
    pub(in crate::cache) fn batch(&self, class: Class) -> usize {
        if !class.is_page() {
            return 0;
        }
        usize::from(self.batches[class.page_number()].load(Relaxed))
    }

    /// The magazines of the calling thread.
    pub(in crate::cache) fn local(&self) -> MutexGuard<'_, [Magazine; Class::PAGES]> {
        self.shards[thread::shard_of(self.shards.len())].acquire()
    }

    /// Calls `each` with each magazine and its class.
    pub(in crate::cache) fn for_each(&self, mut each: impl FnMut(&mut Magazine, Class)) {
        for shard in &self.shards {
            let mut shard = shard.acquire();
            for class in Class::all().filter(|class| class.is_page()) {
                each(&mut shard[class.page_number()], class);
            }
        }
    }
}

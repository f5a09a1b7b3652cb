//! Allocation of frames: take free frames, free them, and return memory to the system.
//!
//! Locks: one per class around its free list; under it the lock of the chunks. Only the kernel is
//! called under them.

use std::io;
use std::sync::atomic::Ordering::Relaxed;

use rustix::mm::{Advice, MprotectFlags};
use smallvec::SmallVec;

use crate::cache::frames::class::Class;
use crate::cache::frames::pin::Retiring;
use crate::cache::frames::{Frames, FreeList};
use crate::cache::table::step;
use crate::sync::MutexExt;
use crate::units::{CHUNK_BYTES, CHUNK_UNITS, FrameIndex, UNIT_SHIFT};

/// With a smaller limit (a chunk for each class), no memory is committed before its use.
const HUGE_LIMIT_BYTES_MIN: u64 = 16 << 20;
/// The same for leaves of page tables: with this limit a chunk of leaves, which maps 1 GiB of small
/// pages, is little.
const HUGE_LEAVES_LIMIT_BYTES_MIN: u64 = 128 << 20;
/// Groups that are returned together, if the cache is shared: each time, the end of clients' attempts is awaited, which
/// takes some microseconds. Chosen, not measured.
const GROUPS_TOGETHER: usize = 16;
/// The part of the limit that free leaves may keep while pages need memory.
const SPARE_PART: u64 = 256;

impl Frames {
    /// Takes a free frame, or commits another one if the limit allows it. Its bytes are
    /// unspecified, and late readers may still access them.
    pub(crate) fn try_alloc(&self, class: Class) -> Option<FrameIndex> {
        let mut frame = [FrameIndex::NONE];
        (self.try_alloc_many(class, &mut frame) == 1).then_some(frame[0])
    }

    /// [`Frames::try_alloc`] for each element of `frames`, in order. Returns the number of frames.
    pub(crate) fn try_alloc_many(&self, class: Class, frames: &mut [FrameIndex]) -> usize {
        let taken = self.take_from_magazine(class, frames);
        frames[..taken].iter().for_each(|&frame| self.prepare_for_use(frame, class));
        taken
    }

    fn pop_many(&self, free: &mut FreeList, class: Class, frames: &mut [FrameIndex]) -> usize {
        let mut taken = 0;
        while taken < frames.len()
            && let Some(frame) = self.pop(free, class)
        {
            frames[taken] = frame;
            taken += 1;
        }
        taken
    }

    /// How many frames of `class` are moved to or from the thread's magazine at once. 0: the class
    /// has none.
    pub(crate) fn batch(&self, class: Class) -> usize {
        self.magazines.batch(class)
    }

    /// Takes frames from the thread's magazine, and then from the free list, in order. Returns the
    /// number of frames.
    fn take_from_magazine(&self, class: Class, frames: &mut [FrameIndex]) -> usize {
        let batch = self.batch(class);
        if batch == 0 {
            return self.pop_many(&mut self.free_frames(class).lock(), class, frames);
        }
        let mut shard = self.magazines.local();
        let magazine = &mut shard[class.page_number()];
        let taken = magazine.take(frames);
        if taken == frames.len() {
            return taken;
        }
        let mut free = self.free_frames(class).lock();
        let listed = self.pop_many(&mut free, class, &mut frames[taken..]);
        magazine.load(batch, std::iter::from_fn(|| self.pop_committed(&mut free, class)));
        taken + listed
    }

    /// Puts unused frames into the thread's magazine, and the rest on the free list.
    fn free_to_magazine(&self, frames: &[FrameIndex], class: Class) {
        let batch = self.batch(class);
        if batch == 0 {
            return self.free_listed(frames, class);
        }
        let mut shard = self.magazines.local();
        let magazine = &mut shard[class.page_number()];
        // In this order, so that they are taken in the original one (magazine.MG4).
        for &frame in frames.iter().rev() {
            magazine.put(frame, batch, |rest| self.free_listed(rest, class));
        }
    }

    /// Moves the frames of all magazines to the free lists. Returns whether there were any.
    pub(crate) fn empty_magazines(&self) -> bool {
        let mut any = false;
        self.magazines.for_each(|magazine, class| {
            let frames = magazine.empty();
            if !frames.is_empty() {
                self.free_listed(frames, class);
                any = true;
            }
        });
        any
    }

    /// The last step of an allocation, before the first byte is written.
    pub(crate) fn prepare_for_use(&self, frame: FrameIndex, class: Class) {
        if let Some(recovery) = self.records(class) {
            recovery.free_record(frame);
        }
        // This also makes the record FREE before the first such byte (recovery.K2).
        step::begin_reuse();
    }

    /// Takes a free frame that is committed.
    fn pop_committed(&self, free: &mut FreeList, class: Class) -> Option<FrameIndex> {
        if free.warm != 0 {
            let frame = FrameIndex(free.warm);
            self.unlink_warm(free, frame, class);
            return Some(frame);
        }
        if free.fresh.is_empty() || !free.fresh_is_warm {
            return None;
        }
        let frame = FrameIndex(free.fresh.start);
        free.fresh.start += class.units();
        self.free_frames(class).take_warm(1);
        Some(frame)
    }

    fn pop(&self, free: &mut FreeList, class: Class) -> Option<FrameIndex> {
        if let Some(frame) = self.pop_committed(free, class) {
            return Some(frame);
        }
        let frames = self.group_frames(class);
        if free.cold != 0 {
            if !self.try_charge(u64::from(frames) * class.bytes() as u64) {
                return None;
            }
            let group = FrameIndex(free.cold);
            free.cold = self.queue_node(group).next.load(Relaxed);
            return Some(self.open_group(free, group, class));
        }
        let charge = u64::from(frames) * self.charge(class);
        if !self.try_charge(charge) {
            return None;
        }
        if free.fresh.is_empty() {
            self.uncharge(charge);
            self.add_chunk(free, class)?;
            if free.fresh_is_warm {
                return self.pop_committed(free, class);
            }
            if !self.try_charge(charge) {
                return None;
            }
        }
        let group = FrameIndex(free.fresh.start);
        free.fresh.start += frames * class.units();
        Some(self.open_group(free, group, class))
    }

    /// Adds a chunk to the class. `None`: address space or the system's memory is exhausted.
    fn add_chunk(&self, free: &mut FreeList, class: Class) -> Option<()> {
        // Leaves too, if a chunk of them is small compared with the cache: the word of a random
        // page is rarely in the processor's caches, and without huge pages a page-table walk is
        // added to that.
        let huge_limit_bytes_min = match class {
            Class::INNER | Class::SLAB => u64::MAX,
            Class::LEAF => HUGE_LEAVES_LIMIT_BYTES_MIN,
            _ => HUGE_LIMIT_BYTES_MIN,
        };
        let huge =
            self.limit_bytes() >= huge_limit_bytes_min && self.try_charge(self.chunk_charge(class));
        let first = self.new_chunk(class, huge)?;
        free.fresh = first..first + CHUNK_UNITS;
        free.fresh_is_warm = huge;
        if huge {
            self.free_frames(class).add_warm(CHUNK_UNITS / class.units());
            self.free_frames(class).note_warm();
        }
        Some(())
    }

    /// Takes a whole committed chunk, if half of the limit is free and the class has no free
    /// frames. Returns its first unit.
    pub(crate) fn take_chunk(&self, class: Class) -> Option<u32> {
        // Before the lock: usually there is no room, and each miss asks.
        let room = self.committed_bytes() + CHUNK_BYTES <= self.limit_bytes() / 2;
        if !room || self.limit_bytes() < HUGE_LIMIT_BYTES_MIN {
            return None;
        }
        let free = self.free_frames(class).lock();
        // After a limit was lowered and raised, chunks have cold groups, and there are as many chunks as fit.
        let has_free = free.warm != 0 || free.cold != 0;
        if has_free || !self.try_charge(self.chunk_charge(class)) {
            return None;
        }
        self.new_chunk(class, true)
    }

    /// The charge for a chunk that is committed as a whole.
    fn chunk_charge(&self, class: Class) -> u64 {
        u64::from(CHUNK_UNITS / class.units()) * self.charge(class)
    }

    /// Sets up a chunk. Returns its first unit. `huge`: it was charged as a whole. If there is no
    /// chunk, that is undone.
    fn new_chunk(&self, class: Class, huge: bool) -> Option<u32> {
        let first = self.place_chunk(class);
        if let Some(first) = first {
            // SAFETY: the chunk lies within the address range.
            let at = unsafe { self.base.add((first as usize) << UNIT_SHIFT) }.cast();
            self.huge_chunks[(first / CHUNK_UNITS) as usize].store(huge, Relaxed);
            // If the system uses huge pages by default, one touched frame would otherwise commit 2
            // MiB.
            let advice = if huge { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
            // SAFETY: our own mapping, and the advice does not change its contents. If the system
            // has no huge pages, small ones are used.
            let _ = unsafe { rustix::mm::madvise(at, CHUNK_BYTES as usize, advice) };
        } else if huge {
            self.uncharge(self.chunk_charge(class));
        }
        first
    }

    /// Makes a chunk writable, and gives it to the class. Returns its first unit.
    fn place_chunk(&self, class: Class) -> Option<u32> {
        let mut next_chunk = self.next_chunk.acquire();
        let chunk = *next_chunk;
        if chunk >= self.units / CHUNK_UNITS {
            return None;
        }
        let first = chunk * CHUNK_UNITS;
        // SAFETY: the chunk lies within the address range.
        let at = unsafe { self.base.add((first as usize) << UNIT_SHIFT) }.cast();
        let access = MprotectFlags::READ | MprotectFlags::WRITE;
        let is_set_up = match (self.records(class), self.shared()) {
            // SAFETY: our own mapping; only late readers may access the chunk yet.
            (None, None) => unsafe { rustix::mm::mprotect(at, CHUNK_BYTES as usize, access) }
                .map(|()| true)
                .map_err(io::Error::from),
            // SAFETY: as above, and nothing was ever written there.
            (Some(recovery), _) => unsafe { recovery.place(first, CHUNK_UNITS, at.cast()) },
            // SAFETY: as above.
            (None, Some(shared)) => unsafe { shared.place(first, at.cast()) },
        };
        self.is_short.store(!matches!(is_set_up, Ok(true)), Relaxed);
        // If nothing has changed, the next attempt uses the same chunk.
        *next_chunk += u32::from(is_set_up.is_ok());
        drop(next_chunk);
        if !matches!(is_set_up, Ok(true)) {
            return None;
        }
        self.free_frames(class).has_chunk.store(true, Relaxed);
        Some(first)
    }

    /// Whether eviction cannot provide a frame of `class`: the system gave no memory for its first
    /// chunk.
    pub(crate) fn has_no_memory(&self, class: Class) -> bool {
        self.is_short() && !self.free_frames(class).has_chunk()
    }

    /// Whether the system gave no memory for the last chunk.
    pub(crate) fn is_short(&self) -> bool {
        self.is_short.load(Relaxed)
    }

    /// Frees a frame that is not in use any more.
    pub(crate) fn free(&self, frame: FrameIndex, class: Class) {
        self.free_to_magazine(&[frame], class);
    }

    fn free_listed(&self, frames: &[FrameIndex], class: Class) {
        let mut free = self.free_frames(class).lock();
        frames.iter().for_each(|&frame| self.link_warm(&mut free, frame, class));
    }

    /// Frees a frame that the caller took out of a page word, now or when its last pin is dropped.
    pub(crate) fn release(&self, frame: FrameIndex, class: Class) {
        self.release_many(&mut [frame], class);
    }

    /// [`Frames::release`] for each of `frames` that is not NONE.
    pub(crate) fn release_many(&self, frames: &mut [FrameIndex], class: Class) {
        let frames = self.retire(frames, class);
        if !frames.is_empty() {
            self.free_to_magazine(frames, class);
        }
    }

    /// [`Frames::release_many`] to the free lists, from where the frames can be returned to the
    /// system.
    pub(crate) fn release_listed(&self, frames: &mut [FrameIndex], class: Class) {
        self.free_listed(self.retire(frames, class), class);
    }

    /// Returns the frames that are not pinned, which are moved to the front. The others become
    /// orphans.
    fn retire<'f>(&self, frames: &'f mut [FrameIndex], class: Class) -> &'f [FrameIndex] {
        if let Some(recovery) = self.records(class) {
            // An orphan that stayed DIRTY could outlive the next contents of the page
            // (recovery.K4).
            for frame in frames.iter().filter(|&&frame| frame != FrameIndex::NONE) {
                recovery.free_record(*frame);
            }
        }
        let retiring = Retiring::begin();
        let mut free = 0;
        for at in 0..frames.len() {
            let frame = frames[at];
            if frame != FrameIndex::NONE && retiring.try_retire(&self.meta(frame).pins) {
                frames[free] = frame;
                free += 1;
            }
        }
        &frames[..free]
    }

    /// Returns the memory of one group of free frames, not of class `keep`, to the system. False:
    /// there is none. With a `keep`, magazines are left as they are; otherwise they are emptied if
    /// necessary.
    pub(crate) fn decommit_one(&self, keep: Option<Class>) -> bool {
        self.decommit_listed(keep, 0)
            || keep.is_none() && self.empty_magazines() && self.decommit_listed(None, 0)
    }

    /// [`Frames::decommit_one`], except for a spare part: a 256th of the limit for future leaves.
    /// In a file of more than a hundred times the cache, nearly each miss adds a leaf and frees
    /// one. Without spare leaves, memory would move from leaves to pages and back, by two system
    /// calls each time, under the locks of the classes. The measurement is in `docs/benchmarks.md`.
    pub(crate) fn decommit_unspared(&self, keep: Class) -> bool {
        let spare_bytes = self.limit_bytes() / SPARE_PART;
        self.decommit_listed(Some(keep), (spare_bytes / Class::LEAF.bytes() as u64) as u32)
    }

    fn decommit_listed(&self, keep: Option<Class>, spare_leaves: u32) -> bool {
        Class::all().filter(|&class| Some(class) != keep).any(|class| {
            let frames = self.free_frames(class);
            let is_spare = class == Class::LEAF && frames.warm_frames() <= spare_leaves;
            if !frames.may_be_warm.load(Relaxed) || is_spare {
                return false;
            }
            let mut free = frames.lock();
            let clients = self.shared().map(|shared| &shared.clients).filter(|all| !all.is_empty());
            let most = if clients.is_some() { GROUPS_TOGETHER } else { 1 };
            let mut groups: SmallVec<[FrameIndex; GROUPS_TOGETHER]> = SmallVec::new();
            while groups.len() < most
                && let Some(group) = self.take_group(&mut free, class)
            {
                groups.push(group);
            }
            if groups.is_empty() {
                frames.may_be_warm.store(false, Relaxed);
                return false;
            }
            if let Some(clients) = clients {
                // shared.SH4: the groups are in no list, and the look at the attempts follows.
                drop(free);
                clients.await_quiet();
                free = frames.lock();
            }
            for group in &groups {
                self.decommit(*group, class);
                self.queue_node(*group).next.store(free.cold, Relaxed);
                free.cold = group.0;
            }
            drop(free);
            if self.shared().is_some_and(|shared| shared.is_sweep_due(groups.len() as u64)) {
                self.decommit_filled_holes();
            }
            true
        })
    }

    /// Returns shared memory of groups that are not committed to the system again, if more memory is resident than is
    /// charged: a late client has filled holes (shared.SH7), or the kernel could not split a huge page.
    pub(in crate::cache) fn decommit_filled_holes(&self) {
        let Some(shared) = self.shared() else { return };
        if shared.resident_bytes() <= self.committed_bytes() {
            return;
        }
        let mut swept = 0;
        for class in Class::all() {
            let free = self.free_frames(class).lock();
            let mut group = free.cold;
            while group != 0 {
                self.give_back(FrameIndex(group), class);
                group = self.queue_node(FrameIndex(group)).next.load(Relaxed);
                swept += 1;
            }
        }
        shared.note_sweep(swept);
    }

    /// Takes a group of committed frames that are all free, to be decommitted.
    fn take_group(&self, free: &mut FreeList, class: Class) -> Option<FrameIndex> {
        let frames = self.free_frames(class);
        let group_units = self.group_frames(class) * class.units();
        if free.fresh_is_warm {
            // The rest of a group of which some frames were taken is put on the free list.
            while !free.fresh.is_empty() && !free.fresh.start.is_multiple_of(group_units) {
                let frame = FrameIndex(free.fresh.start);
                free.fresh.start += class.units();
                frames.take_warm(1);
                self.link_warm(free, frame, class);
            }
        }
        if let Some(group) = self.take_whole_group(free, class) {
            return Some(group);
        }
        (free.fresh_is_warm && !free.fresh.is_empty()).then(|| {
            free.fresh.start += group_units;
            frames.take_warm(group_units / class.units());
            FrameIndex(free.fresh.start - group_units)
        })
    }

    /// Returns the memory of a group to the system.
    fn decommit(&self, group: FrameIndex, class: Class) {
        #[cfg(test)]
        self.decommits.fetch_add(1, Relaxed);
        let bytes = self.group_frames(class) as usize * class.bytes();
        let chunk = group.0 / CHUNK_UNITS;
        if self.huge_chunks[chunk as usize].swap(false, Relaxed) {
            let at = self.bytes(FrameIndex(chunk * CHUNK_UNITS)).cast();
            // SAFETY: our own mapping; the advice does not change its contents.
            let _ =
                unsafe { rustix::mm::madvise(at, CHUNK_BYTES as usize, Advice::LinuxNoHugepage) };
        }
        self.give_back(group, class);
        self.uncharge(bytes as u64);
    }

    /// Returns the memory of a group that is not in use to the system. Caller: holds the lock of the class.
    fn give_back(&self, group: FrameIndex, class: Class) {
        let bytes = self.group_frames(class) as usize * class.bytes();
        let at = self.bytes(group);
        // A late reader sees zeros.
        step::begin_reuse();
        // Shared memory is returned by punching a hole in the mapped file.
        let is_shared = self.records(class).is_some() || self.shared().is_some();
        let advice = if is_shared { Advice::LinuxRemove } else { Advice::LinuxDontNeed };
        debug_assert!(at.addr().is_multiple_of(self.system_page_bytes));
        // SAFETY: all frames of the group are free, so their bytes are not in use; late readers
        // find zeros (frames.W8). The group consists of whole system pages, so no other memory is
        // dropped.
        let dropped = unsafe { rustix::mm::madvise(at.cast(), bytes, advice) };
        debug_assert!(dropped.is_ok(), "{dropped:?}");
    }
}

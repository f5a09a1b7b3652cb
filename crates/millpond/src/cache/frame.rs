//! Frames: the memory of the cache, under one hard limit.
//!
//! One reservation of address space, readable from the start and never unmapped or moved: a late
//! reader that still holds the index of a frame (or of a table node) may look at it at any time
//! and finds bytes, which its validation then rejects. The reservation is cut into chunks of
//! 2 MiB, each of which belongs to one size class for good and becomes writable when it does.
//!
//! A frame is known by its [`FrameIndex`], its distance from the base in units of 4 KiB whatever
//! its class, so address and metadata are found without knowing the class.
//!
//! - **The limit.** `committed` counts what may be resident: each frame that was ever touched and
//!   not given back, the metadata of each that was ever touched, and what [`Frames::try_charge`]
//!   was told of (objects of open files, tables of range locks). It never exceeds the limit, but for
//!   what `heap` says. A free frame of one class counts until
//!   [`Frames::decommit`] returns its memory to the system for another class.
//! - **System pages** may be larger than a frame: memory is taken and given back by groups of frames
//!   (see `group`).
//! - **Huge pages.** While the limit has room for it, a chunk is charged whole and marked for
//!   huge pages; near the limit, frame by frame. Decommitting from a huge chunk first marks it as
//!   not huge, else the kernel would fill the hole again behind our back.
//! - **W8** Address space is type-stable per class; its physical memory may be replaced by zeros,
//!   which read as an EMPTY word or an absent child.
//! - **Survival.** With a keeper, chunks of pages are shared memory (see `survival`), everything
//!   else stays private. A frame's record in the keeper's tables is FREE from the time the frame
//!   left its page, at the latest before it is handed out again.
//! - **Fork.** A child of fork gets the address space and none of the memory: each frame reads as
//!   zeros there, and so does all metadata (where the system can do that, since Linux 4.14; frames that
//!   are shared with a keeper are not there at all). So its parent's cache is empty, its page words are
//!   EMPTY, its files' cores have no page size, and the parent, which fills its cache again, has it to
//!   itself. The metadata of frame 0, which is none, is marked, and tells the child
//!   ([`Frames::are_the_parents`]): operations are refused before they get here. A cached read finds no
//!   table and no size, and asks only then ([`FileCore::is_the_parents`]).
//! - **Pins.** A view raises the pin count of its frame, fences, and re-validates the page word.
//!   Who takes a frame out of its page word fences, and then finds the pin, or the viewer finds
//!   the word changed. A pinned frame that left its page is an orphan: the last pin frees it.
//!
//! Locks: one per class around its free list; leaf locks, nothing is called under them.

use std::io;
use std::ptr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64};
use std::sync::{Mutex, MutexGuard};

use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};

use crate::cache::group;
use crate::cache::page::FRAMES_MAX;
use crate::cache::pin::{Pins, Retiring};
use crate::cache::step;
#[cfg(doc)]
use crate::cache::table::FileCore;
use crate::survival::Survival;
use crate::survival::keeper::Address;

/// The unit of frame indexes, and the size of table nodes.
pub(crate) const UNIT_BYTES: usize = 4096;
pub(crate) const UNIT_SHIFT: u32 = 12;
pub(crate) const CHUNK_UNITS: u32 = 512;
const CHUNK_BYTES: u64 = CHUNK_UNITS as u64 * UNIT_BYTES as u64;
/// Room to align the base to a chunk, and for a late reader who takes the last unit for a page of
/// the largest class.
const SLACK_BYTES: usize = CHUNK_BYTES as usize + (64 << 10);
/// The five sets of a file whose dirty pages are in one leaf: see `pageset`.
const SPARE_BYTES_MIN: u64 = 512;
const SPARE_BYTES_MAX: u64 = 256 << 10;
/// Below this limit no memory is committed ahead of its use.
const HUGE_LIMIT_BYTES_MIN: u64 = 16 << 20;
/// The same for leaves of page tables.
const HUGE_LEAVES_LIMIT_BYTES_MIN: u64 = 128 << 20;

/// A frame, as its distance from the base of the reservation in units of 4 KiB. 0 is no frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub(crate) struct FrameIndex(pub(crate) u32);

impl FrameIndex {
    pub(crate) const NONE: FrameIndex = FrameIndex(0);
}

/// What a chunk's frames are for, and so their size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Class(u8);

impl Class {
    /// Inner nodes of page tables: 4 KiB.
    pub(crate) const INNER: Class = Class(0);
    /// Leaves of page tables: 4 KiB. Apart from inner nodes, as a late reader may still set
    /// REFERENCED in a word of a recycled leaf.
    pub(crate) const LEAF: Class = Class(1);
    /// Slabs of file objects: 4 KiB.
    pub(crate) const SLAB: Class = Class(2);
    /// Pages of one unit.
    pub(crate) const UNIT_PAGE: Class = Class(3);
    const COUNT: usize = 8;

    /// Pages of `1 << page_shift` bytes.
    pub(crate) fn page(page_shift: u32) -> Class {
        debug_assert!((UNIT_SHIFT..UNIT_SHIFT + 5).contains(&page_shift));
        Class((page_shift - UNIT_SHIFT) as u8 + Self::SLAB.0 + 1)
    }

    pub(crate) fn bytes(self) -> usize {
        UNIT_BYTES << self.0.saturating_sub(Self::SLAB.0 + 1)
    }

    pub(super) fn units(self) -> u32 {
        (self.bytes() / UNIT_BYTES) as u32
    }

    pub(crate) fn from_tag(tag: u8) -> Class {
        debug_assert!((tag as usize) < Self::COUNT);
        Class(tag)
    }

    pub(crate) fn tag(self) -> u8 {
        self.0
    }

    /// Whether its frames hold pages of files.
    fn is_page(self) -> bool {
        self.0 > Self::SLAB.0
    }

    fn all() -> impl Iterator<Item = Class> {
        (0..Self::COUNT as u8).map(Class)
    }
}

/// The tags of frame 0, which is none (Fork).
const MARK: u32 = 1;

/// In a frame's tags: it waits in a nest. The other low bits are the evictor's.
pub(crate) const NESTED: u32 = 1 << 7;
/// In a frame's tags: where its class stands.
pub(crate) const CLASS_SHIFT: u32 = 8;

/// What is known about a frame beside its bytes.
///
/// `owner` and `page` are written by whoever has the frame in hand, before it enters the
/// eviction queues; `next`, `previous` and `tags` belong to the evictor while the frame is in its
/// queues (under its lock) and to the free list while it is free.
pub(crate) struct FrameMeta {
    pub(crate) owner: AtomicPtr<()>,
    pub(crate) page: AtomicU64,
    pub(crate) next: AtomicU32,
    pub(crate) previous: AtomicU32,
    /// Pins of a page's frame; holds of a table node (see `table`).
    pub(crate) pins: Pins,
    pub(crate) tags: AtomicU32,
}

/// The free frames of one class.
#[derive(Default)]
pub(super) struct FreeList {
    /// Committed and free, linked by `next`; where groups are of several frames, by `previous`, too.
    pub(super) warm: u32,
    /// The first frames of groups that are not committed, linked by `next`.
    cold: u32,
    /// Groups of several frames that were all free at some time since they were committed.
    pub(super) whole: Vec<u32>,
    /// The rest of the newest chunk, never used.
    fresh: std::ops::Range<u32>,
    /// Whether the rest of the newest chunk is committed already.
    fresh_is_warm: bool,
}

/// The free frames of one class, under their lock.
#[derive(Default)]
pub(super) struct FreeFrames {
    list: Mutex<FreeList>,
    /// False: none is committed. A hint, so that who looks in vain takes no lock.
    may_be_warm: AtomicBool,
}

impl FreeFrames {
    fn lock(&self) -> MutexGuard<'_, FreeList> {
        self.list.lock().expect("no panic under the lock")
    }

    /// The caller has the lock, and has added some that are committed.
    pub(super) fn note_warm(&self) {
        if !self.may_be_warm.load(Relaxed) {
            self.may_be_warm.store(true, Relaxed);
        }
    }
}

/// The frames of an engine.
pub(crate) struct Frames {
    /// Where the reservation starts; `base` is its first whole chunk.
    mapped: *mut u8,
    base: *mut u8,
    metas: *mut FrameMeta,
    units: u32,
    /// The smallest piece that the system gives and takes back.
    pub(super) system_page_bytes: usize,
    /// Of each system page, how many of its frames are free, and LISTED; where groups are of several.
    pub(super) free_in_group: Box<[AtomicU8]>,
    limit_bytes: u64,
    /// What may be charged; the rest is for what can't be refused.
    room_bytes: u64,
    committed_bytes: AtomicU64,
    next_chunk: AtomicU32,
    huge_chunks: Box<[AtomicBool]>,
    pub(super) classes: [FreeFrames; Class::COUNT],
    /// The first units of chunks that wait for the pages of a leaf: see `nest`.
    pub(crate) nests: Mutex<Vec<u32>>,
    survival: Option<Survival>,
}

// SAFETY: the raw pointers are to mappings that live as long as the value; frames are handed to
// one owner at a time by the free lists' locks, and all metadata is atomic.
unsafe impl Send for Frames {}
// SAFETY: as above.
unsafe impl Sync for Frames {}

impl Frames {
    /// With a keeper, pages survive the death of this process.
    pub(crate) fn new(limit_bytes: u64, keeper: Option<&Address>) -> io::Result<Frames> {
        // Every class may in turn fill the limit, and chunks do not change class.
        let chunks = (limit_bytes.div_ceil(CHUNK_BYTES) + 1) * Class::COUNT as u64 + 1;
        let chunks = chunks.min(FRAMES_MAX / u64::from(CHUNK_UNITS));
        let units = chunks as u32 * CHUNK_UNITS;
        let bytes = units as usize * UNIT_BYTES;
        let system_page_bytes = group::system_page_bytes()?;
        let groups = if system_page_bytes > UNIT_BYTES { bytes / system_page_bytes } else { 0 };
        let survival =
            keeper.map(|keeper| Survival::connect(keeper, limit_bytes, units)).transpose()?;
        let fixed_bytes = survival.as_ref().map_or(0, Survival::fixed_bytes);
        let mapped = map(bytes + SLACK_BYTES, ProtFlags::READ)?;
        let base = mapped.map_addr(|at| at.next_multiple_of(CHUNK_BYTES as usize));
        let metas_bytes = units as usize * size_of::<FrameMeta>();
        let metas = map(metas_bytes, ProtFlags::READ | ProtFlags::WRITE)?;
        for (at, bytes) in [(mapped, bytes + SLACK_BYTES), (metas, metas_bytes)] {
            // Where the system can't, a child has copies, as of all other memory.
            // SAFETY: our own mapping; the advice does not change its contents here.
            let _ = unsafe { rustix::mm::madvise(at.cast(), bytes, Advice::LinuxWipeOnFork) };
        }
        // As for small chunks: it is charged frame by frame.
        // SAFETY: our own mapping; the advice does not change its contents.
        let _ = unsafe { rustix::mm::madvise(metas.cast(), metas_bytes, Advice::LinuxNoHugepage) };
        let frames = Frames {
            mapped,
            base,
            metas: metas.cast(),
            units,
            system_page_bytes,
            free_in_group: (0..groups).map(|_| AtomicU8::new(0)).collect(),
            limit_bytes,
            room_bytes: limit_bytes - spare_bytes(limit_bytes),
            committed_bytes: AtomicU64::new(fixed_bytes),
            // Chunk 0 is left out, so that index 0 is no frame.
            next_chunk: AtomicU32::new(1),
            huge_chunks: (0..chunks).map(|_| AtomicBool::new(false)).collect(),
            classes: Default::default(),
            nests: Mutex::default(),
            survival,
        };
        frames.meta(FrameIndex::NONE).tags.store(MARK, Relaxed);
        Ok(frames)
    }

    /// Whether this is a child of fork, and the frames are its parent's.
    pub(crate) fn are_the_parents(&self) -> bool {
        self.meta(FrameIndex::NONE).tags.load(Relaxed) != MARK
    }

    /// What makes dirty pages survive; `None` for an engine without a keeper.
    #[inline]
    pub(crate) fn survival(&self) -> Option<&Survival> {
        self.survival.as_ref()
    }

    /// The same, if frames of `class` are in the keeper's tables.
    #[inline]
    fn records(&self, class: Class) -> Option<&Survival> {
        self.survival.as_ref().filter(|_| class.is_page())
    }

    /// What one frame counts against the limit from its first use on. The part for its metadata,
    /// which stays resident, is never given back.
    fn charge(&self, class: Class) -> u64 {
        let record_bytes = self.records(class).map_or(0, |_| Survival::RECORD_BYTES);
        (class.bytes() + class.units() as usize * (size_of::<FrameMeta>() + record_bytes)) as u64
    }

    pub(crate) fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    pub(crate) fn committed_bytes(&self) -> u64 {
        self.committed_bytes.load(Relaxed)
    }

    /// The first byte of `frame`; `None` for an index that no frame has (a late reader can see
    /// any value).
    #[inline]
    pub(crate) fn address(&self, frame: FrameIndex) -> Option<*mut u8> {
        // SAFETY: the offset lies within the reservation.
        (frame.0 < self.units).then(|| unsafe { self.base.add((frame.0 as usize) << UNIT_SHIFT) })
    }

    /// [`Frames::address`] of `frame`, starting from a guess that costs nothing where it is wrong.
    ///
    /// `frame` comes out of a page word, which for a random page has to come from memory, and
    /// the copy would have to wait for it. Where the guess is right this is a branch on the word,
    /// not a use of its value: the processor predicts the branch and copies from the guessed frame
    /// while the word is still on its way.
    #[inline]
    pub(crate) fn address_guessed(&self, frame: FrameIndex, guess: FrameIndex) -> Option<*mut u8> {
        let Some(guessed) = self.address(guess).map(opaque) else {
            return self.address(frame);
        };
        if frame == guess { Some(opaque(guessed)) } else { self.address(frame) }
    }

    /// The first byte of a frame that the caller got from this allocator.
    #[inline]
    pub(crate) fn bytes(&self, frame: FrameIndex) -> *mut u8 {
        self.address(frame).expect("a frame of this allocator")
    }

    pub(crate) fn meta(&self, frame: FrameIndex) -> &FrameMeta {
        assert!(frame.0 < self.units);
        // SAFETY: within the mapping of metadata; all-zero bytes, which fresh memory holds, are a
        // valid FrameMeta, and its fields are atomic.
        unsafe { &*self.metas.add(frame.0 as usize) }
    }

    /// Counts `bytes` against the limit; false if they do not fit.
    pub(crate) fn try_charge(&self, bytes: u64) -> bool {
        // Relaxed: a counter; the memory it stands for is passed on under other locks.
        self.committed_bytes
            .fetch_update(Relaxed, Relaxed, |now| {
                now.checked_add(bytes).filter(|&sum| sum <= self.room_bytes)
            })
            .is_ok()
    }

    /// Counts `bytes`, whether they fit or not.
    pub(crate) fn charge_over(&self, bytes: u64) {
        self.committed_bytes.fetch_add(bytes, Relaxed);
    }

    /// Whether more is counted than [`Frames::try_charge`] would.
    pub(crate) fn is_overdrawn(&self) -> bool {
        self.committed_bytes() > self.room_bytes
    }

    pub(crate) fn uncharge(&self, bytes: u64) {
        self.committed_bytes.fetch_sub(bytes, Relaxed);
    }

    /// Takes a free frame, or commits another one if the limit allows it. The bytes are
    /// unspecified, and late readers may still be looking at them.
    pub(crate) fn try_alloc(&self, class: Class) -> Option<FrameIndex> {
        let frame = {
            let mut free = self.classes[class.0 as usize].lock();
            self.pop(&mut free, class)?
        };
        self.handed_out(frame, class);
        Some(frame)
    }

    /// [`Frames::try_alloc`] for each place of `frames`, in order; returns how many there are.
    pub(crate) fn try_alloc_many(&self, class: Class, frames: &mut [FrameIndex]) -> usize {
        let mut taken = 0;
        let mut free = self.classes[class.0 as usize].lock();
        while taken < frames.len()
            && let Some(frame) = self.pop(&mut free, class)
        {
            frames[taken] = frame;
            taken += 1;
        }
        drop(free);
        frames[..taken].iter().for_each(|&frame| self.handed_out(frame, class));
        taken
    }

    /// The last step of taking a frame, before its first byte is written.
    pub(crate) fn handed_out(&self, frame: FrameIndex, class: Class) {
        if let Some(survival) = self.records(class) {
            survival.free_record(frame);
        }
        // Also: the record is FREE before the first such byte (K2 of `survival`).
        step::begin_reuse();
    }

    fn pop(&self, free: &mut FreeList, class: Class) -> Option<FrameIndex> {
        if free.warm != 0 {
            let frame = FrameIndex(free.warm);
            self.unlink_warm(free, frame, class);
            return Some(frame);
        }
        if free.fresh.is_empty() || !free.fresh_is_warm {
            let frames = self.group_frames(class);
            if free.cold != 0 {
                if !self.try_charge(u64::from(frames) * class.bytes() as u64) {
                    return None;
                }
                let group = FrameIndex(free.cold);
                free.cold = self.meta(group).next.load(Relaxed);
                return Some(self.open_group(free, group, class));
            }
            let charge = u64::from(frames) * self.charge(class);
            if !self.try_charge(charge) {
                return None;
            }
            if free.fresh.is_empty() {
                self.uncharge(charge);
                self.add_chunk(free, class)?;
                if !free.fresh_is_warm && !self.try_charge(charge) {
                    return None;
                }
            }
            if !free.fresh_is_warm {
                let group = FrameIndex(free.fresh.start);
                free.fresh.start += frames * class.units();
                return Some(self.open_group(free, group, class));
            }
        }
        let frame = FrameIndex(free.fresh.start);
        free.fresh.start += class.units();
        Some(frame)
    }

    /// Gives the class another chunk; `None` if address space or the system's memory ran out.
    fn add_chunk(&self, free: &mut FreeList, class: Class) -> Option<()> {
        let (first, huge) = self.new_chunk(class)?;
        free.fresh = first..first + CHUNK_UNITS;
        free.fresh_is_warm = huge;
        if huge {
            self.classes[class.0 as usize].note_warm();
        }
        Some(())
    }

    /// Takes a whole chunk, committed, while half of the limit is free and the class has no free
    /// frames; its first unit.
    pub(crate) fn take_chunk(&self, class: Class) -> Option<u32> {
        let mut free = self.classes[class.0 as usize].lock();
        let room = self.committed_bytes() + CHUNK_BYTES <= self.limit_bytes / 2;
        if !room || free.warm != 0 || self.limit_bytes < HUGE_LIMIT_BYTES_MIN {
            return None;
        }
        let (first, huge) = self.new_chunk(class)?;
        if huge {
            return Some(first);
        }
        // Somebody took the room: the chunk serves as any other, after the one in use.
        let group_units = self.group_frames(class) * class.units();
        for frame in (first..first + CHUNK_UNITS).step_by(group_units as usize) {
            self.meta(FrameIndex(frame)).next.store(free.cold, Relaxed);
            free.cold = frame;
        }
        None
    }

    /// Sets up a chunk; its first unit, and whether it is committed as a whole.
    fn new_chunk(&self, class: Class) -> Option<(u32, bool)> {
        let chunks = self.units / CHUNK_UNITS;
        let chunk = self
            .next_chunk
            .fetch_update(Relaxed, Relaxed, |next| (next < chunks).then_some(next + 1))
            .ok()?;
        let first = chunk * CHUNK_UNITS;
        // SAFETY: the chunk lies within the reservation.
        let at = unsafe { self.base.add((first as usize) << UNIT_SHIFT) }.cast();
        let access = MprotectFlags::READ | MprotectFlags::WRITE;
        match self.records(class) {
            // SAFETY: our own mapping; nobody but late readers knows the chunk yet.
            None => unsafe { rustix::mm::mprotect(at, CHUNK_BYTES as usize, access) }.ok()?,
            // SAFETY: as above, and nothing was ever written there.
            Some(survival) => unsafe { survival.place(first, CHUNK_UNITS, at.cast()) }.ok()?,
        }
        let whole_charge = u64::from(CHUNK_UNITS / class.units()) * self.charge(class);
        // Leaves, too, once a chunk of them is little beside the cache: the word of a random page
        // is seldom in the processor's caches, and a walk of its page tables comes on top of that.
        let huge_limit_bytes_min = match class {
            Class::INNER | Class::SLAB => u64::MAX,
            Class::LEAF => HUGE_LEAVES_LIMIT_BYTES_MIN,
            _ => HUGE_LIMIT_BYTES_MIN,
        };
        let huge = self.limit_bytes >= huge_limit_bytes_min && self.try_charge(whole_charge);
        if huge {
            // SAFETY: our own mapping, and the advice does not change its contents. Where the
            // system has no huge pages, small ones serve.
            let _ = unsafe { rustix::mm::madvise(at, CHUNK_BYTES as usize, Advice::LinuxHugepage) };
            self.huge_chunks[chunk as usize].store(true, Relaxed);
        } else {
            // Where the system gives huge pages to everyone, one touched frame would bring 2 MiB.
            // SAFETY: as above.
            let _ =
                unsafe { rustix::mm::madvise(at, CHUNK_BYTES as usize, Advice::LinuxNoHugepage) };
        }
        Some((first, huge))
    }

    /// Puts a frame that belongs to nobody any more on its free list.
    pub(crate) fn free(&self, frame: FrameIndex, class: Class) {
        let mut free = self.classes[class.0 as usize].lock();
        self.link_warm(&mut free, frame, class);
    }

    /// Frees the frame that the caller took out of a page word, now or when its last pin goes.
    pub(crate) fn release(&self, frame: FrameIndex, class: Class) {
        if let Some(survival) = self.records(class) {
            // An orphan that stayed DIRTY could outlive the page's next contents (K4).
            survival.free_record(frame);
        }
        if Retiring::begin().try_retire(&self.meta(frame).pins) {
            self.free(frame, class);
        }
    }

    /// [`Frames::release`] for each of `frames` that is one.
    pub(crate) fn release_many(&self, frames: &mut [FrameIndex], class: Class) {
        for frame in frames.iter().filter(|&&frame| frame != FrameIndex::NONE) {
            if let Some(survival) = self.records(class) {
                survival.free_record(*frame);
            }
        }
        let retiring = Retiring::begin();
        for frame in frames.iter_mut() {
            if *frame != FrameIndex::NONE && !retiring.try_retire(&self.meta(*frame).pins) {
                *frame = FrameIndex::NONE;
            }
        }
        let mut free = self.classes[class.0 as usize].lock();
        for &frame in frames.iter().filter(|&&frame| frame != FrameIndex::NONE) {
            self.link_warm(&mut free, frame, class);
        }
    }

    /// Returns the memory of one group of free frames, not of class `keep`, to the system; false if
    /// there is none.
    pub(crate) fn decommit_one(&self, keep: Option<Class>) -> bool {
        Class::all().filter(|&class| Some(class) != keep).any(|class| {
            let frames = &self.classes[class.0 as usize];
            if !frames.may_be_warm.load(Relaxed) {
                return false;
            }
            let mut free = frames.lock();
            let group_units = self.group_frames(class) * class.units();
            if free.fresh_is_warm {
                // What is left of a group of which some were taken is as free as they may be.
                while !free.fresh.is_empty() && !free.fresh.start.is_multiple_of(group_units) {
                    let frame = FrameIndex(free.fresh.start);
                    free.fresh.start += class.units();
                    self.link_warm(&mut free, frame, class);
                }
            }
            let group = if let Some(group) = self.take_whole_group(&mut free, class) {
                group
            } else if free.fresh_is_warm && !free.fresh.is_empty() {
                free.fresh.start += group_units;
                FrameIndex(free.fresh.start - group_units)
            } else {
                frames.may_be_warm.store(false, Relaxed);
                return false;
            };
            self.decommit(group, class);
            self.meta(group).next.store(free.cold, Relaxed);
            free.cold = group.0;
            true
        })
    }

    /// Returns the memory of a group to the system.
    fn decommit(&self, group: FrameIndex, class: Class) {
        let bytes = self.group_frames(class) as usize * class.bytes();
        let chunk = group.0 / CHUNK_UNITS;
        if self.huge_chunks[chunk as usize].swap(false, Relaxed) {
            let at = self.bytes(FrameIndex(chunk * CHUNK_UNITS)).cast();
            // SAFETY: our own mapping; the advice does not change its contents.
            let _ =
                unsafe { rustix::mm::madvise(at, CHUNK_BYTES as usize, Advice::LinuxNoHugepage) };
        }
        let at = self.bytes(group);
        // A late reader sees zeros.
        step::begin_reuse();
        // Shared memory is given back by a hole in what is mapped.
        let advice = match self.records(class) {
            None => Advice::LinuxDontNeed,
            Some(_) => Advice::LinuxRemove,
        };
        debug_assert!(at.addr().is_multiple_of(self.system_page_bytes));
        // SAFETY: all frames of the group are free, so nobody relies on their bytes; late readers find
        // zeros (W8). It is of whole system pages, so the system drops nothing else.
        let dropped = unsafe { rustix::mm::madvise(at.cast(), bytes, advice) };
        debug_assert!(dropped.is_ok(), "{dropped:?}");
        self.uncharge(bytes as u64);
    }

    /// What is counted of `committed_bytes` for metadata, in an engine without a keeper: each frame
    /// that was ever committed.
    #[cfg(test)]
    pub(crate) fn metas_committed_bytes(&self) -> u64 {
        let chunks = u64::from(self.next_chunk.load(Relaxed)) - 1;
        let fresh = Class::all().map(|class| {
            let free = self.classes[class.0 as usize].lock();
            if free.fresh_is_warm { 0 } else { free.fresh.len() as u64 }
        });
        (chunks * u64::from(CHUNK_UNITS) - fresh.sum::<u64>()) * size_of::<FrameMeta>() as u64
    }

    /// Makes all frames, tables, file objects and their metadata read-only, or writable again where
    /// they were.
    #[cfg(test)]
    pub(crate) fn protect(&self, read_only: bool) {
        let used = self.next_chunk.load(Relaxed) as usize * CHUNK_BYTES as usize;
        let access = if read_only {
            MprotectFlags::READ
        } else {
            MprotectFlags::READ | MprotectFlags::WRITE
        };
        // SAFETY: our own mapping; tests call it while nobody writes.
        unsafe { rustix::mm::mprotect(self.base.cast(), used, access) }.unwrap();
        let metas_bytes = self.units as usize * size_of::<FrameMeta>();
        // SAFETY: as above.
        unsafe { rustix::mm::mprotect(self.metas.cast(), metas_bytes, access) }.unwrap();
    }
}

impl Drop for Frames {
    fn drop(&mut self) {
        let bytes = self.units as usize * UNIT_BYTES + SLACK_BYTES;
        let metas_bytes = self.units as usize * size_of::<FrameMeta>();
        // SAFETY: the mappings of `new`; `&mut self` says that nobody uses them any more.
        unsafe {
            let _ = rustix::mm::munmap(self.mapped.cast(), bytes);
            let _ = rustix::mm::munmap(self.metas.cast(), metas_bytes);
        }
    }
}

/// The same address, of which the compiler knows nothing: it can't derive it from a value that it
/// was compared with, nor turn the branch around this into a selection.
#[inline]
fn opaque(at: *mut u8) -> *mut u8 {
    at.map_addr(|mut address| {
        // SAFETY: no instruction at all.
        unsafe {
            std::arch::asm!("/* {0} */", inout(reg) address, options(nomem, nostack, preserves_flags));
        }
        address
    })
}

/// The part of the limit that is left to what can't be refused (see `heap`).
fn spare_bytes(limit_bytes: u64) -> u64 {
    (limit_bytes / 256).clamp(SPARE_BYTES_MIN, SPARE_BYTES_MAX)
}

fn map(bytes: usize, access: ProtFlags) -> io::Result<*mut u8> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new anonymous mapping at an address of the kernel's choice.
    let mapped = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), bytes, access, flags) }?;
    Ok(mapped.cast())
}

//! Frames: the memory of the cache, under one hard limit.
//!
//! The cache has one range of address space, which is readable from the start and never unmapped or
//! moved. A late reader with an old index of a frame (or of a table node) may access it at any time
//! and finds bytes, which its validation then rejects. The range is divided into chunks of 2 MiB. A
//! chunk belongs to one size class permanently, and becomes writable when it is assigned.
//!
//! A frame is identified by its [`FrameIndex`], its distance from the base in units of 4 KiB for
//! all classes. So address and metadata are found without knowing the class.
//!
//! - **The limit.** `committed` counts memory that may be resident: each frame that was ever
//!   touched and not decommitted, the metadata of each frame that was ever touched, and the bytes
//!   charged by [`Frames::try_charge`] (objects of open files, tables of range locks). It never
//!   exceeds the limit, with the exception described in `heap`. A free frame of one class counts
//!   until [`Frames::decommit_one`] returns its memory to the system for another class.
//! - **System pages** may be larger than a frame: memory is committed and decommitted in groups of
//!   frames (see `group`).
//! - **Huge pages.** If the limit has room for it, a chunk is charged as a whole and marked for
//!   huge pages. Near the limit it is charged frame by frame. Before memory of a huge chunk is
//!   decommitted, the chunk is marked as not huge; otherwise the kernel would fill the hole again.
//! - **W8** The address space is type-stable per class. Its physical memory may be replaced by
//!   zeros, which read as an EMPTY word or an absent child.
//! - **Recovery.** With a keeper, chunks of pages are shared memory (see `recovery`); all other
//!   memory stays private. The record of a frame in the keeper's tables is FREE from the time the
//!   frame left its page, at the latest before it is allocated again.
//! - **Sharing.** The memory of all classes may be shared with processes that read it: see `shared`.
//! - **Fork.** A child of fork gets the address space without the memory: each frame reads as zeros
//!   there, and so does all metadata (where the system supports it, since Linux 4.14; frames that
//!   are shared with a keeper are not mapped in the child). So in the child the parent's cache is
//!   empty, its page words are EMPTY, and its files' cores have no page size; only the parent uses
//!   the cache. The metadata of frame 0, which is not a frame, is marked, so that the child can
//!   detect this ([`Frames::are_the_parents`]): operations are refused before they get here. A
//!   cached read finds no table and no size, and checks only then ([`FileCore::is_the_parents`]).
//! - **Pins.** A view raises the pin count of its frame, fences, and checks the page word again.
//!   The retirer takes a frame out of its page word, fences, and reads the pin count. So either the
//!   retirer finds the pin, or the viewer finds the word changed. A pinned frame that left its page
//!   is an orphan: the last pin frees it.
//!
//! Locks: one per class around its free list; under it the lock of the chunks, a leaf.

pub(crate) mod class;

mod alloc;

pub(crate) mod magazine;

mod group;

mod frame_reservation;

pub(crate) mod frame_range;

pub(crate) mod pin;

pub(crate) mod slab;

mod resize;

use std::io;
use std::ops::Deref;
use std::ptr;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard};

#[cfg(test)]
use rustix::mm::MprotectFlags;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crossbeam_utils::CachePadded;

use crate::cache::frames::class::Class;
use crate::cache::frames::frame_range::FrameRange;
use crate::cache::frames::magazine::Magazines;
use crate::cache::frames::pin::Pins;
use crate::cache::policy::queue_node::QueueNode;
use crate::cache::shared::forked_ranges::ForkedRange;
use crate::cache::shared::shared_memory::SharedMemory;
#[cfg(doc)]
use crate::cache::table::FileCore;
use crate::huge_memory::MemoryChoice;
use crate::recovery::{Address, Recovery};
use crate::sync;
use crate::sync::MutexExt;
use crate::units::{CHUNK_BYTES, CHUNK_UNITS, FRAMES_MAX, FrameIndex, PageIndex, UNIT_BYTES};

/// Room to align the base to a chunk, and for a late reader that takes the last unit for a page of
/// the largest class.
const SLACK_BYTES: usize = CHUNK_BYTES as usize + (64 << 10);
/// Enough for the five sets of a file whose dirty pages are in one leaf: see `page_set`.
const SPARE_BYTES_MIN: u64 = 512;
/// Reached with a limit of 64 MiB: enough for sets with about a thousand leaves, 2 GiB of small
/// pages.
const SPARE_BYTES_MAX: u64 = 256 << 10;
/// The tags of frame 0, which is not a frame (Fork).
const MARK: u32 = 1;

/// In the tags of a queue node: its frame is in a reservation. The other low bits are the
/// evictor's.
pub(crate) const RESERVED: u32 = 1 << 7;
/// The position of the frame's class in the tags of a queue node.
pub(crate) const CLASS_SHIFT: u32 = 8;
/// Below a page's number, which has 51 bits at most.
const TAG_BITS: u32 = 13;

/// Metadata of a frame, and of a [queue node](mod@crate::cache::policy::queue_node), which usually
/// is the frame's own.
///
/// `pins` and `queue_node` belong to the frame. The other fields belong to the queue node: its page
/// is described by the thread that owns the frame, before it enters the eviction queues. The
/// evictor owns it while it is queued or UNQUEUED (under its lock), and the free list owns it while
/// its frame is free.
pub(crate) struct FrameMeta {
    pub(crate) owner: sync::AtomicPtr<()>,
    page_and_tags: sync::AtomicU64,
    pub(crate) next: AtomicU32,
    pub(crate) previous: AtomicU32,
    /// Pins of a page's frame, or holds of a table node (see `table`).
    pub(crate) pins: Pins,
    queue_node: QueueNode,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<FrameMeta>() == 32, "two to a cache line");
const _: () = assert!(PageIndex::LAST.0 >> (u64::BITS - TAG_BITS) == 0);

impl FrameMeta {
    /// The state of memory that was never written.
    #[cfg(all(test, loom))]
    pub(in crate::cache) fn fresh() -> FrameMeta {
        FrameMeta {
            owner: sync::AtomicPtr::new(ptr::null_mut()),
            page_and_tags: sync::AtomicU64::new(0),
            next: AtomicU32::new(0),
            previous: AtomicU32::new(0),
            pins: Pins::default(),
            queue_node: QueueNode::own(),
        }
    }

    pub(crate) fn page(&self) -> PageIndex {
        PageIndex(self.page_and_tags.load(Relaxed) >> TAG_BITS)
    }

    #[inline]
    pub(crate) fn tags(&self) -> u32 {
        self.page_and_tags.load(Relaxed) as u32 & ((1 << TAG_BITS) - 1)
    }

    /// Caller: no other thread writes the tags now.
    #[inline]
    pub(crate) fn set_tags(&self, tags: u32) {
        self.page_and_tags.store(self.page().0 << TAG_BITS | u64::from(tags), Relaxed);
    }

    /// Describes a queue node that the caller owns, and whose owner is stored before.
    pub(in crate::cache) fn describe(&self, page: PageIndex, tags: u32) {
        // Release: pairs with `published_tags`, so that the owner is visible with it
        // (insert_batch.IB2).
        self.page_and_tags.store(page.0 << TAG_BITS | u64::from(tags), Release);
    }

    /// The tags of a queue node that another thread may be describing.
    pub(in crate::cache) fn published_tags(&self) -> u32 {
        self.page_and_tags.load(Acquire) as u32 & ((1 << TAG_BITS) - 1)
    }

    /// Sets up a frame of a reservation. It has its own queue node.
    pub(in crate::cache) fn reserve(&self, tags: u32) {
        // Release: pairs with the claim. Argued: a frame is found by the prediction in a link that
        // is recorded after this, by a holder of that leaf; and its bytes and metadata are not in
        // use until the claim.
        self.page_and_tags.store(u64::from(tags | RESERVED), Release);
    }

    /// Takes a frame out of its reservation. Returns whether this call did it.
    pub(in crate::cache) fn claim_reserved(&self) -> bool {
        const BIT: u64 = RESERVED as u64;
        // The first read saves the write for frames that are not reserved. Argued: one RMW finds
        // the bit, with any ordering; the chunk was set up under the lock of the frames, and
        // `prepare_for_use` makes the reuse visible to late readers.
        self.tags() & RESERVED != 0 && self.page_and_tags.fetch_and(!BIT, AcqRel) & BIT != 0
    }
}

/// The free frames of one class.
#[derive(Default)]
pub(in crate::cache) struct FreeList {
    /// Committed free frames, linked by `next`; also by `previous`, if groups have several frames.
    pub(in crate::cache) warm: u32,
    /// The first frames of groups that are not committed, linked by `next`.
    pub(in crate::cache) cold: u32,
    /// Groups of several frames that were all free at some time since they were committed.
    pub(in crate::cache) whole: Vec<u32>,
    /// The unused rest of the newest chunk.
    pub(in crate::cache) fresh: std::ops::Range<u32>,
    /// Whether the rest of the newest chunk is committed already.
    pub(in crate::cache) fresh_is_warm: bool,
}

/// The free frames of one class, under their lock.
#[derive(Default)]
pub(in crate::cache) struct FreeFrames {
    list: Mutex<FreeList>,
    /// False: no free frame is committed. A hint that saves the lock.
    pub(in crate::cache) may_be_warm: AtomicBool,
    /// Whether the class has a chunk. Changed under the lock; a hint without it.
    pub(in crate::cache) has_chunk: AtomicBool,
    /// The number of committed free frames. Changed under the lock; a hint without it.
    warm_frames: AtomicU32,
    /// How often the lock was acquired.
    #[cfg(test)]
    pub(in crate::cache) lock_count: std::sync::atomic::AtomicU64,
}

impl FreeFrames {
    pub(in crate::cache) fn lock(&self) -> MutexGuard<'_, FreeList> {
        #[cfg(test)]
        self.lock_count.fetch_add(1, Relaxed);
        self.list.acquire()
    }

    /// Whether a frame of the class may become free.
    pub(in crate::cache) fn has_chunk(&self) -> bool {
        self.has_chunk.load(Relaxed)
    }

    /// The caller holds the lock, and has added committed frames.
    pub(in crate::cache) fn note_warm(&self) {
        if !self.may_be_warm.load(Relaxed) {
            self.may_be_warm.store(true, Relaxed);
        }
    }

    pub(in crate::cache) fn warm_frames(&self) -> u32 {
        self.warm_frames.load(Relaxed)
    }

    /// Counts `frames` that became committed and free. Caller: holds the lock.
    pub(in crate::cache) fn add_warm(&self, frames: u32) {
        self.warm_frames.store(self.warm_frames() + frames, Relaxed);
    }

    /// Counts `frames` that are not committed and free any more. Caller: holds the lock.
    pub(in crate::cache) fn take_warm(&self, frames: u32) {
        self.warm_frames.store(self.warm_frames() - frames, Relaxed);
    }
}

/// A source of frames: the free frames, or a cache, which evicts for them.
pub(crate) trait FrameSource {
    fn frames(&self) -> &Frames;

    /// A frame of `class`. `None`: there is none now.
    fn take_frame(&self, class: Class) -> Option<FrameIndex>;
}

/// Which memory the frames of an engine are.
#[derive(Clone, Copy)]
pub(crate) enum FrameMemory<'a> {
    Private,
    /// Pages survive the death of this process.
    Kept(&'a Address),
    /// Other processes read it (see `shared`).
    Shared(&'a MemoryChoice),
}

/// The frames of an engine.
pub(crate) struct Frames {
    /// The start of the mapping. `base` is its first whole chunk.
    mapped: *mut u8,
    range: FrameRange,
    metas: *mut FrameMeta,
    /// The unit in which memory is committed and decommitted.
    pub(in crate::cache) system_page_bytes: usize,
    /// For each system page the number of its free frames, and LISTED; if groups have several
    /// frames.
    pub(in crate::cache) free_in_group: Box<[AtomicU8]>,
    /// Relaxed: no memory is published by it.
    limit_bytes: AtomicU64,
    /// In a cache line of its own: hits read the neighbouring fields.
    committed_bytes: CachePadded<AtomicU64>,
    /// The first chunk without a class. It is incremented after a chunk has been set up.
    pub(in crate::cache) next_chunk: Mutex<u32>,
    /// Whether the system gave no memory for the last chunk. A hint.
    pub(in crate::cache) is_short: AtomicBool,
    pub(in crate::cache) huge_chunks: Box<[AtomicBool]>,
    classes: [FreeFrames; Class::COUNT],
    /// The first units of chunks that are reserved for the pages of a leaf: see
    /// `frame_reservation`.
    pub(crate) reservations: Mutex<Vec<u32>>,
    /// False: there are no reservations. A hint that saves the lock.
    pub(in crate::cache) may_have_reservations: AtomicBool,
    pub(in crate::cache) magazines: Magazines,
    recovery: Option<Arc<Recovery>>,
    shared: Option<Arc<SharedMemory>>,
    /// With shared memory.
    forked: Option<ForkedRange>,
    /// How often memory was returned to the system.
    #[cfg(test)]
    pub(crate) decommits: AtomicU64,
}

// SAFETY: the raw pointers are to mappings that live as long as the value. The locks of the free
// lists give a frame to one owner at a time, and all metadata is atomic.
unsafe impl Send for Frames {}
// SAFETY: as above.
unsafe impl Sync for Frames {}

impl Frames {
    /// A number for the file with this [`FileCore`], derived from its position. It is the same in
    /// each run of a program, as it does not depend on the addresses that the kernel chooses, and
    /// so are decisions by its hash.
    pub(crate) fn file_number(&self, core: *const ()) -> usize {
        core.addr().wrapping_sub(self.base.addr())
    }

    pub(crate) fn new(limit_bytes: u64, memory: FrameMemory<'_>) -> io::Result<Frames> {
        // Each class in turn may fill the limit, and chunks do not change their class.
        let chunks = (limit_bytes.div_ceil(CHUNK_BYTES) + 1) * Class::COUNT as u64 + 1;
        let chunks = chunks.min(FRAMES_MAX / u64::from(CHUNK_UNITS));
        let units = chunks as u32 * CHUNK_UNITS;
        let bytes = units as usize * UNIT_BYTES;
        let system_page_bytes = system_page_bytes()?;
        let groups = if system_page_bytes > UNIT_BYTES { bytes / system_page_bytes } else { 0 };
        let recovery = match memory {
            FrameMemory::Kept(keeper) => {
                Some(Arc::new(Recovery::connect(keeper, limit_bytes, units)?))
            }
            FrameMemory::Private | FrameMemory::Shared(_) => None,
        };
        let mapped = map(bytes + SLACK_BYTES, ProtFlags::READ)?;
        let base = mapped.map_addr(|at| at.next_multiple_of(CHUNK_BYTES as usize));
        let metas_bytes = units as usize * size_of::<FrameMeta>();
        let metas = map(metas_bytes, ProtFlags::READ | ProtFlags::WRITE)?;
        for (at, bytes) in [(mapped, bytes + SLACK_BYTES), (metas, metas_bytes)] {
            // If the system does not support it, a child gets copies, as of all other memory.
            // SAFETY: our own mapping; the advice does not change its contents here.
            let _ = unsafe { rustix::mm::madvise(at.cast(), bytes, Advice::LinuxWipeOnFork) };
        }
        // As for small chunks: it is charged frame by frame.
        // SAFETY: our own mapping; the advice does not change its contents.
        let _ = unsafe { rustix::mm::madvise(metas.cast(), metas_bytes, Advice::LinuxNoHugepage) };
        let fixed_bytes = recovery.as_ref().map_or(0, |recovery| recovery.fixed_bytes());
        let mut frames = Frames {
            mapped,
            // SAFETY: the reservation is readable and aligned, and stays as long as this value.
            range: unsafe { FrameRange::new(base, units) },
            metas: metas.cast(),
            system_page_bytes,
            free_in_group: (0..groups).map(|_| AtomicU8::new(0)).collect(),
            limit_bytes: AtomicU64::new(limit_bytes),
            committed_bytes: CachePadded::new(AtomicU64::new(fixed_bytes)),
            // Chunk 0 is not used, so that index 0 is not a frame.
            next_chunk: Mutex::new(1),
            is_short: AtomicBool::new(false),
            huge_chunks: (0..chunks).map(|_| AtomicBool::new(false)).collect(),
            classes: Default::default(),
            reservations: Mutex::default(),
            may_have_reservations: AtomicBool::new(false),
            magazines: Magazines::new(limit_bytes),
            recovery,
            shared: None,
            forked: None,
            #[cfg(test)]
            decommits: AtomicU64::new(0),
        };
        frames.meta(FrameIndex::NONE).set_tags(MARK);
        if let FrameMemory::Shared(choice) = memory {
            // SAFETY: the reservation, which `drop` unmaps after this.
            frames.forked = Some(unsafe { ForkedRange::add(base, bytes) }?);
            // SAFETY: the reservation was just made. It holds zeros, and stays until `drop`.
            let shared = unsafe { SharedMemory::create(choice, base, units, limit_bytes) }?;
            frames.shared = Some(Arc::new(shared));
            frames.charge_over(SharedMemory::FIXED_BYTES);
        }
        Ok(frames)
    }

    /// Whether this is a child of fork, and the frames are its parent's.
    pub(crate) fn are_the_parents(&self) -> bool {
        self.meta(FrameIndex::NONE).tags() != MARK
    }

    /// The part that makes dirty pages survive. `None`: the engine has no keeper.
    #[inline]
    pub(crate) fn recovery(&self) -> Option<&Arc<Recovery>> {
        self.recovery.as_ref()
    }

    /// The same, if frames of `class` are in the keeper's tables.
    #[inline]
    pub(in crate::cache) fn records(&self, class: Class) -> Option<&Recovery> {
        self.recovery.as_deref().filter(|_| class.is_page())
    }

    /// The memory that other processes read. `None`: it is private, or a keeper's.
    #[inline]
    pub(crate) fn shared(&self) -> Option<&Arc<SharedMemory>> {
        self.shared.as_ref()
    }

    pub(in crate::cache) fn free_frames(&self, class: Class) -> &FreeFrames {
        &self.classes[usize::from(class.tag())]
    }

    /// The bytes that one frame is charged from its first use on. The part for its metadata, which
    /// stays resident, is never uncharged.
    pub(crate) fn charge(&self, class: Class) -> u64 {
        let record_bytes = self.records(class).map_or(0, |_| Recovery::RECORD_BYTES);
        (class.bytes() + class.units() as usize * (size_of::<FrameMeta>() + record_bytes)) as u64
    }

    pub(crate) fn limit_bytes(&self) -> u64 {
        self.limit_bytes.load(Relaxed)
    }

    /// Changes the limit, up to that of [`Frames::new`], for which the address space is reserved.
    pub(in crate::cache) fn set_limit(&self, limit_bytes: u64) {
        self.limit_bytes.store(limit_bytes, Relaxed);
        self.magazines.set_limit(limit_bytes);
    }

    /// The smallest limit that has room for the charged bytes.
    pub(in crate::cache) fn limit_in_use(&self) -> u64 {
        let used = self.committed_bytes();
        // Includes at least the spare bytes of that limit.
        used + spare_bytes(2 * used)
    }

    /// The bytes that may be charged. The rest is for charges that cannot be refused.
    fn room_bytes(&self) -> u64 {
        let limit_bytes = self.limit_bytes();
        limit_bytes - spare_bytes(limit_bytes)
    }

    pub(crate) fn committed_bytes(&self) -> u64 {
        self.committed_bytes.load(Relaxed)
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

    /// The queue node of `frame`.
    #[inline]
    pub(crate) fn queue_node_of(&self, frame: FrameIndex) -> FrameIndex {
        self.meta(frame).queue_node.of(frame)
    }

    /// The metadata that is the queue node of `frame`.
    #[inline]
    pub(crate) fn queue_node(&self, frame: FrameIndex) -> &FrameMeta {
        self.meta(self.queue_node_of(frame))
    }

    /// Gives `new`, which is about to replace the frame `old` of a page, the queue node of the page.
    /// Returns the spare node of `new`, for [`Frames::set_queue_node`] (queue_node.QN1).
    #[inline]
    pub(crate) fn inherit_queue_node(&self, old: FrameIndex, new: FrameIndex) -> FrameIndex {
        self.meta(new).queue_node.inherit(new, self.queue_node_of(old))
    }

    /// Gives `frame`, which was replaced or has replaced none, the spare node.
    #[inline]
    pub(crate) fn set_queue_node(&self, frame: FrameIndex, spare: FrameIndex) {
        self.meta(frame).queue_node.set(frame, spare);
    }

    /// Charges `bytes` to the limit. False: they do not fit.
    pub(crate) fn try_charge(&self, bytes: u64) -> bool {
        let room_bytes = self.room_bytes();
        // Relaxed: a counter; the memory itself is passed on under other locks.
        self.committed_bytes
            .fetch_update(Relaxed, Relaxed, |now| {
                now.checked_add(bytes).filter(|&sum| sum <= room_bytes)
            })
            .is_ok()
    }

    /// Charges `bytes`, whether they fit or not.
    pub(crate) fn charge_over(&self, bytes: u64) {
        self.committed_bytes.fetch_add(bytes, Relaxed);
    }

    /// Whether more bytes are charged than [`Frames::try_charge`] allows.
    pub(crate) fn is_overdrawn(&self) -> bool {
        self.committed_bytes() > self.room_bytes()
    }

    pub(crate) fn uncharge(&self, bytes: u64) {
        self.committed_bytes.fetch_sub(bytes, Relaxed);
    }

    /// The part of `committed_bytes` for metadata in an engine without a keeper: of each frame that
    /// was ever committed.
    #[cfg(test)]
    pub(crate) fn metas_committed_bytes(&self) -> u64 {
        let chunks = u64::from(*self.next_chunk.acquire()) - 1;
        let fresh = Class::all().map(|class| {
            let free = self.free_frames(class).lock();
            if free.fresh_is_warm { 0 } else { free.fresh.len() as u64 }
        });
        (chunks * u64::from(CHUNK_UNITS) - fresh.sum::<u64>()) * size_of::<FrameMeta>() as u64
    }

    /// Makes all frames, tables, file objects and their metadata read-only, or writable again.
    #[cfg(test)]
    pub(crate) fn protect(&self, read_only: bool) {
        let used = *self.next_chunk.acquire() as usize * CHUNK_BYTES as usize;
        let access = if read_only {
            MprotectFlags::READ
        } else {
            MprotectFlags::READ | MprotectFlags::WRITE
        };
        // SAFETY: our own mapping; tests call it while no thread writes.
        unsafe { rustix::mm::mprotect(self.base.cast(), used, access) }.unwrap();
        let metas_bytes = self.units as usize * size_of::<FrameMeta>();
        // SAFETY: as above.
        unsafe { rustix::mm::mprotect(self.metas.cast(), metas_bytes, access) }.unwrap();
    }
}

/// Lookups need the range alone.
impl Deref for Frames {
    type Target = FrameRange;

    #[inline]
    fn deref(&self) -> &FrameRange {
        &self.range
    }
}

impl FrameSource for Frames {
    fn frames(&self) -> &Frames {
        self
    }

    fn take_frame(&self, class: Class) -> Option<FrameIndex> {
        self.try_alloc(class)
    }
}

impl Drop for Frames {
    fn drop(&mut self) {
        // A child that is forked after this maps nothing over other mappings of that range.
        drop(self.forked.take());
        let bytes = self.units as usize * UNIT_BYTES + SLACK_BYTES;
        let metas_bytes = self.units as usize * size_of::<FrameMeta>();
        // SAFETY: the mappings of `new`; `&mut self` shows that they are not in use any more.
        unsafe {
            let _ = rustix::mm::munmap(self.mapped.cast(), bytes);
            let _ = rustix::mm::munmap(self.metas.cast(), metas_bytes);
        }
    }
}

/// The part of the limit for charges that cannot be refused (see `heap`).
fn spare_bytes(limit_bytes: u64) -> u64 {
    (limit_bytes / 256).clamp(SPARE_BYTES_MIN, SPARE_BYTES_MAX)
}

fn map(bytes: usize, access: ProtFlags) -> io::Result<*mut u8> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new anonymous mapping at an address of the kernel's choice.
    let mapped = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), bytes, access, flags) }?;
    Ok(mapped.cast())
}

/// Units of the largest system page: a count fits below LISTED, and a chunk is a multiple of it.
const GROUP_UNITS_MAX: usize = 64;

#[cfg(test)]
thread_local! {
    /// System pages of engines that the thread builds. 0: the real size.
    pub(crate) static SYSTEM_PAGE_BYTES: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// The size of the system's pages. An error if groups cannot be formed of them.
fn system_page_bytes() -> io::Result<usize> {
    // SAFETY: no memory is involved.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize };
    #[cfg(test)]
    let bytes = if SYSTEM_PAGE_BYTES.get() > 0 { SYSTEM_PAGE_BYTES.get() } else { bytes };
    let units = bytes / UNIT_BYTES;
    if units.is_power_of_two() && units <= GROUP_UNITS_MAX {
        return Ok(bytes);
    }
    let what =
        format!("the system has memory pages of {bytes} bytes: 4 KiB to 256 KiB are supported");
    Err(io::Error::new(io::ErrorKind::Unsupported, what))
}

//! Counters. They cost a cached read only three adds to memory of its own thread.
//!
//! Reads are counted in a slot that belongs to the thread (plain loads and stores, no shared cache line is written).
//! Events that occur once per miss or less are counted in shared atomics. The slot also has the durations of
//! operations; of hits one in 64 is timed (`ThreadCounts::is_sampled`).
//!
//! The end of a thread adds its slot to a sum and frees it. So each living thread that has used the engine takes 9
//! KiB, which the memory limit does not count.

use std::cell::{Cell, RefCell};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicU64, compiler_fence};
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use crossbeam_utils::CachePadded;

use crate::io::transfer::{Direction, TransferCounts};
use crate::latency::Recorder;
use crate::process_local::{self, ProcessLocal};
use crate::stats::kept::HitCounts;
use crate::sync::MutexExt;
use crate::waits::ThreadWait;

pub use crate::latency::{Histogram, Latencies, LatencyKind};
pub use crate::waits::{Dump, WaitFor, Waiting};

/// The activity of an engine since it was built. Each count is of a moment of its own: if other threads work during
/// the call, counts may differ slightly.
///
/// # Examples
///
/// ```
/// use millpond::stats::Stats;
/// use millpond::{Engine, OpenOptions};
/// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("data");
/// # let options = OpenOptions::new().read(true).write(true).create(true);
///
/// let file = engine.open(&path, &options)?;
/// file.write_all_at(&[7; 4096], 0)?;
/// file.read_at(&mut [0; 100], 0)?;
/// let stats: Stats = engine.stats();
/// assert_eq!((stats.hits, stats.misses), (1, 0));
/// println!("{} of {} bytes used", stats.memory_bytes, engine.cache_bytes());
/// # Ok::<(), millpond::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Pages that were read on the lock-free hit path.
    pub hits: u64,
    /// Pages that a read did not find cached. Those of reads that bypassed the cache, as they were
    /// not worth a frame ([`Admission`](crate::Admission)), are not among `fills`.
    pub misses: u64,
    /// Pages brought into the cache, read-ahead included.
    pub fills: u64,
    /// Reads that bypassed the cache, as no page could be evicted.
    pub uncached_reads: u64,
    /// Pages that read-ahead brought and that were read. A page is counted when it is first considered for eviction,
    /// or leaves the cache: recently filled pages are not counted yet.
    pub readahead_used: u64,
    /// Pages that read-ahead brought and that left unread, or were not read until they were considered for eviction.
    pub readahead_wasted: u64,
    /// Pages evicted to make room.
    pub evictions: u64,
    /// Times a lock-free read started over, as a page had changed under its copy.
    pub hit_retries: u64,
    /// Bytes that reads and writes through this engine moved for their callers.
    pub bytes_served: u64,
    /// Bytes of those that went between the caller and the back end without being cached.
    pub bytes_passed: u64,
    /// Direct reads and writes that were not aligned, and were served all the same, as
    /// [`crate::OpenOptions::bounce`] allows.
    pub bounced: u64,
    /// Reads that were handed to the kernel with `O_DIRECT`.
    pub direct_reads: u64,
    /// Writes that were handed to the kernel with `O_DIRECT`.
    pub direct_writes: u64,
    /// Reads that were handed to the kernel without.
    pub plain_reads: u64,
    /// Writes that were handed to the kernel without.
    pub plain_writes: u64,
    /// Durations of operations, by kind: of all that miss, and of a sample of hits.
    pub latencies: Latencies,
    /// Memory in use, of the limit: frames, tables, objects of open files.
    pub memory_bytes: u64,
    /// The back end: `uring` or `threads`; with the feature `sim` also `memory`, `sim` or `null`.
    pub back_end: &'static str,
    /// The reason for that back end.
    pub back_end_reason: String,
    /// Whether the keeper died before the engine parted from it. Since then, writes go through. Earlier writes that
    /// are still dirty are lost if this process is killed.
    pub has_lost_keeper: bool,
}

impl Stats {
    pub(crate) fn with_transfers(self, counts: &TransferCounts) -> Stats {
        Stats {
            direct_reads: counts.get(Direction::Read, true),
            direct_writes: counts.get(Direction::Write, true),
            plain_reads: counts.get(Direction::Read, false),
            plain_writes: counts.get(Direction::Write, false),
            ..self
        }
    }
}

/// The counts of one thread. Only its owner writes them.
// The fields that a hit touches come first, in one cache line.
#[derive(Default)]
#[repr(C)]
pub(crate) struct ThreadCounts {
    /// Reads of one page; the next field counts the pages of longer reads.
    hits: AtomicU64,
    hits_of_several: AtomicU64,
    hit_bytes: AtomicU64,
    hit_retries: AtomicU64,
    /// Lock-free reads of several pages that were tried.
    tries_of_several: AtomicU64,
    passed_bytes: AtomicU64,
    misses: AtomicU64,
    fills: AtomicU64,
    evictions: AtomicU64,
    slow_bytes: AtomicU64,
    uncached_reads: AtomicU64,
    bounced: AtomicU64,
    /// Direct operations that were begun, and writes.
    directs: AtomicU64,
    writes: AtomicU64,
    latencies: Recorder,
    /// The record of the thread's present wait.
    pub(crate) wait: ThreadWait,
}

impl ThreadCounts {
    #[inline]
    pub(crate) fn hit(&self, bytes: u64) {
        add_owned(&self.hits, 1);
        add_owned(&self.hit_bytes, bytes);
    }

    #[inline]
    pub(crate) fn hit_several(&self, pages: u64, bytes: u64) {
        add_owned(&self.hits_of_several, pages);
        add_owned(&self.hit_bytes, bytes);
    }

    /// Whether the lock-free read of one page that begins now is to be timed. This depends on the count of such
    /// reads: one more counter would add half of the cost.
    #[inline]
    pub(crate) fn is_sampled(&self) -> bool {
        const LAST: u64 = LatencyKind::ReadHit.one_in() - 1;
        self.hits.load(Relaxed) & LAST == LAST
    }

    /// The start time of a lock-free read of several pages, if it is to be timed.
    #[inline]
    pub(crate) fn several_begins(&self) -> Option<Instant> {
        is_nth(&self.tries_of_several, LatencyKind::ReadHit.one_in()).then(Instant::now)
    }

    /// The start time of a direct operation, if it is to be timed.
    #[inline]
    pub(crate) fn direct_begins(&self) -> Option<Instant> {
        is_nth(&self.directs, LatencyKind::DirectRead.one_in()).then(Instant::now)
    }

    /// The start time of a write, if it is to be timed.
    #[inline]
    pub(crate) fn write_begins(&self) -> Option<Instant> {
        is_nth(&self.writes, LatencyKind::Write.one_in()).then(Instant::now)
    }

    /// An operation has ended; `since`: when it began, if it is timed.
    #[inline]
    pub(crate) fn took_if(&self, kind: LatencyKind, since: Option<Instant>) {
        if let Some(since) = since {
            self.took(kind, since);
        }
    }

    /// An operation has ended.
    #[cold]
    pub(crate) fn took(&self, kind: LatencyKind, since: Instant) {
        self.latencies.record(kind, since.elapsed());
    }

    /// A read or write that went past the cache as a whole.
    pub(crate) fn moved_past_cache(&self, bytes: u64) {
        self.moved_slowly(bytes);
        self.bypassed(bytes);
    }

    /// The bytes of an operation that went past the cache. [`ThreadCounts::moved_slowly`] counts its bytes as well.
    pub(crate) fn bypassed(&self, bytes: u64) {
        add_owned(&self.passed_bytes, bytes);
    }

    /// A read that found no free frame.
    pub(crate) fn read_uncached(&self) {
        add_owned(&self.uncached_reads, 1);
    }

    /// A direct transfer that used memory of the engine.
    pub(crate) fn bounced(&self) {
        add_owned(&self.bounced, 1);
    }

    pub(crate) fn missed(&self, pages: u64) {
        add_owned(&self.misses, pages);
    }

    pub(crate) fn filled(&self, pages: u64) {
        add_owned(&self.fills, pages);
    }

    pub(crate) fn evicted(&self, pages: u64) {
        add_owned(&self.evictions, pages);
    }

    /// Adds all counts to those of `total`, which no other thread changes now.
    fn add_to(&self, total: &ThreadCounts) {
        let fields: [fn(&ThreadCounts) -> &AtomicU64; 12] = [
            |counts| &counts.hits,
            |counts| &counts.hits_of_several,
            |counts| &counts.hit_bytes,
            |counts| &counts.hit_retries,
            |counts| &counts.tries_of_several,
            |counts| &counts.passed_bytes,
            |counts| &counts.misses,
            |counts| &counts.fills,
            |counts| &counts.evictions,
            |counts| &counts.slow_bytes,
            |counts| &counts.uncached_reads,
            |counts| &counts.bounced,
        ];
        fields.iter().for_each(|field| add_owned(field(total), field(self).load(Relaxed)));
        self.latencies.merge_into(&total.latencies);
    }

    /// Bytes that were read or written under a guard.
    pub(crate) fn moved_slowly(&self, bytes: u64) {
        add_owned(&self.slow_bytes, bytes);
    }

    #[cold]
    pub(crate) fn retried(&self) {
        add_owned(&self.hit_retries, 1);
    }
}

/// Adds to a counter that only the calling thread writes.
#[inline]
fn add_owned(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(n), Relaxed);
}

/// Counts one more. Returns whether it is one of `one_in`, a power of two.
#[inline]
fn is_nth(counter: &AtomicU64, one_in: u64) -> bool {
    add_owned(counter, 1);
    counter.load(Relaxed) & (one_in - 1) == 0
}

/// The counts of a thread, in lines of their own.
type CounterSlot = CachePadded<ThreadCounts>;

/// The slots of an engine.
#[derive(Default)]
struct CounterSlots {
    living: Vec<Arc<CounterSlot>>,
    /// The sum of those of ended threads.
    ended: CounterSlot,
}

impl CounterSlots {
    /// Adds the counts of a thread that ends to the sum.
    fn end(&mut self, slot: &Arc<CounterSlot>) {
        slot.add_to(&self.ended);
        self.living.retain(|living| !Arc::ptr_eq(living, slot));
    }
}

/// The counters of an engine.
pub(crate) struct Counters {
    /// Each hit reads it, so it shares no cache line with written fields.
    id: CachePadded<u64>,
    slots: Arc<Mutex<CounterSlots>>,
    /// In a child of fork, other threads of the parent may have held the lock of the slots.
    origin: ProcessLocal<()>,
    /// For threads whose thread-local storage is gone already. Adds may get lost between several
    /// such threads.
    orphan: CachePadded<ThreadCounts>,
}

thread_local! {
    static LAST: Last = const { Last { engine: Cell::new(0), slot: Cell::new(std::ptr::null()) } };
    /// Keeps the slots alive until the thread ends.
    static TAKEN: RefCell<Taken> = const { RefCell::new(Taken { slots: Vec::new(), kept: Vec::new() }) };
}

/// The engine used last by a thread; 0 is none. One variable, as in a shared library each is a call.
struct Last {
    engine: Cell<u64>,
    /// The thread's slot there.
    slot: Cell<*const ThreadCounts>,
}

impl Last {
    #[inline]
    fn slot_of(&self, engine: u64) -> Option<*const ThreadCounts> {
        (self.engine.get() == engine).then(|| self.slot.get())
    }
}

/// For `internals` alone.
pub(crate) mod kept {
    use super::ThreadCounts;

    /// A reference to a thread's counts of an engine, for callers that read so often that the look-up costs
    /// noticeably. Valid on that thread alone: elsewhere, reads go uncounted.
    #[derive(Debug, Clone, Copy)]
    pub struct HitCounts {
        pub(super) engine: u64,
        pub(super) slot: *const ThreadCounts,
    }

    impl HitCounts {
        /// Of no engine.
        pub const NONE: HitCounts = HitCounts { engine: 0, slot: std::ptr::null() };
    }
}

/// Changes the engine used last. A signal handler may read it at any moment: it finds no engine, or one with its
/// slot. Argued: the handler runs on this very thread, so the compiler's order is enough; loom has no signals.
fn set_last(engine: u64, slot: *const ThreadCounts) {
    LAST.with(|last| {
        last.engine.set(0);
        compiler_fence(SeqCst);
        last.slot.set(slot);
        compiler_fence(SeqCst);
        last.engine.set(engine);
    });
}

/// The slot of a thread at one engine.
struct TakenSlot {
    engine: u64,
    slot: Arc<CounterSlot>,
    slots: Weak<Mutex<CounterSlots>>,
    /// The process that took it.
    process: u64,
}

struct Taken {
    slots: Vec<TakenSlot>,
    /// The cells in which the thread keeps pointers to its slots.
    kept: Vec<*const Cell<HitCounts>>,
}

impl Drop for Taken {
    fn drop(&mut self) {
        set_last(0, std::ptr::null());
        for kept in self.kept.drain(..) {
            // SAFETY: the promise of the caller of `Counters::kept`.
            unsafe { &*kept }.set(HitCounts::NONE);
        }
        for taken in self.slots.drain(..) {
            if taken.process != process_local::number() {
                // The lock may be held by a thread that this child of fork does not have.
                std::mem::forget(taken);
            } else if let Some(slots) = taken.slots.upgrade() {
                slots.acquire().end(&taken.slot);
            }
        }
    }
}

impl Counters {
    pub(crate) fn new() -> Counters {
        static IDS: AtomicU64 = AtomicU64::new(1);
        Counters {
            id: CachePadded::new(IDS.fetch_add(1, Relaxed)),
            slots: Arc::default(),
            origin: ProcessLocal::new(()),
            orphan: CachePadded::default(),
        }
    }

    /// The calling thread's slot if it is cached, else a shared one. For callers that may run in a signal handler,
    /// and so can't take locks or memory.
    #[inline]
    pub(crate) fn local_if_known(&self) -> &ThreadCounts {
        match LAST.with(|last| last.slot_of(*self.id)) {
            // SAFETY: as in `mine`.
            Some(slot) => unsafe { &*slot },
            None => &self.orphan,
        }
    }

    /// The calling thread's slot.
    #[inline]
    pub(crate) fn local(&self) -> &ThreadCounts {
        if let Some(slot) = LAST.with(|last| last.slot_of(*self.id)) {
            // SAFETY: set by `find` for this engine, to a slot that this thread's `TAKEN` keeps alive until the end
            // of its thread-local storage, which resets it.
            return unsafe { &*slot };
        }
        self.find()
    }

    /// [`Counters::local`] of a thread that caches its slots.
    ///
    /// # Safety
    ///
    /// The cell is the calling thread's, and lives as long as its thread-local storage.
    #[inline]
    pub(crate) unsafe fn cell_of_thread(&self, counts: &Cell<HitCounts>) -> &ThreadCounts {
        let kept = counts.get();
        if kept.engine == *self.id {
            // SAFETY: a slot of this engine, which the thread's `TAKEN` keeps alive and whose end resets the cell;
            // ids are not used again.
            return unsafe { &*kept.slot };
        }
        self.keep(counts)
    }

    #[cold]
    fn keep(&self, counts: &Cell<HitCounts>) -> &ThreadCounts {
        let slot = self.find();
        let is_listed = TAKEN.try_with(|taken| {
            let kept = &mut taken.borrow_mut().kept;
            if !kept.contains(&std::ptr::from_ref(counts)) {
                kept.push(counts);
            }
        });
        // Else no destructor would reset the cell.
        if is_listed.is_ok() {
            counts.set(HitCounts { engine: *self.id, slot });
        }
        slot
    }

    #[cold]
    fn find(&self) -> &ThreadCounts {
        set_last(0, std::ptr::null());
        let found = TAKEN.try_with(|taken| {
            let mut taken = taken.borrow_mut();
            let slot = match taken.slots.iter().find(|taken| taken.engine == *self.id) {
                Some(taken) => Arc::clone(&taken.slot),
                None if self.origin.is_inherited() => return &raw const *self.orphan,
                None => {
                    // Slots of dropped engines are not needed any more.
                    taken.slots.retain(|taken| taken.slots.strong_count() > 0);
                    let (slot, slots) = (self.new_slot(), Arc::downgrade(&self.slots));
                    let (engine, process) = (*self.id, process_local::number());
                    taken.slots.push(TakenSlot { engine, slot: Arc::clone(&slot), slots, process });
                    slot
                }
            };
            let slot: *const ThreadCounts = &**slot;
            set_last(*self.id, slot);
            slot
        });
        match found {
            // SAFETY: the thread's `TAKEN` keeps it alive; or it is our own.
            Ok(slot) => unsafe { &*slot },
            Err(_) => &self.orphan,
        }
    }

    fn new_slot(&self) -> Arc<CounterSlot> {
        let slot = Arc::new(CounterSlot::default());
        slot.wait.is_of(rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs());
        self.slots.acquire().living.push(Arc::clone(&slot));
        slot
    }

    /// The threads that wait.
    pub(crate) fn waiting(&self) -> Vec<Waiting> {
        self.slots.acquire().living.iter().filter_map(|slot| slot.wait.snapshot()).collect()
    }

    pub(crate) fn snapshot(&self) -> Stats {
        let slots = self.slots.acquire();
        let all = || {
            let living = slots.living.iter().map(|slot| &***slot);
            living.chain([&*slots.ended, &*self.orphan])
        };
        let sum = |field: fn(&ThreadCounts) -> &AtomicU64| {
            all().map(|slot| field(slot).load(Relaxed)).sum::<u64>()
        };
        let mut latencies = Latencies::default();
        all().for_each(|slot| slot.latencies.add_to(&mut latencies));
        Stats {
            latencies,
            hits: sum(|slot| &slot.hits) + sum(|slot| &slot.hits_of_several),
            hit_retries: sum(|slot| &slot.hit_retries),
            bytes_served: sum(|slot| &slot.hit_bytes) + sum(|slot| &slot.slow_bytes),
            bytes_passed: sum(|slot| &slot.passed_bytes),
            bounced: sum(|slot| &slot.bounced),
            misses: sum(|slot| &slot.misses),
            fills: sum(|slot| &slot.fills),
            uncached_reads: sum(|slot| &slot.uncached_reads),
            evictions: sum(|slot| &slot.evictions),
            ..Stats::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_ended_threads_stay() {
        let counters = Counters::new();
        for _ in 0..4 {
            std::thread::scope(|scope| {
                let threads = [(); 3].map(|()| scope.spawn(|| counters.local().hit(10)));
                // To the end of their thread-local storage, which the scope does not wait for.
                threads.into_iter().for_each(|thread| thread.join().unwrap());
            });
        }
        counters.local().hit(10);
        let stats = counters.snapshot();
        assert_eq!((stats.hits, stats.bytes_served), (13, 130));
        assert_eq!(counters.slots.acquire().living.len(), 1, "slots of ended threads are freed");
    }

    /// Goal: neither a new thread nor a miss invalidates a cache line of threads that hit.
    /// Method: the addresses of the fields that they write, and of the fields that a hit reads and writes.
    /// Incident: a new thread wrote to the line in which each living thread counts its hits, and the counters of
    /// misses were in a line with the number that each hit compares.
    #[test]
    fn hits_lose_no_line_to_others() {
        let counters = Counters::new();
        let line_of = |at: *const u8| at.addr() / 64;
        let lines_of =
            |at: *const u8, bytes: usize| line_of(at)..=line_of(at.wrapping_add(bytes - 1));
        let counts: *const ThreadCounts = counters.local();
        let counted = lines_of(counts.cast(), size_of::<ThreadCounts>());
        let id = line_of((&raw const *counters.id).cast());
        let slots = line_of((&raw const counters.slots).cast());
        assert!(slots != id && !counted.contains(&slots) && !counted.contains(&id));
    }

    /// Goal: no slot is used after the destructors of its thread have freed it.
    /// Method: a destructor that runs later, and counts by the same cell.
    #[test]
    fn a_late_destructor_finds_no_freed_slot() {
        struct Late(Arc<Counters>);
        thread_local! {
            static COUNTS: Cell<HitCounts> = const { Cell::new(HitCounts::NONE) };
            static LATE: RefCell<Option<Late>> = const { RefCell::new(None) };
        }
        impl Late {
            fn hit(&self) {
                // SAFETY: thread-local, without a destructor.
                COUNTS.with(|counts| unsafe { self.0.cell_of_thread(counts) }.hit(1));
            }
        }
        impl Drop for Late {
            fn drop(&mut self) {
                self.hit();
            }
        }
        let counters = Arc::new(Counters::new());
        let late = Late(Arc::clone(&counters));
        std::thread::spawn(move || {
            // Registered first, its destructor runs last.
            LATE.with(|place| *place.borrow_mut() = Some(late));
            LATE.with(|place| place.borrow().as_ref().unwrap().hit());
        })
        .join()
        .unwrap();
        let slots = counters.slots.acquire();
        assert!(slots.living.is_empty());
        assert_eq!(slots.ended.hits.load(Relaxed) + counters.orphan.hits.load(Relaxed), 2);
    }

    #[test]
    fn engines_do_not_share_slots() {
        let (one, two) = (Counters::new(), Counters::new());
        one.local().hit(1);
        two.local().hit_several(2, 2);
        one.local().hit(1);
        assert_eq!((one.snapshot().hits, two.snapshot().hits), (2, 2));
    }
}

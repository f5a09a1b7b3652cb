//! Records of waits, for `Engine::dump`: the waiting thread or task, the event and the start.
//!
//! A thread that is about to wait records that in a place of its own, by plain stores. A pending task has an entry in
//! a sharded list of its engine, from its first wait to its end. A hit does none of this.
//!
//! ```text
//!   thread: sequence odd -> what, file, range, since -> sequence even      what := NOTHING at the end
//!   dump:   sequence even? -> all of it -> the same sequence? else again
//! ```
//!
//! - **WT1** Only the thread writes its place. A wait within a wait changes the event alone: the range and the start
//!   remain those of the outermost wait.
//! - **WT2** A dump shows each wait by itself as it was at one moment: its fields are of one sequence.
//!
//! Orderings: those of a sequence lock. A Release fence follows the odd number, before the words; the even number is
//! stored with Release after them. The reader's Acquire of an even number sees the words of that sequence. Its
//! Acquire fence before the second load makes that load find an odd number if the reader saw a word of a later
//! sequence. The same holds for the event, which is stored after the even number: it needs no order of its own.
//!
//! Locks: a shard's is a leaf.

use std::fmt;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crossbeam_utils::CachePadded;
use slab::Slab;

use crate::file_id::FileId;
use crate::sync::MutexExt;
use crate::sync::{AtomicU32, AtomicU64, fence};
use crate::thread;

/// The event for which an operation waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u32)]
pub enum WaitFor {
    /// A read by the device or the kernel.
    Read = 1,
    /// A write by the device or the kernel.
    Write,
    /// The kernel's sync of the file.
    Sync,
    /// A page that another thread reads or replaces.
    Page,
    /// A range of the file that another thread has locked.
    Range,
    /// Its turn to append.
    Turn,
    /// Write-back, as too many bytes are dirty or kept.
    Room,
    /// Other syncs of the same file, which began with it.
    Syncs,
    /// The end of one of the reads in flight, of which there are as many as permitted.
    Slot,
    /// A thread of the engine, for work that may take long.
    Worker,
}

impl WaitFor {
    const ALL: [WaitFor; 10] = [
        WaitFor::Read,
        WaitFor::Write,
        WaitFor::Sync,
        WaitFor::Page,
        WaitFor::Range,
        WaitFor::Turn,
        WaitFor::Room,
        WaitFor::Syncs,
        WaitFor::Slot,
        WaitFor::Worker,
    ];

    fn of(word: u32) -> Option<WaitFor> {
        WaitFor::ALL.into_iter().find(|what| *what as u32 == word)
    }
}

impl fmt::Display for WaitFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WaitFor::Read => "a read by the kernel",
            WaitFor::Write => "a write by the kernel",
            WaitFor::Sync => "a sync by the kernel",
            WaitFor::Page => "a page that another reads or replaces",
            WaitFor::Range => "a range that another has locked",
            WaitFor::Turn => "its turn to append",
            WaitFor::Room => "write-back to make room",
            WaitFor::Syncs => "syncs that began with it",
            WaitFor::Slot => "one of the reads in flight to end",
            WaitFor::Worker => "a thread of the engine",
        })
    }
}

/// An operation that waits.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiting {
    /// The event.
    pub what: WaitFor,
    /// The file: the number of its device, as `stat(2)` has it.
    pub device: u64,
    /// And of its inode.
    pub inode: u64,
    /// The first byte that is concerned.
    pub offset: u64,
    /// How many are; `u64::MAX`: to the end of the file.
    pub len: u64,
    /// The duration so far, to a few milliseconds. Of an operation with several waits in turn: of all of them.
    pub since: Duration,
    /// The kernel's number of the thread; `None`: a task, which has none.
    pub thread: Option<u32>,
    /// Distinguishes it from any other wait of this process.
    pub(crate) key: (usize, u64),
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.thread {
            Some(thread) => write!(f, "thread {thread}")?,
            None => f.write_str("a task")?,
        }
        let (major, minor) = (rustix::fs::major(self.device), rustix::fs::minor(self.device));
        write!(f, " waits for {}, {:.3} s: ", self.what, self.since.as_secs_f64())?;
        match self.len {
            u64::MAX => write!(f, "from byte {}", self.offset)?,
            len => write!(f, "{len} bytes at {}", self.offset)?,
        }
        write!(f, " of inode {} on device {major}:{minor}", self.inode)
    }
}

/// A clock that costs a few nanoseconds, and advances by milliseconds. It is the C library's: rustix's reads the
/// auxiliary vector, which ends the process under valgrind.
fn now_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is valid for the write. The call can't fail: every Linux has this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

const NOTHING: u32 = 0;

/// The record of one thread's present wait.
#[derive(Default)]
pub(crate) struct ThreadWait {
    sequence: AtomicU32,
    what: AtomicU32,
    thread: AtomicU32,
    device: AtomicU64,
    inode: AtomicU64,
    offset: AtomicU64,
    len: AtomicU64,
    since_ns: AtomicU64,
}

/// A wait of a thread, which ends with it.
pub(crate) struct ThreadWaits<'a> {
    place: &'a ThreadWait,
    outer: u32,
}

impl ThreadWait {
    /// Assigns the place to a thread.
    pub(crate) fn is_of(&self, thread: u32) {
        self.thread.store(thread, Relaxed);
    }

    pub(crate) fn begin(
        &self,
        what: WaitFor,
        id: FileId,
        offset: u64,
        len: u64,
    ) -> ThreadWaits<'_> {
        let outer = self.what.load(Relaxed);
        if outer == NOTHING {
            self.set(id, offset, len, now_ns());
        }
        // Relaxed: by the fence in `set`, a reader that loads it finds, after its own fence, that the number has been
        // odd since.
        self.what.store(what as u32, Relaxed);
        ThreadWaits { place: self, outer }
    }

    /// WT1, WT2.
    fn set(&self, id: FileId, offset: u64, len: u64, since_ns: u64) {
        let sequence = self.sequence.load(Relaxed);
        self.sequence.store(sequence.wrapping_add(1), Relaxed);
        fence(Release);
        self.device.store(id.device, Relaxed);
        self.inode.store(id.inode, Relaxed);
        self.offset.store(offset, Relaxed);
        self.len.store(len, Relaxed);
        self.since_ns.store(since_ns, Relaxed);
        self.sequence.store(sequence.wrapping_add(2), Release);
    }

    /// The present wait. Also `None` if waits begin and end all the time.
    pub(crate) fn snapshot(&self) -> Option<Waiting> {
        self.seen_within(100)
    }

    fn seen_within(&self, tries: u32) -> Option<Waiting> {
        for _ in 0..tries {
            let before = self.sequence.load(Acquire);
            let what = WaitFor::of(self.what.load(Relaxed))?;
            let since_ns = self.since_ns.load(Relaxed);
            let seen = Waiting {
                what,
                device: self.device.load(Relaxed),
                inode: self.inode.load(Relaxed),
                offset: self.offset.load(Relaxed),
                len: self.len.load(Relaxed),
                since: Duration::from_nanos(now_ns().saturating_sub(since_ns)),
                thread: Some(self.thread.load(Relaxed)),
                key: (std::ptr::from_ref(self).addr(), u64::from(before)),
            };
            fence(Acquire);
            if before.is_multiple_of(2) && self.sequence.load(Relaxed) == before {
                return Some(seen);
            }
        }
        None
    }
}

impl Drop for ThreadWaits<'_> {
    fn drop(&mut self) {
        self.place.what.store(self.outer, Relaxed);
    }
}

/// Pending tasks.
pub(crate) struct TaskWaits {
    /// Each in a cache line of its own: each user counts in it, and threads should not contend there.
    shards: [Arc<CachePadded<Shard>>; SHARDS],
}

const SHARDS: usize = 16;

type Shard = Mutex<Entries>;

#[derive(Default)]
struct Entries {
    next: u64,
    all: Slab<Entry>,
}

struct Entry {
    what: WaitFor,
    id: FileId,
    offset: u64,
    len: u64,
    since_ns: u64,
    number: u64,
}

/// A task's entry. Its drop removes it.
pub(crate) struct TaskWait {
    shard: Arc<CachePadded<Shard>>,
    at: usize,
    what: WaitFor,
}

impl Default for TaskWaits {
    fn default() -> Self {
        TaskWaits { shards: std::array::from_fn(|_| Arc::default()) }
    }
}

impl TaskWaits {
    pub(crate) fn begin(&self, what: WaitFor, id: FileId, offset: u64, len: u64) -> TaskWait {
        let shard = &self.shards[thread::shard_of(SHARDS)];
        let mut entries = shard.acquire();
        entries.next += 1;
        let entry = Entry { what, id, offset, len, since_ns: now_ns(), number: entries.next };
        let at = entries.all.insert(entry);
        drop(entries);
        TaskWait { shard: Arc::clone(shard), at, what }
    }

    pub(crate) fn snapshot(&self) -> Vec<Waiting> {
        let now_ns = now_ns();
        let mut seen = Vec::new();
        for (number, shard) in self.shards.iter().enumerate() {
            seen.extend(shard.acquire().all.iter().map(|(_, entry)| Waiting {
                what: entry.what,
                device: entry.id.device,
                inode: entry.id.inode,
                offset: entry.offset,
                len: entry.len,
                since: Duration::from_nanos(now_ns.saturating_sub(entry.since_ns)),
                thread: None,
                key: (number, entry.number),
            }));
        }
        seen
    }
}

impl TaskWait {
    /// The task goes on, and waits for another event.
    pub(crate) fn waits_for(&mut self, what: WaitFor) {
        if std::mem::replace(&mut self.what, what) != what {
            self.shard.acquire().all[self.at].what = what;
        }
    }
}

impl Drop for TaskWait {
    fn drop(&mut self) {
        let mut entries = self.shard.acquire();
        entries.all.remove(self.at);
        if entries.all.is_empty() {
            // There may have been many once.
            entries.all = Slab::new();
        }
    }
}

/// The waits of an engine: see [`Engine::dump`](crate::Engine::dump).
///
/// # Examples
///
/// ```
/// use millpond::stats::{Dump, WaitFor, Waiting};
/// use millpond::Engine;
///
/// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// let dump: Dump = engine.dump();
/// let long: Vec<&Waiting> = dump.waiting.iter().filter(|one| one.since.as_secs() > 10).collect();
/// if long.iter().any(|one| one.what == WaitFor::Sync) {
///     eprintln!("the device is slow:\n{dump}");
/// }
/// # Ok::<(), millpond::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Dump {
    /// All operations that wait, the longest first.
    pub waiting: Vec<Waiting>,
    /// Bytes that wait in the cache to be written.
    pub dirty_bytes: u64,
    /// Bytes that are being written.
    pub writeback_bytes: u64,
    /// Bytes that no sync has covered.
    pub unsynced_bytes: u64,
    /// Bytes that count against the limit.
    pub memory_bytes: u64,
    /// The limit.
    pub limit_bytes: u64,
}

impl fmt::Display for Dump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} of {} bytes used; {} dirty, {} being written, {} not synced; {} operations wait",
            self.memory_bytes,
            self.limit_bytes,
            self.dirty_bytes,
            self.writeback_bytes,
            self.unsynced_bytes,
            self.waiting.len()
        )?;
        self.waiting.iter().try_for_each(|waiting| writeln!(f, "{waiting}"))
    }
}

/// The callback for waits that take longer than a limit.
#[derive(Clone)]
pub(crate) struct Watch {
    pub(crate) limit: Duration,
    pub(crate) report: Arc<dyn Fn(&Waiting) + Send + Sync>,
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").field("limit", &self.limit).finish_non_exhaustive()
    }
}

/// WT2: a reader finds no mixture of two waits.
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;

    /// The waiting code runs on the thread that begins; otherwise loom tries fewer old values.
    fn look_beside(before: fn(&ThreadWait), wait: fn(&ThreadWait)) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let place = loom::sync::Arc::new(ThreadWait::default());
            before(&place);
            let looked_at = loom::sync::Arc::clone(&place);
            let looker = loom::thread::spawn(move || {
                if let Some(seen) = looked_at.seen_within(1) {
                    let words = [seen.inode, seen.offset, seen.len];
                    assert!(words.iter().all(|word| *word == seen.device), "{seen:?}");
                    assert_ne!(seen.device, 0, "no thread has waited for that");
                }
            });
            wait(&place);
            looker.join().unwrap();
        });
    }

    fn begin(place: &ThreadWait, one: u64) -> ThreadWaits<'_> {
        place.begin(WaitFor::Page, FileId { device: one, inode: one }, one, one)
    }

    #[test]
    fn what_is_seen_is_of_one_wait() {
        look_beside(|_| (), |place| [1, 2].into_iter().for_each(|one| drop(begin(place, one))));
    }

    #[test]
    fn what_is_seen_is_of_one_wait_or_the_next() {
        look_beside(
            |place| std::mem::forget(begin(place, 1)),
            |place| place.set(FileId { device: 2, inode: 2 }, 2, 2, 2),
        );
    }
}

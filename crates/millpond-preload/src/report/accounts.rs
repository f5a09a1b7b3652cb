//! One row for each file of a process: bytes that were served, bytes of the kernel's, and the reason.
//!
//! Used only for a report (`millpond run --explain` or `--stats`). The rows lie in memory that
//! `millpond run` shares (`layout`): so they outlive this process, even if it was killed.
//!
//! - **C1** Without a report a hit in mode back costs a look at one flag.
//! - **C2** A row is never freed, and belongs to a process and a file: its device and inode. A child of fork
//!   begins with none; one that no hook saw counts in its parent's.
//! - **C3** Counts are added atomically. Periods change under the registry's lock.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::report::layout::{self, *};
use crate::report::reason::Reason;
use crate::report::{lines, shared_files};
use crate::runtime::lock::Lock;
use crate::runtime::sys::{self, sys};

const VARIABLE: &CStr = c"MILLPOND_ACCOUNTS";

/// See the module header.
#[repr(C)]
pub struct Row {
    words: [AtomicU64; WORDS],
}

/// The mapped file; null without a report.
static FILE: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());
static ROWS: Lock<BTreeMap<(u64, u64), &'static Row>> = Lock::new(BTreeMap::new());

/// When the library is loaded: whether somebody asked.
pub fn initialise() {
    let Some(fd) = shared_files::open(VARIABLE, libc::O_RDWR) else { return };
    // A file that `shared_files` has identified, and that is not truncated.
    let mapped = sys::map(layout::FILE_BYTES as usize, libc::MAP_SHARED, fd);
    // SAFETY: the descriptor is ours.
    unsafe { sys!(libc::SYS_close, fd) };
    let Some(file) = mapped.map(|file| file.cast::<AtomicU64>()) else { return };
    // SAFETY: mapped above, and never unmapped.
    if unsafe { &*file.add(FORM) }.load(Relaxed) == FORM_MARK {
        // Release: pairs with the Acquire in `word_of_file`.
        FILE.store(file, Release);
        count(PROCESSES);
    }
}

/// Whether somebody asked.
#[inline]
pub fn is_kept() -> bool {
    // Relaxed: set before the program begins.
    !FILE.load(Relaxed).is_null()
}

/// In a forked child, which has one thread.
pub fn after_fork() {
    // SAFETY: no other thread exists.
    unsafe { ROWS.reset(BTreeMap::new()) };
    count(PROCESSES);
}

/// `index` is within [`layout::FILE_BYTES`].
fn word_of_file(index: usize) -> Option<&'static AtomicU64> {
    let file = FILE.load(Acquire);
    // SAFETY: null, or a mapping of that many bytes that is never unmapped.
    (!file.is_null()).then(|| unsafe { &*file.add(index) })
}

fn count(index: usize) {
    if let Some(word) = word_of_file(index) {
        word.fetch_add(1, Relaxed);
    }
}

/// The cache has shrunk for want of memory.
pub fn count_shrunk() {
    count(SHRUNK);
}

/// A file outside of the served directories was opened.
pub fn count_outside() {
    count(OUTSIDE);
}

/// The row of the file `id`, which was opened by `path`. In a section.
pub fn open(id: (u64, u64), path: &[u8]) -> Option<&'static Row> {
    let mut rows = ROWS.lock();
    let row = match rows.get(&id) {
        Some(row) => *row,
        None => {
            let row = Row::make(id, path)?;
            rows.insert(id, row);
            row
        }
    };
    row.add(OPENS, 1);
    Some(row)
}

/// The row of the file `id`, if it has one. In a section.
pub fn of(id: (u64, u64)) -> Option<&'static Row> {
    if is_kept() { ROWS.lock().get(&id).copied() } else { None }
}

fn now_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is ours to write.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    let now = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
    now.saturating_sub(word_of_file(START).map_or(0, |start| start.load(Relaxed)))
}

impl Row {
    fn make((device, inode): (u64, u64), path: &[u8]) -> Option<&'static Self> {
        let program = lines::program();
        let program = program.as_bytes();
        let bytes = size_of::<Self>() + path.len() + program.len();
        let units = bytes.div_ceil(UNIT_BYTES);
        let first = word_of_file(NEXT)?.fetch_add(units as u64, Relaxed);
        // The word may hold anything: other processes have the memory, too.
        let end = first.checked_add(units as u64);
        let first = first as usize;
        if end.is_none_or(|end| end > layout::FILE_BYTES / UNIT_BYTES as u64) {
            count(LOST);
            return None;
        }
        let start = std::ptr::from_ref(word_of_file(first * UNIT_BYTES / WORD_BYTES)?).cast_mut();
        // SAFETY: the units were taken above, lie within the mapping, and belong to this row. `Row` is
        // nothing but words, which are zero.
        let row = unsafe {
            let text = start.add(WORDS).cast::<u8>();
            text.copy_from_nonoverlapping(path.as_ptr(), path.len());
            text.add(path.len()).copy_from_nonoverlapping(program.as_ptr(), program.len());
            &*start.cast::<Self>()
        };
        row.set(TEXT_BYTES, path.len() as u64 | (program.len() as u64) << 32);
        row.set(PID, u64::from(std::process::id()));
        row.set(DEVICE, device);
        row.set(INODE, inode);
        row.set(OPENED_NS, now_ns());
        row.set(REASON, Reason::Once as u64);
        // Release: pairs with the end of this process, after which the row is read.
        row.words[MARK].store(ROW_MARK, Release);
        Some(row)
    }

    fn get(&self, word: usize) -> u64 {
        self.words[word].load(Relaxed)
    }

    fn set(&self, word: usize, value: u64) {
        self.words[word].store(value, Relaxed);
    }

    fn add(&self, word: usize, value: u64) {
        self.words[word].fetch_add(value, Relaxed);
    }

    /// A read that was served.
    pub fn read(&self, bytes: usize, is_hit: bool) {
        self.add(if is_hit { HITS } else { MISSES }, 1);
        self.add(READ_SERVED, bytes as u64);
    }

    /// A write that was served.
    pub fn written(&self, bytes: usize) {
        self.add(WRITTEN_SERVED, bytes as u64);
    }

    /// The result of a call of the kernel's.
    pub fn passed(&self, result: isize, writes: bool) {
        if let Ok(bytes) = u64::try_from(result) {
            self.add(if writes { WRITTEN_PASSED } else { READ_PASSED }, bytes);
        }
    }

    /// The kernel has it, or keeps it.
    pub fn left(&self, reason: Reason) {
        self.set(REASON, reason as u64);
    }

    /// One description more is served. The registry is locked.
    pub fn begin(&self) {
        if self.words[SERVED_NOW].fetch_add(1, Relaxed) == 0 {
            let period = self.period(self.words[ADOPTIONS].fetch_add(1, Relaxed));
            // Before it begins: it has no end.
            self.set(period + 1, 0);
            self.set(period, now_ns());
        }
    }

    /// One description less is: handed to the kernel, or closed. The registry is locked.
    pub fn end(&self, reason: Option<Reason>) {
        if let Some(reason) = reason {
            self.left(reason);
        }
        if self.words[SERVED_NOW].fetch_sub(1, Relaxed) == 1 {
            let period = self.period(self.get(ADOPTIONS) - 1);
            self.set(period + 2, reason.map_or(CLOSED, |reason| reason as u64));
            self.set(period + 1, now_ns().max(1));
        }
    }

    /// Where the words of that period are; the last ones share a place.
    fn period(&self, number: u64) -> usize {
        PERIODS + (number as usize).min(PERIODS_MAX - 1) * PERIOD_WORDS
    }
}

//! The state of each descriptor number.
//!
//! ```text
//! UNSEEN   opened where no hook saw it, inherited, or after a fork: its offset is the kernel's
//! OPENED   opened by a hook; its reads are counted
//! KERNEL   not a regular file: the program's own calls, and nothing else
//! FILE     a regular file with an inode
//!
//! open -> OPENED -> KERNEL or FILE          UNSEEN -> KERNEL or FILE          close -> UNSEEN
//! ```
//!
//! The state has a generation, which rises with each open and close: a read that finds the same state after its
//! copy has read the file that the number stood for.
//!
//! The table lies in memory that the kernel zeroes in a child of fork: there each number is UNSEEN.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize};

use crate::files::identity::{self, Identity};
use crate::page_cache::inodes::{self, Entry, Mapped};
use crate::report::accounts::{self, Row};
use crate::report::counts;
use crate::report::reason::Reason;
use crate::runtime::sys::sys;
use crate::runtime::{config, libc_calls, link, section};

/// Numbers from here on are the kernel's.
pub const NUMBERS: usize = 1 << 16;
/// After so many reads a file is mapped: the mapping costs as much as 30 to 60 small reads save.
pub const READS: u32 = 64;

pub const UNSEEN: u64 = 0;
pub const OPENED: u64 = 1;
pub const KERNEL: u64 = 2;
pub const FILE: u64 = 3;
const KIND: u64 = 0xFF;
const GENERATION: u64 = 0x100;

/// Each write goes to the end of the file (`O_APPEND`).
pub const APPENDS: u32 = 2;
/// Where a write goes is not known: the flags have changed.
pub const IS_AMBIGUOUS: u32 = 4;
/// Reads may not be served from a mapping.
pub const IS_UNMAPPED: u32 = 8;
/// Exec closes the number.
pub const CLOSES: u32 = 16;
/// `IS_UNMAPPED` was decided.
pub const IS_ASKED: u32 = 32;
/// Its row in the report was looked for; only with a report.
const IS_IN_REPORT: u32 = 64;
/// It is not a file in the served directories, so its bytes are in no count.
pub const IS_OUTSIDE: u32 = 128;

/// An offset's word (see `position`) that says that the description may be another process's too. A child of fork finds
/// it in its zeroed table.
pub const SHARED: u64 = 0;
/// An offset's word that says that the kernel has it.
pub const UNKNOWN: u64 = 1;

/// See the module header.
#[repr(C, align(64))]
pub struct Number {
    state: AtomicU64,
    entry: AtomicPtr<Entry>,
    /// See `position`.
    pub offset: AtomicU64,
    flags: AtomicU32,
    reads: AtomicU32,
    row: AtomicPtr<Row>,
    /// Bytes that count as passed to the kernel, until it is known to be outside.
    passed: AtomicU64,
}

#[repr(C, align(4096))]
struct NumberTable {
    numbers: [Number; NUMBERS],
}

static TABLE: NumberTable = NumberTable { numbers: [const { Number::new() }; NUMBERS] };
/// One more than the highest number that was not UNSEEN, in any ancestor too.
static USED: AtomicUsize = AtomicUsize::new(0);
static IS_EAGER: AtomicBool = AtomicBool::new(false);
static IS_ON: AtomicBool = AtomicBool::new(false);

/// Whether files are read from the kernel's page cache.
#[inline(always)]
pub fn is_on() -> bool {
    IS_ON.load(Relaxed)
}

/// Whether they were until now.
pub fn turn_off() -> bool {
    IS_ON.swap(false, Relaxed)
}

impl Number {
    const fn new() -> Number {
        Number {
            state: AtomicU64::new(UNSEEN),
            entry: AtomicPtr::new(std::ptr::null_mut()),
            offset: AtomicU64::new(SHARED),
            flags: AtomicU32::new(0),
            reads: AtomicU32::new(0),
            row: AtomicPtr::new(std::ptr::null_mut()),
            passed: AtomicU64::new(0),
        }
    }

    /// The number's next life begins.
    fn reset(&self, flags: u32, offset: u64) {
        self.flags.store(flags, Relaxed);
        self.offset.store(offset, Relaxed);
        self.reads.store(0, Relaxed);
        self.row.store(std::ptr::null_mut(), Relaxed);
        self.passed.store(0, Relaxed);
    }

    /// Its state, which changes with each open and close.
    #[inline(always)]
    pub fn state(&self) -> u64 {
        // Acquire: pairs with the Release of the change to FILE, for the inode.
        self.state.load(Acquire)
    }

    /// The inode of a number that is a FILE.
    #[inline(always)]
    pub fn entry(&self) -> Option<&'static Entry> {
        // SAFETY: null, or an entry, which is never freed.
        unsafe { self.entry.load(Relaxed).as_ref() }
    }

    #[inline(always)]
    pub fn has(&self, flag: u32) -> bool {
        self.flags.load(Relaxed) & flag != 0
    }

    pub fn set(&self, flag: u32) {
        self.flags.fetch_or(flag, Relaxed);
    }

    pub fn unset(&self, flag: u32) {
        self.flags.fetch_and(!flag, Relaxed);
    }

    /// Counts a read. Whether there were enough for the library to look at the file.
    #[inline(always)]
    pub fn count_read(&self) -> bool {
        // Additions of other threads may be lost.
        let reads = self.reads.load(Relaxed) + 1;
        self.reads.store(reads, Relaxed);
        reads >= READS || IS_EAGER.load(Relaxed)
    }

    /// The kernel has moved so many bytes. Additions of other threads may be lost.
    #[inline(always)]
    pub fn note_passed(&self, bytes: u64) {
        self.passed.store(self.passed.load(Relaxed) + bytes, Relaxed);
    }

    /// It turns out to be outside: its bytes have never counted.
    fn leave_uncounted(&self) {
        self.set(IS_OUTSIDE);
        counts::uncount_bytes_passed(Reason::Once, self.passed.swap(0, Relaxed));
    }

    /// Whether no read is beside a change by this thread (P1).
    pub fn changes_alone(&self) -> bool {
        kind(self.state()) == OPENED && libc_calls::is_single_threaded()
    }

    pub fn row(&self) -> Option<&'static Row> {
        // SAFETY: null, or a row, which is never freed.
        unsafe { self.row.load(Relaxed).as_ref() }
    }
}

/// The state of a number's next life.
fn next_state(state: u64, kind: u64) -> u64 {
    ((state & !KIND) + GENERATION) | kind
}

#[inline(always)]
pub fn kind(state: u64) -> u64 {
    state & KIND
}

#[inline(always)]
pub fn get(fd: RawFd) -> Option<&'static Number> {
    TABLE.numbers.get(fd as usize)
}

/// The table's whole pages.
pub fn memory() -> (*const std::ffi::c_void, usize) {
    ((&raw const TABLE).cast(), size_of::<NumberTable>())
}

/// When the library is loaded.
pub fn initialise() {
    const WIPE_ON_FORK: usize = 18;
    // SAFETY: advice about a static of the library's, page-aligned and a whole number of pages long.
    unsafe { sys!(libc::SYS_madvise, &raw const TABLE, size_of::<NumberTable>(), WIPE_ON_FORK) };
    IS_EAGER.store(config::get().is_eager, Relaxed);
    IS_ON.store(true, Relaxed);
}

/// All numbers that may be known.
pub fn all() -> impl Iterator<Item = (RawFd, &'static Number)> {
    let used = USED.load(Relaxed).min(NUMBERS);
    TABLE.numbers[..used].iter().enumerate().map(|(fd, number)| (fd as RawFd, number))
}

fn use_number(fd: RawFd) {
    if USED.load(Relaxed) <= fd as usize {
        USED.fetch_max(fd as usize + 1, Relaxed);
    }
}

/// The program has opened `fd` by a hook, with `flags`.
pub fn note_open(fd: RawFd, flags: i32) {
    let Some(number) = get(fd) else { return };
    forget_closed(fd);
    use_number(fd);
    number.reset(if flags & libc::O_CLOEXEC != 0 { CLOSES } else { 0 }, UNKNOWN);
    let state = number.state.load(Relaxed);
    let is_other = flags & (libc::O_PATH | libc::O_DIRECTORY) != 0;
    let kind = if is_other && flags & libc::O_TMPFILE != libc::O_TMPFILE { KERNEL } else { OPENED };
    number.state.store(next_state(state, kind), Release);
    if flags & libc::O_TRUNC != 0 && inodes::are_any() && kind == OPENED {
        // Reads from a mapping know a size that is no more.
        section::run(|_| {
            if identify(fd, number) == FILE
                && let Some(entry) = number.entry()
            {
                entry.inode.note_cut(0);
            }
        });
    }
}

/// The number is closed. Before the kernel closes it (P2).
#[inline]
pub fn forget_closed(fd: RawFd) {
    let Some(number) = get(fd) else { return };
    let state = number.state();
    match kind(state) {
        UNSEEN => {}
        FILE => forget_file(fd, number),
        _ => {
            number.offset.store(SHARED, Relaxed);
            // A lost race means that another thread has identified the file.
            let next = next_state(state, UNSEEN);
            if number.state.compare_exchange(state, next, AcqRel, Relaxed).is_err() {
                forget_file(fd, number);
            }
        }
    }
}

#[cold]
fn forget_file(fd: RawFd, number: &'static Number) {
    section::run(|_| {
        let mut inodes = inodes::lock();
        let state = number.state.load(Relaxed);
        number.offset.store(SHARED, Relaxed);
        number.state.store(next_state(state, UNSEEN), Release);
        if kind(state) == FILE
            && let Some(entry) = number.entry()
        {
            inodes.release(entry, fd);
        }
    });
}

pub fn forget_range(first: u32, last: u32) {
    for (fd, _) in all().filter(|(fd, _)| (first..=last).contains(&(*fd as u32))) {
        forget_closed(fd);
    }
}

/// The program changes the status flags of the description at `fd`, or of the number.
pub fn note_flags_changed(fd: RawFd, command: i32, arg: usize) {
    let Some(number) = get(fd) else { return };
    match command {
        libc::F_SETFD if arg & libc::FD_CLOEXEC as usize != 0 => number.set(CLOSES),
        libc::F_SETFD => number.unset(CLOSES),
        libc::F_SETFL if kind(number.state()) == FILE => {
            let flags = identity::status_flags(fd);
            if (flags ^ arg as i32) & (libc::O_APPEND | libc::O_DIRECT) != 0 {
                number.set(IS_AMBIGUOUS | IS_UNMAPPED);
            }
        }
        _ => {}
    }
}

/// Looks what `fd` is. Its kind from then on. In a section.
pub fn identify(fd: RawFd, number: &'static Number) -> u64 {
    let state = number.state();
    if matches!(kind(state), KERNEL | FILE) {
        return kind(state);
    }
    let Some(identity) = identity::identify(fd) else { return kind(state) };
    use_number(fd);
    if !identity.is_regular {
        let next = state & !KIND | KERNEL;
        let is_new = number.state.compare_exchange(state, next, AcqRel, Relaxed).is_ok();
        if is_new && kind(state) == OPENED {
            number.leave_uncounted();
        }
        return KERNEL;
    }
    let flags = identity::status_flags(fd).max(0);
    let mut inodes = inodes::lock();
    let entry = inodes.find_or_make(identity.id);
    if kind(state) == UNSEEN {
        number.reset(0, SHARED);
    }
    number.entry.store(std::ptr::from_ref(entry).cast_mut(), Relaxed);
    if flags & libc::O_APPEND != 0 {
        number.set(APPENDS);
    }
    if flags & libc::O_DIRECT != 0 || flags & libc::O_ACCMODE == libc::O_WRONLY {
        number.set(IS_UNMAPPED | IS_ASKED);
    }
    add_to_report(fd, number, &identity);
    let next = state & !KIND | FILE;
    // AcqRel: pairs with the Acquire in `state`.
    if number.state.compare_exchange(state, next, AcqRel, Relaxed).is_err() {
        // The number was closed, or is another file's.
        inodes.release(entry, -1);
        return kind(number.state());
    }
    FILE
}

/// Gives the number a row in the report, if there is one. In a section.
///
/// A report changes neither when a number is identified nor when its file is mapped: so a number gets its row by its first read
/// or write, in any state.
fn add_to_report(fd: RawFd, number: &Number, identity: &Identity) {
    if !accounts::is_kept() || number.has(IS_IN_REPORT) {
        return;
    }
    number.set(IS_IN_REPORT);
    let path = &mut [0; libc::PATH_MAX as usize];
    let path = link::path_of(fd, path);
    if !identity.is_regular {
        return;
    }
    if path.is_empty() || !config::is_served_path(path) {
        return accounts::count_outside();
    }
    let row = accounts::open(identity.id, path).map_or(std::ptr::null(), std::ptr::from_ref);
    number.row.store(row.cast_mut(), Relaxed);
}

/// The row of a number that may be OPENED, with a report.
#[cold]
#[inline(never)]
pub fn find_row(fd: RawFd, number: &Number) -> Option<&'static Row> {
    if !number.has(IS_IN_REPORT) {
        section::run(|_| {
            if let Some(identity) = identity::identify(fd) {
                add_to_report(fd, number, &identity);
            }
        });
    }
    number.row()
}

/// Maps the file behind `fd` if that pays and can be. In a section.
#[cold]
pub fn try_map(fd: RawFd, number: &'static Number, entry: &'static Entry) {
    if !number.has(IS_ASKED) {
        number.set(IS_ASKED);
        if !identity::is_in_served_directory(fd) {
            number.set(IS_UNMAPPED);
            number.leave_uncounted();
            return;
        }
        if !identity::maps_what_it_reads(fd) {
            number.set(IS_UNMAPPED);
            number.row().inspect(|row| row.left(Reason::FileSystem));
            return;
        }
    }
    if number.has(IS_UNMAPPED) {
        return;
    }
    let Some(len) = identity::len(fd) else { return };
    let mut inodes = inodes::lock();
    // Asked under the lock: the number may have been closed.
    if kind(number.state()) != FILE {
        return;
    }
    match inodes.map(entry, fd, len) {
        Mapped::New => {
            counts::count_file_served();
            number.row().inspect(|row| row.begin());
        }
        Mapped::Unchanged => {}
        Mapped::Refused => number.set(IS_UNMAPPED),
    }
}

//! The watched numbers: what each has shown of its use, while the kernel serves it (`evidence`).
//!
//! A file that was just opened is the kernel's, and costs what it costs there. Beside each call the
//! library counts, in an object of the number's own, whether the call is one that the engine would
//! have answered from its cache. With enough of them the file is adopted: see `adoption`. Whoever
//! opens the number starts it afresh.
//!
//! Beside the counts there is what an adoption has to know: which numbers are one description's
//! (they have a *group*), and what was done to it that outlasts a call. That changes under the
//! registry's lock, or in a call that names its number (`in_flight`).

use std::ffi::c_void;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64};

use millpond::Backing;

use crate::files::evidence::Evidence;
use crate::files::identity;
use crate::files::table::{self, Known};
use crate::report::accounts::{self, Row};
use crate::report::counts;
use crate::report::reason::Reason;
use crate::runtime::config::{self, Adopt};
use crate::runtime::{link, section};

/// Higher numbers are not watched, but left to the kernel.
const NUMBERS: usize = 1 << 16;
/// Reads that would have hit until the file is adopted. Measured (files of 64 KiB opened, read at 8 places
/// in turn, 4 KiB each, and closed; 2 cores, processor time of a file in microseconds, kernel and adopted
/// with the first): 16 reads 11 and 55, 64 reads 36 and 60, 128 reads 74 and 63, 256 reads 141 and 70. So
/// adopting and giving up takes 50, which a hundred hits earn. Whoever stops right after has lost
/// as much again as he would have spent on the kernel, at most.
pub const READS_AGAIN: u32 = 128;

/// `adoption.N1`. Chosen, not measured: a try that fails makes about 10 system calls, or 10 a number
/// (`several`), little beside the reads that came before it, and ever less.
pub const POSTPONED: u32 = 4;
/// The program may write it.
pub const WRITABLE: u32 = 1;
/// Locked by flock or for the description.
pub const LOCKED: u32 = 2;
/// The process has taken POSIX locks by this number, and `process_locks` knows.
pub const PROCESS_LOCKED: u32 = 4;
/// Mapped, in a way that shows what the kernel has.
pub const MAPPED: u32 = 8;
/// What the report has of it stays: it is not counted, or was told.
const COUNTED: u32 = 16;
/// Another process has the description, too, or may have it: see `forked`.
pub const SHARED: u32 = 32;
/// Opened close-on-exec.
pub const CLOSES: u32 = 64;
/// Perhaps not what it was opened as: only the kernel knows whether it is close-on-exec.
pub const CLOSES_CHANGED: u32 = 128;

/// See the module header.
#[repr(align(128))]
pub struct Watch {
    evidence: Evidence,
    flags: AtomicU32,
    /// Zero: no other number has the description.
    group: AtomicU32,
    reason: AtomicU32,
    /// `forked.K1`; zero: none.
    number: AtomicU32,
    /// When it was given back, and then when it was adopted; zero: not yet. In [`TICK`]s, which wrap.
    since: AtomicU32,
    /// How long it was watched before it was adopted.
    watched: AtomicU32,
    /// Where somebody asked.
    row: AtomicPtr<Row>,
}

/// Nanoseconds, as a power of two: 66 microseconds, of which 32 bits are three days.
const TICK: u32 = 16;

#[repr(align(4096))]
struct Watches([Watch; NUMBERS]);

static WATCHES: Watches = Watches([const { Watch::blank() }; NUMBERS]);
// One page for 32 numbers: a child of fork has the pages anew that it writes to.
const _: () = assert!(size_of::<Watch>() == 128);
static LAST_GROUP: AtomicU32 = AtomicU32::new(0);
static RANDOM: AtomicU64 = AtomicU64::new(0);

/// The number's.
#[inline]
pub fn of(fd: RawFd) -> Option<&'static Watch> {
    WATCHES.0.get(fd as usize)
}

/// Their whole pages.
pub fn memory() -> (*const c_void, usize) {
    ((&raw const WATCHES).cast(), size_of::<Watches>())
}

/// The number was opened with `flags`, and is watched: counts afresh. Whether it can be.
pub fn begin(fd: RawFd, flags: i32) -> bool {
    let is_watched = note_open(fd, flags);
    if is_watched {
        // From here on, as nobody can count it when the program is killed.
        counts::count_file_passed(Reason::Once);
    }
    is_watched
}

/// The number was opened with `flags`: what is noted there is of this file, whoever serves it.
pub fn note_open(fd: RawFd, flags: i32) -> bool {
    let Some(watch) = of(fd) else { return false };
    let is_writable = flags & libc::O_ACCMODE != libc::O_RDONLY;
    let closes = flags & libc::O_CLOEXEC != 0;
    let noted = if is_writable { WRITABLE } else { 0 } | if closes { CLOSES } else { 0 };
    watch.reset(noted, needed());
    if config::is_explained() {
        watch.explain(fd);
    }
    true
}

fn needed() -> u32 {
    if config::is_eager() {
        // `forked`: as soon as it is this process's alone.
        return 1;
    }
    match config::get().adopt {
        Adopt::After(reads) => reads,
        Adopt::Random(_) => (random() % 6) as u32,
    }
}

/// Whether an adoption fills pages, whatever is done to the file: what the kernel caches may be mapped.
fn fills() -> bool {
    config::get().backing != Backing::Buffered
}

/// For tests that adopt and give back at random moments.
pub fn random() -> u64 {
    let Adopt::Random(seed) = config::get().adopt else { return u64::MAX };
    // SplitMix64.
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut word = RANDOM.fetch_add(STEP, Relaxed).wrapping_add(seed.wrapping_mul(STEP));
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (word ^ (word >> 31)) >> 1
}

/// All numbers of the description at `fd`. The registry is locked.
pub fn numbers(fd: RawFd) -> Vec<RawFd> {
    let group = of(fd).map_or(0, |watch| watch.group.load(Relaxed));
    if group == 0 {
        return vec![fd];
    }
    let is_same = |fd| of(fd).is_some_and(|watch| watch.group.load(Relaxed) == group);
    table::known(0, NUMBERS as u32 - 1)
        .filter(|(fd, slot)| {
            matches!(slot, Known::Watched | Known::Claimed | Known::Left) && is_same(*fd)
        })
        .map(|(fd, _)| fd)
        .collect()
}

/// `new` is a second number for the description at `fd`. Its watch forgets the file that it was before. The watches of
/// both. The registry is locked.
pub fn duplicate(fd: RawFd, new: RawFd) -> Option<(&'static Watch, &'static Watch)> {
    let (watch, other) = (of(fd)?, of(new)?);
    let noted = watch.flags() & !(PROCESS_LOCKED | CLOSES) | CLOSES_CHANGED | COUNTED;
    other.reset(noted, watch.evidence.need());
    other.reason.store(watch.reason.load(Relaxed), Relaxed);
    other.row.store(watch.row.load(Relaxed), Relaxed);
    Some((watch, other))
}

/// The same of a description that is watched.
pub fn join(fd: RawFd, new: RawFd) -> bool {
    let Some((watch, other)) = duplicate(fd, new) else { return false };
    if watch.group.load(Relaxed) == 0 {
        watch.group.store(LAST_GROUP.fetch_add(1, Relaxed) + 1, Relaxed);
    }
    other.group.store(watch.group.load(Relaxed), Relaxed);
    other.number.store(watch.number.load(Relaxed), Relaxed);
    true
}

/// The number `fd`, which is `slot`, is given up; the cheap half of a close. False where the
/// registry has to be asked.
#[inline]
pub fn forget_watched(fd: RawFd, slot: Known) -> bool {
    let Some(watch) = of(fd) else { return false };
    // K2 of `forked`: of what is left for good nobody is told.
    let is_shared = matches!(slot, Known::Watched) && watch.number().is_some();
    let is_plain = watch.flags() & (PROCESS_LOCKED | LOCKED) == 0 && !is_shared;
    if is_plain && table::try_change(fd, slot, Known::Unknown) {
        watch.tell();
        return true;
    }
    false
}

impl Watch {
    const fn blank() -> Self {
        Self {
            evidence: Evidence::none(),
            flags: AtomicU32::new(0),
            group: AtomicU32::new(0),
            reason: AtomicU32::new(0),
            number: AtomicU32::new(0),
            since: AtomicU32::new(0),
            watched: AtomicU32::new(0),
            row: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    fn reset(&self, flags: u32, need: u32) {
        self.evidence.reset(need, fills());
        self.flags.store(flags, Relaxed);
        self.group.store(0, Relaxed);
        self.number.store(0, Relaxed);
        self.since.store(0, Relaxed);
        self.reason.store(Reason::Once as u32, Relaxed);
    }

    /// The kernel has read or written `bytes` at `at`, or at the description's offset. Whether the
    /// file is to be adopted.
    #[inline]
    pub fn count(&self, at: Option<u64>, bytes: u64, writes: bool) -> bool {
        if writes {
            self.evidence.note_write();
        }
        let is_useful = self.evidence.count(at, bytes, writes && !config::writes_wait());
        if config::is_looked_at() {
            return self.look(bytes, writes) || is_useful;
        }
        is_useful
    }

    /// Counts by file; and whether it is to be adopted whatever it shows: in tests, or with `--eager`.
    #[cold]
    fn look(&self, bytes: u64, writes: bool) -> bool {
        self.row().inspect(|row| row.passed(bytes as isize, writes));
        config::is_random() && random().is_multiple_of(8)
            || config::is_eager() && self.evidence.count_call()
    }

    /// The number was opened: has a row for its file, if that lies in a served directory.
    #[cold]
    fn explain(&self, fd: RawFd) {
        let row = section::run(|_| row_of(fd));
        let row = row.map_or(std::ptr::null_mut(), |row| std::ptr::from_ref(row).cast_mut());
        self.row.store(row, Relaxed);
    }

    /// What is told of the file, where somebody asked.
    pub fn row(&self) -> Option<&'static Row> {
        // SAFETY: rows are never freed (`accounts.C2`).
        unsafe { self.row.load(Relaxed).as_ref() }
    }

    /// The program has set the offset.
    pub fn set_position(&self, offset: u64) {
        self.evidence.set_position(offset);
    }

    /// An adoption has failed for a reason that may pass, or was undone: `times` as many reads are
    /// needed next time.
    pub fn postpone(&self, times: u32, reason: Option<Reason>) {
        self.evidence.postpone(if config::is_random() { 1 } else { times });
        if let Some(reason) = reason {
            self.set_reason(reason);
        }
    }

    /// The file was given back, and is in the report. The registry is locked.
    pub fn begin_again(&self, flags: u32, group: u32, reason: Reason) {
        let closes = self.flags() & (CLOSES | CLOSES_CHANGED);
        self.reset(flags | closes | COUNTED, self.evidence.need());
        self.group.store(group, Relaxed);
        self.reason.store(reason as u32, Relaxed);
        self.since.store(now(), Relaxed);
    }

    /// It was passed for a reason that has nothing to do with its use, and needs what any file needs.
    pub fn need_anew(&self) {
        self.evidence.reset(needed(), fills());
    }

    /// Whether it was served for as long as it had to be watched before. Where it is used in the same way all
    /// the time, what the adoption took is made up for by then.
    pub fn has_paid(&self) -> bool {
        now().wrapping_sub(self.since.load(Relaxed)) >= self.watched.load(Relaxed)
    }

    /// `forked.K1`.
    pub fn number(&self) -> Option<u32> {
        match self.number.load(Relaxed) {
            0 => None,
            number => Some(number),
        }
    }

    /// Another process will have it, too, under that number (`forked`). The registry is locked.
    pub fn begin_sharing(&self, number: u32) {
        self.number.store(number, Relaxed);
        self.note(SHARED);
        self.set_reason(Reason::Forked);
        // Here, as the child shall not.
        self.tell();
    }

    /// No other process has it any more. The registry is locked.
    pub fn end_sharing(&self) {
        self.number.store(0, Relaxed);
        self.flags.fetch_and(!SHARED, Relaxed);
    }

    /// In a child of fork: it has the description, and what was noted of it, but no locks of its parent's.
    pub fn inherit(&self) {
        self.note(SHARED);
        if self.flags() & PROCESS_LOCKED != 0 {
            self.flags.fetch_and(!PROCESS_LOCKED, Relaxed);
        }
        if config::is_explained() {
            // The parent's.
            self.row.store(std::ptr::null_mut(), Relaxed);
        }
    }

    /// A row of its own for a file that this process did not open; in a section.
    pub fn explain_inherited(&self, fd: RawFd) {
        if config::is_explained() && self.row().is_none() {
            self.explain(fd);
        }
    }

    pub fn flags(&self) -> u32 {
        self.flags.load(Relaxed)
    }

    /// Whether an exec closes the number, if that is known.
    pub fn closes(&self) -> Option<bool> {
        let flags = self.flags();
        (flags & CLOSES_CHANGED == 0).then_some(flags & CLOSES != 0)
    }

    pub fn note(&self, flag: u32) {
        if self.flags() & flag == 0 {
            self.flags.fetch_or(flag, Relaxed);
        }
    }

    /// It is adopted, and counted as served.
    pub fn note_served(&self) {
        if self.flags.fetch_or(COUNTED, Relaxed) & COUNTED == 0 {
            counts::uncount_file_passed(self.reason());
        }
        let now = now();
        let since = self.since.swap(now, Relaxed);
        self.watched.store(if since == 0 { 0 } else { now.wrapping_sub(since) }, Relaxed);
    }

    pub fn reason(&self) -> Reason {
        Reason::of_bits(self.reason.load(Relaxed))
    }

    /// Of [`Watch::reason`], to count by.
    #[inline]
    pub fn reason_index(&self) -> usize {
        self.reason.load(Relaxed) as usize
    }

    pub fn set_reason(&self, reason: Reason) {
        let old = Reason::of_bits(self.reason.swap(reason as u32, Relaxed));
        if self.flags() & COUNTED == 0 {
            counts::uncount_file_passed(old);
            counts::count_file_passed(reason);
        }
        self.row().inspect(|row| row.left(reason));
    }

    /// The number is given up, or the program ends: in the report it is what it is.
    pub fn tell(&self) {
        self.note(COUNTED);
    }
}

/// Never zero.
fn now() -> u32 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is ours to write.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    let now_ns = (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64);
    (now_ns >> TICK) as u32 | 1
}

/// The row of the file behind `fd`, which was just opened. In a section.
pub fn row_of(fd: RawFd) -> Option<&'static Row> {
    let identity = identity::identify(fd).filter(|identity| identity.is_regular)?;
    if !identity::is_in_served_directory(fd) {
        accounts::count_outside();
        return None;
    }
    let path = &mut [0; libc::PATH_MAX as usize];
    accounts::open(identity.id, link::path_of(fd, path))
}

/// A group for the numbers of a description that is given back.
pub fn new_group() -> u32 {
    LAST_GROUP.fetch_add(1, Relaxed) + 1
}

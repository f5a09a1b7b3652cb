//! What a number shows of its use, while the kernel serves it.
//!
//! A file that was just opened is the kernel's, and costs what it costs there. Beside each call the
//! library counts, in an object of the number's own, whether the call is one that the engine would
//! have answered from its cache: points, given and taken. With enough of them the file is adopted:
//! see `adoption`.
//!
//! - **U1** A read that begins on a page where one has begun before gives [`AGAIN`] points; a small
//!   one that goes on within a page does, too. What is read in order, once, gives none, however
//!   long it is: it begins where no byte was read yet.
//! - **U2** Any other read takes one point, so that what is hardly ever read again is left alone. A
//!   write in mode through takes as many as a read gives: it costs more here than in the kernel. In
//!   mode back it gives points as a read does.
//! - **U3** Of pages 512 are told apart. Who reads more of them at random seems to read again; he
//!   will, before long.
//! - **U4** Counts are of one number and approximate: plain loads and stores, by whichever threads
//!   use it, and only when they change something. Nothing but the moment of the adoption depends on
//!   them. Whoever opens the number starts them afresh.
//!
//! Beside the counts there is what an adoption has to know: which numbers are one description's
//! (they have a *group*), and what was done to it that outlasts a call. That changes under the
//! registry's lock, or in a call that names its number (`in_flight`).

use std::os::fd::RawFd;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crate::files::table::{self, Known};
use crate::report::counts;
use crate::report::reason::Reason;
use crate::runtime::config::{self, Adopt};

/// Higher numbers are not watched, but left to the kernel.
const NUMBERS: usize = 1 << 16;
/// Points of a read that would have hit.
const AGAIN: u32 = 4;
/// Reads that would have hit until the file is adopted.
pub const READS_AGAIN: u32 = 128;
/// Reads up to here that go on within a page count as read again.
const SMALL_BYTES: u64 = 1024;
const PAGE_SHIFT: u32 = 12;
const FILTER_WORDS: usize = 8;
const POINTS_MAX: u32 = 1 << 24;

/// The program may write it.
pub const WRITABLE: u32 = 1;
/// Locked by flock or for the description.
pub const LOCKED: u32 = 2;
/// The process has taken POSIX locks by this number, and `process_locks` knows.
pub const PROCESS_LOCKED: u32 = 4;
/// Mapped, in a way that shows what the kernel has.
pub const MAPPED: u32 = 8;
/// The report has it.
const COUNTED: u32 = 16;

/// See the module header. The counts are in the first half, so a call touches two lines at most.
#[repr(C, align(128))]
pub struct Watch {
    points: AtomicU32,
    /// So many are enough.
    need: AtomicU32,
    flags: AtomicU32,
    /// Zero: no other number has the description.
    group: AtomicU32,
    reason: AtomicU32,
    /// Where the description's offset should be.
    position: AtomicU64,
    /// Where the farthest read has ended.
    high: AtomicU64,
    /// Pages where reads began.
    seen: [AtomicU64; FILTER_WORDS],
}

static WATCHES: [Watch; NUMBERS] = [const { Watch::blank() }; NUMBERS];
static LAST_GROUP: AtomicU32 = AtomicU32::new(0);
static RANDOM: AtomicU64 = AtomicU64::new(0);

/// The number's.
#[inline]
pub fn of(fd: RawFd) -> Option<&'static Watch> {
    WATCHES.get(fd as usize)
}

/// The number was opened with `flags`: counts afresh. Whether it is watched from here on.
pub fn begin(fd: RawFd, flags: i32) -> bool {
    let Some(watch) = of(fd) else { return false };
    let is_writable = flags & libc::O_ACCMODE != libc::O_RDONLY;
    watch.reset(if is_writable { WRITABLE } else { 0 }, needed());
    true
}

fn needed() -> u32 {
    match config::get().adopt {
        Adopt::After(reads) => reads.saturating_mul(AGAIN),
        Adopt::Random(_) => 1 + (random() % 24) as u32,
    }
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

/// `new` is a second number for the watched description at `fd`. The registry is locked.
pub fn join(fd: RawFd, new: RawFd) -> bool {
    let (Some(watch), Some(other)) = (of(fd), of(new)) else { return false };
    other.reset(watch.flags.load(Relaxed) & !(PROCESS_LOCKED | COUNTED), watch.need.load(Relaxed));
    other.reason.store(watch.reason.load(Relaxed), Relaxed);
    other.flags.fetch_or(COUNTED, Relaxed);
    if watch.group.load(Relaxed) == 0 {
        watch.group.store(LAST_GROUP.fetch_add(1, Relaxed) + 1, Relaxed);
    }
    other.group.store(watch.group.load(Relaxed), Relaxed);
    true
}

/// The number `fd`, which is `slot`, is given up; the cheap half of a close. False where the
/// registry has to be asked.
#[inline]
pub fn forget_watched(fd: RawFd, slot: Known) -> bool {
    let Some(watch) = of(fd) else { return false };
    let is_plain = watch.flags() & PROCESS_LOCKED == 0;
    if is_plain && table::try_change(fd, slot, Known::Unknown) {
        watch.tell();
        return true;
    }
    false
}

impl Watch {
    const fn blank() -> Self {
        Self {
            points: AtomicU32::new(0),
            need: AtomicU32::new(0),
            flags: AtomicU32::new(0),
            group: AtomicU32::new(0),
            reason: AtomicU32::new(0),
            position: AtomicU64::new(0),
            high: AtomicU64::new(0),
            seen: [const { AtomicU64::new(0) }; FILTER_WORDS],
        }
    }

    fn reset(&self, flags: u32, need: u32) {
        self.points.store(0, Relaxed);
        self.need.store(need, Relaxed);
        self.flags.store(flags, Relaxed);
        self.group.store(0, Relaxed);
        self.reason.store(Reason::Once as u32, Relaxed);
        self.position.store(0, Relaxed);
        self.high.store(0, Relaxed);
        self.seen.iter().for_each(|word| word.store(0, Relaxed));
    }

    /// The kernel has read or written `bytes` at `at`, or at the description's offset. Whether the
    /// file is to be adopted.
    #[inline]
    pub fn count(&self, at: Option<u64>, bytes: u64, writes: bool) -> bool {
        let start = at.unwrap_or_else(|| {
            let start = self.position.load(Relaxed);
            self.position.store(start + bytes, Relaxed);
            start
        });
        if writes && !config::writes_wait() {
            self.take(AGAIN);
            return self.is_random();
        }
        let high = self.high.load(Relaxed);
        let end = start.saturating_add(bytes);
        if end > high {
            self.high.store(end, Relaxed);
        }
        let page = start >> PAGE_SHIFT;
        let word = &self.seen[(page >> 6) as usize % FILTER_WORDS];
        let (seen, bit) = (word.load(Relaxed), 1 << (page & 63));
        let is_again = if start >= high {
            // U1.
            bytes <= SMALL_BYTES && start & ((1 << PAGE_SHIFT) - 1) != 0
        } else {
            seen & bit != 0
        };
        if seen & bit == 0 {
            word.store(seen | bit, Relaxed);
        }
        if !is_again {
            self.take(1);
            return self.is_random();
        }
        let points = self.points.load(Relaxed) + AGAIN;
        self.points.store(points, Relaxed);
        points >= self.need.load(Relaxed)
    }

    #[inline]
    fn take(&self, points: u32) {
        let old = self.points.load(Relaxed);
        if old > 0 {
            self.points.store(old.saturating_sub(points), Relaxed);
        }
    }

    /// Whether it is to be adopted whatever it shows; for tests.
    #[inline]
    fn is_random(&self) -> bool {
        config::is_random() && random().is_multiple_of(8)
    }

    /// The program has set the offset.
    pub fn set_position(&self, offset: u64) {
        self.position.store(offset, Relaxed);
    }

    /// An adoption has failed for a reason that may pass, or was undone: `times` as many points are
    /// needed next time.
    pub fn postpone(&self, times: u32, reason: Option<Reason>) {
        self.points.store(0, Relaxed);
        if !config::is_random() {
            let need = self.need.load(Relaxed).saturating_mul(times).min(POINTS_MAX);
            self.need.store(need, Relaxed);
        }
        if let Some(reason) = reason {
            self.reason.store(reason as u32, Relaxed);
        }
    }

    /// What the next adoption needs, to be passed on to [`Watch::begin_again`].
    pub fn need(&self) -> u32 {
        self.need.load(Relaxed)
    }

    /// The file was given back, and is in the report. The registry is locked.
    pub fn begin_again(&self, flags: u32, group: u32, reason: Reason) {
        let need = self.need();
        self.reset(flags | COUNTED, need);
        self.group.store(group, Relaxed);
        self.reason.store(reason as u32, Relaxed);
    }

    pub fn flags(&self) -> u32 {
        self.flags.load(Relaxed)
    }

    pub fn note(&self, flag: u32) {
        if self.flags() & flag == 0 {
            self.flags.fetch_or(flag, Relaxed);
        }
    }

    /// It is adopted, and counted as served.
    pub fn note_served(&self) {
        self.note(COUNTED);
    }

    pub fn reason(&self) -> Reason {
        Reason::of_bits(self.reason.load(Relaxed))
    }

    pub fn set_reason(&self, reason: Reason) {
        self.reason.store(reason as u32, Relaxed);
    }

    /// The number is given up, or the program ends: into the report, once.
    pub fn tell(&self) {
        if self.flags() & COUNTED == 0 {
            self.flags.fetch_or(COUNTED, Relaxed);
            counts::count_file_passed(self.reason());
        }
    }
}

/// A group for the numbers of a description that is given back.
pub fn new_group() -> u32 {
    LAST_GROUP.fetch_add(1, Relaxed) + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    fn watch() -> Watch {
        let watch = Watch::blank();
        watch.reset(0, 4 * AGAIN);
        watch
    }

    /// Whether it is to be adopted after these reads.
    fn reads(starts: impl IntoIterator<Item = u64>, bytes: u64) -> bool {
        let watch = watch();
        starts.into_iter().any(|start| watch.count(Some(start), bytes, false))
    }

    #[test]
    fn what_is_read_once_in_order_is_left_alone() {
        assert!(!reads((0..100_000).map(|page| page * PAGE), PAGE));
        assert!(!reads((0..10_000).map(|page| page * 131_072), 131_072));
    }

    #[test]
    fn what_is_read_again_is_adopted() {
        assert!(reads((0..1000).map(|n| n % 10 * PAGE), PAGE));
        assert!(reads((0..1000).map(|n| n * 512), 512));
        assert!(reads((0..100).map(|n| n % 4 * 131_072), 131_072));
    }

    #[test]
    fn what_is_seldom_read_again_is_left_alone() {
        assert!(!reads((0..400).map(|n| if n % 20 == 0 { 0 } else { (400 - n) * PAGE }), PAGE));
    }

    #[test]
    fn the_offset_is_followed() {
        let watch = watch();
        for _ in 0..100 {
            assert!(!watch.count(None, PAGE, false));
        }
        let again = |_| {
            watch.set_position(0);
            watch.count(None, PAGE, false)
        };
        assert!((0..10).any(again));
    }
}

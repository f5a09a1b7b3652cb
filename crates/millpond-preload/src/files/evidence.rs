//! What the calls on a file show: whether it pays to serve it.
//!
//! - **U1** A read that begins on a page where one has begun before gives [`AGAIN`] points; a small
//!   one that goes on within a page does, too. What is read in order, once, gives none, however
//!   long it is: it begins where no byte was read yet.
//! - **U2** Any other read takes one point, so that what is hardly ever read again is left alone.
//!   A write takes as many as a read gives where it costs more here than in the kernel (mode
//!   through), and counts as a read does where it does not.
//! - **U3** Of pages 512 are told apart. Who reads more of them at random seems to read again; he
//!   will, before long.
//! - **U4** Counts are approximate: plain loads and stores, by whichever threads use the number, and
//!   only when they change something. Nothing but the moment of the adoption depends on them.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// Points of a read that would have hit.
pub const AGAIN: u32 = 4;
/// Reads up to here that go on within a page count as read again. Measured (64 MiB read once, in order,
/// processor time over the kernel's): pieces of 256 bytes 0.4 to 0.9, 512 0.5, 1024 0.8, 2048 1.1 to 1.4.
const SMALL_BYTES: u64 = 1024;
const PAGE_SHIFT: u32 = 12;
const FILTER_WORDS: usize = 8;
const POINTS_MAX: u32 = 1 << 24;

/// See the header.
pub struct Evidence {
    points: AtomicU32,
    /// So many are enough.
    need: AtomicU32,
    /// Where the description's offset should be.
    position: AtomicU64,
    /// Where the farthest read has ended.
    high: AtomicU64,
    /// Pages where reads began.
    seen: [AtomicU64; FILTER_WORDS],
}

impl Evidence {
    pub const fn none() -> Self {
        Self {
            points: AtomicU32::new(0),
            need: AtomicU32::new(0),
            position: AtomicU64::new(0),
            high: AtomicU64::new(0),
            seen: [const { AtomicU64::new(0) }; FILTER_WORDS],
        }
    }

    /// Counts afresh; `need` points will be enough.
    pub fn reset(&self, need: u32) {
        self.points.store(0, Relaxed);
        self.need.store(need, Relaxed);
        self.position.store(0, Relaxed);
        self.high.store(0, Relaxed);
        self.seen.iter().for_each(|word| word.store(0, Relaxed));
    }

    /// The kernel has moved `bytes` at `at`, or at the description's offset; `costs`: it is a write
    /// that costs more here. Whether that was enough.
    #[inline]
    pub fn count(&self, at: Option<u64>, bytes: u64, costs: bool) -> bool {
        let start = at.unwrap_or_else(|| {
            let start = self.position.load(Relaxed);
            self.position.store(start.saturating_add(bytes), Relaxed);
            start
        });
        if costs {
            self.take(AGAIN);
            return false;
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
            return false;
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

    /// The program has set the offset.
    pub fn set_position(&self, offset: u64) {
        self.position.store(offset, Relaxed);
    }

    /// Begins at zero, and needs `times` as many points.
    pub fn postpone(&self, times: u32) {
        self.points.store(0, Relaxed);
        self.need.store(self.need().saturating_mul(times).min(POINTS_MAX), Relaxed);
    }

    pub fn need(&self) -> u32 {
        self.need.load(Relaxed)
    }
}

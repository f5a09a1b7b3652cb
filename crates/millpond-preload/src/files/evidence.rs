//! What the calls on a file show: whether it pays to serve it.
//!
//! To serve a file first costs: each page is missed once, which takes longer than the kernel's read. Then it
//! pays: each read of a page that was read before is a hit. What is to come is not known, so the past has to
//! do: a file is adopted when its reads *would have* made up for that.
//!
//! - **EV1** Adopted is after so many reads: those that are wanted, and for each page where one began one for
//!   itself and [`FILL`] for filling it, or [`FILL_MAPPED`]. What is read once, in order or not, never comes so far. Who
//!   goes on as before has lost as much again as he would have spent on the kernel, at most.
//! - **EV2** A write takes one of the reads back where it costs more here than in the kernel (mode
//!   through), as long as there is one of a page that was read before; it counts as a read does where
//!   it does not.
//! - **EV3** How many different pages there were is estimated, within a fifth or so: pages fall into parts by
//!   a hash, and of each part the greatest of another hash is kept: the more there were, the greater
//!   (Flajolet and others, HyperLogLog, 2007; here with the hashes themselves). It takes no notice of how
//!   often a page was read.
//! - **EV4** Counts are approximate: plain loads and stores, by whichever threads use the number, and
//!   only when they change something. Nothing but the moment of the adoption depends on them.
//! - **EV5** Where pages need not be filled, a read that goes on within a page where the last one ended is
//!   the same reading of it: what is read once in order, in pieces of half a page, is the kernel's, which reads
//!   ahead.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};

/// EV1: reads that would have hit, for each page that is to be filled. Measured (4 KiB at random from 64 MiB,
/// processor time, memory at hand, a busy machine): the kernel's read 1.1 us, a miss 3.5, a hit 0.45. So
/// filling a page is paid for by four hits. Two, as who has read a file three times over mostly goes on:
/// with four, whoever reads eight times over would never gain. Of what is read in order, in pieces of 2
/// KiB and more the kernel is cheaper, with less the engine is (0.8 of its time at 1 KiB).
const FILL: u32 = 2;
/// The same of a file that nobody has written to: hits copy what the kernel has cached (`claim`), which
/// takes no frames. One, as EV3 may find 0.6 of the pages (the least of some orders of 200,000
/// that were tried), and what is read once must not come so far.
const FILL_MAPPED: u32 = 1;
const PAGE_SHIFT: u32 = 12;
const PAGE_MASK: u64 = (1 << PAGE_SHIFT) - 1;
/// EV3.
const PARTS: usize = 32;
const PART_SHIFT: u32 = 64 - PARTS.trailing_zeros();
/// Nothing fell into the part.
const NONE: u16 = 0;
const NEED_MAX: u32 = 1 << 22;
/// In `need`, which comes nowhere near: pages would have to be filled, see [`FILL`].
const FILLS: u32 = 1 << 31;

/// See the header.
pub struct Evidence {
    /// Reads that were counted, less what writes took.
    reads: AtomicU32,
    /// So many are enough.
    enough: AtomicU32,
    /// So many are wanted beyond what the pages take; and [`FILLS`].
    need: AtomicU32,
    /// Calls of any kind; counted with `--eager` only.
    calls: AtomicU32,
    /// About so many pages reads began on.
    pages: AtomicU32,
    /// Where the description's offset should be.
    position: AtomicU64,
    /// Where the last read ended, less what 32 bits do not hold (EV4).
    end: AtomicU32,
    /// The greatest hash of each part.
    greatest: [AtomicU16; PARTS],
}

impl Evidence {
    pub const fn none() -> Self {
        Self {
            reads: AtomicU32::new(0),
            enough: AtomicU32::new(0),
            need: AtomicU32::new(0),
            calls: AtomicU32::new(0),
            pages: AtomicU32::new(0),
            position: AtomicU64::new(0),
            end: AtomicU32::new(0),
            greatest: [const { AtomicU16::new(NONE) }; PARTS],
        }
    }

    /// Counts afresh; `need` reads that would have hit will be enough, beside what filling takes. `fills`: it
    /// takes that, whether the file is written to or not.
    pub fn reset(&self, need: u32, fills: bool) {
        self.position.store(0, Relaxed);
        self.start(need, fills);
    }

    fn start(&self, need: u32, fills: bool) {
        self.reads.store(0, Relaxed);
        self.need.store(need | if fills { FILLS } else { 0 }, Relaxed);
        self.calls.store(0, Relaxed);
        self.pages.store(0, Relaxed);
        self.enough.store(need, Relaxed);
        self.greatest.iter().for_each(|greatest| greatest.store(NONE, Relaxed));
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
        let reads = self.reads.load(Relaxed);
        if costs {
            if reads > self.pages.load(Relaxed) {
                self.reads.store(reads - 1, Relaxed);
            }
            return false;
        }
        if !self.fills() {
            let goes_on = start as u32 == self.end.load(Relaxed) && start & PAGE_MASK != 0;
            self.end.store(start.wrapping_add(bytes) as u32, Relaxed);
            if goes_on {
                return false;
            }
        }
        let reads = reads.wrapping_add(1);
        self.reads.store(reads, Relaxed);
        let hash = mix(start >> PAGE_SHIFT);
        let greatest = &self.greatest[(hash >> PART_SHIFT) as usize];
        if hash as u16 > greatest.load(Relaxed) {
            greatest.store(hash as u16, Relaxed);
            self.note_page();
        }
        reads >= self.enough.load(Relaxed)
    }

    /// Counts a call, whatever it does; whether there were as many as are wanted.
    pub fn count_call(&self) -> bool {
        let calls = self.calls.load(Relaxed).wrapping_add(1);
        self.calls.store(calls, Relaxed);
        calls >= self.need()
    }

    /// EV3: seldom, the more pages there are.
    #[cold]
    fn note_page(&self) {
        let pages = self.estimate();
        self.pages.store(pages, Relaxed);
        let fill = if self.fills() { FILL } else { FILL_MAPPED };
        let taken = pages.saturating_mul(1 + fill);
        self.enough.store(self.need().saturating_add(taken), Relaxed);
    }

    fn estimate(&self) -> u32 {
        let greatest = self.greatest.each_ref().map(|greatest| greatest.load(Relaxed));
        let parts = PARTS as u64;
        let empty = greatest.iter().filter(|greatest| **greatest == NONE).count() as u64;
        if empty > parts / 8 {
            // As many as it takes on average until so few are empty.
            let sum: u64 = (empty + 1..=parts).map(|left| (parts << 8) / left).sum();
            return (sum >> 8) as u32;
        }
        let sum: u64 = greatest.iter().map(|greatest| (1 << 16) - u64::from(*greatest)).sum();
        ((parts * (parts - 1)) << 16).div_euclid(sum) as u32
    }

    /// The program has written to the file.
    #[inline]
    pub fn note_write(&self) {
        if !self.fills() {
            self.need.store(self.need() | FILLS, Relaxed);
            self.note_page();
        }
    }

    /// The program has set the offset.
    pub fn set_position(&self, offset: u64) {
        self.position.store(offset, Relaxed);
    }

    /// Begins at zero, and needs `times` as many reads.
    pub fn postpone(&self, times: u32) {
        self.start(self.need().saturating_mul(times).min(NEED_MAX), self.fills());
    }

    pub fn need(&self) -> u32 {
        self.need.load(Relaxed) & !FILLS
    }

    fn fills(&self) -> bool {
        self.need.load(Relaxed) & FILLS != 0
    }
}

/// SplitMix64's last step, without its first shift: pages in a row, or at equal distances, do not fall
/// into parts in any order.
#[inline]
fn mix(page: u64) -> u64 {
    let word = page.wrapping_add(1).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

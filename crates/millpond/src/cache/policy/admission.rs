//! The admission filter: which pages get a frame when they are missed.
//!
//! A page that is evicted before it is read again has cost a frame, an eviction and a second copy
//! without any benefit. If this happens to nearly all pages, reads *bypass* the cache: the bytes
//! are read into the reader's memory, and no page is filled. The evictor provides the evidence: of
//! the pages that a read filled and that left the window and small queues (see `evict`), hardly any
//! had been read again.
//!
//! ```text
//!              of 256 that left, 8 or fewer were read again; more
//!              than once, if that was wrong recently (AD6)
//!   admitting --------------------------------------------------> bypassing
//!             <--------------------------------------------------
//!             of 128 that left, 8 or more were read again (AD2);
//!             or bypassed pages are missed again (AD4); or there
//!             is room (AD5)
//! ```
//!
//! - **AD1** While reads bypass the cache, a page that is missed a second time is admitted, and
//!   goes to the main queue, as a page does that the ghost remembers. The *doorkeeper* remembers
//!   bypassed pages (compare TinyLFU): fingerprints of file and page, as many as the cache has
//!   pages, or fewer, in words with the last four fingerprints. So a page that becomes hot is
//!   missed twice. Two threads may write a word at the same time; then one of their pages is
//!   forgotten.
//! - **AD2** One region of [`REGION_PAGES`] in sixteen is always admitted, always the same ones:
//!   the *sample*. It shows the evictor pages that are read again after more misses than the
//!   doorkeeper remembers, such as those of a loop.
//! - **AD3** While reads bypass the cache, the small queue has an eighth of its length, as few
//!   pages enter it. So a page has about as many misses' time to be read again as otherwise.
//! - **AD4** If three eighths of the missed pages had bypassed the cache before, pages are read
//!   again after fewer misses than the cache has pages, and reads are admitted.
//! - **AD5** Reads are also admitted if no page had to be evicted for admitted pages, because pages
//!   were dropped; and when the last handle of a file is closed, or the limit changes.
//! - **AD6** A bypass decision that proves wrong by AD2 or AD4 doubles the number of consecutive
//!   votes that the next one requires, up to [`PATIENCE_MAX`]. After [`PATIENCE_HALVED_AFTER`]
//!   votes that prove it right the number is halved.
//! - **AD7** A cache of less than [`LIMIT_BYTES_MIN`] admits all pages: its small queue is no good
//!   sample.
//! - **AD8** A direct read into its own or a borrowed buffer, or one that the kernel performs
//!   completely (`inode::optimistic`), is cheaper when it bypasses the cache: it needs no frame,
//!   whose memory may be new to the process, and no copy. So the first miss of a page bypasses the
//!   cache even while reads are admitted, and a page that stays hot has one more miss.
//!
//! All state is a heuristic: a stale value costs hit rate, not correctness, so all accesses are
//! Relaxed. A miss reads one cache line that rarely changes. While reads bypass the cache, a miss
//! writes to one of many places, and one in four to a line that all threads share.

use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

use crossbeam_utils::CachePadded;

#[cfg(doc)]
use crate::cache::frames::Frames;
use crate::memory::try_collect;
use crate::options::Admission;
use crate::units::{PAGE_BYTES_MIN, PageIndex};

/// Pages that left the window and small queues, for a decision to bypass; also misses, for a
/// decision by AD4 or AD5.
const PERIOD: u32 = 256;
/// The maximum number of reused pages among them for a vote to bypass.
const BYPASS_REUSED_MAX: u32 = PERIOD / 32;
/// The same period while reads bypass the cache.
const PERIOD_BYPASSING: u32 = 128;
/// The minimum number of reused pages among them for admitting reads again.
const ADMIT_REUSED_MIN: u32 = PERIOD_BYPASSING / 16;
/// These four fractions, and that of AD4, were chosen with the traces of `tests/hit_rates`.
const CAME_BACK_MIN: u32 = PERIOD * 3 / 8;
const PATIENCE_MAX: u32 = 16;
const PATIENCE_HALVED_AFTER: u32 = 64;
/// One in this many regions belongs to the sample.
const SAMPLE_PART: u32 = 16;
/// In one of this many regions, repeated misses are counted.
const COUNTED_PART: u32 = 4;
/// Pages of a region, which programs read together. Untuned.
const REGION_PAGES: u64 = 16;
const LIMIT_BYTES_MIN: u64 = 4 << 20;
/// The divisor of the small queue's length (AD3).
const SMALL_QUEUE_DIVISOR: u64 = 8;
/// Fingerprints in a word of the doorkeeper.
const LANES: u32 = u64::BITS / LANE_BITS;
const LANE_BITS: u32 = u16::BITS;
/// Bits of each of the two counts in [`AdmissionFilter::missed`].
const COUNT_BITS: u32 = 16;

/// Decides whether missed pages are admitted.
pub(crate) struct AdmissionFilter {
    /// Read by each miss, rarely written.
    is_bypassing: CachePadded<AtomicBool>,
    /// While reads bypass the cache: the number of misses in some regions, and in the high half the
    /// number of those that the doorkeeper remembered.
    missed: CachePadded<AtomicU32>,
    /// Pages were evicted in this period.
    has_evicted: AtomicBool,
    patience: AtomicU32,
    /// Empty if the policy is not [`Admission::Adaptive`], or the cache is small.
    doorkeeper: Box<[AtomicU64]>,
}

/// The reuse of pages that left the window and small queues. Under the queues' lock.
#[derive(Default)]
pub(in crate::cache) struct ReuseCounts {
    left: u32,
    read_again: u32,
    /// Consecutive votes to bypass.
    in_a_row: u32,
}

impl AdmissionFilter {
    /// A filter for a cache of at most `limit_bytes`.
    pub(in crate::cache) fn new(
        policy: Admission,
        limit_bytes: u64,
    ) -> io::Result<AdmissionFilter> {
        let words = match policy {
            Admission::Adaptive if limit_bytes >= LIMIT_BYTES_MIN => {
                // Remembering pages for much longer is useless.
                (1u64 << (limit_bytes / u64::from(PAGE_BYTES_MIN)).ilog2()) / u64::from(LANES)
            }
            _ => 0,
        };
        let words = words as usize;
        Ok(AdmissionFilter {
            is_bypassing: CachePadded::new(AtomicBool::new(policy == Admission::Never)),
            missed: CachePadded::default(),
            has_evicted: AtomicBool::new(false),
            patience: AtomicU32::new(1),
            doorkeeper: try_collect((0..words).map(|_| AtomicU64::new(0)))?.into(),
        })
    }

    pub(in crate::cache) fn bytes(&self) -> u64 {
        size_of_val(&*self.doorkeeper) as u64
    }

    /// Whether most reads bypass the cache.
    #[inline]
    pub(crate) fn is_bypassing(&self) -> bool {
        self.is_bypassing.load(Relaxed)
    }

    /// Whether a read that misses pages `first` to `last`, and finds none of them, bypasses the
    /// cache. If so, the pages are remembered. `file`: [`Frames::file_number`].
    pub(crate) fn bypasses(&self, file: usize, first: PageIndex, last: PageIndex) -> bool {
        if !self.is_bypassing() {
            return false;
        }
        if self.doorkeeper.is_empty() {
            return true;
        }
        let region = hash(file, PageIndex(first.0 / REGION_PAGES)) as u32;
        if region.is_multiple_of(SAMPLE_PART) {
            return false;
        }
        let is_new = self.record_in_doorkeeper(file, first, last);
        if region % COUNTED_PART == 1 {
            self.count_miss(!is_new);
        }
        is_new
    }

    /// The same for a read that costs next to nothing if it bypasses the cache (AD8).
    pub(crate) fn bypasses_first_miss(
        &self,
        file: usize,
        first: PageIndex,
        last: PageIndex,
    ) -> bool {
        if self.is_bypassing() || self.doorkeeper.is_empty() {
            return self.bypasses(file, first, last);
        }
        self.record_in_doorkeeper(file, first, last)
    }

    /// Records the pages. Returns whether the doorkeeper remembered none of them.
    fn record_in_doorkeeper(&self, file: usize, first: PageIndex, last: PageIndex) -> bool {
        let mut is_new = true;
        for page in first.to(last) {
            let (word, fingerprint) = self.place(file, page);
            let seen = word.load(Relaxed);
            if has(seen, fingerprint) {
                is_new = false;
            } else {
                word.store(seen << LANE_BITS | u64::from(fingerprint), Relaxed);
            }
        }
        is_new
    }

    /// Counts a miss for AD4 and AD5.
    fn count_miss(&self, came_back: bool) {
        let one = 1 | u32::from(came_back) << COUNT_BITS;
        let sum = self.missed.fetch_add(one, Relaxed) + one;
        if sum & ((1 << COUNT_BITS) - 1) < PERIOD {
            return;
        }
        self.missed.store(0, Relaxed);
        if sum >> COUNT_BITS >= CAME_BACK_MIN {
            self.reverse_decision();
        } else if !self.has_evicted.swap(false, Relaxed) {
            self.start_admitting();
        }
    }

    /// Records that pages were evicted.
    pub(in crate::cache) fn note_eviction(&self) {
        if self.is_bypassing() && !self.has_evicted.load(Relaxed) {
            self.has_evicted.store(true, Relaxed);
        }
    }

    /// Whether an admitted page had bypassed the cache before (AD1).
    pub(in crate::cache) fn doorkeeper_has(&self, file: usize, page: PageIndex) -> bool {
        if !self.is_bypassing() || self.doorkeeper.is_empty() {
            return false;
        }
        let (word, fingerprint) = self.place(file, page);
        has(word.load(Relaxed), fingerprint)
    }

    fn place(&self, file: usize, page: PageIndex) -> (&AtomicU64, u16) {
        let hash = hash(file, page);
        (&self.doorkeeper[hash as usize & (self.doorkeeper.len() - 1)], (hash >> 48) as u16 | 1)
    }

    /// Records whether a page that a read had filled was read again before it left the window and
    /// small queues. Caller: holds the queues' lock.
    pub(in crate::cache) fn record_reuse(&self, reuse: &mut ReuseCounts, read_again: bool) {
        if self.doorkeeper.is_empty() {
            return;
        }
        reuse.left += 1;
        reuse.read_again += u32::from(read_again);
        let is_bypassing = self.is_bypassing();
        if reuse.left < if is_bypassing { PERIOD_BYPASSING } else { PERIOD } {
            return;
        }
        reuse.left = 0;
        let read_again = std::mem::take(&mut reuse.read_again);
        if is_bypassing && read_again >= ADMIT_REUSED_MIN {
            self.reverse_decision();
        }
        if read_again > BYPASS_REUSED_MAX {
            reuse.in_a_row = 0;
            return;
        }
        reuse.in_a_row += 1;
        let patience = self.patience.load(Relaxed);
        if is_bypassing {
            if reuse.in_a_row.is_multiple_of(PATIENCE_HALVED_AFTER) {
                self.patience.store((patience / 2).max(1), Relaxed);
            }
        } else if reuse.in_a_row >= patience {
            self.has_evicted.store(true, Relaxed);
            self.is_bypassing.store(true, Relaxed);
        }
    }

    /// Admits reads after a bypass decision proved wrong (AD6).
    fn reverse_decision(&self) {
        if self.is_bypassing() {
            let patience = self.patience.load(Relaxed);
            self.patience.store((2 * patience).min(PATIENCE_MAX), Relaxed);
            self.start_admitting();
        }
    }

    /// Admits reads, as there is room.
    pub(in crate::cache) fn start_admitting(&self) {
        if self.is_bypassing() && !self.doorkeeper.is_empty() {
            self.is_bypassing.store(false, Relaxed);
        }
    }

    /// The length of the small queue, given its usual length (AD3).
    pub(in crate::cache) fn small_bytes_max(&self, usually: u64) -> u64 {
        if self.is_bypassing() && !self.doorkeeper.is_empty() {
            usually / SMALL_QUEUE_DIVISOR
        } else {
            usually
        }
    }
}

/// Whether one of the four fingerprints in a word of the doorkeeper is `fingerprint`.
fn has(word: u64, fingerprint: u16) -> bool {
    (0..LANES).any(|lane| (word >> (lane * LANE_BITS)) as u16 == fingerprint)
}

/// The finalizer of SplitMix64 (Steele et al., OOPSLA 2014).
pub(in crate::cache) fn hash(file: usize, page: PageIndex) -> u64 {
    let mut hash = (file as u64).rotate_left(32) ^ page.0.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    hash ^ (hash >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evict(admission: &AdmissionFilter, reuse: &mut ReuseCounts, periods: u32, read_again: u32) {
        for n in 0..periods * PERIOD {
            admission.record_reuse(reuse, n % PERIOD < read_again);
        }
    }

    /// The number of pages from `first` on that bypass the cache.
    fn bypassed(admission: &AdmissionFilter, first: u64, pages: u64) -> u64 {
        let page = |n| PageIndex(first + n * REGION_PAGES);
        (0..pages).filter(|&n| admission.bypasses(64, page(n), page(n))).count() as u64
    }

    #[test]
    fn pages_without_reuse_are_not_cached() {
        let (admission, mut reuse) =
            (AdmissionFilter::new(Admission::Adaptive, 1 << 30).unwrap(), ReuseCounts::default());
        assert_eq!(bypassed(&admission, 0, 100), 0);
        evict(&admission, &mut reuse, 1, BYPASS_REUSED_MAX + 1);
        assert_eq!(bypassed(&admission, 0, 100), 0);
        evict(&admission, &mut reuse, 1, BYPASS_REUSED_MAX);
        let most = bypassed(&admission, 0, 400);
        assert!((340..400).contains(&most), "all but the sample: {most}");
        let again = bypassed(&admission, 0, 400);
        assert!(
            admission.is_bypassing() && again < 10,
            "a page that is missed again is admitted: {again}"
        );
        evict(&admission, &mut reuse, 1, PERIOD);
        assert!(!admission.is_bypassing(), "pages are read again");
        // The period that had begun, and one more.
        evict(&admission, &mut reuse, 2, 0);
        assert!(!admission.is_bypassing(), "it was wrong");
        evict(&admission, &mut reuse, 1, 0);
        assert!(admission.is_bypassing());
    }

    #[test]
    fn where_there_is_room_reads_are_admitted() {
        let (admission, mut reuse) =
            (AdmissionFilter::new(Admission::Adaptive, 1 << 30).unwrap(), ReuseCounts::default());
        evict(&admission, &mut reuse, 1, 0);
        let period = u64::from(PERIOD * COUNTED_PART);
        assert!(
            bypassed(&admission, 0, period * 9 / 8) > 0 && admission.is_bypassing(),
            "the first is on trust"
        );
        admission.note_eviction();
        bypassed(&admission, 1 << 20, period * 9 / 8);
        assert!(admission.is_bypassing());
        bypassed(&admission, 2 << 20, period * 9 / 8);
        assert!(!admission.is_bypassing());
    }

    /// Goal: a first miss that costs little bypasses the cache (AD8).
    #[test]
    fn a_cheap_read_bypasses_on_its_first_miss() {
        for (policy, expected) in [
            (Admission::Adaptive, [true, false, true]),
            (Admission::Always, [false; 3]),
            (Admission::Never, [true; 3]),
        ] {
            let admission = AdmissionFilter::new(policy, 16 << 20).unwrap();
            // The second range shares a page with the first.
            let pages = [(10, 11), (11, 12), (20, 20)];
            let asked =
                pages.map(|(a, b)| admission.bypasses_first_miss(64, PageIndex(a), PageIndex(b)));
            assert_eq!(asked, expected, "{policy:?}");
        }
    }

    #[test]
    fn always_and_never_are_obeyed() {
        let mut reuse = ReuseCounts::default();
        for (policy, expected) in [(Admission::Always, 0), (Admission::Never, 100)] {
            let admission = AdmissionFilter::new(policy, 16 << 20).unwrap();
            for read_again in [0, PERIOD] {
                evict(&admission, &mut reuse, 20, read_again);
                admission.start_admitting();
                assert_eq!(bypassed(&admission, 0, 100), expected);
            }
        }
    }
}

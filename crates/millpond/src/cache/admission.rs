//! Which pages get a frame when they are missed.
//!
//! A page that leaves the cache before it is read again has cost a frame, an eviction and a second copy for
//! nothing. Where nearly all do, reads *go around*: their bytes are read into the reader's memory, and
//! nothing else happens. The evictor tells when: of the pages that a read brought and that left the
//! small queue (see `evict`), a sixteenth at most had been read again.
//!
//! ```text
//!             of 256 that left, 16 or fewer were read again
//!   admitting --------------------------------------------> around
//!             <--------------------------------------------
//!       32 or more were, or what went around comes back; the limit
//!       changes; pages are dropped
//! ```
//!
//! - **AD1** While reads go around, what is missed a second time is admitted, and goes to the main queue as
//!   what the ghost remembers does. The *door* remembers what went around: a fingerprint of file and
//!   page in a table with as many places as the cache has pages, each with what came there last. So a
//!   page that becomes hot is missed twice. Two threads may write a place at once: then one of
//!   their pages is forgotten.
//! - **AD2** One region of [`REGION_PAGES`] in sixteen is admitted all the same, always the same ones: the
//!   *sample*. By what becomes of it the evictor sees that pages are read again after more misses than the
//!   door remembers: those of a loop.
//! - **AD3** The small queue is an eighth as long then, as few pages come into it: so a page has about
//!   as many misses' time to be read again as it had.
//! - **AD4** Where pages are dropped, there is room for others: reads are admitted until the evictor says
//!   otherwise. So they are after the limit has changed.
//! - **AD5** A cache of less than [`LIMIT_BYTES_MIN`] admits all: its small queue says little.
//!
//! - **AD6** Where three eighths of what is missed had gone around before, pages are read again after fewer
//!   misses than the cache has pages, and reads are admitted.
//!
//! All is advice: whoever sees an old value reads a page around the cache, or caches it, and either
//! is right. So all is Relaxed.

use std::ptr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32};

use crossbeam_utils::CachePadded;

use crate::cache::table::FileCore;
use crate::units::PageIndex;

/// Pages that left the small queue, for a decision to go around.
const FATES: u32 = 256;
/// So few of them that were read again say so.
const AROUND_MAX: u32 = FATES / 32;
/// For a decision about going on so.
const FATES_AROUND: u32 = 128;
/// So many of them that were read again are against it.
const ADMITTED_MIN: u32 = FATES_AROUND / 16;
/// So many decisions in a row are asked for, at most, where the last ones were wrong (AD7).
const PATIENCE_MAX: u32 = 16;
/// So many that were not wrong make up for one.
const LONG: u32 = 64;
/// So many misses that the door remembers bring them back, too.
const CAME_BACK_MIN: u32 = FATES * 3 / 8;
/// Of one region in so many it is counted.
const ASKED_PART: u32 = 4;
/// Of the two counts in a word.
const FATE_BITS: u32 = 16;
/// One region in so many is of the sample.
const SAMPLE_PART: u32 = 16;
/// Pages of a region: what programs read at once. Chosen, not measured.
const REGION_PAGES: u64 = 16;
const LIMIT_BYTES_MIN: u64 = 4 << 20;
/// By so much the small queue is shorter (AD3).
const SHORTER: u64 = 8;

pub(crate) struct Admission {
    is_around: CachePadded<AtomicBool>,
    /// Of the reads of one region in four while reads go around: how many missed, and in the high half
    /// how many the door remembered.
    came_back: CachePadded<AtomicU32>,
    patience: AtomicU32,
    /// Empty where all are admitted.
    door: Box<[AtomicU16]>,
}

/// What became of pages that left the small queue; under the queues' lock.
#[derive(Default)]
pub(super) struct Fates {
    left: u32,
    read_again: u32,
    /// Decisions to go around.
    in_a_row: u32,
}

impl Admission {
    /// For a cache of at most `limit_bytes`.
    pub(crate) fn new(limit_bytes: u64) -> Admission {
        let places = match limit_bytes {
            ..LIMIT_BYTES_MIN => 0,
            // No more than there are pages: what it remembers much longer is of no use.
            _ => 1 << (limit_bytes / 4096).ilog2(),
        };
        let door = (0..places).map(|_| AtomicU16::new(0)).collect();
        let patience = AtomicU32::new(1);
        Admission { is_around: Default::default(), came_back: Default::default(), patience, door }
    }

    pub(crate) fn bytes(&self) -> u64 {
        size_of_val(&*self.door) as u64
    }

    /// Whether most reads go around the cache.
    #[inline]
    pub(crate) fn is_around(&self) -> bool {
        self.is_around.load(Relaxed)
    }

    /// Whether a read that misses pages `first` to `last` goes around the cache. If so, they
    /// are remembered.
    pub(crate) fn goes_around(&self, core: &FileCore, first: PageIndex, last: PageIndex) -> bool {
        if !self.is_around() {
            return false;
        }
        let file = ptr::from_ref(core).addr();
        let region = |page: PageIndex| PageIndex(page.0 / REGION_PAGES);
        let sample = hash(file, region(first)) as u32 % SAMPLE_PART;
        if sample == 0 {
            return false;
        }
        let mut is_first_miss = true;
        for page in first.to(last) {
            let (place, fingerprint) = self.place(file, page);
            is_first_miss &= place.load(Relaxed) != fingerprint;
            place.store(fingerprint, Relaxed);
        }
        if sample % ASKED_PART == 1 {
            self.note_miss(!is_first_miss);
        }
        is_first_miss
    }

    /// AD6.
    fn note_miss(&self, came_back: bool) {
        let one = 1 | u32::from(came_back) << FATE_BITS;
        let sum = self.came_back.fetch_add(one, Relaxed) + one;
        if sum & (1 << FATE_BITS) - 1 >= FATES {
            self.came_back.store(0, Relaxed);
            if sum >> FATE_BITS >= CAME_BACK_MIN {
                self.was_wrong();
            }
        }
    }

    /// Whether a page that was admitted had gone around before (AD1).
    pub(super) fn remembers(&self, file: usize, page: PageIndex) -> bool {
        if !self.is_around() {
            return false;
        }
        let (place, fingerprint) = self.place(file, page);
        place.load(Relaxed) == fingerprint
    }

    fn place(&self, file: usize, page: PageIndex) -> (&AtomicU16, u16) {
        let hash = hash(file, page);
        (&self.door[hash as usize & (self.door.len() - 1)], (hash >> 48) as u16 | 1)
    }

    /// A page that a read had brought left the small queue; `read_again`: for main. Caller: has the
    /// queues' lock.
    pub(super) fn note(&self, fates: &mut Fates, read_again: bool) {
        if self.door.is_empty() {
            return;
        }
        fates.left += 1;
        fates.read_again += u32::from(read_again);
        let is_around = self.is_around();
        if fates.left < if is_around { FATES_AROUND } else { FATES } {
            return;
        }
        fates.left = 0;
        let read_again = std::mem::take(&mut fates.read_again);
        if is_around && read_again >= ADMITTED_MIN {
            self.was_wrong();
        }
        if read_again > AROUND_MAX {
            fates.in_a_row = 0;
            return;
        }
        fates.in_a_row += 1;
        let patience = self.patience.load(Relaxed);
        if is_around {
            if fates.in_a_row.is_multiple_of(LONG) {
                self.patience.store((patience / 2).max(1), Relaxed);
            }
        } else if fates.in_a_row >= patience {
            self.is_around.store(true, Relaxed);
        }
    }

    /// What goes around is read again.
    fn was_wrong(&self) {
        if self.is_around() {
            self.is_around.store(false, Relaxed);
            let patience = self.patience.load(Relaxed);
            self.patience.store((2 * patience).min(PATIENCE_MAX), Relaxed);
        }
    }

    /// AD4.
    pub(crate) fn admit_all(&self) {
        if self.is_around() {
            self.is_around.store(false, Relaxed);
        }
    }

    /// The share of the small queue (AD3).
    pub(super) fn small_bytes_max(&self, usually: u64) -> u64 {
        if self.is_around() { usually / SHORTER } else { usually }
    }
}

/// The finalizer of SplitMix64 (Steele et al., OOPSLA 2014).
pub(super) fn hash(file: usize, page: PageIndex) -> u64 {
    let mut hash = (file as u64).rotate_left(32) ^ page.0.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    hash ^ (hash >> 31)
}

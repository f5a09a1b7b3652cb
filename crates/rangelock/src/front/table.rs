//! The table of a lock's stripes, which maps each region of the file to a stripe.
//!
//! The file is divided into regions, of 8 KiB by default, and each region hashes to a stripe. A range is held as
//! *pieces*, one for each region that it touches. A new lock has a single stripe inside itself, in which every range is
//! one piece. The table grows when several threads compete for the lock or when many ranges are held at once, fourfold
//! each time.
//!
//! ```text
//! table(n stripes) -> grow -> table(4n stripes), the old stripes stay closed
//! ```
//!
//! - B1. `word` changes only under the lock's mutex, and only to a larger table. So equal sizes mean the same table.
//! - B2. A replaced table stays closed and allocated until the lock is dropped. A request that still uses it finds every
//!   stripe gated and restarts under the mutex. All replaced tables together are a third of the current one.
//! - B3. Growing moves every held piece. A piece without a free slot is adopted by the queue.
//! - B4. The bytes of all tables, replaced or not, are taken from the lock's budget, if it has one.

use std::ptr::NonNull;

use super::stripe::Stripe;
use super::whole::WholeFileCounter;
use crate::range::ByteRange;
use crate::sync::atomic::{AtomicPtr, Ordering};

/// log2 of the default region size, 8 KiB: a few pages make one piece, and threads that write neighbouring ranges mostly
/// use different stripes.
pub(crate) const REGION_SHIFT: u32 = if cfg!(loom) { 2 } else { 13 };

/// log2 of the largest region size: an offset is shifted by less than 64.
pub(crate) const REGION_SHIFT_MAX: u32 = 40;

/// A range of more pieces is held in the queue. 64 KiB fit at any offset; for longer ranges the work under the lock
/// costs more than the lock.
pub(crate) const PIECES_MAX: usize = if cfg!(loom) { 2 } else { 10 };

/// log2 of the number of stripes in the largest table: 16,384 stripes, 2 MiB.
pub(crate) const LOG2_MAX: u32 = if cfg!(loom) { 1 } else { 14 };

/// log2 of the factor between tables.
const LOG2_STEP: u32 = if cfg!(loom) { 1 } else { 2 };
const LOG2_FIRST: u32 = if cfg!(loom) { 1 } else { 6 };

/// The alignment of a stripe leaves these bits of a pointer for the size of the table.
const TAG: usize = align_of::<Stripe>() - 1;

/// The current table; see the module. Fields that every request reads share no cache line with written ones.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Table {
    first: Stripe,
    /// Address of the stripes, and log2 of their number; null for the single stripe inside.
    word: AtomicPtr<Stripe>,
    region_shift: u32,
    pub(crate) whole: WholeFileCounter,
}

/// A snapshot of the current table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TableView<'a> {
    stripes: &'a [Stripe],
    log2: u32,
    region_shift: u32,
}

/// The heap-allocated tables of a lock, current and replaced.
pub(crate) type Allocated = Vec<NonNull<[Stripe]>>;

impl Table {
    pub(crate) fn new(region_shift: u32) -> Table {
        let word = AtomicPtr::new(std::ptr::null_mut());
        Table { first: Stripe::new(), word, region_shift, whole: WholeFileCounter::new() }
    }

    #[inline]
    pub(crate) fn view(&self) -> TableView<'_> {
        // Acquire: pairs with the Release in `publish`: the stripes are filled.
        let word = self.word.load(Ordering::Acquire);
        let region_shift = self.region_shift;
        if word.is_null() {
            return TableView { stripes: std::slice::from_ref(&self.first), log2: 0, region_shift };
        }
        let log2 = word.addr() & TAG;
        let stripes = word.map_addr(|addr| addr & !TAG);
        // SAFETY: `publish` stored the non-null word. It points to an allocation of 2^log2
        // initialised stripes, which is shared from then on, and lives until `free_all`, which
        // has exclusive access to the lock (B2).
        let stripes = unsafe { std::slice::from_raw_parts(stripes, 1 << log2) };
        TableView { stripes, log2: log2 as u32, region_shift }
    }

    /// log2 of the number of stripes in the next table; `None` if the table may not grow.
    pub(crate) fn next_log2(&self, log2_max: u32) -> Option<u32> {
        let log2 = match self.view().log2 {
            0 => LOG2_FIRST,
            log2 => log2 + LOG2_STEP,
        };
        (log2 <= log2_max.min(LOG2_MAX)).then_some(log2)
    }

    /// Allocates an empty table of the next size; `None` if the table may not grow.
    pub(crate) fn allocate_next(&self, log2_max: u32) -> Option<(Box<[Stripe]>, u32)> {
        let log2 = self.next_log2(log2_max)?;
        Some(((0..1usize << log2).map(|_| Stripe::new()).collect(), log2))
    }

    /// Memory of a table.
    pub(crate) fn bytes(log2: u32) -> usize {
        size_of::<Stripe>() << log2
    }

    /// Makes a larger table the current one. The caller has closed the old table and filled this one (B1).
    pub(crate) fn publish(&self, stripes: Box<[Stripe]>, allocated: &mut Allocated) {
        let log2 = stripes.len().trailing_zeros() as usize;
        let stripes = NonNull::from(Box::leak(stripes));
        allocated.push(stripes);
        let word = stripes.as_ptr().cast::<Stripe>().map_addr(|addr| addr | log2);
        // Release: pairs with the Acquire in `view`.
        self.word.store(word, Ordering::Release);
    }

    /// Frees every table, replaced or not, and returns their size in bytes.
    pub(crate) fn free_all(&mut self, allocated: &mut Allocated) -> usize {
        self.word = AtomicPtr::new(std::ptr::null_mut());
        let bytes = allocated.iter().map(|stripes| stripes.len() * size_of::<Stripe>()).sum();
        for stripes in allocated.drain(..) {
            // SAFETY: `publish` leaked a box for each table, each is dropped once, and `&mut self`
            // proves that no view of this lock is left (B2).
            drop(unsafe { Box::from_raw(stripes.as_ptr()) });
        }
        bytes
    }
}

impl<'a> TableView<'a> {
    /// The same regions, with the stripes of another table.
    pub(crate) fn with(self, stripes: &'a [Stripe], log2: u32) -> TableView<'a> {
        TableView { stripes, log2, ..self }
    }

    #[inline]
    pub(crate) fn log2(self) -> u32 {
        self.log2
    }

    pub(crate) fn stripes(self) -> &'a [Stripe] {
        self.stripes
    }

    #[inline]
    fn region(self, offset: u64) -> u64 {
        offset >> self.region_shift
    }

    /// The stripe of the region of `offset`.
    #[inline]
    pub(crate) fn stripe(self, offset: u64) -> &'a Stripe {
        // Fibonacci hashing spreads consecutive regions evenly over the stripes. Shifted twice, as a
        // shift by 64 is not allowed.
        let hash = self.region(offset).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let index = (hash >> 1) >> (63 - self.log2);
        // SAFETY: there are 2^log2 stripes, and the top log2 bits of a word are less than 2^log2.
        unsafe { self.stripes.get_unchecked(index as usize) }
    }

    /// The one stripe of `range`, if it is a single piece.
    #[inline]
    pub(crate) fn single(self, range: ByteRange) -> Option<&'a Stripe> {
        let one = self.region(range.start()) == self.region(range.end() - 1) || self.log2 == 0;
        one.then(|| self.stripe(range.start()))
    }

    /// Number of pieces of `range`.
    #[inline]
    pub(crate) fn pieces(self, range: ByteRange) -> u64 {
        if self.log2 == 0 {
            return 1;
        }
        self.region(range.end() - 1) - self.region(range.start()) + 1
    }

    /// Splits `range` into its first piece and the rest.
    #[inline]
    pub(crate) fn split(self, range: ByteRange) -> (ByteRange, Option<ByteRange>) {
        let cut = (range.start() | ((1 << self.region_shift) - 1)).saturating_add(1);
        if cut < range.end() && self.log2 != 0 {
            let rest = ByteRange::raw(cut, range.end());
            (ByteRange::raw(range.start(), cut), Some(rest))
        } else {
            (range, None)
        }
    }

    /// Calls `f` for each piece and its stripe.
    pub(crate) fn for_each_piece(self, range: ByteRange, mut f: impl FnMut(ByteRange, &'a Stripe)) {
        let mut rest = Some(range);
        while let Some(range) = rest {
            let (piece, next) = self.split(range);
            f(piece, self.stripe(piece.start()));
            rest = next;
        }
    }

    /// Whether both ranges cover the same regions, so that no table separates them.
    pub(crate) fn same_region(self, a: ByteRange, b: ByteRange) -> bool {
        self.region(a.start()) == self.region(b.start())
            && self.region(a.end() - 1) == self.region(b.end() - 1)
    }
}

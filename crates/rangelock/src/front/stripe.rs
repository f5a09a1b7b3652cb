//! A stripe holds the ranges of some regions of the file, in two cache lines.
//!
//! Every request tries a stripe first. One word, `control`, records which slots are occupied. Every transition is one
//! compare-exchange or other read-modify-write (RMW) of it:
//!
//! ```text
//! control = version | CROWDED | exclusive bit per slot | occupied bit per slot | GATE
//!
//! slot:    FREE -> claim -> CLAIMED -> (end stored) -> HELD -> release -> FREE
//! stripe:  OPEN -> gate -> GATED -> ungate -> OPEN
//! ```
//!
//! - P1. While GATE is clear, slots are claimed and released by compare-exchange alone. While it is set, slots change only
//!   under the lock's mutex, which is also needed to set and clear it. So a gated stripe does not change while a thread
//!   holds the mutex.
//! - P2. Every claim increments the version. So a successful compare-exchange of a claim proves that the occupied slots,
//!   and their owners, are the ones that the claim has read: no conflicting range was claimed in between. (A release in
//!   between changes the occupied bits, and only a claim sets them again.) The version has 48 bits: to fail, a claimer
//!   would have to be stopped for exactly 2^48 claims of its stripe, 30 days at 100 million per second.
//! - P3. `end` is 0 exactly while a slot is not HELD: its owner has claimed it and not yet stored the range, or is about to
//!   release it. A thread that finds an occupied slot with end 0 does not know its range. A claimer gives up. The thread
//!   that holds the gate waits: either the owner stores the range, or its release fails at the gate and stores the range
//!   again.
//! - P4. A slot belongs to one guard, which knows its number; only this guard releases it.
//!
//! Orderings. All RMWs of `control` form one release sequence. So an Acquire load of it sees everything before each
//! Release in it: a claimer sees the writes of the last holder.

use crate::range::{ByteRange, Mode};
use crate::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
use crate::sync::{relax, spin_hint};

/// Number of ranges in a stripe: with the header, two cache lines.
pub(crate) const SLOTS: usize = if cfg!(loom) { 2 } else { 7 };

const GATE: u64 = 1;
const OCCUPIED_SHIFT: u32 = 1;
const EXCLUSIVE_SHIFT: u32 = 8;
/// Several ranges were recently held at once: a hint for `release_fast`.
const CROWDED: u64 = 1 << 15;
const VERSION: u64 = 1 << 16;
const SLOT_MASK: u64 = (1 << SLOTS) - 1;

/// A pair of cache lines (the processor prefetches adjacent lines in pairs). The first slots share a line with `control`,
/// as usually few ranges are held at once.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Stripe {
    control: AtomicU64,
    /// Number of queue entries that cover this stripe; GATE is set while it is not 0. Under the mutex.
    gates: AtomicU32,
    /// Slots whose range was moved here from a smaller table, so that its guard has another slot number. Under the mutex,
    /// and only while gated.
    moved: AtomicU8,
    slots: [Slot; SLOTS],
}

#[derive(Debug)]
struct Slot {
    start: AtomicU64,
    /// 0 while not HELD (P3).
    end: AtomicU64,
}

/// A claimed slot, and the value of `control` after the claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) struct Claimed {
    pub(crate) slot: u32,
    pub(crate) control: u64,
}

/// Outcome of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Claim {
    /// The caller owns the slot.
    Slot(Claimed),
    /// A conflicting range was certainly held at one moment.
    Held,
    /// A conflicting range may be held, or was held (P3).
    Conflict,
    /// No slot is free.
    Full,
    /// The gate is set.
    Gated,
    /// Too many compare-exchanges failed.
    Raced,
}

/// Outcome of a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Release {
    Done,
    /// The gate is set: release under the mutex.
    Gated,
}

fn bits(control: u64, shift: u32) -> u64 {
    (control >> shift) & SLOT_MASK
}

fn occupied_bit(slot: u32) -> u64 {
    1 << (OCCUPIED_SHIFT + slot)
}

fn exclusive_bit(slot: u32) -> u64 {
    1 << (EXCLUSIVE_SHIFT + slot)
}

fn mode_bit(slot: u32, mode: Mode) -> u64 {
    match mode {
        Mode::Shared => 0,
        Mode::Exclusive => exclusive_bit(slot),
    }
}

/// The slots that conflict with `mode` where they overlap.
fn conflicting_slots(control: u64, mode: Mode) -> u64 {
    match mode {
        Mode::Exclusive => bits(control, OCCUPIED_SHIFT),
        Mode::Shared => bits(control, EXCLUSIVE_SHIFT),
    }
}

/// The positions of the set bits.
fn set_bits(mut mask: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let one = (mask != 0).then(|| mask.trailing_zeros());
        mask &= mask.wrapping_sub(1);
        one
    })
}

impl Stripe {
    pub(crate) fn new() -> Stripe {
        Stripe {
            control: AtomicU64::new(0),
            gates: AtomicU32::new(0),
            moved: AtomicU8::new(0),
            slots: std::array::from_fn(|_| Slot {
                start: AtomicU64::new(0),
                end: AtomicU64::new(0),
            }),
        }
    }

    /// Claims slot 0 of an empty stripe: the uncontended case. On failure, returns the number of lost races.
    #[inline(always)]
    pub(crate) fn claim_first(&self, range: ByteRange, mode: Mode) -> Result<Claimed, u32> {
        let control = self.control.load(Ordering::Relaxed);
        if control & (GATE | SLOT_MASK << OCCUPIED_SHIFT) != 0 {
            return Err(0);
        }
        let claimed = control.wrapping_add(VERSION) | occupied_bit(0) | mode_bit(0, mode);
        // Acquire: as in `claim`. No Release, as no slot has been read before it.
        let exchanged =
            self.control.compare_exchange(control, claimed, Ordering::Acquire, Ordering::Relaxed);
        match exchanged {
            Ok(_) => {
                self.store_range(0, range);
                Ok(Claimed { slot: 0, control: claimed })
            }
            Err(_) => Err(1),
        }
    }

    /// Stores the range of a slot that the caller has just claimed.
    #[inline(always)]
    fn store_range(&self, slot: u32, range: ByteRange) {
        let place = &self.slots[slot as usize];
        // Release: pairs with the fence in `confirm_conflict`: a thread that sees this start also sees the claim before it.
        place.start.store(range.start(), Ordering::Release);
        // Release: pairs with the Acquire in `range_of_slot`, which then sees `start` too.
        place.end.store(range.end(), Ordering::Release);
    }

    /// Claims a slot for `range`, unless a conflicting range is held: one compare-exchange. Gives up after `races` failed
    /// attempts; adds the number of failures to `lost`.
    pub(crate) fn claim(&self, range: ByteRange, mode: Mode, races: u32, lost: &mut u32) -> Claim {
        // Acquire: pairs with the Release of the last release, claim or `ungate`.
        let mut control = self.control.load(Ordering::Acquire);
        loop {
            if control & GATE != 0 {
                return Claim::Gated;
            }
            let occupied = bits(control, OCCUPIED_SHIFT);
            if occupied != 0 && self.may_conflict(control, range, mode) {
                return self.confirm_conflict(control, range, mode);
            }
            let slot = (!occupied).trailing_zeros();
            if slot >= SLOTS as u32 {
                return Claim::Full;
            }
            let crowded = if occupied == 0 { 0 } else { CROWDED };
            let ours = occupied_bit(slot) | mode_bit(slot, mode);
            let claimed = control.wrapping_add(VERSION) | ours | crowded;
            // Acquire: pairs with the Release in `release` and `ungate`: the caller sees the writes
            // of the last holder. (The load alone is not enough: the word may have been gated and
            // ungated since.) Acquire on failure: the next round reads the slots of that word, and
            // must see the 0 in `end`. Release: keeps the loads of `may_conflict` before it, so that
            // they saw the slots as they were at this moment (P2); pairs with the Acquire of the next
            // claim, whose owner overwrites them. Argued: the Release, as without it a load would see
            // a store that follows from its own later compare-exchange, which loom can't show.
            let exchanged = self.control.compare_exchange(
                control,
                claimed,
                Ordering::AcqRel,
                Ordering::Acquire,
            );
            match exchanged {
                Ok(_) => {
                    self.store_range(slot, range);
                    return Claim::Slot(Claimed { slot, control: claimed });
                }
                Err(now) => control = now,
            }
            *lost += 1;
            if *lost > races {
                return Claim::Raced;
            }
            spin_hint();
        }
    }

    /// Whether an occupied slot conflicts, or may conflict (P3).
    #[inline]
    fn may_conflict(&self, control: u64, range: ByteRange, mode: Mode) -> bool {
        set_bits(conflicting_slots(control, mode))
            .any(|slot| self.range_of_slot(slot).is_none_or(|r| r.overlaps(range)))
    }

    /// Whether the conflict that `may_conflict` found is certain.
    #[cold]
    fn confirm_conflict(&self, control: u64, range: ByteRange, mode: Mode) -> Claim {
        let conflicts = |slot| self.range_of_slot(slot).is_some_and(|held| held.overlaps(range));
        let found = set_bits(conflicting_slots(control, mode)).any(conflicts);
        // Acquire: pairs with the Release in `store_range`: if a load saw the start of a later owner, the
        // word has changed. If the word is unchanged, the owners were the same (P2).
        fence(Ordering::Acquire);
        if found && self.control.load(Ordering::Relaxed) == control {
            Claim::Held
        } else {
            Claim::Conflict
        }
    }

    /// The range of an occupied slot, if it is HELD (P3).
    #[inline]
    fn range_of_slot(&self, slot: u32) -> Option<ByteRange> {
        let place = &self.slots[slot as usize];
        // Acquire: pairs with the Release in `store_range` and `release_from`.
        let end = place.end.load(Ordering::Acquire);
        let start = place.start.load(Ordering::Relaxed);
        // A start beyond the end belongs to another owner than the end: the claim that follows fails.
        (start < end).then(|| ByteRange::raw(start, end))
    }

    /// Releases a slot that the caller owns (P4), by one compare-exchange. If it fails, because of other claims or releases
    /// or because the gate is set, the caller continues with `release_from` and the returned word.
    ///
    /// Unless the stripe was crowded at the claim, the word is not loaded first. A load right after the compare-exchange of
    /// the claim waits for its completion, which costs half a compare-exchange. Without other claims, the word is the one
    /// after the claim. In a crowded stripe this guess would mostly fail, which costs as much.
    #[inline(always)]
    pub(crate) fn release_fast(
        &self,
        Claimed { slot, control: claimed }: Claimed,
    ) -> Result<(), u64> {
        let mut control = claimed;
        if claimed & CROWDED != 0 {
            // Relaxed: no other read depends on it.
            control = self.control.load(Ordering::Relaxed);
        }
        self.slots[slot as usize].end.store(0, Ordering::Relaxed);
        if control & GATE != 0 {
            return Err(control);
        }
        // No other claim: clear CROWDED.
        let hint = if control == claimed { CROWDED } else { 0 };
        self.try_free(slot, control, hint).map(drop)
    }

    #[inline(always)]
    fn try_free(&self, slot: u32, control: u64, hint: u64) -> Result<u64, u64> {
        let free = control & !(occupied_bit(slot) | exclusive_bit(slot) | hint);
        // Release: pairs with the Acquire in `claim` and `gate`: the next holder sees this holder's
        // writes to the bytes, and the 0 in `end`.
        self.control.compare_exchange(control, free, Ordering::Release, Ordering::Relaxed)
    }

    /// Releases a slot that the caller owns (P4), unless the gate is set.
    pub(crate) fn release(&self, slot: u32, range: ByteRange) -> Release {
        self.slots[slot as usize].end.store(0, Ordering::Relaxed);
        let control = self.control.load(Ordering::Relaxed);
        self.release_from(control, slot, range)
    }

    /// The same, after the 0 is stored in `end`; `control` is the last seen word.
    pub(crate) fn release_from(&self, mut control: u64, slot: u32, range: ByteRange) -> Release {
        while control & GATE == 0 {
            match self.try_free(slot, control, 0) {
                Ok(_) => return Release::Done,
                Err(now) => control = now,
            }
        }
        // Release: a reader of this end must see `start`, which another thread may have stored; pairs with
        // the Acquire in `range_of_slot`.
        self.slots[slot as usize].end.store(range.end(), Ordering::Release);
        Release::Gated
    }

    /// Whether some occupied slot holds a range that `other` accepts: a hint.
    pub(crate) fn any_held(&self, other: impl Fn(ByteRange) -> bool) -> bool {
        // Relaxed: the result only decides whether to grow the table.
        let control = self.control.load(Ordering::Relaxed);
        set_bits(bits(control, OCCUPIED_SHIFT))
            .any(|slot| self.range_of_slot(slot).is_some_and(&other))
    }
}

/// Under the mutex.
impl Stripe {
    /// Closes the stripe to claims and releases, for one more queue entry (P1).
    pub(crate) fn gate(&self) {
        let gates = self.gates.load(Ordering::Relaxed);
        self.gates.store(gates + 1, Ordering::Relaxed);
        if gates == 0 {
            self.close();
        }
    }

    /// Undoes one `gate`.
    pub(crate) fn ungate(&self) {
        let gates = self.gates.load(Ordering::Relaxed) - 1;
        self.gates.store(gates, Ordering::Relaxed);
        if gates == 0 {
            // Release: pairs with the Acquire in `claim`: a claimer sees the writes of the holder of a
            // queue entry.
            self.control.fetch_and(!GATE, Ordering::Release);
        }
    }

    /// Closes the stripe; permanently, if its table is being replaced.
    pub(crate) fn close(&self) {
        // Acquire: pairs with the Release in `claim` and `release`: from here on the caller sees all
        // held ranges, and the writes of earlier holders.
        self.control.fetch_or(GATE, Ordering::Acquire);
    }

    /// Calls `f(slot, range, mode)` for each held range. Gated.
    pub(crate) fn for_each_held(&self, mut f: impl FnMut(u32, ByteRange, Mode)) {
        let control = self.control.load(Ordering::Relaxed);
        debug_assert!(control & GATE != 0, "P1");
        for slot in set_bits(bits(control, OCCUPIED_SHIFT)) {
            // P3: the owner is about to store the range.
            let mut tries = 0;
            let range = loop {
                match self.range_of_slot(slot) {
                    Some(range) => break range,
                    None => relax(&mut tries),
                }
            };
            let exclusive = control & exclusive_bit(slot) != 0;
            f(slot, range, if exclusive { Mode::Exclusive } else { Mode::Shared });
        }
    }

    /// Finds a range that was moved here from a smaller table. Two equal ranges are interchangeable, since no guard has
    /// their slot numbers. Gated.
    pub(crate) fn find_moved(&self, wanted: ByteRange, mode: Mode) -> Option<u32> {
        let moved = u64::from(self.moved.load(Ordering::Relaxed));
        let mut found = None;
        self.for_each_held(|slot, range, held| {
            if moved & (1 << slot) != 0 && range == wanted && held == mode {
                found = Some(slot);
            }
        });
        found
    }

    /// Frees a slot. Gated.
    pub(crate) fn free_slot(&self, slot: u32) {
        self.slots[slot as usize].end.store(0, Ordering::Relaxed);
        let moved = self.moved.load(Ordering::Relaxed);
        self.moved.store(moved & !(1 << slot), Ordering::Relaxed);
        // Relaxed: no thread claims before `ungate`, which runs under the same mutex.
        self.control.fetch_and(!(occupied_bit(slot) | exclusive_bit(slot)), Ordering::Relaxed);
    }

    /// Changes the mode of a slot. Gated.
    pub(crate) fn set_mode(&self, slot: u32, mode: Mode) {
        // Relaxed: as in `free_slot`.
        match mode {
            Mode::Exclusive => self.control.fetch_or(exclusive_bit(slot), Ordering::Relaxed),
            Mode::Shared => self.control.fetch_and(!exclusive_bit(slot), Ordering::Relaxed),
        };
    }

    /// Fills a slot of a stripe that is not yet published; false if the stripe is full.
    pub(crate) fn fill_moved(&self, range: ByteRange, mode: Mode) -> bool {
        let control = self.control.load(Ordering::Relaxed);
        let slot = (!bits(control, OCCUPIED_SHIFT)).trailing_zeros();
        if slot >= SLOTS as u32 {
            return false;
        }
        // Relaxed: publishing the table publishes its stripes.
        self.slots[slot as usize].start.store(range.start(), Ordering::Relaxed);
        self.slots[slot as usize].end.store(range.end(), Ordering::Relaxed);
        let filled = control.wrapping_add(VERSION) | occupied_bit(slot) | mode_bit(slot, mode);
        self.control.store(filled, Ordering::Relaxed);
        self.moved.store(self.moved.load(Ordering::Relaxed) | 1 << slot, Ordering::Relaxed);
        true
    }
}

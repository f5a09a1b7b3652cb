//! Allocates the slots of a context of Linux AIO, and decides which requests get one: `aio.A2` and
//! `A4`.
//!
//! ```text
//!   begin: counts += 1, if there is room -> in_flight += 1, unless CLOSED -> a freed slot, or a fresh one
//!   end:   in_flight -= 1                     its stand-in was submitted
//!   free:  the slot is in the list -> discount: counts -= 1
//!   close: CLOSED -> sleep until nothing is under way
//! ```
//!
//! - **SL1** A request is counted before it has a slot, and until after it gave that back. So an
//! - **SL1** A request is counted before it has a slot, and until after it has freed the slot. So an
//!   admitted request that finds no freed slot finds one that was never used.
//! - **SL2** The word of the free list has a number that grows with every change. A thread that has read
//!   the link of the first slot changes nothing if another thread popped and freed that slot since.
//! - **SL3** CLOSED and the count of requests in flight are one word: the close waits for a request, or
//!   the request is refused.
//!
//! Locks: none.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::runtime::sync::{self, AtomicU32, AtomicU64};

pub struct Slots {
    capacity: u32,
    /// Requests that are under way or not taken: for served files in the low half, others in the
    /// high.
    counts: AtomicU64,
    /// The first free slot, plus one, and above it a number (SL2).
    list: AtomicU64,
    /// Slots from here on were never used.
    fresh: AtomicU32,
    /// Requests for served files that have not ended, and CLOSED (SL3).
    in_flight: AtomicU32,
}

/// Where the slot after this one in the list of free ones is, plus one.
pub trait Links {
    fn next(&self, slot: u32) -> &AtomicU32;
}

/// Why there is no slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    /// aio.A2.
    Full,
    /// aio.A4.
    Closed,
}

const SERVED_ONE: u64 = 1;
const OTHERS_ONE: u64 = 1 << 32;
/// Of `unserved_calls`: the context is being destroyed.
const CLOSED: u32 = 1 << 31;

fn served(counts: u64) -> u64 {
    counts & (OTHERS_ONE - 1)
}

fn others(counts: u64) -> u64 {
    counts >> 32
}

impl Slots {
    pub fn new(capacity: u32) -> Self {
        Self {
            capacity,
            counts: AtomicU64::new(0),
            list: AtomicU64::new(0),
            fresh: AtomicU32::new(0),
            in_flight: AtomicU32::new(0),
        }
    }

    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Slots with this index or a higher one were never used.
    pub fn used(&self) -> u32 {
        self.fresh.load(Relaxed)
    }

    /// Counts as many of the `wanted` requests for other files as there is room for (aio.A2); to be
    /// discounted later.
    pub fn admit_others(&self, wanted: u64) -> u64 {
        let mut room = wanted;
        let admit = |counts| {
            let left = u64::from(self.capacity).saturating_sub(served(counts) + others(counts));
            room = if served(counts) == 0 { wanted } else { wanted.min(left) };
            Some(counts + room * OTHERS_ONE)
        };
        // Relaxed: they have no slots.
        let _ = self.counts.fetch_update(Relaxed, Relaxed, admit);
        room
    }

    /// A slot for a request that begins; the caller later ends the request and frees the slot.
    pub fn begin(&self, links: &impl Links) -> Result<u32, Refused> {
        if !self.admit() {
            return Err(Refused::Full);
        }
        if !self.enter() {
            self.discount(1, 0);
            return Err(Refused::Closed);
        }
        Ok(self.pop(links).unwrap_or_else(|| self.take_fresh()))
    }

    fn admit(&self) -> bool {
        let admit = |counts| {
            let all = served(counts) + others(counts);
            (all < u64::from(self.capacity)).then_some(counts + SERVED_ONE)
        };
        // Acquire: pairs with the Release in `discount`, so that the freed slot is in the list
        // (SL1).
        self.counts.fetch_update(Acquire, Relaxed, admit).is_ok()
    }

    fn enter(&self) -> bool {
        // Relaxed: the closing thread reads the memory of the threads that ended requests, not of those that
        // began them (SL3).
        let enter = |word| (word & CLOSED == 0).then_some(word + 1);
        self.in_flight.fetch_update(Relaxed, Relaxed, enter).is_ok()
    }

    fn take_fresh(&self) -> u32 {
        self.fresh.fetch_add(1, Relaxed)
    }

    /// A freed slot.
    fn pop(&self, links: &impl Links) -> Option<u32> {
        // Acquire: pairs with the Release in `free`.
        let mut seen = self.list.load(Acquire);
        loop {
            let slot = (seen as u32).checked_sub(1)?;
            // If another thread has popped the slot since, the value read here is discarded (SL2).
            let next = links.next(slot).load(Relaxed);
            let after = ((seen >> 32).wrapping_add(1) << 32) | u64::from(next);
            // No Release: a read-modify-write continues the release sequence of the word.
            match self.list.compare_exchange_weak(seen, after, Acquire, Acquire) {
                Ok(_) => return Some(slot),
                Err(now) => seen = now,
            }
        }
    }

    /// Frees a slot that the caller owns.
    pub fn free(&self, slot: u32, links: &impl Links) {
        let mut seen = self.list.load(Relaxed);
        loop {
            links.next(slot).store(seen as u32, Relaxed);
            let after = ((seen >> 32).wrapping_add(1) << 32) | u64::from(slot + 1);
            // Release: the thread that pops the slot sees `next`, and comes after all accesses to
            // the slot.
            match self.list.compare_exchange_weak(seen, after, Release, Relaxed) {
                Ok(_) => return,
                Err(now) => seen = now,
            }
        }
    }

    /// Discounts requests whose completions were taken, after the slots of those for served files were freed;
    /// or requests that the kernel did not take.
    pub fn discount(&self, served: u64, others: u64) {
        // Release: pairs with the Acquire in `admit` (SL1).
        self.counts.fetch_sub(served * SERVED_ONE + others * OTHERS_ONE, Release);
    }

    /// `count` requests have ended.
    pub fn end(&self, count: u32) {
        // Release: pairs with the Acquire in `close`.
        if count > 0 && self.in_flight.fetch_sub(count, Release) == CLOSED + count {
            sync::wake(&self.in_flight);
        }
    }

    /// Refuses new requests, and waits for those that have begun. Called by one thread.
    pub fn close(&self) {
        self.in_flight.fetch_or(CLOSED, Relaxed);
        loop {
            // Acquire: a thread that finds no request in flight sees all stores of the ended ones.
            match self.in_flight.load(Acquire) {
                CLOSED => return,
                seen => sync::wait(&self.in_flight, seen),
            }
        }
    }
}

#[cfg(all(test, loom))]
#[path = "slots/loom_tests.rs"]
mod loom_tests;

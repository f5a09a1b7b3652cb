//! The slots of a context of Linux AIO, and which requests get one: `aio.A2` and `A4`.
//!
//! ```text
//!   begin: counted, if there is room -> in flight, unless closed -> a freed slot, or a fresh one
//!   end:   in flight -= 1                     its stand-in was submitted
//!   free:  the slot is in the list, and discounted
//!   close: closed -> sleep until nothing is in flight
//! ```
//!
//! - **SL1** A request is counted before it has a slot, and until after it has freed the slot. So an
//!   admitted request that finds no freed slot finds one that was never used.
//!
//! Locks: one over all of it, a leaf.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Release};

use crate::runtime::lock::{Lock, wait, wake};

pub struct Slots {
    capacity: u32,
    state: Lock<State>,
    /// Changes when a request ends after the close.
    ends: AtomicU32,
}

struct State {
    /// Requests that are under way or not taken: for served files, and others.
    served: u64,
    others: u64,
    free: Vec<u32>,
    /// Slots from here on were never used.
    fresh: u32,
    /// Requests for served files that have not ended.
    in_flight: u32,
    is_closed: bool,
}

impl Slots {
    pub fn new(capacity: u32) -> Self {
        let state = State {
            served: 0,
            others: 0,
            free: Vec::new(),
            fresh: 0,
            in_flight: 0,
            is_closed: false,
        };
        Self { capacity, state: Lock::new(state), ends: AtomicU32::new(0) }
    }

    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Slots with this index or a higher one were never used.
    pub fn used(&self) -> u32 {
        self.state.lock().fresh
    }

    /// Counts as many of the `wanted` requests for other files as there is room for (aio.A2); to be
    /// discounted later.
    pub fn admit_others(&self, wanted: u64) -> u64 {
        let mut state = self.state.lock();
        let left = u64::from(self.capacity).saturating_sub(state.served + state.others);
        let room = if state.served == 0 { wanted } else { wanted.min(left) };
        state.others += room;
        room
    }

    /// A slot for a request that begins; the caller later ends the request and frees the slot. An errno if there is no
    /// room for another request (aio.A2), or the context is being destroyed (aio.A4).
    pub fn begin(&self) -> Result<u32, i32> {
        let mut state = self.state.lock();
        if state.served + state.others >= u64::from(self.capacity) {
            return Err(libc::EAGAIN);
        }
        if state.is_closed {
            return Err(libc::EINVAL);
        }
        state.served += 1;
        state.in_flight += 1;
        // SL1.
        Ok(state.free.pop().unwrap_or_else(|| {
            state.fresh += 1;
            state.fresh - 1
        }))
    }

    /// Frees slots that the caller owns, and discounts as many requests for other files: their completions were taken, or
    /// the kernel did not take the requests.
    pub fn free(&self, slots: &[u32], others: u64) {
        let mut state = self.state.lock();
        state.free.extend_from_slice(slots);
        state.served -= slots.len() as u64;
        state.others -= others;
    }

    /// `count` requests have ended.
    pub fn end(&self, count: u32) {
        let mut state = self.state.lock();
        state.in_flight -= count;
        if state.is_closed {
            // Release: pairs with the Acquire in `close`.
            self.ends.fetch_add(1, Release);
            wake(&self.ends);
        }
    }

    /// Refuses new requests, and waits for those that have begun.
    pub fn close(&self) {
        self.state.lock().is_closed = true;
        loop {
            // Acquire: pairs with the Release in `end`. Before the look at the state, so that no end is missed.
            let seen = self.ends.load(Acquire);
            if self.state.lock().in_flight == 0 {
                return;
            }
            wait(&self.ends, seen);
        }
    }
}

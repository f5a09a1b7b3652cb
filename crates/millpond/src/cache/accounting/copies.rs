//! Copies of source buffers by asynchronous writes, under the memory limit.
//!
//! The caller may drop the future of a write, and with it the source buffer, so a worker writes
//! from a copy. The copies of an engine may use an eighth of its limit and are charged to it. If an
//! eighth is in use, a further write waits with its source until copies are freed. So the copies
//! exceed an eighth by no more than the last one. Only a copy that is longer than the remaining
//! room is not charged completely.
//!
//! - **CO1** A copy is freed when its write has ended, whether or not its future is polled. Waiting
//!   writes have no order: a waiting write whose future is not polled does not delay the others.
//! - **CO2** Once it was needed, a 64th of the limit stays charged. Otherwise memory would be
//!   evicted for each small write.
//!
//! Locks: the lock of the state; under it those of an eviction. Wakers are called without it.

use std::collections::BTreeMap;
use std::mem;
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

use millpond_rangelock::callback::TaskWaker;

use crate::cache::Cache;
use crate::sync::MutexExt;

/// The part of the limit that copies may take.
const PART: u64 = 8;
/// The part that stays charged (CO2). Untuned.
const KEPT_PART: u64 = 64;

/// An engine, as seen by its copies.
pub(crate) trait CopyOwner {
    fn cache(&self) -> &Cache;
    fn copies(&self) -> &Copies;
}

/// The copies of one engine.
#[derive(Default)]
pub(crate) struct Copies {
    state: Mutex<CopiesState>,
}

#[derive(Default)]
struct CopiesState {
    /// Bytes of all copies.
    bytes: u64,
    /// Bytes charged for them.
    charged: u64,
    /// Waiting writes, by their numbers.
    waiting: BTreeMap<u64, TaskWaker>,
    next_number: u64,
}

impl Copies {
    /// Counts a copy of `bytes`, if there is room. Returns whether there is.
    fn try_admit(state: &mut CopiesState, cache: &Cache, bytes: u64) -> bool {
        let most = cache.frames.limit_bytes() / PART;
        let is_alone = state.bytes == 0;
        if !is_alone && state.bytes >= most {
            return false;
        }
        let wanted = (state.bytes + bytes).min(most);
        if wanted > state.charged {
            if cache.try_charge(wanted - state.charged) {
                state.charged = wanted;
            } else if !is_alone {
                // Nothing is evictable now. The end of another copy wakes this write.
                return false;
            }
        }
        state.bytes += bytes;
        true
    }

    fn release(&self, cache: &Cache, bytes: u64) {
        let mut state = self.state.acquire();
        state.bytes -= bytes;
        let limit_bytes = cache.frames.limit_bytes();
        let kept = state.charged.min(limit_bytes / KEPT_PART).max(state.bytes.min(state.charged));
        cache.frames.uncharge(state.charged - kept);
        state.charged = kept;
        let woken = mem::take(&mut state.waiting);
        drop(state);
        woken.into_values().for_each(TaskWaker::wake);
    }
}

/// A write that waits for the room of its copy.
pub(crate) struct WaitingCopy<O: CopyOwner> {
    owner: Arc<O>,
    bytes: u64,
    /// Set while its waker may be in the list.
    number: Option<u64>,
}

impl<O: CopyOwner> WaitingCopy<O> {
    pub(crate) fn new(owner: &Arc<O>, bytes: u64) -> WaitingCopy<O> {
        WaitingCopy { owner: Arc::clone(owner), bytes, number: None }
    }

    pub(crate) fn poll(&mut self, waker: &Waker) -> Poll<Counted<O>> {
        let fresh = TaskWaker::new(waker);
        let mut state = self.owner.copies().state.acquire();
        let number = self.number.take();
        let old = number.and_then(|number| state.waiting.remove(&number));
        let is_admitted = Copies::try_admit(&mut state, self.owner.cache(), self.bytes);
        if !is_admitted {
            let number = number.unwrap_or_else(|| {
                state.next_number += 1;
                state.next_number
            });
            state.waiting.insert(number, fresh);
            self.number = Some(number);
        }
        drop(state);
        // Dropping a waker may run any code, so it is not done under the lock.
        drop(old);
        if is_admitted {
            return Poll::Ready(Counted { owner: Arc::clone(&self.owner), bytes: self.bytes });
        }
        Poll::Pending
    }
}

impl<O: CopyOwner> Drop for WaitingCopy<O> {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            let old = self.owner.copies().state.acquire().waiting.remove(&number);
            drop(old);
        }
    }
}

/// A copy that is counted until this is dropped.
pub(crate) struct Counted<O: CopyOwner> {
    owner: Arc<O>,
    bytes: u64,
}

impl<O: CopyOwner> Drop for Counted<O> {
    fn drop(&mut self) {
        self.owner.copies().release(self.owner.cache(), self.bytes);
    }
}

//! The copies that asynchronous writes take of their sources, under the memory limit.
//!
//! The caller may drop the future of a write, and with it the source, so a worker writes from a copy. The copies of an
//! engine may take an eighth of its limit and count against it. A write that finds an eighth taken waits with its source until
//! copies are freed; so the copies exceed an eighth by no more than the last one, and only one that is longer
//! than the room that was left is not counted as a whole.
//!
//! - **CO1** A copy is freed when its write has ended, whether or not its future is polled. A waiting write has no
//!   place in a line: one whose future is not polled keeps no other one waiting.
//! - **CO2** A 64th of the limit stays charged once it was needed, as memory would be evicted for each small write again.
//!
//! Locks: that of the state; under it those of an eviction. Wakers are called without it.

use std::collections::BTreeMap;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Poll, Waker};

use millpond_rangelock::callback::TaskWaker;

use crate::cache::Cache;

/// The part of the limit that copies may take.
const PART: u64 = 8;
/// The part that stays charged (CO2). Chosen, not measured.
const KEPT_PART: u64 = 64;

/// An engine, as its copies see it.
pub(crate) trait CopyOwner {
    fn cache(&self) -> &Cache;
    fn copies(&self) -> &Copies;
}

/// The copies of one engine.
#[derive(Default)]
pub(crate) struct Copies {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Bytes of all copies.
    bytes: u64,
    /// Bytes that are charged for them.
    charged: u64,
    /// Writes that wait, by their numbers.
    waiting: BTreeMap<u64, TaskWaker>,
    next_number: u64,
}

impl Copies {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under the lock")
    }

    /// Whether a copy of `bytes` has room; then it is counted.
    fn try_admit(state: &mut State, cache: &Cache, bytes: u64) -> bool {
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
                // Nothing can be evicted for it now. The end of another one wakes it.
                return false;
            }
        }
        state.bytes += bytes;
        true
    }

    fn release(&self, cache: &Cache, bytes: u64) {
        let mut state = self.state();
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

/// A write that wants a copy of so many bytes.
pub(crate) struct WaitingCopy<O: CopyOwner> {
    owner: Arc<O>,
    bytes: u64,
    /// While its waker may be in the list.
    number: Option<u64>,
}

impl<O: CopyOwner> WaitingCopy<O> {
    pub(crate) fn new(owner: &Arc<O>, bytes: u64) -> WaitingCopy<O> {
        WaitingCopy { owner: Arc::clone(owner), bytes, number: None }
    }

    pub(crate) fn poll(&mut self, waker: &Waker) -> Poll<Counted<O>> {
        let fresh = TaskWaker::new(waker);
        let mut state = self.owner.copies().state();
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
        // A waker may do anything as it is dropped: not under the lock.
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
            let old = self.owner.copies().state().waiting.remove(&number);
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

//! The background reads that a task has started, and the notification of the task at their end.
//!
//! ```text
//!   start: one more in flight --> the back end
//!   end:   bytes are missing? FAILED --> publish --> release guard and slot --> one fewer in flight
//!          --> the last one: take the waker, under its lock --> wake
//!   call:  in flight? --> leave a waker there, under its lock --> still in flight?
//! ```
//!
//! - **AR1** A task that finds reads in flight at its second look is woken, by the waker of its last call: the end of
//!   the last read has not taken the waker by then.
//! - **AR2** A task that finds no read in flight finds the bytes of all.
//! - **AR3** A task that a published page wakes, before the end of the read, finds that bytes of another page are missing.

use std::sync::Arc as StdArc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::task::Waker;

use millpond_rangelock::callback::TaskWaker;

use crate::inode::CachedFile;
use crate::io::backend::shared_ring::{self, SharedRing};
use crate::io::transfer::{BackgroundRead, Segments};
use crate::sync::MutexExt;
use crate::sync::{AtomicU32, Mutex};

/// Bytes of a read are missing.
const FAILED: u32 = 1;
/// One read in flight.
const ONE: u32 = 2;

pub(crate) struct ReadCompletion {
    state: AtomicU32,
    waker: Mutex<Option<TaskWaker>>,
}

impl ReadCompletion {
    pub(crate) fn new() -> ReadCompletion {
        ReadCompletion { state: AtomicU32::new(0), waker: Mutex::new(None) }
    }

    /// One more read is in flight.
    fn begin(&self) {
        // Relaxed: by the task, or on its behalf, which looks at the state afterwards.
        self.state.fetch_add(ONE, Relaxed);
    }

    /// Bytes of a read in flight are missing.
    fn fail(&self) {
        // Release: AR3. Argued: the words that end the fill after it are released, too, and the waker passes through a
        // lock.
        self.state.fetch_or(FAILED, Release);
    }

    /// Ends a read. Returns the task to wake.
    fn end(&self) -> Option<TaskWaker> {
        // Release: AR2; the ends of the other reads are RMWs of the same word.
        let before = self.state.fetch_sub(ONE, Release);
        if before & !FAILED == ONE { self.take_waker() } else { None }
    }

    /// Whether no read is in flight. If one is, `waker` is woken at the end of the last (AR1).
    pub(crate) fn has_ended_or_wakes(&self, waker: &Waker) -> bool {
        if self.has_ended() {
            return true;
        }
        self.leave(waker);
        self.has_ended()
    }

    pub(crate) fn has_ended(&self) -> bool {
        // Acquire: AR2.
        self.state.load(Acquire) < ONE
    }

    pub(crate) fn has_failed(&self) -> bool {
        // Acquire: AR3.
        self.state.load(Acquire) & FAILED != 0
    }

    /// Leaves `waker` for the end of the last read.
    pub(crate) fn leave(&self, waker: &Waker) {
        // Cloned before the lock is taken, and dropped after it (`millpond_rangelock::callback`).
        let fresh = TaskWaker::new(waker);
        let old = self.waker.acquire().replace(fresh);
        drop(old);
    }

    pub(crate) fn take_waker(&self) -> Option<TaskWaker> {
        self.waker.acquire().take()
    }
}

/// Starts a read of `bytes` bytes at `offset`, of which the memory has room for more. At its end calls `publish` with
/// the number of bytes that have arrived; drops its references to the file; drops `keep`, which has a guard over the pages
/// (inode.CF1); and then wakes the task of `completion`, if a task waits. If the back end has no room, the read ends at
/// once, with no bytes. Returns whether it had room.
pub(crate) fn start_read<K: Send + 'static>(
    file: &StdArc<CachedFile>,
    ring: Option<&StdArc<SharedRing>>,
    (offset, bytes): (u64, u64),
    segments: Segments,
    keep: K,
    completion: Option<StdArc<ReadCompletion>>,
    publish: impl FnOnce(&CachedFile, u64) + Send + 'static,
) -> bool {
    completion.as_ref().inspect(|completion| completion.begin());
    let (owner, wanted) = (StdArc::clone(file), completion.is_some());
    let done = Box::new(move |outcome: std::io::Result<usize>| {
        let moved = outcome.unwrap_or(0) as u64;
        if moved < bytes {
            completion.as_ref().inspect(|completion| completion.fail());
        }
        publish(&owner, moved);
        drop(owner);
        drop(keep);
        if let Some(waker) = completion.and_then(|completion| completion.end()) {
            waker.wake();
        }
    });
    let read = BackgroundRead { offset, wanted, direct: false, segments, done };
    match shared_ring::start_read(ring, StdArc::clone(&file.backing), read) {
        Ok(()) => true,
        Err(read) => {
            read.done.end(Ok(0));
            false
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use std::sync::Arc as Untracked;
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::Relaxed;
    use std::task::Wake;

    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    struct Woken(AtomicBool);

    impl Wake for Woken {
        fn wake(self: Untracked<Self>) {
            self.0.store(true, Relaxed);
        }
    }

    /// A read that ends beside a task that is called with another waker. `call` is the task's step.
    fn ends_beside_a_call(call: fn(&ReadCompletion, &Waker) -> bool) {
        loom::model(move || {
            let first = &Waker::from(Untracked::new(Woken(AtomicBool::new(false))));
            let shared = Arc::new((ReadCompletion::new(), UnsafeCell::new(0)));
            shared.0.begin();
            shared.0.leave(first);
            let task = Untracked::new(Woken(AtomicBool::new(false)));
            let caller = thread::spawn({
                let (shared, task) = (Arc::clone(&shared), Untracked::clone(&task));
                move || {
                    let (arrival, byte) = &*shared;
                    let has_ended = call(arrival, &task.into());
                    if has_ended {
                        // SAFETY: loom checks this access for races.
                        assert_eq!(byte.with(|byte| unsafe { *byte }), 7);
                    }
                    has_ended
                }
            });
            let (arrival, byte) = &*shared;
            // SAFETY: as above.
            byte.with_mut(|byte| unsafe { *byte = 7 });
            if let Some(waker) = arrival.end() {
                waker.wake();
            }
            let has_ended = caller.join().unwrap();
            assert!(has_ended || task.0.load(Relaxed), "nobody wakes it");
        });
    }

    #[test]
    fn a_task_finds_the_bytes_or_is_woken() {
        ends_beside_a_call(ReadCompletion::has_ended_or_wakes);
    }

    #[test]
    #[should_panic(expected = "nobody wakes it")]
    fn twin_without_the_second_look() {
        ends_beside_a_call(|arrival, waker| {
            let has_ended = arrival.has_ended();
            if !has_ended {
                arrival.has_ended_or_wakes(waker);
            }
            has_ended
        });
    }
}

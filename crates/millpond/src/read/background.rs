//! Background reads of page frames, for tasks and for read-ahead.
//!
//! ```text
//!   start: one more in flight --> the back end
//!   end:   bytes are missing? FAILED --> publish --> release guard and slot --> one fewer in flight
//!          --> the last one: take the waker, under its lock --> wake
//!   call:  in flight? --> set the waker, under its lock --> still in flight?
//! ```
//!
//! The frames are those of pages that are FILLING (`read::run`), or belong to the task alone ([`FrameBypass`]).
//!
//! - **AR1** A task that finds reads in flight at its second look is woken, by the waker of its last call: the end of
//!   the last read has not taken the waker by then.
//! - **AR2** A task that finds no read in flight finds the bytes of all.
//! - **AR3** A task that a published page wakes, before the end of the read, finds that bytes of another page are
//!   missing.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::task::Waker;

use millpond_rangelock::OwnedGuard;
use millpond_rangelock::callback::TaskWaker;
use smallvec::SmallVec;

use crate::cache::frames::class::Class;
use crate::copy::Source;
use crate::error::{Error, Op, Result};
use crate::inode::{CachedFile, Shared};
use crate::io::backend::shared_ring::{self, SharedRing};
use crate::io::read_limit::Flight;
use crate::io::segment::{Segment, SegmentIter};
use crate::io::transfer::{BackgroundRead, Segments};
use crate::read::hit::copy_out;
use crate::read::plan::{BYPASS_PAGES_MAX, ReadExtent};
use crate::sync::MutexExt;
use crate::sync::{AtomicU32, Mutex};
use crate::units::FrameIndex;

/// Bytes of a read are missing.
const FAILED: u32 = 1;
/// One read in flight.
const ONE: u32 = 2;

/// Counts the reads of a task that are in flight, and wakes the task at the end of the last.
pub(crate) struct ReadsInFlight {
    state: AtomicU32,
    waker: Mutex<Option<TaskWaker>>,
}

impl ReadsInFlight {
    pub(crate) fn new() -> ReadsInFlight {
        ReadsInFlight { state: AtomicU32::new(0), waker: Mutex::new(None) }
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
        // Cloned before the lock is taken (`millpond_rangelock::callback`).
        self.set_waker(TaskWaker::new(waker));
        let has_ended = self.has_ended();
        if has_ended {
            // A waker that is kept may keep the task that keeps this.
            drop(self.take_waker());
        }
        has_ended
    }

    pub(crate) fn has_ended(&self) -> bool {
        // Acquire: AR2.
        self.state.load(Acquire) < ONE
    }

    pub(crate) fn has_failed(&self) -> bool {
        // Acquire: AR3. Argued: see `fail`.
        self.state.load(Acquire) & FAILED != 0
    }

    /// The end of the last read wakes `waker`.
    pub(crate) fn set_waker(&self, waker: TaskWaker) {
        let old = self.waker.acquire().replace(waker);
        // Dropped after the lock is released.
        drop(old);
    }

    pub(crate) fn take_waker(&self) -> Option<TaskWaker> {
        self.waker.acquire().take()
    }
}

/// Starts a read of `bytes` bytes at `offset`, and of as many more as `segments` have room for. Its end calls `publish`
/// with the number of bytes that have arrived, drops its references to the file, and drops `keep`, which has a guard
/// over the pages (inode.CF1). Then it wakes the task of `completion`, if a task waits. If the back end has no room, the
/// read ends at once, with no bytes. Returns whether it had room.
pub(crate) fn start_read<K: Send + 'static>(
    file: &Arc<CachedFile>,
    ring: Option<&Arc<SharedRing>>,
    (offset, bytes): (u64, u64),
    segments: Segments,
    keep: K,
    completion: Option<Arc<ReadsInFlight>>,
    publish: impl FnOnce(&CachedFile, u64) + Send + 'static,
) -> bool {
    completion.as_ref().inspect(|completion| completion.begin());
    let (owner, wanted) = (Arc::clone(file), completion.is_some());
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
    match shared_ring::start_read(ring, Arc::clone(&file.backing), read) {
        Ok(()) => true,
        Err(read) => {
            read.done.end(Ok(0));
            false
        }
    }
}

/// The frames of a read of a task that caches no page (`read::plan`). No word refers to them: the task copies the bytes
/// from there, and frees them.
pub(crate) struct FrameBypass {
    /// Has the frames. Not the file, which the completion drops before the guard (inode.CF1).
    shared: Arc<Shared>,
    frames: SmallVec<[FrameIndex; 2]>,
    class: Class,
    extent: ReadExtent,
}

impl FrameBypass {
    /// Starts a read of `extent`, under a guard over it. Returns the guard if no slot or frame is free, or the read is
    /// too long.
    pub(crate) fn start(
        file: &Arc<CachedFile>,
        guard: OwnedGuard,
        extent: ReadExtent,
        completion: &Arc<ReadsInFlight>,
        ring: Option<&Arc<SharedRing>>,
    ) -> std::result::Result<Arc<FrameBypass>, OwnedGuard> {
        let cache = file.cache();
        let (first, last) = extent.pages(file);
        if last - first >= BYPASS_PAGES_MAX {
            return Err(guard);
        }
        let Some(slot) = Flight::try_enter(&file.shared.flight) else { return Err(guard) };
        let class = file.core().page_class();
        let shared = Arc::clone(&file.shared);
        let mut bypass = FrameBypass { shared, frames: SmallVec::new(), class, extent };
        for _ in first.to(last) {
            let Some(frame) = cache.take_frame(class) else { return Err(guard) };
            bypass.frames.push(frame);
        }
        cache.counters.local().missed(bypass.frames.len() as u64);
        let bypass = Arc::new(bypass);
        let page_bytes = file.core().page_bytes();
        let memory = bypass.frames.iter().map(|&frame| cache.frames.bytes(frame));
        // SAFETY: no word refers to these frames; `bypass` owns them, and `publish` keeps it until the read has ended.
        let segments = memory.map(|bytes| unsafe { Segment::new(bytes, page_bytes) }).collect();
        let start = file.start_of(first);
        let (range, keep) = ((start, extent.end - start), (guard, slot));
        let (completion, reading) = (Arc::clone(completion), Arc::clone(&bypass));
        let publish = move |_: &CachedFile, _| drop(reading);
        start_read(file, ring, range, segments, keep, Some(completion), publish);
        Ok(bypass)
    }

    /// Caller: the read of `file` has ended, with all bytes. Copies them to the task's memory.
    pub(crate) fn copy_to(&self, file: &CachedFile, dst: SegmentIter<'_>) -> Result<usize> {
        let ReadExtent { offset, end, .. } = self.extent;
        let page_bytes = file.core().page_bytes() as u64;
        let mut faulted = false;
        for (page, &frame) in file.page_of(offset).onwards().zip(&self.frames) {
            let page_start = file.start_of(page);
            let (from, to) = (page_start.max(offset), (page_start + page_bytes).min(end));
            let bytes = file.cache().frames.bytes(frame);
            // SAFETY: within the frame, which is ours, and within the part of `dst` for it, for which the maker of
            // `dst` vouched.
            faulted |= unsafe {
                let part = dst.slice(from - offset, to - from);
                copy_out(part, bytes.add((from - page_start) as usize), Source::Near).is_err()
            };
        }
        let len = self.extent.len();
        if let Some(pages) = file.mapped_pages.as_deref() {
            pages.note_slow_read(&*file.backing, end);
        }
        file.cache().counters.local().moved_past_cache(len);
        if faulted {
            return Err(Error::Fault { op: Op::Read, offset, len });
        }
        Ok(len as usize)
    }
}

impl Drop for FrameBypass {
    fn drop(&mut self) {
        let frames = &self.shared.cache.frames;
        self.frames.iter().for_each(|&frame| frames.free(frame, self.class));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use std::sync::atomic::AtomicBool;
    use std::task::Wake;

    use loom::cell::UnsafeCell;
    use loom::thread;

    use super::*;

    struct Woken(AtomicBool);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Relaxed);
        }
    }

    /// Two reads that end beside a task that is called with another waker. `call` is the task's step.
    fn end_beside_a_call(call: fn(&ReadsInFlight, &Waker) -> bool) {
        loom::model(move || {
            let first = &Waker::from(Arc::new(Woken(AtomicBool::new(false))));
            let bytes = [UnsafeCell::new(0), UnsafeCell::new(0)];
            let shared = loom::sync::Arc::new((ReadsInFlight::new(), bytes));
            shared.0.begin();
            shared.0.begin();
            shared.0.set_waker(TaskWaker::new(first));
            let end = |number: usize| {
                let shared = loom::sync::Arc::clone(&shared);
                move || {
                    let (completion, bytes) = &*shared;
                    // SAFETY: loom checks this access for races.
                    bytes[number].with_mut(|byte| unsafe { *byte = 7 });
                    if let Some(waker) = completion.end() {
                        waker.wake();
                    }
                }
            };
            let other = thread::spawn(end(1));
            let task = Arc::new(Woken(AtomicBool::new(false)));
            let caller = thread::spawn({
                let (shared, task) = (loom::sync::Arc::clone(&shared), Arc::clone(&task));
                move || {
                    let (completion, bytes) = &*shared;
                    let has_ended = call(completion, &task.into());
                    if has_ended {
                        for byte in bytes {
                            // SAFETY: as above.
                            assert_eq!(byte.with(|byte| unsafe { *byte }), 7);
                        }
                    }
                    has_ended
                }
            });
            end(0)();
            other.join().unwrap();
            let has_ended = caller.join().unwrap();
            assert!(has_ended || task.0.load(Relaxed), "nobody wakes it");
        });
    }

    #[test]
    fn a_task_finds_the_bytes_or_is_woken() {
        end_beside_a_call(ReadsInFlight::has_ended_or_wakes);
    }

    #[test]
    #[should_panic(expected = "nobody wakes it")]
    fn twin_without_the_second_look() {
        end_beside_a_call(|completion, waker| {
            let has_ended = completion.has_ended();
            if !has_ended {
                completion.has_ended_or_wakes(waker);
            }
            has_ended
        });
    }
}

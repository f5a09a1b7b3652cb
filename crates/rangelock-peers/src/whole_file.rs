//! One reader-writer lock for the whole file, as in XFS.
//!
//! Every range conflicts as if it were the whole file. The front is one word with the number of shared holders or the
//! exclusive bit. A request that can't be counted there waits in the queue.
//!
//! ```text
//! word = shared holders << 2 | EXCLUSIVE << 1 | GATE
//! ```
//!
//! - F1. GATE is set while the queue has an entry. While it is set, the word changes only under the mutex. So no request
//!   overtakes the queue, and blockers can be counted.

use std::time::Duration;

use millpond_rangelock::parts::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use millpond_rangelock::parts::sync::{Mutex, MutexGuard, lock};
use millpond_rangelock::parts::{Notify, Queue, Ticket, unlock_and_wake};
use millpond_rangelock::{ByteRange, Mode, RawRangeLock, Request};

const GATE: u64 = 1;
const EXCLUSIVE: u64 = 2;
const ONE_SHARED: u64 = 4;

/// A fair reader-writer lock that treats every range as the whole file.
///
/// ```
/// use millpond_rangelock::{ByteRange, Mode, RangeLock};
/// use millpond_rangelock_peers::WholeFile;
/// let lock = RangeLock::<WholeFile>::with_raw();
/// let guard = lock.lock(ByteRange::at(0, 10)?, Mode::Exclusive);
/// assert!(lock.try_lock(ByteRange::at(10, 10)?, Mode::Exclusive).is_none());
/// # Ok::<(), millpond_rangelock::RangeError>(())
/// ```
#[derive(Debug)]
pub struct WholeFile {
    word: AtomicU64,
    /// Number of requests that wait in the queue: a hint whether to spin.
    waiting: AtomicU32,
    queue: Mutex<Queue>,
}

/// Where a guard's hold is counted.
#[derive(Debug)]
pub enum WholeFileHold {
    /// In the word.
    Front,
    /// In the queue.
    Queue(Ticket),
}

impl Default for WholeFile {
    fn default() -> WholeFile {
        WholeFile {
            word: AtomicU64::new(0),
            waiting: AtomicU32::new(0),
            queue: Mutex::new(Queue::default()),
        }
    }
}

/// The value that a holder in `mode` adds to the word.
fn weight(mode: Mode) -> u64 {
    match mode {
        Mode::Shared => ONE_SHARED,
        Mode::Exclusive => EXCLUSIVE,
    }
}

impl WholeFile {
    fn claim_word(&self, mode: Mode) -> bool {
        let blocked_by = match mode {
            Mode::Shared => GATE | EXCLUSIVE,
            Mode::Exclusive => u64::MAX,
        };
        let mut word = self.word.load(Ordering::Relaxed);
        while word & blocked_by == 0 {
            // Acquire: pairs with the Release in `release` and `unlock_queue`.
            match self.word.compare_exchange_weak(
                word,
                word + weight(mode),
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(now) => word = now,
            }
        }
        false
    }

    /// Closes the word to claims and releases (F1), and returns it.
    fn gate(&self) -> u64 {
        // Acquire: pairs with the Release in `release`.
        self.word.fetch_or(GATE, Ordering::Acquire)
    }

    /// Ends a critical section: opens the word if the queue is empty.
    fn unlock_queue(&self, queue: MutexGuard<'_, Queue>) {
        self.waiting.store(queue.waiting() as u32, Ordering::Relaxed);
        if queue.is_empty() {
            // Release: pairs with the Acquire in `claim_word`.
            self.word.fetch_and(!GATE, Ordering::Release);
        }
        unlock_and_wake(&self.queue, queue, |queue| queue);
    }

    /// Closes the word, and counts the holders in it that conflict with a request.
    fn blockers(&self, mode: Mode) -> u32 {
        let word = self.gate();
        match mode {
            _ if word & EXCLUSIVE != 0 => 1,
            Mode::Exclusive => (word / ONE_SHARED) as u32,
            Mode::Shared => 0,
        }
    }

    fn enqueue(
        &self,
        mode: Mode,
        notify: &mut Option<Notify>,
    ) -> Option<Request<WholeFileHold, Ticket>> {
        let mut queue = lock(&self.queue);
        let blockers = self.blockers(mode);
        let request = queue.insert(ByteRange::ALL, mode, blockers, notify);
        self.unlock_queue(queue);
        Some(match request? {
            Request::Granted(ticket) => Request::Granted(WholeFileHold::Queue(ticket)),
            Request::Queued(ticket) => Request::Queued(ticket),
        })
    }

    #[cold]
    fn release_gated(&self, mode: Mode) {
        let mut queue = lock(&self.queue);
        self.gate();
        // Relaxed: later claims follow `unlock_queue`, and all other accesses hold the mutex.
        self.word.fetch_sub(weight(mode), Ordering::Relaxed);
        queue.front_released(ByteRange::ALL, mode);
        self.unlock_queue(queue);
    }
}

impl RawRangeLock for WholeFile {
    type Held = WholeFileHold;
    type Queued = Ticket;

    const NAME: &'static str = "whole-file";

    #[inline]
    fn request(
        &self,
        _range: ByteRange,
        mode: Mode,
        notify: impl FnOnce() -> Notify,
    ) -> Request<WholeFileHold, Ticket> {
        if self.claim_word(mode) {
            return Request::Granted(WholeFileHold::Front);
        }
        self.enqueue(mode, &mut Some(notify())).expect("a waiter was passed")
    }

    fn try_request(&self, _range: ByteRange, mode: Mode) -> Option<WholeFileHold> {
        if self.claim_word(mode) {
            return Some(WholeFileHold::Front);
        }
        match self.enqueue(mode, &mut None)? {
            Request::Granted(held) => Some(held),
            Request::Queued(_) => unreachable!("queued without a waiter"),
        }
    }

    #[inline]
    fn claim(&self, _range: ByteRange, mode: Mode) -> Option<WholeFileHold> {
        self.claim_word(mode).then_some(WholeFileHold::Front)
    }

    fn is_crowded(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    fn patience(queued: &Ticket) -> Option<Duration> {
        queued.patience()
    }

    fn set_offer_grace(&self, grace: Duration) {
        lock(&self.queue).set_grace(grace);
    }

    fn expire(&self) {
        let mut queue = lock(&self.queue);
        queue.expire();
        self.unlock_queue(queue);
    }

    fn poll(
        &self,
        _range: ByteRange,
        mode: Mode,
        queued: Ticket,
        notify: impl FnOnce() -> Notify,
    ) -> Request<WholeFileHold, Ticket> {
        let mut notify = Some(notify());
        let mut queue = lock(&self.queue);
        let in_front = if queue.is_lapsed(&queued) { self.blockers(mode) } else { 0 };
        let request = queue.poll(queued, in_front, &mut notify);
        self.unlock_queue(queue);
        match request {
            Request::Granted(ticket) => Request::Granted(WholeFileHold::Queue(ticket)),
            Request::Queued(ticket) => Request::Queued(ticket),
        }
    }

    fn cancel(&self, _range: ByteRange, _mode: Mode, queued: Ticket) -> Option<WholeFileHold> {
        let mut queue = lock(&self.queue);
        if queue.is_granted(&queued) {
            return Some(WholeFileHold::Queue(queued));
        }
        let notify = queue.remove(queued);
        self.unlock_queue(queue);
        drop(notify);
        None
    }

    #[inline]
    fn release(&self, _range: ByteRange, mode: Mode, held: WholeFileHold) {
        if let WholeFileHold::Queue(ticket) = held {
            let mut queue = lock(&self.queue);
            drop(queue.remove(ticket));
            return self.unlock_queue(queue);
        }
        let mut word = self.word.load(Ordering::Relaxed);
        while word & GATE == 0 {
            // Release: pairs with the Acquire in `claim_word` and `gate`.
            match self.word.compare_exchange_weak(
                word,
                word - weight(mode),
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return,
                Err(now) => word = now,
            }
        }
        self.release_gated(mode);
    }

    fn try_upgrade(&self, _range: ByteRange, held: &mut WholeFileHold) -> bool {
        let mut queue = lock(&self.queue);
        let word = self.gate();
        let upgraded = match held {
            WholeFileHold::Front => {
                let alone = word / ONE_SHARED == 1 && queue.count_held(ByteRange::ALL) == 0;
                if alone {
                    self.word.fetch_add(EXCLUSIVE.wrapping_sub(ONE_SHARED), Ordering::Relaxed);
                    queue.front_upgraded(ByteRange::ALL);
                }
                alone
            }
            WholeFileHold::Queue(ticket) => word & !GATE == 0 && queue.try_upgrade(ticket),
        };
        self.unlock_queue(queue);
        upgraded
    }

    fn downgrade(&self, _range: ByteRange, held: &mut WholeFileHold) {
        let mut queue = lock(&self.queue);
        self.gate();
        match held {
            WholeFileHold::Front => {
                // Relaxed: as in `release_gated`.
                self.word.fetch_add(ONE_SHARED - EXCLUSIVE, Ordering::Relaxed);
                queue.front_downgraded(ByteRange::ALL);
            }
            WholeFileHold::Queue(ticket) => queue.downgrade(ticket),
        }
        self.unlock_queue(queue);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    use super::*;
    use millpond_rangelock::RangeLock;

    struct Bytes(UnsafeCell<u64>);

    // SAFETY: the test checks that the lock orders all accesses.
    unsafe impl Sync for Bytes {}
    // SAFETY: as above.
    unsafe impl Send for Bytes {}

    impl Bytes {
        fn touch(&self, mode: Mode) {
            match mode {
                // SAFETY: loom checks it.
                Mode::Shared => self.0.with(|bytes| assert!(unsafe { *bytes } < 4)),
                // SAFETY: loom checks it.
                Mode::Exclusive => self.0.with_mut(|bytes| unsafe { *bytes += 1 }),
            }
        }
    }

    fn pair(modes: [Mode; 2], blocking: bool) {
        loom::model(move || {
            let lock = Arc::new(RangeLock::<WholeFile>::with_raw());
            let bytes = Arc::new(Bytes(UnsafeCell::new(0)));
            let work = move |lock: &RangeLock<WholeFile>, bytes: &Bytes, mode| {
                let guard = match blocking {
                    true => Some(lock.lock(ByteRange::ALL, mode)),
                    false => lock.try_lock(ByteRange::ALL, mode),
                };
                if guard.is_some() {
                    bytes.touch(mode);
                }
            };
            let other = thread::spawn({
                let (lock, bytes) = (Arc::clone(&lock), Arc::clone(&bytes));
                move || work(&lock, &bytes, modes[1])
            });
            work(&lock, &bytes, modes[0]);
            other.join().unwrap();
            assert!(
                lock.try_lock(ByteRange::ALL, Mode::Exclusive).is_some(),
                "a range is still locked"
            );
        });
    }

    #[test]
    fn loom_whole_file_exclusives() {
        pair([Mode::Exclusive, Mode::Exclusive], true);
    }

    #[test]
    fn loom_whole_file_shared_and_exclusive() {
        pair([Mode::Shared, Mode::Exclusive], true);
    }

    #[test]
    fn loom_whole_file_tries() {
        pair([Mode::Shared, Mode::Exclusive], false);
    }

    /// Goal: a thread that claims the word sees the writes of holders in the queue.
    #[test]
    fn loom_whole_file_queue_then_word() {
        loom::model(|| {
            let lock = Arc::new(RangeLock::<WholeFile>::with_raw());
            let bytes = Arc::new(Bytes(UnsafeCell::new(0)));
            let other = thread::spawn({
                let (lock, bytes) = (Arc::clone(&lock), Arc::clone(&bytes));
                move || {
                    for _ in 0..2 {
                        if let Some(_guard) = lock.try_lock(ByteRange::ALL, Mode::Exclusive) {
                            bytes.touch(Mode::Exclusive);
                        }
                    }
                }
            });
            let guard = lock.lock(ByteRange::ALL, Mode::Exclusive);
            bytes.touch(Mode::Exclusive);
            drop(guard);
            other.join().unwrap();
        });
    }
}

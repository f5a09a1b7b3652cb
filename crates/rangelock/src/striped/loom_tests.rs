//! Loom models of the striped lock: all interleavings, at small sizes.
//!
//! Run by `RUSTFLAGS="--cfg loom" cargo test --release --lib loom`. Under loom a stripe has 2 slots, a region 4 bytes,
//! the larger table 2 stripes, a range at most 2 pieces, and a waiting thread yields.
//!
//! `scripts/weaken` weakens each ordering in turn and expects one of these models to fail. Loom does not model load
//! buffering: no load sees a store that comes later in program order. So the Release half of a claim, which keeps the
//! loads of the slots before it, is argued in `stripe`.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use super::*;
use crate::lock::RangeLock;
use crate::sync::atomic::AtomicU64;

fn r(start: u64, end: u64) -> ByteRange {
    ByteRange::raw(start, end)
}

/// The data that the ranges guard: loom fails if two threads access it without an order between them.
struct Bytes(UnsafeCell<u64>);

// SAFETY: the tests check that the lock orders all accesses.
unsafe impl Sync for Bytes {}
// SAFETY: as above.
unsafe impl Send for Bytes {}

impl Bytes {
    fn new() -> Bytes {
        Bytes(UnsafeCell::new(0))
    }

    fn write(&self) {
        // SAFETY: loom checks it.
        self.0.with_mut(|bytes| unsafe { *bytes += 1 });
    }

    fn read(&self) -> u64 {
        // SAFETY: loom checks it.
        self.0.with(|bytes| unsafe { *bytes })
    }
}

fn model(f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(f);
}

fn claim(stripe: &Stripe, range: ByteRange, mode: Mode) -> Option<Claimed> {
    stripe.claim_first(range, mode).ok().or_else(|| match stripe.claim(range, mode, 2, &mut 0) {
        Claim::Slot(claimed) => Some(claimed),
        _ => None,
    })
}

/// Releases a claim; false if the gate was set.
fn try_release(stripe: &Stripe, claimed: Claimed, range: ByteRange) -> bool {
    match stripe.release_fast(claimed) {
        Ok(()) => true,
        Err(control) => stripe.release_from(control, claimed.slot, range) == Release::Done,
    }
}

fn release(stripe: &Stripe, claimed: Claimed, range: ByteRange) {
    assert!(try_release(stripe, claimed, range));
}

/// Goal: overlapping exclusive claims of one stripe exclude each other and order the accesses to the bytes, even if other
/// ranges reuse the slots in between (stripe.P2, stripe.P3).
#[test]
fn loom_claims_exclude() {
    model(|| {
        let stripe = Arc::new(Stripe::new());
        let bytes = Arc::new(Bytes::new());
        let other = thread::spawn({
            let (stripe, bytes) = (Arc::clone(&stripe), Arc::clone(&bytes));
            move || {
                // First claim a disjoint range, in the slot that the conflicting range may then get.
                if let Some(slot) = claim(&stripe, r(8, 9), Mode::Exclusive) {
                    release(&stripe, slot, r(8, 9));
                }
                if let Some(slot) = claim(&stripe, r(0, 2), Mode::Exclusive) {
                    bytes.write();
                    release(&stripe, slot, r(0, 2));
                }
            }
        });
        if let Some(slot) = claim(&stripe, r(1, 3), Mode::Exclusive) {
            bytes.write();
            release(&stripe, slot, r(1, 3));
        }
        other.join().unwrap();
        assert!(claim(&stripe, r(0, 9), Mode::Exclusive).is_some(), "a range is still locked");
    });
}

/// Goal: a claim that lost a race reads the slots again.
#[test]
fn loom_claim_looks_again() {
    model(|| {
        let stripe = Arc::new(Stripe::new());
        let bytes = Arc::new(Bytes::new());
        let other = thread::spawn({
            let (stripe, bytes) = (Arc::clone(&stripe), Arc::clone(&bytes));
            move || {
                if let Claim::Slot(_) = stripe.claim(r(1, 3), Mode::Exclusive, 2, &mut 0) {
                    bytes.write();
                }
            }
        });
        let elsewhere = claim(&stripe, r(8, 9), Mode::Exclusive);
        if let Some(slot) = elsewhere {
            release(&stripe, slot, r(8, 9));
        }
        if claim(&stripe, r(0, 2), Mode::Exclusive).is_some() {
            bytes.write();
        }
        other.join().unwrap();
    });
}

/// Goal: a conflict reported as certain was held, even if a slot changes from one range to another.
/// Method: neither range overlaps the request, but the start of the second with the end of the first would. The thread that
/// changes the slot runs first: see `docs/testing.md`.
#[test]
fn loom_a_conflict_that_is_certain() {
    model(|| {
        let stripe = Arc::new(Stripe::new());
        let first = claim(&stripe, r(5, 8), Mode::Exclusive).unwrap();
        let other = thread::spawn({
            let stripe = Arc::clone(&stripe);
            move || {
                let outcome = stripe.claim(r(3, 4), Mode::Exclusive, 0, &mut 0);
                assert!(!matches!(outcome, Claim::Held), "never held");
            }
        });
        release(&stripe, first, r(5, 8));
        let _ = claim(&stripe, r(0, 2), Mode::Exclusive);
        other.join().unwrap();
    });
}

/// Goal: shared claims see the writes of the exclusive one before them, and end before the next one.
#[test]
fn loom_shared_claims_read() {
    model(|| {
        let stripe = Arc::new(Stripe::new());
        let bytes = Arc::new(Bytes::new());
        let readers: Vec<_> = (0..2)
            .map(|_| {
                let (stripe, bytes) = (Arc::clone(&stripe), Arc::clone(&bytes));
                thread::spawn(move || {
                    if let Some(slot) = claim(&stripe, r(0, 2), Mode::Shared) {
                        bytes.read();
                        release(&stripe, slot, r(0, 2));
                    }
                })
            })
            .collect();
        if let Some(slot) = claim(&stripe, r(0, 2), Mode::Exclusive) {
            bytes.write();
            release(&stripe, slot, r(0, 2));
        }
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    });
}

/// Goal: a gated stripe does not change and shows whole ranges, even if its owner was about to release (stripe.P1,
/// stripe.P3).
#[test]
fn loom_gate_meets_claim_and_release() {
    model(|| {
        let stripe = Arc::new(Stripe::new());
        let bytes = Arc::new(Bytes::new());
        let owner = thread::spawn({
            let (stripe, bytes) = (Arc::clone(&stripe), Arc::clone(&bytes));
            move || {
                let claimed = claim(&stripe, r(0, 2), Mode::Exclusive)?;
                bytes.write();
                let released = try_release(&stripe, claimed, r(0, 2));
                (!released).then_some(claimed)
            }
        });
        // As a thread that holds the mutex does.
        stripe.gate();
        let mut held = 0;
        stripe.for_each_held(|_, range, mode| {
            assert_eq!((range, mode), (r(0, 2), Mode::Exclusive));
            held += 1;
        });
        let mut again = 0;
        stripe.for_each_held(|_, _, _| again += 1);
        assert_eq!(held, again, "the stripe moved");
        if held == 0 {
            bytes.write();
        }
        stripe.ungate();
        let left = owner.join().unwrap();
        assert!(held == 1 || left.is_none(), "gated with nothing held");
    });
}

/// Goal: a claim sees the writes under a gate that was set and cleared after its first load.
#[test]
fn loom_claim_follows_gate() {
    model(|| {
        let stripe = Arc::new(Stripe::new());
        let bytes = Arc::new(Bytes::new());
        let owner = thread::spawn({
            let (stripe, bytes) = (Arc::clone(&stripe), Arc::clone(&bytes));
            move || {
                if let Claim::Slot(_) = stripe.claim(r(0, 2), Mode::Exclusive, 2, &mut 0) {
                    bytes.write();
                }
            }
        });
        stripe.gate();
        let mut held = 0;
        stripe.for_each_held(|_, _, _| held += 1);
        if held == 0 {
            bytes.write();
        }
        stripe.ungate();
        owner.join().unwrap();
    });
}

fn blocking_pair(first: (ByteRange, Mode), second: (ByteRange, Mode), stripes: usize) {
    let lock = Arc::new(RangeLock::new());
    if stripes > 1 {
        let raw: &Striped = lock.raw();
        raw.grow(&mut crate::sync::lock(&raw.state), u32::MAX);
    }
    let bytes = Arc::new(Bytes::new());
    let work = |lock: &RangeLock, bytes: &Bytes, (range, mode): (ByteRange, Mode)| {
        let guard = lock.lock(range, mode);
        match mode {
            Mode::Exclusive => bytes.write(),
            Mode::Shared => drop(bytes.read()),
        }
        drop(guard);
    };
    let other = thread::spawn({
        let (lock, bytes) = (Arc::clone(&lock), Arc::clone(&bytes));
        move || work(&lock, &bytes, second)
    });
    work(&lock, &bytes, first);
    other.join().unwrap();
    assert!(lock.try_lock(ByteRange::ALL, Mode::Exclusive).is_some(), "a range is still locked");
}

/// Goal: blocking requests for one range exclude each other, and none sleeps indefinitely. Covers claim, queue, gate, grant
/// and signal.
#[test]
fn loom_blocking_exclusives() {
    model(|| {
        blocking_pair((r(0, 2), Mode::Exclusive), (r(1, 3), Mode::Exclusive), 1);
    });
}

/// Goal: the same of a range in one region against one in two.
#[test]
fn loom_narrow_meets_two_pieces() {
    model(|| {
        blocking_pair((r(5, 6), Mode::Exclusive), (r(2, 6), Mode::Exclusive), 2);
    });
}

/// Goal: the same of a narrow range against one that takes every gate (striped.R3).
#[test]
fn loom_narrow_meets_wide() {
    model(|| {
        blocking_pair((r(5, 6), Mode::Shared), (r(0, 100), Mode::Exclusive), 2);
    });
}

/// Goal: two ranges of two pieces that overlap in both never wait for each other's piece (striped.R2).
#[test]
fn loom_pieces_do_not_deadlock() {
    model(|| {
        blocking_pair((r(0, 8), Mode::Exclusive), (r(2, 7), Mode::Exclusive), 2);
    });
}

/// Goal: whole-file shared holders in the counter exclude a narrow exclusive request and are excluded by it, while the bias
/// is created and removed (striped.R4).
#[test]
fn loom_whole_shared_meets_exclusive() {
    model(|| {
        let lock = Arc::new(RangeLock::new());
        let raw: &Striped = lock.raw();
        raw.grow(&mut crate::sync::lock(&raw.state), u32::MAX);
        // The second request in a row opens the counter.
        drop(lock.lock(ByteRange::ALL, Mode::Shared));
        let counted = lock.lock(ByteRange::ALL, Mode::Shared);
        let bytes = Arc::new(Bytes::new());
        let writer = thread::spawn({
            let (lock, bytes) = (Arc::clone(&lock), Arc::clone(&bytes));
            move || {
                let _guard = lock.lock(r(0, 2), Mode::Exclusive);
                bytes.write();
            }
        });
        bytes.read();
        drop(counted);
        if let Some(_guard) = lock.try_lock(ByteRange::ALL, Mode::Shared) {
            bytes.read();
        }
        writer.join().unwrap();
        assert!(
            lock.try_lock(ByteRange::ALL, Mode::Exclusive).is_some(),
            "a range is still locked"
        );
    });
}

/// A lock of several stripes whose counter is open and counts one holder.
fn opened() -> Arc<RangeLock> {
    let lock = Arc::new(RangeLock::new());
    let raw: &Striped = lock.raw();
    raw.grow(&mut crate::sync::lock(&raw.state), u32::MAX);
    drop(lock.lock(ByteRange::ALL, Mode::Shared));
    drop(lock.lock(ByteRange::ALL, Mode::Shared));
    lock
}

/// A thread that reads if it can lock the whole file shared without waiting.
fn reader(lock: &Arc<RangeLock>, bytes: &Arc<Bytes>) -> thread::JoinHandle<()> {
    let (lock, bytes) = (Arc::clone(lock), Arc::clone(bytes));
    thread::spawn(move || {
        if let Some(_guard) = lock.try_lock(ByteRange::ALL, Mode::Shared) {
            bytes.read();
        }
    })
}

/// Goal: the thread that drains the counter orders the next holder after all earlier decrements.
#[test]
fn loom_last_counted_hands_over_for_all() {
    model(|| {
        let lock = opened();
        let bytes = Arc::new(Bytes::new());
        let reader = reader(&lock, &bytes);
        let counted = lock.try_lock(ByteRange::ALL, Mode::Shared);
        let writer = thread::spawn({
            let (lock, bytes) = (Arc::clone(&lock), Arc::clone(&bytes));
            move || {
                let _guard = lock.lock(r(0, 2), Mode::Exclusive);
                bytes.write();
            }
        });
        drop(counted);
        reader.join().unwrap();
        writer.join().unwrap();
    });
}

/// Goal: a thread that increments the counter sees the writes before it was opened.
#[test]
fn loom_opening_hands_over() {
    model(|| {
        let lock = Arc::new(RangeLock::new());
        let raw: &Striped = lock.raw();
        raw.grow(&mut crate::sync::lock(&raw.state), u32::MAX);
        let bytes = Arc::new(Bytes::new());
        let reader = reader(&lock, &bytes);
        {
            let _guard = lock.lock(r(0, 2), Mode::Exclusive);
            bytes.write();
        }
        drop(lock.lock(ByteRange::ALL, Mode::Shared));
        drop(lock.lock(ByteRange::ALL, Mode::Shared));
        reader.join().unwrap();
    });
}

/// Goal: after the counter is closed for a narrow shared request, the exclusive request after it is ordered after the counted
/// holders.
#[test]
fn loom_closing_unused_hands_over() {
    model(|| {
        let lock = opened();
        let bytes = Arc::new(Bytes::new());
        let reader = reader(&lock, &bytes);
        drop(lock.try_lock(r(0, 2), Mode::Shared));
        if let Some(_guard) = lock.try_lock(r(0, 2), Mode::Exclusive) {
            bytes.write();
        }
        reader.join().unwrap();
    });
}

/// Goal: an upgrade of the last counted holder is ordered after the reads of the other holders.
#[test]
fn loom_upgrade_of_counted_hands_over() {
    model(|| {
        let lock = opened();
        let bytes = Arc::new(Bytes::new());
        let mut guard = lock.try_lock(ByteRange::ALL, Mode::Shared).unwrap();
        let reader = reader(&lock, &bytes);
        if guard.try_upgrade() {
            bytes.write();
        }
        drop(guard);
        reader.join().unwrap();
    });
}

/// A waker that records its wake-up.
fn notify(woken: &std::sync::Arc<WakeCount>) -> Notify {
    Notify::task(&std::task::Waker::from(std::sync::Arc::clone(woken)))
}

struct WakeCount(AtomicU64);

impl std::task::Wake for WakeCount {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Goal: counts stay correct when a release, a cancellation and a grant race. A holder, an exclusive request that is
/// cancelled, and a shared request that waits for both.
#[test]
fn loom_cancel_counts() {
    model(|| {
        let lock = Arc::new(Striped::default());
        let range = r(0, 2);
        let Request::Granted(held) =
            lock.request(range, Mode::Shared, || unreachable!("nobody holds"))
        else {
            panic!("nobody holds");
        };
        let (exclusive_told, shared_told) = (
            std::sync::Arc::new(WakeCount(AtomicU64::new(0))),
            std::sync::Arc::new(WakeCount(AtomicU64::new(0))),
        );
        let Request::Queued(exclusive) =
            lock.request(range, Mode::Exclusive, || notify(&exclusive_told))
        else {
            panic!("held");
        };
        let Request::Queued(shared) = lock.request(range, Mode::Shared, || notify(&shared_told))
        else {
            panic!("behind the exclusive");
        };
        let canceller = thread::spawn({
            let lock = Arc::clone(&lock);
            move || {
                if let Some(granted) = lock.cancel(range, Mode::Exclusive, exclusive) {
                    lock.release(range, Mode::Exclusive, granted);
                }
            }
        });
        lock.release(range, Mode::Shared, held);
        canceller.join().unwrap();
        assert_eq!(shared_told.0.load(Ordering::Relaxed), 1, "woken once");
        assert!(exclusive_told.0.load(Ordering::Relaxed) <= 1);
        let held = lock.cancel(range, Mode::Shared, shared).expect("granted");
        lock.release(range, Mode::Shared, held);
        assert!(
            lock.try_request(ByteRange::ALL, Mode::Exclusive).is_some(),
            "a range is still locked"
        );
    });
}

/// Goal: a range that is held, being claimed or being released while the table grows is not lost.
#[test]
fn loom_grow_meets_claim_and_release() {
    model(|| {
        let lock = Arc::new(RangeLock::new());
        let bytes = Arc::new(Bytes::new());
        let other = thread::spawn({
            let (lock, bytes) = (Arc::clone(&lock), Arc::clone(&bytes));
            move || {
                let guard = lock.try_lock(r(2, 6), Mode::Exclusive);
                if guard.is_some() {
                    bytes.write();
                }
            }
        });
        let raw: &Striped = lock.raw();
        let mut state = crate::sync::lock(&raw.state);
        raw.grow(&mut state, u32::MAX);
        raw.unlock(state);
        if let Some(_guard) = lock.try_lock(r(5, 6), Mode::Exclusive) {
            bytes.write();
        }
        other.join().unwrap();
        assert!(
            lock.try_lock(ByteRange::ALL, Mode::Exclusive).is_some(),
            "a range is still locked"
        );
    });
}

/// Goal: no offer is both taken and lapsed (queue.L1). A woken task polls while a thread behind it lets the offer expire.
/// Both get the range, one after the other, and the task is woken again if its offer lapsed.
#[test]
fn loom_poll_meets_lapse() {
    model(|| {
        let lock = Arc::new(RangeLock::new());
        lock.set_offer_grace(std::time::Duration::ZERO);
        let raw: &Striped = lock.raw();
        let bytes = Arc::new(Bytes::new());
        let range = r(0, 2);
        let woken = std::sync::Arc::new(WakeCount(AtomicU64::new(0)));
        let first = lock.lock(range, Mode::Exclusive);
        let Request::Queued(queued) = raw.request(range, Mode::Exclusive, || notify(&woken)) else {
            panic!("held");
        };
        let thread = thread::spawn({
            let (lock, bytes) = (Arc::clone(&lock), Arc::clone(&bytes));
            move || {
                let _guard = lock.lock(r(1, 3), Mode::Exclusive);
                bytes.write();
            }
        });
        drop(first);
        assert_eq!(woken.0.load(Ordering::Relaxed), 1);
        let held = match raw.poll(range, Mode::Exclusive, queued, || notify(&woken)) {
            Request::Granted(held) => held,
            Request::Queued(queued) => {
                // The offer had lapsed; after the thread's release the task gets a new offer.
                thread.join().unwrap();
                assert_eq!(woken.0.load(Ordering::Relaxed), 2, "woken for the second offer");
                let request = raw.poll(range, Mode::Exclusive, queued, || notify(&woken));
                let Request::Granted(held) = request else { panic!("no other request exists") };
                bytes.write();
                return raw.release(range, Mode::Exclusive, held);
            }
        };
        bytes.write();
        raw.release(range, Mode::Exclusive, held);
        thread.join().unwrap();
        assert!(
            lock.try_lock(ByteRange::ALL, Mode::Exclusive).is_some(),
            "a range is still locked"
        );
    });
}

//! Tests of lock futures: dropped, moved or woken late.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use millpond_rangelock::{ByteRange, Mode, OwnedGuard, RangeLock};

#[derive(Default)]
struct Woken(AtomicUsize);

impl Woken {
    fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn poll<F: Future + ?Sized>(future: Pin<&mut F>, woken: &Arc<Woken>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(&Waker::from(Arc::clone(woken))))
}

fn r(start: u64, end: u64) -> ByteRange {
    ByteRange::new(start, end).unwrap()
}

#[test]
fn a_future_that_was_never_polled_is_not_in_the_queue() {
    let lock = RangeLock::new();
    let _idle = lock.lock_async(r(0, 10), Mode::Exclusive);
    assert!(lock.try_lock(r(0, 10), Mode::Exclusive).is_some());
}

#[test]
fn dropping_a_waiting_future_grants_the_requests_behind_it() {
    let lock = RangeLock::new();
    let shared = lock.lock(r(0, 10), Mode::Shared);
    let (writer, reader) = (Arc::new(Woken::default()), Arc::new(Woken::default()));
    let mut exclusive = Box::pin(lock.lock_async(r(0, 10), Mode::Exclusive));
    assert!(poll(exclusive.as_mut(), &writer).is_pending());
    let mut behind = pin!(lock.lock_async(r(5, 6), Mode::Shared));
    assert!(poll(behind.as_mut(), &reader).is_pending());
    drop(exclusive);
    assert_eq!((writer.count(), reader.count()), (0, 1));
    assert!(poll(behind, &reader).is_ready());
    drop(shared);
}

#[test]
fn dropping_a_granted_future_releases_the_range() {
    let lock = RangeLock::new();
    let first = lock.lock(r(0, 10), Mode::Exclusive);
    let (second, third) = (Arc::new(Woken::default()), Arc::new(Woken::default()));
    let mut granted = Box::pin(lock.lock_async(r(0, 10), Mode::Exclusive));
    assert!(poll(granted.as_mut(), &second).is_pending());
    let mut behind = pin!(lock.lock_async(r(0, 10), Mode::Exclusive));
    assert!(poll(behind.as_mut(), &third).is_pending());
    drop(first);
    assert_eq!((second.count(), third.count()), (1, 0));
    // Granted, woken, and never polled again.
    drop(granted);
    assert_eq!(third.count(), 1);
    assert!(poll(behind, &third).is_ready());
}

#[test]
fn the_last_waker_is_woken() {
    let lock = RangeLock::new();
    let first = lock.lock(r(0, 10), Mode::Exclusive);
    let (before, after) = (Arc::new(Woken::default()), Arc::new(Woken::default()));
    let mut future = pin!(lock.lock_async(r(0, 10), Mode::Exclusive));
    assert!(poll(future.as_mut(), &before).is_pending());
    assert!(poll(future.as_mut(), &after).is_pending());
    drop(first);
    assert_eq!((before.count(), after.count()), (0, 1));
    assert!(poll(future, &after).is_ready());
}

/// A waker that uses the lock when it is woken or dropped, as a waker with the last reference to a task that owns guards
/// does.
struct Meddler(Arc<RangeLock>);

impl Meddler {
    fn meddle(&self) {
        drop(self.0.try_lock(r(5, 6), Mode::Exclusive));
        drop(self.0.try_lock(ByteRange::ALL, Mode::Shared));
    }
}

impl Wake for Meddler {
    fn wake(self: Arc<Self>) {
        self.meddle();
    }
}

impl Drop for Meddler {
    fn drop(&mut self) {
        self.meddle();
    }
}

#[test]
fn wakers_may_use_the_lock() {
    let lock = Arc::new(RangeLock::new());
    let waker = || Waker::from(Arc::new(Meddler(Arc::clone(&lock))));
    let first = lock.lock(r(0, 10), Mode::Exclusive);
    let mut woken = pin!(lock.lock_async(r(0, 10), Mode::Exclusive));
    let mut cancelled = Box::pin(lock.lock_async(r(0, 10), Mode::Exclusive));
    for _ in 0..2 {
        // The second time the first waker is dropped.
        assert!(woken.as_mut().poll(&mut Context::from_waker(&waker())).is_pending());
        assert!(cancelled.as_mut().poll(&mut Context::from_waker(&waker())).is_pending());
    }
    drop(cancelled);
    drop(first);
    assert!(woken.poll(&mut Context::from_waker(&waker())).is_ready());
}

#[test]
fn an_owned_future_may_move_between_threads() {
    fn is_static_and_send<T: Send + 'static>(value: T) -> T {
        value
    }
    let lock = Arc::new(RangeLock::new());
    let first = lock.lock_owned(r(0, 10), Mode::Exclusive);
    let future = is_static_and_send(lock.lock_owned_async(r(0, 10), Mode::Exclusive));
    let waiter = thread::spawn(move || block_on(future));
    drop(first);
    let guard: OwnedGuard = is_static_and_send(waiter.join().unwrap());
    assert_eq!(guard.range(), r(0, 10));
}

struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

/// A lock whose range is offered to a future that has not been polled since, and its waker.
fn offered(
    lock: &Arc<RangeLock>,
    grace: Duration,
) -> (Pin<Box<dyn Future<Output = OwnedGuard>>>, Arc<Woken>) {
    lock.set_offer_grace(grace);
    let first = lock.lock(r(0, 10), Mode::Exclusive);
    let woken = Arc::new(Woken::default());
    let lock = Arc::clone(lock);
    let mut future: Pin<Box<dyn Future<Output = OwnedGuard>>> =
        Box::pin(async move { lock.lock_owned_async(r(0, 10), Mode::Exclusive).await });
    assert!(poll(future.as_mut(), &woken).is_pending());
    drop(first);
    assert_eq!(woken.count(), 1);
    (future, woken)
}

#[test]
fn an_offer_in_its_grace_excludes() {
    let lock = Arc::new(RangeLock::new());
    let (mut future, woken) = offered(&lock, Duration::from_secs(1000));
    assert!(lock.try_lock(r(5, 6), Mode::Shared).is_none());
    assert!(lock.lock_timeout(r(5, 6), Mode::Shared, Duration::from_millis(20)).is_none());
    assert!(poll(future.as_mut(), &woken).is_ready());
}

#[test]
fn an_expired_offer_goes_to_the_first_poll() {
    let lock = Arc::new(RangeLock::new());
    let (mut future, woken) = offered(&lock, Duration::from_millis(1));
    thread::sleep(Duration::from_millis(2));
    let Poll::Ready(guard) = poll(future.as_mut(), &woken) else {
        panic!("no request took the offer")
    };
    assert!(lock.try_lock(r(5, 6), Mode::Shared).is_none());
    drop(guard);
}

#[test]
fn a_lapsed_request_is_overtaken_and_keeps_its_place() {
    let lock = Arc::new(RangeLock::new());
    let (mut future, woken) = offered(&lock, Duration::from_millis(1));
    thread::sleep(Duration::from_millis(2));
    let passed = lock.try_lock(r(5, 6), Mode::Exclusive).expect("lapsed");
    // A later request, which waits only for `passed`, until the lapsed request is renewed.
    let later_woken = Arc::new(Woken::default());
    let mut later = Box::pin(lock.lock_owned_async(r(0, 10), Mode::Exclusive));
    assert!(poll(later.as_mut(), &later_woken).is_pending());
    assert!(poll(future.as_mut(), &woken).is_pending());
    drop(passed);
    assert_eq!((woken.count(), later_woken.count()), (2, 0));
    let Poll::Ready(guard) = poll(future.as_mut(), &woken) else { panic!("first in line") };
    assert!(poll(later.as_mut(), &later_woken).is_pending());
    drop(guard);
    assert!(poll(later.as_mut(), &later_woken).is_ready());
}

#[test]
fn a_lapsed_request_may_be_dropped() {
    let lock = Arc::new(RangeLock::new());
    let (future, _) = offered(&lock, Duration::from_millis(1));
    thread::sleep(Duration::from_millis(2));
    let passed = lock.try_lock(r(5, 6), Mode::Exclusive).expect("lapsed");
    drop(future);
    assert!(lock.try_lock(r(5, 6), Mode::Exclusive).is_none());
    drop(passed);
    assert!(lock.try_lock(ByteRange::ALL, Mode::Exclusive).is_some());
}

#[test]
fn a_waiting_thread_expires_an_offer() {
    let lock = Arc::new(RangeLock::new());
    let (mut future, woken) = offered(&lock, Duration::from_millis(20));
    let begin = Instant::now();
    let guard = lock.lock(r(5, 15), Mode::Exclusive);
    assert!(begin.elapsed() < Duration::from_secs(10));
    assert!(poll(future.as_mut(), &woken).is_pending());
    drop(guard);
    assert!(poll(future.as_mut(), &woken).is_ready());
}

#[test]
fn a_thread_that_slept_before_the_offer_expires_it() {
    let lock = Arc::new(RangeLock::new());
    let first = lock.lock_owned(r(0, 10), Mode::Exclusive);
    let woken = Arc::new(Woken::default());
    let mut future = Box::pin(lock.lock_async(r(0, 10), Mode::Exclusive));
    assert!(poll(future.as_mut(), &woken).is_pending());
    let sleeper = thread::spawn({
        let lock = Arc::clone(&lock);
        move || drop(lock.lock(r(5, 15), Mode::Exclusive))
    });
    thread::sleep(Duration::from_millis(50));
    drop(first);
    // The future is not polled again.
    sleeper.join().unwrap();
    assert!(poll(future.as_mut(), &woken).is_ready());
}

#[test]
fn a_later_call_expires_an_offer_and_wakes_the_next_task() {
    let lock = Arc::new(RangeLock::new());
    let (mut future, woken) = offered(&lock, Duration::from_millis(5));
    let behind_woken = Arc::new(Woken::default());
    let mut behind = Box::pin(lock.lock_owned_async(r(0, 10), Mode::Exclusive));
    assert!(poll(behind.as_mut(), &behind_woken).is_pending());
    thread::sleep(Duration::from_millis(6));
    // Any request on the lock expires the offer: here a whole-file request that would have to wait.
    assert!(lock.try_lock(ByteRange::ALL, Mode::Exclusive).is_none());
    assert_eq!(behind_woken.count(), 1);
    let Poll::Ready(guard) = poll(behind.as_mut(), &behind_woken) else { panic!("offered") };
    assert!(poll(future.as_mut(), &woken).is_pending());
    drop(guard);
    assert!(poll(future.as_mut(), &woken).is_ready());
}

/// Goal: if a future is dropped after any number of polls while the holder releases, the next request gets the range.
#[test]
fn cancelled_at_every_poll_while_the_holder_releases() {
    for polls in 0..4 {
        for _ in 0..2_000 {
            let lock = Arc::new(RangeLock::new());
            let holder = lock.lock_owned(r(0, 10), Mode::Exclusive);
            let mut cancelled = Box::pin(lock.lock_owned_async(r(0, 10), Mode::Exclusive));
            let woken = Arc::new(Woken::default());
            let pending = (0..polls).all(|_| poll(cancelled.as_mut(), &woken).is_pending());
            assert!(pending, "held");
            let next = Arc::new(Woken::default());
            let mut behind = Box::pin(lock.lock_owned_async(r(0, 10), Mode::Exclusive));
            assert!(poll(behind.as_mut(), &next).is_pending());
            let releaser = thread::spawn(move || drop(holder));
            drop(cancelled);
            releaser.join().unwrap();
            assert_eq!(next.count(), 1, "woken once, after {polls} polls");
            assert!(poll(behind.as_mut(), &next).is_ready());
        }
    }
}

//! Tests of the public API, one behaviour per test.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use millpond_rangelock::{ByteRange, Mode, RangeLock};

fn r(start: u64, end: u64) -> ByteRange {
    ByteRange::new(start, end).unwrap()
}

#[test]
fn a_release_by_another_thread_wakes_the_waiter() {
    let lock = Arc::new(RangeLock::new());
    let guard = lock.lock_owned(r(0, 10), Mode::Exclusive);
    let (woken, has_it) = mpsc::channel();
    thread::spawn({
        let lock = Arc::clone(&lock);
        move || woken.send(lock.lock(r(5, 15), Mode::Exclusive).range())
    });
    // `try_lock` fails once the request waits, as it may not overtake it.
    while lock.try_lock(r(12, 13), Mode::Exclusive).is_some() {
        thread::yield_now();
    }
    assert!(has_it.try_recv().is_err(), "the request did not wait");
    thread::spawn(move || drop(guard)).join().unwrap();
    assert_eq!(
        has_it.recv_timeout(Duration::from_secs(30)),
        Ok(r(5, 15)),
        "the waiter is not woken"
    );
}

#[test]
fn a_timeout_leaves_no_trace() {
    let lock = RangeLock::new();
    let shared = lock.lock(r(0, 10), Mode::Shared);
    assert!(lock.lock_timeout(r(0, 10), Mode::Exclusive, Duration::from_millis(5)).is_none());
    assert!(lock.try_lock(r(0, 10), Mode::Shared).is_some());
    drop(shared);
    assert!(lock.try_lock(ByteRange::ALL, Mode::Exclusive).is_some());
}

#[test]
fn shareds_do_not_overtake_a_waiting_exclusive() {
    let lock = Arc::new(RangeLock::new());
    let shared = lock.lock(r(0, 10), Mode::Shared);
    let writer = thread::spawn({
        let lock = Arc::clone(&lock);
        move || drop(lock.lock(r(0, 10), Mode::Exclusive))
    });
    while lock.try_lock(r(9, 10), Mode::Shared).is_some() {
        thread::yield_now();
    }
    assert!(lock.try_lock(r(10, 11), Mode::Shared).is_some(), "disjoint from both");
    drop(shared);
    writer.join().unwrap();
}

#[test]
fn hammer_one_counter() {
    let lock = Arc::new(RangeLock::new());
    let counter = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let threads: Vec<_> = (0..4)
        .map(|i| {
            let (lock, counter) = (Arc::clone(&lock), Arc::clone(&counter));
            thread::spawn(move || {
                for k in 0..5_000 {
                    let _guard = lock.lock(r(k % 7, 8 + i), Mode::Exclusive);
                    let seen = counter.load(std::sync::atomic::Ordering::Relaxed);
                    counter.store(seen + 1, std::sync::atomic::Ordering::Relaxed);
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
    assert_eq!(counter.load(std::sync::atomic::Ordering::Relaxed), 20_000);
}

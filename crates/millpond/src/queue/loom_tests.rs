//! Loom models of the waiters: sleeping and waking by the real signals, under the real rules.
//!
//! Each model is a case in which a waiter could sleep indefinitely, or events could get lost; loom reports
//! the first as a deadlock. The futex is a mutex and a condition variable, which compare and sleep in one
//! step as the kernel does. The `loom_without_*` mutation tests omit one rule and must fail.

use std::task::{Poll, Waker};
use std::time::Instant;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicUsize;
use loom::sync::atomic::Ordering::Relaxed;
use loom::thread;

use crate::queue::rules::Rule;
use crate::queue::task::Running;
use crate::queue::waiting::{Deadlines, QueueWaiters};

fn queue(capacity: usize) -> Arc<QueueWaiters<u32>> {
    Arc::new(QueueWaiters::new(capacity, Box::new(|_| {}), None))
}

/// Runs `body` on a separate thread.
fn beside(
    queue: &Arc<QueueWaiters<u32>>,
    body: impl FnOnce(&QueueWaiters<u32>) + 'static,
) -> thread::JoinHandle<()> {
    let queue = Arc::clone(queue);
    thread::spawn(move || body(&queue))
}

fn model(body: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(body);
}

const FOREVER: Deadlines = Deadlines { for_min: None, at_all: None };

/// Time limits that have passed: the model has no clock.
fn no_time() -> Deadlines {
    Deadlines { for_min: None, at_all: Some(Instant::now()) }
}

/// Goal: a waiter for two is woken when the second event completes, at any point of its way to sleep, and
/// the waker does not access the waiter's memory afterwards.
#[test]
fn loom_wait_meets_completions() {
    model(|| {
        let queue = queue(2);
        assert_eq!(queue.admit(2), 2);
        let completer = beside(&queue, |queue| {
            queue.complete(1);
            queue.complete(2);
        });
        assert_eq!(queue.wait(2, 2, FOREVER, None), [1, 2]);
        completer.join().unwrap();
    });
}

/// Goal: a timeout that races with the grant returns the events or leaves them; none is lost.
#[test]
fn loom_timeout_meets_grant() {
    model(|| {
        let queue = queue(2);
        assert_eq!(queue.admit(2), 2);
        let completer = beside(&queue, |queue| {
            queue.complete(1);
            queue.complete(2);
        });
        let mut got = queue.wait(2, 2, no_time(), None);
        completer.join().unwrap();
        got.extend(queue.wait(0, 2, FOREVER, None));
        assert_eq!(got, [1, 2]);
    });
}

/// Goal: the minimum's time is up while its last event completes; the waiter continues to wait for one, and
/// gets it.
#[test]
fn loom_min_wait_meets_grant() {
    model(|| {
        let queue = queue(2);
        assert_eq!(queue.admit(1), 1);
        let completer = beside(&queue, |queue| queue.complete(1));
        let deadlines = Deadlines { for_min: Some(Instant::now()), at_all: None };
        assert_eq!(queue.wait(2, 2, deadlines, None), [1]);
        completer.join().unwrap();
    });
}

/// Goal: the test that was requested in 2006: the waiter for two submits the events that the waiter for
/// three needs. Nothing may get stuck.
#[test]
fn loom_the_waiter_for_two_feeds_the_waiter_for_three() {
    model(|| {
        let queue = queue(4);
        assert_eq!(queue.admit(2), 2);
        let three = beside(&queue, |queue| assert_eq!(queue.wait(3, 3, FOREVER, None).len(), 3));
        let two = beside(&queue, |queue| {
            assert_eq!(queue.wait(2, 2, FOREVER, None), [1, 2]);
            assert_eq!(queue.admit(3), 3);
            (3..6).for_each(|event| queue.complete(event));
        });
        queue.complete(1);
        queue.complete(2);
        two.join().unwrap();
        three.join().unwrap();
    });
}

/// Goal: a waiter whose time is up passes on the events that it leaves: the other one gets its event.
#[test]
fn loom_who_leaves_wakes_who_stays() {
    model(|| {
        let queue = queue(2);
        assert_eq!(queue.admit(1), 1);
        let stays = beside(&queue, |queue| assert_eq!(queue.wait(1, 1, FOREVER, None).len(), 1));
        let leaves = beside(&queue, |queue| {
            // It returns the taken events as new completions.
            for event in queue.wait(2, 2, no_time(), None) {
                assert_eq!(queue.admit(1), 1);
                queue.complete(event);
            }
        });
        queue.complete(1);
        leaves.join().unwrap();
        stays.join().unwrap();
    });
}

/// Goal: a granted task that is dropped instead of polled again returns its event, which goes to the next
/// one.
#[test]
fn loom_a_dropped_task_passes_its_grant_on() {
    model(|| drop_a_granted_task(queue(1)));
}

#[test]
#[should_panic(expected = "not woken")]
fn loom_without_dispatch_after_departures_the_next_sleeps_on() {
    model(|| drop_a_granted_task(Arc::new(QueueWaiters::without(1, Rule::DispatchDepartures))));
}

#[test]
#[should_panic(expected = "not woken")]
fn loom_without_the_return_of_its_events_the_next_sleeps_on() {
    model(|| drop_a_granted_task(Arc::new(QueueWaiters::without(1, Rule::Return))));
}

/// Records that it was woken.
#[derive(Default)]
struct Flag(std::sync::atomic::AtomicBool);

impl std::task::Wake for Flag {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.store(true, std::sync::atomic::Ordering::SeqCst);
    }
}

// Tasks, not threads, as loom can't unwind from a deadlock.
fn drop_a_granted_task(queue: Arc<QueueWaiters<u32>>) {
    assert_eq!(queue.admit(1), 1);
    let (mut first, mut second) = (None, None);
    assert!(queue.poll_wait(&mut first, 1, 1, Waker::noop()).is_pending());
    let flag = std::sync::Arc::<Flag>::default();
    let waker = Waker::from(std::sync::Arc::clone(&flag));
    assert!(queue.poll_wait(&mut second, 1, 1, &waker).is_pending());
    let completer = beside(&queue, |queue| queue.complete(1));
    queue.abandon(first.unwrap());
    completer.join().unwrap();
    assert!(flag.0.load(std::sync::atomic::Ordering::SeqCst), "not woken");
    assert_eq!(queue.poll_wait(&mut second, 1, 1, &waker), Poll::Ready(vec![1]));
}

/// Goal: a wake-up that meets the end of a run is not lost, and the next run sees the earlier writes.
/// Method: a runner whose task is pending until a value is there, against the thread that stores it.
#[test]
fn loom_a_task_is_woken_while_it_goes_to_rest() {
    loom::model(|| {
        let shared = Arc::new((Running::new(), AtomicUsize::new(0), AtomicUsize::new(0)));
        let run = |(running, there, done): &(Running, AtomicUsize, AtomicUsize)| {
            loop {
                if there.load(Relaxed) == 1 {
                    // Two steps: the next runner must see the writes of this one.
                    done.store(done.load(Relaxed) + 1, Relaxed);
                    return;
                }
                if running.try_rest() {
                    return;
                }
            }
        };
        let bringer = thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                shared.1.store(1, Relaxed);
                if shared.0.wake() {
                    run(&shared);
                }
            }
        });
        run(&shared);
        bringer.join().unwrap();
        assert_eq!(shared.2.load(Relaxed), 1, "a task without a runner");
    });
}

/// Goal: of two wake-ups during a run, the next run sees the writes of both, though the second wake-up
/// finds AGAIN.
/// Method: two threads store a value each; the last values that the runner saw when it rested must be the
/// final ones.
#[test]
fn loom_two_wake_ups_meet_a_runner() {
    loom::model(|| {
        let shared = Arc::new((Running::new(), [AtomicUsize::new(0), AtomicUsize::new(0)]));
        let last_seen = Arc::new(AtomicUsize::new(0));
        let run = |(running, things): &(Running, [AtomicUsize; 2]), last_seen: &AtomicUsize| {
            loop {
                let seen = things.iter().map(|thing| thing.load(Relaxed)).sum();
                last_seen.store(seen, Relaxed);
                if running.try_rest() {
                    return;
                }
            }
        };
        let bringers = [0, 1].map(|thing| {
            let (shared, last_seen) = (Arc::clone(&shared), Arc::clone(&last_seen));
            thread::spawn(move || {
                shared.1[thing].store(1, Relaxed);
                if shared.0.wake() {
                    run(&shared, &last_seen);
                }
            })
        });
        run(&shared, &last_seen);
        bringers.into_iter().for_each(|bringer| bringer.join().unwrap());
        assert_eq!(last_seen.load(Relaxed), 2, "a wake-up whose cause was not seen");
    });
}

/// Goal: the next runner of a task sees the writes of the one before it.
/// Method: a runner that rests, and two threads that wake it.
#[test]
fn loom_a_task_is_handed_on() {
    loom::model(|| {
        let shared = Arc::new((Running::new(), UnsafeCell::new(0)));
        // SAFETY: loom reports a race.
        let step = |body: &UnsafeCell<u32>| body.with_mut(|body| unsafe { *body += 1 });
        let run = move |(running, body): &(Running, UnsafeCell<u32>)| {
            step(body);
            while !running.try_rest() {
                step(body);
            }
        };
        let wakers = [(); 2].map(|()| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                if shared.0.wake() {
                    run(&shared);
                }
            })
        });
        run(&shared);
        wakers.into_iter().for_each(|waker| waker.join().unwrap());
        // SAFETY: as above.
        assert!(shared.1.with(|body| unsafe { *body }) >= 2, "a wake-up was lost");
    });
}

//! Tests that a waker that panics or uses the lock harms no request but its own.
//!
//! Incident: a thread that released a range woke a task whose waker panicked. The panic left the release, and a thread that
//! was granted in the same call was not woken.

use std::future::Future;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Poll, RawWaker, RawWakerVTable, Waker};
use std::thread;
use std::time::Duration;

use millpond_rangelock::{ByteRange, Mode, RangeLock};

/// Which call panics.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Call {
    Wake,
    /// From the second clone on, when the request is queued.
    Clone,
    Drop,
}

struct Bad {
    call: Call,
    clones: AtomicUsize,
    wakes: AtomicUsize,
}

static OWN: RawWakerVTable = RawWakerVTable::new(clone, wake, wake_by_ref, drop_own);
static CLONED: RawWakerVTable = RawWakerVTable::new(clone, wake, wake_by_ref, drop_clone);

fn bad(data: *const ()) -> Arc<Bad> {
    // SAFETY: the data comes from one of this file's wakers, which owns a reference.
    unsafe { Arc::from_raw(data.cast()) }
}

unsafe fn clone(data: *const ()) -> RawWaker {
    let bad = ManuallyDrop::new(bad(data));
    if bad.clones.fetch_add(1, SeqCst) > 0 && bad.call == Call::Clone {
        resume_unwind(Box::new("a clone"));
    }
    RawWaker::new(Arc::into_raw(Arc::clone(&bad)).cast(), &CLONED)
}

unsafe fn wake(data: *const ()) {
    let bad = bad(data);
    bad.wakes.fetch_add(1, SeqCst);
    if bad.call == Call::Wake {
        resume_unwind(Box::new("a wake"));
    }
}

unsafe fn wake_by_ref(_: *const ()) {
    unreachable!("a lock wakes by value")
}

unsafe fn drop_own(data: *const ()) {
    drop(bad(data));
}

unsafe fn drop_clone(data: *const ()) {
    if bad(data).call == Call::Drop {
        resume_unwind(Box::new("a drop"));
    }
}

fn poll<F: Future + ?Sized>(future: Pin<&mut F>, bad: &Arc<Bad>) -> Poll<F::Output> {
    let data = Arc::into_raw(Arc::clone(bad)).cast();
    // SAFETY: the functions of `OWN` count the references, as an `Arc` does.
    let waker = unsafe { Waker::from_raw(RawWaker::new(data, &OWN)) };
    future.poll(&mut Context::from_waker(&waker))
}

/// Method: a holder, a task with a bad waker that waits for the holder, and threads that are granted in the same release or
/// wait behind the task. The task is polled twice, and then dropped or granted.
#[test]
fn a_waker_that_panics_harms_no_other_request() {
    for call in [Call::Wake, Call::Clone, Call::Drop] {
        for mode in [Mode::Shared, Mode::Exclusive] {
            for is_dropped in [false, true] {
                let what = format!("{call:?}, {mode:?}, dropped: {is_dropped}");
                let lock = Arc::new(RangeLock::new());
                let range = ByteRange::new(0, 100_000).unwrap();
                let holder = lock.lock(range, Mode::Exclusive);
                let bad = Arc::new(Bad { call, clones: 0.into(), wakes: 0.into() });
                let mut task = Box::pin(Arc::clone(&lock).lock_owned_async(range, mode));
                assert!(poll(task.as_mut(), &bad).is_pending(), "{what}");
                let threads: Vec<_> = (0..10)
                    .map(|_| {
                        let lock = Arc::clone(&lock);
                        thread::spawn(move || drop(lock.lock(range, Mode::Shared)))
                    })
                    .collect();
                thread::sleep(Duration::from_millis(2));
                let again = catch_unwind(AssertUnwindSafe(|| poll(task.as_mut(), &bad)));
                assert_eq!(again.is_err(), call == Call::Clone, "{what}");
                if is_dropped {
                    drop(task);
                    drop(holder);
                } else {
                    drop(holder);
                    let granted = poll(
                        task.as_mut(),
                        &Arc::new(Bad { call: Call::Wake, clones: 0.into(), wakes: 0.into() }),
                    );
                    assert_eq!(bad.wakes.load(SeqCst), 1, "{what}");
                    assert!(granted.is_ready(), "{what}");
                    drop(granted);
                }
                threads.into_iter().for_each(|thread| thread.join().unwrap());
                assert!(lock.try_lock(range, Mode::Exclusive).is_some(), "{what}");
                assert_eq!(Arc::strong_count(&bad), 1, "{what}: a waker is left");
            }
        }
    }
}

//! Calls of the program's code: wakers, and callbacks of crates that are built on this one.
//!
//! - C1. A panic of a callback ends in [`contain`]. The thread that makes the call works for other operations, too:
//!   unwinding would take their results, their wake-ups or the thread itself with it.
//! - C2. The caller holds no lock that the engine or the range lock takes: a callback may come back to either.
//! - C3. A waker is code in each of its three functions. [`TaskWaker`] contains the wake and the drop. A clone is made
//!   by the poll of the task, before the poll has changed anything: its panic is the task's own.
//! - C4. Code below a callback asks [`is_running`] before it waits: the thread may have to release ranges or end reads
//!   first.
//!
//! A model has no callbacks that panic, and finds its failures by panics: under loom and shuttle nothing is
//! contained.

use std::cell::Cell;
use std::task::Waker;

thread_local! {
    /// How many calls of the program's code this thread is in.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Whether the calling thread is in a call of the program's code (C4).
#[inline]
#[must_use]
pub fn is_running() -> bool {
    DEPTH.get() > 0
}

/// Calls the program's code; a panic of that ends here (C1). The panic hook has reported it.
pub fn contain(call: impl FnOnce()) {
    DEPTH.set(DEPTH.get() + 1);
    catch(call);
    DEPTH.set(DEPTH.get() - 1);
}

/// Carries out a job of a thread that goes on with others, also after a panic.
#[cfg(not(any(loom, shuttle)))]
pub fn catch(job: impl FnOnce()) {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    // The drop of a payload is the program's code as well; that of a second one is left out.
    if let Err(payload) = catch_unwind(AssertUnwindSafe(job))
        && let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(payload)))
    {
        std::mem::forget(second);
    }
}

/// Carries out a job.
#[cfg(any(loom, shuttle))]
pub fn catch(job: impl FnOnce()) {
    job();
}

/// A clone of a task's waker, whose wake and drop are contained (C3).
#[derive(Debug)]
pub struct TaskWaker(Option<Waker>);

impl TaskWaker {
    /// Clones `waker`, which may panic (C3).
    #[must_use]
    pub fn new(waker: &Waker) -> TaskWaker {
        TaskWaker(Some(waker.clone()))
    }

    /// Wakes the task: the one place that calls wakers.
    pub fn wake(mut self) {
        if let Some(waker) = self.0.take() {
            contain(|| waker.wake());
        }
    }
}

impl Drop for TaskWaker {
    fn drop(&mut self) {
        if let Some(waker) = self.0.take() {
            contain(|| drop(waker));
        }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    struct PanicsAsItIsDropped;

    impl Drop for PanicsAsItIsDropped {
        fn drop(&mut self) {
            // Without a size: `catch` leaks this payload, and a leak checker must find no memory of it.
            std::panic::resume_unwind(Box::new(()));
        }
    }

    /// Goal: the thread goes on after a panic whose payload panics, too, and also where the thread unwinds already.
    #[test]
    fn a_panic_ends_in_the_call() {
        contain(|| std::panic::resume_unwind(Box::new(PanicsAsItIsDropped)));
        assert!(!is_running());
        struct CallsAsItIsDropped;
        impl Drop for CallsAsItIsDropped {
            fn drop(&mut self) {
                contain(|| {
                    assert!(is_running());
                    std::panic::resume_unwind(Box::new("a callback"));
                });
            }
        }
        let unwound = std::panic::catch_unwind(|| {
            let _calls = CallsAsItIsDropped;
            std::panic::resume_unwind(Box::new("the thread"));
        });
        assert_eq!(unwound.unwrap_err().downcast_ref(), Some(&"the thread"));
        assert!(!is_running());
    }
}

//! Calls into the program's code (wakers and callbacks), such that their panics do no harm.
//!
//! - C1. [`contain`] catches the panic of a callback. The calling thread also works for other operations: unwinding would
//!   lose their results, their wake-ups or the thread itself.
//! - C2. The caller holds no lock of the engine or of the range lock, as a callback may call either.
//! - C3. Each of a waker's three functions is the program's code. [`TaskWaker`] contains the wake and the drop. The clone
//!   runs in the poll of the task, before the poll has changed anything, so its panic is the task's own.
//! - C4. Code that a callback may call checks [`is_running`] before it waits: its thread may have to release ranges or
//!   complete reads first.
//!
//! Under loom and shuttle nothing is caught: models report failures by panics, and have no panicking callbacks.

use std::cell::Cell;
use std::task::Waker;

thread_local! {
    /// Nesting depth of this thread's calls into the program's code.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Whether the calling thread is inside a call into the program's code (C4).
#[inline]
#[must_use]
pub fn is_running() -> bool {
    DEPTH.get() > 0
}

/// Calls the program's code and catches its panic (C1), which the panic hook has already reported.
pub fn contain(call: impl FnOnce()) {
    DEPTH.set(DEPTH.get() + 1);
    catch(call);
    DEPTH.set(DEPTH.get() - 1);
}

/// Runs a job and catches its panic, for a thread that continues with other jobs.
#[cfg(not(any(loom, shuttle)))]
pub fn catch(job: impl FnOnce()) {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    // Dropping the payload runs the program's code, too. If that panics, the second payload is leaked.
    if let Err(payload) = catch_unwind(AssertUnwindSafe(job))
        && let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(payload)))
    {
        std::mem::forget(second);
    }
}

/// Runs a job.
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

    /// Wakes the task. Only this function calls wakers.
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
            // Zero-sized: `catch` leaks this payload, and a leak checker must find no memory of it.
            std::panic::resume_unwind(Box::new(()));
        }
    }

    /// Goal: the thread continues after a panic whose payload panics when dropped, also if the thread is already unwinding.
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

//! Batches of wake-ups: a thread that completes or starts several reads defers its wake-ups to the
//! end of a batch.
//!
//! So a thread that waits for one of several reads is woken when all have completed, and finds them
//! together.
//!
//! A thread with an open batch must not wait: it may wait for a wake-up that it has deferred
//! itself. If it has to wait nevertheless, it calls [`wake_now`] first.

use std::cell::{Cell, RefCell};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use smallvec::SmallVec;

type DeferredWake = Box<dyn FnOnce()>;

/// Rarely more than one for each queue that the thread serves.
type Left = SmallVec<[DeferredWake; 4]>;

thread_local! {
    /// The deferred wake-ups of this thread's open batch.
    static LEFT: RefCell<Option<Left>> = const { RefCell::new(None) };

    /// The number of the open batch. 0 until it is requested.
    static NUMBER: Cell<u64> = const { Cell::new(0) };
}

/// An open batch of this thread. Dropping the outermost one runs the deferred wake-ups.
pub(crate) struct WakeBatch {
    outermost: bool,
}

/// Opens a batch, or joins the open one.
pub(crate) fn open() -> WakeBatch {
    let open = |left: &RefCell<Option<Left>>| {
        let mut left = left.borrow_mut();
        let outermost = left.is_none();
        left.get_or_insert_default();
        outermost
    };
    // A thread that is ending may have lost this state; it has no batches.
    WakeBatch { outermost: LEFT.try_with(open).unwrap_or(false) }
}

/// Runs the deferred wake-ups now. The batch stays open, but gets another number: the caller may
/// wait.
pub(crate) fn wake_now() {
    NUMBER.set(0);
    loop {
        let next = LEFT.try_with(|left| left.borrow_mut().as_mut().and_then(Left::pop));
        match next {
            Ok(Some(wake_up)) => wake_up(),
            _ => return,
        }
    }
}

/// A unique number of the open batch, which changes when the thread waits. `None`: no batch is
/// open.
pub(crate) fn number() -> Option<u64> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    if !is_open() {
        return None;
    }
    let number = NUMBER.get();
    if number == 0 {
        // Relaxed: only uniqueness matters.
        NUMBER.set(NEXT.fetch_add(1, Relaxed));
    }
    Some(NUMBER.get())
}

/// Whether this thread has a batch open.
pub(crate) fn is_open() -> bool {
    LEFT.try_with(|left| left.borrow().is_some()).unwrap_or(false)
}

/// Calls `wake_up` at the end of this thread's batch, or immediately if none is open.
pub(crate) fn defer(wake_up: DeferredWake) {
    let mut wake_up = Some(wake_up);
    let _ = LEFT.try_with(|left| {
        if let Some(left) = left.borrow_mut().as_mut() {
            left.extend(wake_up.take());
        }
    });
    if let Some(wake_up) = wake_up {
        wake_up();
    }
}

impl Drop for WakeBatch {
    fn drop(&mut self) {
        if !self.outermost {
            return;
        }
        NUMBER.set(0);
        // Closed first: a wake-up may cause another completion.
        let left = LEFT.try_with(|left| left.borrow_mut().take()).ok().flatten();
        left.into_iter().flatten().for_each(|wake_up| wake_up());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::rc::Rc;

    #[test]
    fn wakes_at_the_end_or_immediately() {
        let wakes = Rc::new(Cell::new(0));
        let wake_up = || {
            let wakes = Rc::clone(&wakes);
            Box::new(move || wakes.set(wakes.get() + 1))
        };
        defer(wake_up());
        assert_eq!((wakes.get(), is_open()), (1, false));
        let batch = open();
        defer(wake_up());
        let inner = open();
        defer(wake_up());
        drop(inner);
        assert_eq!((wakes.get(), is_open()), (1, true));
        wake_now();
        assert_eq!((wakes.get(), is_open()), (3, true));
        defer(wake_up());
        drop(batch);
        assert_eq!((wakes.get(), is_open()), (4, false));
    }

    #[test]
    fn a_number_is_for_one_batch_until_it_waits() {
        assert_eq!(number(), None);
        let batch = open();
        let first = number();
        assert!(first.is_some() && number() == first);
        wake_now();
        let after_a_wait = number();
        assert!(after_a_wait.is_some() && after_a_wait != first);
        drop(batch);
        assert_eq!(number(), None);
        let another = open();
        assert!(
            number().is_some_and(|number| Some(number) != first && Some(number) != after_a_wait)
        );
        drop(another);
    }
}

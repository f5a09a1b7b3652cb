//! What is to be told at the end of a batch, rather than each time: a thread that ends several reads, or
//! starts several, opens a batch, and wakes are left for its end. So a waiter for one of several is
//! woken when all are there, and finds them together.
//!
//! A thread that has a batch open must not wait for anything: it may be for what it has not told yet.
//! Where it has to after all it calls [`tell_now`] first.

use std::cell::{Cell, RefCell};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use smallvec::SmallVec;

type Telling = Box<dyn FnOnce()>;

/// Seldom more than one for each queue that the thread serves.
type Left = SmallVec<[Telling; 4]>;

thread_local! {
    /// What was left in the batch that this thread has open.
    static LEFT: RefCell<Option<Left>> = const { RefCell::new(None) };

    /// The number of the open batch; 0 until somebody asks for it.
    static NUMBER: Cell<u64> = const { Cell::new(0) };
}

/// An open batch of this thread; tells all when it is dropped, if it is the outermost.
pub(crate) struct Batch {
    outermost: bool,
}

/// Opens a batch, or joins the one that is open.
pub(crate) fn open() -> Batch {
    let open = |left: &RefCell<Option<Left>>| {
        let mut left = left.borrow_mut();
        let outermost = left.is_none();
        left.get_or_insert_default();
        outermost
    };
    // A thread that is ending, and has none of this any more, has no batches.
    Batch { outermost: LEFT.try_with(open).unwrap_or(false) }
}

/// Tells what was left so far; the batch stays open, but has another number: the caller may wait.
pub(crate) fn tell_now() {
    NUMBER.set(0);
    loop {
        let next = LEFT.try_with(|left| left.borrow_mut().as_mut().and_then(Left::pop));
        match next {
            Ok(Some(telling)) => telling(),
            _ => return,
        }
    }
}

/// A number that no other batch has, and this one until it has a wait behind it; `None` if this thread
/// has none open.
pub(crate) fn number() -> Option<u64> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    if !is_open() {
        return None;
    }
    let number = NUMBER.get();
    if number == 0 {
        // Relaxed: only that nobody else gets it.
        NUMBER.set(NEXT.fetch_add(1, Relaxed));
    }
    Some(NUMBER.get())
}

/// Whether this thread has a batch open.
pub(crate) fn is_open() -> bool {
    LEFT.try_with(|left| left.borrow().is_some()).unwrap_or(false)
}

/// Has `telling` called at the end of this thread's batch; at once if there is none.
pub(crate) fn at_end(telling: Telling) {
    let mut telling = Some(telling);
    let _ = LEFT.try_with(|left| {
        if let Some(left) = left.borrow_mut().as_mut() {
            left.extend(telling.take());
        }
    });
    if let Some(telling) = telling {
        telling();
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if !self.outermost {
            return;
        }
        NUMBER.set(0);
        // Closed first: what is told may end in another completion.
        let left = LEFT.try_with(|left| left.borrow_mut().take()).ok().flatten();
        left.into_iter().flatten().for_each(|telling| telling());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::rc::Rc;

    #[test]
    fn tells_at_the_end_or_at_once() {
        let told = Rc::new(Cell::new(0));
        let telling = || {
            let told = Rc::clone(&told);
            Box::new(move || told.set(told.get() + 1))
        };
        at_end(telling());
        assert_eq!((told.get(), is_open()), (1, false));
        let batch = open();
        at_end(telling());
        let inner = open();
        at_end(telling());
        drop(inner);
        assert_eq!((told.get(), is_open()), (1, true));
        tell_now();
        assert_eq!((told.get(), is_open()), (3, true));
        at_end(telling());
        drop(batch);
        assert_eq!((told.get(), is_open()), (4, false));
    }

    #[test]
    fn a_number_is_for_one_batch_until_it_waits() {
        assert_eq!(number(), None);
        let batch = open();
        let first = number();
        assert!(first.is_some() && number() == first);
        tell_now();
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

//! Tests of the memory of a lock: its size while idle, its allocations while in use.

// Debug builds run only the first test, as their list of holders allocates.
#![cfg_attr(debug_assertions, allow(dead_code, unused_imports))]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::thread;

use millpond_rangelock::{ByteRange, Mode, RangeLock, Striped};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call is forwarded to `System` unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller guarantees that `layout` is valid.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller guarantees that `at` was allocated with `layout`.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static GLOBAL: Counting = Counting;

fn allocations() -> usize {
    ALLOCATIONS.with(Cell::get)
}

fn block(number: u64) -> ByteRange {
    ByteRange::at(number * 4096, 4096).unwrap()
}

/// An engine keeps one lock for each of its open files.
#[test]
fn an_idle_lock_is_small() {
    assert!(size_of::<Striped>() <= 512, "{}", size_of::<Striped>());
}

#[cfg(not(debug_assertions))]
mod release {
    use super::*;

    #[test]
    fn one_thread_allocates_nothing_at_all() {
        let before = allocations();
        let lock = RangeLock::new();
        for i in 0..1000 {
            drop(lock.lock(block(i), Mode::Exclusive));
            drop(lock.lock(ByteRange::at(i * 5000, 100_000).unwrap(), Mode::Shared));
            drop(lock.lock(ByteRange::ALL, Mode::Shared));
        }
        assert_eq!(allocations() - before, 0);
    }

    #[test]
    fn many_ranges_allocate_nothing_once_there_is_room() {
        let lock = RangeLock::new();
        let mut held: Vec<_> = Vec::with_capacity(200);
        let mut round = || {
            held.extend((0..200).map(|i| lock.lock(block(i), Mode::Exclusive)));
            // Wide ranges, which use the queue, and conflicting requests that time out.
            assert!(lock.try_lock(ByteRange::ALL, Mode::Shared).is_none());
            held.clear();
            drop(lock.lock(ByteRange::at(0, 1 << 30).unwrap(), Mode::Exclusive));
        };
        (0..3).for_each(|_| round());
        let before = allocations();
        (0..10).for_each(|_| round());
        assert_eq!(allocations() - before, 0);
    }

    /// Goal: the number of allocations does not grow with the number of waits.
    /// Method: two threads pass one range to each other. The first wait, and table growth by lost races (once per size),
    /// depend on the scheduler, so a few allocations may occur at any time. Thousands of hand-overs cause no more.
    #[test]
    fn waiting_allocates_a_few_times_in_all() {
        const GROWTHS_MAX: usize = 10;
        let lock = RangeLock::new();
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut counted = 0;
                    for _ in 0..5000 {
                        let before = allocations();
                        let guard = lock.lock(block(0), Mode::Exclusive);
                        counted += allocations() - before;
                        thread::yield_now();
                        drop(guard);
                    }
                    assert!(counted <= GROWTHS_MAX, "{counted}");
                });
            }
        });
    }
}

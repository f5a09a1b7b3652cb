//! Waiting for a page: threads sleep on its word (a futex), tasks register a waker.
//!
//! Both set WAITERS in the word. The end of the state that they wait for wakes all of them. For
//! tasks:
//!
//! ```text
//!   register: lock bucket -> read the word: FILLING or HIDDEN -> set WAITERS -> add the waker -> unlock
//!   wake:     (the RMW that ended FILLING or HIDDEN found WAITERS) lock bucket -> remove the word's wakers
//!             -> unlock -> wake them
//! ```
//!
//! - **WQ1** The word is read and the waker is added under one hold of the bucket's lock. If the
//!   owner ends the state before the read, the read sees that. If it ends the state afterwards, it
//!   finds WAITERS, and locks the bucket after the waker was added. So no wake-up is lost. (The
//!   read is needed even if WAITERS is set already: the end of the state may just have reported
//!   that bit.)
//! - **WQ2** A registered waker is woken once, or removed by [`WaitTable::deregister`]. A task
//!   waits for one page at a time, so it has at most one registered waker.
//! - **WQ3** A woken task must check the page again: it may be EMPTY because its fill failed,
//!   claimed by another thread, or another page.
//! - **WQ4** Wakers run without the lock, on the thread that ended the state and in the middle of
//!   its work. They may wait only for locks that are held briefly. A waker that panics does not
//!   keep other wakers from running (`millpond_rangelock::callback`).
//!
//! The key is the address of the word, as for a futex. There is one table for the process, as a
//! thread that ends a state knows only the word.

use std::sync::atomic::Ordering::SeqCst;
use std::task::Waker;

use millpond_rangelock::callback::TaskWaker;

use crate::process_local::ProcessStatic;
use crate::sync::MutexExt;
#[cfg(not(loom))]
use crate::sync::futex;
use smallvec::SmallVec;

use crate::cache::table::page::{PageState, PageWord, Sleepers, Word};
use crate::sync::{Mutex, fence};

/// More buckets than threads that use them at the same time, as a rule.
#[cfg(not(loom))]
const BUCKETS: usize = 64;
#[cfg(loom)]
const BUCKETS: usize = 1;

/// The tasks that wait for pages.
pub(crate) struct WaitTable {
    buckets: [Mutex<Bucket>; BUCKETS],
}

#[derive(Default)]
struct Bucket {
    next: u64,
    waiting: Vec<PageWaiter>,
}

struct PageWaiter {
    word: usize,
    number: u64,
    waker: TaskWaker,
}

/// A waker that is registered for a page.
#[must_use]
#[derive(Debug)]
pub(crate) struct WaitEntry {
    word: usize,
    number: u64,
}

impl Default for WaitTable {
    fn default() -> WaitTable {
        WaitTable { buckets: std::array::from_fn(|_| Mutex::new(Bucket::default())) }
    }
}

impl WaitTable {
    fn bucket(&self, word: usize) -> &Mutex<Bucket> {
        // Words are 8 bytes apart, and tasks often wait for neighbours at the same time.
        &self.buckets[(word >> 3) % BUCKETS]
    }

    /// Registers `waker` for a page that is FILLING or HIDDEN. `None`: it is neither (WQ1).
    pub(crate) fn register(&self, word: &PageWord, waker: &Waker) -> Option<WaitEntry> {
        let key = std::ptr::from_ref(word).addr();
        let waker = TaskWaker::new(waker);
        let mut bucket = self.bucket(key).acquire();
        // The table exists before WAITERS is read. Pairs with the fence in `wake`.
        fence(SeqCst);
        loop {
            let seen = word.load();
            if !matches!(seen.state(), PageState::Filling | PageState::Hidden) {
                return None;
            }
            if word.set_waiters(seen).is_some() {
                break;
            }
        }
        let number = bucket.next;
        bucket.next += 1;
        bucket.waiting.push(PageWaiter { word: key, number, waker });
        Some(WaitEntry { word: key, number })
    }

    /// Wakes the tasks that wait for the page of the word at address `word`.
    pub(crate) fn wake(&self, word: usize) {
        let mut bucket = self.bucket(word).acquire();
        let woken: SmallVec<[PageWaiter; 4]> =
            bucket.waiting.extract_if(.., |waiting| waiting.word == word).collect();
        drop(bucket);
        woken.into_iter().for_each(|waiting| waiting.waker.wake());
    }

    /// Removes a waker, unless it was woken.
    pub(crate) fn deregister(&self, entry: &WaitEntry) {
        let mut bucket = self.bucket(entry.word).acquire();
        let at = bucket.waiting.iter().position(|waiting| waiting.number == entry.number);
        let waiting = at.map(|at| bucket.waiting.swap_remove(at));
        drop(bucket);
        drop(waiting);
    }
}

/// The table of this process, from the first wait of a task on.
static WAIT_TABLE: ProcessStatic<WaitTable> = ProcessStatic::new();

/// The table, which is created if necessary. The owner that ends a page's state and finds the WAITERS of a task sees
/// the table, which the task created before.
pub(crate) fn wait_table() -> &'static WaitTable {
    WAIT_TABLE.get_or_create()
}

/// The table as seen by `existing` after the page's state has ended.
fn existing_after_transition<T>(existing: impl FnOnce() -> Option<T>) -> Option<T> {
    // Pairs with the fence in `register`, for the case that a thread had set WAITERS already:
    // either the task sees the end of the state, or this thread sees the table.
    fence(SeqCst);
    existing()
}

impl PageWord {
    /// Sleeps while the low half of the word equals that of `armed`. May return early.
    #[cfg(not(loom))]
    pub(crate) fn sleep(&self, armed: Word) {
        // The errors are "changed already" and "interrupted": the caller checks again.
        let _ = futex::wait(self.low_half(), futex::Flags::PRIVATE, armed.low_half(), None);
    }

    /// Wakes all waiting threads and tasks, if there are any. The caller holds no lock that the
    /// retry of a task could need (WQ4). The word may belong to another page by now: woken threads
    /// and tasks check again.
    #[cfg(not(loom))]
    pub(crate) fn wake(&self, sleepers: Sleepers) {
        if sleepers.any() {
            let _ = futex::wake(self.low_half(), futex::Flags::PRIVATE, i32::MAX as u32);
            if let Some(table) = existing_after_transition(|| WAIT_TABLE.get()) {
                table.wake(std::ptr::from_ref(self).addr());
            }
        }
    }

    #[cfg(loom)]
    pub(crate) fn sleep(&self, _armed: Word) {
        loom::thread::yield_now();
    }

    #[cfg(loom)]
    pub(crate) fn wake(&self, _sleepers: Sleepers) {}
}

/// Called in a forked child: drops the parent's table, as its locks may be held.
pub(crate) fn forget_parent() {
    WAIT_TABLE.abandon();
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::Relaxed;
    use std::task::Wake;

    use super::*;
    use crate::cache::table::epoch::Epoch;
    use crate::cache::table::page::PublishFlags;
    use crate::units::FrameIndex;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Relaxed);
        }
    }

    /// Goal: each of several tasks that wait for a page is woken once. A deregistered task is not
    /// woken, nor are tasks of other pages in the same bucket.
    #[test]
    fn wakes_only_waiters_of_the_page() {
        let words: Vec<PageWord> = (0..=BUCKETS).map(|_| PageWord::new()).collect();
        let (page, other) = (&words[0], &words[BUCKETS]);
        let table = WaitTable::default();
        let counts: Vec<Arc<Count>> = (0..4).map(|_| Arc::default()).collect();
        let waker = |at: usize| Waker::from(Arc::clone(&counts[at]));
        assert!(table.register(page, &waker(0)).is_none(), "EMPTY: nothing to wait for");
        for word in [page, other] {
            word.try_fill(FrameIndex(1)).unwrap();
        }
        let _ = table.register(page, &waker(0)).unwrap();
        let _ = table.register(page, &waker(1)).unwrap();
        let left = table.register(page, &waker(2)).unwrap();
        let _ = table.register(other, &waker(3)).unwrap();
        table.deregister(&left);
        assert_eq!(Arc::strong_count(&counts[2]), 1, "nothing of it is left");
        for _ in 0..2 {
            let _ = page.finish_fill(FrameIndex(1), PublishFlags::default());
            table.wake(std::ptr::from_ref(page).addr());
            let told: Vec<usize> = counts.iter().map(|count| count.0.load(Relaxed)).collect();
            assert_eq!(told, [1, 1, 0, 0]);
        }
        // The wake-up of the other page is still pending.
        let _ = other.finish_fill(FrameIndex(1), PublishFlags::default());
        table.wake(std::ptr::from_ref(other).addr());
        assert_eq!(counts[3].0.load(Relaxed), 1);
        assert!(counts.iter().all(|count| Arc::strong_count(count) == 1), "a waker is left");
    }

    /// Registers again when it is woken, while its page is FILLING again.
    struct Again {
        table: Arc<WaitTable>,
        page: Arc<PageWord>,
        entry: Mutex<Vec<WaitEntry>>,
        woken: AtomicUsize,
    }

    impl Wake for Again {
        fn wake(self: Arc<Self>) {
            self.woken.fetch_add(1, Relaxed);
            if self.page.load().state() == PageState::Ready {
                assert!(self.page.try_evict(self.page.load(), &Epoch::new()));
                self.page.try_fill(FrameIndex(2)).unwrap();
                let armed = self.table.register(&self.page, &Waker::from(Arc::clone(&self)));
                self.entry.lock().unwrap().extend(armed);
            }
        }
    }

    /// Goal: a task that registers again when it is woken, for the next fill of that page, is woken
    /// by the end of that fill, once. Deregistering affects the named registration, not a later one
    /// (WQ2).
    #[test]
    fn a_task_that_registers_again_is_woken_again() {
        let (table, page) = (Arc::new(WaitTable::default()), Arc::new(PageWord::new()));
        let task = Arc::new(Again {
            table: Arc::clone(&table),
            page: Arc::clone(&page),
            entry: Mutex::default(),
            woken: AtomicUsize::new(0),
        });
        page.try_fill(FrameIndex(2)).unwrap();
        let first = table.register(&page, &Waker::from(Arc::clone(&task))).unwrap();
        for round in 1..5 {
            let _ = page.finish_fill(FrameIndex(2), PublishFlags::default());
            table.wake(std::ptr::from_ref(&*page).addr());
            assert_eq!(task.woken.load(Relaxed), round, "woken once for each arming");
            // This registration has been used up.
            table.deregister(&first);
        }
        let last = task.entry.lock().unwrap().pop().unwrap();
        table.deregister(&last);
        let _ = page.abort_fill();
        table.wake(std::ptr::from_ref(&*page).addr());
        assert_eq!((task.woken.load(Relaxed), Arc::strong_count(&task)), (4, 1));
    }
}

/// Loom models of WQ1: a task arms a page while its fill ends.
#[cfg(all(test, loom))]
mod loom_tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::{Acquire, Release, SeqCst};
    use std::task::Wake;

    use loom::sync::Arc;
    use loom::thread;

    use super::*;
    use crate::cache::table::page::PublishFlags;
    use crate::units::FrameIndex;

    #[derive(Default)]
    struct Flag(AtomicBool);

    impl Wake for Flag {
        fn wake(self: std::sync::Arc<Self>) {
            assert!(!self.0.swap(true, SeqCst), "woken twice");
        }
    }

    impl WaitTable {
        /// Leaves out WQ1: registers according to a word that was read before the lock was
        /// acquired.
        fn register_as_seen(
            &self,
            word: &PageWord,
            seen: Word,
            waker: &Waker,
        ) -> Option<WaitEntry> {
            let key = std::ptr::from_ref(word).addr();
            let mut bucket = self.bucket(key).lock().unwrap();
            word.set_waiters(seen)?;
            bucket.waiting.push(PageWaiter { word: key, number: 0, waker: TaskWaker::new(waker) });
            Some(WaitEntry { word: key, number: 0 })
        }
    }

    fn arm_meets_the_end_of_a_fill(arm: fn(&WaitTable, &PageWord, &Waker) -> Option<WaitEntry>) {
        loom::model(move || {
            let shared = Arc::new((WaitTable::default(), PageWord::new()));
            let word = &shared.1;
            word.try_fill(FrameIndex(1)).unwrap();
            // A thread sleeps there already: WAITERS is set.
            assert!(word.set_waiters(word.load()).is_some());
            let filler = thread::spawn({
                let shared = Arc::clone(&shared);
                move || {
                    let (table, word) = &*shared;
                    if word.finish_fill(FrameIndex(1), PublishFlags::default()).any() {
                        table.wake(std::ptr::from_ref(word).addr());
                    }
                }
            });
            let flag = std::sync::Arc::<Flag>::default();
            let entry = arm(&shared.0, word, &Waker::from(std::sync::Arc::clone(&flag)));
            filler.join().unwrap();
            assert_eq!(entry.is_some(), flag.0.load(SeqCst), "armed, and not woken");
        });
    }

    /// Goal: a registered task is woken, once. A task that could not register finds the page READY.
    #[test]
    fn loom_a_task_arms_a_page_whose_fill_ends() {
        arm_meets_the_end_of_a_fill(WaitTable::register);
    }

    #[test]
    #[should_panic(expected = "armed, and not woken")]
    fn loom_without_looking_again_a_task_is_forgotten() {
        arm_meets_the_end_of_a_fill(|table, word, waker| {
            let seen = word.load();
            if !matches!(seen.state(), PageState::Filling | PageState::Hidden) {
                return None;
            }
            table.register_as_seen(word, seen, waker)
        });
    }

    /// Goal: a task that deregisters while the fill ends is woken or not, and no waker is left.
    #[test]
    fn loom_a_task_leaves_a_page_whose_fill_ends() {
        loom::model(|| {
            let shared = Arc::new((WaitTable::default(), PageWord::new()));
            shared.1.try_fill(FrameIndex(1)).unwrap();
            let flag = std::sync::Arc::<Flag>::default();
            let waker = Waker::from(std::sync::Arc::clone(&flag));
            let entry = shared.0.register(&shared.1, &waker).unwrap();
            drop(waker);
            let filler = thread::spawn({
                let shared = Arc::clone(&shared);
                move || {
                    let (table, word) = &*shared;
                    if word.finish_fill(FrameIndex(1), PublishFlags::default()).any() {
                        table.wake(std::ptr::from_ref(word).addr());
                    }
                }
            });
            shared.0.deregister(&entry);
            filler.join().unwrap();
            assert_eq!(std::sync::Arc::strong_count(&flag), 1, "a waker is left");
        });
    }

    /// Goal: the thread that ends the fill does not miss the first task of a process, which creates
    /// the table. Method: a thread sleeps on the page already, so WAITERS is set before; the table
    /// is a flag.
    #[test]
    fn loom_the_first_task_is_not_missed() {
        loom::model(|| {
            let made = loom::sync::atomic::AtomicBool::new(false);
            let shared = Arc::new((WaitTable::default(), PageWord::new(), made));
            let word = &shared.1;
            word.try_fill(FrameIndex(1)).unwrap();
            assert!(word.set_waiters(word.load()).is_some());
            let filler = thread::spawn({
                let shared = Arc::clone(&shared);
                move || {
                    let (table, word, made) = &*shared;
                    let _ = word.finish_fill(FrameIndex(1), PublishFlags::default());
                    let existing = || made.load(Acquire).then_some(table);
                    if let Some(table) = existing_after_transition(existing) {
                        table.wake(std::ptr::from_ref(word).addr());
                    }
                }
            });
            let flag = std::sync::Arc::<Flag>::default();
            shared.2.store(true, Release);
            let entry = shared.0.register(word, &Waker::from(std::sync::Arc::clone(&flag)));
            filler.join().unwrap();
            assert_eq!(entry.is_some(), flag.0.load(SeqCst), "armed, and not woken");
        });
    }
}

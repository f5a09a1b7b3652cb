//! Loom models of the tables: two threads, each killed after every number of steps, in every interleaving;
//! then the keeper's result is checked.
//!
//! A kill is a thread that stops permanently; the keeper reads when both are joined, as the real one does
//! when the process is gone. Numbers of steps beyond the last one mean no kill.

use loom::sync::atomic::AtomicUsize;
use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use loom::sync::{Arc, Mutex};
use loom::thread;

use crate::recovery::keeper::orphaned_pages::{DirtyPages, size_of};
use crate::recovery::layout::{ChangeWords, EntryUse, FileEntryWords, OpWords, RecordWords};
use crate::recovery::tables::{FileEntry, OpSlot, Record, Tables};
use crate::sync::AtomicU64;
use crate::units::{FrameIndex, PageIndex};

const FILE: EntryUse = EntryUse { index: 0, generation: 1 };
/// More than the steps of a commit of two pages and a size.
const STEPS: usize = 17;

fn zero() -> AtomicU64 {
    AtomicU64::new(0)
}

/// A mapping with one file, one op slot and the frames 0 to 4.
struct Mapping {
    ops: [OpSlot; 1],
    files: [FileEntry; 1],
    records: [Record; 5],
    sequence: AtomicU64,
}

impl Mapping {
    fn new() -> Arc<Mapping> {
        let mapping = Mapping {
            ops: [OpSlot { state: zero(), file: zero(), size: zero() }],
            files: [FileEntry {
                life: zero(),
                size: zero(),
                intent: [zero(), zero(), zero()],
                changes: [zero(), zero(), zero()],
            }],
            records: std::array::from_fn(|_| Record {
                state: zero(),
                file: zero(),
                page: zero(),
                sequence: zero(),
            }),
            sequence: zero(),
        };
        mapping.tables().open_entry(FILE, 100);
        Arc::new(mapping)
    }

    fn tables(&self) -> Tables<'_> {
        let Mapping { ops, files, records, sequence } = self;
        Tables { ops, files, records, sequence }
    }

    /// The dirty pages as (page, frame), and the size.
    fn replay(&self) -> (Vec<(u64, u32)>, u64) {
        let load = |word: &AtomicU64| word.load(Relaxed);
        let ops: Vec<_> = self
            .ops
            .iter()
            .map(|op| OpWords {
                state: load(&op.state),
                file: load(&op.file),
                size: load(&op.size),
            })
            .collect();
        let mut dirty = DirtyPages::default();
        for (frame, record) in (0..).zip(&self.records) {
            let words = [&record.state, &record.file, &record.page, &record.sequence].map(load);
            dirty.note(&ops, frame, RecordWords::from_words(words)).unwrap();
        }
        let [entry] = &self.files;
        let entry = FileEntryWords {
            life: load(&entry.life),
            size: load(&entry.size),
            intent: [0; 3],
            changes: ChangeWords::default(),
        };
        let pages = dirty.latest(FILE).iter().map(|dirty| (dirty.page.0, dirty.frame)).collect();
        (pages, size_of(FILE, &entry, &ops))
    }
}

/// A hook that kills after `left` steps.
fn killed_after(mut left: usize) -> impl FnMut() -> Option<()> {
    move || {
        left = left.checked_sub(1)?;
        Some(())
    }
}

fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// Goal: of two commits that use the same op slot one after the other, one with a size, each survives as a
/// whole or not at all, and certainly if it returned.
#[test]
fn loom_two_commits_are_killed() {
    for (mine, theirs) in (0..STEPS).flat_map(|m| (0..STEPS).map(move |t| (m, t))) {
        explore(move || {
            let mapping = Mapping::new();
            let commit = |mapping: &Mapping, first: u32, size, steps| {
                let pages = (first..first + 2).map(|at| (PageIndex(at.into()), FrameIndex(at)));
                mapping.tables().try_commit(FILE, pages, size, killed_after(steps)).is_some()
            };
            let other = thread::spawn({
                let mapping = Arc::clone(&mapping);
                move || commit(&mapping, 3, Some(200), theirs)
            });
            let mine_returned = commit(&mapping, 1, None, mine);
            let theirs_returned = other.join().unwrap();
            let (pages, size) = mapping.replay();
            let survived = |first: u64| {
                let found = |page: u64| pages.contains(&(page, page as u32));
                assert_eq!(found(first), found(first + 1), "half a commit: {pages:?}");
                found(first)
            };
            assert!(survived(1) || !mine_returned);
            assert!(survived(3) || !theirs_returned);
            assert_eq!(size, if survived(3) { 200 } else { 100 }, "size and pages apart");
        });
    }
}

/// The writer's last steps: recovery.K4, or the reverse order.
#[derive(Clone, Copy, PartialEq)]
enum Last {
    Show,
    Clean,
}

/// A page whose frame 1 is dirty gets frame 2, which another thread writes back once it is published.
fn write_races_write_back(last: Last) {
    for (writes, cleans) in (0..STEPS).flat_map(|w| (0..3).map(move |c| (w, c))) {
        explore(move || {
            let mapping = Mapping::new();
            let (shown, on_disk) = (Arc::new(AtomicUsize::new(1)), Arc::new(AtomicUsize::new(0)));
            let page = |frame| [(PageIndex(7), FrameIndex(frame))].into_iter();
            mapping.tables().try_commit(FILE, page(1), None, || Some(())).unwrap();
            let flusher = thread::spawn({
                let (mapping, shown, on_disk) =
                    (Arc::clone(&mapping), Arc::clone(&shown), Arc::clone(&on_disk));
                move || {
                    let mut step = killed_after(cleans);
                    if shown.load(Acquire) == 2 {
                        step()?;
                        on_disk.store(2, Relaxed);
                        mapping.tables().try_clean(FrameIndex(2), step)?;
                    }
                    Some(())
                }
            });
            let mut step = killed_after(writes);
            let write = || {
                let tables = mapping.tables();
                tables.try_commit(FILE, page(2), None, &mut step)?;
                if last == Last::Show {
                    tables.try_clean(FrameIndex(1), &mut step)?;
                    shown.store(2, Release);
                } else {
                    shown.store(2, Release);
                    tables.try_clean(FrameIndex(1), &mut step)?;
                }
                Some(())
            };
            let returned = { write }().is_some();
            flusher.join().unwrap();
            let (pages, _) = mapping.replay();
            let written = on_disk.load(Relaxed);
            let found = pages.first().map_or(written, |(_, frame)| *frame as usize);
            assert!(found == 2 || written != 2, "an older frame over a newer one");
            assert!(found == 2 || !returned, "a write was lost");
            assert!(found != 0, "both were lost");
        });
    }
}

#[test]
fn loom_a_write_races_the_write_back_of_its_page() {
    write_races_write_back(Last::Show);
}

#[test]
#[should_panic(expected = "an older frame over a newer one")]
fn loom_without_k4_the_older_frame_wins() {
    write_races_write_back(Last::Clean);
}

/// When a change is recorded as in flight: changes.C1, or too late.
#[derive(Clone, Copy, PartialEq)]
enum Said {
    Before,
    After,
}

/// Changes the file by one tick of its time; killed after `steps`.
fn change(
    said: Said,
    mapping: &Mapping,
    time: &AtomicU64,
    in_flight: &Mutex<u64>,
    steps: usize,
) -> Option<()> {
    let mut step = killed_after(steps);
    let tables = mapping.tables();
    if said == Said::After {
        step()?;
        time.fetch_add(1, Relaxed);
    }
    let mut count = in_flight.lock().unwrap();
    *count += 1;
    let words = ChangeWords::new(*count, false, 0, 100);
    tables.try_begin_change(FILE, words, &mut step)?;
    drop(count);
    if said == Said::Before {
        step()?;
        time.fetch_add(1, Relaxed);
    }
    let mut count = in_flight.lock().unwrap();
    *count -= 1;
    // changes.C2.
    let words = ChangeWords::new(*count, false, time.load(Relaxed), 100);
    tables.try_end_change(FILE, words, &mut step)
}

/// Two threads change the file below the cache, and are killed after every number of steps.
fn changes_are_told(said: Said) {
    // Five stores and the change itself.
    const STEPS: usize = 7;
    for (mine, theirs) in (0..=STEPS).flat_map(|m| (0..=STEPS).map(move |t| (m, t))) {
        explore(move || {
            let mapping = Mapping::new();
            let time = Arc::new(zero());
            let in_flight = Arc::new(Mutex::new(0));
            // The file's state when it was handed over.
            mapping.tables().try_end_change(FILE, ChangeWords::default(), || Some(())).unwrap();
            let other = thread::spawn({
                let (mapping, time, in_flight) =
                    (Arc::clone(&mapping), Arc::clone(&time), Arc::clone(&in_flight));
                move || change(said, &mapping, &time, &in_flight, theirs)
            });
            let _ = change(said, &mapping, &time, &in_flight, mine);
            let _ = other.join().unwrap();
            let [state, changed, _] = &mapping.files[0].changes;
            let words = ChangeWords::new(state.load(Relaxed), false, changed.load(Relaxed), 0);
            let now = time.load(Relaxed);
            assert!(words.is_in_flight() || words.changed_ns == now, "taken for another process's");
        });
    }
}

#[test]
fn loom_changes_are_told() {
    changes_are_told(Said::Before);
}

#[test]
#[should_panic(expected = "taken for another process's")]
fn loom_a_change_that_is_told_too_late() {
    changes_are_told(Said::After);
}

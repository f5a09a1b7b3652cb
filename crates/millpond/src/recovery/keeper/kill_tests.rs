//! Kill tests: a process is killed at every step of its operations; the keeper must leave the file as it
//! was before or after the operation in progress, to the byte.
//!
//! `Program` makes the engine's operations on a file, on the real tables, in private memory, with one file
//! as the storage backend. A *step* is a store to the tables or a call of the backend. The hook ends the
//! program before step number n; then `replay` runs on the remains.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::Duration;

use proptest::prelude::*;
use rustix::fs::FallocateFlags;

use crate::recovery::keeper::client_memory::Memory;
use crate::recovery::keeper::replay::{Dead, replay};
use crate::recovery::keeper::report::FileReport;
use crate::recovery::keeper::target::{Adopted, Medium, SYNCS_TO_FAIL};
use crate::recovery::layout::{ChangeWords, EntryUse, Intent, OPS, mtime_ns};
use crate::recovery::{Recovery, keeper::Address};
use crate::units::{FrameIndex, PageIndex};

const UNITS: u32 = 512;

/// An operation of a program.
#[derive(Clone, Debug)]
pub(super) enum Op {
    Write {
        at: u64,
        len: u64,
        with: u8,
    },
    /// Writes back every `nth` dirty page, and keeps the frames if `keep` is set.
    WriteBack {
        nth: usize,
        evict: bool,
    },
    Truncate {
        len: u64,
    },
    Punch {
        start: u64,
        end: u64,
    },
    Zero {
        start: u64,
        end: u64,
    },
}

/// A program with one file.
pub(super) struct Program {
    pub(super) recovery: Recovery,
    pub(super) memory: OwnedFd,
    pub(super) file: File,
    entry: EntryUse,
    page_shift: u32,
    /// The content after the completed operations, and after the current one.
    pub(super) done: Vec<u8>,
    pub(super) doing: Vec<u8>,
    /// Frames of cached pages, and whether they are dirty.
    pages: BTreeMap<u64, (FrameIndex, bool)>,
    free: Vec<FrameIndex>,
    steps_left: Cell<u64>,
    /// The reach of its changes.
    reach: Cell<u64>,
}

impl Program {
    pub(super) fn new(file: File, page_shift: u32, steps: u64) -> Program {
        let address = "@nobody".parse::<Address>().unwrap();
        let (recovery, memory) = Recovery::map(&address, 1 << 20, UNITS).unwrap();
        let entry = EntryUse { index: 3, generation: 1 };
        let stat = file.metadata().unwrap();
        let mut bytes = vec![0; stat.len() as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        recovery.tables().open_entry(entry, stat.len());
        let units = 1 << (page_shift - 12);
        let program = Program {
            recovery,
            memory,
            file,
            entry,
            page_shift,
            done: bytes.clone(),
            doing: bytes,
            pages: BTreeMap::new(),
            free: (units..UNITS - units).step_by(units as usize).map(FrameIndex).collect(),
            steps_left: Cell::new(steps),
            reach: Cell::new(0),
        };
        program.tell_unchanged();
        program
    }

    /// Records that only the program has changed the file so far.
    fn tell_unchanged(&self) {
        let changes = self.changes(false);
        self.recovery.tables().try_end_change(self.entry, changes, || Some(())).unwrap();
    }

    fn changes(&self, is_in_flight: bool) -> ChangeWords {
        let changed_ns = mtime_ns(&rustix::fs::fstat(&self.file).unwrap());
        ChangeWords::new(is_in_flight.into(), false, changed_ns, self.reach.get())
    }

    /// Makes a change that leaves the file no longer than `reach`, as one step.
    fn change(&self, reach: u64, act: impl FnOnce()) -> Option<()> {
        let tables = self.recovery.tables();
        self.reach.set(self.reach.get().max(reach));
        tables.try_begin_change(self.entry, self.changes(true), || self.step())?;
        self.step()?;
        act();
        tables.try_end_change(self.entry, self.changes(false), || self.step())
    }

    fn page_bytes(&self) -> u64 {
        1 << self.page_shift
    }

    fn step(&self) -> Option<()> {
        self.steps_left.set(self.steps_left.get().checked_sub(1)?);
        Some(())
    }

    /// Runs `op`; `None` if it was killed.
    pub(super) fn run(&mut self, op: &Op) -> Option<()> {
        self.doing = self.done.clone();
        match *op {
            Op::Write { at, len, with } => self.write(at, len, with)?,
            Op::WriteBack { nth, evict } => self.write_back(nth, evict)?,
            Op::Truncate { len } => self.truncate(len)?,
            Op::Punch { start, end } => self.zero(start, end, true)?,
            Op::Zero { start, end } => self.zero(start, end, false)?,
        }
        self.done = self.doing.clone();
        Some(())
    }

    /// Builds a frame with the page's bytes in `doing`.
    fn build(&mut self, page: u64) -> FrameIndex {
        let frame = self.free.pop().expect("enough frames");
        self.recovery.free_record(frame);
        let page_bytes = self.page_bytes() as usize;
        let start = ((page as usize) << self.page_shift).min(self.doing.len());
        let part = &self.doing[start..self.doing.len().min(start + page_bytes)];
        let at = self.recovery.frame(frame);
        // SAFETY: within the frame, which this thread owns.
        unsafe {
            at.copy_from_nonoverlapping(part.as_ptr(), part.len());
            at.add(part.len()).write_bytes(0, page_bytes - part.len());
        }
        frame
    }

    /// Puts new contents of pages in place, as a write does.
    fn put(&mut self, pages: impl Iterator<Item = u64>, size: Option<u64>) -> Option<()> {
        let fresh: Vec<_> = pages.map(|page| (page, self.build(page))).collect();
        let tables = self.recovery.tables();
        let commits = fresh.iter().map(|&(page, frame)| (PageIndex(page), frame));
        tables.try_commit(self.entry, commits, size, || self.step())?;
        for (page, frame) in fresh {
            // recovery.K4: cleaned before the new frame can be written back.
            if let Some((old, _)) = self.pages.insert(page, (frame, true)) {
                self.recovery.tables().try_clean(old, || self.step())?;
                self.free.push(old);
            }
        }
        Some(())
    }

    fn write(&mut self, at: u64, len: u64, with: u8) -> Option<()> {
        let end = at + len;
        let size = self.done.len() as u64;
        self.doing.resize(size.max(end) as usize, 0);
        self.doing[at as usize..end as usize].fill(with);
        // An extended page is dirty from its old end on: the whole page is written anyway.
        let pages = at >> self.page_shift..((end - 1) >> self.page_shift) + 1;
        self.put(pages, (end > size).then_some(end))
    }

    fn write_back(&mut self, nth: usize, evict: bool) -> Option<()> {
        let dirty: Vec<_> = self.pages.iter().filter(|(_, (_, dirty))| *dirty).collect();
        let chosen: Vec<_> =
            dirty.iter().step_by(nth.max(1)).map(|(page, (frame, _))| (**page, *frame)).collect();
        for (page, frame) in chosen {
            let start = page << self.page_shift;
            let end = (start + self.page_bytes()).min(self.done.len() as u64);
            let len = end.saturating_sub(start) as usize;
            // SAFETY: the bytes of the frame, which do not change.
            let bytes = unsafe { std::slice::from_raw_parts(self.recovery.frame(frame), len) };
            self.change(end, || self.file.write_all_at(bytes, start).unwrap())?;
            self.recovery.tables().try_clean(frame, || self.step())?;
            if evict {
                self.pages.remove(&page);
                self.free.push(frame);
            } else {
                self.pages.insert(page, (frame, false));
            }
        }
        Some(())
    }

    fn intend(&self, intent: Intent) -> Option<()> {
        self.recovery.tables().try_set_intent(self.entry, intent, || self.step())
    }

    fn finish(&self) -> Option<()> {
        self.recovery.tables().try_clear_intent(self.entry, || self.step())
    }

    /// Drops the pages that lie wholly in a range.
    fn drop_pages(&mut self, start: u64, end: u64) -> Option<()> {
        let (first, shift) = (start.div_ceil(self.page_bytes()), self.page_shift);
        let gone: Vec<u64> = self
            .pages
            .range(first..)
            .map(|(p, _)| *p)
            .filter(|p| (p + 1) << shift <= end)
            .collect();
        for page in gone {
            let (frame, _) = self.pages[&page];
            self.recovery.tables().try_clean(frame, || self.step())?;
            self.pages.remove(&page);
            self.free.push(frame);
        }
        Some(())
    }

    fn truncate(&mut self, len: u64) -> Option<()> {
        self.doing.resize(len as usize, 0);
        self.intend(Intent::Truncate { len })?;
        self.change(len, || {
            self.file.set_len(len).unwrap();
            self.reach.set(len);
        })?;
        let tail = len >> self.page_shift;
        if len < self.done.len() as u64 && self.pages.contains_key(&tail) {
            // Its bytes beyond the size must be zero (write.W5).
            self.put(tail..tail + 1, Some(len))?;
        } else {
            self.recovery.tables().try_set_size(self.entry, len, || self.step())?;
        }
        self.drop_pages(len, u64::MAX)?;
        self.finish()
    }

    fn zero(&mut self, start: u64, end: u64, punch: bool) -> Option<()> {
        let size = self.done.len() as u64;
        let (start, end) = (start.min(size), end.min(size));
        if start >= end {
            return Some(());
        }
        self.doing[start as usize..end as usize].fill(0);
        self.intend(if punch {
            Intent::Punch { start, end }
        } else {
            Intent::Zero { start, end }
        })?;
        let how = if punch { FallocateFlags::PUNCH_HOLE } else { FallocateFlags::ZERO_RANGE };
        let how = how | FallocateFlags::KEEP_SIZE;
        self.change(0, || {
            if rustix::fs::fallocate(&self.file, how, start, end - start).is_err() {
                self.file.write_all_at(&vec![0; (end - start) as usize], start).unwrap();
            }
        })?;
        self.drop_pages(start, end)?;
        for edge in [start >> self.page_shift, end >> self.page_shift] {
            if self.pages.contains_key(&edge) {
                self.put(edge..edge + 1, None)?;
            }
        }
        self.finish()
    }

    pub(super) fn replay(&self) -> Vec<FileReport> {
        self.replay_with(Duration::ZERO)
    }

    fn replay_with(&self, patience: Duration) -> Vec<FileReport> {
        let memory = Memory::new(self.memory.try_clone().unwrap()).map_err(|(_, error)| error);
        let dead = Dead { pid: 1, memory: memory.unwrap(), patience };
        let mut told = Vec::new();
        replay(dead, vec![self.adopted()], |reports| told.extend(reports));
        told
    }

    pub(super) fn adopted(&self) -> Adopted {
        let stat = self.file.metadata().unwrap();
        let fd = self.file.as_fd().try_clone_to_owned().unwrap();
        let id = (stat.dev(), stat.ino());
        let adopted = Adopted::new(fd, Medium::Local, self.entry, id, self.page_shift);
        let mut adopted = adopted.map_err(|(_, error)| error).unwrap();
        adopted.note();
        adopted
    }

    fn contents(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.file.metadata().unwrap().len() as usize];
        self.file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }
}

/// An unnamed file of `len` bytes; in memory if possible.
fn test_file(len: usize) -> File {
    test_file_in("/dev/shm", len)
}

fn test_file_in(dir: &str, len: usize) -> File {
    let file = tempfile::tempfile_in(dir).or_else(|_| tempfile::tempfile()).unwrap();
    let bytes: Vec<u8> = (0..len).map(|at| 200 + (at / 512 % 50) as u8).collect();
    file.write_all_at(&bytes, 0).unwrap();
    file
}

/// Runs `ops`, killed before step `steps`, replays, and compares; returns the operation that was killed, if
/// one was.
fn kill_and_compare(
    ops: &[Op],
    page_shift: u32,
    file: File,
    steps: u64,
) -> Result<Option<usize>, String> {
    let mut program = Program::new(file, page_shift, steps);
    let killed = ops.iter().position(|op| program.run(op).is_none());
    let reports = program.replay();
    if reports.len() != 1 || !reports[0].failures.is_empty() {
        return Err(format!("{reports:?}"));
    }
    let found = program.contents();
    if found == program.done || found == program.doing {
        // Again from the start: the replay is idempotent.
        program.tell_unchanged();
        program.replay();
        if program.contents() == found {
            return Ok(killed);
        }
    }
    let wrong = |expected: &[u8]| {
        let differ = |at: &usize| found.get(*at) != expected.get(*at);
        let at = (0..found.len().max(expected.len())).find(differ);
        format!("{} bytes, first difference at {at:?}", expected.len())
    };
    Err(format!(
        "killed in {killed:?} ({:?}) at step {steps}: {} bytes; before: {}; after: {}",
        killed.map(|op| &ops[op]),
        found.len(),
        wrong(&program.done),
        wrong(&program.doing)
    ))
}

/// Goal: for a kill at any instruction, the current operation is done as a whole or not at all,
/// and all before it are done.
/// Method: a script with every operation and every transition, killed before each of its steps.
#[test]
fn killed_at_every_step() {
    let write = |at, len, with| Op::Write { at, len, with };
    // File systems differ in their range operations.
    for (page_shift, dir) in [(12, "/dev/shm"), (14, "/dev/shm"), (12, "/var/tmp")] {
        let page = 1u64 << page_shift;
        let script = [
            write(0, 100, 1),
            write(page, 3 * page, 2),
            write(4 * page - 10, 20, 3),
            Op::WriteBack { nth: 2, evict: true },
            write(page, 2 * page, 4),
            // Extends by part of a page, and by several.
            write(9 * page, 10, 5),
            write(9 * page + 5, 3 * page, 6),
            Op::Truncate { len: 10 * page + 77 },
            write(10 * page + 80, 5, 7),
            Op::Truncate { len: 13 * page },
            Op::Punch { start: page / 2, end: 3 * page - 7 },
            write(2 * page, 10, 8),
            Op::WriteBack { nth: 1, evict: false },
            write(2 * page, page, 9),
            Op::Zero { start: 2 * page + 100, end: 9 * page + 1 },
            write(0, 14 * page, 10),
            Op::Truncate { len: 5 },
            Op::Truncate { len: 3 * page },
            Op::WriteBack { nth: 1, evict: true },
            Op::Truncate { len: 0 },
            write(0, 2 * page + 1, 11),
        ];
        let mut steps = 0;
        let run = |steps| {
            let file = test_file_in(dir, 30_000);
            kill_and_compare(&script, page_shift, file, steps).unwrap()
        };
        while run(steps).is_some() {
            steps += 1;
        }
        println!("pages of {page} bytes in {dir}: killed before each of {steps} steps");
        assert!(steps > 300);
    }
}

/// Goal: a failing sync loses nothing: the covered pages are written again from the frames, and, if that
/// fails, kept in a rescue file.
/// Incident: the keeper reported the failure, and released the frames.
#[test]
fn a_sync_that_fails_is_made_up_for() {
    for (failing, patience) in [(1, Duration::from_secs(60)), (u32::MAX, Duration::ZERO)] {
        let mut program = Program::new(test_file(0), 12, u64::MAX);
        program.run(&Op::Write { at: 0, len: 20_000, with: 9 }).unwrap();
        SYNCS_TO_FAIL.set(failing);
        let reports = program.replay_with(patience);
        SYNCS_TO_FAIL.set(0);
        let [report] = reports.as_slice() else { panic!("{reports:?}") };
        if failing == 1 {
            assert!(report.failures.is_empty() && report.rescue.is_none(), "{report:?}");
            assert_eq!((report.pages, report.bytes), (5, 20_000));
            assert_eq!(program.contents(), [9; 20_000]);
            continue;
        }
        assert_eq!((report.pages, report.failures.len()), (0, 1), "{report:?}");
        let rescue = report.rescue.clone().unwrap();
        let target = tempfile::NamedTempFile::new().unwrap();
        let restored = crate::keeper::restore(&rescue, Some(target.path()), true);
        std::fs::remove_file(rescue).unwrap();
        assert_eq!(restored.unwrap().bytes, 20_000);
        assert_eq!(std::fs::read(target.path()).unwrap(), [9; 20_000]);
    }
}

fn any_op() -> impl Strategy<Value = Op> {
    let at = || 0..80_000u64;
    prop_oneof![
        6 => (at(), 1..30_000u64, 1..=199u8).prop_map(|(at, len, with)| Op::Write { at, len, with }),
        3 => (1..4usize, any::<bool>()).prop_map(|(nth, evict)| Op::WriteBack { nth, evict }),
        2 => at().prop_map(|len| Op::Truncate { len }),
        1 => (at(), at()).prop_map(|(a, b)| Op::Punch { start: a.min(b), end: a.max(b) }),
        1 => (at(), at()).prop_map(|(a, b)| Op::Zero { start: a.min(b), end: a.max(b) }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..Default::default() })]

    /// Goal: as above, for unforeseen sequences.
    /// Method: random operations and a random step, against a model of bytes.
    #[test]
    fn killed_at_random(
        ops in proptest::collection::vec(any_op(), 1..30),
        page_shift in 12..=16u32,
        len in 0..50_000usize,
        steps in 0..600u64,
    ) {
        kill_and_compare(&ops, page_shift, test_file(len), steps).map_err(TestCaseError::fail)?;
    }

    /// Goal: for any content of the mapping, the keeper does not panic, does not hang, and changes only the
    /// files that it was given.
    /// Method: the mapping of a killed program, with random changes of words; mostly words of the tables,
    /// which often get values close to valid ones.
    #[test]
    fn a_corrupted_mapping_does_no_harm(
        ops in proptest::collection::vec(any_op(), 1..12),
        page_shift in 12..=16u32,
        steps in 20..300u64,
        changes in proptest::collection::vec((0..4u32, any::<u32>(), 0..64u32, any::<u64>(), 0..4u32), 1..60),
    ) {
        let other = test_file(5000);
        let mut program = Program::new(test_file(20_000), page_shift, steps);
        let _ = ops.iter().position(|op| program.run(op).is_none());
        let memory = File::from(program.memory.try_clone().unwrap());
        let memory_of = |program: &Program| Memory::new(program.memory.try_clone().unwrap()).ok();
        let layout = memory_of(&program).unwrap().layout;
        for (section, at, bit, value, how) in changes {
            let (start, words) = match section {
                0 => (layout.ops_at(), OPS * 8),
                1 => (layout.files_at() + 3 * 64, 8),
                2 => (layout.records_at(), 200 * 4),
                _ => (0, layout.records_at() as u32 / 8),
            };
            let at = start as u64 + u64::from(at % words) * 8;
            let mut word = [0; 8];
            memory.read_exact_at(&mut word, at).unwrap();
            let old = u64::from_ne_bytes(word);
            let new = match how {
                0 => old ^ 1 << bit,
                1 => value,
                2 => value % 1000,
                _ => value >> bit,
            };
            memory.write_all_at(&new.to_ne_bytes(), at).unwrap();
        }
        if let Some(memory) = memory_of(&program) {
            // A large size is valid: the process can set it on its own file.
            let started = std::time::Instant::now();
            let dead = Dead { pid: 1, memory, patience: Duration::ZERO };
            replay(dead, vec![program.adopted()], |reports| {
                reports.into_iter().filter_map(|report| report.rescue).for_each(|path| {
                    std::fs::remove_file(path).unwrap();
                });
            });
            prop_assert!(started.elapsed() < Duration::from_secs(5));
        }
        let mut bytes = vec![0; 5000];
        other.read_exact_at(&mut bytes, 0).unwrap();
        prop_assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == 200 + (at / 512 % 50) as u8));
        prop_assert_eq!(other.metadata().unwrap().len(), 5000);
    }
}

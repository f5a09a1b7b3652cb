//! Tests with real processes that are killed with SIGKILL at random moments.
//!
//! The child is this test binary again, in another role. Its threads commit, write back and truncate, and
//! record in a log file the operation that they start and the operations that are done; that file is the
//! kernel's and survives.

use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::io::backend::ChangeObserver;
use crate::recovery::changes::Changes;
use crate::recovery::tests::{TestKeeper, adopt, fill};
use crate::recovery::{Intent, Recovery};
use crate::units::{FrameIndex, PageIndex};

const ROLE: &str = "MILLPOND_TEST_ROLE";
const WRITERS: u64 = 3;
/// Pages of the first file that belong to each writer.
const PAGES: u64 = 12;
const LOG_WORDS: u64 = 64;

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (self.0 >> 33) % end
    }
}

/// The child's log: words in a file, `LOG_WORDS` for each thread.
struct Log(File);

impl Log {
    fn open(dir: &Path) -> Log {
        let options = OpenOptions::new().read(true).write(true).create(true).clone();
        Log(options.open(dir.join("log")).unwrap())
    }

    fn set(&self, thread: u64, at: u64, words: &[u64]) {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.0.write_all_at(&bytes, (thread * LOG_WORDS + at) * 8).unwrap();
    }

    fn get(&self, thread: u64, at: u64) -> u64 {
        let mut word = [0; 8];
        match self.0.read_exact_at(&mut word, (thread * LOG_WORDS + at) * 8) {
            Ok(()) => u64::from_ne_bytes(word),
            Err(_) => 0,
        }
    }
}

/// Frames of one thread.
struct Frames {
    free: Vec<u32>,
}

impl Frames {
    fn new(thread: u64) -> Frames {
        let first = 1 + thread as u32 * 64;
        Frames { free: (first..first + 64).collect() }
    }
}

/// Writes groups of pages, each filled with the number of the write; logs the group before it writes, then
/// the last write of each page.
fn write_pages(recovery: &Arc<Recovery>, file: &File, log: &Log, thread: u64) -> ! {
    let entry = adopt(recovery, file, 12);
    let changes = Changes::new(recovery);
    changes.enter(entry, file.as_fd());
    let mut random = Random(std::process::id().into());
    let mut frames = Frames::new(thread);
    let mut dirty = [None; PAGES as usize];
    for number in 1u64.. {
        let first = random.below(PAGES);
        let count = 1 + random.below(PAGES - first);
        let fresh: Vec<_> = (first..first + count)
            .map(|page| {
                let frame = FrameIndex(frames.free.pop().unwrap());
                recovery.free_record(frame);
                // SAFETY: a frame of this thread.
                unsafe {
                    let words = recovery.frame(frame).cast::<u64>();
                    (0..512).for_each(|at| words.add(at).write(number));
                }
                (PageIndex(thread * PAGES + page), frame)
            })
            .collect();
        log.set(thread, 0, &[number, first, count]);
        recovery.commit(entry, fresh.iter().copied(), None);
        log.set(thread, 8 + first, &vec![number; count as usize]);
        for (page, frame) in fresh {
            let old = dirty[(page.0 - thread * PAGES) as usize].replace(frame);
            if let Some(old) = old {
                recovery.clean(old);
                frames.free.push(old.0);
            }
        }
        if random.below(3) == 0 {
            let page = random.below(PAGES);
            if let Some(frame) = dirty[page as usize].take() {
                // SAFETY: a frame of this thread, which is not written to.
                let bytes = unsafe { std::slice::from_raw_parts(recovery.frame(frame), 4096) };
                changes.begin((thread * PAGES + page + 1) * 4096);
                file.write_all_at(bytes, (thread * PAGES + page) * 4096).unwrap();
                changes.end(Some(file.as_fd()));
                recovery.clean(frame);
                frames.free.push(frame.0);
            }
        }
    }
    unreachable!()
}

/// Byte `at` of the file that grows and shrinks.
fn pattern(at: u64) -> u8 {
    (at ^ at >> 8) as u8 | 1
}

/// Appends and truncates; logs the next size, then the current one.
fn change_size(recovery: &Arc<Recovery>, file: &File, log: &Log) -> ! {
    let entry = adopt(recovery, file, 12);
    let changes = Changes::new(recovery);
    changes.enter(entry, file.as_fd());
    let mut random = Random(std::process::id().into());
    let mut frames = Frames::new(WRITERS);
    let mut pages: Vec<Option<FrameIndex>> = vec![None; 16];
    let mut size = 0;
    // Builds a frame with the page's bytes below `size`.
    let build = |frames: &mut Frames, page: u64, size: u64| {
        let frame = FrameIndex(frames.free.pop().unwrap());
        fill(recovery, frame.0, 4096, 0);
        for at in page * 4096..((page + 1) * 4096).min(size) {
            // SAFETY: a frame of this thread.
            unsafe { recovery.frame(frame).add(at as usize % 4096).write(pattern(at)) };
        }
        (PageIndex(page), frame)
    };
    loop {
        let target = random.below(60_000);
        log.set(WRITERS, 0, &[target]);
        if target > size {
            let range = size / 4096..(target - 1) / 4096 + 1;
            let fresh: Vec<_> = range.map(|page| build(&mut frames, page, target)).collect();
            recovery.commit(entry, fresh.iter().copied(), Some(target));
            for (page, frame) in fresh {
                if let Some(old) = pages[page.0 as usize].replace(frame) {
                    recovery.clean(old);
                    frames.free.push(old.0);
                }
            }
        } else {
            recovery.set_intent(entry, Intent::Truncate { len: target });
            changes.begin(target);
            file.set_len(target).unwrap();
            changes.truncated(target);
            changes.end(Some(file.as_fd()));
            if pages[(target / 4096) as usize].is_some() {
                let tail = build(&mut frames, target / 4096, target);
                recovery.commit(entry, [tail].into_iter(), Some(target));
                let old = pages[tail.0.0 as usize].replace(tail.1).unwrap();
                recovery.clean(old);
                frames.free.push(old.0);
            } else {
                recovery.set_size(entry, target);
            }
            for gone in pages.iter_mut().skip(target.div_ceil(4096) as usize) {
                if let Some(frame) = gone.take() {
                    recovery.clean(frame);
                    frames.free.push(frame.0);
                }
            }
            recovery.clear_intent(entry);
        }
        size = target;
        log.set(WRITERS, 1, &[target]);
    }
}

/// The child's role.
#[test]
#[ignore = "a role, in which `processes_that_are_killed_lose_nothing` starts this program"]
fn child() {
    let role = std::env::var(ROLE).unwrap();
    let (address, dir) = role.split_once(' ').unwrap();
    let dir = Path::new(dir);
    let open = |name: &str| OpenOptions::new().read(true).write(true).open(dir.join(name)).unwrap();
    let address = address.parse().unwrap();
    let pages = Recovery::connect(&address, 1 << 20, 512).map(Arc::new).unwrap();
    // A second mapping of the same process.
    let sizes = Recovery::connect(&address, 1 << 20, 512).map(Arc::new).unwrap();
    let log = Log::open(dir);
    std::thread::scope(|scope| {
        for thread in 0..WRITERS {
            let file = open(&format!("pages{thread}"));
            let (pages, log) = (&pages, &log);
            scope.spawn(move || write_pages(pages, &file, log, thread));
        }
        let file = open("sizes");
        change_size(&sizes, &file, &log);
    });
}

fn start_child(keeper: &TestKeeper, dir: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["recovery::sigkill_tests::child", "--exact", "--ignored", "--test-threads=1"])
        .env(ROLE, format!("{} {}", keeper.address, dir.display()))
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// Goal: a process that is killed at a random moment loses no operation that the log records as done, and
/// its current operation is done as a whole or not at all.
/// Method: hundreds of processes with four writing threads and two mappings each.
#[test]
fn processes_that_are_killed_lose_nothing() {
    const KILLS: u64 = 300;
    let keeper = TestKeeper::new();
    let started = Instant::now();
    let seed = u64::from(std::process::id());
    println!("seed {seed}");
    let mut random = Random(seed);
    let (mut written, mut found_half, mut began) = (0, 0, 0);
    for _ in 0..KILLS {
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        for thread in 0..WRITERS {
            File::create(dir.path().join(format!("pages{thread}"))).unwrap();
            let file =
                OpenOptions::new().write(true).open(dir.path().join(format!("pages{thread}")));
            file.unwrap().set_len((thread + 1) * PAGES * 4096).unwrap();
        }
        File::create(dir.path().join("sizes")).unwrap();
        let mut child = start_child(&keeper, dir.path());
        let log = Log::open(dir.path());
        while log.get(WRITERS, 1) == 0 {
            assert!(child.try_wait().unwrap().is_none(), "the child failed");
            std::thread::sleep(Duration::from_micros(200));
        }
        std::thread::sleep(Duration::from_micros(random.below(5000)));
        child.kill().unwrap();
        child.wait().unwrap();
        for _ in 0..2 {
            let report = keeper.reports.recv_timeout(Duration::from_secs(20)).unwrap();
            assert!(report.is_complete() && !report.goodbye, "{report}");
            written += report.pages();
        }
        for thread in 0..WRITERS {
            found_half += u64::from(check_pages(dir.path(), &log, thread));
            began += log.get(thread, 0);
        }
        check_size(dir.path(), &log);
    }
    println!(
        "{KILLS} kills in {:?}: {began} writes, {written} pages written back; {found_half} writes \
         were in progress",
        started.elapsed()
    );
    assert!(began > KILLS && written > KILLS && found_half > 0, "too little was under way");
}

/// Whether the log recorded the current write as not done.
fn check_pages(dir: &Path, log: &Log, thread: u64) -> bool {
    let bytes = std::fs::read(dir.join(format!("pages{thread}"))).unwrap();
    let (number, first, count) = (log.get(thread, 0), log.get(thread, 1), log.get(thread, 2));
    let mut in_progress = Vec::new();
    for page in 0..PAGES {
        let start = ((thread * PAGES + page) * 4096) as usize;
        let words: Vec<u64> = bytes[start..start + 4096]
            .chunks_exact(8)
            .map(|word| u64::from_ne_bytes(word.try_into().unwrap()))
            .collect();
        assert!(words.iter().all(|word| *word == words[0]), "a torn page");
        let logged = log.get(thread, 8 + page);
        let (found, in_group) = (words[0], (first..first + count).contains(&page));
        assert!(
            found == logged || (in_group && found == number),
            "page {page}: {found}, logged {logged}, in progress {number} of {first}, {count}"
        );
        if in_group {
            in_progress.push(found == number);
        }
    }
    assert!(
        in_progress.iter().all(|new| *new == in_progress[0]),
        "half of write {number}: {in_progress:?}"
    );
    // The log of a completed write is one call: all of it or none.
    (first..first + count).any(|page| log.get(thread, 8 + page) != number)
}

fn check_size(dir: &Path, log: &Log) {
    let bytes = std::fs::read(dir.join("sizes")).unwrap();
    let (doing, done) = (log.get(WRITERS, 0), log.get(WRITERS, 1));
    let size = bytes.len() as u64;
    assert!(size == doing || size == done, "{size} bytes: {done} were, {doing} are to be");
    for (at, byte) in (0..).zip(&bytes) {
        assert_eq!(*byte, pattern(at), "byte {at} of {size}, {done} -> {doing}");
    }
}

//! Conflicts of extent operations with other operations.

use std::sync::mpsc;
use std::time::Duration;

use millpond_rangelock::Mode;

use crate::{BackendChoice, Engine, File, OpenOptions};

const PAGE: u64 = 4096;
const PAGES: u64 = 100;

type Change = fn(&File, u64, u64);

const CLEARS: [Change; 2] = [
    |file, offset, len| file.punch_hole(offset, len).unwrap(),
    |file, offset, len| file.zero_range(offset, len).unwrap(),
];
const ALLOCATE: Change = |file, offset, len| file.allocate(offset, len).unwrap();

fn with_file(test: impl FnOnce(&File)) {
    let dir = tempfile::tempdir().unwrap();
    let engine = Engine::builder().backend(BackendChoice::Memory).build().unwrap();
    let options = OpenOptions::new().read(true).write(true).create(true);
    let file = engine.open(dir.path().join("file"), &options).unwrap();
    file.write_all_at(&[7; (PAGE * PAGES) as usize - 10], 0).unwrap();
    test(&file);
}

/// Whether `change` does not end for a moment while a guard on `held` is held. It must end when
/// that is released.
fn waits(file: &File, held: (u64, u64), mode: Mode, change: impl FnOnce(&File) + Send) -> bool {
    !ends_within(Duration::from_millis(100), file, held, mode, change)
}

/// Whether it ends while the guard is held. On a busy machine that may take long.
fn passes(file: &File, held: (u64, u64), mode: Mode, change: impl FnOnce(&File) + Send) -> bool {
    ends_within(Duration::from_secs(20), file, held, mode, change)
}

fn ends_within(
    time: Duration,
    file: &File,
    held: (u64, u64),
    mode: Mode,
    change: impl FnOnce(&File) + Send,
) -> bool {
    let (send, ended) = mpsc::channel();
    std::thread::scope(|scope| {
        let guard = file.cached().lock(held.0, held.1, mode);
        scope.spawn(move || {
            change(file);
            send.send(()).unwrap();
        });
        let ends = ended.recv_timeout(time).is_ok();
        drop(guard);
        if !ends {
            ended.recv_timeout(Duration::from_secs(20)).expect("ends when the guard is gone");
        }
        ends
    })
}

/// Goal: a read that began before the cache was notified does not cache bytes that another program
/// has changed.
#[test]
fn invalidating_waits_for_reads_under_way() {
    with_file(|file| {
        let change = |file: &File| file.invalidate(0, i64::MAX as u64).unwrap();
        // A fill holds a guard like this until its pages are READY (page.W3).
        assert!(waits(file, (10 * PAGE, 11 * PAGE), Mode::Shared, change));
    });
}

/// Goal: clearing a range waits for holders of its pages, and for no other operation.
#[test]
fn clearing_takes_exactly_its_range() {
    with_file(|file| {
        for clear in CLEARS {
            // Bytes 10 * 4096 + 5 .. 12 * 4096 + 5: pages 10, 11, 12.
            let change = move |file: &File| clear(file, 10 * PAGE + 5, 2 * PAGE);
            for mode in [Mode::Shared, Mode::Exclusive] {
                assert!(passes(file, (0, 10 * PAGE), mode, change));
                assert!(waits(file, (0, 10 * PAGE + 1), mode, change));
                assert!(waits(file, (12 * PAGE + 4095, 12 * PAGE + 4096), mode, change));
                assert!(passes(file, (13 * PAGE, PAGES * PAGE), mode, change));
            }
            // Beyond the end there is nothing to wait for.
            let beyond = move |file: &File| clear(file, PAGES * PAGE + 5, PAGE);
            assert!(passes(file, (0, u64::MAX), Mode::Exclusive, beyond));
        }
    });
}

/// Goal: reserving waits only for changes of the range, or, if it extends the file, for users of
/// the bytes from the old end on.
#[test]
fn reserving_takes_the_range_or_the_end() {
    with_file(|file| {
        let within = |file: &File| ALLOCATE(file, 10 * PAGE + 5, 2 * PAGE);
        assert!(passes(file, (0, u64::MAX), Mode::Shared, within));
        assert!(passes(file, (0, 10 * PAGE), Mode::Exclusive, within));
        assert!(waits(file, (11 * PAGE, 12 * PAGE), Mode::Exclusive, within));
        assert!(passes(file, (13 * PAGE, u64::MAX), Mode::Exclusive, within));
        let old_end = PAGES * PAGE - 10;
        for (end, held, mode, expected) in [
            (old_end + 1, (0, (PAGES - 1) * PAGE), Mode::Exclusive, false),
            (old_end + 2, ((PAGES - 1) * PAGE, PAGES * PAGE), Mode::Shared, true),
            (PAGES * PAGE + 1, (PAGES * PAGE, u64::MAX), Mode::Exclusive, true),
            ((PAGES + 2) * PAGE, ((PAGES + 2) * PAGE, u64::MAX), Mode::Exclusive, false),
        ] {
            let extend = move |file: &File| ALLOCATE(file, 5, end - 5);
            assert_eq!(waits(file, held, mode, extend), expected, "to {end}");
            assert_eq!(file.len().unwrap(), end);
        }
    });
}

/// Goal: the write-back of several extents beyond the end first makes a file with direct backing as long as they are. It does
/// not within the file, and never makes it shorter.
#[test]
fn write_back_makes_a_file_as_long_as_its_extents() {
    use crate::inode::space;
    use crate::io::backend::allocation::has_unwritten_extents;
    use crate::{Backing, WriteMode};
    use std::os::fd::AsFd;
    use std::sync::atomic::Ordering::Relaxed;
    // Beside the program: the file systems for temporary files may have no direct I/O.
    let exe = std::env::current_exe().unwrap();
    let dir = tempfile::tempdir_in(exe.parent().unwrap()).unwrap();
    if !has_unwritten_extents(std::fs::File::open(dir.path()).unwrap().as_fd()) {
        return crate::skip::skip(format_args!("{} is not on ext4 or XFS", dir.path().display()));
    }
    let engine = Engine::builder().build().unwrap();
    let options = OpenOptions::new().read(true).write(true).create(true);
    let options = options.write_mode(WriteMode::Back);
    for (backing, expected) in [(Backing::Direct, 1), (Backing::Buffered, 0)] {
        let path = dir.path().join(format!("{backing:?}"));
        let file = engine.open(&path, &options.clone().backing(backing)).unwrap();
        let len = || std::fs::metadata(&path).unwrap().len();
        for pages in [[0, 2, 4], [1, 3, 4]] {
            for page in pages {
                file.write_all_at(&[page as u8; PAGE as usize], page * PAGE).unwrap();
            }
            file.write_back().unwrap();
            assert_eq!(file.cached().space.reached.load(Relaxed), expected, "{backing:?}");
            assert_eq!(len(), 5 * PAGE);
        }
        space::reach(file.cached(), PAGE);
        assert_eq!(len(), 5 * PAGE);
        let bytes = std::fs::read(&path).unwrap();
        assert!(
            bytes
                .chunks(PAGE as usize)
                .zip(0..5)
                .all(|(page, n)| page.iter().all(|&byte| byte == n))
        );
    }
}

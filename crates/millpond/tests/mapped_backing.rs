//! Files with mapped backing: reads copy from the kernel's page cache.

mod common;

use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use millpond::queue::Request;
use millpond::{
    Advice, AsyncFile, BackendChoice, Backing, Engine, Error, File, OpenOptions, WriteMode,
};

use common::{engine, has_uring, in_own_process, read_write, run_and_stop, stress_time, temp_dir};

const PAGE: usize = 4096;
const PAGES: usize = 600;

fn mapped() -> OpenOptions {
    read_write().backing(Backing::Mapped)
}

fn content() -> Vec<u8> {
    (0..PAGES * PAGE + 100).map(|at| (at / PAGE * 7 + at) as u8 | 1).collect()
}

/// A file of that content.
struct Case {
    dir: tempfile::TempDir,
    engine: Engine,
    file: Arc<File>,
}

impl Case {
    fn new(backend: BackendChoice) -> Case {
        let dir = temp_dir();
        let path = dir.path().join("file");
        std::fs::write(&path, content()).unwrap();
        let engine = engine(1 << 20, backend);
        let file = Arc::new(engine.open(&path, &mapped()).unwrap());
        Case { dir, engine, file }
    }

    /// After enough reads for a mapping.
    fn warm(backend: BackendChoice) -> Case {
        let case = Case::new(backend);
        for at in 0..32 {
            case.file.read_at(&mut [0; 100], at * 1000).unwrap();
        }
        case
    }

    fn path(&self) -> std::path::PathBuf {
        self.dir.path().join("file")
    }

    /// Reads that were served without a lock, so far.
    fn hits(&self) -> u64 {
        self.engine.stats().hits
    }

    fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let read = self.file.read_at(&mut bytes, offset).unwrap();
        bytes.truncate(read);
        bytes
    }
}

fn back_ends() -> Vec<BackendChoice> {
    let mut all = vec![BackendChoice::Threads];
    all.extend(has_uring().then_some(BackendChoice::Uring));
    all
}

/// Goal: a warm file is read from the mapping, beside writes too, and no frame holds a byte of it.
#[test]
fn reads_are_served_from_the_mapping() {
    for backend in back_ends() {
        let case = Case::warm(backend);
        let (before, mut expected) = (case.hits(), content());
        for at in (0..PAGES * PAGE - 9000).step_by(7777) {
            assert!(case.read(at as u64, 9000) == expected[at..at + 9000]);
            case.file.write_all_at(&[at as u8 | 1; 5000], at as u64 + 100).unwrap();
            expected[at + 100..at + 5100].fill(at as u8 | 1);
            assert!(case.read(at as u64, 9000) == expected[at..at + 9000]);
        }
        let reads = 2 * (PAGES * PAGE - 9000).div_ceil(7777) as u64;
        assert!(case.hits() - before >= reads / 2, "{} of {reads}", case.hits() - before);
        assert_eq!(case.engine.stats().fills, 0);
        assert!(std::fs::read(case.path()).unwrap() == expected);
    }
}

/// Goal: `Advice::DontNeed` drops the kernel's pages, which it keeps while a process maps them.
#[test]
fn pages_that_are_not_needed_leave_the_kernels_cache() {
    let case = Case::warm(BackendChoice::Threads);
    case.file.sync_all().unwrap();
    assert!(case.read(0, PAGES * PAGE) == content()[..PAGES * PAGE]);
    assert_ne!(cached_pages(&case.path()), 0);
    case.file.advise(0, 0, Advice::DontNeed).unwrap();
    assert_eq!(cached_pages(&case.path()), 0);
    assert!(case.read(0, PAGES * PAGE) == content()[..PAGES * PAGE]);
}

/// The pages of a file that the kernel has in its cache.
fn cached_pages(path: &std::path::Path) -> usize {
    let file = std::fs::File::open(path).unwrap();
    let mut pages = [0_u8; PAGES];
    // SAFETY: a new mapping of the file, which is not accessed; one byte is written for each of its pages.
    unsafe {
        let (rights, flags) = (libc::PROT_NONE, libc::MAP_SHARED);
        let map = libc::mmap(ptr::null_mut(), PAGES * PAGE, rights, flags, file.as_raw_fd(), 0);
        assert_ne!(map, libc::MAP_FAILED);
        assert_eq!(libc::mincore(map, PAGES * PAGE, pages.as_mut_ptr()), 0);
        assert_eq!(libc::munmap(map, PAGES * PAGE), 0);
    }
    pages.iter().filter(|page| **page & 1 != 0).count()
}

/// Goal: files beyond the limit of mappings have the right bytes.
#[test]
fn more_files_than_mappings() {
    in_own_process("more_files_than_mappings", Duration::from_secs(120), || {
        const FILES: usize = 4500;
        let limit = libc::rlimit { rlim_cur: 2 * FILES as u64, rlim_max: 2 * FILES as u64 };
        // SAFETY: the kernel reads `limit`.
        if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } != 0 {
            return common::skip("the number of open files is limited");
        }
        let dir = temp_dir();
        let engine = engine(64 << 20, BackendChoice::Threads);
        let files: Vec<_> = (0..FILES)
            .map(|number| {
                let path = dir.path().join(number.to_string());
                std::fs::write(&path, [number as u8; 2 * PAGE]).unwrap();
                engine.open(&path, &mapped()).unwrap()
            })
            .collect();
        let before = engine.stats().hits;
        for (number, file) in files.iter().enumerate() {
            let mut bytes = [0; 2 * PAGE];
            for _ in 0..12 {
                file.read_exact_at(&mut bytes, 0).unwrap();
                assert_eq!(bytes, [number as u8; 2 * PAGE]);
            }
            file.write_all_at(b"new", 10).unwrap();
            file.read_exact_at(&mut bytes, 0).unwrap();
            assert_eq!(&bytes[9..14], &[number as u8, b'n', b'e', b'w', number as u8]);
        }
        assert!(engine.stats().hits - before > FILES as u64);
    });
}

/// Goal: every way to read returns the same bytes, cold and warm, within the file and past its end.
#[test]
fn all_ways_to_read_agree() {
    for backend in back_ends() {
        for is_warm in [false, true] {
            let case =
                if is_warm { Case::warm(backend.clone()) } else { Case::new(backend.clone()) };
            let expected = content();
            let end = expected.len();
            let queue = case.engine.queue(8).unwrap();
            let future_file = AsyncFile::from(Arc::clone(&case.file));
            for (offset, len) in [
                (0, 1),
                (1, PAGE),
                (4000, 9000),
                (PAGE * 17, PAGE),
                (100, 300_000),
                (end - 50, 100),
                (end, 10),
                (end + 5000, 10),
                (end - PAGE * 3 - 7, PAGE * 4),
            ] {
                let want = &expected[offset.min(end)..(offset + len).min(end)];
                assert!(case.read(offset as u64, len) == want, "{offset} {len}");
                let mut parts = [vec![0; len / 2], vec![0; len - len / 2]];
                let mut slices: Vec<_> =
                    parts.iter_mut().map(|part| std::io::IoSliceMut::new(part)).collect();
                let moved = case.file.read_vectored_at(&mut slices, offset as u64).unwrap();
                assert!(parts.concat()[..moved] == *want);
                match case.file.try_read_at(&mut parts[1], offset as u64) {
                    Ok(moved) => assert_eq!(parts[1][..moved], want[..moved]),
                    Err(error) => assert!(matches!(error, Error::WouldBlock { .. }), "{error}"),
                }
                let view = case.file.view(offset as u64, len).unwrap();
                assert!(*view == want[..view.len()]);
                assert_eq!(view.is_empty(), want.is_empty());
                let mut bytes = vec![0; len];
                let moved =
                    common::block_on(future_file.read_at(&mut bytes, offset as u64)).unwrap();
                assert!(bytes[..moved] == *want, "asynchronous, {offset} {len}");
                queue.submit(Request::read(&case.file, vec![0; len], offset as u64)).unwrap();
                let done = queue.wait(1, 1, None).unwrap().remove(0);
                let moved = done.result().unwrap();
                assert!(done.into_buffer()[..moved] == *want, "by a queue, {offset} {len}");
            }
        }
    }
}

/// Goal: reads beside writes of the same process are whole, and so are reads beside truncations: of the file's bytes or
/// of zeros.
/// Method: records of one value each, of two and a half pages, are overwritten by two threads and read by two, by a
/// handle and by a queue; a third writer cuts the file and makes it longer again. The kernel's own reads, beside the
/// same writers, are counted: they tear.
#[test]
fn reads_beside_writes_are_whole() {
    const RECORD: usize = 10_000;
    const RECORDS: u64 = 40;
    for backend in back_ends() {
        let case = Case::warm(backend);
        case.file.truncate(0).unwrap();
        case.file.write_all_at(&vec![1; RECORD * RECORDS as usize], 0).unwrap();
        let (stop, end) = (AtomicBool::new(false), Instant::now() + stress_time(1.0));
        let is_whole = |bytes: &[u8]| bytes.iter().all(|byte| *byte == bytes[0]);
        let torn_by_kernel = thread::scope(|scope| {
            for first in [0_u32, 1] {
                let (file, stop) = (&case.file, &stop);
                scope.spawn(move || {
                    let mut value = first;
                    while !stop.load(Relaxed) {
                        value += 2;
                        let record = u64::from(value) * 7 % (RECORDS - 10);
                        let bytes = [value as u8; RECORD];
                        file.write_all_at(&bytes, record * RECORD as u64).unwrap();
                    }
                });
            }
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    case.file.truncate((RECORDS - 8) * RECORD as u64).unwrap();
                    case.file.truncate(RECORDS * RECORD as u64).unwrap();
                }
            });
            scope.spawn(|| {
                let queue = case.engine.queue(4).unwrap();
                for record in (0..RECORDS).cycle() {
                    let (bytes, offset) = (vec![0; RECORD], record * RECORD as u64);
                    queue.submit(Request::read(&case.file, bytes, offset)).unwrap();
                    let done = queue.wait(1, 1, None).unwrap().remove(0);
                    let (moved, bytes) = done.into_parts();
                    assert!(is_whole(&bytes[..moved.unwrap().max(1)]), "torn, by a queue");
                    if stop.load(Relaxed) {
                        return;
                    }
                }
            });
            run_and_stop(&stop, || {
                let plain = std::fs::File::open(case.path()).unwrap();
                let (mut bytes, mut torn, mut reads) = ([0; RECORD], 0, 0);
                while Instant::now() < end || reads < 1000 {
                    let offset = reads % RECORDS * RECORD as u64;
                    let moved = case.file.read_at(&mut bytes, offset).unwrap();
                    assert!(is_whole(&bytes[..moved.max(1)]), "torn");
                    let moved = plain.read_at(&mut bytes, offset).unwrap();
                    torn += usize::from(!is_whole(&bytes[..moved.max(1)]));
                    reads += 1;
                }
                torn
            })
        });
        println!("{torn_by_kernel} reads of the kernel's were torn");
    }
}

/// Goal: a read over the end of a file that another program cuts, and this one extends again, has the bytes of one moment. Its bytes end
/// where the file ends, or have the second write. They never include the zeros that follow the end in the page.
#[test]
fn reads_beside_a_cut_by_another_program_are_of_one_moment() {
    const END: u64 = PAGE as u64 + 100;
    const APPENDED: [u8; 16] = [0xFF; 16];
    for backend in back_ends() {
        let (name, case) = (format!("{backend:?}"), Case::warm(backend));
        let other = std::fs::File::options().write(true).open(case.path()).unwrap();
        other.set_len(END).unwrap();
        let (start, seen) = (Instant::now(), [AtomicBool::new(false), AtomicBool::new(false)]);
        // A machine under load may run the readers at the same point of the writer for a while.
        let goes_on = || {
            let has_seen_both = seen.iter().all(|state| state.load(Relaxed));
            start.elapsed() < if has_seen_both { stress_time(2.0) } else { Duration::from_secs(60) }
        };
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while goes_on() {
                        let is_long = match &*case.read(END - 8, 16) {
                            bytes if bytes.len() == 8 => false,
                            bytes if bytes.len() == 16 && bytes[8..] == APPENDED[..8] => true,
                            bytes => panic!("{name}: {bytes:?}"),
                        };
                        seen[usize::from(is_long)].store(true, Relaxed);
                    }
                });
            }
            scope.spawn(|| {
                while goes_on() {
                    assert_eq!(case.file.write_at(&APPENDED, END).unwrap(), APPENDED.len());
                    other.set_len(END).unwrap();
                }
            });
        });
        assert!(
            seen.iter().all(|state| state.load(Relaxed)),
            "{name}: the readers saw one state: {seen:?}"
        );
    }
}

/// Goal: changes by another process, which the engine does not know of, are visible at once: bytes, and both directions
/// of the length.
#[test]
fn changes_by_others_are_visible_at_once() {
    for backend in back_ends() {
        let case = Case::warm(backend);
        let other = std::fs::OpenOptions::new().write(true).open(case.path()).unwrap();
        let mut expected = content();
        for turn in 0..200_u32 {
            let at = (turn as usize * 7919) % (PAGES * PAGE / 2);
            other.write_all_at(&[turn as u8; 6000], at as u64).unwrap();
            expected[at..at + 6000].fill(turn as u8);
            assert!(case.read(at as u64, 6000) == expected[at..at + 6000], "written");
            let len = PAGES * PAGE / 2 + turn as usize * 31;
            other.set_len(len as u64).unwrap();
            expected.resize(len, 0);
            assert_eq!(case.file.len().unwrap(), len as u64);
            assert!(case.read(len as u64 - 5000, 9000) == expected[len - 5000..], "cut");
            let longer = len + 3 * PAGE;
            other.write_all_at(&[9; 100], longer as u64 - 100).unwrap();
            expected.resize(longer - 100, 0);
            expected.resize(longer, 9);
            assert!(case.read(len as u64 - 5000, 90_000) == expected[len - 5000..], "grown");
            let appended = case.file.append(&[3; 10]).unwrap();
            assert_eq!(appended, longer as u64, "an append finds the end that others have moved");
            other.set_len(longer as u64).unwrap();
        }
    }
}

/// Goal: a thread that reads a file that another process cuts gets short reads or bytes, and no signal; so does a thread
/// that blocks SIGBUS.
#[test]
fn a_file_that_is_cut_raises_no_signal() {
    let case = Case::warm(BackendChoice::Threads);
    let other = std::fs::OpenOptions::new().write(true).open(case.path()).unwrap();
    let (stop, end) = (AtomicBool::new(false), Instant::now() + stress_time(1.0));
    let read_all = |is_done: &dyn Fn() -> bool| {
        let mut bytes = vec![0; 20_000];
        while !is_done() {
            for offset in (0..(PAGES * PAGE) as u64).step_by(50_000) {
                let moved = case.file.read_at(&mut bytes, offset).unwrap();
                assert!(bytes[..moved].iter().all(|byte| *byte == 0 || byte & 1 == 1));
            }
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: a set of signals of this thread's own.
            unsafe {
                let mut set = std::mem::zeroed();
                libc::sigemptyset(&mut set);
                libc::sigaddset(&mut set, libc::SIGBUS);
                libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
            }
            read_all(&|| stop.load(Relaxed));
        });
        scope.spawn(|| read_all(&|| stop.load(Relaxed)));
        run_and_stop(&stop, || {
            while Instant::now() < end {
                other.set_len(5000).unwrap();
                other.set_len((PAGES * PAGE) as u64).unwrap();
            }
        });
    });
}

/// Goal: a fault that is not the engine's goes to the handler of before, or kills as without the engine.
#[test]
fn other_faults_are_as_without_the_engine() {
    use std::os::unix::process::ExitStatusExt;

    extern "C" fn exit_42(_: libc::c_int) {
        // SAFETY: async-signal-safe.
        unsafe { libc::_exit(42) };
    }
    for has_handler in [true, false] {
        // SAFETY: the child calls nothing that another thread of the parent may have locked, but for the engine's open
        // of a file, before which the parent has one thread that matters.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let handler: extern "C" fn(libc::c_int) = exit_42;
            let action = if has_handler { handler as usize } else { libc::SIG_DFL };
            // SAFETY: the handler is async-signal-safe. The mapping is of a file that is shorter than it.
            unsafe {
                libc::signal(libc::SIGBUS, action);
                millpond::fault::install_handler().unwrap();
                let file = libc::memfd_create(c"empty".as_ptr(), 0);
                let at = libc::mmap(
                    std::ptr::null_mut(),
                    PAGE,
                    libc::PROT_READ,
                    libc::MAP_SHARED,
                    file,
                    0,
                );
                let byte = std::ptr::read_volatile(at.cast::<u8>());
                libc::_exit(i32::from(byte));
            }
        }
        let mut status = 0;
        // SAFETY: our own child.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        let status = std::process::ExitStatus::from_raw(status);
        match has_handler {
            true => assert_eq!(status.code(), Some(42), "{status}"),
            false => assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}"),
        }
    }
}

/// Goal: mapped backing with dirty pages of the engine's own is refused, and says why.
#[test]
fn mode_back_is_refused() {
    let dir = temp_dir();
    let engine = engine(1 << 20, BackendChoice::Threads);
    let options = mapped().write_mode(WriteMode::Back);
    let refused = engine.open(dir.path().join("file"), &options).unwrap_err();
    assert!(matches!(refused, Error::InvalidInput { .. }), "{refused}");
    assert!(refused.to_string().contains("WriteMode::Through"), "{refused}");
}

/// Goal: a child of fork reads the parent's bytes by an engine of its own. It does not inherit the parent's mapping.
#[test]
fn a_child_of_fork_maps_for_itself() {
    let case = Case::warm(BackendChoice::Threads);
    case.file.write_all_at(&[77; 3 * PAGE], 0).unwrap();
    // SAFETY: the child uses an engine of its own, and ends by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = matches!(case.file.read_at(&mut [0; 10], 0), Err(Error::Forked { .. }));
        let own = engine(1 << 20, BackendChoice::Threads);
        let file = own.open(case.path(), &mapped()).unwrap();
        let mut is_right = refused;
        for _ in 0..100 {
            let mut bytes = [0; 2 * PAGE];
            file.read_at(&mut bytes, 100).unwrap();
            is_right &= bytes == [77; 2 * PAGE];
        }
        // SAFETY: ends this process alone.
        unsafe { libc::_exit(i32::from(!is_right)) };
    }
    let mut status = 0;
    // SAFETY: our own child.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    assert!(case.read(0, 3 * PAGE) == [77; 3 * PAGE]);
}

/// Goal: the mapping serves a file that the process neither owns nor may write. The kernel does not report the residency
/// of such a file.
#[test]
fn files_of_others_are_served() {
    const NOBODY: u32 = 65534;
    let test = "files_of_others_are_served";
    in_own_process(test, Duration::from_secs(60), || {
        // SAFETY: no memory involved.
        if unsafe { libc::geteuid() } != 0 {
            return common::skip("only root can become another user");
        }
        let dir = temp_dir();
        let (path, expected) = (dir.path().join("file"), content());
        std::fs::write(&path, &expected).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        // SAFETY: no memory involved. All threads of this process become the user.
        assert_eq!(unsafe { libc::setresuid(NOBODY, NOBODY, 0) }, 0);
        let engine = engine(1 << 20, BackendChoice::Threads);
        let file =
            engine.from_fd(file.into(), &OpenOptions::new().read(true).backing(Backing::Mapped));
        let file = file.unwrap();
        for turn in 0..1000_usize {
            let at = turn * 7001 % (PAGES * PAGE - 5000);
            let mut bytes = [0; 5000];
            file.read_exact_at(&mut bytes, at as u64).unwrap();
            assert!(bytes == expected[at..at + 5000]);
        }
        let hits = engine.stats().hits;
        assert!(hits > 300, "{hits} of 1000");
        // The user may not remove it.
        // SAFETY: no memory involved. Root is the saved user.
        unsafe { libc::seteuid(0) };
    });
}

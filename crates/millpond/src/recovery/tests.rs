//! Tests of dirty pages that survive the death of their process, with a keeper process that writes them
//! back. `kill_tests` kills the process after each step of the protocol.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::io::backend::ChangeObserver;
use crate::recovery::changes::Changes;
use crate::recovery::keeper::{self, Address, Report, Server, Stopper};
use crate::recovery::wire::{self, KeeperRequest, Trust};
use crate::recovery::{EntryUse, Intent, Recovery};
use crate::units::{FrameIndex, PageIndex};

/// A keeper in a thread.
pub(super) struct TestKeeper {
    pub(super) address: Address,
    pub(super) reports: Receiver<Report>,
    stopper: Stopper,
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

impl TestKeeper {
    pub(super) fn new() -> TestKeeper {
        let server = Server::bind(&Address::unique()).unwrap().patience(Duration::ZERO);
        let (address, stopper) = (server.address().clone(), server.stopper());
        let (send, reports) = channel();
        let thread = std::thread::spawn(move || server.serve(|report| send.send(report).unwrap()));
        TestKeeper { address, reports, stopper, thread: Some(thread) }
    }
}

impl Drop for TestKeeper {
    fn drop(&mut self) {
        self.stopper.stop_when_idle();
        let served = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            served.unwrap().unwrap();
        }
    }
}

pub(super) fn adopt(recovery: &Recovery, file: &File, page_shift: u32) -> EntryUse {
    let stat = file.metadata().unwrap();
    recovery.adopt(file.as_fd(), stat.dev(), stat.ino(), stat.len(), page_shift).unwrap()
}

pub(super) fn fill(recovery: &Recovery, frame: u32, bytes: usize, with: u8) {
    recovery.free_record(FrameIndex(frame));
    // SAFETY: the frame belongs to the test.
    unsafe { recovery.frame(FrameIndex(frame)).write_bytes(with, bytes) };
}

/// Goal: the dirty pages at the end of an engine are written, to the byte; pages that were cleaned or
/// forgotten are not.
#[test]
fn dirty_pages_are_written() {
    let keeper = TestKeeper::new();
    let dir = tempfile::tempdir().unwrap();
    let recovery = Recovery::connect(&keeper.address, 1 << 20, 512).map(Arc::new).unwrap();
    let open = |name: &str| {
        let file = File::create_new(dir.path().join(name)).unwrap();
        file.write_all_at(&[1; 10_000], 0).unwrap();
        file
    };
    let (file, other) = (open("file"), open("other"));
    let entry = adopt(&recovery, &file, 12);
    let other_slot = adopt(&recovery, &other, 12);
    for frame in 1..=5 {
        fill(&recovery, frame, 4096, 10 + frame as u8);
    }
    recovery.commit(entry, [(PageIndex(0), FrameIndex(1))].into_iter(), None);
    recovery.commit(
        entry,
        [(PageIndex(2), FrameIndex(2)), (PageIndex(3), FrameIndex(3))].into_iter(),
        Some(13_000),
    );
    recovery.commit(entry, [(PageIndex(0), FrameIndex(4))].into_iter(), None);
    recovery.commit(other_slot, [(PageIndex(0), FrameIndex(5))].into_iter(), None);
    recovery.clean(FrameIndex(5));
    recovery.forget(other_slot);
    // As after a write in flight.
    let changes = Changes::new(&recovery);
    changes.enter(entry, file.as_fd());
    changes.begin(50_000);
    file.set_len(50_000).unwrap();
    drop(recovery);
    let report = keeper.reports.recv().unwrap();
    assert!(report.is_complete() && report.goodbye, "{report}");
    assert_eq!((report.files.len(), report.pages()), (1, 3), "{report:?}");
    assert!(report.files[0].drained);
    let bytes = std::fs::read(dir.path().join("file")).unwrap();
    let mut expected = vec![1; 13_000];
    expected[..4096].fill(14);
    expected[8192..12_288].fill(12);
    expected[12_288..].fill(13);
    assert!(bytes == expected);
    assert_eq!(std::fs::read(dir.path().join("other")).unwrap(), [1; 10_000]);
}

/// Goal: an engine with a keeper works as any other.
#[test]
fn an_engine_with_a_keeper() {
    use crate::{Engine, OpenOptions};
    let keeper = TestKeeper::new();
    let dir = tempfile::tempdir().unwrap();
    let engine = Engine::builder().cache_bytes(8 << 20).keeper(keeper.address.clone()).build();
    let engine = engine.unwrap();
    let options = OpenOptions::new().read(true).write(true).create(true);
    for page_bytes in [4096, 16384, 65536] {
        let path = dir.path().join(format!("file{page_bytes}"));
        let file = engine.open(path, &options.clone().page_bytes(page_bytes)).unwrap();
        let bytes: Vec<u8> = (0..20_000_000u32).map(|at| (at / 1000) as u8).collect();
        file.write_all_at(&bytes, 0).unwrap();
        let mut back = vec![0; 100_000];
        for round in 0..3 {
            for at in (0..bytes.len() - back.len()).step_by(77_777) {
                assert_eq!(file.read_at(&mut back, at as u64).unwrap(), back.len());
                assert!(back == bytes[at..at + back.len()], "at {at}, round {round}");
            }
        }
        assert!(engine.stats().memory_bytes <= engine.cache_bytes());
    }
}

/// Goal: the keeper knows a file's size, also if one thread hands the file over while another one changes
/// it.
/// Incident: a write below the end read the size, and then handed the file over with it.
#[test]
fn a_file_that_grows_while_it_is_handed_over() {
    use crate::{BackendChoice, Engine, OpenOptions, WriteMode};
    let keeper = TestKeeper::new();
    let dir = tempfile::tempdir().unwrap();
    let builder = Engine::builder().cache_bytes(8 << 20).backend(BackendChoice::Threads);
    let engine = builder.keeper(keeper.address.clone()).build().unwrap();
    let options = OpenOptions::new().read(true).write(true).write_mode(WriteMode::Back);
    for round in 0..200 {
        let path = dir.path().join(round.to_string());
        std::fs::write(&path, [1; 10_000]).unwrap();
        let file = engine.open(path, &options).unwrap();
        let barrier = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                barrier.wait();
                file.write_all_at(&[2; 100], 0).unwrap();
            });
            barrier.wait();
            file.truncate(20_000 + round * 100).unwrap();
        });
        assert_eq!(file.cached().keeper_size(), Some(file.len().unwrap()), "round {round}");
    }
}

/// Goal: an engine with a keeper forgets the durable length of a file that another process has cut, as any engine does.
/// Incident: the recorded backing file did not pass the new length on.
#[test]
fn a_cut_ends_the_durable_length() {
    use crate::{BackendChoice, Engine, OpenOptions};
    let keeper = TestKeeper::new();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, [1; 8192]).unwrap();
    let builder = Engine::builder().cache_bytes(1 << 20).backend(BackendChoice::Threads);
    let engine = builder.keeper(keeper.address.clone()).build().unwrap();
    let file = engine.open(path, &OpenOptions::new().read(true).write(true)).unwrap();
    let backing = &file.cached().backing;
    backing.note_durable_length(8192);
    assert!(!backing.is_beyond_durable_length(8192));
    backing.note_length(4096);
    assert!(backing.is_beyond_durable_length(8192));
}

/// A mapping with one dirty page of 100 bytes in `file`.
fn dirty(keeper: &TestKeeper, file: &File, with: u8) -> (Recovery, EntryUse) {
    let recovery = Recovery::connect(&keeper.address, 1 << 20, 512).unwrap();
    let entry = adopt(&recovery, file, 12);
    fill(&recovery, 1, 4096, with);
    recovery.commit(entry, [(PageIndex(0), FrameIndex(1))].into_iter(), Some(100));
    (recovery, entry)
}

fn contents(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// Goal: a file that is unnamed, unlinked or renamed is written; so is one whose mode forbids opening it
/// for writing, and one that was opened for appending.
#[test]
fn files_that_no_path_leads_to() {
    let keeper = TestKeeper::new();
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let new = |name: &str| File::create_new(path(name)).unwrap();
    let readable = |name: &str, append: bool| {
        let options = OpenOptions::new().read(true).write(true).append(append).create(true).clone();
        options.open(path(name)).unwrap()
    };

    let nameless = tempfile::tempfile_in(dir.path()).unwrap();
    let unlinked = readable("unlinked", false);
    let renamed = readable("renamed", false);
    let appending = readable("appending", true);
    appending.write_all_at(b"what was there", 0).unwrap();
    let private = readable("private", false);
    let engines: Vec<_> = [&nameless, &unlinked, &renamed, &appending, &private]
        .into_iter()
        .zip(1..)
        .map(|(file, with)| dirty(&keeper, file, with))
        .collect();
    std::fs::remove_file(path("unlinked")).unwrap();
    new("unlinked");
    std::fs::rename(path("renamed"), path("other name")).unwrap();
    new("renamed");
    private.set_permissions(std::fs::Permissions::from_mode(0o400)).unwrap();
    drop(engines);
    for (file, with) in [&nameless, &unlinked, &renamed, &appending, &private].into_iter().zip(1..)
    {
        let report = keeper.reports.recv().unwrap();
        assert!(report.is_complete(), "{report}");
        assert_eq!(contents(file), [with; 100]);
    }
    for name in ["unlinked", "renamed"] {
        assert_eq!(std::fs::read(path(name)).unwrap(), [], "another file of that name");
    }
}

/// Goal: a file whose last dirty page was written has no writable descriptor left, so that it can be
/// executed.
#[test]
fn a_forgotten_file_can_be_executed() {
    let keeper = TestKeeper::new();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("program");
    std::fs::copy("/bin/true", &path).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let recovery = Recovery::connect(&keeper.address, 1 << 20, 512).unwrap();
    let entry = adopt(&recovery, &file, 12);
    drop(file);
    let run = || Command::new(&path).status();
    assert_eq!(run().unwrap_err().kind(), std::io::ErrorKind::ExecutableFileBusy);
    recovery.forget(entry);
    // A child of another test has copies of all descriptors, from its fork until its exec.
    let begun = Instant::now();
    let status = loop {
        match run() {
            Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => {
                assert!(begun.elapsed() < Duration::from_secs(10), "{error}");
                std::thread::sleep(Duration::from_millis(1));
            }
            status => break status.unwrap(),
        }
    };
    assert!(status.success());
}

/// Goal: two engines of one process are independent.
#[test]
fn two_engines_in_one_process() {
    let keeper = TestKeeper::new();
    let files = [tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap()];
    let (one, _) = dirty(&keeper, &files[0], 1);
    let (other, _) = dirty(&keeper, &files[1], 2);
    drop(one);
    assert_eq!(keeper.reports.recv().unwrap().pages(), 1);
    assert_eq!(contents(&files[0]), [1; 100]);
    assert_eq!(contents(&files[1]), []);
    drop(other);
    assert_eq!(keeper.reports.recv().unwrap().pages(), 1);
    assert_eq!(contents(&files[1]), [2; 100]);
}

/// Goal: a file that a keeper refuses is an error when the file is handed over, without other effects.
#[test]
fn what_a_keeper_refuses() {
    let keeper = TestKeeper::new();
    let recovery = Recovery::connect(&keeper.address, 1 << 20, 512).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    let stat = file.as_file().metadata().unwrap();
    let adopt = |file: &File, inode: u64, shift: u32| {
        let adopted = recovery.adopt(file.as_fd(), stat.dev(), inode, 0, shift);
        adopted.err().map(|error| error.raw_os_error().unwrap())
    };
    let read_only = File::open(file.path()).unwrap();
    assert_eq!(adopt(&read_only, stat.ino(), 12), Some(libc::EBADF));
    assert_eq!(adopt(file.as_file(), stat.ino() + 1, 12), Some(libc::ESTALE));
    assert_eq!(adopt(file.as_file(), stat.ino(), 11), Some(libc::EINVAL));
    assert_eq!(adopt(file.as_file(), stat.ino(), 17), Some(libc::EINVAL));
    let null = OpenOptions::new().write(true).open("/dev/null").unwrap();
    assert_eq!(adopt(&null, stat.ino(), 12), Some(libc::EINVAL));
    // A file system whose writes have side effects.
    let control = OpenOptions::new().write(true).open("/proc/self/comm").unwrap();
    let control_stat = control.metadata().unwrap();
    let adopted = recovery.adopt(control.as_fd(), control_stat.dev(), control_stat.ino(), 0, 12);
    assert_eq!(adopted.unwrap_err().raw_os_error(), Some(libc::EOPNOTSUPP));
    // None of these used up an entry; and the number of entries is bounded.
    let slots: Vec<_> =
        std::iter::from_fn(|| recovery.adopt(file.as_fd(), stat.dev(), stat.ino(), 0, 12).ok())
            .collect();
    assert_eq!(slots.len(), 64);
    assert_eq!(adopt(file.as_file(), stat.ino(), 12), Some(libc::ENFILE));
    recovery.forget(slots[7]);
    assert_eq!(adopt(file.as_file(), stat.ino(), 12), None);
    recovery.detach();
    assert_eq!(adopt(file.as_file(), stat.ino(), 12), Some(libc::ENOTCONN));

    // Not a mapping of an engine; and invalid messages.
    let strange = File::open("/dev/zero").unwrap();
    let hello = |fds: &[BorrowedFd<'_>]| {
        wire::send_request(&keeper.address, Trust::OurUser, KeeperRequest::Hello, fds)
    };
    assert!(hello(&[]).is_err());
    assert!(hello(&[strange.as_fd(), strange.as_fd()]).is_err());
    let socket = wire::socket().unwrap();
    rustix::net::connect(&socket, &keeper.address.socket_address().unwrap()).unwrap();
    rustix::io::write(&socket, &[7; 1000]).unwrap();
    let mut answer = [0; 16];
    assert_eq!(rustix::io::read(&socket, &mut answer).unwrap(), 16);
    assert_eq!(answer[0], libc::EPROTO as u8);
    let nobody = "@millpond-keeper/nobody".parse().unwrap();
    assert!(Recovery::connect(&nobody, 1 << 20, 512).is_err());
    let built = crate::Engine::builder().cache_bytes(1 << 20).keeper(nobody).build();
    assert_eq!(built.unwrap_err().errno(), libc::ECONNREFUSED);
}

/// Goal: an intent that can't be redone, and pages that can't be written, are reported, and all other pages
/// are written.
/// Method: a file of limited size, by a memfd that is sealed against growing and shrinking.
#[test]
fn failures_are_reported_and_the_rest_is_written() {
    use rustix::fs::{MemfdFlags, SealFlags};
    let keeper = TestKeeper::new();
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(rustix::fs::memfd_create("sealed", flags).unwrap());
    file.set_len(8192).unwrap();
    rustix::fs::fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SHRINK).unwrap();
    let other = tempfile::tempfile().unwrap();
    let recovery = Recovery::connect(&keeper.address, 1 << 20, 512).unwrap();
    let entry = adopt(&recovery, &file, 12);
    let other_slot = adopt(&recovery, &other, 12);
    for frame in 1..=5 {
        fill(&recovery, frame, 4096, frame as u8);
    }
    let pages = PageIndex::FIRST.onwards().zip([1, 2, 3, 4].map(FrameIndex));
    recovery.commit(entry, pages, Some(4 * 4096));
    recovery.commit(other_slot, [(PageIndex(0), FrameIndex(5))].into_iter(), Some(10));
    recovery.set_intent(entry, Intent::Truncate { len: 100 });
    drop(recovery);
    let mut report = keeper.reports.recv().unwrap();
    assert!(!report.is_complete());
    report.files.sort_by_key(|file| file.failures.is_empty());
    let [sealed, whole] = report.files.as_slice() else { panic!("{report:?}") };
    assert_eq!((sealed.pages, sealed.bytes), (2, 8192), "{sealed:?}");
    let ranges: Vec<_> = sealed.failures.iter().map(|f| (f.range.start, f.range.end)).collect();
    let most = u64::MAX;
    assert_eq!(ranges, [(100, most), (8192, 16384), (16384, most)], "{sealed:?}");
    assert!(report.to_string().contains("writing bytes 8192 to 16384"), "{report}");
    assert_eq!((whole.pages, whole.failures.len()), (1, 0));
    assert_eq!(contents(&other), [5; 10]);
    // The unwritten pages are in the rescue file.
    let rescue = sealed.rescue.clone().unwrap();
    let target = tempfile::NamedTempFile::new().unwrap();
    let restored = keeper::restore(&rescue, Some(target.path()), true).unwrap();
    std::fs::remove_file(&rescue).unwrap();
    assert_eq!((restored.bytes, restored.size), (8192, 16384));
    let bytes = std::fs::read(target.path()).unwrap();
    assert!(bytes[8192..12288].iter().all(|b| *b == 3) && bytes[12288..].iter().all(|b| *b == 4));
    let bytes = contents(&file);
    assert!(bytes[..4096].iter().all(|b| *b == 1) && bytes[4096..].iter().all(|b| *b == 2));
}

/// Goal: recovery.K2: a frame that was freed in any state is FREE when it is allocated again.
#[test]
fn a_frame_is_free_when_it_is_handed_out() {
    use crate::cache::frames::class::Class;
    use crate::cache::frames::{FrameMemory, Frames};
    let keeper = TestKeeper::new();
    let file = tempfile::tempfile().unwrap();
    let frames = Frames::new(1 << 20, FrameMemory::Kept(&keeper.address)).unwrap();
    let recovery = frames.recovery().unwrap();
    let entry = adopt(recovery, &file, 12);
    let state = |frame| recovery.tables().record(frame).state.load(Relaxed);
    let take = || frames.try_alloc(Class::UNIT_PAGE).unwrap();
    let frame = take();
    recovery.commit(entry, [(PageIndex(0), frame)].into_iter(), None);
    assert_ne!(state(frame), 0);
    frames.free(frame, Class::UNIT_PAGE);
    assert_eq!(take(), frame);
    assert_eq!(state(frame), 0);
    // A frame that left its page is not dirty, even while it is pinned.
    recovery.commit(entry, [(PageIndex(0), frame)].into_iter(), None);
    frames.meta(frame).pins.pin();
    frames.release(frame, Class::UNIT_PAGE);
    assert_eq!(state(frame), 0);
}

/// Goal: a keeper process ends after a signal, but not before its last client.
#[test]
fn a_keeper_process_ends_after_its_clients() {
    if let Ok(path) = std::env::var(OWN_PROCESS) {
        keeper::run(&path.parse().unwrap(), |report| println!("{report}")).unwrap();
        println!("ended");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let address: Address = path.to_str().unwrap().parse().unwrap();
    // A socket without a listener.
    rustix::net::bind(wire::socket().unwrap(), &address.socket_address().unwrap()).unwrap();
    let output = std::thread::scope(|scope| {
        let keeper =
            scope.spawn(|| in_own_process("a_keeper_process_ends_after_its_clients", &path));
        let started = Instant::now();
        let recovery = loop {
            match Recovery::connect(&address, 1 << 20, 512) {
                Ok(recovery) => break recovery,
                Err(error) => assert!(started.elapsed() < Duration::from_secs(10), "{error}"),
            }
        };
        let socket = wire::socket().unwrap();
        rustix::net::connect(&socket, &address.socket_address().unwrap()).unwrap();
        let keeper_pid = rustix::process::Pid::from_raw(wire::peer(socket.as_fd()).unwrap().pid);
        rustix::process::kill_process(keeper_pid.unwrap(), rustix::process::Signal::TERM).unwrap();
        drop(socket);
        let file = tempfile::tempfile().unwrap();
        let entry = adopt(&recovery, &file, 12);
        fill(&recovery, 1, 4096, 3);
        recovery.commit(entry, [(PageIndex(0), FrameIndex(1))].into_iter(), Some(77));
        drop(recovery);
        assert_eq!(contents(&file), [3; 77]);
        keeper.join().unwrap()
    });
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("wrote back 1 pages, 77 bytes, of 1 files"), "{said}");
    assert!(output.status.success() && said.contains("ended"), "{output:?}");
    assert!(!path.exists());
}

/// Set in the environment of a test's separate process: its argument.
const OWN_PROCESS: &str = "MILLPOND_TEST_OWN_PROCESS";

/// Runs test `name` again in a separate process and process group, with one thread.
fn in_own_process(name: &str, argument: &Path) -> Output {
    let name = format!("recovery::tests::{name}");
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([&name, "--exact", "--nocapture", "--test-threads=1"]).process_group(0);
    command.env(OWN_PROCESS, argument).stderr(Stdio::inherit()).output().unwrap()
}

/// Goal: a spawned keeper survives the program and signals to its process group, and ends after it has done
/// its work.
#[test]
fn a_spawned_keeper_outlives_the_program() {
    if let Ok(path) = std::env::var(OWN_PROCESS) {
        let address = keeper::spawn().unwrap();
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        let recovery = Recovery::connect(&address, 1 << 20, 512).unwrap();
        let entry = adopt(&recovery, &file, 12);
        fill(&recovery, 1, 4096, 7);
        recovery.commit(entry, [(PageIndex(0), FrameIndex(1))].into_iter(), Some(1000));
        println!("\nkeeper {address}");
        for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGKILL] {
            // SAFETY: the process group belongs to this test.
            unsafe {
                libc::signal(signal, libc::SIG_IGN);
                libc::kill(0, signal);
            }
        }
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    let output = in_own_process("a_spawned_keeper_outlives_the_program", file.path());
    assert_eq!(output.status.signal(), Some(libc::SIGKILL), "{output:?}");
    let output = String::from_utf8(output.stdout).unwrap();
    let address = output.lines().find_map(|line| line.strip_prefix("keeper ")).unwrap();
    let address: Address = address.parse().unwrap();
    let started = Instant::now();
    while Recovery::connect(&address, 1 << 20, 512).is_ok() {
        assert!(started.elapsed() < Duration::from_secs(10), "the keeper stays");
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(std::fs::read(file.path()).unwrap(), [7; 1000]);
}

/// Goal: with a keeper, too, there is one memory limit; memory of a class that needs less is freed to the
/// system, and children of fork do not get the shared frames.
/// Method: files with pages of every size, one after the other, in a separate process; the kernel reports
/// the memory of the memfd.
#[test]
fn the_memory_limit_with_a_keeper() {
    const CACHE_BYTES: u64 = 16 << 20;
    let Ok(dir) = std::env::var(OWN_PROCESS) else {
        let dir = tempfile::tempdir().unwrap();
        let output = in_own_process("the_memory_limit_with_a_keeper", dir.path());
        println!("{}", String::from_utf8_lossy(&output.stdout));
        assert!(output.status.success());
        return;
    };
    let keeper = TestKeeper::new();
    let builder = crate::Engine::builder().cache_bytes(CACHE_BYTES);
    let engine = builder.keeper(keeper.address.clone()).build().unwrap();
    let options = crate::OpenOptions::new().read(true).write(true).create(true);
    for round in 0..2 {
        for page_bytes in [4096, 65536, 16384, 8192, 32768] {
            let path = Path::new(&dir).join(format!("file{page_bytes}"));
            let file = engine.open(path, &options.clone().page_bytes(page_bytes)).unwrap();
            let bytes = vec![page_bytes.trailing_zeros() as u8; 1 << 20];
            for part in 0..20 {
                file.write_all_at(&bytes, part << 20).unwrap();
            }
            let mut back = vec![0; 1 << 20];
            for part in 0..20 {
                assert_eq!(file.read_at(&mut back, part << 20).unwrap(), back.len());
                assert!(back == bytes);
            }
            let shared = shared_bytes();
            let counted = engine.stats().memory_bytes;
            println!("round {round}, {page_bytes}: {shared:?} shared, {counted} counted");
            assert!(counted <= CACHE_BYTES);
            // A late reader may bring back some pages; there are none in this test.
            assert!(shared.is_none_or(|shared| shared <= counted));
        }
    }
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let flags = maps
        .lines()
        .skip_while(|line| !line.contains("millpond-frames"))
        .filter(|line| line.starts_with("VmFlags") || line.contains("millpond-frames"));
    let mut mappings = 0;
    let mut ours = false;
    for line in flags {
        if line.contains("millpond-frames") {
            ours = true;
        } else if std::mem::take(&mut ours) {
            assert!(line.contains(" dc"), "inherited by fork: {line}");
            mappings += 1;
        }
    }
    println!("{mappings} mappings");
    assert!(mappings > 1);
}

/// The allocated bytes of the memfd of this process's one engine; `None` if the kernel does not report
/// them.
fn shared_bytes() -> Option<u64> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| line.contains("millpond-frames")).unwrap();
    let range = line.split(' ').next().unwrap();
    let metadata = std::fs::metadata(format!("/proc/self/map_files/{range}")).ok()?;
    Some(metadata.blocks() * 512)
}

/// The cost of crash persistence for a write: a measurement, to be run by hand, in release mode.
#[test]
#[ignore = "measures, and proves nothing"]
fn cost_of_a_commit() {
    let keeper = TestKeeper::new();
    let file = tempfile::tempfile().unwrap();
    let recovery = Recovery::connect(&keeper.address, 64 << 20, 1 << 15).unwrap();
    let started = Instant::now();
    let entry = adopt(&recovery, &file, 12);
    println!("adopt: {:?}", started.elapsed());
    for (pages, size) in [(1, None), (1, Some(1 << 20)), (16, None), (256, None)] {
        let mut nanos = Vec::new();
        for round in 0..2000u32 {
            // Different records each time, as with frames from a free list.
            let first = 1 + round * 256 % (1 << 14);
            let frames = (first..first + pages).map(FrameIndex);
            let started = Instant::now();
            recovery.commit(entry, PageIndex::FIRST.onwards().zip(frames.clone()), size);
            nanos.push(started.elapsed().as_nanos());
            frames.for_each(|frame| recovery.clean(frame));
        }
        nanos.sort_unstable();
        println!("{pages} pages, size {size:?}: {} ns (median)", nanos[nanos.len() / 2]);
    }
    let started = Instant::now();
    recovery.forget(entry);
    println!("forget: {:?}", started.elapsed());
}

/// Goal: a file is adopted only if its mark can have both of its sockets for as long as it lasts, and nothing waits in the
/// datagram socket for its close (mark.MK4).
/// Method: a memfd, as another test's file could get the inode of a file. A process that another test forks has copies
/// of all descriptors until it has replaced its program.
#[test]
fn a_mark_has_its_datagram_socket_to_itself() {
    use rustix::fs::MemfdFlags;
    use rustix::io::Errno;
    use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
    let keeper = TestKeeper::new();
    let recovery = Recovery::connect(&keeper.address, 1 << 20, 512).unwrap();
    let file = File::from(rustix::fs::memfd_create("marked", MemfdFlags::CLOEXEC).unwrap());
    let stat = file.metadata().unwrap();
    let name = format!("millpond-kept/{:x}/{:x}", stat.dev(), stat.ino());
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
    let (family, kind, flags) = (AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC);
    let datagram = || rustix::net::socket_with(family, kind, flags, None).unwrap();
    let adopt = || recovery.adopt(file.as_fd(), stat.dev(), stat.ino(), 0, 12);

    let strange = datagram();
    rustix::net::bind(&strange, &address).unwrap();
    assert_eq!(adopt().unwrap_err().raw_os_error(), Some(libc::EBUSY));
    drop(strange);
    // The refused mark has left neither name.
    let started = Instant::now();
    let entry = loop {
        match adopt() {
            Ok(entry) => break entry,
            Err(error) => assert!(started.elapsed() < Duration::from_secs(20), "{error}"),
        }
    };
    let sent = rustix::net::sendto(datagram(), b"any", SendFlags::empty(), &address);
    assert_eq!(sent, Err(Errno::PIPE));
    rustix::net::connect(datagram(), &address).unwrap();
    recovery.forget(entry);
    drop(recovery);
}

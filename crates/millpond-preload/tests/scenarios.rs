//! Descriptors under races, faults, signals, forks and other processes. Each scenario is a function of a C program,
//! which checks its own results. It must also pass on the kernel alone; otherwise it checks for the wrong behaviour.

mod common;

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use common::{MODES, Mode, Mount, Pond, Report, succeed};

/// Runs the scenario in all modes, and handed over at random moments; returns the report of mode back.
fn run(scenario: &str) -> Report {
    let alone = Pond::new();
    let program = alone.compile("scenario.c", &["-O1"]);
    succeed(alone.plain(&program).arg(scenario));
    for pond in Pond::unmeasured() {
        succeed(pond.served(&program).arg(scenario));
    }
    let [report, ..] = MODES.map(|mode| {
        let pond = Pond::new().in_mode(mode);
        succeed(pond.served(&program).arg(scenario));
        pond.report()
    });
    report
}

/// Goal: a read that races with close and reopen returns bytes of one of the two files, not torn, or EBADF.
#[test]
fn close_racing_with_pread() {
    let report = run("close_race");
    assert!(report.served_bytes > 1 << 20, "{}", report.lines);
}

/// Goal: threads that read through one offset, duplicated or not, read every byte exactly once.
#[test]
fn one_offset_for_all() {
    run("shared_offset").assert_served(3 << 20);
}

/// Goal: appends from two descriptors all reach the end of the file, and none is torn.
#[test]
fn appends_from_two_descriptors() {
    run("append");
}

/// Goal: bad memory gives EFAULT, also if only a part is bad; the program's own handlers run as usual.
#[test]
fn faulting_buffers() {
    assert!(run("faults").served_bytes > 1 << 20);
}

/// Goal: handlers may read, write, seek, open and close, at each point that the signal interrupts.
#[test]
fn handlers_that_do_io() {
    run("signals").assert_served(1 << 20);
}

/// Goal: descriptions shared with a child stay coherent, offset included; new descriptions are served.
#[test]
fn fork_spawn_and_exec() {
    let report = run("forks");
    assert!(report.passed_for("forked") >= 1, "{}", report.lines);
    assert!(report.served_bytes > 3 << 20, "{}", report.lines);
}

/// Goal: threads may open, lock and close files while another thread forks.
/// Incident: the fork held the process locks and waited for the registry; a close held the registry and waited for
/// the process locks.
#[test]
fn forks_beside_opens_and_closes() {
    assert!(run("fork_race").passed_for("forked") >= 1);
}

/// Goal: the program reads the bytes that another process writes, whether that process opened the file before the
/// program or after it.
#[test]
fn files_changed_by_others() {
    let report = run("other_process");
    assert!(report.passed_for("opened-elsewhere") >= 1, "{}", report.lines);
    assert!(report.passed_for("open-elsewhere") >= 1, "{}", report.lines);
}

/// Goal: a description sent over a socket is shared, offset included.
#[test]
fn descriptors_sent_away() {
    assert!(run("sent").passed_for("given") >= 1);
}

/// Goal: locks relative to the offset, the close of all descriptors, and the numbers that open returns are as on the
/// kernel.
#[test]
fn locks_and_numbers() {
    run("locks");
}

/// Goal: unlink, rename, truncate and O_TRUNC by path have the kernel's effect while the file is open.
#[test]
fn changes_by_path() {
    run("under_foot");
}

/// Goal: the engine's descriptors move away when the program needs their numbers.
#[test]
fn as_many_files_as_the_limit_allows() {
    assert!(run("many_files").passed_for("descriptors") >= 1);
    let report = run("many_numbers");
    assert!(report.passed_for("descriptors") >= 1, "{}", report.lines);
}

/// Goal: two served processes with the same file open see each other's writes at once.
#[test]
fn processes_that_take_turns() {
    let report = run("take_turns");
    assert!(report.passed_for("opened-elsewhere") >= 15, "{}", report.lines);
    assert!(report.served_bytes > 1 << 20, "{}", report.lines);
}

/// Goal: deferred writes are invisible: in sizes, times, modes and contents, to the kernel's calls on the file, to
/// execution, and after each way in which the process ends.
#[test]
fn writes_that_wait_are_not_noticed() {
    run("unnoticed");
}

/// Goal: the writes are indeed deferred.
#[test]
fn writes_wait() {
    let pond = Pond::new().in_mode(Mode::Back);
    let program = pond.compile("scenario.c", &["-O1"]);
    succeed(pond.served(&program).arg("waiting"));
}

/// Goal: the flag that direct backing sets on the program's own description is invisible: to calls that read from the
/// description in the kernel, that get its flags or set others, and to a child.
#[test]
fn direct_backing_is_not_noticed() {
    run("undirected");
}

/// Goal: direct backing in mode back is direct. Aligned bytes bypass the kernel's cache, and tails, appends and cut
/// files are correct. If a file system has no direct I/O, the report states it.
#[test]
fn write_back_is_direct() {
    let script = "import os\n\
        f = os.open('f', os.O_RDWR | os.O_CREAT)\n\
        os.write(f, b'a' * 300000)\n\
        os.fsync(f)\n\
        os.pwrite(f, b'b' * 5, 70000)\n\
        os.ftruncate(f, 200001)\n\
        os.close(f)\n\
        g = os.open('f', os.O_RDWR | os.O_APPEND)\n\
        [os.write(g, b'c' * 1000) for _ in range(300)]\n\
        os.close(g)\n\
        h = os.open('f', os.O_RDWR)\n\
        os.pread(h, 10, 100000)\n\
        os.close(h)\n";
    let mut expected = vec![b'a'; 200_001];
    expected[70_000..70_005].fill(b'b');
    expected.extend([b'c'; 300_000]);
    for is_on_disk in [true, false] {
        let pond = Pond::new().in_mode(Mode::BackDirect);
        let mounted = (!is_on_disk).then(|| Mount::tmpfs(&pond.path("."), "size=64m"));
        if matches!(mounted, Some(None)) {
            common::skip("only root can mount a file system without direct I/O");
            continue;
        }
        pond.run("python3", &["-c", script]);
        assert!(std::fs::read(pond.path("f")).unwrap() == expected);
        let report = pond.report();
        report.assert_served(500_000);
        if is_on_disk && report.undirected_files > 0 {
            common::skip("the temporary directory's file system has no direct I/O");
        } else if is_on_disk {
            assert!(report.direct_writes >= 3 && report.direct_reads >= 1, "{}", report.lines);
        } else {
            assert_eq!((report.direct_writes, report.direct_reads), (0, 0), "{}", report.lines);
            assert_eq!(report.undirected_files, 3, "{}", report.lines);
        }
    }
}

/// Goal: write, fsync or close returns the error of a full file system.
#[test]
fn no_space_is_told() {
    for mode in MODES {
        let pond = Pond::new().in_mode(mode);
        let program = pond.compile("scenario.c", &["-O1"]);
        std::fs::create_dir(pond.path("small")).unwrap();
        let mounted = Mount::tmpfs(&pond.path("small"), "size=4m");
        if mounted.is_none() {
            common::skip("only root can mount a small file system");
            return;
        }
        succeed(pond.served(&program).arg("full"));
    }
}

/// Goal: an open waits while a keeper still writes the file, whether the file can be served or not, and signals
/// interrupt the wait.
/// Incident: the keeper has such a file open for writing, so no lease can be taken on it. The library passed the file
/// to the kernel before the keeper had written it, and the open did not wait.
#[test]
fn opens_wait_for_a_keeper() {
    use std::io::Write;
    use std::os::linux::fs::MetadataExt;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Stdio;
    use std::time::{Duration, Instant};

    for mode in MODES {
        let pond = Pond::new().in_mode(mode);
        let mut file = std::fs::File::create(pond.path("f")).unwrap();
        let meta = file.metadata().unwrap();
        let keeper = StandIn::of(meta.st_dev(), meta.st_ino());
        let start = || pond.served("cat").arg("f").stdout(Stdio::piped()).spawn().unwrap();
        let mut stopped = start();
        let first = keeper.accept();
        // SAFETY: no memory involved; the child is not reaped yet.
        unsafe { libc::kill(stopped.id() as i32, libc::SIGTERM) };
        // Sooner than the library's own timeout.
        let until = Instant::now() + Duration::from_secs(30);
        let status = loop {
            assert!(Instant::now() < until, "{mode:?}: a signal waits for the keeper");
            match stopped.try_wait().unwrap() {
                Some(status) => break status,
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        assert_eq!(status.signal(), Some(libc::SIGTERM), "{mode:?}");
        let waiting = start();
        // The open must wait for each keeper, as several dead processes can have left dirty pages of the file.
        let more: Vec<_> = (0..20).map(|_| keeper.accept()).collect();
        file.write_all(b"whole").unwrap();
        drop((keeper, first, more));
        let output = waiting.wait_with_output().unwrap();
        assert!(output.status.success(), "{mode:?}");
        assert_eq!(output.stdout, b"whole", "{mode:?}");
    }
}

/// The mark of a keeper that has the file of a dead process: see `recovery::mark` of the engine.
struct StandIn {
    listener: OwnedFd,
    _datagram: OwnedFd,
}

impl StandIn {
    fn of(device: u64, inode: u64) -> Self {
        let name = format!("millpond-kept/{device:x}/{inode:x}");
        // SAFETY: all zeros is an address; the name is shorter than the path of one, whose first byte
        // stays zero.
        unsafe {
            let mut address: libc::sockaddr_un = std::mem::zeroed();
            address.sun_family = libc::AF_UNIX as u16;
            for (to, from) in address.sun_path[1..].iter_mut().zip(name.bytes()) {
                *to = from as libc::c_char;
            }
            let len = size_of::<libc::sa_family_t>() + 1 + name.len();
            let bound = |kind: i32| {
                let fd = libc::socket(libc::AF_UNIX, kind | libc::SOCK_CLOEXEC, 0);
                assert_eq!(libc::bind(fd, (&raw const address).cast(), len as u32), 0);
                OwnedFd::from_raw_fd(fd)
            };
            let listener = bound(libc::SOCK_SEQPACKET);
            assert_eq!(libc::listen(listener.as_raw_fd(), 256), 0);
            Self { listener, _datagram: bound(libc::SOCK_DGRAM) }
        }
    }

    /// Accepts a peer that waits; the test fails if none connects within 30 seconds.
    fn accept(&self) -> OwnedFd {
        let fd = self.listener.as_raw_fd();
        let mut polled = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: the kernel reads and writes `polled`, which outlives the call; `accept4` returns a new descriptor,
        // which no other code has.
        unsafe {
            assert_eq!(libc::poll(&mut polled, 1, 30_000), 1, "no open waits for the keeper");
            let null = std::ptr::null_mut();
            let accepted = libc::accept4(fd, null, null.cast(), libc::SOCK_CLOEXEC);
            assert!(accepted >= 0);
            OwnedFd::from_raw_fd(accepted)
        }
    }
}

//! What can go wrong around descriptors: races, faults, signals, forks, other processes. Each
//! scenario is a C program's function that checks itself; it must pass on the kernel alone too,
//! else it checks the wrong thing.

mod common;

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use common::{MODES, Mode, Mount, Pond, Report, succeed};

/// In all modes, and handed over at random moments; returns the report of mode back.
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

/// Goal: a read that races with close and reopen sees one of the two files, whole, or EBADF.
#[test]
fn close_racing_with_pread() {
    let report = run("close_race");
    assert!(report.served_bytes > 1 << 20, "{}", report.lines);
}

/// Goal: threads that read through one offset, duplicated or not, get every byte once.
#[test]
fn one_offset_for_all() {
    run("shared_offset").assert_served(3 << 20);
}

/// Goal: appends from two descriptors all land at the end, whole.
#[test]
fn appends_from_two_descriptors() {
    run("append");
}

/// Goal: bad memory gives EFAULT, also partly; the program's own handlers work as ever.
#[test]
fn faulting_buffers() {
    assert!(run("faults").served_bytes > 1 << 20);
}

/// Goal: handlers may read, write, seek, open and close, whatever they interrupt.
#[test]
fn handlers_that_do_io() {
    run("signals").assert_served(1 << 20);
}

/// Goal: descriptions shared with a child stay coherent, offset included; new ones are served.
#[test]
fn fork_spawn_and_exec() {
    let report = run("forks");
    assert!(report.passed_for("forked") >= 1, "{}", report.lines);
    assert!(report.served_bytes > 3 << 20, "{}", report.lines);
}

/// Goal: threads may open, lock and close files while another forks. The incident: the fork held the
/// process locks and waited for the registry, which a close held that waited for the process locks.
#[test]
fn forks_beside_opens_and_closes() {
    assert!(run("fork_race").passed_for("forked") >= 1);
}

/// Goal: what another process writes is read, whether it opened the file before us or after.
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

/// Goal: locks relative to the offset, closing of everything, and the numbers that open gives.
#[test]
fn locks_and_numbers() {
    run("locks");
}

/// Goal: unlink, rename, truncate and O_TRUNC by path, with the file open.
#[test]
fn changes_by_path() {
    run("under_foot");
}

/// Goal: the engine's descriptors make way when the program needs the numbers.
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

/// Goal: nobody notices that writes wait: not by size, times, modes or contents, not by the kernel's
/// calls on the file, not by execution, however the process ends.
#[test]
fn writes_that_wait_are_not_noticed() {
    run("unnoticed");
}

/// Goal: they do wait.
#[test]
fn writes_wait() {
    let pond = Pond::new().in_mode(Mode::Back);
    let program = pond.compile("scenario.c", &["-O1"]);
    succeed(pond.served(&program).arg("waiting"));
}

/// Goal: nobody meets the flag that direct backing sets on the program's own description: not calls
/// that read there in the kernel, that ask for flags or set others, nor a child.
#[test]
fn direct_backing_is_not_noticed() {
    run("undirected");
}

/// Goal: direct backing in mode back is direct: aligned bytes go past the kernel's cache, and tails,
/// appends and what was cut are right. Where a file system can't, the report says so.
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

/// Goal: a full file system is told by write, fsync or close.
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

/// Goal: an open of a file that a keeper still writes waits, whether the file can be served or not,
/// and takes signals meanwhile. The incident: the keeper has such a file open for writing, so that
/// there is no lease on it; the file was left to the kernel unwritten, and nobody waited.
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
        // Sooner than the library would give up.
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
        // More than one process can have left here.
        let more: Vec<_> = (0..20).map(|_| keeper.accept()).collect();
        file.write_all(b"whole").unwrap();
        drop((keeper, first, more));
        let output = waiting.wait_with_output().unwrap();
        assert!(output.status.success(), "{mode:?}");
        assert_eq!(output.stdout, b"whole", "{mode:?}");
    }
}

/// The mark of a keeper that has a dead process's file: see `survival::mark` of the engine.
struct StandIn(OwnedFd);

impl StandIn {
    fn of(device: u64, inode: u64) -> Self {
        let name = format!("millpond-kept/{device:x}/{inode:x}");
        // SAFETY: all zeros is an address; the name is shorter than the path of one, whose first byte
        // stays zero.
        unsafe {
            let fd = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0);
            let mut address: libc::sockaddr_un = std::mem::zeroed();
            address.sun_family = libc::AF_UNIX as u16;
            for (to, from) in address.sun_path[1..].iter_mut().zip(name.bytes()) {
                *to = from as libc::c_char;
            }
            let len = size_of::<libc::sa_family_t>() + 1 + name.len();
            assert_eq!(libc::bind(fd, (&raw const address).cast(), len as u32), 0);
            assert_eq!(libc::listen(fd, 256), 0);
            Self(OwnedFd::from_raw_fd(fd))
        }
    }

    /// A peer that waits; there must be one before long.
    fn accept(&self) -> OwnedFd {
        let fd = self.0.as_raw_fd();
        let mut polled = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: the kernel reads and writes `polled`; what it makes is nobody else's.
        unsafe {
            assert_eq!(libc::poll(&mut polled, 1, 30_000), 1, "nobody waits for the keeper");
            let null = std::ptr::null_mut();
            let accepted = libc::accept4(fd, null, null.cast(), libc::SOCK_CLOEXEC);
            assert!(accepted >= 0);
            OwnedFd::from_raw_fd(accepted)
        }
    }
}

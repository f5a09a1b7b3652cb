//! One file that a program has open several times, to read and to write.

mod common;

use std::io::Read;
use std::process::Stdio;

use common::{MODES, Mode, Pond, Report, ServedFiles, require, succeed};

fn on_use() -> Pond {
    Pond::new().serving(ServedFiles::Default)
}

/// Runs the scenario on the kernel alone, and in mode back. Returns the reports of the runs without options.
fn run(plain: &[&str], scenario: &[&str]) -> Vec<Report> {
    let alone = Pond::new();
    let program = alone.compile("several.c", &["-O1"]);
    succeed(alone.plain(&program).args(plain));
    for pond in Pond::unmeasured() {
        succeed(pond.served(&program).args(plain));
    }
    let run = |mode| {
        let pond = on_use().in_mode(mode);
        succeed(pond.served(&program).args(scenario));
        pond.report()
    };
    MODES.map(run).into()
}

/// Goal: after a thread has written, every other thread reads the new bytes, each by a descriptor of its own that it
/// opens and closes during the test; other programs read them, too.
#[test]
fn threads_that_open_for_themselves() {
    run(&["stamps"], &["stamps"]);
}

/// Goal: the file is served to all descriptors, so no read is torn.
#[test]
fn threads_with_descriptors_of_their_own_are_served() {
    for report in run(&["whole", "0"], &["whole", "1"]) {
        assert!(report.served_bytes > 150 << 20, "{}", report.lines);
        assert!(report.served_share() > 0.9, "{}", report.lines);
    }
}

/// Goal: each descriptor has its own rights, flags and offset, under any operation on it or on another descriptor,
/// and under any disturbance.
#[test]
fn anything_on_any_of_several() {
    let reports = run(&["model", "1"], &["model", "2"]);
    for report in reports {
        assert!(report.served_bytes > 2 << 20, "{}", report.lines);
        assert!(report.passed_for("open-twice") > 0, "{}", report.lines);
    }
}

/// Goal: the same if no file can be opened again when the file is handed to the kernel.
#[test]
fn given_back_without_a_free_number() {
    run(&["limit"], &["limit"]);
}

/// Goal: a served file stays served when the program opens it again, and each descriptor keeps its access mode.
#[test]
fn opened_further_while_it_is_served() {
    for report in run(&["further"], &["further"]) {
        assert!(report.served_share() > 0.75, "{}", report.lines);
        assert!(report.served_files > 500, "{}", report.lines);
    }
}

/// Goal: an open descriptor stays open with its own offset when the process may no longer open the file, also for a
/// child.
#[test]
fn rights_that_are_given_up() {
    run(&["rights"], &["rights"]);
}

/// Goal: a file that is open for reading stays served to its readers when the program opens it for writing. They read
/// each later write, each at its own offset. The file is handed over when the readers are locked.
#[test]
fn readers_come_first() {
    require("python3", "python3");
    let script = "import os, threading\n\
        size = 1 << 20\n\
        with open('f', 'wb') as f: f.write(bytes(size))\n\
        readers = [os.open('f', os.O_RDONLY) for _ in range(4)]\n\
        for reader in readers: assert os.read(reader, 4096) == bytes(4096)\n\
        ends = []\n\
        def read(fd):\n\
        \x20   left = size - 4096\n\
        \x20   while left > 0: left -= len(os.read(fd, 512))\n\
        \x20   ends.append(left == 0 and os.lseek(fd, 0, os.SEEK_CUR) == size)\n\
        threads = [threading.Thread(target=read, args=[fd]) for fd in readers[:2]]\n\
        for thread in threads: thread.start()\n\
        writer = os.open('f', os.O_RDWR)\n\
        for thread in threads: thread.join()\n\
        assert ends == [True, True], ends\n\
        for n in range(1, 200):\n\
        \x20   os.pwrite(writer, bytes([n]) * 4096, 4096 * n)\n\
        \x20   for reader in readers: assert os.pread(reader, 4096, 4096 * n) == bytes([n]) * 4096\n\
        assert os.read(readers[2], 4096) == b'\\x01' * 4096\n\
        try: os.write(readers[2], b'x')\n\
        except OSError: pass\n\
        else: assert False, 'a reader has written'\n\
        import fcntl\n\
        fcntl.flock(readers[3], fcntl.LOCK_SH)\n\
        assert os.read(readers[2], 4096) == b'\\x02' * 4096\n\
        assert os.lseek(writer, 0, os.SEEK_CUR) == 0\n";
    succeed(Pond::new().plain("python3").args(["-c", script]));
    let mut served = 0;
    for mode in MODES {
        for _ in 0..5 {
            let pond = Pond::new().in_mode(mode).serving(ServedFiles::Default);
            pond.run("python3", &["-c", script]);
            let report = pond.report();
            // The threads may have been in a call each time the library checked.
            served += u64::from(report.served_bytes > 199 * 4096 * 4);
        }
    }
    assert!(served > 0);
}

/// Goal: the keeper has the writes of all descriptors.
#[test]
fn killed_with_several() {
    let page_bytes = 4096;
    for (kill, mode) in [Mode::Back, Mode::Back, Mode::BackDirect].into_iter().enumerate() {
        let pond = on_use().in_mode(mode);
        let program = pond.compile("several.c", &["-O1"]);
        let mut child = pond.served(&program).arg("killed").stdout(Stdio::piped()).spawn().unwrap();
        let mut told = child.stdout.take().unwrap();
        let mut stamp = [0; 8];
        for _ in 0..3000 + 700 * kill {
            told.read_exact(&mut stamp).unwrap();
        }
        child.kill().unwrap();
        let mut rest = Vec::new();
        told.read_to_end(&mut rest).unwrap();
        let last = u64::from_le_bytes(stamp) + rest.len() as u64 / 8;
        child.wait().unwrap();
        // Waits until the keeper has written.
        let found = std::fs::read(pond.path("f")).unwrap();
        let pages = (found.len() / page_bytes) as u64;
        assert_eq!(pages, 256);
        for page in 0..pages {
            let least = last - (last - page) % pages;
            let bytes = &found[page as usize * page_bytes..][..page_bytes];
            let stamps = bytes.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
            let stamps: std::collections::BTreeSet<u64> = stamps.collect();
            // The write in progress may have reached the file.
            let is_whole = stamps.len() == 1 && stamps.first().is_some_and(|stamp| *stamp == least);
            let is_next = (last + 1) % pages == page && stamps.contains(&(last + 1));
            assert!(is_whole || is_next, "page {page}, last {last}, least {least}: {stamps:?}");
        }
    }
}

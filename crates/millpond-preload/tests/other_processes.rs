//! Opens by other processes of a file that the library serves: its lease, and the time until the library gives it up.
//!
//! docs/run.md or docs/run-internals.md documents each difference from the kernel. A test here requires the kernel's behaviour unless the
//! document names a difference.

mod common;

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use common::{Mode, Pond, ServedFiles};

const DOCUMENT: &str =
    concat!(include_str!("../../../docs/run.md"), include_str!("../../../docs/run-internals.md"));

/// A program for which a writable file is served, and which is idle then.
struct Holder {
    child: Child,
    said: BufReader<ChildStdout>,
    _orders: ChildStdin,
}

impl Holder {
    fn start(pond: &Pond) -> Self {
        let script = "import os, sys\n\
            fd = os.open('file', os.O_RDWR)\n\
            for i in range(2000): assert len(os.pread(fd, 4096, i % 4 * 4096)) == 4096\n\
            print('ready', flush=True); sys.stdin.read()\n";
        let mut command = pond.served("python3");
        command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let orders = child.stdin.take().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self { child, said, _orders: orders }
    }

    fn signal(&self, signal: i32) {
        // SAFETY: no memory involved; the child is not reaped yet.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// Stops the program, and waits until the kernel has stopped it.
    fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let stat = format!("/proc/{}/stat", self.child.id());
        let state = || std::fs::read_to_string(&stat).unwrap();
        while !state().rsplit_once(") ").unwrap().1.starts_with('T') {
            std::thread::yield_now();
        }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.signal(libc::SIGCONT);
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = self.said.buffer();
    }
}

fn open(path: &Path, flags: i32) -> std::io::Result<File> {
    OpenOptions::new().read(true).custom_flags(flags).open(path)
}

/// The ponds of the modes, set up as by `millpond run`.
fn ponds() -> [(&'static str, Pond); 3] {
    let pond = |mode, files| {
        let pond = Pond::new().in_mode(mode).serving(files);
        std::fs::write(pond.path("file"), vec![7; 16384]).unwrap();
        pond
    };
    [
        ("default", pond(Mode::Through, ServedFiles::Default)),
        ("eager", pond(Mode::Through, ServedFiles::Eager)),
        ("back", pond(Mode::Back, ServedFiles::Default)),
    ]
}

/// Goal: an open with O_NONBLOCK by another process succeeds at once, or the document states that it does not.
/// A later open succeeds.
/// Incident: `tar` of another process failed with "Resource temporarily unavailable".
#[test]
fn an_open_that_must_not_wait() {
    let is_told = DOCUMENT.contains("- In mode back another process's `open` with O_NONBLOCK");
    let mut deviations = 0;
    for (mode, pond) in ponds() {
        let _holder = Holder::start(&pond);
        let path = pond.path("file");
        match open(&path, libc::O_NONBLOCK) {
            Ok(_) => println!("mode {mode}: opened at once"),
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(libc::EAGAIN), "mode {mode}");
                let is_told = is_told && mode == "back";
                assert!(is_told, "mode {mode}: {error}, which the document does not state");
                deviations += 1;
                println!("DEVIATION, documented: mode {mode}: open with O_NONBLOCK: {error}");
            }
        }
        open(&path, 0).unwrap_or_else(|error| panic!("mode {mode}: {error}"));
        open(&path, libc::O_NONBLOCK).unwrap_or_else(|error| panic!("mode {mode}: {error}"));
    }
    assert_eq!(deviations > 0, is_told, "the document states a deviation that no mode has");
}

/// Goal: an open by another process does not depend on a program that is stopped, or the document states that it does.
/// Method: opens that must not wait; opens that wait would take the time that the kernel grants a lease holder.
/// Incident: `cat` of another process took 45 s.
#[test]
fn an_open_while_the_program_is_stopped() {
    let is_told = DOCUMENT.contains("waits while the program is stopped (SIGSTOP");
    let mut deviations = 0;
    for (mode, pond) in ponds() {
        let holder = Holder::start(&pond);
        let path = pond.path("file");
        holder.stop();
        let first = open(&path, libc::O_NONBLOCK).err();
        // The kernel has asked for the lease by now, so only the program's answer is missing.
        let second = open(&path, libc::O_NONBLOCK).err();
        if let (Some(_), Some(error)) = (first, second) {
            assert_eq!(error.raw_os_error(), Some(libc::EAGAIN), "mode {mode}");
            let is_told = is_told && mode == "back";
            assert!(is_told, "mode {mode}: the open would wait, which the document does not state");
            deviations += 1;
            println!("DEVIATION, documented: mode {mode}: an open waits for a stopped program");
        } else {
            println!("mode {mode}: opened while the program is stopped");
        }
        holder.signal(libc::SIGCONT);
        let mut opened = open(&path, 0).unwrap_or_else(|error| panic!("mode {mode}: {error}"));
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut opened, &mut bytes).unwrap();
        assert!(bytes == [7; 16384], "mode {mode}");
        // Both the program and the other process read each other's bytes.
        File::options().write(true).open(&path).unwrap().write_all(b"other").unwrap();
    }
    assert_eq!(deviations > 0, is_told, "the document states a deviation that no mode has");
}

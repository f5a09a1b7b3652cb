//! The last line of a run, if the program can't print it: it was killed, or ended by a direct system call.
//!
//! The program counts in a memory file that `millpond run` makes (`told`, and the preload library's `report::tally`).
//! If `millpond run` stays as the program's parent, it reads the file after the program has ended. Otherwise it leaves
//! a watcher process behind before it execs (`millpond_exit_watcher`), which sleeps until then. The watcher adds 0.3 ms
//! to the start of a run. It holds standard error only as long as the program does, and is not a child of the program.
//! There is no watcher if no process can be made (`pids.max`, RLIMIT_NPROC), nor beside a program that is a
//! child subreaper, whose child it would become. Then no line is printed if the program is killed.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::Command;

use rustix::fs::MemfdFlags;
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use rustix::process::{PidfdFlags, Resource, getpid, pidfd_open};

use super::block::WORDS;
use super::told::*;

/// Environment variable that the preload library reads.
const VARIABLE: &str = "MILLPOND_TALLY";

pub struct Tally {
    file: File,
    direct: Direct,
}

impl Tally {
    pub fn new(is_direct: bool) -> io::Result<Self> {
        let file = File::from(rustix::fs::memfd_create("millpond-tally", MemfdFlags::CLOEXEC)?);
        file.set_len(FILE_BYTES as u64)?;
        file.write_all_at(&FORM.to_ne_bytes(), (MARK * WORD_BYTES) as u64)?;
        let direct = if is_direct { Direct::Files } else { Direct::Nothing };
        Ok(Self { file, direct })
    }

    /// Passes the memory file to the process that `command` starts, or becomes (`is_exec`). No other process is started
    /// before.
    pub fn give(&mut self, command: &mut Command, is_exec: bool) -> io::Result<()> {
        // A high number, as for the library's own descriptors, so that the program's own numbers stay free.
        let first = rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(1 << 20);
        if let Ok(high) = fcntl_dupfd_cloexec(&self.file, (first / 2).min(1024) as i32) {
            self.file = File::from(high);
        }
        let metadata = self.file.metadata()?;
        let (dev, ino) = (metadata.dev(), metadata.ino());
        // By process id if it is known: that path is valid in child processes too, so the library need not change it.
        let own = format!("/proc/{}/fd/", std::process::id());
        let by = if is_exec { &own } else { BY_SELF };
        command.env(VARIABLE, format!("{by}{}:{dev}:{ino}", self.file.as_raw_fd()));
        fcntl_setfd(&self.file, FdFlags::empty())?;
        Ok(())
    }

    /// Before this process becomes the program: starts the watcher that prints the line. Called before the file gets a
    /// high number, as the fork copies the kernel's descriptor table up to the highest number.
    pub fn leave(&self) {
        let Ok(own) = pidfd_open(getpid(), PidfdFlags::empty()) else { return };
        let direct = self.direct;
        // An error is ignored: the program must still run.
        let sign_at = (LOADED * WORD_BYTES) as i64;
        let _ =
            millpond_exit_watcher::spawn(own.as_fd(), self.file.as_fd(), sign_at, move |file| {
                Self { file: File::from(file), direct }.say();
            });
    }

    /// After the program has ended: prints the line if the program has not.
    pub fn say(&self) {
        if let Ok(Some(line)) = self.unsaid() {
            let _ = io::stderr().write_all(line.as_bytes());
        }
    }

    fn unsaid(&self) -> io::Result<Option<String>> {
        let word = |at: usize| {
            let mut bytes = [0; WORD_BYTES];
            self.file.read_exact_at(&mut bytes, at as u64)?;
            Ok::<_, io::Error>(u64::from_ne_bytes(bytes))
        };
        if word(SAID * WORD_BYTES)? != 0 {
            return Ok(None);
        }
        let mut sums = Sums::none();
        self.add(CHILDREN, 1, &mut sums)?;
        self.add(BLOCKS_AT, BLOCKS_MAX, &mut sums)?;
        Ok((!sums.is_empty()).then(|| sums.sentence(self.direct)))
    }

    fn add(&self, at: usize, blocks: usize, sums: &mut Sums) -> io::Result<()> {
        let mut bytes = vec![0; blocks * BLOCK_BYTES];
        self.file.read_exact_at(&mut bytes, at as u64)?;
        for block in bytes.chunks_exact(BLOCK_BYTES) {
            for (index, word) in block.chunks_exact(WORD_BYTES).enumerate().take(WORDS) {
                sums.add(index, u64::from_ne_bytes(word.try_into().expect("eight bytes")));
            }
        }
        Ok(())
    }
}

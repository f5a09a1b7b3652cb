//! Runs the program over the recorder.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{getpid, set_child_subreaper};

use super::check;
use super::history::{History, Recorder};
use super::mount::{Shared, mount};
use super::tree::Tree;
use crate::descendants::end_children;
use crate::failure::{Context, FAILED, Failure, Result};
use crate::millpond_command::millpond;

const PAUSE: Duration = Duration::from_millis(2);
/// The interval at which the reader of the output checks for an interruption.
const LISTENED: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

pub struct Program<'a> {
    pub dir: &'a Path,
    pub words: &'a [OsString],
    /// The options of `millpond run`; `None`: the program runs without it.
    pub engine: Option<Vec<OsString>>,
    pub to_stderr: bool,
    pub interrupted: &'a AtomicBool,
}

pub fn interruption() -> Failure {
    Failure::new(FAILED, "interrupted")
}

impl Program<'_> {
    /// Runs the program to its end.
    pub fn record(&self) -> Result<History> {
        let dir = self.dir.canonicalize().context(self.dir.display())?;
        let before = Tree::read(&dir).context(format!("reading {}", dir.display()))?;
        let recorder: Shared = Arc::new(Mutex::new(Some(Recorder::new(before))));
        let session = mount(Arc::clone(&recorder), &dir)?;
        let ended = self.run(&dir, &recorder);
        // If a process still uses the mount, at least detach it from the directory.
        if session.umount_and_join().is_err() {
            let _ = unmount(&dir, UnmountFlags::DETACH);
        }
        let recorder = recorder.lock().expect("no panic under the lock").take();
        let history = recorder.expect("taken here alone").finish();
        let status = ended?;
        if self.interrupted.load(Relaxed) {
            return Err(interruption());
        }
        if !status.success() {
            let how = check::ended(status);
            return Err(Failure::new(FAILED, format!("the program failed: {how}")));
        }
        Ok(history)
    }

    fn run(&self, dir: &Path, recorder: &Shared) -> Result<ExitStatus> {
        let (first, rest) = self.words.split_first().expect("clap wants one");
        let mut command = match &self.engine {
            None => {
                let mut command = Command::new(first);
                command.args(rest);
                command
            }
            Some(words) => {
                let mut command = Command::new(millpond()?);
                // Only the program changes the files below the mount, and the mount supports leases.
                let device = std::fs::metadata(dir).context(dir.display())?.dev();
                command.env("MILLPOND_LOCAL_DEVICE", device.to_string());
                command.arg("run").args(words).arg("--path").arg(dir).arg("--").args(self.words);
                command
            }
        };
        // As a subreaper, this process can end orphans of the program after an interruption.
        set_child_subreaper(Some(getpid())).context("becoming a subreaper")?;
        let mut child = command
            .current_dir(dir)
            .stdout(Stdio::piped())
            .spawn()
            .context(format!("starting {}", Path::new(first).display()))?;
        let output = child.stdout.take().expect("piped");
        std::thread::scope(|scope| {
            scope.spawn(|| self.copy_output(output, recorder));
            self.wait(&mut child)
        })
    }

    fn wait(&self, child: &mut Child) -> Result<ExitStatus> {
        loop {
            if let Some(status) = child.try_wait().context("waiting for the program")? {
                if self.interrupted.load(Relaxed) {
                    // The program's children are children of this process now.
                    end_children(std::process::id());
                }
                return Ok(status);
            }
            if self.interrupted.load(Relaxed) {
                // From a terminal, the program has received the signal itself.
                end_children(std::process::id());
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Records the program's output among its changes, and passes it on.
    ///
    /// After an interruption, it does not wait for processes that still hold the program's standard output.
    fn copy_output(&self, mut output: impl Read + AsFd, recorder: &Shared) {
        let mut words = [0; 4096];
        while !self.interrupted.load(Relaxed) {
            match poll(&mut [PollFd::new(&output, PollFlags::IN)], Some(&LISTENED)) {
                Ok(0) | Err(Errno::INTR) => continue,
                Ok(_) => {}
                Err(_) => return,
            }
            match output.read(&mut words) {
                Ok(0) => return,
                Ok(len) => {
                    let said = &words[..len];
                    if let Some(recorder) =
                        recorder.lock().expect("no panic under the lock").as_mut()
                    {
                        recorder.record_output(said);
                    }
                    // The reader of the output may be gone.
                    let _ = if self.to_stderr {
                        io::stderr().write_all(said)
                    } else {
                        io::stdout().write_all(said).and_then(|()| io::stdout().flush())
                    };
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }
}

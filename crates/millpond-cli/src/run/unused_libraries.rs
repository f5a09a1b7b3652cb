//! Removes libraries of other versions, which no program uses any more, from the directory of the preload library.
//!
//! ```text
//! a run:         the library's last use is more than an hour ago -> lock it shared, set its time, check its name, unlock
//! a removal:     another version's last use is more than a day ago, and no process names it -> lock it exclusively,
//!                look at its time again, unlink it, unlock
//! ```
//!
//! - U1. A library's modification time is the time of its last use, at most an hour late. So the program of a run loads a library
//!   whose last use is not a day ago, unless the run is stopped for a day between both.
//! - U2. A run notes its use under a lock, and looks then whether the library still has its name. A removal looks at the time under
//!   the other lock. So the removal finds the new time, or the run finds the name gone and writes the library again.
//! - U3. The processes of a run name the library in their maps or, if they are static programs, in their environment. Their children
//!   load it at any later time, so it stays. Environments of other users are not read: they are in the memory of the process, which
//!   may make a reader wait. A process that can't be inspected, or is in another PID namespace, is not found: its later children
//!   get a message of the loader, and run on the kernel alone.
//!
//! Earlier versions of `millpond run` do not set the time. They write a library that is missing.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, SystemTime};

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

/// Between two notes of a library's use.
const NOTED_EVERY: Duration = Duration::from_secs(60 * 60);
/// After its last use a library is removed.
const UNUSED: Duration = Duration::from_secs(24 * 60 * 60);
/// A removal holds its lock for some system calls. A user who holds a lock for longer delays a run by no more than this.
const LOCK_WAIT: Duration = Duration::from_secs(1);

pub const PREFIX: &str = "libmillpond_preload-";
pub const SUFFIX: &str = ".so";
/// Libraries that are being written, with the process id of the writer.
pub const UNFINISHED: &str = "unfinished-";

/// Whether a run need not note its use of a library that was used at `last_use`.
pub fn was_noted(last_use: SystemTime) -> bool {
    // A time in the future is noted again.
    last_use.elapsed().is_ok_and(|age| age < NOTED_EVERY)
}

/// Notes the use of the library at `path` by `set_time` (U2). Whether it is still there.
pub fn note_use(path: &Path, set_time: impl Fn(&File) -> io::Result<()>) -> io::Result<bool> {
    let file = match open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    let started = std::time::Instant::now();
    // Where the file system has no locks, another error is no reason to wait.
    while let Err(Errno::WOULDBLOCK | Errno::INTR) =
        flock(&file, FlockOperation::NonBlockingLockShared)
        && started.elapsed() < LOCK_WAIT
    {
        thread::sleep(Duration::from_millis(1));
    }
    // Ignored: on a read-only file system no library is removed.
    let _ = set_time(&file);
    has_name(&file, path)
}

/// Removes all unused libraries in `directory`, and what killed runs have left there, but not the file `kept`. Errors are ignored:
/// a later run tries again.
pub fn remove(directory: &Path, kept: &str) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let mut unused: Vec<String> = names
        .filter(|name| name != kept && (is_library(name) || name.starts_with(UNFINISHED)))
        .filter(|name| {
            fs::symlink_metadata(directory.join(name)).is_ok_and(|file| is_unused(&file))
        })
        .collect();
    if unused.is_empty() || !retain_unnamed(&mut unused) {
        return;
    }
    for name in unused {
        let path = directory.join(name);
        let _ = open(&path).and_then(|file| remove_locked(&file, &path));
    }
}

fn remove_locked(file: &File, path: &Path) -> io::Result<()> {
    flock(file, FlockOperation::NonBlockingLockExclusive)?;
    if is_unused(&file.metadata()?) && has_name(file, path)? {
        fs::remove_file(path)?;
    }
    Ok(())
}

fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)
}

fn has_name(file: &File, path: &Path) -> io::Result<bool> {
    let file = file.metadata()?;
    Ok(fs::symlink_metadata(path)
        .is_ok_and(|named| (named.dev(), named.ino()) == (file.dev(), file.ino())))
}

fn is_library(name: &str) -> bool {
    let hash = name.strip_prefix(PREFIX).and_then(|name| name.strip_suffix(SUFFIX));
    hash.is_some_and(|hash| hash.len() == 16 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

fn is_unused(file: &fs::Metadata) -> bool {
    let age = file.modified().ok().and_then(|used| used.elapsed().ok());
    file.is_file() && age.is_some_and(|age| age > UNUSED)
}

/// Retains the names that no process has in its maps or its environment (U3). `false`: processes are not visible.
fn retain_unnamed(names: &mut Vec<String>) -> bool {
    let Ok(processes) = fs::read_dir("/proc") else { return false };
    let is_number = |name: &OsString| name.as_encoded_bytes().iter().all(u8::is_ascii_digit);
    let mut is_visible = false;
    let user = rustix::process::geteuid().as_raw();
    for process in processes.flatten().filter(|process| is_number(&process.file_name())) {
        let is_own = process.metadata().is_ok_and(|owner| owner.uid() == user);
        for file in if is_own { &["maps", "environ"][..] } else { &["maps"] } {
            let Ok(bytes) = fs::read(process.path().join(file)) else { continue };
            is_visible = true;
            let text = String::from_utf8_lossy(&bytes);
            names.retain(|name| !text.contains(name.as_str()));
        }
    }
    is_visible
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    const KEPT: &str = "libmillpond_preload-0123456789abcdef.so";

    /// A file in `directory` that was last used `hours` ago.
    fn make(directory: &Path, name: &str, hours: u64) {
        let file = File::create(directory.join(name)).unwrap();
        let age = Duration::from_secs(hours * 60 * 60 + 60);
        file.set_modified(SystemTime::now() - age).unwrap();
    }

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Goal: libraries of other versions, and unfinished ones, are removed a day after their last use; no other file is.
    /// Incident: each version left a file for good.
    #[test]
    fn unused_libraries_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        for (name, hours) in [
            (KEPT, 48),
            ("libmillpond_preload-00000000000000aa.so", 24),
            ("libmillpond_preload-00000000000000bb.so", 22),
            ("libmillpond_preload-other.so", 48),
            ("unfinished-1", 48),
            ("unfinished-2", 0),
            ("serve.sock.lock", 48),
        ] {
            make(directory, name, hours);
        }
        let link = directory.join("libmillpond_preload-00000000000000cc.so");
        std::os::unix::fs::symlink(directory.join("serve.sock.lock"), link).unwrap();
        remove(directory, KEPT);
        let left = [
            KEPT,
            "libmillpond_preload-00000000000000bb.so",
            "libmillpond_preload-00000000000000cc.so",
            "libmillpond_preload-other.so",
            "serve.sock.lock",
            "unfinished-2",
        ];
        let mut left = left.map(String::from);
        left.sort();
        assert_eq!(names(directory), left);
    }

    /// Goal: a library that a process has mapped or may preload is kept until that process has ended.
    #[test]
    fn libraries_of_processes_are_kept() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let name = "libmillpond_preload-00000000000000dd.so";
        make(directory, name, 48);
        let mut command = Command::new("cat");
        // The process of a static program: it has not mapped the library, and its children would load it.
        command.env("NOT_LD_PRELOAD", directory.join(name));
        let mut process = command.stdin(Stdio::piped()).spawn().unwrap();
        remove(directory, KEPT);
        assert_eq!(names(directory), [name]);
        drop(process.stdin.take());
        process.wait().unwrap();
        remove(directory, KEPT);
        assert!(names(directory).is_empty());
    }

    /// Goal: a run that notes its use while a removal looks at the library keeps it, or finds that it is gone.
    #[test]
    fn a_use_is_noted_or_the_library_is_gone() {
        let directory = tempfile::tempdir().unwrap();
        let name = "libmillpond_preload-00000000000000ee.so";
        let path = directory.path().join(name);
        let set_time = |file: &File| file.set_modified(SystemTime::now());
        assert!(!note_use(&path, set_time).unwrap());
        make(directory.path(), name, 48);
        // The removal found that the library is unused, and has not locked it yet.
        let removal = open(&path).unwrap();
        assert!(note_use(&path, set_time).unwrap());
        remove_locked(&removal, &path).unwrap();
        assert!(path.exists());
        make(directory.path(), name, 48);
        remove_locked(&removal, &path).unwrap();
        assert!(!path.exists());

        // As many rounds of both at once: a library whose use was noted is there.
        for _ in 0..200 {
            make(directory.path(), name, 48);
            thread::scope(|scope| {
                scope.spawn(|| {
                    let _ = open(&path).and_then(|file| remove_locked(&file, &path));
                });
                assert_eq!(note_use(&path, set_time).unwrap(), path.exists());
            });
        }
    }
}

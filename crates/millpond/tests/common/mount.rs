//! File systems on loop devices.

use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::FallocateFlags;

use super::{skip, temp_dir};

/// A file system that is unmounted when it is dropped.
pub struct Mount {
    pub point: PathBuf,
    _dir: tempfile::TempDir,
}

impl Mount {
    /// `None`, with a skip, where permissions or programs are missing.
    #[track_caller]
    pub fn ext4(bytes: u64) -> Option<Mount> {
        // With smaller blocks ext4 refuses writes into space that it has allocated: it finds none
        // for the extents' own blocks (57 of 127 writes of 64 KiB, on 6 MiB, by plain system calls).
        Mount::of("mkfs.ext4", &["-q", "-b", "4096"], bytes)
    }

    /// With reflinks.
    #[track_caller]
    pub fn xfs(bytes: u64) -> Option<Mount> {
        Mount::of("mkfs.xfs", &["-q", "-m", "reflink=1"], bytes)
    }

    #[track_caller]
    pub fn btrfs(bytes: u64) -> Option<Mount> {
        Mount::of("mkfs.btrfs", &["-q"], bytes)
    }

    #[track_caller]
    pub fn tmpfs(bytes: u64) -> Option<Mount> {
        let dir = temp_dir();
        let point = dir.path().join("mounted");
        std::fs::create_dir(&point).unwrap();
        let size = format!("size={bytes}");
        let mut mount = Command::new("mount");
        let made = run(mount.args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(&point));
        made.then_some(Mount { point, _dir: dir })
    }

    #[track_caller]
    fn of(make: &str, args: &[&str], bytes: u64) -> Option<Mount> {
        let dir = memory_dir().unwrap_or_else(temp_dir);
        let (image, point) = (dir.path().join("image"), dir.path().join("mounted"));
        std::fs::File::create(&image).unwrap().set_len(bytes).unwrap();
        std::fs::create_dir(&point).unwrap();
        // The tools are in root's path.
        let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
        let made = run(Command::new(make).args(args).arg(&image).env("PATH", &path))
            && run(Command::new("mount").args(["-o", "loop"]).args([&image, &point]));
        made.then_some(Mount { point, _dir: dir })
    }

    /// Makes the file at `path` take all free blocks; a later call takes those that were freed
    /// since.
    pub fn fill_up(&self, path: &Path) {
        let filler = std::fs::File::options().append(true).create(true).open(path).unwrap();
        let mut at = filler.metadata().unwrap().len();
        for len in [64 << 20, 1 << 20, 64 << 10, 4096] {
            while rustix::fs::fallocate(&filler, FallocateFlags::empty(), at, len).is_ok() {
                at += len;
            }
        }
    }

    pub fn free_blocks(&self) -> u64 {
        rustix::fs::statvfs(&self.point).unwrap().f_bfree
    }
}

/// A directory in memory, if there is space: a full file system waits for its disk often.
fn memory_dir() -> Option<tempfile::TempDir> {
    const SPARE_BYTES: u64 = 2 << 30;
    let dir = tempfile::tempdir_in("/dev/shm").ok()?;
    let system = rustix::fs::statvfs(dir.path()).ok()?;
    (system.f_bavail * system.f_frsize >= SPARE_BYTES).then_some(dir)
}

/// Runs a command that needs root; a failure is a skip.
#[track_caller]
fn run(command: &mut Command) -> bool {
    match command.output() {
        Ok(output) if output.status.success() => true,
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stderr).trim().to_string();
            skip(format_args!("{command:?}: {text}"));
            false
        }
        Err(error) => {
            skip(format_args!("{command:?}: {error}"));
            false
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // Lazily: after a failure the file may still be open.
        let _ = Command::new("umount").arg("--lazy").arg(&self.point).status();
    }
}

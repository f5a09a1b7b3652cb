//! File systems of their own, on loop devices.

use std::path::PathBuf;
use std::process::Command;

use super::{skip, temp_dir};

/// A file system of its own, unmounted in the end.
pub struct Mount {
    pub point: PathBuf,
    _dir: tempfile::TempDir,
}

impl Mount {
    /// None where this needs rights or programs that are missing, which is a skip.
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

    fn of(make: &str, args: &[&str], bytes: u64) -> Option<Mount> {
        let dir = temp_dir();
        let (image, point) = (dir.path().join("image"), dir.path().join("mounted"));
        std::fs::File::create(&image).unwrap().set_len(bytes).unwrap();
        std::fs::create_dir(&point).unwrap();
        let run = |command: &mut Command| match command.output() {
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
        };
        // The tools are where root's path is.
        let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
        let made = run(Command::new(make).args(args).arg(&image).env("PATH", &path))
            && run(Command::new("mount").args(["-o", "loop"]).args([&image, &point]));
        made.then_some(Mount { point, _dir: dir })
    }

    pub fn free_blocks(&self) -> u64 {
        rustix::fs::statvfs(&self.point).unwrap().f_bfree
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // Lazily: after a failure the file may still be open.
        let _ = Command::new("umount").arg("--lazy").arg(&self.point).status();
    }
}

//! File systems that a test mounts.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A mounted file system, unmounted when dropped.
pub struct Mount(PathBuf);

impl Mount {
    /// `None` if the process may not mount.
    pub fn tmpfs(at: &Path, options: &str) -> Option<Self> {
        Self::new("tmpfs", at, options)
    }

    /// Makes and mounts an overlay at `dir/merged` of `dir/lower` and `dir/upper`; `None` if the process may not
    /// mount, or the kernel has no overlay.
    pub fn overlay(dir: &Path) -> Option<Self> {
        for name in ["lower", "upper", "work", "merged"] {
            std::fs::create_dir_all(dir.join(name)).unwrap();
        }
        let path = |name| dir.join(name).display().to_string();
        let (lower, upper, work) = (path("lower"), path("upper"), path("work"));
        let options = format!("lowerdir={lower},upperdir={upper},workdir={work}");
        Self::new("overlay", &dir.join("merged"), &options)
    }

    fn new(kind: &str, at: &Path, options: &str) -> Option<Self> {
        let mut mount = Command::new("mount");
        mount.args(["-t", kind, "-o", options, kind]).arg(at);
        mount.output().ok()?.status.success().then(|| Self(at.to_owned()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).output();
    }
}

//! A file system of a given kind in an image file of the directory. A killed run leaves it behind,
//! and the next run removes it.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{self, Command};

use super::creation_lock::creation_lock;

/// The blocks that an image has at first.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Image {
    /// None.
    Sparse,
    /// All, as a disk has: no first write of a block waits for space on the directory's file system.
    Written,
}

impl Image {
    fn make(self, mut file: &File, bytes: u64) -> io::Result<()> {
        if self == Image::Sparse {
            return file.set_len(bytes);
        }
        io::copy(&mut io::repeat(0).take(bytes), &mut file)?;
        file.sync_all()
    }
}

/// Lifts a limit of the length of requests that an earlier user of the loop device has left.
fn allow_long_requests(device: &str) {
    let queue = Path::new("/sys/block").join(device.trim_start_matches("/dev/")).join("queue");
    let lifted = fs::read(queue.join("max_hw_sectors_kb"))
        .and_then(|longest| fs::write(queue.join("max_sectors_kb"), longest));
    report_failure(lifted.map_err(|error| format!("{}: {error}", queue.display())));
}

/// A mounted file system in an image file; unmounted on drop, and gone when its open files are
/// closed.
#[derive(Debug)]
pub struct LoopMount {
    image: PathBuf,
    device: Option<String>,
    pub at: PathBuf,
    mounted: bool,
}

impl LoopMount {
    /// The smallest file system that mkfs.xfs makes is of 300 MiB.
    const BYTES_MIN: u64 = 512 << 20;

    /// A file system of `kind`, with room for `bytes`. The error says why there is none.
    pub fn new(dir: &Path, kind: &str, bytes: u64) -> Result<Self, String> {
        Self::with(dir, kind, bytes, Image::Sparse, "defaults")
    }

    /// The same with an image of this form and with mount options.
    pub fn with(
        dir: &Path,
        kind: &str,
        bytes: u64,
        image_form: Image,
        options: &str,
    ) -> Result<Self, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("loop mounts take root".into());
        }
        Self::remove_stale(dir);
        let name = format!("millpond-bench-{}-{kind}", process::id());
        let (image, at) = (dir.join(format!("{name}.image")), dir.join(name));
        let _gate = creation_lock();
        let mut mount = Self { image, device: None, at, mounted: false };
        let made = File::create_new(&mount.image)
            .and_then(|file| image_form.make(&file, bytes.max(Self::BYTES_MIN)))
            .and_then(|()| fs::create_dir(&mount.at));
        made.map_err(|error| format!("{}: {error}", mount.image.display()))?;
        let image = mount.image.to_string_lossy().into_owned();
        // No discards, which would free the image's blocks.
        let settings: &[&str] = match kind {
            "ext4" => &["-q", "-F", "-E", "nodiscard"],
            _ => &["-q", "-f", "-K"],
        };
        run(&format!("mkfs.{kind}"), &[settings, &[&*image]].concat())?;
        let device =
            run("losetup", &["--find", "--show", "--direct-io=on", &image])?.trim().to_owned();
        mount.device = Some(device.clone());
        allow_long_requests(&device);
        run("mount", &["-t", kind, "-o", options, &device, &mount.at.to_string_lossy()])?;
        mount.mounted = true;
        Ok(mount)
    }

    /// Removes the image of a run that was killed between making a file system and opening its
    /// files.
    fn remove_stale(dir: &Path) {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Some(rest) = name.strip_prefix("millpond-bench-") else { continue };
            let Some(image) = rest.strip_suffix(".image") else { continue };
            let pid = image.split('-').next().unwrap_or_default();
            if !Path::new("/proc").join(pid).exists() {
                Self::remove_of(dir, pid);
            }
        }
    }

    /// Removes the files of the process `pid`.
    pub fn remove_of(dir: &Path, pid: &str) {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_its = name.starts_with(&format!("millpond-bench-{pid}-"));
            if !is_its || !name.ends_with(".image") {
                continue;
            }
            let (image, at) = (entry.path(), entry.path().with_extension(""));
            let used = run(
                "losetup",
                &["--noheadings", "--output", "NAME", "--associated", &image.to_string_lossy()],
            );
            let device =
                used.ok().map(|used| used.trim().to_owned()).filter(|used| !used.is_empty());
            let mounted = run("mountpoint", &["-q", &at.to_string_lossy()]).is_ok();
            drop(LoopMount { image, device, at, mounted });
        }
    }
}

impl Drop for LoopMount {
    fn drop(&mut self) {
        if self.mounted {
            report_failure(run("umount", &["--lazy", &self.at.to_string_lossy()]));
        }
        if let Some(device) = &self.device {
            // Detached when the last user closes it.
            report_failure(run("losetup", &["--detach", device]));
        }
        for removed in [fs::remove_dir(&self.at), fs::remove_file(&self.image)] {
            report_failure(removed.map_err(|error| format!("{}: {error}", self.image.display())));
        }
    }
}

fn report_failure<T>(outcome: Result<T, String>) {
    if let Err(message) = outcome {
        eprintln!("loop device: {message}");
    }
}

/// The output of a program; the error has its message.
fn run(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(process::Stdio::null())
        .output()
        .map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let complaint = String::from_utf8_lossy(&output.stderr);
    let complaint: Vec<&str> = complaint.split_whitespace().collect();
    Err(format!("{program}: {}: {}", output.status, complaint.join(" ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_fails_says_why() {
        assert!(run("no-such-program", &[]).unwrap_err().starts_with("no-such-program: "));
        assert!(run("losetup", &["/no/such"]).unwrap_err().contains("losetup"));
    }
}

//! Where the files are: a directory, or a file system of a loop device.
//!
//! A loop mount is made, empty files are opened in it, and then it is unmounted, detached and its image
//! removed, all at once: the kernel keeps each for as long as something in it is open. So nothing stays
//! behind however the benchmark ends, but if it is killed in the moment between; the next run in the
//! directory sees to that.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{self, Command};

use rustix::fs::OFlags;

use super::work;
use crate::bench::harness::AlignedBuffer;
use crate::failure::{Context, Result};

/// A file system to measure on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    Directory,
    Loop(&'static str),
}

impl Place {
    /// How engines that measure here are told apart.
    pub fn name(&self, file_system: &str) -> String {
        match self {
            Place::Directory => file_system.to_owned(),
            Place::Loop(kind) => format!("{kind} loop"),
        }
    }

    /// Two files of `bytes`, the same to begin with. The error says why there are none.
    pub fn files(
        &self,
        dir: &Path,
        bytes: u64,
        block_bytes: u32,
    ) -> std::result::Result<[BlockFile; 2], String> {
        let make = |dir: &Path| -> Result<[BlockFile; 2]> {
            Ok([BlockFile::create(dir)?, BlockFile::create(dir)?])
        };
        let made = match self {
            Place::Directory => make(dir),
            Place::Loop(kind) => {
                if !rustix::process::geteuid().is_root() {
                    return Err("loop mounts take root".into());
                }
                LoopMount::remove_stale(dir);
                let mount = LoopMount::new(dir, kind, 3 * bytes)?;
                make(&mount.at)
            }
        };
        let files = made.map_err(|failure| failure.message)?;
        for file in &files {
            file.fill(bytes, block_bytes)
                .map_err(|error| format!("making a file of {bytes} bytes: {error}"))?;
        }
        Ok(files)
    }
}

/// A file whose blocks are those of [`work::fill`], without a name.
#[derive(Debug)]
pub struct BlockFile {
    file: File,
}

impl BlockFile {
    fn create(dir: &Path) -> Result<Self> {
        let path = dir.join(format!("millpond-bench-{}-mixed", process::id()));
        let opened = fs::OpenOptions::new().read(true).write(true).create_new(true).open(&path);
        let file = opened.context(path.display())?;
        fs::remove_file(&path).context(path.display())?;
        Ok(Self { file })
    }

    fn fill(&self, bytes: u64, block_bytes: u32) -> io::Result<()> {
        let mut chunk = vec![0; 1 << 20];
        let mut block = 0;
        for _ in 0..bytes / chunk.len() as u64 {
            for part in chunk.chunks_mut(block_bytes as usize) {
                work::fill(part, block);
                block += 1;
            }
            (&self.file).write_all(&chunk)?;
        }
        self.file.sync_all()
    }

    /// A path under which this process, and no other, can open the file.
    pub fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.file.as_raw_fd()).into()
    }

    pub fn open(&self, flags: OFlags) -> io::Result<File> {
        super::super::write::open(&self.path(), flags)
    }

    /// Has the kernel drop what it caches of the file.
    pub fn drop_kernel_cache(&self) -> io::Result<()> {
        self.file.sync_all()?;
        Ok(rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed)?)
    }

    /// Looks whether each block is whole, as the kernel shows the file; gives up the cache of it.
    pub fn check(&self, block_bytes: u32) -> io::Result<()> {
        self.drop_kernel_cache()?;
        let blocks = self.file.metadata()?.len() / u64::from(block_bytes);
        check_blocks(blocks as u32, block_bytes, |dst, offset| {
            std::os::unix::fs::FileExt::read_at(&self.file, dst, offset)
        })?;
        self.drop_kernel_cache()
    }
}

/// Reads `blocks` blocks in order and looks whether each is whole.
pub fn check_blocks(
    blocks: u32,
    block_bytes: u32,
    read_at: impl Fn(&mut [u8], u64) -> io::Result<usize>,
) -> io::Result<()> {
    let mut buffer = AlignedBuffer::new((1 << 20).max(block_bytes as usize));
    let per_read = (buffer.bytes().len() / block_bytes as usize) as u32;
    for first in (0..blocks).step_by(per_read as usize) {
        let len = (blocks - first).min(per_read) as usize * block_bytes as usize;
        let (dst, offset) = (&mut buffer.bytes()[..len], u64::from(first) * u64::from(block_bytes));
        let moved = read_at(dst, offset)?;
        let parts = dst.chunks(block_bytes as usize);
        if moved != len || !(first..).zip(parts).all(|(block, part)| work::is_whole(part, block)) {
            return Err(io::Error::other(format!("wrong bytes at offset {offset} and after")));
        }
    }
    Ok(())
}

/// A file system in a file, mounted; gone on drop, but for what is open in it.
struct LoopMount {
    image: PathBuf,
    device: Option<String>,
    at: PathBuf,
    mounted: bool,
}

impl LoopMount {
    /// The smallest file system that mkfs.xfs makes is of 300 MiB.
    const BYTES_MIN: u64 = 512 << 20;

    fn new(dir: &Path, kind: &str, bytes: u64) -> std::result::Result<Self, String> {
        let name = format!("millpond-bench-{}-{kind}", process::id());
        let (image, at) = (dir.join(format!("{name}.image")), dir.join(name));
        let mut mount = Self { image, device: None, at, mounted: false };
        let made = File::create_new(&mount.image)
            .and_then(|file| file.set_len(bytes.max(Self::BYTES_MIN)))
            .and_then(|()| fs::create_dir(&mount.at));
        made.map_err(|error| format!("{}: {error}", mount.image.display()))?;
        let image = mount.image.to_string_lossy().into_owned();
        let quiet = if kind == "ext4" { ["-q", "-F"] } else { ["-q", "-f"] };
        run(&format!("mkfs.{kind}"), &[quiet[0], quiet[1], &image])?;
        let device =
            run("losetup", &["--find", "--show", "--direct-io=on", &image])?.trim().to_owned();
        mount.device = Some(device.clone());
        run("mount", &["-t", kind, &device, &mount.at.to_string_lossy()])?;
        mount.mounted = true;
        Ok(mount)
    }
}

impl LoopMount {
    /// What a run left that was killed between making a file system and opening its files.
    fn remove_stale(dir: &Path) {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Some(rest) = name.strip_prefix("millpond-bench-") else { continue };
            let Some(image) = rest.strip_suffix(".image") else { continue };
            let pid = image.split('-').next().unwrap_or_default();
            if Path::new("/proc").join(pid).exists() {
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
            tell(run("umount", &["--lazy", &self.at.to_string_lossy()]));
        }
        if let Some(device) = &self.device {
            // Detached when the last one lets go.
            tell(run("losetup", &["--detach", device]));
        }
        for removed in [fs::remove_dir(&self.at), fs::remove_file(&self.image)] {
            tell(removed.map_err(|error| format!("{}: {error}", self.image.display())));
        }
    }
}

fn tell<T>(outcome: std::result::Result<T, String>) {
    if let Err(message) = outcome {
        eprintln!("cleaning up: {message}");
    }
}

/// What a program printed; the error is what it complained of.
fn run(program: &str, arguments: &[&str]) -> std::result::Result<String, String> {
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

    /// Goal: files of each place hold their blocks; nothing stays behind in the directory.
    #[test]
    fn files_are_there_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        for place in [Place::Directory, Place::Loop("ext4"), Place::Loop("xfs")] {
            match place.files(dir.path(), 1 << 20, 8192) {
                Ok(files) => files.iter().for_each(|file| file.check(8192).unwrap()),
                Err(reason) => println!("skipped: {reason}"),
            }
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "{place:?}");
        }
    }

    #[test]
    fn who_fails_says_why() {
        assert!(run("no-such-program", &[]).unwrap_err().starts_with("no-such-program: "));
        assert!(run("losetup", &["/no/such"]).unwrap_err().contains("losetup"));
    }
}

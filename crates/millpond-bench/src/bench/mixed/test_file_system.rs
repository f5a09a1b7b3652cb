//! The file systems that files are measured on: the directory's, or a new one on a loop device.
//!
//! For a loop device, the file system is made and mounted, empty files are opened in it, and then
//! it is unmounted, detached and its image removed, at once: the kernel keeps each until its last
//! file is closed. So nothing stays behind however the benchmark ends, except if it is killed in
//! that moment; the next run in the directory removes that.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process;

use rustix::fs::OFlags;

use super::work;
use crate::bench::harness::AlignedBuffer;
use crate::bench::loop_mount::LoopMount;
use crate::failure::{Context, Result};

/// A file system to measure on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TestFileSystem {
    Directory,
    Loop(&'static str),
}

impl TestFileSystem {
    /// The name of this file system in the names of engines.
    pub fn name(&self, file_system: &str) -> String {
        match self {
            TestFileSystem::Directory => file_system.to_owned(),
            TestFileSystem::Loop(kind) => format!("{kind} loop"),
        }
    }

    /// Two files of `bytes` with the same contents. The error is the reason why there are none.
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
            TestFileSystem::Directory => make(dir),
            TestFileSystem::Loop(kind) => {
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

    /// Drops the file from the kernel's cache.
    pub fn drop_kernel_cache(&self) -> io::Result<()> {
        self.file.sync_all()?;
        Ok(rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed)?)
    }

    /// Checks that each block is whole, as the kernel shows the file; drops the kernel's cache of
    /// it.
    pub fn check(&self, block_bytes: u32) -> io::Result<()> {
        self.drop_kernel_cache()?;
        let blocks = self.file.metadata()?.len() / u64::from(block_bytes);
        check_blocks(blocks as u32, block_bytes, |dst, offset| {
            std::os::unix::fs::FileExt::read_at(&self.file, dst, offset)
        })?;
        self.drop_kernel_cache()
    }
}

/// Reads `blocks` blocks in order and checks that each is whole.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: files of each file system hold their blocks; nothing stays behind in the directory.
    #[test]
    fn files_are_there_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        for file_system in
            [TestFileSystem::Directory, TestFileSystem::Loop("ext4"), TestFileSystem::Loop("xfs")]
        {
            match file_system.files(dir.path(), 1 << 20, 8192) {
                Ok(files) => files.iter().for_each(|file| file.check(8192).unwrap()),
                Err(reason) => println!("skipped: {reason}"),
            }
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "{file_system:?}");
        }
    }
}

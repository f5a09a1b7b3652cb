//! Files of a demonstration: without names, filled with blocks that name themselves.
//!
//! - **SC1** Every 8-byte word of a block is the block's *stamp*: the writer, the block's number and a
//!   sequence number. A block with two different stamps is torn; a block with another block's number was
//!   read from the wrong place.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, OFlags, fadvise, statvfs};

use crate::failure::{Context, FAILED, Failure, Result};

pub const MIB: u64 = 1 << 20;
/// Free space that a demonstration asks for before it writes anything.
const SPACE_BYTES: u64 = 200 * MIB;

/// The directory that holds the files.
pub struct Scratch {
    dir: PathBuf,
}

impl Scratch {
    /// # Errors
    ///
    /// A directory that refuses a file, or that has too little free space.
    pub fn new(dir: &Path) -> Result<Self> {
        let scratch = Scratch { dir: dir.to_owned() };
        scratch.create_unnamed().map_err(|error| scratch.refusal(&error))?;
        let free = statvfs(dir).map(|it| it.f_bavail * it.f_frsize).context(dir.display())?;
        if free < SPACE_BYTES {
            let free = free / MIB;
            let needed = SPACE_BYTES / MIB;
            let message = format!(
                "demo needs {needed} MiB in {}, which has {free} MiB free; --dir DIR names another directory",
                dir.display()
            );
            return Err(Failure::new(FAILED, message));
        }
        Ok(scratch)
    }

    /// A file of `bytes` bytes in blocks of `block_bytes`, each with its stamp of sequence number 0.
    pub fn create(&self, bytes: u64, block_bytes: usize) -> Result<ScratchFile> {
        let file = self.create_unnamed().map_err(|error| self.refusal(&error))?;
        let filled = fill(&file, bytes, block_bytes).and_then(|()| file.sync_all());
        filled.map_err(|error| self.refusal(&error))?;
        Ok(ScratchFile { file, bytes, block_bytes })
    }

    fn create_unnamed(&self) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(0o600);
        let flags = OFlags::TMPFILE.bits() as i32;
        match options.clone().custom_flags(flags).open(&self.dir) {
            // Some file systems cannot create unnamed files. There the name lives for a moment.
            Err(error)
                if error.raw_os_error() == Some(rustix::io::Errno::OPNOTSUPP.raw_os_error()) =>
            {
                tempfile::tempfile_in(&self.dir)
            }
            other => other,
        }
    }

    fn refusal(&self, error: &io::Error) -> Failure {
        let dir = self.dir.display();
        let why = match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
                format!("demo ran out of space in {dir}: {error}")
            }
            _ => format!("demo cannot create a file in {dir}: {error}"),
        };
        Failure::new(FAILED, format!("{why}; --dir DIR names another directory"))
    }
}

/// A file without a name. The kernel frees it with its last descriptor.
pub struct ScratchFile {
    file: File,
    pub bytes: u64,
    pub block_bytes: usize,
}

impl ScratchFile {
    pub fn blocks(&self) -> u32 {
        (self.bytes / self.block_bytes as u64) as u32
    }

    pub fn offset_of(&self, block: u32) -> u64 {
        u64::from(block) * self.block_bytes as u64
    }

    /// A path that this process, and its children while it lives, can open.
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()).into()
    }

    pub fn file(&self) -> &File {
        &self.file
    }

    /// A description of its own, for reading and writing.
    pub fn open(&self, flags: OFlags) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(flags.bits() as i32).open(self.path())
    }

    /// Makes the kernel's page cache drop the file.
    pub fn drop_kernel_cache(&self) -> io::Result<()> {
        Ok(fadvise(&self.file, 0, None, Advice::DontNeed)?)
    }
}

/// The stamp of a block (SC1).
pub fn stamp(writer: u32, block: u32, sequence: u32) -> u64 {
    u64::from(writer & 0xff) << 56 | u64::from(block & 0xff_ffff) << 32 | u64::from(sequence)
}

/// Fills `dst` with a stamp.
pub fn fill_block(dst: &mut [u8], stamp: u64) {
    dst.as_chunks_mut().0.fill(stamp.to_le_bytes());
}

/// The sequence number of a block, or `None` if the block is torn.
///
/// # Errors
///
/// [`ErrorKind::InvalidData`] if the bytes belong to another block.
pub fn sequence_of(src: &[u8], block: u32) -> io::Result<Option<u32>> {
    let words = src.as_chunks::<8>().0;
    let first = u64::from_le_bytes(words[0]);
    if (first >> 32) as u32 & 0xff_ffff != block & 0xff_ffff {
        let message = format!("block {block} has the stamp {first:#x} of another block");
        return Err(io::Error::new(ErrorKind::InvalidData, message));
    }
    Ok(words.iter().all(|word| *word == words[0]).then_some(first as u32))
}

fn fill(mut file: &File, bytes: u64, block_bytes: usize) -> io::Result<()> {
    let mut chunk = vec![0; MIB as usize];
    let mut block = 0;
    for _ in 0..bytes.div_ceil(MIB) {
        for dst in chunk.chunks_mut(block_bytes) {
            fill_block(dst, stamp(0, block, 0));
            block += 1;
        }
        file.write_all(&chunk)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, MetadataExt};

    /// Goal: no end of the process can leave a file behind.
    #[test]
    fn files_have_no_name() {
        let dir = tempfile::tempdir().unwrap();
        let scratch = Scratch { dir: dir.path().to_owned() };
        let file = scratch.create(2 * MIB, 4096).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let opened = file.open(OFlags::empty()).unwrap();
        assert_eq!((opened.metadata().unwrap().nlink(), file.blocks()), (0, 512));
        let mut block = [0; 4096];
        opened.read_exact_at(&mut block, file.offset_of(511)).unwrap();
        assert_eq!(sequence_of(&block, 511).unwrap(), Some(0));
    }

    /// Goal: a torn block and a block of another place are both seen.
    #[test]
    fn stamps_show_torn_and_misplaced_blocks() {
        let mut block = [0; 4096];
        fill_block(&mut block, stamp(1, 7, 42));
        assert_eq!(sequence_of(&block, 7).unwrap(), Some(42));
        assert!(sequence_of(&block, 8).is_err());
        block[4088..].copy_from_slice(&stamp(1, 7, 43).to_le_bytes());
        assert_eq!(sequence_of(&block, 7).unwrap(), None);
    }
}

//! Written files: the shared part of the engines, and the measured loops, compiled for each.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use millpond_bench_peers::Usage;
use rustix::fs::{Advice, OFlags};

use crate::bench::data;
use crate::bench::harness::{AlignedBuffer, Slice};
use crate::bench::load::Load;

/// A file that is open for writing.
pub trait WriteTarget {
    fn write_at(&self, src: &[u8], offset: u64) -> io::Result<usize>;

    /// Writes at the end; the place does not matter to the measurement.
    fn append(&self, src: &[u8]) -> io::Result<usize>;

    fn sync_data(&self) -> io::Result<()>;
}

impl WriteTarget for millpond::File {
    fn write_at(&self, src: &[u8], offset: u64) -> io::Result<usize> {
        Ok(Self::write_at(self, src, offset)?)
    }

    fn append(&self, src: &[u8]) -> io::Result<usize> {
        // All or an error, as this process alone writes the file and the disk has room.
        Self::append(self, src).map(|_| src.len()).map_err(io::Error::from)
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(Self::sync_data(self)?)
    }
}

impl WriteTarget for File {
    fn write_at(&self, src: &[u8], offset: u64) -> io::Result<usize> {
        FileExt::write_at(self, src, offset)
    }

    /// The caller has opened it with O_APPEND.
    fn append(&self, src: &[u8]) -> io::Result<usize> {
        (&mut &*self).write(src)
    }

    fn sync_data(&self) -> io::Result<()> {
        Self::sync_data(self)
    }
}

/// A file whose writes are durable when they return (O_DSYNC).
pub struct Dsync(pub File);

impl WriteTarget for Dsync {
    fn write_at(&self, src: &[u8], offset: u64) -> io::Result<usize> {
        WriteTarget::write_at(&self.0, src, offset)
    }

    fn append(&self, src: &[u8]) -> io::Result<usize> {
        WriteTarget::append(&self.0, src)
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }
}

/// The written bytes: a test file's first bytes, behind a stamp with the offset and the slice.
pub struct Stamped {
    buffer: AlignedBuffer,
    slice: u64,
}

impl Stamped {
    pub fn new(block_bytes: u32) -> Self {
        let mut buffer = AlignedBuffer::new(block_bytes as usize);
        data::contents(0, buffer.bytes());
        Self { buffer, slice: 0 }
    }

    /// Begins another slice; returns whether it is the first one, which is checked instead of
    /// measured.
    pub fn begin(&mut self) -> bool {
        self.slice += 1;
        self.slice == 1
    }

    #[inline]
    fn at(&mut self, offset: u64) -> &[u8] {
        let bytes = self.buffer.bytes();
        bytes[..8].copy_from_slice(&offset.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.slice.to_le_bytes());
        bytes
    }
}

/// Runs `work`, which does `ops` operations, against the clock.
pub fn timed(ops: u64, work: impl FnOnce() -> io::Result<()>) -> io::Result<Slice> {
    let before = Usage::now();
    let started = Instant::now();
    work()?;
    let elapsed = started.elapsed();
    let used = Usage::now().since(before);
    let ops_per_s = ops as f64 / elapsed.as_secs_f64();
    Ok(Slice { ops, ops_per_s, cpu: used.cpu, context_switches: used.context_switches })
}

/// Writes the blocks of the load's one list, in its order.
pub fn write_blocks(target: &impl WriteTarget, load: &Load, bytes: &mut Stamped) -> io::Result<()> {
    for &block in &load.blocks[0] {
        let offset = u64::from(block) * u64::from(load.block_bytes);
        let len = target.write_at(bytes.at(offset), offset)?;
        whole(len, load.block_bytes as usize)?;
    }
    Ok(())
}

/// Appends `count` blocks, each durable before the next; returns how long each took.
pub fn commit_blocks(
    target: &impl WriteTarget,
    count: usize,
    block_bytes: u32,
    bytes: &mut Stamped,
) -> io::Result<Vec<Duration>> {
    let mut took = Vec::with_capacity(count);
    for block in 0..count as u64 {
        let src = bytes.at(block * u64::from(block_bytes));
        let started = Instant::now();
        let len = target.append(src)?;
        target.sync_data()?;
        took.push(started.elapsed());
        whole(len, block_bytes as usize)?;
    }
    Ok(took)
}

fn whole(len: usize, wanted: usize) -> io::Result<()> {
    match len == wanted {
        true => Ok(()),
        false => Err(io::Error::other(format!("write of {wanted} bytes returned {len}"))),
    }
}

/// Checks that the file at `path` holds, on the device, `bytes` in `blocks` as written last.
pub fn check(
    path: &Path,
    blocks: impl Iterator<Item = u32>,
    block_bytes: u32,
    bytes: &mut Stamped,
) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    drop_kernel_cache(&file)?;
    let mut found = vec![0; block_bytes as usize];
    for block in blocks {
        let offset = u64::from(block) * u64::from(block_bytes);
        file.read_exact_at(&mut found, offset)?;
        if found != bytes.at(offset) {
            let message = format!("the block written at offset {offset} is not there");
            return Err(io::Error::other(message));
        }
    }
    drop_kernel_cache(&file)
}

/// Opens a file to write it with system calls.
pub fn open(path: &Path, flags: OFlags) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).custom_flags(flags.bits() as i32).open(path)
}

/// Syncs a file, and drops it from the kernel's cache.
pub fn drop_kernel_cache(file: &File) -> io::Result<()> {
    file.sync_all()?;
    Ok(rustix::fs::fadvise(file, 0, None, Advice::DontNeed)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_checked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        let load = Load::random(1 << 20, 4096, 1);
        let mut bytes = Stamped::new(4096);
        assert!(bytes.begin());
        let file = open(&path, OFlags::empty()).unwrap();
        let slice = timed(1, || write_blocks(&file, &load, &mut bytes)).unwrap();
        assert!(slice.ops_per_s > 0.0);
        check(&path, load.distinct_blocks(), 4096, &mut bytes).unwrap();
        assert!(!bytes.begin());
        assert!(check(&path, load.distinct_blocks(), 4096, &mut bytes).is_err());
    }

    #[test]
    fn commits_append() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, []).unwrap();
        let mut bytes = Stamped::new(4096);
        let file = open(&path, OFlags::APPEND).unwrap();
        assert_eq!(commit_blocks(&file, 3, 4096, &mut bytes).unwrap().len(), 3);
        check(&path, 0..3, 4096, &mut bytes).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 3 * 4096);
    }
}

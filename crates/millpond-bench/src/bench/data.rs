//! The files that benchmarks read, random numbers, and units.
//!
//! A file is unlinked when it is created, so it is removed however the benchmark ends. Every engine
//! opens it through `/proc/self/fd`. fio is another process, so its file keeps a name:
//! [`NamedFile`].

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use rustix::fs::OFlags;

use super::creation_lock::creation_lock;
use crate::failure::{Context, Result};

pub const KIB: u32 = 1 << 10;
pub const MIB: u64 = 1 << 20;

/// Bytes are generated, and compared, in pieces of this size.
const WORD_BYTES: u64 = 8;

/// Writes the test file's contents from byte `offset` on; `offset` is a multiple of 8.
pub fn contents(offset: u64, dst: &mut [u8]) {
    for (index, word) in dst.chunks_mut(WORD_BYTES as usize).enumerate() {
        let value = mix(offset / WORD_BYTES + index as u64).to_le_bytes();
        word.copy_from_slice(&value[..word.len()]);
    }
}

/// The output function of splitmix64: distinct for distinct inputs.
fn mix(n: u64) -> u64 {
    let n = n.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

/// A file full of [`contents`], without a name.
#[derive(Debug)]
pub struct TestFile {
    file: File,
    pub bytes: u64,
}

impl TestFile {
    pub fn create(dir: &Path, bytes: u64) -> Result<Self> {
        let named = NamedFile::create(dir, bytes)?;
        let file = File::open(&named.path).context(named.path.display())?;
        Ok(Self { file, bytes })
    }

    /// A path under which this process, and no other, can open the file.
    pub fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.file.as_raw_fd()).into()
    }

    /// A new description of the file, for reading.
    pub fn open(&self, flags: OFlags) -> io::Result<File> {
        OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(self.path())
    }

    /// Drops the file from the kernel's cache.
    pub fn drop_kernel_cache(&self) -> io::Result<()> {
        Ok(rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed)?)
    }
}

/// A file full of [`contents`], removed on drop.
#[derive(Debug)]
pub struct NamedFile {
    pub path: PathBuf,
}

impl NamedFile {
    pub fn create(dir: &Path, bytes: u64) -> Result<Self> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        // Relaxed: only the numbers must differ.
        let number = MADE.fetch_add(1, Relaxed);
        let path = dir.join(format!("millpond-bench-{}-{number}", std::process::id()));
        let doing = format!("making a file of {bytes} bytes in {}", dir.display());
        let making = creation_lock();
        let file = OpenOptions::new().write(true).create_new(true).open(&path).context(&doing)?;
        drop(making);
        let named = Self { path };
        named.fill(file, bytes).context(&doing)?;
        Ok(named)
    }

    fn fill(&self, mut file: File, bytes: u64) -> io::Result<()> {
        let mut chunk = vec![0; 1 << 20];
        let mut offset = 0;
        while offset < bytes {
            let len = (bytes - offset).min(chunk.len() as u64) as usize;
            contents(offset, &mut chunk[..len]);
            file.write_all(&chunk[..len])?;
            offset += len as u64;
        }
        // Synced now, so that no write-back runs during the measurement.
        file.sync_all()
    }
}

impl Drop for NamedFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Random numbers, the same on every run.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    pub fn seeded(seed: u64) -> Self {
        Self(mix(seed))
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u32) -> u32 {
        self.0 = self.0.wrapping_add(1);
        ((u128::from(mix(self.0)) * u128::from(bound)) >> 64) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, MetadataExt};

    #[test]
    fn files_hold_their_contents_and_leave_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let file = TestFile::create(dir.path(), (1 << 20) + 8192).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        let opened = file.open(OFlags::empty()).unwrap();
        assert_eq!(opened.metadata().unwrap().nlink(), 0);
        assert_eq!(opened.metadata().unwrap().len(), file.bytes);
        let (mut read, mut expected) = ([0; 4096], [0; 4096]);
        for offset in [0, 4096, 1 << 20] {
            opened.read_exact_at(&mut read, offset).unwrap();
            contents(offset, &mut expected);
            assert_eq!(read, expected);
        }
    }

    #[test]
    fn random_numbers_repeat_and_stay_below() {
        let draw = |seed| {
            let mut random = Random::seeded(seed);
            (0..1000).map(|_| random.below(10)).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        assert!((0..10).all(|n| draw(3).contains(&n)) && draw(3).iter().all(|n| *n < 10));
    }
}

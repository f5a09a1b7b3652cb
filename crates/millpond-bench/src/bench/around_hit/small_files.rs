//! A directory of small files, for the case `open-read-close`.

use std::fs;
use std::path::{Path, PathBuf};

use crate::bench::creation_lock::creation_lock;
use crate::bench::data::{self, KIB};
use crate::failure::{Context, Result};

pub const BLOCK_BYTES: u32 = 4 * KIB;

/// A directory of files, removed on drop.
pub struct Directory(PathBuf);

impl Directory {
    /// Creates files 0 to `count`, each with one block of a test file's contents, or empty.
    pub fn create(dir: &Path, count: u32, block_bytes: usize) -> Result<Self> {
        let path = dir.join(format!("millpond-bench-{}-files-{count}", std::process::id()));
        fs::create_dir(&path).context(path.display())?;
        let made = Self(path);
        let mut block = vec![0; block_bytes];
        for number in 0..count {
            data::contents(u64::from(number) * block_bytes as u64, &mut block);
            let path = made.path(number);
            let _gate = creation_lock();
            fs::write(&path, &block).context(path.display())?;
        }
        Ok(made)
    }

    pub fn path(&self, number: u32) -> PathBuf {
        self.0.join(number.to_string())
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

//! Reports of the keeper's work.

use std::fmt;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The keeper's work for a process that died or said goodbye.
#[derive(Debug)]
#[non_exhaustive]
pub struct Report {
    /// The process.
    pub pid: i32,
    /// Whether it said goodbye to the keeper.
    pub goodbye: bool,
    /// One entry for each file that it had handed over. Files on a very slow file system come in a separate
    /// report.
    pub files: Vec<FileReport>,
}

impl Report {
    /// Whether all dirty pages are in their files now.
    ///
    /// # Examples
    ///
    /// ```
    /// use millpond::keeper::Report;
    ///
    /// fn log(report: &Report) {
    ///     if !report.is_complete() {
    ///         eprintln!("{report}");
    ///     }
    /// }
    /// ```
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.files.iter().all(|file| file.failures.is_empty())
    }

    /// The number of pages written, of all files.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.files.iter().map(|file| file.pages).sum()
    }
}

/// A path without control characters, which a terminal would interpret. The file's user may have chosen
/// them; a shell matches each of them with the question mark.
pub(super) fn printable(path: &Path) -> String {
    path.to_string_lossy().chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes: u64 = self.files.iter().map(|file| file.bytes).sum();
        let (pid, pages, files) = (self.pid, self.pages(), self.files.len());
        write!(f, "process {pid}: wrote back {pages} pages, {bytes} bytes, of {files} files")?;
        for file in self.files.iter().filter(|file| !file.failures.is_empty()) {
            for failure in &file.failures {
                write!(f, "\n  {}: {failure}", file.name())?;
            }
            if let Some(rescue) = &file.rescue {
                let (name, rescue) = (file.name(), printable(rescue));
                write!(f, "\n  {name}: the unwritten bytes are kept in {rescue}")?;
            }
        }
        Ok(())
    }
}

/// The keeper's work on one file.
#[derive(Debug)]
#[non_exhaustive]
pub struct FileReport {
    /// Its device number, as in `stat(2)`.
    pub device: u64,
    /// Its inode.
    pub inode: u64,
    /// Its path, from the kernel; a deleted file's path says so.
    pub path: Option<PathBuf>,
    /// The number of dirty pages that have been written.
    pub pages: u64,
    /// The number of their bytes within the file.
    pub bytes: u64,
    /// Whether the file system is known to have waited for the dead process's direct I/O.
    pub drained: bool,
    /// The failed operations.
    pub failures: Vec<Failure>,
    /// The rescue file of the pages that are not certainly in the file; see
    /// [`restore`](crate::keeper::restore).
    pub rescue: Option<PathBuf>,
}

impl FileReport {
    pub(super) fn new(device: u64, inode: u64, path: Option<PathBuf>) -> FileReport {
        let (pages, bytes, drained, failures, rescue) = (0, 0, false, Vec::new(), None);
        FileReport { device, inode, path, pages, bytes, drained, failures, rescue }
    }

    /// For a file whose processing panicked.
    pub(super) fn of_panic((device, inode): (u64, u64)) -> FileReport {
        let mut report = FileReport::new(device, inode, None);
        let error = io::Error::other("the keeper panicked");
        report.failed("writing the dirty pages;", 0..u64::MAX, &error);
        report
    }

    /// Records a failure, merged with the previous one if that is the same.
    pub(super) fn failed(&mut self, doing: &'static str, range: Range<u64>, error: &io::Error) {
        if let Some(last) = self.failures.last_mut()
            && (last.doing, last.range.end, last.error.kind()) == (doing, range.start, error.kind())
        {
            last.range.end = range.end;
            return;
        }
        let error = match error.raw_os_error() {
            Some(errno) => io::Error::from_raw_os_error(errno),
            None => io::Error::new(error.kind(), error.to_string()),
        };
        self.failures.push(Failure { doing, range, error });
    }

    pub(super) fn name(&self) -> String {
        match &self.path {
            Some(path) => printable(path),
            None => format!("inode {} of device {:#x}", self.inode, self.device),
        }
    }
}

/// An operation on a file that failed.
#[derive(Debug)]
#[non_exhaustive]
pub struct Failure {
    /// The operation.
    pub doing: &'static str,
    /// The bytes concerned.
    pub range: Range<u64>,
    /// The last error.
    pub error: io::Error,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Range { start, end } = self.range;
        write!(f, "{} bytes {start} to {end}: {}", self.doing, self.error)
    }
}

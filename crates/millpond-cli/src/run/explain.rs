//! `--explain` and `--stats`: a report about each file, printed when the program has exited or was killed.
//!
//! The processes count in a memory file that `millpond run` makes (`layout`, and the preload library's
//! `report::accounts`), so the counts of a killed process are kept. `millpond run` stays as the program's parent to
//! read them. If a process outlives the program, the report has its counts up to that time.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;

use rustix::fs::MemfdFlags;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use super::layout::*;
use super::reason;
use crate::failure::{Context, Failure, REFUSED, Result};
use crate::printable::printable;

/// Environment variable that the preload library reads.
pub const VARIABLE: &str = "MILLPOND_ACCOUNTS";

/// Maximum length of a path in a row (PATH_MAX). It is checked, as the memory file may be another user's.
const PATH_BYTES_MAX: usize = 4096;

/// A report: its contents, its format and its destination.
pub struct Explained {
    accounts: File,
    /// The destination; `None`: standard error.
    to: Option<(PathBuf, File)>,
    is_json: bool,
    /// Report each file, not only the totals.
    by_file: bool,
}

impl Explained {
    pub fn new(to: Option<&PathBuf>, is_json: bool, by_file: bool) -> Result<Self> {
        // Opened before the program starts, as a report without a destination would be lost.
        let to = to.map(|path| match File::create(path) {
            Ok(file) => Ok((path.clone(), file)),
            Err(error) => {
                Err(Failure::new(REFUSED, format!("--report {}: {error}", path.display())))
            }
        });
        let to = to.transpose()?;
        let accounts = make().context("making the file in which files are accounted for")?;
        Ok(Self { accounts, to, is_json, by_file })
    }

    /// The value of [`VARIABLE`].
    pub fn name(&self) -> Result<String> {
        let metadata = self.accounts.metadata().context("naming a memory file")?;
        let (own, fd) = (std::process::id(), self.accounts.as_raw_fd());
        Ok(format!("/proc/{own}/fd/{fd}:{}:{}", metadata.dev(), metadata.ino()))
    }

    /// Writes the report after the program has ended.
    pub fn say(self, status: ExitStatus) -> Result<()> {
        let told = read(&self.accounts, status, self.by_file).context("reading the accounts")?;
        let text = if self.is_json {
            let json = serde_json::to_string_pretty(&told).context("writing JSON")?;
            json + "\n"
        } else {
            told.text()
        };
        match self.to {
            Some((path, mut file)) => {
                file.write_all(text.as_bytes()).context(format_args!("writing {}", path.display()))
            }
            None => {
                // A write error is ignored: the program's exit status must be passed on.
                let _ = io::stderr().write_all(text.as_bytes());
                Ok(())
            }
        }
    }
}

fn make() -> io::Result<File> {
    let file = File::from(rustix::fs::memfd_create("millpond-accounts", MemfdFlags::CLOEXEC)?);
    file.set_len(FILE_BYTES)?;
    let now = clock_gettime(ClockId::Monotonic);
    let mut header = [0_u64; UNIT_BYTES / WORD_BYTES];
    header[FORM] = FORM_MARK;
    header[START] = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
    header[NEXT] = 1;
    let bytes: Vec<u8> = header.iter().flat_map(|word| word.to_ne_bytes()).collect();
    file.write_all_at(&bytes, 0)?;
    Ok(file)
}

/// The report; the names of the fields are those of the JSON form.
#[derive(Debug, Serialize)]
struct Told {
    exit_status: Option<i32>,
    signal: Option<i32>,
    totals: Totals,
    #[serde(skip_serializing_if = "Option::is_none")]
    files: Option<Vec<Row>>,
}

#[derive(Debug, Default, Serialize)]
struct Totals {
    /// Processes that loaded the library.
    processes: u64,
    /// Rows: a file counts once for each process that opened it.
    files: u64,
    served_files: u64,
    adoptions: u64,
    /// Number of files that were never served, by reason.
    kernel_files: BTreeMap<&'static str, u64>,
    /// Opens of files outside the served directories.
    opens_outside: u64,
    /// Files without a row, as the memory file was full; no other count includes them.
    files_not_counted: u64,
    /// Number of times that a cache shrank because memory was short.
    cache_shrunk: u64,
    hits: u64,
    misses: u64,
    read: Bytes,
    written: Bytes,
}

/// Bytes, by whether the engine or the kernel transferred them.
#[derive(Debug, Default, Clone, Copy, Serialize)]
struct Bytes {
    served: u64,
    kernel: u64,
}

/// A file of a process.
#[derive(Debug, Serialize)]
struct Row {
    path: String,
    pid: u64,
    program: String,
    device: u64,
    inode: u64,
    opened_s: f64,
    opens: u64,
    adoptions: u64,
    /// The first and the last periods.
    served: Vec<Period>,
    /// Why the kernel has the file; `null` while the file is served, or if it was served until it was closed.
    kernel: Option<&'static str>,
    hits: u64,
    misses: u64,
    read: Bytes,
    written: Bytes,
}

/// A time in which the file was served, in seconds since the start of the run.
#[derive(Debug, Serialize)]
struct Period {
    from_s: f64,
    /// `null`: until the process ended or executed another program.
    to_s: Option<f64>,
    ended_by: Option<&'static str>,
}

fn read(accounts: &File, status: ExitStatus, by_file: bool) -> io::Result<Told> {
    let (totals, mut rows) = tables(accounts, FILE_BYTES)?;
    rows.sort_by(|one, other| (&one.path, one.pid).cmp(&(&other.path, other.pid)));
    Ok(Told {
        exit_status: status.code(),
        signal: status.signal(),
        totals,
        files: by_file.then_some(rows),
    })
}

/// A file of a process of a run that has not ended.
#[derive(Debug, Clone, Serialize)]
pub struct FileSoFar {
    pub path: String,
    pub pid: u64,
    pub hits: u64,
    pub misses: u64,
    pub is_served: bool,
}

/// The totals and the files of a run that has not ended.
pub type SoFar = (BTreeMap<String, u64>, Vec<FileSoFar>);

/// The bytes that [`so_far`] reads of another process's file; `None`: the file has another format.
pub fn used_bytes(accounts: &File) -> io::Result<Option<u64>> {
    let header = words(&bytes_at(accounts, 0, UNIT_BYTES)?);
    let used = header[NEXT].min(FILE_BYTES / UNIT_BYTES as u64) * UNIT_BYTES as u64;
    Ok((header[FORM] == FORM_MARK).then_some(used))
}

/// Reads at most `bytes_max` bytes of another process's file; `None`: the file has another format.
pub fn so_far(accounts: &File, bytes_max: u64) -> io::Result<Option<SoFar>> {
    if words(&bytes_at(accounts, 0, UNIT_BYTES)?)[FORM] != FORM_MARK {
        return Ok(None);
    }
    let (totals, rows) = tables(accounts, bytes_max)?;
    let sums = [
        ("processes", totals.processes),
        ("files", totals.files),
        ("served_files", totals.served_files),
        ("adoptions", totals.adoptions),
        ("hits", totals.hits),
        ("misses", totals.misses),
        ("read_served_bytes", totals.read.served),
        ("read_kernel_bytes", totals.read.kernel),
        ("written_served_bytes", totals.written.served),
        ("written_kernel_bytes", totals.written.kernel),
    ];
    let files = rows.into_iter().map(|row| FileSoFar {
        is_served: row.kernel.is_none()
            && row.served.last().is_some_and(|last| last.to_s.is_none()),
        path: row.path,
        pid: row.pid,
        hits: row.hits,
        misses: row.misses,
    });
    let files = files.collect();
    Ok(Some((sums.map(|(name, sum)| (name.to_owned(), sum)).into(), files)))
}

fn tables(accounts: &File, bytes_max: u64) -> io::Result<(Totals, Vec<Row>)> {
    let header = words(&bytes_at(accounts, 0, UNIT_BYTES)?);
    let units_max = bytes_max.min(FILE_BYTES) / UNIT_BYTES as u64;
    let end = header[NEXT].min(units_max) as usize * UNIT_BYTES;
    let bytes = bytes_at(accounts, 0, end)?;
    let mut rows = Vec::new();
    let mut at = UNIT_BYTES;
    while at + WORDS * WORD_BYTES <= end {
        match Row::of(&bytes[at..]) {
            Some((row, len)) => {
                rows.push(row);
                at += len.next_multiple_of(UNIT_BYTES);
            }
            None => at += UNIT_BYTES,
        }
    }
    let mut totals = Totals {
        processes: header[PROCESSES],
        files: rows.len() as u64,
        opens_outside: header[OUTSIDE],
        files_not_counted: header[LOST],
        cache_shrunk: header[SHRUNK],
        ..Totals::default()
    };
    rows.iter().for_each(|row| totals.add(row));
    Ok((totals, rows))
}

fn bytes_at(file: &File, offset: u64, len: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, offset)?;
    Ok(bytes)
}

fn words(bytes: &[u8]) -> Vec<u64> {
    let word = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().expect("eight bytes"));
    bytes.chunks_exact(WORD_BYTES).map(word).collect()
}

fn seconds(ns: u64) -> f64 {
    // Microseconds: more digits do not help a reader.
    (ns / 1000) as f64 / 1e6
}

fn why(reason: u64) -> &'static str {
    if reason == CLOSED {
        return "closed";
    }
    reason::REASONS.get(reason as usize).map_or("unknown", |(_, text)| text)
}

impl Row {
    /// The row at the start of `bytes`, and its length.
    fn of(bytes: &[u8]) -> Option<(Self, usize)> {
        let (head, texts) = bytes.split_at_checked(WORDS * WORD_BYTES)?;
        let words = words(head);
        if words[MARK] != ROW_MARK {
            return None;
        }
        let path_bytes = (words[TEXT_BYTES] & u64::from(u32::MAX)) as usize;
        let program_bytes = (words[TEXT_BYTES] >> 32) as usize;
        if path_bytes.max(program_bytes) > PATH_BYTES_MAX {
            return None;
        }
        let (path, rest) = texts.split_at_checked(path_bytes)?;
        let program = rest.get(..program_bytes)?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let periods = (words[ADOPTIONS] as usize).min(PERIODS_MAX);
        let served: Vec<_> = words[PERIODS..].chunks_exact(PERIOD_WORDS).take(periods).collect();
        let is_served_last =
            served.last().is_some_and(|period| period[1] == 0 || period[2] == CLOSED);
        let row = Self {
            path: text(path),
            pid: words[PID],
            program: text(program),
            device: words[DEVICE],
            inode: words[INODE],
            opened_s: seconds(words[OPENED_NS]),
            opens: words[OPENS],
            adoptions: words[ADOPTIONS],
            kernel: (!is_served_last).then(|| why(words[REASON])),
            served: served.into_iter().map(Period::of).collect(),
            hits: words[HITS],
            misses: words[MISSES],
            read: Bytes { served: words[READ_SERVED], kernel: words[READ_PASSED] },
            written: Bytes { served: words[WRITTEN_SERVED], kernel: words[WRITTEN_PASSED] },
        };
        Some((row, head.len() + path_bytes + program_bytes))
    }

    /// One line, which ends with the path.
    fn text(&self) -> String {
        let mut line = String::from("millpond:   ");
        match self.adoptions {
            0 => line += "not served",
            1 => line += "served",
            times => _ = write!(line, "served {times} times"),
        }
        for period in &self.served {
            let _ = write!(line, " {:.3}-", period.from_s);
            if let (Some(to), Some(ended_by)) = (period.to_s, period.ended_by) {
                let _ = write!(line, "{to:.3} s ({ended_by})");
            }
        }
        if let (0, Some(reason)) = (self.adoptions, self.kernel) {
            let _ = write!(line, " ({reason})");
        }
        let Self { hits, misses, read, written, pid, program, path, .. } = self;
        let program = printable(program.rsplit('/').next().unwrap_or_default());
        let path = printable(path);
        let _ = writeln!(
            line,
            "; {hits} hits, {misses} misses; read {}+{}, written {}+{} bytes; {program}[{pid}] {path}",
            read.served, read.kernel, written.served, written.kernel,
        );
        line
    }
}

impl Period {
    fn of(words: &[u64]) -> Self {
        let is_over = words[1] != 0;
        Self {
            from_s: seconds(words[0]),
            to_s: is_over.then(|| seconds(words[1])),
            ended_by: is_over.then(|| why(words[2])),
        }
    }
}

impl Totals {
    fn add(&mut self, row: &Row) {
        if row.adoptions > 0 {
            self.served_files += 1;
        } else if let Some(reason) = row.kernel {
            *self.kernel_files.entry(reason).or_default() += 1;
        }
        // Saturating: the counts may be another user's.
        self.adoptions = self.adoptions.saturating_add(row.adoptions);
        self.hits = self.hits.saturating_add(row.hits);
        self.misses = self.misses.saturating_add(row.misses);
        self.read.add(row.read);
        self.written.add(row.written);
    }

    fn text(&self) -> String {
        let Self { processes, files, served_files, adoptions, hits, misses, .. } = self;
        let mut text = format!(
            "millpond: {processes} processes, {files} files, {served_files} of them served \
             ({adoptions} times): {hits} hits, {misses} misses\n\
             millpond: read {} bytes here and {} by the kernel, written {} and {}\n",
            self.read.served, self.read.kernel, self.written.served, self.written.kernel,
        );
        let reasons = self.kernel_files.iter().map(|(reason, files)| format!("{reason} {files}"));
        let reasons: Vec<_> = reasons.collect();
        if !reasons.is_empty() {
            let _ = writeln!(text, "millpond: files never served: {}", reasons.join(", "));
        }
        if self.opens_outside > 0 {
            let outside = self.opens_outside;
            let _ = writeln!(text, "millpond: outside the served directories: {outside} opens");
        }
        if self.files_not_counted > 0 {
            let lost = self.files_not_counted;
            let _ = writeln!(text, "millpond: no room to report {lost} more files");
        }
        if self.cache_shrunk > 0 {
            let times = self.cache_shrunk;
            let _ = writeln!(text, "millpond: the cache shrank {times} times, as memory was short");
        }
        text
    }
}

impl Bytes {
    fn add(&mut self, other: Bytes) {
        self.served = self.served.saturating_add(other.served);
        self.kernel = self.kernel.saturating_add(other.kernel);
    }
}

impl Told {
    fn text(&self) -> String {
        let mut text = String::new();
        if let Some(files) = &self.files {
            text += "millpond: files: served from-to (why it ended), in seconds; bytes: here+by the kernel\n";
            files.iter().for_each(|row| text += &row.text());
        }
        text + &self.totals.text()
    }
}

//! What the keeper does with the mapping of a process that died.
//!
//! ```text
//!   Memory: bytes of the mapping, each read once and checked
//!     -> latest dirty frame of each page, per file          (`dirty_pages`)
//!     -> drain -> redo intent -> write -> set size -> sync  (`Replay::file`)
//! ```
//!
//! - **R1** Before the first write, direct I/O that the dead process left in flight is waited for:
//!   it could land after ours. `fsync` does not wait for it; `fallocate` does, on ext4, XFS and
//!   btrfs, as it takes the inode's lock and waits for direct I/O under it. Where a file system has
//!   no `fallocate`, making the file a byte longer and as short again does (NFS, FAT), as
//!   shrinking must not overtake direct I/O either; that is not known of every file system, so the
//!   report says [`FileReport::drained`] is false.
//! - **R2** Nothing is written at or beyond the size, or where the intent removed bytes.
//! - **R3** An intent that can't be redone did not happen: what it would remove is written.
//! - **R4** What fails is tried again for [`PATIENCE`] in all, then reported, and the rest goes on.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, Mode, OFlags, SealFlags, SeekFrom};
use rustix::io::{Errno, ReadWriteFlags};

use crate::cache::frame::{UNIT_BYTES, UNIT_SHIFT};
use crate::survival::layout::{
    FILE_BYTES, FILE_WORDS, FileEntryWords, FileSlot, HEADER_BYTES, Intent, Layout, OP_BYTES,
    OP_WORDS, OPS, OpWords, RECORD_BYTES, RECORD_WORDS, RecordWords, boot_id, read_entries,
};

/// How long failures are retried, in all, for one dead process.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// Bytes written by one call at most; read from the mapping before.
const BUFFER_BYTES: usize = 1 << 20;
/// Don't honour O_APPEND (Linux 6.9).
const RWF_NOAPPEND: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x20);

/// What the keeper did for a process that died or said goodbye.
#[derive(Debug)]
#[non_exhaustive]
pub struct Report {
    /// The process.
    pub pid: i32,
    /// Whether it told the keeper that it was done.
    pub goodbye: bool,
    /// One entry for each file that it had handed over.
    pub files: Vec<FileReport>,
}

impl Report {
    /// Whether everything that was dirty is in its file now.
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

    /// The pages that were written, of all files.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.files.iter().map(|file| file.pages).sum()
    }
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
        }
        Ok(())
    }
}

/// What the keeper did to one file.
#[derive(Debug)]
#[non_exhaustive]
pub struct FileReport {
    /// The device that it is on, as `stat(2)` has it.
    pub device: u64,
    /// Its inode.
    pub inode: u64,
    /// Its path, as the kernel tells it; one that was deleted says so.
    pub path: Option<PathBuf>,
    /// Pages that were dirty and have been written.
    pub pages: u64,
    /// Bytes of them that lie within the file.
    pub bytes: u64,
    /// Whether the file system is known to have waited for the dead process's direct I/O.
    pub drained: bool,
    /// What could not be done.
    pub failures: Vec<Failure>,
}

impl FileReport {
    fn name(&self) -> String {
        match &self.path {
            Some(path) => path.display().to_string(),
            None => format!("inode {} of device {:#x}", self.inode, self.device),
        }
    }
}

/// Something that the keeper could not do for a file.
#[derive(Debug)]
#[non_exhaustive]
pub struct Failure {
    /// What was tried.
    pub doing: &'static str,
    /// The bytes concerned.
    pub range: Range<u64>,
    /// The last answer.
    pub error: io::Error,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Range { start, end } = self.range;
        write!(f, "{} bytes {start} to {end}: {}", self.doing, self.error)
    }
}

/// A mapping that a process handed over.
pub(super) struct Memory {
    fd: OwnedFd,
    pub(super) layout: Layout,
}

impl Memory {
    /// Takes the memfd of an engine; EINVAL for anything else.
    pub(super) fn new(fd: OwnedFd) -> io::Result<Memory> {
        // Only memory answers, so no read of it waits for anybody; and its length is for good.
        let seals = rustix::fs::fcntl_get_seals(&fd)?;
        let bytes = rustix::fs::fstat(&fd)?.st_size as u64;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(Errno::INVAL.into());
        }
        let mut header = [0; HEADER_BYTES];
        read_exact(fd.as_fd(), &mut header, 0)?;
        let layout = Layout::from_header(&header, bytes, boot_id()).ok_or(Errno::INVAL)?;
        Ok(Memory { fd, layout })
    }

    fn ops(&self) -> io::Result<Vec<OpWords>> {
        let mut bytes = vec![0; OPS as usize * OP_BYTES];
        read_exact(self.fd.as_fd(), &mut bytes, self.layout.ops_at() as u64)?;
        Ok(read_entries::<OP_WORDS>(&bytes).map(OpWords::from_words).collect())
    }

    fn file_entry(&self, index: u32) -> io::Result<FileEntryWords> {
        let mut bytes = [0; FILE_BYTES];
        let at = self.layout.files_at() + index as usize * FILE_BYTES;
        read_exact(self.fd.as_fd(), &mut bytes, at as u64)?;
        let words = read_entries::<FILE_WORDS>(&bytes).next().expect("one entry");
        Ok(FileEntryWords::from_words(words))
    }

    /// The records that were ever written.
    fn for_each_record(&self, mut visit: impl FnMut(u32, RecordWords)) -> io::Result<()> {
        let start = self.layout.records_at() as u64;
        let end = start + u64::from(self.layout.units) * RECORD_BYTES as u64;
        let mut bytes = vec![0; 64 << 10];
        let mut at = start;
        while at < end {
            // Over what is not there: it would read as zeros, which is FREE.
            at = match rustix::fs::seek(&self.fd, SeekFrom::Data(at)) {
                Ok(data) => data.max(at) / RECORD_BYTES as u64 * RECORD_BYTES as u64,
                Err(Errno::NXIO) => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            if at >= end {
                return Ok(());
            }
            let count = bytes.len().min((end - at) as usize);
            read_exact(self.fd.as_fd(), &mut bytes[..count], at)?;
            let first = ((at - start) / RECORD_BYTES as u64) as u32;
            let records = read_entries::<RECORD_WORDS>(&bytes[..count]);
            for (unit, words) in (first..).zip(records) {
                visit(unit, RecordWords::from_words(words));
            }
            at += count as u64;
        }
        Ok(())
    }
}

/// A file that a process handed over.
pub(super) struct Adopted {
    pub(super) slot: FileSlot,
    pub(super) device: u64,
    pub(super) inode: u64,
    pub(super) page_shift: u32,
    target: Target,
}

impl Adopted {
    /// Takes a file; EINVAL, EBADF or ESTALE where it is not what the request says.
    pub(super) fn new(
        fd: OwnedFd,
        slot: FileSlot,
        id: (u64, u64),
        page_shift: u32,
    ) -> io::Result<Adopted> {
        let stat = rustix::fs::fstat(&fd)?;
        let kind = rustix::fs::FileType::from_raw_mode(stat.st_mode);
        let shifts = UNIT_SHIFT..UNIT_SHIFT + 5;
        if kind != rustix::fs::FileType::RegularFile || !shifts.contains(&page_shift) {
            return Err(Errno::INVAL.into());
        }
        if (stat.st_dev, stat.st_ino) != id {
            return Err(Errno::STALE.into());
        }
        let (device, inode) = id;
        Ok(Adopted { slot, device, inode, page_shift, target: Target::new(fd)? })
    }
}

/// A description through which a file is written.
struct Target {
    fd: OwnedFd,
    /// Ours, and not shared with the program that opened it: buffered, and appending to nothing.
    own: bool,
}

impl Target {
    fn new(fd: OwnedFd) -> io::Result<Target> {
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        let access = flags & OFlags::RWMODE;
        // The descriptor is the sender's right to write; a new description must not go beyond it.
        if flags.contains(OFlags::PATH) || access == OFlags::RDONLY {
            return Err(Errno::BADF.into());
        }
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        // Not waiting for leases.
        let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        Ok(match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(fd) => Target { fd, own: true },
            // No /proc, a lease, or a mode that lets only the creator write.
            Err(_) => Target { fd, own: false },
        })
    }

    /// Before the first write: of a shared description, O_DIRECT is taken away, and O_APPEND
    /// overruled at each write.
    fn prepare(&self) -> io::Result<ReadWriteFlags> {
        if self.own {
            return Ok(ReadWriteFlags::empty());
        }
        let flags = rustix::fs::fcntl_getfl(&self.fd)?;
        if flags.contains(OFlags::DIRECT) {
            rustix::fs::fcntl_setfl(&self.fd, flags - OFlags::DIRECT)?;
        }
        let appends = flags.contains(OFlags::APPEND);
        Ok(if appends { RWF_NOAPPEND } else { ReadWriteFlags::empty() })
    }

    fn path(&self) -> Option<PathBuf> {
        std::fs::read_link(format!("/proc/self/fd/{}", self.fd.as_raw_fd())).ok()
    }

    fn len(&self) -> io::Result<u64> {
        Ok(rustix::fs::fstat(&self.fd)?.st_size as u64)
    }

    /// R1; false where it can't be sure.
    fn drain(&self) -> bool {
        let drained = retry_interrupted(|| {
            let block = UNIT_BYTES as u64;
            rustix::fs::fallocate(&self.fd, FallocateFlags::KEEP_SIZE, 0, block)
        });
        if drained.is_ok() {
            return true;
        }
        if let Ok(len) = self.len() {
            let _ = retry_interrupted(|| rustix::fs::ftruncate(&self.fd, len + 1));
            let _ = retry_interrupted(|| rustix::fs::ftruncate(&self.fd, len));
        }
        false
    }
}

/// A dirty page: the frame, and the write sequence of its contents.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct DirtyPage {
    pub(super) page: u64,
    pub(super) sequence: u64,
    pub(super) frame: u32,
}

/// Collects dirty pages by file word.
#[derive(Default)]
pub(super) struct DirtyPages(HashMap<u64, Vec<DirtyPage>>);

impl DirtyPages {
    pub(super) fn note(&mut self, ops: &[OpWords], frame: u32, record: RecordWords) {
        if record.is_dirty(ops) {
            let RecordWords { file, page, sequence, .. } = record;
            self.0.entry(file).or_default().push(DirtyPage { page, sequence, frame });
        }
    }

    /// The latest contents of each page of `file`, by page.
    pub(super) fn latest(&mut self, file: FileSlot) -> Vec<DirtyPage> {
        let mut pages = self.0.remove(&file.word()).unwrap_or_default();
        pages.sort_unstable_by_key(|dirty| (dirty.page, std::cmp::Reverse(dirty.sequence)));
        pages.dedup_by_key(|dirty| dirty.page);
        pages
    }
}

/// The size of `file`, its entry and the op slots being as given.
pub(super) fn size_of(file: FileSlot, entry: &FileEntryWords, ops: &[OpWords]) -> u64 {
    ops.iter().find_map(|op| op.size_of(file)).unwrap_or(entry.size)
}

/// Writes what is dirty in `memory` to the files.
pub(super) fn replay(memory: &Memory, files: &[Adopted], patience: Duration) -> Vec<FileReport> {
    let mut dirty = DirtyPages::default();
    let read = || -> io::Result<Vec<OpWords>> {
        let ops = memory.ops()?;
        memory.for_each_record(|frame, record| dirty.note(&ops, frame, record))?;
        Ok(ops)
    };
    let ops = match { read }() {
        Ok(ops) => ops,
        Err(error) => {
            let failed = |file: &Adopted| {
                let mut report = file.report();
                report.failed("reading the dead process's tables, for", 0..u64::MAX, &error);
                report
            };
            return files.iter().map(failed).collect();
        }
    };
    let mut replay = Replay { memory, ops: &ops, patience, tired_at: None };
    files.iter().filter_map(|file| replay.file(file, dirty.latest(file.slot))).collect()
}

impl Adopted {
    fn report(&self) -> FileReport {
        FileReport {
            device: self.device,
            inode: self.inode,
            path: self.target.path(),
            pages: 0,
            bytes: 0,
            drained: false,
            failures: Vec::new(),
        }
    }
}

impl FileReport {
    /// Notes a failure, together with the one before it where that is the same.
    fn failed(&mut self, doing: &'static str, range: Range<u64>, error: &io::Error) {
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
}

struct Replay<'a> {
    memory: &'a Memory,
    ops: &'a [OpWords],
    patience: Duration,
    /// Set by the first failure: when R4's time is up.
    tired_at: Option<Instant>,
}

/// Bytes to write: at `offset` of the file, from `from` of the mapping.
struct Piece {
    offset: u64,
    from: u64,
    len: usize,
}

impl Replay<'_> {
    /// `None` if the process did not have this file in its tables (any more).
    fn file(&mut self, file: &Adopted, pages: Vec<DirtyPage>) -> Option<FileReport> {
        let mut report = file.report();
        let entry = match self.memory.file_entry(file.slot.index) {
            Ok(entry) => entry,
            Err(error) => {
                report.failed("reading the dead process's tables, for", 0..u64::MAX, &error);
                return Some(report);
            }
        };
        // K6.
        if entry.life != file.slot.used() {
            return None;
        }
        let same_pages = entry.page_shift == u64::from(file.page_shift);
        let size = size_of(file.slot, &entry, self.ops);
        let intent = Intent::from_words(entry.intent);
        if size > i64::MAX as u64 || intent.is_err() || !same_pages {
            let error = io::Error::from(io::ErrorKind::InvalidData);
            report.failed("making sense of the dead process's tables, for", 0..size, &error);
            return Some(report);
        }
        let (target, intent) = (&file.target, intent.ok().flatten());
        let flags = match target.prepare() {
            Ok(flags) => flags,
            Err(error) => {
                report.failed("preparing to write", 0..size, &error);
                return Some(report);
            }
        };
        report.drained = target.drain();

        let mut clip = Clip { size, hole: 0..0 };
        let mut final_size = size;
        if let Some(intent) = intent
            && self.redo(target, intent, size, flags, &mut report)
        {
            match intent {
                Intent::Truncate { len } => {
                    clip.size = size.min(len);
                    final_size = len;
                }
                Intent::Punch { start, end } | Intent::Zero { start, end } => {
                    clip.hole = start..end
                }
            }
        }
        self.write(file, &pages, &clip, flags, &mut report);
        let sized = self.persist(|| {
            if target.len()? != final_size {
                rustix::fs::ftruncate(&target.fd, final_size)?;
            }
            Ok(())
        });
        if let Err(error) = sized {
            report.failed("setting the size; cutting or adding", final_size..u64::MAX, &error);
        }
        // No second try: what a failed sync lost is not in the kernel's cache any more.
        if let Err(error) = retry_interrupted(|| rustix::fs::fsync(&target.fd)) {
            report.failed("syncing", 0..final_size, &error.into());
        }
        Some(report)
    }

    /// Does again what the process was about to do; false if that fails (R3).
    fn redo(
        &mut self,
        target: &Target,
        intent: Intent,
        size: u64,
        flags: ReadWriteFlags,
        report: &mut FileReport,
    ) -> bool {
        let fd = target.fd.as_fd();
        let (doing, range) = match intent {
            Intent::Truncate { len } => ("redoing a truncation: cutting or adding", len..u64::MAX),
            Intent::Punch { start, end } => ("redoing a hole punch:", start..end),
            Intent::Zero { start, end } => ("redoing a zeroing:", start..end),
        };
        let keep = FallocateFlags::KEEP_SIZE;
        let Range { start, end } = range;
        let redone = self.persist(|| match intent {
            Intent::Truncate { len } => Ok(rustix::fs::ftruncate(fd, len)?),
            // Nothing lies beyond the size, and nothing is to be allocated there.
            _ if start >= end.min(size) => Ok(()),
            Intent::Punch { .. } => {
                punch_or_zero(fd, FallocateFlags::PUNCH_HOLE | keep, start..end, size, flags)
            }
            Intent::Zero { .. } => punch_or_zero(
                fd,
                FallocateFlags::ZERO_RANGE | keep,
                start..end.min(size),
                size,
                flags,
            ),
        });
        if let Err(error) = &redone {
            report.failed(doing, start..end, error);
        }
        redone.is_ok()
    }

    fn write(
        &mut self,
        file: &Adopted,
        pages: &[DirtyPage],
        clip: &Clip,
        flags: ReadWriteFlags,
        report: &mut FileReport,
    ) {
        let page_bytes = 1u64 << file.page_shift;
        let units = (page_bytes >> UNIT_SHIFT) as u32;
        let mut batch = Batch { at: 0, bytes: Vec::with_capacity(BUFFER_BYTES) };
        for dirty in pages {
            let within = dirty.page.checked_mul(page_bytes).filter(|&at| at <= i64::MAX as u64);
            let fits =
                dirty.frame.checked_add(units).is_some_and(|e| e <= self.memory.layout.units);
            let (Some(start), true) = (within, fits) else {
                let error = io::Error::from(io::ErrorKind::InvalidData);
                report.failed("making sense of the dead process's tables, for", 0..0, &error);
                continue;
            };
            let frame_at =
                self.memory.layout.frames_at() as u64 + (u64::from(dirty.frame) << UNIT_SHIFT);
            let before = report.failures.len();
            for piece in clip.pieces(start, start + page_bytes, frame_at) {
                if !batch.takes(&piece) {
                    self.flush(file, &mut batch, flags, report);
                }
                if batch.bytes.is_empty() {
                    batch.at = piece.offset;
                }
                let from = batch.bytes.len();
                batch.bytes.resize(from + piece.len, 0);
                let read = read_exact(self.memory.fd.as_fd(), &mut batch.bytes[from..], piece.from);
                if let Err(error) = read {
                    batch.bytes.truncate(from);
                    let range = piece.offset..piece.offset + piece.len as u64;
                    report.failed("reading the frame of", range, &error);
                }
            }
            report.pages += u64::from(report.failures.len() == before);
        }
        self.flush(file, &mut batch, flags, report);
    }

    /// Writes the batch; what can't be written is skipped page by page.
    fn flush(
        &mut self,
        file: &Adopted,
        batch: &mut Batch,
        flags: ReadWriteFlags,
        report: &mut FileReport,
    ) {
        let end = batch.at + batch.bytes.len() as u64;
        let mut at = batch.at;
        while at < end {
            let rest = &batch.bytes[(at - batch.at) as usize..];
            let outcome = self.persist(|| match write_some(&file.target.fd, rest, at, flags) {
                Ok(0) => Err(Errno::IO.into()),
                other => other,
            });
            match outcome {
                Ok(moved) => {
                    report.bytes += moved as u64;
                    at += moved as u64;
                }
                Err(error) => {
                    let page_end = ((at >> file.page_shift) + 1) << file.page_shift;
                    let next = page_end.min(end);
                    report.failed("writing", at..next, &error);
                    report.pages = report.pages.saturating_sub(1);
                    at = next;
                }
            }
        }
        batch.bytes.clear();
    }

    /// Tries until it works, or R4's time is up.
    fn persist<T>(&mut self, mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
        loop {
            let error = match attempt() {
                Err(error) => error,
                done => return done,
            };
            match error.raw_os_error() {
                Some(libc::EINTR) => continue,
                Some(
                    libc::ENOSPC
                    | libc::EDQUOT
                    | libc::EIO
                    | libc::EAGAIN
                    | libc::ENOMEM
                    | libc::EBUSY
                    | libc::ESTALE
                    | libc::ETIMEDOUT,
                ) => {}
                _ => return Err(error),
            }
            let now = Instant::now();
            if now >= *self.tired_at.get_or_insert(now + self.patience) {
                return Err(error);
            }
            std::thread::sleep(RETRY_PAUSE.min(self.patience));
        }
    }
}

/// What of the pages is written (R2).
struct Clip {
    size: u64,
    hole: Range<u64>,
}

impl Clip {
    /// The parts to write of the page from `start` to `end`, whose frame lies at `frame_at`.
    fn pieces(&self, start: u64, end: u64, frame_at: u64) -> impl Iterator<Item = Piece> {
        let end = end.min(self.size);
        let hole = &self.hole;
        let parts = [
            start..if hole.is_empty() { end } else { end.min(hole.start) },
            if hole.is_empty() { end } else { start.max(hole.end) }..end,
        ];
        parts.into_iter().filter(|part| !part.is_empty()).map(move |part| Piece {
            offset: part.start,
            from: frame_at + (part.start - start),
            len: (part.end - part.start) as usize,
        })
    }
}

/// Bytes that lie in a row in the file.
struct Batch {
    at: u64,
    bytes: Vec<u8>,
}

impl Batch {
    fn takes(&self, piece: &Piece) -> bool {
        let len = self.bytes.len();
        len == 0 || (self.at + len as u64 == piece.offset && len + piece.len <= BUFFER_BYTES)
    }
}

/// Frees or zeroes a range of a file; writes zeros below `size` where the file system can't.
fn punch_or_zero(
    fd: BorrowedFd<'_>,
    how: FallocateFlags,
    range: Range<u64>,
    size: u64,
    flags: ReadWriteFlags,
) -> io::Result<()> {
    match rustix::fs::fallocate(fd, how, range.start, range.end - range.start) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
        other => return Ok(other?),
    }
    // Only where there is something: the file may be as sparse as it is long.
    let zeros = vec![0; BUFFER_BYTES];
    let (mut at, end) = (range.start, range.end.min(size));
    while at < end {
        at = match rustix::fs::seek(fd, SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(Errno::NXIO) => return Ok(()),
            // Nothing is known: all of it, as far as the file goes.
            Err(_) => at,
        };
        let file_end = rustix::fs::fstat(fd)?.st_size as u64;
        let count = (zeros.len() as u64).min(end.min(file_end).saturating_sub(at));
        if count == 0 {
            return Ok(());
        }
        at += write_some(fd, &zeros[..count as usize], at, flags)? as u64;
    }
    Ok(())
}

fn write_some(
    fd: impl AsFd,
    bytes: &[u8],
    offset: u64,
    flags: ReadWriteFlags,
) -> io::Result<usize> {
    let slices = [io::IoSlice::new(bytes)];
    Ok(if flags.is_empty() {
        rustix::io::pwritev(fd, &slices, offset)?
    } else {
        rustix::io::pwritev2(fd, &slices, offset, flags)?
    })
}

fn read_exact(fd: BorrowedFd<'_>, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        let at = offset + done as u64;
        match retry_interrupted(|| rustix::io::pread(fd, &mut bytes[done..], at))? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            moved => done += moved,
        }
    }
    Ok(())
}

fn retry_interrupted<T>(attempt: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    rustix::io::retry_on_intr(attempt)
}

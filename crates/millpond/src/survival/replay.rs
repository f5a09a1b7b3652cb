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
use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use rustix::fs::FallocateFlags;

use crate::cache::frame::UNIT_SHIFT;
use crate::survival::layout::{FileEntryWords, FileSlot, Intent, OpWords, RecordWords};
use crate::survival::memory::Memory;
use crate::survival::report::FileReport;
use crate::survival::target::{Adopted, BUFFER_BYTES, Writer};

/// How long failures are retried, in all, for one dead process.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// A dirty page: the frame, and the write sequence of its contents.
#[derive(Clone, Copy)]
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
        let intent = intent.ok().flatten();
        let writer = match file.target.prepare() {
            Ok(writer) => writer,
            Err(error) => {
                report.failed("preparing to write", 0..size, &error);
                return Some(report);
            }
        };
        report.drained = writer.drain();

        let mut clip = Clip { size, hole: 0..0 };
        let mut final_size = size;
        if let Some(intent) = intent
            && self.redo(&writer, intent, size, &mut report)
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
        self.write(&writer, file.page_shift, &pages, &clip, &mut report);
        let sized = self.persist(|| match writer.len()? {
            len if len == final_size => Ok(()),
            _ => writer.set_len(final_size),
        });
        if let Err(error) = sized {
            report.failed("setting the size; cutting or adding", final_size..u64::MAX, &error);
        }
        // No second try: what a failed sync lost is not in the kernel's cache any more.
        if let Err(error) = writer.sync() {
            report.failed("syncing", 0..final_size, &error);
        }
        Some(report)
    }

    /// Does again what the process was about to do; false if that fails (R3).
    fn redo(
        &mut self,
        writer: &Writer<'_>,
        intent: Intent,
        size: u64,
        report: &mut FileReport,
    ) -> bool {
        let (doing, range) = match intent {
            Intent::Truncate { len } => ("redoing a truncation: cutting or adding", len..u64::MAX),
            Intent::Punch { start, end } => ("redoing a hole punch:", start..end),
            Intent::Zero { start, end } => ("redoing a zeroing:", start..end),
        };
        // Nothing lies beyond the size, and nothing is to be allocated there.
        let within = range.start..range.end.min(size);
        let redone = self.persist(|| match intent {
            Intent::Truncate { len } => writer.set_len(len),
            _ if within.is_empty() => Ok(()),
            Intent::Punch { .. } => writer.zero(FallocateFlags::PUNCH_HOLE, within.clone()),
            Intent::Zero { .. } => writer.zero(FallocateFlags::ZERO_RANGE, within.clone()),
        });
        if let Err(error) = &redone {
            report.failed(doing, range, error);
        }
        redone.is_ok()
    }

    fn write(
        &mut self,
        writer: &Writer<'_>,
        page_shift: u32,
        pages: &[DirtyPage],
        clip: &Clip,
        report: &mut FileReport,
    ) {
        let page_bytes = 1u64 << page_shift;
        let units = (page_bytes >> UNIT_SHIFT) as u32;
        let layout = self.memory.layout;
        let mut batch = Batch { at: 0, bytes: Vec::with_capacity(BUFFER_BYTES), page_bytes };
        for dirty in pages {
            let within = dirty.page.checked_mul(page_bytes).filter(|&at| at <= i64::MAX as u64);
            let fits = dirty.frame.checked_add(units).is_some_and(|end| end <= layout.units);
            let (Some(start), true) = (within, fits) else {
                let error = io::Error::from(io::ErrorKind::InvalidData);
                report.failed("making sense of the dead process's tables, for", 0..0, &error);
                continue;
            };
            let frame_at = layout.frames_at() as u64 + (u64::from(dirty.frame) << UNIT_SHIFT);
            let pieces = clip.pieces(start, start + page_bytes, frame_at);
            let mut written = pieces.clone().next().is_some();
            for piece in pieces {
                if !batch.takes(&piece) {
                    self.flush(writer, &mut batch, report);
                }
                if let Err(error) = batch.take(&piece, self.memory) {
                    let range = piece.offset..piece.offset + piece.len as u64;
                    report.failed("reading the frame of", range, &error);
                    written = false;
                }
            }
            // Until a flush fails.
            report.pages += u64::from(written);
        }
        self.flush(writer, &mut batch, report);
    }

    /// Writes the batch; what can't be written is skipped page by page.
    fn flush(&mut self, writer: &Writer<'_>, batch: &mut Batch, report: &mut FileReport) {
        let end = batch.at + batch.bytes.len() as u64;
        let mut at = batch.at;
        while at < end {
            let rest = &batch.bytes[(at - batch.at) as usize..];
            match self.persist(|| writer.write(rest, at)) {
                Ok(moved) => {
                    report.bytes += moved as u64;
                    at += moved as u64;
                }
                Err(error) => {
                    let next = ((at / batch.page_bytes + 1) * batch.page_bytes).min(end);
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
    fn pieces(
        &self,
        start: u64,
        end: u64,
        frame_at: u64,
    ) -> impl Iterator<Item = Piece> + Clone + use<> {
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
    page_bytes: u64,
}

impl Batch {
    fn takes(&self, piece: &Piece) -> bool {
        let len = self.bytes.len();
        len == 0 || (self.at + len as u64 == piece.offset && len + piece.len <= BUFFER_BYTES)
    }

    fn take(&mut self, piece: &Piece, memory: &Memory) -> io::Result<()> {
        let from = self.bytes.len();
        if from == 0 {
            self.at = piece.offset;
        }
        self.bytes.resize(from + piece.len, 0);
        let read = memory.read(&mut self.bytes[from..], piece.from);
        if read.is_err() {
            self.bytes.truncate(from);
        }
        read
    }
}

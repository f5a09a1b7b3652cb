//! Replay: writes the dirty pages in the mapping of a dead process to their files.
//!
//! ```text
//!   Memory: bytes of the mapping, each read once and checked
//!     -> latest dirty frame of each page, per file                          (`dirty_pages`)
//!     -> drain -> redo intent -> write -> size -> sync -> free space        (`Replay::file`)
//!                    | fails, or another process has changed the file
//!                    +-> rescue file
//! ```
//!
//! - **RP1** Before the first write, the replay waits for direct I/O that the dead process left in flight:
//!   it could land after the replay's writes. `fsync` does not wait for it; `fallocate` does, on ext4, XFS
//!   and btrfs, as it takes the inode's lock and waits for direct I/O under it. If a file system has no
//!   `fallocate`, extending the file by a byte and truncating it again does (NFS, FAT), as a truncation
//!   must not overtake direct I/O either. That is done only if no other process can have the file open, and
//!   is not known of every file system, so the report says [`FileReport::drained`] is false.
//! - **RP2** No byte is written at or beyond the size, or in a range that the intent removed.
//! - **RP3** An intent that can't be redone did not happen: the pages that it would remove are written.
//! - **RP4** A failing operation is retried for [`PATIENCE`], per file. A failed sync may have lost the
//!   writes that it covered: all of them are written again, from the frames, before the next one. The kernel
//!   drops its copy of the file before that (generations.G8), and before the pages go to a rescue file, from
//!   which they may be restored.
//! - **RP5** Before each change it checks whether another process has changed the file since the dead
//!   process did (target.TG2). If so, it changes nothing more: it can't decide which bytes are right.
//! - **RP6** The file is truncated only if it is no longer than the dead process's own changes can have
//!   made it (`changes`). Bytes beyond that belong to another process.
//! - **RP7** Dirty pages that are not certainly in the file go to a rescue file, before their frames are
//!   released.
//! - **RP8** Space that was reserved beyond the size is freed only if no other process can have the file
//!   open: not every file system has a call that could not truncate concurrent appends (ext4 has none).
//!   Otherwise it stays until the file's next last close.
//!
//! Files of one device are processed one after the other, and other devices' files do not wait for them.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use rustix::fs::FallocateFlags;

use crate::recovery::keeper::client_memory::Memory;
use crate::recovery::keeper::orphaned_pages::{DirtyPage, DirtyPages, size_of};
use crate::recovery::keeper::page_writer::{PieceWriter, PiecesWritten, Retries};
use crate::recovery::keeper::report::FileReport;
use crate::recovery::keeper::rescue::{self, Origin, Rescue};
use crate::recovery::keeper::target::{Adopted, Writer};
use crate::recovery::keeper::write_pieces::{Batch, Clip, Piece, count_pages};
use crate::recovery::layout::{FileEntryWords, Intent, OpWords};
use crate::thread::spawn;

/// How long failures are retried, for each file. Chosen.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// How long the files of a device may take before the reports of the others are sent. Chosen.
const DEVICE_PATIENCE: Duration = Duration::from_secs(60);
/// Blocks that a file may have in addition to those of its bytes: the file system's own, of a large file.
const SPARE_BYTES: u64 = 60 << 10;

/// A dead process.
pub(super) struct Dead {
    pub(super) pid: i32,
    pub(super) memory: Memory,
    /// RP4.
    pub(super) patience: Duration,
}

/// Writes the dirty pages in the memory of a dead process to the files. The reports are sent when all files
/// are done, or in several parts if a device takes very long.
pub(super) fn replay(dead: Dead, files: Vec<Adopted>, mut tell: impl FnMut(Vec<FileReport>)) {
    let read = || -> io::Result<_> {
        let (ops, mut dirty) = (dead.memory.ops()?, DirtyPages::default());
        dead.memory.for_each_record(|frame, record| dirty.note(&ops, frame, record))?;
        Ok((ops, dirty))
    };
    // Memory may be short for a moment.
    let (ops, mut dirty) = match Retries::new(dead.patience).persist(read) {
        Ok(read) => read,
        Err(error) => {
            let failed = |file: &Adopted| {
                let mut report = file.report();
                report.failed("reading the dead process's tables, for", 0..u64::MAX, &error);
                report
            };
            return tell(files.iter().map(failed).collect());
        }
    };
    let mut devices: BTreeMap<u64, Vec<(Adopted, Vec<DirtyPage>)>> = BTreeMap::new();
    for file in files {
        let pages = dirty.latest(file.entry);
        devices.entry(file.device).or_default().push((file, pages));
    }
    let context = Arc::new((dead, ops));
    let (send, done) = channel();
    let mut devices = devices.into_values();
    let mut own: Vec<_> = devices.next_back().into_iter().flatten().collect();
    let mut under_way = 0;
    for files in devices {
        let (context, send) = (Arc::clone(&context), send.clone());
        let (give, take) = channel();
        let work = move || {
            if let Ok(files) = take.recv() {
                let _ = send.send(replay_device(&context, files));
            }
        };
        match spawn("millpond-replay", work) {
            Ok(()) => {
                under_way += 1;
                let _ = give.send(files);
            }
            // The threads can't be started: these files are processed on this thread.
            Err(_) => own.extend(files),
        }
    }
    drop(send);
    let mut reports = replay_device(&context, own);
    while under_way > 0 {
        match done.recv_timeout(DEVICE_PATIENCE) {
            Ok(more) => {
                under_way -= 1;
                reports.extend(more);
            }
            Err(RecvTimeoutError::Timeout) if !reports.is_empty() => {
                tell(std::mem::take(&mut reports));
            }
            Err(RecvTimeoutError::Timeout) => {}
            // A thread has panicked.
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    tell(reports);
}

fn replay_device(
    context: &(Dead, Vec<OpWords>),
    files: Vec<(Adopted, Vec<DirtyPage>)>,
) -> Vec<FileReport> {
    let (dead, ops) = context;
    let mut reports = Vec::new();
    for (file, pages) in files {
        // Each has its own time limit. And an open that waits for a file continues as soon as that file is
        // done.
        let mut replay = Replay { dead, ops, retries: Retries::new(dead.patience) };
        reports.extend(replay.file(&file, &pages));
    }
    reports
}

struct Replay<'a> {
    dead: &'a Dead,
    ops: &'a [OpWords],
    retries: Retries,
}

impl Replay<'_> {
    /// `None` if the process did not have this file in its tables (any more).
    fn file(&mut self, file: &Adopted, pages: &[DirtyPage]) -> Option<FileReport> {
        let mut report = file.report();
        let entry = match self.dead.memory.file_entry(file.entry.index) {
            Ok(entry) => entry,
            Err(error) => {
                report.failed("reading the dead process's tables, for", 0..u64::MAX, &error);
                return Some(report);
            }
        };
        // recovery.K6.
        if entry.life != file.entry.used() {
            return None;
        }
        let size = size_of(file.entry, &entry, self.ops);
        let intent = Intent::from_words(entry.intent);
        if size > i64::MAX as u64 || intent.is_err() {
            let error = io::Error::from(io::ErrorKind::InvalidData);
            report.failed("checking the dead process's tables, for", 0..size, &error);
            return Some(report);
        }
        let mut work =
            Work { file, entry, size, intent: intent.ok().flatten(), unwritten: Vec::new() };
        let clip = Clip { size, hole: 0..0 };
        match file.target.take_over(work.last_change()) {
            Ok(mut writer) => self.apply(&mut writer, pages, &mut work, &mut report),
            Err(error) => {
                work.unwritten = self.pieces(file, pages, &clip, &mut report);
                report.failed("preparing to write", 0..size, &error);
            }
        }
        self.rescue(&work, &mut report);
        Some(report)
    }

    /// Brings the file to the state that the process's callers have seen; the rest stays in `work`.
    fn apply(
        &mut self,
        writer: &mut Writer<'_>,
        pages: &[DirtyPage],
        work: &mut Work<'_>,
        report: &mut FileReport,
    ) {
        let mut clip = Clip { size: work.size, hole: 0..0 };
        let len = match writer.len() {
            Ok(len) if !pages.is_empty() || work.intent.is_some() || len != work.size => len,
            // There is nothing to do, except that writes may be only in the kernel's cache.
            _ => return self.finish(writer, work, Vec::new(), report),
        };
        if let Err(error) = writer.check() {
            work.unwritten = self.pieces(work.file, pages, &clip, report);
            if !work.unwritten.is_empty() {
                report.failed("writing", 0..work.size, &error);
            }
            return;
        }
        // Not a file whose length comes from another process.
        if pages.is_empty()
            && work.intent.is_none()
            && len > work.entry.changes.reach.max(work.size)
        {
            return self.finish(writer, work, Vec::new(), report);
        }
        report.drained = writer.drain();
        if let Some(intent) = work.intent
            && self.redo(writer, intent, work.size, report)
        {
            match intent {
                Intent::Truncate { len } => {
                    clip.size = work.size.min(len);
                    work.size = len;
                }
                Intent::Punch { start, end } | Intent::Zero { start, end } => {
                    clip.hole = start..end
                }
            }
        }
        let pieces = self.pieces(work.file, pages, &clip, report);
        report.pages = count_pages(&pieces, work.file.page_shift);
        let written = self.write(writer, &pieces, work.file, report);
        work.unwritten = written.failed;
        self.set_size(writer, work, len, report);
        report.bytes = written.bytes;
        report.pages -= count_pages(&work.unwritten, work.file.page_shift).min(report.pages);
        self.finish(writer, work, pieces, report);
    }

    /// RP6.
    fn set_size(
        &mut self,
        writer: &mut Writer<'_>,
        work: &Work<'_>,
        len_before: u64,
        report: &mut FileReport,
    ) {
        let may_cut = len_before <= work.entry.changes.reach;
        let size = work.size;
        let sized = self.retries.persist(|| match writer.len()? {
            len if len == size || (len > size && !may_cut) => Ok(()),
            _ => writer.check().and_then(|()| writer.set_len(size)),
        });
        if let Err(error) = sized {
            report.failed("setting the size; removing or adding", size..u64::MAX, &error);
        }
    }

    /// Syncs; pages that can't be synced count as unwritten. Frees reserved space.
    fn finish(
        &mut self,
        writer: &mut Writer<'_>,
        work: &mut Work<'_>,
        pieces: Vec<Piece>,
        report: &mut FileReport,
    ) {
        let mut failures = Vec::new();
        while let Err(error) = writer.sync() {
            writer.drop_kernel_copy();
            let again = self.retries.may_try_again(&error);
            if !again || pieces.is_empty() {
                report.failed("syncing", 0..work.size, &error);
                work.unwritten = pieces;
                (report.pages, report.bytes) = (0, 0);
                break;
            }
            // RP4. The report is of the last attempt.
            let mut rewrite = work.file.report();
            let written = self.write(writer, &pieces, work.file, &mut rewrite);
            work.unwritten = written.failed;
            failures = rewrite.failures;
            report.bytes = written.bytes;
            let missing = count_pages(&work.unwritten, work.file.page_shift);
            report.pages = count_pages(&pieces, work.file.page_shift).saturating_sub(missing);
        }
        report.failures.append(&mut failures);
        // RP8. In this order: an open of the file waits, if no other process has it open.
        let is_whole = |writer: &Writer<'_>| writer.len().is_ok_and(|len| len == work.size);
        let end = work.size.next_multiple_of(1 << work.file.page_shift);
        if work.entry.changes.is_reserved()
            && writer.allocated().is_ok_and(|bytes| bytes > end.saturating_add(SPARE_BYTES))
            && writer.check().is_ok()
            && writer.is_alone()
            && is_whole(writer)
        {
            let _ = writer.set_len(work.size);
        }
    }

    /// RP7.
    fn rescue(&self, work: &Work<'_>, report: &mut FileReport) {
        if work.unwritten.is_empty() {
            return;
        }
        let origin = Origin {
            path: report.path.clone(),
            device: report.device,
            inode: report.inode,
            size: work.size,
            stamp: work.file.target.stamp().ok(),
            pid: self.dead.pid,
        };
        let kept = rescue::keep(&origin, |rescue: &mut Rescue| {
            let mut batch = Batch::new();
            for piece in &work.unwritten {
                if !batch.takes(piece) {
                    rescue.extent(batch.at, &batch.bytes)?;
                    batch.bytes.clear();
                }
                // An unreadable piece was reported already.
                let _ = batch.take(piece, &self.dead.memory);
            }
            match batch.bytes.is_empty() {
                true => Ok(()),
                false => rescue.extent(batch.at, &batch.bytes),
            }
        });
        match kept {
            Ok(path) => report.rescue = Some(path),
            Err(error) => report.failed(
                "writing a rescue file, as no directory has room,",
                0..work.size,
                &error,
            ),
        }
    }

    /// Redoes the process's intended operation; false if that fails (RP3).
    fn redo(
        &mut self,
        writer: &mut Writer<'_>,
        intent: Intent,
        size: u64,
        report: &mut FileReport,
    ) -> bool {
        let (doing, range) = match intent {
            Intent::Truncate { len } => ("redoing a truncation: removing or adding", len..u64::MAX),
            Intent::Punch { start, end } => ("redoing a hole punch:", start..end),
            Intent::Zero { start, end } => ("redoing a zeroing:", start..end),
        };
        // There are no bytes beyond the size, and no space is to be allocated there.
        let within = range.start..range.end.min(size);
        let redone = self.retries.persist(|| {
            writer.check()?;
            match intent {
                Intent::Truncate { len } => writer.set_len(len),
                _ if within.is_empty() => Ok(()),
                Intent::Punch { .. } => writer.zero(FallocateFlags::PUNCH_HOLE, within.clone()),
                Intent::Zero { .. } => writer.zero(FallocateFlags::ZERO_RANGE, within.clone()),
            }
        });
        if let Err(error) = &redone {
            report.failed(doing, range, error);
        }
        redone.is_ok()
    }

    /// The parts of the pages to write, in the file's order.
    fn pieces(
        &mut self,
        file: &Adopted,
        pages: &[DirtyPage],
        clip: &Clip,
        report: &mut FileReport,
    ) -> Vec<Piece> {
        let layout = self.dead.memory.layout;
        let pieces = self.retries.persist(|| clip.pieces(pages, file.page_shift, layout));
        let (pieces, strange) = pieces.unwrap_or_else(|error| {
            report.failed("listing the dirty pages, which are lost, of", 0..clip.size, &error);
            (Vec::new(), false)
        });
        if strange {
            let error = io::Error::from(io::ErrorKind::InvalidData);
            report.failed("checking the dead process's tables, for", 0..0, &error);
        }
        pieces
    }

    fn write(
        &mut self,
        writer: &mut Writer<'_>,
        pieces: &[Piece],
        file: &Adopted,
        report: &mut FileReport,
    ) -> PiecesWritten {
        let (memory, page_bytes) = (&self.dead.memory, 1 << file.page_shift);
        let retries = &mut self.retries;
        PieceWriter { memory, writer, retries, page_bytes, report }.write(pieces)
    }
}

/// The work on a file.
struct Work<'a> {
    file: &'a Adopted,
    entry: FileEntryWords,
    size: u64,
    intent: Option<Intent>,
    /// Pieces that are not certainly in the file.
    unwritten: Vec<Piece>,
}

impl Work<'_> {
    /// The file's mtime after its process's last change, if that is known.
    fn last_change(&self) -> Option<u64> {
        let changes = self.entry.changes;
        let noted = self.file.noted.map(|noted| noted.changed_ns);
        if changes.is_in_flight() { noted } else { Some(changes.changed_ns) }
    }
}

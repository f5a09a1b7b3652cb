//! Writes pieces to a file: retries failures for a while, and then skips them.

use std::io;
use std::time::{Duration, Instant};

use crate::recovery::keeper::client_memory::Memory;
use crate::recovery::keeper::report::FileReport;
use crate::recovery::keeper::target::Writer;
use crate::recovery::keeper::write_pieces::{Batch, Piece};

/// The pause between two attempts: short for a user, long compared with an attempt.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// The time limit for retries of one file (replay.RP4).
pub(super) struct Retries {
    pub(super) patience: Duration,
    /// Set by the first failure.
    until: Option<Instant>,
}

impl Retries {
    pub(super) fn new(patience: Duration) -> Retries {
        Retries { patience, until: None }
    }

    /// Retries until it succeeds, or the time is up.
    pub(super) fn persist<T>(
        &mut self,
        mut attempt: impl FnMut() -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            match attempt() {
                Err(error) if self.may_try_again(&error) => {}
                done => return done,
            }
        }
    }

    /// Whether to retry; pauses before.
    pub(super) fn may_try_again(&mut self, error: &io::Error) -> bool {
        match error.raw_os_error() {
            Some(
                libc::EINTR
                | libc::ENOSPC
                | libc::EDQUOT
                | libc::EIO
                | libc::EAGAIN
                | libc::ENOMEM
                | libc::EBUSY
                | libc::ETIMEDOUT,
            ) => {}
            _ => return false,
        }
        let now = Instant::now();
        if now >= *self.until.get_or_insert(now + self.patience) {
            return false;
        }
        std::thread::sleep(RETRY_PAUSE.min(self.patience));
        true
    }
}

/// The result of writing pieces.
#[derive(Default)]
pub(super) struct PiecesWritten {
    pub(super) bytes: u64,
    pub(super) failed: Vec<Piece>,
}

/// Writes pieces of one file.
pub(super) struct PieceWriter<'a, 'w> {
    pub(super) memory: &'a Memory,
    pub(super) writer: &'a mut Writer<'w>,
    pub(super) retries: &'a mut Retries,
    pub(super) page_bytes: u64,
    pub(super) report: &'a mut FileReport,
}

impl PieceWriter<'_, '_> {
    /// Writes the pieces, which are in order.
    pub(super) fn write(mut self, pieces: &[Piece]) -> PiecesWritten {
        let mut written = PiecesWritten::default();
        let mut batch = Batch::new();
        let mut first = 0;
        for (number, piece) in pieces.iter().enumerate() {
            if !batch.takes(piece) {
                self.flush(&mut batch, &pieces[first..number], &mut written);
                first = number;
            }
            if let Err(error) = batch.take(piece, self.memory) {
                let range = piece.offset..piece.offset + piece.len as u64;
                self.report.failed("reading the frame of", range, &error);
                // The contiguous run ends here.
                self.flush(&mut batch, &pieces[first..number], &mut written);
                written.failed.push(piece.clone());
                first = number + 1;
            }
        }
        self.flush(&mut batch, &pieces[first..], &mut written);
        written
    }

    /// Writes the batch, which consists of `write_pieces`; unwritable pages are skipped one by one.
    fn flush(&mut self, batch: &mut Batch, pieces: &[Piece], written: &mut PiecesWritten) {
        let end = batch.at + batch.bytes.len() as u64;
        let mut at = batch.at;
        while at < end {
            let rest = &batch.bytes[(at - batch.at) as usize..];
            let writer = &mut *self.writer;
            match self.retries.persist(|| writer.check().and_then(|()| writer.write(rest, at))) {
                Ok(moved) => {
                    written.bytes += moved as u64;
                    at += moved as u64;
                }
                Err(error) => {
                    let next = ((at / self.page_bytes + 1) * self.page_bytes).min(end);
                    self.report.failed("writing", at..next, &error);
                    let lost = |piece: &&Piece| {
                        piece.offset < next && piece.offset + piece.len as u64 > at
                    };
                    written.failed.extend(pieces.iter().filter(lost).cloned());
                    at = next;
                }
            }
        }
        batch.bytes.clear();
    }
}

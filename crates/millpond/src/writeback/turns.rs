//! Which writer over the limit writes back (see [`throttle`](mod@crate::flush::throttle)).

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How long a thread is at one file before others are not to wait for it any more. Chosen, not
/// measured.
pub(crate) const STUCK_AFTER: Duration = Duration::from_millis(500);
/// Writers that write back at once, of those that are not stuck; the flusher does beside them.
const TURNS_MAX: usize = 1;

/// Which writer over the limit writes back.
#[derive(Default)]
pub(crate) struct WritersTurns {
    taken: Mutex<Vec<Taken>>,
}

struct Taken {
    /// The address of the file.
    file: usize,
    since: Instant,
}

impl WritersTurns {
    fn taken(&self) -> MutexGuard<'_, Vec<Taken>> {
        self.taken.lock().expect("no panic under the lock")
    }

    /// The turn of a writer of the file at address `file`, if it may have one.
    pub(crate) fn take(&self, file: usize) -> Option<WritersTurn<'_>> {
        let now = Instant::now();
        let mut taken = self.taken();
        // throttle.TH3.
        let young = taken.iter().filter(|turn| now - turn.since < STUCK_AFTER).count();
        if young >= TURNS_MAX || taken.iter().any(|turn| turn.file == file) {
            return None;
        }
        taken.push(Taken { file, since: now });
        Some(WritersTurn { turns: self, file })
    }
}

/// A writer's turn to write back.
pub(crate) struct WritersTurn<'a> {
    turns: &'a WritersTurns,
    file: usize,
}

impl Drop for WritersTurn<'_> {
    fn drop(&mut self) {
        self.turns.taken().retain(|turn| turn.file != self.file);
    }
}

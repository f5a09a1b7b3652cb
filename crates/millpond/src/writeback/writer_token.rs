//! Which writer over the limit writes back (see [`throttle`](mod@crate::flush::throttle)).

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How long a thread is at one file before others are not to wait for it any more. Chosen, not
/// measured.
pub(crate) const STALL_TIMEOUT: Duration = Duration::from_millis(500);
/// Writers that write back at once, of those that are not stuck; the flusher does beside them.
const TOKENS_MAX: usize = 1;

/// Which writer over the limit writes back.
#[derive(Default)]
pub(crate) struct WriterTokens {
    held: Mutex<Vec<HeldToken>>,
}

struct HeldToken {
    /// The address of the file.
    file: usize,
    since: Instant,
}

impl WriterTokens {
    fn held(&self) -> MutexGuard<'_, Vec<HeldToken>> {
        self.held.lock().expect("no panic under the lock")
    }

    /// The token of a writer of the file at address `file`, if it may have one.
    pub(crate) fn try_take(&self, file: usize) -> Option<WriterToken<'_>> {
        let now = Instant::now();
        let mut held = self.held();
        // throttle.TH3.
        let unexpired = held.iter().filter(|token| now - token.since < STALL_TIMEOUT).count();
        if unexpired >= TOKENS_MAX || held.iter().any(|token| token.file == file) {
            return None;
        }
        held.push(HeldToken { file, since: now });
        Some(WriterToken { tokens: self, file })
    }
}

/// A writer's token to write back.
pub(crate) struct WriterToken<'a> {
    tokens: &'a WriterTokens,
    file: usize,
}

impl Drop for WriterToken<'_> {
    fn drop(&mut self) {
        self.tokens.held().retain(|token| token.file != self.file);
    }
}

//! The tokens that limit how many writers over the dirty limit write back at the same time.
//!
//! See [`throttle`](mod@crate::writeback::throttle).

use crate::sync::MutexExt;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How long a write-back may take before other threads stop waiting for it. Untuned.
pub(crate) const STALL_TIMEOUT: Duration = Duration::from_millis(500);
/// Writers that write back at the same time, without stalled ones and the flusher.
const TOKENS_MAX: usize = 1;

/// The tokens of one flusher.
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
    /// The token of a writer of the file at address `file`, if one is free.
    pub(crate) fn try_take(&self, file: usize) -> Option<WriterToken<'_>> {
        let now = Instant::now();
        let mut held = self.held.acquire();
        // throttle.TH3.
        let unexpired = held.iter().filter(|token| now - token.since < STALL_TIMEOUT).count();
        if unexpired >= TOKENS_MAX || held.iter().any(|token| token.file == file) {
            return None;
        }
        held.push(HeldToken { file, since: now });
        Some(WriterToken { tokens: self, file })
    }
}

/// The right of a writer to write back. Dropping it frees the token.
pub(crate) struct WriterToken<'a> {
    tokens: &'a WriterTokens,
    file: usize,
}

impl Drop for WriterToken<'_> {
    fn drop(&mut self) {
        self.tokens.held.acquire().retain(|token| token.file != self.file);
    }
}

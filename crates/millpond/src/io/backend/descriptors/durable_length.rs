//! The length that a file has after a power cut, at least.
//!
//! A write with `RWF_DSYNC` stores its own pages. On ext4 a buffered write that extends the file stores the new
//! length when the blocks of its pages are allocated. So a durable write to an old block, below an end that an
//! earlier write has moved, may lie behind the end of the file after a power cut. Such a write is followed by a
//! sync of the file.
//!
//! The length is unknown when a file is opened, as an earlier opening or another process may have extended it.
//! A process that cuts the file below the engine and extends it again is not noticed.

use std::io;

use crate::sync::Mutex;
use crate::sync::MutexExt;

#[derive(Default)]
pub(crate) struct DurableLength {
    state: Mutex<DurableState>,
}

#[derive(Default)]
struct DurableState {
    len: u64,
    /// The number of cuts. A sync that began before a cut says nothing about the length after it.
    cuts: u64,
}

/// The length that a sync in progress makes durable.
#[must_use]
pub(crate) struct Covered {
    len: u64,
    cuts: u64,
}

impl DurableLength {
    pub(crate) fn get(&self) -> u64 {
        self.state.acquire().len
    }

    pub(crate) fn covers(&self, end: u64) -> bool {
        end <= self.state.acquire().len
    }

    /// A durable write has moved the end of the file. The caller's guard keeps it there.
    pub(crate) fn grow(&self, len: u64) {
        let mut state = self.state.acquire();
        state.len = state.len.max(len);
    }

    /// The file was cut to `len`, or a failure makes a greater length uncertain.
    pub(crate) fn cut(&self, len: u64) {
        let mut state = self.state.acquire();
        state.len = state.len.min(len);
        state.cuts += 1;
    }

    /// The file has this length; another process may have cut it.
    pub(crate) fn observe(&self, len: u64) {
        let mut state = self.state.acquire();
        state.len = state.len.min(len);
    }

    /// `len` looks up the length of the file, before the sync and after the number of cuts was read.
    pub(crate) fn begin_sync(&self, len: impl FnOnce() -> io::Result<u64>) -> io::Result<Covered> {
        let cuts = self.state.acquire().cuts;
        Ok(Covered { len: len()?, cuts })
    }

    /// The sync has succeeded.
    pub(crate) fn end_sync(&self, covered: Covered) {
        let mut state = self.state.acquire();
        if state.cuts == covered.cuts {
            state.len = state.len.max(covered.len);
        }
    }
}

#[cfg(all(test, not(loom), not(scheduled)))]
mod tests {
    use super::*;

    #[test]
    fn a_cut_during_a_sync_ends_its_promise() {
        let length = DurableLength::default();
        assert!(length.covers(0) && !length.covers(1));
        let covered = length.begin_sync(|| Ok(100)).unwrap();
        length.end_sync(covered);
        assert!(length.covers(100) && !length.covers(101));
        // Between the look at the length and the end of the sync.
        let covered = length.begin_sync(|| Ok(200)).unwrap();
        length.cut(50);
        length.end_sync(covered);
        assert!(length.covers(50) && !length.covers(51));
        length.grow(60);
        length.observe(70);
        assert!(length.covers(60) && !length.covers(61));
    }
}

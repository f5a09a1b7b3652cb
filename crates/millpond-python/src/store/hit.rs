//! Reads of cached bytes: copied once, to memory of Python, without a future.

use std::mem::MaybeUninit;
use std::ops::Range;

use object_store::path::Path;
use pyo3::prelude::*;

use crate::store::calls::Store;

/// Longer reads are not tried as one hit. The requests of a miss are of that length at most.
const HIT_BYTES_MAX: u64 = 4 << 20;
/// Longer copies run detached from the interpreter: to release its lock takes a fifth of the time of a copy of 4 KiB.
const ATTACHED_HIT_MAX: usize = 16 << 10;
impl Store {
    /// Copies a range that is cached and fresh to memory that `memory` makes for its length. `None`: it is not cached.
    pub(super) fn hit<M>(
        &self,
        py: Python<'_>,
        path: &Path,
        range: &Range<u64>,
        memory: impl FnOnce(usize) -> Option<(M, *mut u8)>,
    ) -> Option<(M, usize)> {
        let caches = self.caches();
        let name = caches.full_name(path);
        let size = caches.cached_size(&name)?;
        let len = range.end.min(size).checked_sub(range.start)?;
        if len == 0 || len > HIT_BYTES_MAX {
            return None;
        }
        let len = len as usize;
        let (memory, at) = memory(len)?;
        let at = at as usize;
        let copy = || {
            // SAFETY: the memory is valid for writes of `len` bytes as long as `memory`. Python code that uses the same buffer
            // at the same time sees any mixture of bytes, as with `FileIO.readinto`.
            let dst = unsafe { std::slice::from_raw_parts_mut(at as *mut MaybeUninit<u8>, len) };
            caches.try_read_into(&name, dst, range.start)
        };
        let found = if len > ATTACHED_HIT_MAX { py.detach(copy) } else { copy() };
        // Another version may be longer.
        (range.end.min(found?) == range.start + len as u64).then_some((memory, len))
    }
}

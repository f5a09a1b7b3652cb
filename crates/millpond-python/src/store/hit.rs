//! Reads of cached bytes: copied once, to memory of Python, without a future.

use std::mem::MaybeUninit;
use std::ops::Range;

use object_store::path::Path;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::buffer::{new_bytes, start_of};
use crate::store::calls::Store;

/// Longer reads are not tried as one hit. The requests of a miss are of that length at most.
const HIT_BYTES_MAX: u64 = 4 << 20;
/// Longer copies run detached from the interpreter: to release its lock takes a fifth of the time of a copy of 4 KiB.
const ATTACHED_HIT_MAX: usize = 16 << 10;

/// A range of an object, and the address of memory for it. A number, which a detached thread may have.
struct Target {
    start: u64,
    at: usize,
    len: usize,
}

impl Store {
    /// The length of a range in a cached object of `size` bytes. `None`: there is nothing to copy, or too much for one hit.
    fn hit_len(range: &Range<u64>, size: u64) -> Option<usize> {
        let len = range.end.min(size).checked_sub(range.start)?;
        (len > 0 && len <= HIT_BYTES_MAX).then_some(len as usize)
    }

    /// Copies ranges that are cached and fresh. Returns the length of the object's version.
    ///
    /// # Safety
    ///
    /// The memory of each target is valid for writes.
    unsafe fn copy_cached(&self, py: Python<'_>, name: &Path, targets: &[Target]) -> Option<u64> {
        let copy = || {
            let slice = |target: &Target| {
                let at = target.at as *mut MaybeUninit<u8>;
                // SAFETY: the caller's promise. Python code that uses the same buffer at the same time sees any mixture of
                // bytes, as with `FileIO.readinto`.
                (target.start, unsafe { std::slice::from_raw_parts_mut(at, target.len) })
            };
            match targets {
                // The common case, without a list of its own.
                [one] => self.caches().try_read_into(name, &mut [slice(one)]),
                _ => {
                    let mut ranges: Vec<_> = targets.iter().map(slice).collect();
                    self.caches().try_read_into(name, &mut ranges)
                }
            }
        };
        let total: usize = targets.iter().map(|target| target.len).sum();
        if total > ATTACHED_HIT_MAX { py.detach(copy) } else { copy() }
    }

    /// The bytes of a range that is cached and fresh. `None`: it is not.
    pub(super) fn cached_range<'py>(
        &self,
        py: Python<'py>,
        path: &Path,
        range: &Range<u64>,
    ) -> Option<Bound<'py, PyBytes>> {
        let name = self.caches().full_name(path);
        let size = self.caches().cached_size(&name)?;
        let len = Store::hit_len(range, size)?;
        let bytes = new_bytes(py, len).ok()?;
        let target = Target { start: range.start, at: start_of(&bytes) as usize, len };
        // SAFETY: a new object of `len` bytes, which nothing else refers to yet.
        let found = unsafe { self.copy_cached(py, &name, &[target]) }?;
        // Another version may be longer.
        (range.end.min(found) == range.start + len as u64).then_some(bytes)
    }

    /// Copies a range that is cached and fresh to memory. Returns its length. `None`: it is not cached.
    ///
    /// # Safety
    ///
    /// The memory at `at` is valid for writes of as many bytes as the range has.
    pub(super) unsafe fn copy_cached_range(
        &self,
        py: Python<'_>,
        path: &Path,
        range: &Range<u64>,
        at: *mut u8,
    ) -> Option<usize> {
        let name = self.caches().full_name(path);
        let size = self.caches().cached_size(&name)?;
        let len = Store::hit_len(range, size)?;
        let target = Target { start: range.start, at: at as usize, len };
        // SAFETY: the caller's promise; `len` is not longer than the range.
        let found = unsafe { self.copy_cached(py, &name, &[target]) }?;
        (range.end.min(found) == range.start + len as u64).then_some(len)
    }

    /// The bytes of several ranges of one version, if all are cached and fresh.
    pub(super) fn cached_ranges<'py>(
        &self,
        py: Python<'py>,
        path: &Path,
        ranges: &[Range<u64>],
    ) -> Option<Bound<'py, PyList>> {
        let name = self.caches().full_name(path);
        let size = self.caches().cached_size(&name)?;
        let lens = ranges.iter().map(|range| Store::hit_len(range, size));
        let lens: Vec<usize> = lens.collect::<Option<_>>()?;
        if lens.is_empty() || lens.iter().sum::<usize>() as u64 > HIT_BYTES_MAX {
            return None;
        }
        let all: Vec<_> =
            lens.iter().map(|&len| new_bytes(py, len)).collect::<PyResult<_>>().ok()?;
        let target = |((range, &len), bytes): ((&Range<u64>, &usize), &Bound<'_, PyBytes>)| {
            Target { start: range.start, at: start_of(bytes) as usize, len }
        };
        let targets: Vec<Target> = ranges.iter().zip(&lens).zip(&all).map(target).collect();
        // SAFETY: new objects, of the length of their targets, which nothing else refers to yet.
        let found = unsafe { self.copy_cached(py, &name, &targets) }?;
        // Of another version the lengths may be others.
        (found == size).then(|| PyList::new(py, all).ok()).flatten()
    }

    /// A whole object, if it is cached and fresh.
    pub(super) fn cached_object<'py>(
        &self,
        py: Python<'py>,
        path: &Path,
    ) -> Option<Bound<'py, PyBytes>> {
        self.cached_range(py, path, &(0..u64::MAX))
    }
}

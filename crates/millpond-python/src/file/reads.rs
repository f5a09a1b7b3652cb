//! Reads of a file, into new bytes objects and into buffers.

use std::sync::atomic::Ordering::Relaxed;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::buffer::{PyMemory, new_bytes, start_of};
use crate::file::opened::File;

/// The longest read that is tried without detaching from the interpreter. To detach and attach again takes a fifth of the
/// time of a cached read of 4 KiB, and less than a tenth at this length; beyond it, other threads gain more by the lock.
const ATTACHED_BYTES_MAX: usize = 16 << 10;

/// The bytes that `readline` looks at first; longer lines double it.
const LINE_BYTES: usize = 512;
impl File {
    /// Reads cached bytes without waiting; `None`: they are not all cached.
    ///
    /// # Safety
    ///
    /// `start` must be valid for writes of `len` bytes.
    pub(super) unsafe fn read_cached(
        &self,
        start: *mut u8,
        len: usize,
        offset: u64,
    ) -> PyResult<Option<usize>> {
        if len > ATTACHED_BYTES_MAX {
            return Ok(None);
        }
        self.with_handle(|handle| {
            // SAFETY: the caller's promise.
            unsafe { handle.file.raw().try_read_hit(start, len, offset) }
        })
    }

    /// Reads to raw memory.
    ///
    /// # Safety
    ///
    /// `start` must be valid for writes of `len` bytes.
    pub(super) unsafe fn read_raw(
        &self,
        py: Python<'_>,
        start: *mut u8,
        len: usize,
        offset: u64,
    ) -> PyResult<usize> {
        // SAFETY: the caller's promise.
        if let Some(moved) = unsafe { self.read_cached(start, len, offset) }? {
            return Ok(moved);
        }
        let file = self.readable_file(py)?;
        let start = start as usize; // a number, which another thread may have
        // SAFETY: the caller's promise; the memory stays valid while this call runs.
        let read = py.detach(move || unsafe { file.raw().read_at(start as *mut u8, len, offset) });
        read.map_err(|error| self.error(&error))
    }

    pub(super) fn read_into(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        offset: u64,
    ) -> PyResult<usize> {
        let memory = PyMemory::writable(buffer)?;
        // SAFETY: an exported, writable buffer is valid for writes of its length until it is dropped.
        unsafe { self.read_raw(py, memory.start(), memory.len(), offset) }
    }

    /// Reads at most `len` bytes into a new bytes object.
    pub(super) fn read_bytes<'py>(
        &self,
        py: Python<'py>,
        len: usize,
        offset: u64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        self.check_open()?;
        self.check_readable(py)?;
        // Not more than there is: a read of 1 GiB at the end of a file allocates nothing.
        let left = usize::try_from(self.size()?.saturating_sub(offset)).unwrap_or(usize::MAX);
        let len = len.min(left);
        let bytes = new_bytes(py, len)?;
        // SAFETY: a new object of `len` bytes, which nothing else refers to yet.
        let moved = unsafe { self.read_raw(py, start_of(&bytes), len, offset) }?;
        if moved == len {
            return Ok(bytes);
        }
        // The file was cut in between.
        Ok(PyBytes::new(py, &bytes.as_bytes()[..moved]))
    }

    /// Reads at the position, and moves it. `None` and negative: to the end.
    pub(super) fn read_next<'py>(
        &self,
        py: Python<'py>,
        size: Option<isize>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let position = self.position.load(Relaxed);
        let len = usize::try_from(size.unwrap_or(-1)).unwrap_or(usize::MAX);
        let bytes = self.read_bytes(py, len, position)?;
        self.position.store(position + bytes.as_bytes().len() as u64, Relaxed);
        Ok(bytes)
    }

    pub(super) fn read_line<'py>(
        &self,
        py: Python<'py>,
        limit: Option<isize>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let position = self.position.load(Relaxed);
        let limit = usize::try_from(limit.unwrap_or(-1)).unwrap_or(usize::MAX);
        let mut len = LINE_BYTES.min(limit);
        loop {
            let bytes = self.read_bytes(py, len, position)?;
            let found = bytes.as_bytes();
            let end = found.iter().position(|&byte| byte == b'\n').map(|at| at + 1);
            let is_last = found.len() < len || len == limit;
            if end.is_some() || is_last {
                let end = end.unwrap_or(found.len());
                self.position.store(position + end as u64, Relaxed);
                return if end == found.len() {
                    Ok(bytes)
                } else {
                    Ok(PyBytes::new(py, &found[..end]))
                };
            }
            len = len.saturating_mul(2).min(limit);
        }
    }

    /// A list of lines, until they have `hint` bytes.
    pub(super) fn read_lines<'py>(
        &self,
        py: Python<'py>,
        hint: Option<isize>,
    ) -> PyResult<Bound<'py, PyList>> {
        let enough = hint.and_then(|hint| usize::try_from(hint).ok()).filter(|&hint| hint > 0);
        let (lines, mut total) = (PyList::empty(py), 0);
        loop {
            let line = self.read_line(py, None)?;
            let len = line.as_bytes().len();
            if len == 0 {
                return Ok(lines);
            }
            lines.append(line)?;
            total += len;
            if enough.is_some_and(|enough| total >= enough) {
                return Ok(lines);
            }
        }
    }

    pub(super) fn read_vectored(
        &self,
        py: Python<'_>,
        buffers: &Bound<'_, PyAny>,
        offset: u64,
    ) -> PyResult<usize> {
        // The common case, without a list of its own.
        if let Ok(list) = buffers.cast::<PyList>()
            && list.len() == 1
        {
            return self.read_into(py, &list.get_item(0)?, offset);
        }
        let mut memories = Vec::new();
        for buffer in buffers.try_iter()? {
            memories.push(PyMemory::writable(&buffer?)?);
        }
        let file = self.readable_file(py)?;
        let read = py.detach(|| {
            let iovecs: Vec<libc::iovec> = memories.iter().map(PyMemory::iovec).collect();
            // SAFETY: as above, for each of them.
            let read = unsafe { file.raw().read_vectored_at(&iovecs, offset) };
            drop(file); // maybe the last handle, whose end can wait
            read
        });
        read.map_err(|error| self.error(&error))
    }

    /// `pread` of cached bytes; `None` if they are not cached.
    pub(super) fn read_cached_bytes<'py>(
        &self,
        py: Python<'py>,
        size: usize,
        offset: i64,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        self.check_open()?;
        self.check_readable(py)?;
        let offset = self.offset(offset)?;
        let left = usize::try_from(self.size()?.saturating_sub(offset)).unwrap_or(usize::MAX);
        let len = size.min(left);
        if len > ATTACHED_BYTES_MAX {
            return Ok(None);
        }
        let bytes = new_bytes(py, len)?;
        // SAFETY: a new object of `len` bytes, which nothing else refers to yet.
        let moved = unsafe { self.read_cached(start_of(&bytes), len, offset) }?;
        Ok(moved.map(|moved| {
            if moved == len { bytes } else { PyBytes::new(py, &bytes.as_bytes()[..moved]) }
        }))
    }

    /// The same into a buffer.
    pub(super) fn read_cached_into(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        offset: i64,
    ) -> PyResult<Option<usize>> {
        self.check_open()?;
        self.check_readable(py)?;
        let memory = PyMemory::writable(buffer)?;
        // SAFETY: an exported, writable buffer is valid for writes of its length until it is dropped.
        unsafe { self.read_cached(memory.start(), memory.len(), self.offset(offset)?) }
    }
}

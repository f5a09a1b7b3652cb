//! Writes of a file.

use std::sync::atomic::Ordering::Relaxed;

use pyo3::prelude::*;

use crate::buffer::PyMemory;
use crate::file::opened::File;

impl File {
    pub(super) fn write_bytes(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        offset: u64,
    ) -> PyResult<usize> {
        let file = self.writable_file(py)?;
        let memory = PyMemory::readable(data)?;
        let (start, len) = (memory.start() as usize, memory.len());
        let written = py.detach(move || {
            let mut done = 0;
            while done < len {
                let rest = (start + done) as *const u8;
                // SAFETY: an exported buffer is valid for reads until it is dropped, which is after this.
                done += unsafe { file.raw().write_at(rest, len - done, offset + done as u64) }?;
            }
            Ok(done)
        });
        written.map_err(|error: millpond::Error| self.error(&error))
    }

    /// Appends all of `data`; returns its length and the offset after it.
    pub(super) fn append_bytes(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
    ) -> PyResult<(usize, u64)> {
        let file = self.writable_file(py)?;
        let memory = PyMemory::readable(data)?;
        let (start, len) = (memory.start() as usize, memory.len());
        if len == 0 {
            // As `io.FileIO`: the position stays.
            return Ok((0, self.position.load(Relaxed)));
        }
        let appended = py.detach(move || {
            let mut done = 0;
            loop {
                let rest = (start + done) as *const u8;
                // SAFETY: as in `write_bytes`.
                let (offset, moved) = unsafe { file.raw().append(rest, len - done) }?;
                done += moved;
                if done >= len {
                    return Ok((len, offset + moved as u64));
                }
            }
        });
        appended.map_err(|error: millpond::Error| self.error(&error))
    }
}

//! An open file: its handle in this process, and its position.

use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::engine::Engine;
use crate::error;
use crate::handle::{Access, Handle};
use crate::process::lock;

/// A binary file in the cache of an engine; `millpond.open` makes it.
///
/// It has the methods of `io.BufferedIOBase`, with one position for all threads, and beside them reads and writes by
/// offset, which any number of threads may use at once: `pread`, `preadv`, `pwrite`. Every read and write is atomic with
/// respect to all others of the same file in this process. A read returns fewer bytes than asked for only at the end of
/// the file. Writes reach the kernel before they return; there is nothing to flush.
///
/// Errors are `OSError` with errno and file name; `ValueError` for a closed file; `io.UnsupportedOperation` for a mode
/// that does not permit the call.
///
/// >>> import millpond
/// >>> with millpond.open("pond.bin", "w+b") as file:
/// ...     file.write(b"a pond\na mill\n")
/// ...     file.pread(4, 2)
/// ...     file.seek(0)
/// ...     list(file)
/// 14
/// b'pond'
/// 0
/// [b'a pond\n', b'a mill\n']
#[pyclass(frozen, subclass, weakref, dict, module = "millpond")]
pub(crate) struct File {
    /// As the caller gave it: the attribute `name`.
    pub(super) name: Py<PyAny>,
    pub(super) path: PathBuf,
    pub(super) access: Access,
    pub(super) atomic: bool,
    pub(super) engine: Py<Engine>,
    /// `None`: closed.
    pub(super) handle: Mutex<Option<Handle>>,
    pub(super) position: AtomicU64,
}

impl File {
    pub(super) fn open_as(
        engine: &Bound<'_, Engine>,
        name: &Bound<'_, PyAny>,
        access: Access,
        atomic: bool,
    ) -> PyResult<File> {
        let py = name.py();
        let os = py.import("os")?;
        let given = os.call_method1("fsdecode", (name,))?;
        let given_path: PathBuf = given.extract()?;
        if given.call_method1("__contains__", ("\0",))?.is_truthy()? {
            return Err(PyValueError::new_err("embedded null byte"));
        }
        // Absolute, for a child of fork or a pickle in another directory.
        let path = std::path::absolute(&given_path).map_err(|_| {
            error::os_error(libc::ENOENT, "No such file or directory", Some(&given_path))
        })?;
        let own = engine.get().get()?;
        let opened = py.detach(|| {
            let handle = Handle::open(&own, &path, &given_path, access, atomic)?;
            let end = if access.appends { handle.file.len() } else { Ok(0) };
            Ok::<_, PyErr>((handle, end.map_err(|error| error::of_engine(&error, Some(&path)))?))
        });
        let (handle, end) = opened?;
        Ok(File {
            name: name.clone().unbind(),
            path,
            access,
            atomic,
            engine: engine.clone().unbind(),
            handle: Mutex::new(Some(handle)),
            position: AtomicU64::new(end),
        })
    }

    /// Calls `work` with the handle of this process, attached to the interpreter: it must not wait.
    pub(super) fn with_handle<T>(&self, work: impl FnOnce(&Handle) -> T) -> PyResult<T> {
        let mut slot = lock(&self.handle);
        let handle = slot.as_mut().ok_or_else(error::closed)?;
        if !handle.is_of_this_process() {
            *handle = handle.reopen(self.engine.get(), &self.path, self.access, self.atomic)?;
        }
        Ok(work(handle))
    }

    pub(crate) fn shared(&self) -> PyResult<Arc<millpond::File>> {
        self.with_handle(|handle| Arc::clone(&handle.file))
    }

    pub(crate) fn readable_file(&self, py: Python<'_>) -> PyResult<Arc<millpond::File>> {
        let file = self.shared()?;
        self.check_readable(py)?;
        Ok(file)
    }

    pub(crate) fn writable_file(&self, py: Python<'_>) -> PyResult<Arc<millpond::File>> {
        let file = self.shared()?;
        self.check_writable(py)?;
        Ok(file)
    }

    pub(super) fn check_open(&self) -> PyResult<()> {
        if lock(&self.handle).is_some() { Ok(()) } else { Err(error::closed()) }
    }

    pub(super) fn check_readable(&self, py: Python<'_>) -> PyResult<()> {
        if self.access.readable { Ok(()) } else { Err(error::unsupported(py, "not readable")) }
    }

    pub(super) fn check_writable(&self, py: Python<'_>) -> PyResult<()> {
        if self.access.writable { Ok(()) } else { Err(error::unsupported(py, "not writable")) }
    }

    pub(crate) fn offset(&self, offset: i64) -> PyResult<u64> {
        error::offset_of(offset, &self.path)
    }

    pub(crate) fn error(&self, error: &millpond::Error) -> PyErr {
        error::of_engine(error, Some(&self.path))
    }

    pub(crate) fn size(&self) -> PyResult<u64> {
        let file = self.shared()?;
        file.len().map_err(|error| self.error(&error))
    }

    pub(super) fn end(&self, py: Python<'_>) -> PyResult<()> {
        let Some(handle) = lock(&self.handle).take() else { return Ok(()) };
        if !handle.is_of_this_process() {
            return Ok(()); // the parent closes it
        }
        let file = handle.file;
        py.detach(move || file.close_shared()).map_err(|error| self.error(&error))
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let slot = self.handle.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(handle) = slot.take() {
            // The end of the last handle of a file may wait.
            Python::try_attach(move |py| py.detach(move || drop(handle)));
        }
    }
}

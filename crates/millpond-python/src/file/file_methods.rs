//! The methods of `millpond.File`, and `millpond.open`.

use std::pin::pin;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use millpond::AsyncFile;
use millpond_rangelock::ByteRange;
use pyo3::exceptions::{PyTimeoutError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use crate::engine::{Engine, usual_engine};
use crate::error;
use crate::file::opened::File;
use crate::handle::Access;
use crate::process::lock;
use crate::range_lock::{LockedRange, lock_range};
use crate::wait::wait_for;

#[pymethods]
impl File {
    /// Reads and returns up to `size` bytes, or all to the end. Fewer only at the end of the file.
    #[pyo3(signature = (size=-1, /))]
    fn read<'py>(&self, py: Python<'py>, size: Option<isize>) -> PyResult<Bound<'py, PyBytes>> {
        self.read_next(py, size)
    }

    /// The same as `read`: there is no second buffer whose bytes could be returned earlier.
    #[pyo3(signature = (size=-1, /))]
    fn read1<'py>(&self, py: Python<'py>, size: Option<isize>) -> PyResult<Bound<'py, PyBytes>> {
        self.read_next(py, size)
    }

    /// Reads and returns all bytes from the position to the end.
    fn readall<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        self.read_next(py, None)
    }

    /// Reads into a writable buffer; returns the number of bytes.
    #[pyo3(signature = (buffer, /))]
    fn readinto(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<usize> {
        let position = self.position.load(Relaxed);
        let moved = self.read_into(py, buffer, position)?;
        self.position.store(position + moved as u64, Relaxed);
        Ok(moved)
    }

    /// The same as `readinto`.
    #[pyo3(signature = (buffer, /))]
    fn readinto1(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.readinto(py, buffer)
    }

    /// Reads and returns a line with its newline, up to `size` bytes.
    #[pyo3(signature = (size=-1, /))]
    fn readline<'py>(&self, py: Python<'py>, size: Option<isize>) -> PyResult<Bound<'py, PyBytes>> {
        self.read_line(py, size)
    }

    /// A list of lines, until they have `hint` bytes.
    #[pyo3(signature = (hint=-1, /))]
    fn readlines<'py>(&self, py: Python<'py>, hint: Option<isize>) -> PyResult<Bound<'py, PyList>> {
        self.read_lines(py, hint)
    }

    /// Writes all of `data` at the position, or at the end of a file in mode `"a"`; returns its length.
    #[pyo3(signature = (data, /))]
    fn write(&self, py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<usize> {
        if self.access.appends {
            let (len, end) = self.append_bytes(py, data)?;
            self.position.store(end, Relaxed);
            return Ok(len);
        }
        let position = self.position.load(Relaxed);
        let len = self.write_bytes(py, data, position)?;
        self.position.store(position + len as u64, Relaxed);
        Ok(len)
    }

    /// Writes each of `lines`, without adding newlines.
    #[pyo3(signature = (lines, /))]
    fn writelines(&self, py: Python<'_>, lines: &Bound<'_, PyAny>) -> PyResult<()> {
        self.check_open()?;
        lines.try_iter()?.try_for_each(|line| self.write(py, &line?).map(|_| ()))
    }

    /// Reads up to `size` bytes at `offset`; the position is not used. Any number of threads may call it at once.
    ///
    /// >>> import millpond
    /// >>> with millpond.open("pond.bin", "w+b") as file:
    /// ...     file.pwrite(b"a pond", 0)
    /// ...     file.pread(100, 2)
    /// 6
    /// b'pond'
    #[pyo3(signature = (size, offset, /))]
    fn pread<'py>(
        &self,
        py: Python<'py>,
        size: isize,
        offset: i64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let len = usize::try_from(size)
            .map_err(|_| error::os_error(libc::EINVAL, "negative size", Some(&self.path)))?;
        self.read_bytes(py, len, self.offset(offset)?)
    }

    /// Reads at `offset` into several writable buffers in turn, as one atomic read; returns the number of bytes.
    ///
    /// >>> import millpond
    /// >>> with millpond.open("pond.bin", "w+b") as file:
    /// ...     file.pwrite(b"a pond", 0)
    /// ...     head, tail = bytearray(2), bytearray(8)
    /// ...     file.preadv([head, tail], 0)
    /// 6
    /// 6
    /// >>> head, tail
    /// (bytearray(b'a '), bytearray(b'pond\x00\x00\x00\x00'))
    #[pyo3(signature = (buffers, offset, /))]
    fn preadv(&self, py: Python<'_>, buffers: &Bound<'_, PyAny>, offset: i64) -> PyResult<usize> {
        self.read_vectored(py, buffers, self.offset(offset)?)
    }

    /// Writes all of `data` at `offset`, in mode `"a"`, too; the position is not used. Returns its length.
    #[pyo3(signature = (data, offset, /))]
    fn pwrite(&self, py: Python<'_>, data: &Bound<'_, PyAny>, offset: i64) -> PyResult<usize> {
        self.write_bytes(py, data, self.offset(offset)?)
    }

    /// Makes all writes durable, as `os.fsync`; with `data_only` as `os.fdatasync`. Ctrl-C ends the wait, and the sync
    /// goes on.
    ///
    /// >>> import millpond
    /// >>> with millpond.open("log.bin", "ab") as file:
    /// ...     _ = file.write(b"entry")
    /// ...     file.sync(data_only=True)
    #[pyo3(signature = (*, data_only=false))]
    fn sync(&self, py: Python<'_>, data_only: bool) -> PyResult<()> {
        let file = AsyncFile::from(self.shared()?);
        let sync =
            async move { if data_only { file.sync_data().await } else { file.sync_all().await } };
        let synced = wait_for(py, pin!(sync), None)?;
        synced.unwrap_or(Ok(())).map_err(|error| self.error(&error))
    }

    /// Locks `length` bytes at `offset` (0: to the end) against other `lock_range` calls for the same file in this
    /// process, exclusive or shared, and returns a context manager that releases them. Reads and writes do not look at
    /// it. Waits, in the order of the calls, until it has the range, or raises `TimeoutError` after `timeout` seconds;
    /// Ctrl-C ends the wait. A thread that locks a range twice waits for itself.
    #[pyo3(signature = (offset, length, *, exclusive=true, timeout=None))]
    fn lock_range(
        &self,
        py: Python<'_>,
        offset: i64,
        length: i64,
        exclusive: bool,
        timeout: Option<f64>,
    ) -> PyResult<LockedRange> {
        let start = self.offset(offset)?;
        let length = self.offset(length)?;
        let range =
            if length == 0 { ByteRange::from_start(start) } else { ByteRange::at(start, length) };
        let range =
            range.map_err(|error| error::os_error(libc::EINVAL, error, Some(&self.path)))?;
        let timeout = timeout.map(|seconds| {
            Duration::try_from_secs_f64(seconds)
                .map_err(|_| PyValueError::new_err("timeout must be a time that is not negative"))
        });
        let identity = self.with_handle(|handle| handle.identity)?;
        let locked = lock_range(py, identity, range, exclusive, timeout.transpose()?)?;
        locked.ok_or_else(|| {
            PyTimeoutError::new_err((libc::ETIMEDOUT, "the range is locked", self.path.clone()))
        })
    }

    /// Moves the position: from the start (0), from where it is (1), or from the end (2). Returns it.
    #[pyo3(signature = (offset, whence=0, /))]
    fn seek(&self, offset: i64, whence: i32) -> PyResult<u64> {
        self.check_open()?;
        let base = match whence {
            0 => 0,
            1 => self.position.load(Relaxed),
            2 => self.size()?,
            other => {
                return Err(PyValueError::new_err(format!(
                    "invalid whence ({other}, should be 0, 1 or 2)"
                )));
            }
        };
        let position = base.checked_add_signed(offset).filter(|&at| i64::try_from(at).is_ok());
        let position = position.ok_or_else(|| {
            error::os_error(
                libc::EINVAL,
                "the position would be negative or too large",
                Some(&self.path),
            )
        })?;
        self.position.store(position, Relaxed);
        Ok(position)
    }

    /// The position.
    fn tell(&self) -> PyResult<u64> {
        self.check_open()?;
        Ok(self.position.load(Relaxed))
    }

    /// Cuts the file to `size` bytes, or extends it with zeros; without `size`, to the position. Returns the size.
    #[pyo3(signature = (size=None, /))]
    fn truncate(&self, py: Python<'_>, size: Option<i64>) -> PyResult<u64> {
        let file = self.writable_file(py)?;
        let size = size.map_or(Ok(self.position.load(Relaxed)), |size| self.offset(size))?;
        py.detach(move || file.truncate(size)).map_err(|error| self.error(&error))?;
        Ok(size)
    }

    /// Has no effect: writes are in the kernel when they return. `sync` makes them durable.
    fn flush(&self) -> PyResult<()> {
        self.check_open()
    }

    /// Closes the file, and raises errors of earlier writes. Later calls have no effect. Calls of other threads that are
    /// in progress end normally.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.end(py)
    }

    /// Whether the file is closed.
    #[getter]
    fn closed(&self) -> bool {
        lock(&self.handle).is_none()
    }

    /// The path, as it was given to `open`.
    #[getter]
    fn name(&self, py: Python<'_>) -> Py<PyAny> {
        self.name.clone_ref(py)
    }

    /// The mode, as `io.FileIO` names it.
    #[getter]
    fn mode(&self) -> &'static str {
        self.access.name()
    }

    /// The engine whose cache the file uses.
    #[getter]
    fn engine(&self, py: Python<'_>) -> Py<Engine> {
        self.engine.clone_ref(py)
    }

    /// Whether the mode permits reads.
    fn readable(&self) -> PyResult<bool> {
        self.check_open()?;
        Ok(self.access.readable)
    }

    /// Whether the mode permits writes.
    fn writable(&self) -> PyResult<bool> {
        self.check_open()?;
        Ok(self.access.writable)
    }

    /// True.
    fn seekable(&self) -> PyResult<bool> {
        self.check_open()?;
        Ok(true)
    }

    /// False.
    fn isatty(&self) -> PyResult<bool> {
        self.check_open()?;
        Ok(false)
    }

    /// Raises `io.UnsupportedOperation`: reads and writes by a descriptor would miss the cache, and the file's position is
    /// not the kernel's. Libraries use `read` and `write` then.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.check_open()?;
        Err(error::unsupported(py, "fileno: a descriptor would bypass the cache"))
    }

    /// Raises `io.UnsupportedOperation`: there is no raw file below.
    fn detach(&self, py: Python<'_>) -> PyResult<()> {
        Err(error::unsupported(py, "detach: there is no raw file below"))
    }

    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        slf.get().check_open()?;
        Ok(slf)
    }

    #[pyo3(signature = (*_details))]
    fn __exit__(slf: &Bound<'_, Self>, _details: &Bound<'_, PyAny>) -> PyResult<()> {
        // By name, as a subclass may have its own.
        slf.call_method0("close").map(|_| ())
    }

    fn __iter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        slf.get().check_open()?;
        Ok(slf)
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let line = self.read_line(py, None)?;
        Ok(Some(line).filter(|line| !line.as_bytes().is_empty()))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let (name, mode) = (self.name.bind(py).repr()?, self.access.name());
        Ok(format!(
            "<millpond.File name={name} mode='{mode}'{}>",
            if self.closed() { " [closed]" } else { "" }
        ))
    }

    fn __reduce__<'py>(
        slf: &Bound<'py, Self>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let (py, file) = (slf.py(), slf.get());
        file.check_open()?;
        if !slf.get_type().is(py.get_type::<File>()) {
            return Err(PyTypeError::new_err(
                "a subclass of millpond.File needs a __reduce__ of its own",
            ));
        }
        let load = py.import("millpond._millpond")?.getattr("_load_file")?;
        let path = file.path.clone().into_os_string();
        let (mode, position) = (file.access.name(), file.position.load(Relaxed));
        let (atomic, untorn) = (file.atomic, file.access.untorn);
        let arguments = (file.engine.clone_ref(py), path, mode, position, atomic, untorn);
        Ok((load, arguments.into_pyobject(py)?))
    }

    /// `await file.apread(size, offset)`: `pread` for asyncio. Cached bytes are returned at once; for others the loop
    /// waits for the engine's queue, without a thread.
    ///
    /// >>> import asyncio, millpond
    /// >>> async def main():
    /// ...     with millpond.open("pond.bin", "w+b") as file:
    /// ...         await file.apwrite(b"a pond", 0)
    /// ...         await file.sync_async()
    /// ...         return await file.apread(4, 2)
    /// >>> asyncio.run(main())
    /// b'pond'
    #[pyo3(signature = (size, offset, /))]
    fn apread<'py>(
        slf: &Bound<'py, Self>,
        size: isize,
        offset: i64,
    ) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("millpond._aio")?.call_method1("pread", (slf, size, offset))
    }

    /// `await file.apreadinto(buffer, offset)`: reads into a writable buffer, without a copy more. Do not use the buffer
    /// before it returns. After a cancellation it is in use until the read has ended; a bytearray can't be resized until
    /// then.
    #[pyo3(signature = (buffer, offset, /))]
    fn apreadinto<'py>(
        slf: &Bound<'py, Self>,
        buffer: &Bound<'py, PyAny>,
        offset: i64,
    ) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("millpond._aio")?.call_method1("preadinto", (slf, buffer, offset))
    }

    /// `await file.apwrite(data, offset)`: `pwrite` for asyncio. After a cancellation the bytes may have been written.
    #[pyo3(signature = (data, offset, /))]
    fn apwrite<'py>(
        slf: &Bound<'py, Self>,
        data: &Bound<'py, PyAny>,
        offset: i64,
    ) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("millpond._aio")?.call_method1("pwrite", (slf, data, offset))
    }

    /// `await file.sync_async()`: `sync` for asyncio.
    #[pyo3(signature = (*, data_only=false))]
    fn sync_async<'py>(slf: &Bound<'py, Self>, data_only: bool) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("millpond._aio")?.call_method1("sync", (slf, data_only))
    }

    /// `pread` of cached bytes; `None` if they are not cached.
    fn _pread_cached<'py>(
        &self,
        py: Python<'py>,
        size: usize,
        offset: i64,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        self.read_cached_bytes(py, size, offset)
    }

    /// `pread` of cached bytes into a buffer; `None` if they are not cached.
    fn _preadinto_cached(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        offset: i64,
    ) -> PyResult<Option<usize>> {
        self.read_cached_into(py, buffer, offset)
    }
}

/// Opens a file for the engine's cache and returns it, a `File`.
///
/// `mode` is that of `io.open` for binary files: `"rb"`, `"wb"`, `"ab"`, `"xb"`, with `+` for both directions; the `b` may
/// be left out. For text, wrap the file in `io.TextIOWrapper`. `cache` is the `Engine`, by default that of the process.
/// With `atomic=False` a read that overlaps a write may see a part of it, and is not repeated.
///
/// With `untorn=BYTES` a power cut tears no aligned block of that many bytes: a power of two from 4 KiB to 64 KiB, for a
/// mode with `+`, on a file system that writes such blocks as a whole (XFS with reflink, from Linux 6.16 on). The length
/// of the file is always a multiple of it. The error of a refused open names the missing requirement.
///
/// Only regular files can be opened.
///
/// >>> import millpond
/// >>> with millpond.open("pond.bin", "wb") as file:
/// ...     file.write(b"a pond")
/// 6
/// >>> with millpond.open("pond.bin") as file:
/// ...     file.read()
/// b'a pond'
/// >>> millpond.open("no such file")
/// Traceback (most recent call last):
/// FileNotFoundError: [Errno 2] No such file or directory: '...no such file'
#[pyfunction]
#[pyo3(signature = (path, mode="rb", cache=None, atomic=true, untorn=None))]
pub(crate) fn open(
    py: Python<'_>,
    path: &Bound<'_, PyAny>,
    mode: &str,
    cache: Option<Bound<'_, Engine>>,
    atomic: bool,
    untorn: Option<u32>,
) -> PyResult<File> {
    let access = Access::parse(mode)?.with_untorn(untorn);
    let engine = cache.map_or_else(|| usual_engine(py).map(|engine| engine.into_bound(py)), Ok)?;
    File::open_as(&engine, path, access, atomic)
}

/// Opens the file of a pickle: by its path, without creating or cutting it.
#[pyfunction]
#[pyo3(signature = (engine, path, mode, position, atomic, untorn))]
pub(crate) fn _load_file(
    engine: &Bound<'_, Engine>,
    path: &Bound<'_, PyAny>,
    mode: &str,
    position: u64,
    atomic: bool,
    untorn: Option<u32>,
) -> PyResult<File> {
    let access = Access::parse(mode)?.of_existing().with_untorn(untorn);
    let file = File::open_as(engine, path, access, atomic)?;
    file.position.store(position, Relaxed);
    Ok(file)
}

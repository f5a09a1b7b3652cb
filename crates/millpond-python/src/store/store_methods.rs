//! The methods of `millpond.Store`.

use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;

use bytes::BytesMut;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};

use crate::buffer::PyMemory;
use crate::store::caches::Caches;
use crate::store::calls::{PART_BYTES, PART_BYTES_MIN, PARTS_MAX, Store};
use crate::store::convert;
use crate::store::failure;
use crate::store::listing::ListStream;
use crate::store::operation::{self, reply};
use crate::store::runtime;
use crate::store::server_watch;
use crate::store::settings::{self, SocketChoice, StoreSettings};
use crate::store::writer::{ObjectWriter, Upload};
use crate::wait::wait_for;

#[pymethods]
impl Store {
    #[new]
    #[pyo3(signature = (url, *, memory, disk, freshness, options, socket, needs_disk=true))]
    #[expect(clippy::too_many_arguments, reason = "those of `millpond.store`")]
    fn new(
        py: Python<'_>,
        url: String,
        memory: u64,
        disk: Option<(PathBuf, u64)>,
        freshness: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
        socket: &Bound<'_, PyAny>,
        needs_disk: bool,
    ) -> PyResult<Store> {
        let freshness = settings::freshness(freshness)?;
        let options = settings::options(options)?;
        let socket = SocketChoice::of(socket, &url)?;
        let settings = Arc::new(StoreSettings { url, memory, disk, freshness, options, socket });
        let caches = py.detach(|| Caches::open(&settings))?;
        let mut is_attached = false;
        if let Some(server) = &caches.server {
            let attached = wait_for(py, pin!(server.client.attach()), None)?;
            is_attached = attached.expect("there is no deadline");
            server.tell_first(py);
        }
        if !is_attached {
            // Errors of the settings are raised here.
            py.detach(|| caches.own.cache_with(needs_disk))
                .map_err(|error| failure::of_store(&error, &settings.url))?;
            server_watch::log_noted(py);
        }
        Ok(Store { settings, caches: Some(caches) })
    }

    /// The URL that `millpond.store` was called with.
    #[getter]
    fn url(&self) -> &str {
        &self.settings.url
    }

    /// The socket of the server that is used now.
    #[getter]
    fn _server(&self) -> Option<PathBuf> {
        let server = self.caches().server.as_ref()?;
        server.client.is_attached().then(|| server.socket().to_owned())
    }

    /// An object, or a range of it, as a `GetResult`: metadata first, and then the body.
    ///
    /// `options` is a dict: `range` as `(start, end)`, `{"offset": start}` or `{"suffix": length}`; `if_match` and
    /// `if_none_match` with an ETag, which raise `PreconditionError` and `NotModifiedError`; `version`; `head=True` for no
    /// body.
    ///
    /// >>> import millpond
    /// >>> store = millpond.store("memory://doc")
    /// >>> _ = store.put("pond", b"water lilies")
    /// >>> store.get("pond", options={"range": {"suffix": 6}}).bytes()
    /// b'lilies'
    #[pyo3(signature = (path, *, options=None))]
    fn get(
        &self,
        py: Python<'_>,
        path: &str,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<PyAny>> {
        self.start_get(path, options)?.run(py)
    }

    /// `await store.get_async(path)`: `get` for asyncio.
    #[pyo3(signature = (path, *, options=None))]
    fn get_async(
        &self,
        py: Python<'_>,
        path: &str,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<PyAny>> {
        self.start_get(path, options)?.coroutine(py)
    }

    /// The bytes from `start` to `end`, or `length` of them. Fewer at the end of the object.
    ///
    /// >>> import millpond
    /// >>> store = millpond.store("memory://doc")
    /// >>> _ = store.put("pond", b"water lilies")
    /// >>> store.get_range("pond", start=0, end=5)
    /// b'water'
    #[pyo3(signature = (path, *, start, end=None, length=None))]
    fn get_range(
        &self,
        py: Python<'_>,
        path: &str,
        start: u64,
        end: Option<u64>,
        length: Option<u64>,
    ) -> PyResult<Py<PyAny>> {
        let range = convert::range(start, end, length)?;
        if let Some(bytes) = self.cached_range(py, &convert::path(path)?, &range) {
            return Ok(bytes.into_any().unbind());
        }
        self.start_get_range(path, range)?.run(py)
    }

    /// Reads from byte `start` on into a writable buffer, such as a `bytearray` or a numpy array; returns the number of bytes,
    /// which is smaller than that of the buffer at the end of the object. Cached bytes are copied once.
    ///
    /// >>> import millpond
    /// >>> store = millpond.store("memory://doc")
    /// >>> _ = store.put("pond", b"water lilies")
    /// >>> buffer = bytearray(8)
    /// >>> store.get_range_into("pond", buffer, start=6), bytes(buffer)
    /// (6, b'lilies\x00\x00')
    #[pyo3(signature = (path, buffer, *, start))]
    fn get_range_into(
        &self,
        py: Python<'_>,
        path: &str,
        buffer: &Bound<'_, PyAny>,
        start: u64,
    ) -> PyResult<usize> {
        self._get_range_into(py, path, buffer, start, u64::MAX, None)
    }

    /// The same, up to byte `end`, of the version with this ETag. For `millpond.fsspec`.
    #[pyo3(signature = (path, buffer, *, start, end, e_tag))]
    fn _get_range_into(
        &self,
        py: Python<'_>,
        path: &str,
        buffer: &Bound<'_, PyAny>,
        start: u64,
        end: u64,
        e_tag: Option<String>,
    ) -> PyResult<usize> {
        let memory = PyMemory::writable(buffer)?;
        let mut range = convert::range(start, None, Some(memory.len() as u64))?;
        range.end = range.end.min(end).max(start);
        let at = memory.start();
        if e_tag.is_none() {
            let location = convert::path(path)?;
            // SAFETY: an exported, writable buffer is valid for writes of its length, that of the range or more, until it is
            // dropped.
            if let Some(len) = unsafe { self.copy_cached_range(py, &location, &range, at) } {
                return Ok(len);
            }
        }
        let read = self.start_get_version_range(path, range, e_tag)?.run(py)?;
        let read = read.bind(py).cast::<PyBytes>()?.as_bytes();
        // SAFETY: `memory` is valid for writes of its length, which no read exceeds; the bytes object is not its memory, as that
        // is read-only.
        unsafe { std::ptr::copy_nonoverlapping(read.as_ptr(), at, read.len()) };
        Ok(read.len())
    }

    /// `get_range` of the version with this ETag; `PreconditionError` if there is another one. For `millpond.fsspec`.
    #[pyo3(signature = (path, *, start, end, e_tag))]
    fn _get_version_range(
        &self,
        py: Python<'_>,
        path: &str,
        start: u64,
        end: u64,
        e_tag: Option<String>,
    ) -> PyResult<Py<PyAny>> {
        let range = convert::range(start, Some(end), None)?;
        self.start_get_version_range(path, range, e_tag)?.run(py)
    }

    /// The same for asyncio.
    #[pyo3(signature = (path, *, start, end, e_tag))]
    fn _get_version_range_async(
        &self,
        py: Python<'_>,
        path: &str,
        start: u64,
        end: u64,
        e_tag: Option<String>,
    ) -> PyResult<Py<PyAny>> {
        let range = convert::range(start, Some(end), None)?;
        self.start_get_version_range(path, range, e_tag)?.coroutine(py)
    }

    /// `await store.get_range_async(path, start=..., end=...)`: `get_range` for asyncio. Cached bytes are returned without a
    /// turn of the loop.
    ///
    /// >>> import asyncio, millpond
    /// >>> store = millpond.store("memory://doc")
    /// >>> _ = store.put("pond", b"water lilies")
    /// >>> asyncio.run(store.get_range_async("pond", start=0, length=5))
    /// b'water'
    #[pyo3(signature = (path, *, start, end=None, length=None))]
    fn get_range_async(
        &self,
        py: Python<'_>,
        path: &str,
        start: u64,
        end: Option<u64>,
        length: Option<u64>,
    ) -> PyResult<Py<PyAny>> {
        let range = convert::range(start, end, length)?;
        if let Some(bytes) = self.cached_range(py, &convert::path(path)?, &range) {
            return operation::ready(py, bytes.into_any());
        }
        self.start_get_range(path, range)?.coroutine(py)
    }

    /// A list with the bytes of several ranges of one version of an object. Ranges close to each other are one request.
    ///
    /// >>> import millpond
    /// >>> store = millpond.store("memory://doc")
    /// >>> _ = store.put("pond", b"water lilies")
    /// >>> store.get_ranges("pond", starts=[6, 0], lengths=[6, 5])
    /// [b'lilies', b'water']
    #[pyo3(signature = (path, *, starts, ends=None, lengths=None))]
    fn get_ranges(
        &self,
        py: Python<'_>,
        path: &str,
        starts: Vec<u64>,
        ends: Option<Vec<u64>>,
        lengths: Option<Vec<u64>>,
    ) -> PyResult<Py<PyAny>> {
        let ranges = convert::ranges(&starts, ends.as_deref(), lengths.as_deref())?;
        if let Some(list) = self.cached_ranges(py, &convert::path(path)?, &ranges) {
            return Ok(list.into_any().unbind());
        }
        self.start_get_ranges(path, ranges)?.run(py)
    }

    /// `await store.get_ranges_async(...)`: `get_ranges` for asyncio.
    #[pyo3(signature = (path, *, starts, ends=None, lengths=None))]
    fn get_ranges_async(
        &self,
        py: Python<'_>,
        path: &str,
        starts: Vec<u64>,
        ends: Option<Vec<u64>>,
        lengths: Option<Vec<u64>>,
    ) -> PyResult<Py<PyAny>> {
        let ranges = convert::ranges(&starts, ends.as_deref(), lengths.as_deref())?;
        if let Some(list) = self.cached_ranges(py, &convert::path(path)?, &ranges) {
            return operation::ready(py, list.into_any());
        }
        self.start_get_ranges(path, ranges)?.coroutine(py)
    }

    /// `get_ranges` of cached bytes; `None` if one of them is not cached. For `millpond.fsspec`.
    fn _get_ranges_cached<'py>(
        &self,
        py: Python<'py>,
        path: &str,
        starts: Vec<u64>,
        ends: Vec<u64>,
    ) -> PyResult<Option<Bound<'py, PyList>>> {
        let ranges = convert::ranges(&starts, Some(&ends), None)?;
        Ok(self.cached_ranges(py, &convert::path(path)?, &ranges))
    }

    /// The bytes of a short object that is cached as a whole, or `None`. For `millpond.fsspec`.
    fn _get_cached<'py>(
        &self,
        py: Python<'py>,
        path: &str,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        Ok(self.cached_object(py, &convert::path(path)?))
    }

    /// Path, size, time of the last change, ETag and version of an object, as a dict.
    ///
    /// >>> import millpond
    /// >>> store = millpond.store("memory://doc")
    /// >>> _ = store.put("pond", b"water lilies")
    /// >>> store.head("pond")["size"]
    /// 12
    fn head(&self, py: Python<'_>, path: &str) -> PyResult<Py<PyAny>> {
        self.start_head(path)?.run(py)
    }

    /// `await store.head_async(path)`: `head` for asyncio.
    fn head_async(&self, py: Python<'_>, path: &str) -> PyResult<Py<PyAny>> {
        self.start_head(path)?.coroutine(py)
    }

    /// The metadata of all objects below a prefix, as a `ListStream`: an iterator over lists of at most `chunk_size` dicts,
    /// also for `async for`. With `offset`, only of names after that one. The prefix is a folder: `"a"` does not match
    /// `"ab"`.
    ///
    /// >>> import millpond
    /// >>> store = millpond.store("memory://list")
    /// >>> for name in ["pond/1", "pond/2", "mill"]:
    /// ...     _ = store.put(name, b"")
    /// >>> [meta["path"] for chunk in store.list("pond") for meta in chunk]
    /// ['pond/1', 'pond/2']
    /// >>> len(store.list().collect())
    /// 3
    #[pyo3(signature = (prefix=None, *, offset=None, chunk_size=50))]
    fn list(
        &self,
        prefix: Option<&str>,
        offset: Option<&str>,
        chunk_size: usize,
    ) -> PyResult<ListStream> {
        let (below, offset) = (convert::prefix(prefix)?, offset.map(convert::path).transpose()?);
        let caches = self.caches();
        let runtime = runtime::handle()?;
        let _entered = runtime.enter();
        let metas = match &offset {
            Some(offset) => caches.store.list_with_offset(below.as_ref(), offset),
            None => caches.store.list(below.as_ref()),
        };
        Ok(ListStream::new(self.name(prefix.unwrap_or_default()), chunk_size.max(1), metas))
    }

    /// The content of a folder, as a dict: the folders in it in `common_prefixes`, the metadata of its objects in `objects`.
    ///
    /// >>> import millpond
    /// >>> store = millpond.store("memory://doc")
    /// >>> store.list_with_delimiter("no such prefix")
    /// {'common_prefixes': [], 'objects': []}
    #[pyo3(signature = (prefix=None))]
    fn list_with_delimiter(&self, py: Python<'_>, prefix: Option<&str>) -> PyResult<Py<PyAny>> {
        self.start_list(prefix)?.run(py)
    }

    /// `await store.list_with_delimiter_async(prefix)`: `list_with_delimiter` for asyncio.
    #[pyo3(signature = (prefix=None))]
    fn list_with_delimiter_async(
        &self,
        py: Python<'_>,
        prefix: Option<&str>,
    ) -> PyResult<Py<PyAny>> {
        self.start_list(prefix)?.coroutine(py)
    }

    /// Writes an object from any buffer, as a whole; returns its ETag and version. After it has returned, no read by this
    /// store returns an earlier version.
    ///
    /// `mode` is `"overwrite"` (also `None`), `"create"`, which raises `FileExistsError` if there is an object, or a dict
    /// with the `e_tag` and `version` of the object to replace, which raises `PreconditionError` if it is another one.
    /// `attributes` is a dict with names of HTTP headers, such as `Content-Type`, and the program's own names. Objects of
    /// more than 8 MiB are sent in parts, unless `mode` has a condition.
    ///
    /// >>> import millpond
    /// >>> store = millpond.store("memory://put")
    /// >>> old = store.put("pond", bytearray(b"water"))
    /// >>> new = store.put("pond", b"lilies", mode=old)
    /// >>> store.put("pond", b"", mode="create")
    /// Traceback (most recent call last):
    /// FileExistsError: [Errno 17] The object exists: 'memory://put/pond'
    #[pyo3(signature = (path, data, *, attributes=None, mode=None))]
    fn put(
        &self,
        py: Python<'_>,
        path: &str,
        data: &Bound<'_, PyAny>,
        attributes: Option<&Bound<'_, PyDict>>,
        mode: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        self.start_put(path, data, attributes, mode)?.run(py)
    }

    /// `await store.put_async(path, data)`: `put` for asyncio.
    #[pyo3(signature = (path, data, *, attributes=None, mode=None))]
    fn put_async(
        &self,
        py: Python<'_>,
        path: &str,
        data: &Bound<'_, PyAny>,
        attributes: Option<&Bound<'_, PyDict>>,
        mode: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        self.start_put(path, data, attributes, mode)?.coroutine(py)
    }

    /// A writer for an object whose bytes come in pieces: see `ObjectWriter`. `buffer_size` is the length of a part, at
    /// least 5 MiB; `max_concurrency` the number of parts on their way at a time. After 5000 parts, parts grow, as S3 has 10,000
    /// at most.
    ///
    /// >>> import millpond
    /// >>> with millpond.store("memory://doc").open_writer("pond") as writer:
    /// ...     writer.write(b"water")
    /// 5
    #[pyo3(signature = (path, *, attributes=None, buffer_size=PART_BYTES, max_concurrency=PARTS_MAX))]
    fn open_writer(
        &self,
        path: &str,
        attributes: Option<&Bound<'_, PyDict>>,
        buffer_size: usize,
        max_concurrency: usize,
    ) -> PyResult<ObjectWriter> {
        if buffer_size < PART_BYTES_MIN {
            return Err(PyValueError::new_err(format!(
                "buffer_size {buffer_size}: must be at least {PART_BYTES_MIN}"
            )));
        }
        let upload = Upload {
            path: convert::path(path)?,
            attributes: convert::attributes(attributes)?,
            store: Arc::clone(&self.caches().store),
            first_part_bytes: buffer_size,
            parts_sent: 0,
            parts_max: max_concurrency.max(1),
            buffer: BytesMut::new(),
            parts: None,
            failed: None,
            is_ended: false,
        };
        Ok(ObjectWriter::new(self.name(path), upload))
    }

    /// Removes an object, or each of a list of them. All are tried; the first error is raised. Stores differ in whether the
    /// removal of an object that does not exist is an error: with S3 it is not.
    ///
    /// >>> import millpond
    /// >>> store = millpond.store("memory://doc")
    /// >>> _ = store.put("pond", b"")
    /// >>> store.delete(["pond"])
    fn delete(&self, py: Python<'_>, paths: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.start_delete(paths)?.run(py)
    }

    /// `await store.delete_async(paths)`: `delete` for asyncio.
    fn delete_async(&self, py: Python<'_>, paths: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.start_delete(paths)?.coroutine(py)
    }

    /// Copies an object within the store. With `overwrite=False`, `FileExistsError` if there is one at `to`.
    ///
    /// >>> import millpond
    /// >>> store = millpond.store("memory://doc")
    /// >>> _ = store.put("pond", b"water")
    /// >>> store.copy("pond", "lake")
    /// >>> store.get("lake").bytes()
    /// b'water'
    #[pyo3(signature = (from_, to, *, overwrite=true))]
    fn copy(&self, py: Python<'_>, from_: &str, to: &str, overwrite: bool) -> PyResult<Py<PyAny>> {
        self.start_copy((from_, to, overwrite), false)?.run(py)
    }

    /// `await store.copy_async(from_, to)`: `copy` for asyncio.
    #[pyo3(signature = (from_, to, *, overwrite=true))]
    fn copy_async(
        &self,
        py: Python<'_>,
        from_: &str,
        to: &str,
        overwrite: bool,
    ) -> PyResult<Py<PyAny>> {
        self.start_copy((from_, to, overwrite), false)?.coroutine(py)
    }

    /// Moves an object within the store: with most stores, a copy and a removal. `overwrite` as for `copy`.
    #[pyo3(signature = (from_, to, *, overwrite=true))]
    fn rename(
        &self,
        py: Python<'_>,
        from_: &str,
        to: &str,
        overwrite: bool,
    ) -> PyResult<Py<PyAny>> {
        self.start_copy((from_, to, overwrite), true)?.run(py)
    }

    /// `await store.rename_async(from_, to)`: `rename` for asyncio.
    #[pyo3(signature = (from_, to, *, overwrite=true))]
    fn rename_async(
        &self,
        py: Python<'_>,
        from_: &str,
        to: &str,
        overwrite: bool,
    ) -> PyResult<Py<PyAny>> {
        self.start_copy((from_, to, overwrite), true)?.coroutine(py)
    }

    /// Removes an object from the cache: call it after another program has changed the object.
    ///
    /// >>> import millpond
    /// >>> millpond.store("memory://doc").forget("pond")
    fn forget(&self, py: Python<'_>, path: &str) -> PyResult<()> {
        let location = convert::path(path)?;
        let caches = self.caches().clone();
        let full = caches.full_name(&location);
        let work = async move {
            if let Some(server) = &caches.server {
                server.client.forget(&full).await;
            }
            caches.own.forget(&full);
            Ok(reply(|py| Ok(py.None())))
        };
        self.operation_on(self.name(path), work).run(py).map(|_| ())
    }

    /// Counts since the store was made, as a dict.
    ///
    /// By a server: `is_attached`; `server_hits` and `server_hit_bytes`, reads that were copied from the server's memory;
    /// `server_misses`, reads that the server was asked for; `fallbacks`, reads that no server answered; `attaches`.
    ///
    /// Of the cache in this process: pages that were hits and misses, requests, requests saved, bytes from the store,
    /// memory in use, and those of the disk tier.
    ///
    /// >>> import millpond
    /// >>> store = millpond.store("memory://stats", freshness="immutable")
    /// >>> _ = store.put("pond", b"water lilies")
    /// >>> for _ in range(3):
    /// ...     _ = store.get_range("pond", start=0, end=5)
    /// >>> store.stats()["requests"], store.stats()["requests_saved"]
    /// (1, 2)
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let caches = self.caches();
        let own = py.detach(|| caches.own.stats());
        let client = caches.server.as_ref().map(|server| server.client.stats()).unwrap_or_default();
        convert::stats(py, &own, &client)
    }

    fn __repr__(&self) -> String {
        // Without options, which may be secret.
        format!("millpond.store({:?}, memory={})", self.settings.url, self.settings.memory)
    }

    fn __reduce__<'py>(
        slf: &Bound<'py, Self>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let (py, own) = (slf.py(), &slf.get().settings);
        let settings = own.to_dict(py)?;
        let helpers = py.import("millpond._pickle")?;
        let token = helpers.call_method1("token_of", (slf,))?;
        let arguments = (token, &own.url, settings).into_pyobject(py)?;
        Ok((helpers.getattr("load_store")?, arguments))
    }
}

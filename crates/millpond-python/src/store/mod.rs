//! `millpond.store`: an object store with a cache in this process, `millpond_objects::CachedStore`.
//!
//! A call goes from here by `convert` (arguments) to `operation`, which waits for its future on a thread or an asyncio
//! loop; `runtime` has the threads that run requests. `place` opens stores by URL. `body`, `listing` and `writer` are the
//! objects that calls return.

pub(crate) mod body;
pub(crate) mod convert;
pub(crate) mod failure;
pub(crate) mod listing;
pub(crate) mod operation;
pub(crate) mod place;
pub(crate) mod runtime;
pub(crate) mod writer;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use millpond_objects::{CachedStore, Freshness};
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::{
    CopyMode, CopyOptions, ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions,
    RenameOptions, RenameTargetMode, Result, WriteMultipart,
};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};

use crate::process::{self, lock};
use crate::store::body::StoredObject;
use crate::store::listing::ListStream;
use crate::store::operation::{Operation, reply};
use crate::store::runtime::OfProcess;
use crate::store::writer::{ObjectWriter, Upload};

/// Parts of a multipart upload, and of the longest put in one request. S3 has at most 10,000 parts of an object.
const PART_BYTES: usize = 8 << 20;
const PART_BYTES_MIN: usize = 5 << 20;
/// Parts on their way at a time, as obstore has it.
const PARTS_MAX: usize = 12;

struct StoreSettings {
    url: String,
    memory: u64,
    disk: Option<(PathBuf, u64)>,
    freshness: Freshness,
    options: Vec<(String, String)>,
}

/// The cache of this process, and the same below the prefix of the URL.
#[derive(Clone)]
struct Caches {
    cached: CachedStore,
    store: Arc<dyn ObjectStore>,
    prefix: Path,
}

impl StoreSettings {
    /// May wait for a disk, and runs detached from the interpreter.
    fn build(&self) -> PyResult<Caches> {
        process::watch_forks();
        let (below, prefix) = place::open(&self.url, &self.options)?;
        let mut builder =
            CachedStore::builder(below).memory_bytes(self.memory).freshness(self.freshness);
        if let Some((folder, bytes)) = &self.disk {
            builder = builder.disk(folder, *bytes);
        }
        let cached = builder.build().map_err(|error| failure::of_store(&error, &self.url))?;
        // Above the cache, as the disk tier knows a store by its name, which a prefix would hide.
        let store: Arc<dyn ObjectStore> = if prefix.as_ref().is_empty() {
            Arc::new(cached.clone())
        } else {
            Arc::new(PrefixStore::new(cached.clone(), prefix.clone()))
        };
        Ok(Caches { cached, store, prefix })
    }
}

type Slot = Arc<Mutex<Option<Caches>>>;

/// An object store with a cache in this process; `millpond.store` makes it.
///
/// Every method with a request has a form for asyncio with the suffix `_async`. Any number of threads and tasks may use a
/// store. All names are below the URL of the store.
///
/// Errors are `FileNotFoundError`, `PermissionError`, `FileExistsError` and `millpond.StoreError`, each an `OSError` with
/// the URL of the object as `filename`; `ValueError` for names and ranges that no object can have.
///
/// >>> import millpond
/// >>> store = millpond.store("memory://doc", freshness="immutable")
/// >>> _ = store.put("pond/1", b"water lilies")
/// >>> store.get_range("pond/1", start=6, length=6)
/// b'lilies'
/// >>> store.list_with_delimiter()["common_prefixes"]
/// ['pond']
/// >>> store.delete("pond/1")
#[pyclass(frozen, weakref, module = "millpond")]
pub(crate) struct Store {
    settings: StoreSettings,
    /// Locked for no wait. A child of fork puts a slot of its own in place, as a thread of the parent may be locking the
    /// parent's.
    slot: Mutex<OfProcess<Slot>>,
}

impl Store {
    /// The caches of this process: a child of fork makes its own at its first use.
    fn caches(&self, py: Python<'_>) -> PyResult<Caches> {
        let slot = {
            let mut own = lock(&self.slot);
            if !own.is_of_this_process() {
                *own = OfProcess::new(Slot::default());
            }
            Arc::clone(own.get().expect("of this process"))
        };
        // Detached, as another thread may be building.
        py.detach(|| {
            let mut built = lock(&slot);
            if let Some(caches) = &*built {
                return Ok(caches.clone());
            }
            let caches = self.settings.build()?;
            Ok(built.insert(caches).clone())
        })
    }

    fn name(&self, path: &str) -> String {
        format!("{}/{path}", self.settings.url.trim_end_matches('/'))
    }

    fn operation<W>(
        &self,
        py: Python<'_>,
        path: &str,
        work: impl FnOnce(Caches, Path) -> W,
    ) -> PyResult<Operation>
    where
        W: Future<Output = Result<operation::Reply>> + Send + 'static,
    {
        let location = convert::path(path)?;
        Ok(Operation::new(self.name(path), work(self.caches(py)?, location)))
    }

    fn start_get(
        &self,
        py: Python<'_>,
        path: &str,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Operation> {
        let (options, name) = (convert::get_options(options)?, self.name(path));
        self.operation(py, path, |caches, path| async move {
            let result = caches.store.get_opts(&path, options).await?;
            Ok(reply(move |_| Ok(StoredObject::new(name, result))))
        })
    }

    fn start_get_range(
        &self,
        py: Python<'_>,
        path: &str,
        range: Range<u64>,
    ) -> PyResult<Operation> {
        self.operation(py, path, |caches, path| async move {
            if range.is_empty() {
                // No request has an empty range. The object has to be there all the same.
                caches.store.head(&path).await?;
                return Ok(reply(|py| Ok(convert::to_bytes(py, &[])?.unbind())));
            }
            let bytes = caches.store.get_range(&path, range).await?;
            Ok(reply(move |py| Ok(convert::to_bytes(py, &[bytes])?.unbind())))
        })
    }

    fn start_get_ranges(
        &self,
        py: Python<'_>,
        path: &str,
        ranges: Vec<Range<u64>>,
    ) -> PyResult<Operation> {
        self.operation(py, path, |caches, path| async move {
            let asked: Vec<_> = ranges.iter().filter(|range| !range.is_empty()).cloned().collect();
            let mut read = if asked.is_empty() {
                caches.store.head(&path).await?;
                Vec::new().into_iter()
            } else {
                caches.store.get_ranges(&path, &asked).await?.into_iter()
            };
            let next = |range: &Range<u64>| {
                if range.is_empty() { Bytes::new() } else { read.next().unwrap_or_default() }
            };
            let all: Vec<Bytes> = ranges.iter().map(next).collect();
            Ok(reply(move |py| {
                let list = all.into_iter().map(|bytes| convert::to_bytes(py, &[bytes]));
                list.map(|bytes| Ok(bytes?.unbind())).collect::<PyResult<Vec<_>>>()
            }))
        })
    }

    fn start_head(&self, py: Python<'_>, path: &str) -> PyResult<Operation> {
        self.operation(py, path, |caches, path| async move {
            let meta = caches.store.head(&path).await?;
            Ok(reply(move |py| Ok(convert::meta(py, &meta)?.unbind())))
        })
    }

    fn start_list(&self, py: Python<'_>, prefix: Option<&str>) -> PyResult<Operation> {
        let below = convert::prefix(prefix)?;
        let caches = self.caches(py)?;
        Ok(Operation::new(self.name(prefix.unwrap_or_default()), async move {
            let list = caches.store.list_with_delimiter(below.as_ref()).await?;
            Ok(reply(move |py| Ok(convert::list_result(py, &list)?.unbind())))
        }))
    }

    fn start_put(
        &self,
        py: Python<'_>,
        path: &str,
        data: &Bound<'_, PyAny>,
        attributes: Option<&Bound<'_, PyDict>>,
        mode: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Operation> {
        let (attributes, mode) = (convert::attributes(attributes)?, convert::put_mode(mode)?);
        let data = convert::payload(data)?;
        self.operation(py, path, |caches, path| async move {
            let put = if mode == PutMode::Overwrite && data.len() > PART_BYTES {
                let options = PutMultipartOptions { attributes, ..Default::default() };
                let upload = caches.store.put_multipart_opts(&path, options).await?;
                // More than 10,000 parts of the usual length would not be accepted.
                let part_bytes = PART_BYTES.max(data.len().div_ceil(10_000));
                let mut parts = WriteMultipart::new_with_chunk_size(upload, part_bytes);
                let mut rest = data;
                while !rest.is_empty() {
                    parts.wait_for_capacity(PARTS_MAX).await?;
                    parts.put(rest.split_to(part_bytes.min(rest.len())));
                }
                parts.finish().await?
            } else {
                let options = PutOptions { mode, attributes, ..Default::default() };
                caches.store.put_opts(&path, data.into(), options).await?
            };
            Ok(reply(move |py| Ok(convert::put_result(py, &put)?.unbind())))
        })
    }

    fn start_delete(&self, py: Python<'_>, paths: &Bound<'_, PyAny>) -> PyResult<Operation> {
        let names: Vec<String> = match paths.cast::<PyString>() {
            Ok(one) => vec![one.extract()?],
            Err(_) => paths.try_iter()?.map(|one| one?.extract()).collect::<PyResult<_>>()?,
        };
        let locations =
            names.iter().map(|name| convert::path(name)).collect::<PyResult<Vec<_>>>()?;
        let caches = self.caches(py)?;
        let name = self.name(if let [one] = &names[..] { one } else { "" });
        Ok(Operation::new(name, async move {
            let locations = futures_util::stream::iter(locations.into_iter().map(Ok)).boxed();
            let mut deleted = caches.store.delete_stream(locations);
            let mut first_error = Ok(());
            // All are tried.
            while let Some(ended) = deleted.next().await {
                first_error = first_error.and(ended.map(|_| ()));
            }
            first_error?;
            Ok(reply(|py| Ok(py.None())))
        }))
    }

    fn start_copy(
        &self,
        py: Python<'_>,
        (from, to, overwrite): (&str, &str, bool),
        removes: bool,
    ) -> PyResult<Operation> {
        let to = convert::path(to)?;
        self.operation(py, from, |caches, from| async move {
            if removes {
                let target_mode =
                    if overwrite { RenameTargetMode::Overwrite } else { RenameTargetMode::Create };
                let options = RenameOptions::new().with_target_mode(target_mode);
                caches.store.rename_opts(&from, &to, options).await?;
            } else {
                let mode = if overwrite { CopyMode::Overwrite } else { CopyMode::Create };
                caches.store.copy_opts(&from, &to, CopyOptions::new().with_mode(mode)).await?;
            }
            Ok(reply(|py| Ok(py.None())))
        })
    }
}

fn freshness(given: &Bound<'_, PyAny>) -> PyResult<Freshness> {
    match given.extract::<&str>() {
        Ok("immutable") => return Ok(Freshness::Immutable),
        Ok("revalidate") => return Ok(Freshness::Revalidate),
        Ok(_) => {}
        Err(_) => {
            let seconds = given.extract::<f64>().ok();
            let age = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
            if let Some(age) = age {
                return Ok(Freshness::MaxAge(age));
            }
        }
    }
    Err(PyValueError::new_err(format!(
        "freshness {}: must be 'immutable', 'revalidate', or a number of seconds",
        given.repr()?
    )))
}

/// Options as text: numbers and truth values are written as `object_store` reads them.
fn options(given: Option<&Bound<'_, PyDict>>) -> PyResult<Vec<(String, String)>> {
    let mut list = Vec::new();
    for (name, value) in given.into_iter().flatten() {
        let name: String = name.extract()?;
        if value.is_none() {
            continue;
        }
        let text = if let Ok(flag) = value.extract::<bool>() {
            flag.to_string()
        } else if value.is_instance_of::<PyString>() || value.extract::<i64>().is_ok() {
            value.str()?.to_string()
        } else {
            return Err(PyTypeError::new_err(format!(
                "option {name:?}: must be a str, an int or a bool"
            )));
        };
        list.push((name, text));
    }
    Ok(list)
}

#[pymethods]
impl Store {
    #[new]
    #[pyo3(signature = (url, *, memory, disk, freshness, options))]
    fn new(
        py: Python<'_>,
        url: String,
        memory: u64,
        disk: Option<(PathBuf, u64)>,
        freshness: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Store> {
        let freshness = self::freshness(freshness)?;
        let options = self::options(options)?;
        let settings = StoreSettings { url, memory, disk, freshness, options };
        let store = Store { settings, slot: Mutex::new(OfProcess::new(Slot::default())) };
        store.caches(py)?; // errors of the settings are raised here
        Ok(store)
    }

    /// The URL that `millpond.store` was called with.
    #[getter]
    fn url(&self) -> &str {
        &self.settings.url
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
        self.start_get(py, path, options)?.run(py)
    }

    /// `await store.get_async(path)`: `get` for asyncio.
    #[pyo3(signature = (path, *, options=None))]
    fn get_async(
        &self,
        py: Python<'_>,
        path: &str,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<PyAny>> {
        self.start_get(py, path, options)?.coroutine(py)
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
        self.start_get_range(py, path, convert::range(start, end, length)?)?.run(py)
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
        self.start_get_range(py, path, convert::range(start, end, length)?)?.coroutine(py)
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
        self.start_get_ranges(py, path, ranges)?.run(py)
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
        self.start_get_ranges(py, path, ranges)?.coroutine(py)
    }

    /// Path, size, time of the last change, ETag and version of an object, as a dict.
    ///
    /// >>> import millpond
    /// >>> store = millpond.store("memory://doc")
    /// >>> _ = store.put("pond", b"water lilies")
    /// >>> store.head("pond")["size"]
    /// 12
    fn head(&self, py: Python<'_>, path: &str) -> PyResult<Py<PyAny>> {
        self.start_head(py, path)?.run(py)
    }

    /// `await store.head_async(path)`: `head` for asyncio.
    fn head_async(&self, py: Python<'_>, path: &str) -> PyResult<Py<PyAny>> {
        self.start_head(py, path)?.coroutine(py)
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
        py: Python<'_>,
        prefix: Option<&str>,
        offset: Option<&str>,
        chunk_size: usize,
    ) -> PyResult<ListStream> {
        let (below, offset) = (convert::prefix(prefix)?, offset.map(convert::path).transpose()?);
        let caches = self.caches(py)?;
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
        self.start_list(py, prefix)?.run(py)
    }

    /// `await store.list_with_delimiter_async(prefix)`: `list_with_delimiter` for asyncio.
    #[pyo3(signature = (prefix=None))]
    fn list_with_delimiter_async(
        &self,
        py: Python<'_>,
        prefix: Option<&str>,
    ) -> PyResult<Py<PyAny>> {
        self.start_list(py, prefix)?.coroutine(py)
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
        self.start_put(py, path, data, attributes, mode)?.run(py)
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
        self.start_put(py, path, data, attributes, mode)?.coroutine(py)
    }

    /// A writer for an object whose bytes come in pieces: see `ObjectWriter`. `buffer_size` is the length of a part, at
    /// least 5 MiB; `max_concurrency` the number of parts on their way at a time.
    ///
    /// >>> import millpond
    /// >>> with millpond.store("memory://doc").open_writer("pond") as writer:
    /// ...     writer.write(b"water")
    /// 5
    #[pyo3(signature = (path, *, attributes=None, buffer_size=PART_BYTES, max_concurrency=PARTS_MAX))]
    fn open_writer(
        &self,
        py: Python<'_>,
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
            store: self.caches(py)?.store,
            part_bytes: buffer_size,
            parts_max: max_concurrency.max(1),
            buffer: BytesMut::new(),
            parts: None,
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
        self.start_delete(py, paths)?.run(py)
    }

    /// `await store.delete_async(paths)`: `delete` for asyncio.
    fn delete_async(&self, py: Python<'_>, paths: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.start_delete(py, paths)?.coroutine(py)
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
        self.start_copy(py, (from_, to, overwrite), false)?.run(py)
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
        self.start_copy(py, (from_, to, overwrite), false)?.coroutine(py)
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
        self.start_copy(py, (from_, to, overwrite), true)?.run(py)
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
        self.start_copy(py, (from_, to, overwrite), true)?.coroutine(py)
    }

    /// Removes an object from the cache: call it after another program has changed the object.
    ///
    /// >>> import millpond
    /// >>> millpond.store("memory://doc").forget("pond")
    fn forget(&self, py: Python<'_>, path: &str) -> PyResult<()> {
        let path = convert::path(path)?;
        let caches = self.caches(py)?;
        let full: Path = caches.prefix.parts().chain(path.parts()).collect();
        py.detach(|| caches.cached.forget(&full));
        Ok(())
    }

    /// Counts since the cache of this process was made, as a dict: pages that were hits and misses, requests, requests
    /// saved, bytes from the store, memory in use, and those of the disk tier.
    ///
    /// >>> import millpond
    /// >>> store = millpond.store("memory://stats", freshness="immutable")
    /// >>> _ = store.put("pond", b"water lilies")
    /// >>> for _ in range(3):
    /// ...     _ = store.get_range("pond", start=0, end=5)
    /// >>> store.stats()["requests"], store.stats()["requests_saved"]
    /// (1, 2)
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let caches = self.caches(py)?;
        let stats = py.detach(|| caches.cached.stats());
        let dict = PyDict::new(py);
        for (name, count) in [
            ("hits", stats.hits),
            ("misses", stats.misses),
            ("bytes_from_memory", stats.bytes_from_memory),
            ("bytes_from_store", stats.bytes_from_store),
            ("requests", stats.requests),
            ("not_modified", stats.not_modified),
            ("requests_saved", stats.requests_saved),
            ("objects", stats.objects),
            ("memory_bytes", stats.memory_bytes),
            ("disk_hits", stats.disk_hits),
            ("bytes_from_disk", stats.bytes_from_disk),
            ("disk_pages", stats.disk_pages),
            ("disk_bytes_written", stats.disk_bytes_written),
            ("disk_pages_dropped", stats.disk_pages_dropped),
            ("disk_pages_damaged", stats.disk_pages_damaged),
            ("disk_errors", stats.disk_errors),
        ] {
            dict.set_item(name, count)?;
        }
        dict.set_item("disk_is_off", stats.disk_is_off)?;
        Ok(dict)
    }

    fn __repr__(&self) -> String {
        // Without options, which may be secret.
        format!("millpond.store({:?}, memory={})", self.settings.url, self.settings.memory)
    }

    fn __reduce__<'py>(
        slf: &Bound<'py, Self>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let (py, own) = (slf.py(), &slf.get().settings);
        let settings = PyDict::new(py);
        settings.set_item("memory", own.memory)?;
        settings.set_item("disk", own.disk.as_ref())?;
        match own.freshness {
            Freshness::Immutable => settings.set_item("freshness", "immutable")?,
            Freshness::MaxAge(age) => settings.set_item("freshness", age.as_secs_f64())?,
            _ => settings.set_item("freshness", "revalidate")?,
        }
        let options = PyDict::new(py);
        for (name, value) in &own.options {
            options.set_item(name, value)?;
        }
        settings.set_item("options", options)?;
        let helpers = py.import("millpond._pickle")?;
        let token = helpers.call_method1("token_of", (slf,))?;
        let arguments = (token, &own.url, settings).into_pyobject(py)?;
        Ok((helpers.getattr("load_store")?, arguments))
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let empty = OfProcess::new(Slot::default());
        let slot = std::mem::replace(self.slot.get_mut().unwrap_or_else(|e| e.into_inner()), empty);
        // The end of a cache waits for the thread of its disk tier.
        Python::try_attach(move |py| py.detach(move || drop(slot)));
    }
}

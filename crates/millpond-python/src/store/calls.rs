//! The calls of a store: from checked arguments to an [`Operation`], which a thread or an asyncio loop waits for.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
#[cfg(feature = "endpoint")]
use object_store::list::PaginatedListStore;
use object_store::path::Path;
use object_store::{
    CopyMode, CopyOptions, Error, GetOptions, GetResultPayload, ObjectStore, ObjectStoreExt,
    PutMode, PutMultipartOptions, PutOptions, RenameOptions, RenameTargetMode, Result,
};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::store::body::StoredObject;
use crate::store::caches::Caches;
use crate::store::convert;
use crate::store::operation::{self, Operation, reply};
use crate::store::parts::PartUpload;
use crate::store::settings::StoreSettings;

/// Parts of a multipart upload, and of the longest put in one request. S3 has at most 10,000 parts of an object.
pub(super) const PART_BYTES: usize = 8 << 20;
pub(super) const PART_BYTES_MIN: usize = 5 << 20;
/// Parts on their way at a time, as obstore has it.
pub(super) const PARTS_MAX: usize = 12;
/// An object store with the cache of a server, or one in this process; `millpond.store` makes it.
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
    pub(super) settings: Arc<StoreSettings>,
    /// `None` at the end.
    pub(super) caches: Option<Caches>,
}

/// A store as a bucket of an endpoint.
#[cfg(feature = "endpoint")]
pub(super) struct ServedStore {
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) lists: Option<Arc<dyn PaginatedListStore>>,
    pub(super) keeps_metadata: bool,
}
impl Store {
    pub(super) fn caches(&self) -> &Caches {
        self.caches.as_ref().expect("until the end")
    }

    pub(super) fn operation_on(
        &self,
        name: String,
        work: impl Future<Output = Result<operation::Reply>> + Send + 'static,
    ) -> Operation {
        Operation::new(name, work).watching(self.caches().server.as_ref())
    }

    /// The whole store, without the prefix of the URL, for an endpoint.
    #[cfg(feature = "endpoint")]
    pub(super) fn served(&self) -> ServedStore {
        let caches = self.caches();
        let (lists, keeps_metadata) = caches.own.of_endpoint();
        ServedStore { store: Arc::clone(&caches.whole), lists, keeps_metadata }
    }

    pub(super) fn name(&self, path: &str) -> String {
        format!("{}/{path}", self.settings.url.trim_end_matches('/'))
    }

    pub(super) fn operation<W>(
        &self,
        path: &str,
        work: impl FnOnce(Caches, Path) -> W,
    ) -> PyResult<Operation>
    where
        W: Future<Output = Result<operation::Reply>> + Send + 'static,
    {
        let location = convert::path(path)?;
        Ok(self.operation_on(self.name(path), work(self.caches().clone(), location)))
    }

    pub(super) fn start_get(
        &self,
        path: &str,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Operation> {
        let (options, name) = (convert::get_options(options)?, self.name(path));
        self.operation(path, |caches, path| async move {
            let is_head = options.head;
            let mut result = caches.store.get_opts(&path, options).await?;
            if is_head {
                // Stores announce the object's range, and some have its bytes, too.
                result.payload = GetResultPayload::Stream(stream::empty().boxed());
                result.range = 0..0;
            }
            Ok(reply(move |_| Ok(StoredObject::new(name, result))))
        })
    }
    pub(super) fn start_get_range(&self, path: &str, range: Range<u64>) -> PyResult<Operation> {
        self.operation(path, |caches, path| async move {
            if range.is_empty() {
                // No request has an empty range. The object has to be there all the same.
                caches.store.head(&path).await?;
                return Ok(reply(|py| Ok(convert::to_bytes(py, &[])?.unbind())));
            }
            let bytes = caches.store.get_range(&path, range).await?;
            Ok(reply(move |py| Ok(convert::to_bytes(py, &[bytes])?.unbind())))
        })
    }

    /// A read of the version with this ETag. `None`: of any version.
    pub(super) fn start_get_version_range(
        &self,
        path: &str,
        range: Range<u64>,
        e_tag: Option<String>,
    ) -> PyResult<Operation> {
        if e_tag.is_none() || range.is_empty() {
            return self.start_get_range(path, range);
        }
        self.operation(path, |caches, path| async move {
            let changed = || Error::Precondition {
                path: path.to_string(),
                source: "the object has changed since it was opened".into(),
            };
            // Without `if_match`, as the cache serves such reads without a request.
            let options = GetOptions::new().with_range(Some(range));
            let response = match caches.store.get_opts(&path, options).await {
                Ok(response) => response,
                // The range may be after the end of another version.
                Err(error) => {
                    let meta = caches.store.head(&path).await;
                    let is_other = meta.is_ok_and(|meta| meta.e_tag != e_tag);
                    return Err(if is_other { changed() } else { error });
                }
            };
            if response.meta.e_tag != e_tag {
                return Err(changed());
            }
            let bytes = response.bytes().await?;
            Ok(reply(move |py| Ok(convert::to_bytes(py, &[bytes])?.unbind())))
        })
    }

    pub(super) fn start_get_ranges(
        &self,
        path: &str,
        ranges: Vec<Range<u64>>,
    ) -> PyResult<Operation> {
        self.operation(path, |caches, path| async move {
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

    pub(super) fn start_head(&self, path: &str) -> PyResult<Operation> {
        self.operation(path, |caches, path| async move {
            let meta = caches.store.head(&path).await?;
            Ok(reply(move |py| Ok(convert::meta(py, &meta)?.unbind())))
        })
    }

    pub(super) fn start_list(&self, prefix: Option<&str>) -> PyResult<Operation> {
        let below = convert::prefix(prefix)?;
        let caches = self.caches().clone();
        Ok(self.operation_on(self.name(prefix.unwrap_or_default()), async move {
            let list = caches.store.list_with_delimiter(below.as_ref()).await?;
            Ok(reply(move |py| Ok(convert::list_result(py, &list)?.unbind())))
        }))
    }

    pub(super) fn start_put(
        &self,
        path: &str,
        data: &Bound<'_, PyAny>,
        attributes: Option<&Bound<'_, PyDict>>,
        mode: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Operation> {
        let (attributes, mode) = (convert::attributes(attributes)?, convert::put_mode(mode)?);
        let data = convert::payload(data)?;
        self.operation(path, |caches, path| async move {
            let put = if mode == PutMode::Overwrite && data.len() > PART_BYTES {
                let options = PutMultipartOptions { attributes, ..Default::default() };
                // More than 10,000 parts of the usual length would not be accepted.
                let part_bytes = PART_BYTES.max(data.len().div_ceil(10_000));
                let parts = PartUpload::begin(&caches.store, &path, options).await?;
                parts.complete(data, part_bytes, PARTS_MAX).await?
            } else {
                let options = PutOptions { mode, attributes, ..Default::default() };
                caches.store.put_opts(&path, data.into(), options).await?
            };
            Ok(reply(move |py| Ok(convert::put_result(py, &put)?.unbind())))
        })
    }

    pub(super) fn start_delete(&self, paths: &Bound<'_, PyAny>) -> PyResult<Operation> {
        let names: Vec<String> = match paths.cast::<PyString>() {
            Ok(one) => vec![one.extract()?],
            Err(_) => paths.try_iter()?.map(|one| one?.extract()).collect::<PyResult<_>>()?,
        };
        let locations =
            names.iter().map(|name| convert::path(name)).collect::<PyResult<Vec<_>>>()?;
        let caches = self.caches().clone();
        let name = self.name(if let [one] = &names[..] { one } else { "" });
        Ok(self.operation_on(name, async move {
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

    pub(super) fn start_copy(
        &self,
        (from, to, overwrite): (&str, &str, bool),
        removes: bool,
    ) -> PyResult<Operation> {
        let to = convert::path(to)?;
        self.operation(from, |caches, from| async move {
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

impl Drop for Store {
    fn drop(&mut self) {
        let caches = self.caches.take();
        // The end of a cache waits for the thread of its disk tier.
        Python::try_attach(move |py| py.detach(move || drop(caches)));
    }
}

//! The result of `Store.list`: an iterator over lists of metadata.

use std::sync::Arc;

use futures_util::stream::BoxStream;
use object_store::ObjectMeta;
use pyo3::prelude::*;
use tokio::sync::Mutex as TaskMutex;

use crate::store::convert;
use crate::store::failure;
use crate::store::item_source::ItemSource;
use crate::store::operation::{Operation, reply};
use crate::store::runtime::OfProcess;

type Metas = BoxStream<'static, object_store::Result<ObjectMeta>>;

/// Lists of metadata: `Store.list` returns it. An iterator, also for `async for`; `collect` returns one list.
#[pyclass(frozen, module = "millpond", name = "ListStream")]
pub(crate) struct ListStream {
    name: String,
    chunk_len: usize,
    metas: OfProcess<Arc<TaskMutex<ItemSource<ObjectMeta>>>>,
}

impl ListStream {
    pub(crate) fn new(name: String, chunk_len: usize, metas: Metas) -> ListStream {
        let metas = OfProcess::new(Arc::new(TaskMutex::new(ItemSource::new(metas))));
        ListStream { name, chunk_len, metas }
    }

    /// The next `len_max` objects at most. With `ends`, the result of an empty list is `None`.
    fn next(&self, len_max: usize, ends: bool) -> PyResult<Operation> {
        let metas = self.metas.get().ok_or_else(|| failure::of_parent(&self.name))?;
        let (metas, name) = (Arc::clone(metas), self.name.clone());
        Ok(Operation::new(self.name.clone(), async move {
            let taken = metas.lock().await.take(len_max, |_| 1).await;
            Ok(reply(move |py| {
                let taken = taken.map_err(|error| failure::of_store(&error, &name))?;
                if ends && taken.items().is_empty() {
                    return Ok(None);
                }
                let list = convert::metas(py, taken.items())?.unbind();
                taken.finish();
                Ok(Some(list))
            }))
        }))
    }
}

#[pymethods]
impl ListStream {
    /// A list of all objects that are left.
    fn collect(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.next(usize::MAX, false)?.run(py)
    }

    /// `await stream.collect_async()`: `collect` for asyncio.
    fn collect_async(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.next(usize::MAX, false)?.coroutine(py)
    }

    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        let list = self.next(self.chunk_len, true)?.run(py)?;
        Ok(Some(list).filter(|list| !list.is_none(py)))
    }

    fn __aiter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __anext__(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.next(self.chunk_len, true)?.next_coroutine(py)
    }
}

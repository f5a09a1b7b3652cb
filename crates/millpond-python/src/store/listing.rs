//! The result of `Store.list`: an iterator over lists of metadata.

use std::sync::Arc;

use futures_util::stream::BoxStream;
use object_store::ObjectMeta;
use pyo3::prelude::*;

use crate::store::convert;
use crate::store::failure;
use crate::store::item_source::ItemSource;
use crate::store::operation::{Answer, Operation};
use crate::store::runtime::OfProcess;

type Metas = BoxStream<'static, object_store::Result<ObjectMeta>>;

/// Lists of metadata: `Store.list` returns it. An iterator, also for `async for`; `collect` returns one list.
#[pyclass(frozen, module = "millpond", name = "ListStream")]
pub(crate) struct ListStream {
    name: String,
    chunk_len: usize,
    metas: OfProcess<Arc<ItemSource<ObjectMeta>>>,
}

impl ListStream {
    pub(crate) fn new(name: String, chunk_len: usize, metas: Metas) -> ListStream {
        let metas = OfProcess::new(ItemSource::new(metas, |_| 1));
        ListStream { name, chunk_len, metas }
    }

    /// The next `len_max` objects at most. With `ends`, the result of an empty list is `None`.
    fn next(&self, len_max: usize, ends: bool) -> PyResult<Operation> {
        let metas = self.metas.get().ok_or_else(|| failure::of_parent(&self.name))?;
        Ok(next_metas(self.name.clone(), Arc::clone(metas), len_max, ends))
    }
}

fn next_metas(
    name: String,
    metas: Arc<ItemSource<ObjectMeta>>,
    len_max: usize,
    ends: bool,
) -> Operation {
    Operation::new(name.clone(), async move {
        metas.fill(len_max).await;
        Ok(Answer::reply(move |py| {
            let taken = metas.try_take(len_max);
            let Some(taken) = taken.map_err(|error| failure::of_store(&error, &name))? else {
                return Ok(Answer::Repeat(next_metas(name, metas, len_max, ends)));
            };
            if ends && taken.items().is_empty() {
                return Ok(Answer::Value(py.None()));
            }
            let list = convert::metas(py, taken.items())?.into_any().unbind();
            taken.finish();
            Ok(Answer::Value(list))
        }))
    })
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

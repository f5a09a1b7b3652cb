//! The result of `Store.get`: metadata, and a body that is read once, as a whole or in pieces.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use millpond_objects::checked_body;
use object_store::{Attributes, GetResult, ObjectMeta};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::process::lock;
use crate::store::convert;
use crate::store::failure;
use crate::store::item_source::ItemSource;
use crate::store::operation::{Answer, Operation, reply};
use crate::store::runtime::OfProcess;

type Body = BoxStream<'static, object_store::Result<Bytes>>;

/// The shortest pieces of a body, unless the program asks for others.
const PIECE_BYTES: usize = 10 << 20;

/// An object, or a range of it: `Store.get` returns it.
///
/// The body can be read once: by `bytes`, by `stream`, or by iteration.
///
/// >>> import millpond
/// >>> store = millpond.store("memory://doc")
/// >>> _ = store.put("pond", b"water lilies")
/// >>> result = store.get("pond")
/// >>> result.meta["size"], result.range
/// (12, (0, 12))
/// >>> result.bytes()
/// b'water lilies'
#[pyclass(frozen, module = "millpond", name = "GetResult")]
pub(crate) struct StoredObject {
    name: String,
    meta: ObjectMeta,
    attributes: Attributes,
    range: (u64, u64),
    body: Mutex<Option<OfProcess<Body>>>,
}

impl StoredObject {
    pub(crate) fn new(name: String, result: GetResult) -> StoredObject {
        let (meta, attributes) = (result.meta.clone(), result.attributes.clone());
        let range = (result.range.start, result.range.end);
        // A file of the local store is read by the runtime's threads.
        let body = checked_body(result);
        StoredObject { name, meta, attributes, range, body: Mutex::new(Some(OfProcess::new(body))) }
    }

    fn take_body(&self) -> PyResult<OfProcess<Body>> {
        let body = lock(&self.body).take().ok_or_else(|| {
            PyValueError::new_err(format!("{}: the body was read already", self.name))
        })?;
        if body.is_of_this_process() { Ok(body) } else { Err(failure::of_parent(&self.name)) }
    }

    fn read_all(&self) -> PyResult<Operation> {
        let mut body = self.take_body()?;
        let name = self.name.clone();
        Ok(Operation::new(name.clone(), async move {
            let mut pieces = Vec::new();
            while let Some(piece) = body.value_mut().next().await {
                pieces.push(piece?);
            }
            Ok(reply(move |py| Ok(convert::to_bytes(py, &pieces)?.unbind())))
        }))
    }
}

#[pymethods]
impl StoredObject {
    /// Path, size, time of the last change, ETag and version.
    #[getter]
    fn meta<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        convert::meta(py, &self.meta)
    }

    /// The attributes of the object, such as its `Content-Type`.
    #[getter]
    fn attributes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        convert::attributes_dict(py, &self.attributes)
    }

    /// The start and the end of the bytes that are returned.
    #[getter]
    fn range(&self) -> (u64, u64) {
        self.range
    }

    /// All bytes.
    fn bytes(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.read_all()?.run(py)
    }

    /// `await result.bytes_async()`: `bytes` for asyncio.
    fn bytes_async(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.read_all()?.coroutine(py)
    }

    /// An iterator over pieces of at least `min_chunk_size` bytes, except for the last one; also for `async for`.
    #[pyo3(signature = (min_chunk_size=PIECE_BYTES))]
    fn stream(&self, min_chunk_size: usize) -> PyResult<ObjectPieces> {
        let source = ItemSource::new(self.take_body()?.into_inner(), Bytes::len);
        let (name, source) = (self.name.clone(), OfProcess::new(source));
        Ok(ObjectPieces { name, bytes_min: min_chunk_size.max(1), source })
    }

    fn __iter__(&self) -> PyResult<ObjectPieces> {
        self.stream(PIECE_BYTES)
    }

    fn __aiter__(&self) -> PyResult<ObjectPieces> {
        self.stream(PIECE_BYTES)
    }

    fn __repr__(&self) -> String {
        format!("<millpond.GetResult {}, {} bytes>", self.name, self.range.1 - self.range.0)
    }
}

/// Pieces of an object: `GetResult.stream` returns it.
#[pyclass(frozen, module = "millpond", name = "BytesStream")]
pub(crate) struct ObjectPieces {
    name: String,
    bytes_min: usize,
    source: OfProcess<Arc<ItemSource<Bytes>>>,
}

impl ObjectPieces {
    /// The next piece; `None` at the end.
    fn next(&self) -> PyResult<Operation> {
        let source = self.source.get().ok_or_else(|| failure::of_parent(&self.name))?;
        Ok(next_piece(self.name.clone(), Arc::clone(source), self.bytes_min))
    }
}

fn next_piece(name: String, source: Arc<ItemSource<Bytes>>, bytes_min: usize) -> Operation {
    Operation::new(name.clone(), async move {
        source.fill(bytes_min).await;
        Ok(Answer::reply(move |py| {
            let taken = source.try_take(bytes_min);
            let Some(taken) = taken.map_err(|error| failure::of_store(&error, &name))? else {
                return Ok(Answer::Repeat(next_piece(name, source, bytes_min)));
            };
            if taken.items().iter().all(Bytes::is_empty) {
                return Ok(Answer::Value(py.None()));
            }
            let bytes = convert::to_bytes(py, taken.items())?.into_any().unbind();
            taken.finish();
            Ok(Answer::Value(bytes))
        }))
    })
}

#[pymethods]
impl ObjectPieces {
    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        let piece = self.next()?.run(py)?;
        Ok(Some(piece).filter(|piece| !piece.is_none(py)))
    }

    fn __aiter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __anext__(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.next()?.next_coroutine(py)
    }
}

//! `Store.open_writer`: an object written in pieces. Short ones are one put, longer ones a multipart upload.
//!
//! - **U1** A write that is interrupted may have taken its bytes, which the program can't know. If the program repeated it, the
//!   object could have them twice. So it counts as failed.
//! - **U2** A part that failed is lost. So a failed write ends the upload: later calls fail, and no object is made. After a close that
//!   failed or was interrupted they fail as well, as the object may be missing.
//! - **U3** A writer that is dropped, or whose close is interrupted, drops the upload, and so aborts it (parts.MU1).

use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use bytes::{Bytes, BytesMut};
use object_store::path::Path;
use object_store::{Attributes, Error, ObjectStore, PutMultipartOptions, PutOptions, Result};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tokio::sync::Mutex as TaskMutex;

use crate::store::convert;
use crate::store::failure;
use crate::store::operation::{Operation, reply};
use crate::store::parts::PartUpload;
use crate::store::runtime::OfProcess;

pub(crate) struct Upload {
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) path: Path,
    pub(crate) attributes: Attributes,
    pub(crate) first_part_bytes: usize,
    pub(crate) parts_sent: u32,
    pub(crate) parts_max: usize,
    pub(crate) buffer: BytesMut,
    pub(crate) parts: Option<PartUpload>,
    /// The earlier call that has failed, and its error (U2).
    pub(crate) failed: Option<(&'static str, String)>,
    /// A close has begun, or the upload was aborted.
    pub(crate) is_ended: bool,
}

/// The length of a part by its number. S3 has at most 10,000 parts, and objects of 5 TiB. The first parts have one length, as
/// some stores need it of all; then it doubles, so that the last ones reach 5 TiB.
pub(crate) fn part_bytes(first_part_bytes: usize, number: u32) -> usize {
    const EQUAL: u32 = 5000;
    const DOUBLED_EACH: u32 = 500;
    let doublings = number.saturating_sub(EQUAL - DOUBLED_EACH) / DOUBLED_EACH;
    // S3 has parts of 5 GiB at most.
    first_part_bytes.saturating_mul(1 << doublings.min(10)).min(first_part_bytes.max(5 << 30))
}

/// [`part_bytes`], for a test.
#[pyfunction]
pub(crate) fn _part_bytes(first_part_bytes: usize, number: u32) -> usize {
    part_bytes(first_part_bytes, number)
}

impl Upload {
    async fn write(&mut self, data: Bytes) -> Result<()> {
        self.check_earlier_calls()?;
        // U1: a drop of this future leaves it.
        self.failed = Some(("write", "it was interrupted".to_owned()));
        let written = self.write_parts(data).await;
        self.failed = written.as_ref().err().map(|error| ("write", error.to_string()));
        written
    }

    fn check_earlier_calls(&self) -> Result<()> {
        match &self.failed {
            Some((call, error)) => Err(Error::Generic {
                store: "millpond",
                source: format!("an earlier {call} of this object has failed: {error}").into(),
            }),
            None => Ok(()),
        }
    }

    async fn write_parts(&mut self, data: Bytes) -> Result<()> {
        self.buffer.extend_from_slice(&data);
        if self.buffer.len() < part_bytes(self.first_part_bytes, self.parts_sent) {
            return Ok(());
        }
        let parts = match &mut self.parts {
            Some(parts) => parts,
            None => {
                let options = PutMultipartOptions {
                    attributes: self.attributes.clone(),
                    ..Default::default()
                };
                self.parts.insert(PartUpload::begin(&self.store, &self.path, options).await?)
            }
        };
        loop {
            let part_bytes = part_bytes(self.first_part_bytes, self.parts_sent);
            if self.buffer.len() < part_bytes {
                return Ok(());
            }
            // Longer parts take no more memory on their way than the first ones, as far as one at a time permits that.
            let parts_max = self.parts_max.saturating_mul(self.first_part_bytes) / part_bytes;
            parts.wait_for_capacity(parts_max.max(1)).await?;
            parts.put(self.buffer.split_to(part_bytes).freeze());
            self.parts_sent += 1;
        }
    }

    /// `None`: an earlier call has ended the upload.
    async fn close(&mut self) -> Result<Option<object_store::PutResult>> {
        if let Err(error) = self.check_earlier_calls() {
            // The caller gets the error of the earlier call, which is the cause.
            let _ = self.abort().await;
            return Err(error);
        }
        if mem::replace(&mut self.is_ended, true) {
            return Ok(None);
        }
        // As in `write`.
        self.failed = Some(("close", "it was interrupted".to_owned()));
        let put = self.put_rest().await;
        self.failed = put.as_ref().err().map(|error| ("close", error.to_string()));
        put.map(Some)
    }

    async fn put_rest(&mut self) -> Result<object_store::PutResult> {
        let rest = mem::take(&mut self.buffer).freeze();
        let Some(parts) = self.parts.take() else {
            let attributes = mem::take(&mut self.attributes);
            let options = PutOptions { attributes, ..Default::default() };
            return self.store.put_opts(&self.path, rest.into(), options).await;
        };
        let part_bytes = part_bytes(self.first_part_bytes, self.parts_sent);
        parts.complete(rest, part_bytes, self.parts_max).await
    }

    async fn abort(&mut self) -> Result<()> {
        self.is_ended = true;
        self.buffer.clear();
        match self.parts.take() {
            Some(parts) => parts.abort().await,
            None => Ok(()),
        }
    }
}

/// An object that is written in pieces: `Store.open_writer` returns it.
///
/// The object exists when `close` has returned, and not before. A `with` block that ends by an exception calls `abort`.
///
/// >>> import millpond
/// >>> store = millpond.store("memory://doc")
/// >>> with store.open_writer("log") as writer:
/// ...     writer.write(b"a pond")
/// ...     writer.write(b", a mill")
/// 6
/// 8
/// >>> store.get("log").bytes()
/// b'a pond, a mill'
#[pyclass(frozen, module = "millpond", name = "ObjectWriter")]
pub(crate) struct ObjectWriter {
    name: String,
    closed: AtomicBool,
    upload: OfProcess<Arc<TaskMutex<Upload>>>,
}

impl ObjectWriter {
    pub(crate) fn new(name: String, upload: Upload) -> ObjectWriter {
        let upload = OfProcess::new(Arc::new(TaskMutex::new(upload)));
        ObjectWriter { name, closed: AtomicBool::new(false), upload }
    }

    fn upload(&self) -> PyResult<Arc<TaskMutex<Upload>>> {
        let upload = self.upload.get().ok_or_else(|| failure::of_parent(&self.name))?;
        Ok(Arc::clone(upload))
    }
}

#[pymethods]
impl ObjectWriter {
    /// Writes the bytes of a buffer; returns their number. Waits while many parts are on their way.
    #[pyo3(signature = (data, /))]
    fn write(&self, py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<usize> {
        if self.closed() {
            return Err(PyValueError::new_err(format!("{}: the writer is closed", self.name)));
        }
        let upload = self.upload()?;
        let data = convert::payload(data)?;
        let len = data.len();
        let work = async move {
            upload.lock().await.write(data).await?;
            Ok(reply(|py| Ok(py.None())))
        };
        Operation::new(self.name.clone(), work).run(py)?;
        Ok(len)
    }

    /// Completes the object; returns its ETag and version. After a close or an abort a further call has no effect.
    ///
    /// After a write that has failed, removes the uploaded parts and raises the error: no object is made. After a close that has
    /// failed or was interrupted, each further one raises the error.
    fn close(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let upload = self.upload()?;
        self.closed.store(true, Relaxed);
        let work = async move {
            let put = upload.lock().await.close().await?;
            Ok(reply(move |py| {
                put.map(|put| Ok(convert::put_result(py, &put)?.unbind())).transpose()
            }))
        };
        Operation::new(self.name.clone(), work).run(py)
    }

    /// Removes the uploaded parts; no object is made.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let upload = self.upload()?;
        if self.closed.swap(true, Relaxed) {
            return Ok(());
        }
        let work = async move {
            upload.lock().await.abort().await?;
            Ok(reply(|py| Ok(py.None())))
        };
        Operation::new(self.name.clone(), work).run(py).map(|_| ())
    }

    /// Whether `close` or `abort` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.closed.load(Relaxed)
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*details))]
    fn __exit__(&self, py: Python<'_>, details: &Bound<'_, PyTuple>) -> PyResult<()> {
        let is_normal = details.iter().next().is_none_or(|kind| kind.is_none());
        if is_normal { self.close(py).map(|_| ()) } else { self.abort(py) }
    }
}

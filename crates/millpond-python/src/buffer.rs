//! Memory of Python objects: new bytes objects, and buffers by the buffer protocol.
//!
//! `Py_buffer` is part of the stable ABI from Python 3.11 on. Python 3.10 exports the same two functions with the same
//! layout, but does not promise it to extension modules. Version 3.10 gets no more changes, so its layout is final; the
//! tests run with it. pyo3 has no binding for both, so it is here.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;

use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi::{self, Py_ssize_t, PyObject};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// `Py_buffer` of Python's `object.h`.
#[repr(C)]
struct RawBuffer {
    buf: *mut c_void,
    obj: *mut PyObject,
    len: Py_ssize_t,
    itemsize: Py_ssize_t,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut Py_ssize_t,
    strides: *mut Py_ssize_t,
    suboffsets: *mut Py_ssize_t,
    internal: *mut c_void,
}

unsafe extern "C" {
    fn PyObject_GetBuffer(object: *mut PyObject, view: *mut RawBuffer, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut RawBuffer);
}

const PYBUF_SIMPLE: c_int = 0;
const PYBUF_WRITABLE: c_int = 1;
/// Any buffer.
const PYBUF_FULL_RO: c_int = 0x11c;

/// The contiguous memory of an object. It stays where it is, and valid, until this is dropped: the object refuses to
/// resize or free exported memory. Other threads may change its bytes.
pub(crate) struct PyMemory {
    // Boxed: some exporters point into the struct itself.
    view: Box<RawBuffer>,
}

// SAFETY: the fields are only read, and `drop` attaches to the interpreter.
unsafe impl Send for PyMemory {}
// SAFETY: as above.
unsafe impl Sync for PyMemory {}

impl PyMemory {
    /// Memory to read from; a `TypeError` if it is not contiguous.
    pub(crate) fn readable(object: &Bound<'_, PyAny>) -> PyResult<PyMemory> {
        PyMemory::new(object, PYBUF_SIMPLE)
            .map_err(|error| unsuitable(object, error, "a contiguous buffer"))
    }

    /// Memory to write to; a `TypeError` if the object permits no writes, as `io.FileIO.readinto` raises it.
    pub(crate) fn writable(object: &Bound<'_, PyAny>) -> PyResult<PyMemory> {
        PyMemory::new(object, PYBUF_WRITABLE)
            .map_err(|error| unsuitable(object, error, "a writable contiguous buffer"))
    }

    fn new(object: &Bound<'_, PyAny>, flags: c_int) -> PyResult<PyMemory> {
        let mut view = Box::new(RawBuffer {
            buf: ptr::null_mut(),
            obj: ptr::null_mut(),
            len: 0,
            itemsize: 0,
            readonly: 0,
            ndim: 0,
            format: ptr::null_mut(),
            shape: ptr::null_mut(),
            strides: ptr::null_mut(),
            suboffsets: ptr::null_mut(),
            internal: ptr::null_mut(),
        });
        // SAFETY: a living object, attached to the interpreter, and a struct to be filled.
        if unsafe { PyObject_GetBuffer(object.as_ptr(), &raw mut *view, flags) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        Ok(PyMemory { view })
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.view.buf.cast()
    }

    pub(crate) fn len(&self) -> usize {
        self.view.len.unsigned_abs()
    }

    pub(crate) fn iovec(&self) -> libc::iovec {
        libc::iovec { iov_base: self.view.buf, iov_len: self.len() }
    }
}

/// A `TypeError` if the object has a buffer of another kind. Exporters raise `BufferError` for that, or, as numpy, `ValueError`.
fn unsuitable(object: &Bound<'_, PyAny>, error: PyErr, needed: &str) -> PyErr {
    let py = object.py();
    let may_be =
        error.is_instance_of::<PyBufferError>(py) || error.is_instance_of::<PyValueError>(py);
    if !may_be || PyMemory::new(object, PYBUF_FULL_RO).is_err() {
        return error;
    }
    let name = object.get_type().to_string();
    PyTypeError::new_err(format!("{needed} is needed, not {name}: {error}"))
}

impl Drop for PyMemory {
    fn drop(&mut self) {
        // At the end of the interpreter the memory is not released any more.
        Python::try_attach(|_| {
            // SAFETY: filled by `PyObject_GetBuffer`, and released once.
            unsafe { PyBuffer_Release(&raw mut *self.view) };
        });
    }
}

/// A bytes object whose bytes are still to be written.
pub(crate) fn new_bytes(py: Python<'_>, len: usize) -> PyResult<Bound<'_, PyBytes>> {
    let len = Py_ssize_t::try_from(len).map_err(|_| PyValueError::new_err("too many bytes"))?;
    // SAFETY: attached; a null pointer asks for memory that is not initialised; the result is a bytes object, or null.
    unsafe {
        let made = ffi::PyBytes_FromStringAndSize(std::ptr::null(), len);
        Ok(Bound::from_owned_ptr_or_err(py, made)?.cast_into_unchecked())
    }
}

pub(crate) fn start_of(bytes: &Bound<'_, PyBytes>) -> *mut u8 {
    // SAFETY: a living bytes object.
    unsafe { ffi::PyBytes_AsString(bytes.as_ptr()).cast() }
}

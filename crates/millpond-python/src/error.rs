//! Errors of the engine as exceptions of Python.

use std::fmt::Display;
use std::path::Path;

use millpond::Error;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;

/// `OSError` with errno, text and file name; Python makes it the subclass of the errno, as `FileNotFoundError`.
pub(crate) fn os_error(errno: i32, text: impl Display, path: Option<&Path>) -> PyErr {
    match path {
        Some(path) => {
            PyOSError::new_err((errno, text.to_string(), path.to_path_buf().into_os_string()))
        }
        None => PyOSError::new_err((errno, text.to_string())),
    }
}

/// The exception for an error of the engine.
pub(crate) fn of_engine(error: &Error, path: Option<&Path>) -> PyErr {
    let errno = error.errno();
    match error {
        // Opening names no bytes: the text is the kernel's, as for `io.open`.
        Error::Io { op: millpond::Op::Open, .. } | Error::NotRegular { directory: true } => {
            os_error(errno, strerror(errno), path)
        }
        Error::InvalidInput { what, .. } if path.is_none() => PyValueError::new_err(what.clone()),
        other => os_error(errno, other, path),
    }
}

/// The kernel's text, without the number that Rust adds.
fn strerror(errno: i32) -> String {
    let text = std::io::Error::from_raw_os_error(errno).to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}

pub(crate) fn closed() -> PyErr {
    PyValueError::new_err("I/O operation on closed file")
}

/// `io.UnsupportedOperation`, which is both an `OSError` and a `ValueError`.
pub(crate) fn unsupported(py: Python<'_>, what: &str) -> PyErr {
    let exception = py.import("io").and_then(|io| io.getattr("UnsupportedOperation"));
    match exception.and_then(|class| class.call1((what,))) {
        Ok(instance) => PyErr::from_value(instance),
        Err(error) => error,
    }
}

/// An offset of a file, from a number of Python.
pub(crate) fn offset_of(offset: i64, path: &Path) -> PyResult<u64> {
    u64::try_from(offset)
        .map_err(|_| os_error(libc::EINVAL, format_args!("negative offset {offset}"), Some(path)))
}

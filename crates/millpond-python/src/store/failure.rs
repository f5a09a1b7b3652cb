//! Errors of object stores as exceptions of Python.

use std::error::Error as StdError;
use std::io;

use object_store::Error;
use pyo3::create_exception;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;

create_exception!(
    millpond,
    StoreError,
    PyOSError,
    "A request to an object store failed, with `errno`, a text, and the object's URL as `filename`.\n\n\
     If there is a subclass of `OSError` for the reason, such as `FileNotFoundError`, it is raised instead."
);
create_exception!(
    millpond,
    PreconditionError,
    StoreError,
    "The object is not in the state that the call asked for, for example by `if_match`, or it changed during a read."
);
create_exception!(
    millpond,
    NotModifiedError,
    StoreError,
    "The object is still the one that the call gave in `if_none_match`."
);

/// The exception for a failed call for the object `name`.
pub(crate) fn of_store(error: &Error, name: &str) -> PyErr {
    let text = error.to_string();
    // A server's answer follows, in many lines of XML.
    let text = text.lines().next().unwrap_or_default().to_owned();
    let arguments = |errno: i32| (errno, text.clone(), name.to_owned());
    match error {
        Error::NotFound { .. } => {
            PyOSError::new_err((libc::ENOENT, "No such object", name.to_owned()))
        }
        Error::AlreadyExists { .. } => {
            PyOSError::new_err((libc::EEXIST, "The object exists", name.to_owned()))
        }
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => {
            PyOSError::new_err(arguments(libc::EACCES))
        }
        Error::InvalidPath { .. } => PyValueError::new_err(format!("{name}: {text}")),
        Error::UnknownConfigurationKey { .. } => PyValueError::new_err(text),
        Error::Precondition { .. } => PreconditionError::new_err(arguments(libc::ESTALE)),
        Error::NotModified { .. } => NotModifiedError::new_err(arguments(libc::EEXIST)),
        Error::NotSupported { .. } | Error::NotImplemented { .. } => {
            StoreError::new_err(arguments(libc::ENOTSUP))
        }
        other => match kernel_errno(other) {
            // Python has a class for each of these.
            Some(errno @ (libc::ENOENT | libc::EACCES | libc::EPERM | libc::EEXIST)) => {
                PyOSError::new_err(arguments(errno))
            }
            errno => StoreError::new_err(arguments(errno.unwrap_or(libc::EIO))),
        },
    }
}

/// The errno of the system call at the end of the chain of causes, if there is one.
fn kernel_errno(error: &Error) -> Option<i32> {
    let mut cause: Option<&(dyn StdError + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(errno) = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error) {
            return Some(errno);
        }
        cause = error.source();
    }
    None
}

/// For an object that was made before a fork, and is used in the child.
pub(crate) fn of_parent(name: &str) -> PyErr {
    let text = "made before a fork, and can't be used in the child";
    StoreError::new_err((libc::ESTALE, text, name.to_owned()))
}

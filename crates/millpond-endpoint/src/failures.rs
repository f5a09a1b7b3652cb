//! Errors of a store as errors of S3.

use std::error::Error as StdError;

use object_store::Error;
use s3s::{S3Error, S3ErrorCode, s3_error};

/// The error and its sources. Some sources repeat the text of theirs.
fn chain(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = error.source();
    }
    text
}

/// An error of a read, a list or an unconditional write.
pub(crate) fn failure(error: Error) -> S3Error {
    let code = match &error {
        Error::NotFound { .. } => S3ErrorCode::NoSuchKey,
        Error::Precondition { .. } | Error::AlreadyExists { .. } => S3ErrorCode::PreconditionFailed,
        Error::NotModified { .. } => S3ErrorCode::NotModified,
        Error::NotSupported { .. } | Error::NotImplemented { .. } => S3ErrorCode::NotImplemented,
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => S3ErrorCode::AccessDenied,
        Error::InvalidPath { .. } => S3ErrorCode::InvalidArgument,
        _ => S3ErrorCode::InternalError,
    };
    S3Error::with_message(code, format!("the store: {}", chain(&error)))
}

/// An error of a write. A store may report a conflict (409, outcome unknown) as "exists already". (The number alone may
/// be a part of a path, a port or a time.)
pub(crate) fn write_failure(error: Error) -> S3Error {
    let text = chain(&error);
    if matches!(error, Error::AlreadyExists { .. } | Error::Precondition { .. })
        && text.contains("status code: 409 ")
    {
        return s3_error!(ConditionalRequestConflict, "the store: {text}");
    }
    failure(error)
}

/// A key that `object_store` has no path for.
pub(crate) fn unsupported_key(key: &str) -> S3Error {
    s3_error!(
        InvalidArgument,
        "key {key:?}: object stores behind this endpoint have no keys with empty segments, with a slash at either end, \
         with segments `.` or `..`, or with control characters"
    )
}

/// Refuses a feature that the store's interface does not have.
pub(crate) fn refuse(features: &[(&str, bool)]) -> Result<(), S3Error> {
    match features.iter().find(|(_, present)| *present) {
        None => Ok(()),
        Some((name, _)) => Err(s3_error!(NotImplemented, "{name} is not implemented")),
    }
}

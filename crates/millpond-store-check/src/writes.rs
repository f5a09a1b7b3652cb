//! Single writes and reads, and their outcomes.

use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use object_store::path::Path;
use object_store::{
    Attribute, Attributes, Error, GetOptions, ObjectStore, ObjectStoreExt, PutMode, PutOptions,
    PutPayload, UpdateVersion,
};

/// The metadata attribute with the ID of the object's write.
const ID: Attribute = Attribute::Metadata(std::borrow::Cow::Borrowed("millpond-check-id"));

/// Outcome of a conditional write.
#[derive(Debug)]
pub(crate) enum WriteOutcome {
    Done(UpdateVersion),
    /// The condition did not hold: nothing was written.
    Refused,
    NotOffered(String),
    /// The object may or may not have been written: errors, timeouts, and conflicts (409).
    Unknown(String),
}

/// An object that was read.
#[derive(Debug)]
pub(crate) struct StoredObject {
    /// ID of the write that created it, from its content.
    pub id: String,
    /// The same from its metadata, if the store supports them.
    pub id_by_metadata: Option<String>,
    pub version: UpdateVersion,
}

/// A unique ID: no write of this process, or of another process or machine, has the same.
pub(crate) fn new_id() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let nanos = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos());
    format!("{nanos:x}-{:x}-{:x}", std::process::id(), COUNT.fetch_add(1, Relaxed))
}

/// Whether the error is a reply with this status. The number alone may be a part of a time, a port or a path.
fn has_status(error: &Error, status: u16) -> bool {
    error_chain(error).contains(&format!("status code: {status} "))
}

/// Settings of requests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Writer {
    /// Whether to put IDs into the metadata as well, which some stores do not support.
    pub metadata: bool,
    pub timeout: Duration,
}

impl Writer {
    pub async fn put(
        &self,
        store: &dyn ObjectStore,
        at: &Path,
        id: &str,
        mode: PutMode,
    ) -> WriteOutcome {
        let create = matches!(mode, PutMode::Create);
        let mut attributes = Attributes::new();
        if self.metadata {
            attributes.insert(ID, id.to_owned().into());
        }
        let options = PutOptions { mode, attributes, ..PutOptions::default() };
        let put = store.put_opts(at, PutPayload::from(id.to_owned()), options);
        let Ok(result) = tokio::time::timeout(self.timeout, put).await else {
            return WriteOutcome::Unknown(format!("no answer within {:?}", self.timeout));
        };
        match result {
            Ok(put) => WriteOutcome::Done(UpdateVersion { e_tag: put.e_tag, version: put.version }),
            Err(error @ Error::NotImplemented { .. }) => {
                WriteOutcome::NotOffered(error_chain(&error))
            }
            // The client reports a conflict with a concurrent write as "exists" as well; it is undecided.
            Err(error @ Error::AlreadyExists { .. }) if has_status(&error, 409) => {
                WriteOutcome::Unknown(error_chain(&error))
            }
            Err(Error::AlreadyExists { .. }) if create => WriteOutcome::Refused,
            Err(Error::Precondition { .. }) if !create => WriteOutcome::Refused,
            Err(error) if has_status(&error, 501) => WriteOutcome::NotOffered(error_chain(&error)),
            Err(error) => WriteOutcome::Unknown(error_chain(&error)),
        }
    }

    /// Reads the object at `at`, if there is one. Tries three times before it returns an error.
    pub async fn read(
        &self,
        store: &dyn ObjectStore,
        at: &Path,
    ) -> Result<Option<StoredObject>, String> {
        let mut failed = String::new();
        for _ in 0..3 {
            match tokio::time::timeout(self.timeout, read_once(store, at)).await {
                Ok(Ok(held)) => return Ok(Some(held)),
                Ok(Err(Error::NotFound { .. })) => return Ok(None),
                Ok(Err(error)) => failed = error_chain(&error),
                Err(_) => failed = format!("no answer within {:?}", self.timeout),
            }
        }
        Err(format!("{at} can't be read: {failed}"))
    }

    /// Sends a conditional read; returns the HTTP status.
    pub async fn read_if(
        &self,
        store: &dyn ObjectStore,
        at: &Path,
        options: GetOptions,
    ) -> Result<&'static str, String> {
        match tokio::time::timeout(self.timeout, store.get_opts(at, options)).await {
            Ok(Ok(_)) => Ok("200"),
            Ok(Err(Error::NotModified { .. })) => Ok("304"),
            Ok(Err(Error::Precondition { .. })) => Ok("412"),
            Ok(Err(error)) => Err(error_chain(&error)),
            Err(_) => Err(format!("no answer within {:?}", self.timeout)),
        }
    }
}

async fn read_once(store: &dyn ObjectStore, at: &Path) -> object_store::Result<StoredObject> {
    let answer = store.get(at).await?;
    let version =
        UpdateVersion { e_tag: answer.meta.e_tag.clone(), version: answer.meta.version.clone() };
    let id_by_metadata = answer.attributes.get(&ID).map(|id| id.to_string());
    let id = String::from_utf8_lossy(&answer.bytes().await?).into_owned();
    Ok(StoredObject { id, id_by_metadata, version })
}

/// The text of an error with its causes, which contain the status.
fn error_chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text.chars().take(400).collect()
}

pub(crate) fn or<T>(found: Option<T>, else_: impl Display) -> Result<T, String> {
    found.ok_or_else(|| else_.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Incident: a lost connection after "11.753501ms" counted as a store without conditional writes (501).
    #[test]
    fn numbers_in_a_message_are_no_status() {
        let error = |text: &str| Error::Generic { store: "S3", source: text.to_owned().into() };
        assert!(!has_status(&error("PUT http://127.0.0.1:40501/501 in 11.753501ms - lost"), 501));
        let reply = "Server returned non-2xx status code: 501 Not Implemented: ";
        assert!(has_status(&error(reply), 501) && !has_status(&error(reply), 409));
    }
}

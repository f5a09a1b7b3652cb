//! What all calls for local files share: where they wait for the disk, their errors, and the ETags.

use std::fmt;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::UNIX_EPOCH;

use object_store::path::Path;
use object_store::{Error, Result};
use tokio::runtime::Handle;
use tokio::task::JoinError;

/// Runs a function that waits for the disk, beside a runtime's threads if there is a runtime.
pub(super) async fn wait_for<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    let Ok(runtime) = Handle::try_current() else { return Ok(work()) };
    let failed = |error: JoinError| Error::Generic { store: crate::NAME, source: error.into() };
    runtime.spawn_blocking(work).await.map_err(failed)
}

/// An error of a call, which names the object. The kernel's error is its source.
#[derive(Debug)]
pub(super) struct FileError {
    call: &'static str,
    location: Path,
    error: io::Error,
}

impl FileError {
    pub(super) fn of(call: &'static str, location: &Path, error: io::Error) -> Error {
        let source = FileError { call, location: location.clone(), error };
        Error::Generic { store: crate::NAME, source: source.into() }
    }
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}: {}", self.call, self.location, self.error)
    }
}

impl std::error::Error for FileError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

/// The ETag that `LocalFileSystem` gives the file.
pub(super) fn e_tag(metadata: &Metadata) -> String {
    let modified = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    let (modified, inode) = (modified.unwrap_or_default().as_micros(), metadata.ino());
    let plain = format!("{inode:x}-{modified:x}-{:x}", metadata.len());
    if cfg!(feature = "object_store_0_14") { format!("\"{plain}\"") } else { plain }
}

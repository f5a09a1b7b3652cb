//! A store of local files whose copies are files of their own.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::path::{Path as FilePath, PathBuf};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::BoxStream;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    CopyMode, CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result,
};
use tokio::runtime::Handle;
use tokio::task::JoinError;

/// A [`LocalFileSystem`] whose copies are files of their own.
///
/// `LocalFileSystem` copies by a hard link: a program that writes to one of the two files then changes both, they have one ETag,
/// and a second copy of the same object leaves a file with another name. A copy is not synced, also by a store
/// [`with_fsync`](LocalFileSystem::with_fsync).
///
/// # Examples
///
/// ```
/// use millpond_objects::LocalFiles;
/// use object_store::{ObjectStoreExt, local::LocalFileSystem, path::Path};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
///
/// let store = LocalFiles::new(LocalFileSystem::new_with_prefix(folder.path())?);
/// let (pond, copy) = (Path::from("pond"), Path::from("copy"));
/// store.put(&pond, "water lilies".into()).await?;
/// store.copy(&pond, &copy).await?;
/// assert_ne!(store.head(&pond).await?.e_tag, store.head(&copy).await?.e_tag);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct LocalFiles(LocalFileSystem);

impl LocalFiles {
    /// The same files.
    #[must_use]
    pub fn new(files: LocalFileSystem) -> LocalFiles {
        LocalFiles(files)
    }
}

/// The same name as that of the `LocalFileSystem`: a server and a disk tier know the store by it.
impl fmt::Display for LocalFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[async_trait]
impl ObjectStore for LocalFiles {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        self.0.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.0.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.0.get_opts(location, options).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.0.get_ranges(location, ranges).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.0.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.0.list(prefix)
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.0.list_with_offset(prefix, offset)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.0.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        let (files, from, to) = (self.0.clone(), from.clone(), to.clone());
        let copy = move || copy(&files, &from, &to, options.mode);
        let Ok(runtime) = Handle::try_current() else { return copy() };
        let failed = |error: JoinError| Error::Generic { store: crate::NAME, source: error.into() };
        runtime.spawn_blocking(copy).await.unwrap_or_else(|error| Err(failed(error)))
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.0.rename_opts(from, to, options).await
    }
}

/// Copies an object to a file of its own, as a whole or not at all. Waits for the disk.
fn copy(files: &LocalFileSystem, from: &Path, to: &Path, mode: CopyMode) -> Result<()> {
    let (source, target) = (files.path_to_filesystem(from)?, files.path_to_filesystem(to)?);
    let not_found = |source: Box<io::Error>| Error::NotFound { path: from.to_string(), source };
    let failed = |source: io::Error| Error::Generic { store: crate::NAME, source: source.into() };
    let mut data =
        OpenOptions::new().read(true).open(source).map_err(|error| match error.kind() {
            ErrorKind::NotFound => not_found(error.into()),
            _ => failed(error),
        })?;
    if data.metadata().map_err(failed)?.is_dir() {
        return Err(not_found(Box::new(ErrorKind::IsADirectory.into())));
    }
    write_copy(&mut data, &target, mode).map_err(|error| match (error.kind(), mode) {
        (ErrorKind::AlreadyExists, CopyMode::Create) => {
            Error::AlreadyExists { path: to.to_string(), source: error.into() }
        }
        _ => failed(error),
    })
}

fn write_copy(data: &mut fs::File, target: &FilePath, mode: CopyMode) -> io::Result<()> {
    let (staged, mut file) = stage(target)?;
    let copied = io::copy(data, &mut file).and_then(|_| match mode {
        CopyMode::Overwrite => fs::rename(&staged, target),
        CopyMode::Create => fs::hard_link(&staged, target),
    });
    if copied.is_err() || matches!(mode, CopyMode::Create) {
        // The first error is that of the caller.
        let _ = fs::remove_file(&staged);
    }
    copied
}

/// A new file beside the target, with a name that lists leave out.
fn stage(target: &FilePath) -> io::Result<(PathBuf, fs::File)> {
    let mut number = 0u64;
    loop {
        let mut name = target.as_os_str().to_owned();
        name.push(format!("#{number}"));
        match OpenOptions::new().write(true).create_new(true).open(&name) {
            Ok(file) => return Ok((name.into(), file)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
            // A store that removes empty folders may also remove the new one again.
            Err(error) if error.kind() == ErrorKind::NotFound => match target.parent() {
                Some(folder) => fs::create_dir_all(folder)?,
                None => return Err(error),
            },
            Err(error) => return Err(error),
        }
    }
}
